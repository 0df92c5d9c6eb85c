"""Verification rules: when a drafted token is kept, and what replaces it when it is not.

Notation, as in the paper: p is the draft's law, q the verifier's, h the law a rule aims at, x the drafted token; all
laws are f32[V] after temperature and filters. A rule is deterministic and batch-free: randomness belongs to verify.py,
batching to `vmap`. Its numbers are leaves of a pytree, so a sweep over them never compiles anew.

One round of speculative decoding keeps x with probability `accept_prob`, and otherwise emits a draw from `recovery`.
To add a rule, write one class with these three methods.
"""

from typing import ClassVar, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import divergence
from cactus_jax.sampling import check_number


class VerificationRule(Protocol):
  """The contract of a rule."""

  lossless: ClassVar[bool]  # whether the emitted law is exactly q

  def accept_prob(self, p, q, x) -> jax.Array:
    """f32[] in [0, 1]: probability of keeping the drafted token x, where p[x] > 0; 0 where q[x] is 0."""

  def recovery(self, p, q, x) -> jax.Array:
    """f32[V]: law of the token emitted when x is rejected; always a law, even when no residual is left."""

  def output_law(self, p, q) -> jax.Array:
    """f32[V]: exact law of the emitted token, over the draw of x ~ p, its acceptance and its recovery."""


def _ratio(h_x, p_x):
  """min(1, h_x / p_x), and 0 where h_x is; nothing but h_x < p_x is ever divided."""
  kept = h_x >= p_x
  return jnp.where(kept & (h_x > 0), 1.0, h_x / jnp.where(kept, 1.0, p_x))


def _residual(weights, q, x):
  """The law proportional to the positive part of `weights`, never x; if nothing is left, q without x, else q.

  The positive part can vanish by rounding when p and h agree; a zero vector would make every sampler emit some
  arbitrary token.
  """
  others = jnp.arange(q.shape[0]) != x
  weights = jnp.where(others, jnp.maximum(weights, 0.0), 0.0)
  rest = jnp.where(others, q, 0.0)
  rest = jnp.where(jnp.sum(rest) > 0, rest, q)
  weights = jnp.where(jnp.sum(weights) > 0, weights, rest)
  return weights / jnp.sum(weights)


@flax.struct.dataclass
class Exact:
  """Speculative sampling: the emitted law is the verifier's.

  Source: Leviathan et al. (2023), arXiv 2211.17192; Chen et al. (2023), arXiv 2302.01318.
  """

  lossless: ClassVar[bool] = True

  def accept_prob(self, p, q, x):
    """min(1, q_x / p_x)."""
    return _ratio(q[x], p[x])

  def recovery(self, p, q, x):
    """(q - p)+, normalised."""
    return _residual(q - p, q, x)

  def output_law(self, p, q):
    """q."""
    del p
    return q


@flax.struct.dataclass
class Cactus:
  """Constrained acceptance: at each drafted token the most acceptance within delta nats of the verifier.

  Given x, the law h with h_x = gamma and the other tokens scaled down in proportion maximises min(1, h_x / p_x)
  subject to the divergence limit. delta = 0 is `Exact`; a large delta keeps every token that the verifier can emit.
  delta limits the divergence of each h, which depends on x; it does not bound that of `output_law`.

  Source: Hao and Mou (2026), arXiv 2604.04987, Theorem 2 and Corollary 5.
  """

  delta: jax.Array | float  # nats, >= 0
  lossless: ClassVar[bool] = False

  def __post_init__(self):
    check_number('delta', self.delta, lambda d: np.isfinite(d) & (d >= 0), 'a finite number of nats >= 0 (0 is exact)')

  def accept_prob(self, p, q, x):
    """min(1, gamma(q_x) / p_x)."""
    return _ratio(divergence.relaxed_prob(q[x], self.delta), p[x])

  def recovery(self, p, q, x):
    """(c q - p)+ over the other tokens, normalised, where c = (1 - gamma) / (1 - q_x) is what is left to them."""
    return _residual(self._scale(q[x]) * q - p, q, x)

  def _scale(self, q_x):
    gamma = divergence.relaxed_prob(q_x, self.delta)
    return jnp.where(q_x < 1.0, (1.0 - gamma) / jnp.where(q_x < 1.0, 1.0 - q_x, 1.0), 1.0)

  def output_law(self, p, q):
    """min(p, gamma) plus what the rejections of every x recover, summed in O(V log V).

    Recovery after x weighs token y by (c_x q_y - p_y)+, positive where p_y / q_y < c_x. With tokens in the order of
    p / q the normaliser of each x is a difference of two prefix sums, and with x in the order of c the sum over x is
    one of two suffix sums.
    """
    gamma = divergence.relaxed_prob(q, self.delta)
    scale = self._scale(q)
    rejected = jnp.maximum(p - gamma, 0.0)
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), jnp.inf)

    by_ratio = jnp.argsort(ratio)
    prefix = lambda v: jnp.concatenate([jnp.zeros(1), jnp.cumsum(v)])
    below = jnp.searchsorted(ratio[by_ratio], scale)  # tokens with ratio < c_x, for each x
    norm = scale * prefix(q[by_ratio])[below] - prefix(p[by_ratio])[below]
    share = jnp.where((rejected > 0) & (norm > 0), rejected / jnp.where(norm > 0, norm, 1.0), 0.0)

    by_scale = jnp.argsort(scale)
    above = jnp.searchsorted(scale[by_scale], ratio, side='right')  # first x with c_x > ratio, for each token
    suffix = lambda v: jnp.concatenate([jnp.cumsum(v[::-1])[::-1], jnp.zeros(1)])
    recovered = q * suffix((share * scale)[by_scale])[above] - p * suffix(share[by_scale])[above]
    return jnp.minimum(p, gamma) + jnp.maximum(recovered, 0.0)


# By the names used on command lines; a rule's fields are the numbers it takes.
RULES = {'exact': Exact, 'cactus': Cactus}
