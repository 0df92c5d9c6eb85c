"""Verification rules: when a drafted token is kept, and what replaces it when it is not.

Notation, as in the paper: p is the draft's law, q the verifier's, h a law a rule aims at, x the drafted token; all
laws are f32[V] after temperature and filters. A rule is deterministic and batch-free: randomness belongs to verify.py,
batching to `vmap`. Its numbers are leaves of a pytree, so a sweep over them never compiles anew.

One round of speculative decoding keeps x with probability `accept_prob`, and otherwise emits a draw from `recovery`.
Three ways to choose these stand below, in this order:
  what is kept depends on x alone           Cactus, CactusExact: a law for each drafted token
  a law t(p, q) that does not look at x     `TargetRule`: Exact, the clamps, interpolation, cascades, Typical
  anything else                             the three methods of `VerificationRule`, as in TopK
To add a rule, write one `record_class` with these methods (for a `TargetRule` the law is enough), name it in RULES.

No rule with emitted law h keeps more than sum min(p, h) of the drafts, which is what speculative sampling towards h
keeps. So the best rule is a law: the one that maximises sum min(p, h) at a given divergence from q, and that is a
clamp of p between two multiples of q, for every f-divergence alike (`Clamp`).
"""

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import divergence
from cactus_jax.numerics import implicit_root, largest_float, rising_root
from cactus_jax.records import check_number, record_class, static
from cactus_jax.sampling import SamplingParams


class VerificationRule(Protocol):
  """The contract of a rule.

  A rule may also have `accept_bounds(p_x, q_x) -> (low, high)`: what two numbers alone say of `accept_prob`.
  Verification reads whole laws only where the uniform falls between the bounds.

  V may be more than the tokenizer has: ids that pad an embedding have probability 0 in both laws and must keep it, so
  a rule adds mass to tokens only by p or q, never evenly.
  """

  lossless: ClassVar[bool]  # whether the emitted law is exactly q; a rule that does not say is taken to be lossy

  def accept_prob(self, p, q, x) -> jax.Array:
    """f32[] in [0, 1]: probability of keeping the drafted token x, where p[x] > 0.

    0 where q[x] is 0, but for baselines reproduced as published.
    """

  def recovery(self, p, q, x) -> jax.Array:
    """f32[V]: law of the token emitted when x is rejected; always a law, even when no residual is left."""

  def output_law(self, p, q) -> jax.Array:
    """f32[V]: exact law of the emitted token, over the draw of x ~ p, its acceptance and its recovery."""


METHODS = ('accept_prob', 'recovery', 'output_law')  # what a rule must have


def check_laws(p, q):
  """Raises ValueError unless p and q are laws to within 1e-3: concrete f32[V], none negative, each summing to 1."""
  for name, law in (('p, the draft\'s law,', p), ('q, the verifier\'s law,', q)):
    if isinstance(law, jax.core.Tracer):
      raise ValueError('laws can be checked only outside jit and vmap: call the rule with plain arrays.')
    law = np.asarray(law, np.float64)
    if law.ndim != 1 or not (np.all(law >= 0) and abs(law.sum() - 1) <= 1e-3):
      raise ValueError(f'{name} has shape {law.shape}, its smallest entry is {law.min()} and its sum {law.sum():.6g}: '
                       'need one law, [V], of numbers >= 0 that sum to 1 within 1e-3.')
  if np.shape(p) != np.shape(q):
    raise ValueError(f'p has shape {np.shape(p)}, q has {np.shape(q)}: need laws over the same tokens.')


def _check_is_rule(holder, rule):
  if isinstance(rule, type) or not all(hasattr(rule, name) for name in METHODS):
    raise ValueError(f'{holder}({rule!r:.60}): need a rule with its numbers, as in {holder}(Cactus(delta=1.0)).')


@record_class
class Checked:
  """Any rule, with the laws given to it and those it returns checked: for work outside jit, as on a new rule."""

  rule: Any

  def __post_init__(self):
    _check_is_rule('Checked', self.rule)

  @property
  def lossless(self):
    """As the rule's."""
    return self.rule.lossless

  def accept_prob(self, p, q, x):
    """As the rule's."""
    check_laws(p, q)
    accept = self.rule.accept_prob(p, q, x)
    if not 0 <= accept <= 1:
      raise ValueError(f'accept_prob of {self.rule} is {accept} for token {x}: need a probability.')
    return accept

  def recovery(self, p, q, x):
    """As the rule's."""
    check_laws(p, q)
    return self._checked('recovery', self.rule.recovery(p, q, x), q)

  def output_law(self, p, q):
    """As the rule's."""
    check_laws(p, q)
    return self._checked('output_law', self.rule.output_law(p, q), q)

  def _checked(self, method, law, q):
    if np.shape(law) != np.shape(q) or not (np.all(np.asarray(law) >= 0) and abs(np.sum(law) - 1) <= 1e-3):
      raise ValueError(f'{method} of {self.rule} has shape {np.shape(law)} and sum {np.sum(law)}: need a law, like q.')
    return law


def _check_nats(name, value):
  check_number(name, value, lambda d: np.isfinite(d) & (d >= 0), 'a finite number of nats >= 0 (0 is exact)')


def _check_share(name, value, need):
  check_number(name, value, lambda a: (a >= 0) & (a <= 1), f'a number in [0, 1] ({need})')


def _check_divergence(name):
  if not isinstance(name, str) or name not in divergence.DIVERGENCES:
    raise ValueError(f'divergence={name!r}: need one of {", ".join(divergence.DIVERGENCES)}.')


def capped_ratio(h_x, p_x):
  """min(1, h_x / p_x), and 0 where h_x is; nothing but h_x < p_x is ever divided."""
  kept = h_x >= p_x
  return jnp.where(kept & (h_x > 0), 1.0, h_x / jnp.where(kept, 1.0, p_x))


def _residual(weights, q, x):
  """The law proportional to the positive part of `weights`, never x; if nothing is left, q without x, else q."""
  others = jnp.arange(q.shape[0]) != x
  rest = jnp.where(others, q, 0.0)
  return normalised(jnp.where(others, weights, 0.0), jnp.where(jnp.sum(rest) > 0, rest, q))


def normalised(weights, fallback):
  """The positive part of `weights` as a law; the fallback's if nothing of it is left but rounding.

  A zero vector would make every sampler emit some arbitrary token, and one of rounding errors is worse: XLA may compute
  a difference twice, fused and unfused, and find it positive only once. What has a mass of 1e-7 is never drawn anyway.
  """
  weights = jnp.maximum(weights, 0.0)
  weights = jnp.where(jnp.sum(weights) <= 1e-7, fallback, weights)  # NaN stays, and ends its row
  return weights / jnp.sum(weights)


class _Relaxed:
  """Base of rules that keep x with probability min(1, gamma(q_x) / p_x) for some gamma in [q_x, 1].

  Given x the rule aims at the law h with h_x = gamma and the other tokens scaled down in proportion. The emitted law
  lies between p and q at every token, and no rule that emits it keeps more.
  """

  lossless: ClassVar[bool] = False

  def _gamma(self, q_x):
    raise NotImplementedError

  def accept_bounds(self, p_x, q_x):
    """Both are the probability itself."""
    accept = capped_ratio(self._gamma(q_x), p_x)
    return accept, accept

  def accept_prob(self, p, q, x):
    """min(1, gamma(q_x) / p_x)."""
    return self.accept_bounds(p[x], q[x])[0]

  def recovery(self, p, q, x):
    """(c q - p)+ over the other tokens, normalised, where c = (1 - gamma) / (1 - q_x) is what is left to them."""
    return _residual(self._scale(q[x]) * q - p, q, x)

  def _scale(self, q_x):
    left = jnp.where(q_x < 1.0, 1.0 - q_x, 1.0)
    return jnp.where(q_x < 1.0, (1.0 - self._gamma(q_x)) / left, 1.0)

  def output_law(self, p, q):
    """min(p, gamma) plus what the rejections of every x recover.

    Recovery after x weighs token y by (c_x q_y - p_y)+. Few tokens can be rejected, those with p_x > gamma(q_x): they
    are taken one by one, O(V) each. Where they are many, all are summed at once in O(V log V).
    """
    gamma, scale = self._gamma(q), self._scale(q)
    rejected = jnp.maximum(p - gamma, 0.0)
    few = jnp.sum(rejected > 0) <= _FEW
    recovered = jax.lax.cond(few, _recovered_one_by_one, _recovered_by_sorting, p, q, rejected, scale)
    return jnp.minimum(p, gamma) + recovered


# As many rejections, summed one by one, take about as long as sorting a vocabulary twice.
_FEW = 48


def _recovered_one_by_one(p, q, rejected, scale):
  """sum over x of rejected_x (c_x q - p)+ / its sum, for at most _FEW tokens x."""
  count = min(_FEW, p.shape[0])
  rejected, tokens = jax.lax.top_k(rejected, count)

  def recover(total, rejected, scale):
    weights = jnp.maximum(scale * q - p, 0.0)
    norm = jnp.sum(weights)
    return total + jnp.where(norm > 0, rejected / jnp.where(norm > 0, norm, 1.0), 0.0) * weights

  def next_token(total, token):
    return jax.lax.cond(token[0] > 0, recover, lambda total, *_: total, total, *token), None

  return jax.lax.scan(next_token, jnp.zeros_like(p), (rejected, scale[tokens]))[0]


def _recovered_by_sorting(p, q, rejected, scale):
  """The same for any number of tokens x.

  A weight is positive where p_y / q_y < c_x. With tokens in the order of p / q the normaliser of each x is a difference
  of two prefix sums, and with x in the order of c the sum over x is one of two suffix sums.
  """
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
  return jnp.maximum(recovered, 0.0)


@record_class
class Cactus(_Relaxed):
  """Constrained acceptance: at each drafted token the most acceptance within delta nats of the verifier.

  Given x, the law h with h_x = gamma and the other tokens scaled down in proportion maximises min(1, h_x / p_x)
  subject to the divergence limit. delta = 0 is `Exact`; a large delta keeps every token that the verifier can emit.
  delta limits the divergence of each h, which depends on x; it does not bound that of `output_law`, which can reach
  2 ln(1 + sqrt(2 delta V)).

  Source: Hao and Mou (2026), arXiv 2604.04987, Theorem 2 and Corollary 5.
  """

  delta: jax.Array | float  # nats, >= 0

  def __post_init__(self):
    _check_nats('delta', self.delta)

  def _gamma(self, q_x):
    return divergence.relaxed_prob(q_x, self.delta)


@record_class
class CactusExact(_Relaxed):
  """`Cactus` with the root of Theorem 2 itself instead of its second-order form, for any of seven divergences.

  divergence='pearson' with limit 2 delta is `Cactus`. The root for 'kl' gives tail tokens far more than the closed
  form does, which costs more than it gains: a reference, not an improvement. delta = 0 is `Exact`.

  Source: Hao and Mou (2026), arXiv 2604.04987, Theorem 2.
  """

  delta: jax.Array | float  # limit on the divergence, in its own unit, >= 0
  divergence: str = static('kl')

  def __post_init__(self):
    _check_nats('delta', self.delta)
    _check_divergence(self.divergence)

  def _gamma(self, q_x):
    return divergence.exact_relaxed_prob(q_x, self.delta, self.divergence)


class TargetRule:
  """Base of rules with a fixed target: a law t(p, q) that does not depend on the drafted token.

  Speculative sampling towards t: keep x with probability min(1, t_x / p_x), recover from (t - p)+, emit exactly t. No
  rule that emits t keeps more, and such a rule can be verified a block at a time (`verify_block`).
  """

  lossless: ClassVar[bool] = False

  def target(self, p, q) -> jax.Array:
    """f32[V]: the law t that is emitted."""
    raise NotImplementedError

  def accept_prob(self, p, q, x):
    """min(1, t_x / p_x)."""
    return capped_ratio(self.target(p, q)[x], p[x])

  def recovery(self, p, q, x):
    """(t - p)+, normalised."""
    return _residual(self.target(p, q) - p, q, x)

  def output_law(self, p, q):
    """t."""
    return self.target(p, q)


@record_class
class Exact(TargetRule):
  """Speculative sampling: the emitted law is the verifier's.

  Source: Leviathan et al. (2023), arXiv 2211.17192; Chen et al. (2023), arXiv 2302.01318.
  """

  lossless: ClassVar[bool] = True

  def target(self, p, q):
    """q."""
    del p
    return q

  def accept_bounds(self, p_x, q_x):
    """Both are min(1, q_x / p_x)."""
    accept = capped_ratio(q_x, p_x)
    return accept, accept


@record_class
class Static(TargetRule):
  """The law that any rule emits, as a fixed target: the same text law, and it can be verified a block at a time.

  `Static(Cactus(delta))` is speculative sampling towards the induced law of Cactus. Where the rule itself keeps less
  than its law allows (`TopK`), this keeps more.
  """

  rule: Any

  def __post_init__(self):
    _check_is_rule('Static', self.rule)

  @property
  def lossless(self):
    """As the rule's."""
    return self.rule.lossless

  @property
  def judged_by(self):
    """As the rule's."""
    return getattr(self.rule, 'judged_by', None)

  def target(self, p, q):
    """The rule's `output_law`."""
    return self.rule.output_law(p, q)


class _Clamped(TargetRule):
  """Base of the rules whose target is p clamped between two multiples of q, h = clip(p, a q, b q) with a <= 1 <= b."""

  def _factors(self, p, q):
    """(a, b), such that h sums to 1."""
    raise NotImplementedError

  def _bounds(self, p, q):
    """(a q, b q). Where q is 0 its slope, which may be beyond float32, counts as 0."""
    q = jnp.where(q == 0, 0.0, q)
    a, b = self._factors(p, q)
    return a * q, b * q

  def target(self, p, q):
    """clip(p, a q, b q)."""
    return jnp.clip(p, *self._bounds(p, q))

  def accept_prob(self, p, q, x):
    """min(1, b q_x / p_x)."""
    return capped_ratio(self._bounds(p, q)[1][x], p[x])

  def recovery(self, p, q, x):
    """(a q - p)+, normalised."""
    return _residual(self._bounds(p, q)[0] - p, q, x)

  def accept_bounds(self, p_x, q_x):
    """1 <= b."""
    return capped_ratio(q_x, p_x), jnp.where(q_x > 0, 1.0, 0.0)


# A price beyond 80 nats buys nothing more: e^-80 is all but 0, and e^80 still a float32. One below 1e-7 buys nothing.
_MIN_PRICE, _MAX_PRICE = 1e-7, 80.0


def _price_factors(p, q, tau):
  """(a, b) with b = a e^tau and sum clip(p, a q, b q) = 1.

  The sum rises with ln b from at most 1 at 0 to at least 1 at tau, and its logarithm is nearly straight: some 3 to 6
  steps of Newton's method, a pass over the laws each.
  """

  def error_and_slope(p, q, tau, level):
    low, high = jnp.exp(level - tau) * q, jnp.exp(level) * q
    law = jnp.clip(p, low, high)
    total = jnp.sum(law)
    return jnp.log(total), jnp.sum(jnp.where((p < low) | (p > high), law, 0.0)) / total

  tau = jnp.minimum(jnp.asarray(tau, jnp.float32), _MAX_PRICE)
  fixed = jax.lax.stop_gradient((p, q, tau))
  level, slope = rising_root(
      lambda level: error_and_slope(*fixed, level), jnp.zeros_like(tau), fixed[2], fixed[2] / 2, tolerance=5e-7)
  level = implicit_root(level, error_and_slope(p, q, tau, level)[0], slope)
  return jnp.exp(level - tau), jnp.exp(level)


def _fill_level(base, q, mass):
  """The a <= 1 with sum (a q - base)+ = mass, where mass <= sum (q - base)+: how high q must stand above a base.

  The sum is convex in a, so Newton's method from above, where it is too large, ends at the root from that side.
  """

  def excess_and_slope(base, q, mass, level):
    over = level * q - base
    return jnp.sum(jnp.maximum(over, 0.0)) - mass, jnp.sum(jnp.where(over > 0, q, 0.0))

  fixed = jax.lax.stop_gradient((base, q, mass))

  def refine(carry):
    level, excess, slope, steps = carry
    level = jnp.maximum(level - excess / slope, 0.0)
    return level, *excess_and_slope(*fixed, level), steps + 1

  carry = jnp.float32(1.0), *excess_and_slope(*fixed, 1.0), 0
  unsettled = lambda carry: (carry[1] > 2e-7) & (carry[2] > 0) & (carry[3] < 50)
  level, _, slope, _ = jax.lax.while_loop(unsettled, refine, carry)
  return implicit_root(level, excess_and_slope(base, q, mass, level)[0], slope)


@record_class
class Clamp(_Clamped):
  """The optimum: at every position the same price tau, in nats, for a nat of divergence.

  h = clip(p, a q, b q) with ln(b / a) = tau maximises sum min(p, h) - KL(h || q) / tau, so over a text no rule keeps
  more drafts at the same KL. (Clamps are optimal for every f-divergence; ln(b / a) constant is the price of KL.)
  KL(h || q) <= min(tau, tau^2 / 8), since h / q stays between a and b (Hoeffding's lemma). tau = 0 is `Exact`; a large
  tau is p wherever the verifier can follow.

  Source: the KKT conditions of Tran-Thien (2023)'s programme with a price in place of its limit for each step.
  """

  tau: jax.Array | float  # nats, >= 0

  def __post_init__(self):
    _check_nats('tau', self.tau)

  def _factors(self, p, q):
    return _price_factors(p, q, self.tau)

  def accept_bounds(self, p_x, q_x):
    """1 <= b <= e^tau."""
    return capped_ratio(q_x, p_x), capped_ratio(jnp.exp(jnp.minimum(self.tau, _MAX_PRICE)) * q_x, p_x)


@record_class
class Lenience(_Clamped):
  """A clamp with fixed b: keep x with probability min(1, b q_x / p_x), so that no token gets more than b times its due.

  a follows from the mass that is left. b = 1 is `Exact`. With published=True recovery is (q - p)+, as in speculative
  sampling, which is almost as good.

  Source: lenience of Leviathan et al. (2023), arXiv 2211.17192, appendix A.5; published: Xia et al. (2026).
  """

  b: jax.Array | float  # >= 1
  published: bool = static(False)

  def __post_init__(self):
    check_number('b', self.b, lambda b: np.isfinite(b) & (b >= 1), 'a finite number >= 1 (1 is exact)')

  def _factors(self, p, q):
    return _fill_level(p, q, jnp.sum(jnp.maximum(p - self.b * q, 0.0))), self.b

  def target(self, p, q):
    """clip(p, a q, b q); as published, min(p, b q) and the rest in proportion to (q - p)+."""
    if not self.published:
      return super().target(p, q)
    kept, residual = jnp.minimum(p, self.b * q), jnp.maximum(q - p, 0.0)
    norm = jnp.sum(residual)
    return jnp.where(norm > 0, kept + (1.0 - jnp.sum(kept)) * residual / jnp.where(norm > 0, norm, 1.0), q)

  def recovery(self, p, q, x):
    """(a q - p)+, normalised; as published, (q - p)+."""
    return _residual(q - p, q, x) if self.published else super().recovery(p, q, x)

  def accept_bounds(self, p_x, q_x):
    """Both are min(1, b q_x / p_x)."""
    accept = capped_ratio(self.b * q_x, p_x)
    return accept, accept


@record_class
class Mentored(_Clamped):
  """A clamp that spends the same divergence at every position, or what p itself costs where that is less.

  The most acceptance that a limit on each step allows; at the same divergence over a text `Clamp` keeps more. limit = 0
  is `Exact`.

  Source: Tran-Thien (2023), Mentored Decoding, whose divergence is KL(q || h): 'reverse_kl'.
  """

  limit: jax.Array | float  # on the divergence of each step, in its own unit, >= 0
  divergence: str = static('reverse_kl')

  def __post_init__(self):
    _check_nats('limit', self.limit)
    _check_divergence(self.divergence)

  def _factors(self, p, q):
    def spent(p, q, tau):
      a, b = _price_factors(p, q, tau)
      return divergence.divergence(jnp.clip(p, a * q, b * q), q, self.divergence)

    fixed, limit = jax.lax.stop_gradient(((p, q), jnp.asarray(self.limit, jnp.float32)))
    safe = jnp.where(limit > 0, limit, 1.0)
    least, most = jnp.full_like(limit, jnp.log(_MIN_PRICE)), jnp.full_like(limit, jnp.log(_MAX_PRICE))
    whole = spent(*fixed, jnp.float32(_MAX_PRICE)) <= limit  # p is within the limit, as far as q can follow it
    settled = whole | (limit <= 0)

    # A divergence rises with a power of small prices, most with the square: straight where both are logarithms.
    def error_and_slope(log_tau):
      nats, rise = jax.jvp(lambda log_tau: spent(*fixed, jnp.exp(log_tau)), (log_tau,), (jnp.ones_like(log_tau),))
      nats = jnp.maximum(nats, 1e-30)  # which rounding can push below 0
      return jnp.log(nats / safe), rise / nats

    guess = jnp.clip(jnp.log(8.0 * safe) / 2, least, most)  # KL <= tau^2 / 8
    log_tau, slope = rising_root(
        error_and_slope, least, jnp.where(settled, least, most), jnp.where(settled, least, guess),
        tolerance=jnp.minimum(5e-6 + 1e-7 / safe, 0.01))  # laws round to some 1e-7
    tau = jnp.where(settled, jnp.where(whole, _MAX_PRICE, 0.0), jnp.exp(log_tau))
    slope = jnp.where(settled, 0.0, slope * limit / tau)  # by tau, of nats that are the limit
    return _price_factors(p, q, implicit_root(tau, spent(p, q, tau) - self.limit, slope))


def _within(p, q):
  """p where the verifier has mass, normalised; q if nothing of p is there."""
  inside = jnp.where(q > 0, p, 0.0)
  mass = jnp.sum(inside)
  return jnp.where(mass > 0, inside / jnp.where(mass > 0, mass, 1.0), q)


@record_class
class Interpolation(TargetRule):
  """A mixture: alpha p + (1 - alpha) q, with p restricted to tokens that the verifier can emit. alpha = 0 is `Exact`.

  With published=True p is left whole, as in the paper's baseline: then mass leaves the support of q, and KL(h || q) is
  infinite, as soon as filters cut tokens of p.

  Source: the paper's released code (interp.py).
  """

  alpha: jax.Array | float  # share of the draft's law, in [0, 1]
  published: bool = static(False)

  def __post_init__(self):
    _check_share('alpha', self.alpha, '0 is exact')

  def target(self, p, q):
    """alpha p + (1 - alpha) q."""
    return self.alpha * (p if self.published else _within(p, q)) + (1.0 - self.alpha) * q

  def accept_bounds(self, p_x, q_x):
    """Restricting p to some tokens can only raise it there."""
    mixture = self.alpha * p_x + (1.0 - self.alpha) * q_x
    emitted = self.published | (q_x > 0)
    return jnp.where(emitted, capped_ratio(mixture, p_x), 0.0), jnp.where(emitted, 1.0, 0.0)


class _Cascade(TargetRule):
  """Base of speculative cascades: the draft's law, or its part on trusted tokens, where a criterion trusts the draft.

  All criteria read the laws after temperature and filters, the only ones a rule sees. p is restricted to the tokens
  that the verifier can emit; with published=True it is left whole, and mass may leave the support of q. A smaller
  alpha trusts less; far below 0 every cascade is `Exact` (0 itself is not).

  Source: Narasimhan et al. (2025), Faster Cascades via Speculative Decoding, arXiv 2405.19261.
  """

  def __post_init__(self):
    check_number('alpha', self.alpha, np.isfinite, 'a finite number (the more negative, the closer to exact)')

  def _draft_law(self, p, q):
    return p if self.published else _within(p, q)


class _Deferral(_Cascade):
  """Base of cascades that take a whole law: q where the draft defers, p where it does not."""

  def _defers(self, p, q):
    raise NotImplementedError

  def target(self, p, q):
    """q if the draft defers, else p."""
    p = self._draft_law(p, q)
    return jnp.where(self._defers(p, q), q, p)


@record_class
class Chow(_Deferral):
  """Defers where the draft is unsure: max p < 1 - alpha. See `_Cascade`."""

  alpha: jax.Array | float
  published: bool = static(False)

  def _defers(self, p, q):
    return jnp.max(p) < 1.0 - self.alpha


@record_class
class Diff(_Deferral):
  """Defers where the verifier is surer: max p < max q - alpha. See `_Cascade`."""

  alpha: jax.Array | float
  published: bool = static(False)

  def _defers(self, p, q):
    return jnp.max(p) < jnp.max(q) - self.alpha


@record_class
class OPT(_Deferral):
  """Defers where being surer is worth a rejection: max p < max q - alpha TV(p, q). See `_Cascade`."""

  alpha: jax.Array | float
  published: bool = static(False)

  def _defers(self, p, q):
    return jnp.max(p) < jnp.max(q) - self.alpha * divergence.divergence(p, q, 'total_variation')


class _Trusting(_Cascade):
  """Base of cascades by token: p on trusted tokens, and q in place of what p has elsewhere."""

  def _trusted(self, p, q):
    raise NotImplementedError

  def target(self, p, q):
    """p on the trusted tokens, plus q times the rest of p."""
    p = self._draft_law(p, q)
    trusted = self._trusted(p, q)
    return jnp.where(trusted, p, 0.0) + jnp.sum(jnp.where(trusted, 0.0, p)) * q


@record_class
class TokenV1(_Trusting):
  """Trusts tokens with p_v >= max q - alpha. See `_Cascade`."""

  alpha: jax.Array | float
  published: bool = static(False)

  def _trusted(self, p, q):
    return p >= jnp.max(q) - self.alpha


@record_class
class TokenV2(_Trusting):
  """Trusts tokens with q_v >= max q - alpha. See `_Cascade`."""

  alpha: jax.Array | float
  published: bool = static(False)

  def _trusted(self, p, q):
    return q >= jnp.max(q) - self.alpha


@record_class
class TokenV3(_Trusting):
  """Trusts tokens with q_v >= (1 - alpha) max q. See `_Cascade`."""

  alpha: jax.Array | float
  published: bool = static(False)

  def _trusted(self, p, q):
    return q >= (1.0 - self.alpha) * jnp.max(q)


@record_class
class Threshold(_Trusting):
  """Trusts tokens with q_v >= threshold, and only those: above 1 it is `Exact`, at 0 it is p. See `_Cascade`.

  The target law of a criterion that serving engines use alone (keep x if q_x is at least a threshold).
  """

  threshold: jax.Array | float  # >= 0
  published: bool = static(False)

  def __post_init__(self):
    check_number('threshold', self.threshold, lambda t: np.isfinite(t) & (t >= 0), 'a probability >= 0 (2 is exact)')

  def _trusted(self, p, q):
    return q >= self.threshold


class _Filtering(TargetRule):
  """Base of rules that keep every token of some set, whatever p says, and replace all others by the verifier's first.

  Deterministic given x. Their law is p on the set, and the rest of p on argmax q, which must be in the set.
  """

  def _keeps(self, q):
    raise NotImplementedError

  def target(self, p, q):
    """p on the kept tokens, the rest of p on argmax q."""
    keeps = self._keeps(q) & (q > 0)
    return jnp.where(keeps, p, 0.0).at[jnp.argmax(q)].add(jnp.sum(jnp.where(keeps, 0.0, p)))

  def accept_prob(self, p, q, x):
    """1 or 0."""
    return jnp.where(self._keeps(q)[x] & (q[x] > 0), 1.0, 0.0)

  def recovery(self, p, q, x):
    """argmax q for sure."""
    return jax.nn.one_hot(jnp.argmax(q), q.shape[0], dtype=jnp.float32)


@record_class
class Typical(_Filtering):
  """Typical acceptance: keep x if q_x > min(epsilon, alpha exp(-H(q))), else emit argmax q. It has no exact limit.

  A lower epsilon or alpha keeps more. H is the entropy of q in nats.

  Source: Cai et al. (2024), Medusa, arXiv 2401.10774; the constant in H is that of the engines.
  """

  epsilon: jax.Array | float = 0.09
  alpha: jax.Array | float = 0.3

  def __post_init__(self):
    _check_share('epsilon', self.epsilon, '0 keeps all that the verifier can emit')
    _check_share('alpha', self.alpha, '0 keeps all that the verifier can emit')

  def _keeps(self, q):
    entropy = -jnp.sum(q * jnp.log(q + 1e-5))
    # At alpha = 1 and a flat q the constant can push the threshold above every token: the likeliest is always kept.
    return (q > jnp.minimum(self.epsilon, self.alpha * jnp.exp(-entropy))) | (q >= jnp.max(q))


@record_class
class LogitMargin(_Filtering):
  """For greedy decoding: keep x if its logit is within a margin of the verifier's largest, else emit the largest.

  At temperature 0 the verifier's law is one-hot, and every rule that reads it is exact match. This one reads the law at
  temperature 1 without filters instead (`judged_by`), where ln(max q / q_x) is the difference of the logits. margin = 0
  is exact match. What it changes is counted: `flips`, tokens kept that are not the verifier's choice.

  Source: the deterministic form of `Clamp` for a one-hot p at its own temperature.
  """

  margin: jax.Array | float  # in units of logits at temperature 1, >= 0
  judged_by: ClassVar[SamplingParams] = SamplingParams(temperature=1.0)

  def __post_init__(self):
    check_number('margin', self.margin, lambda m: np.isfinite(m) & (m >= 0), 'a finite number >= 0 (0 is exact match)')

  def _keeps(self, q):
    first = jnp.arange(q.shape[0]) == jnp.argmax(q)  # of tokens that tie, greedy decoding takes this one
    return first | (q > jnp.max(q) * jnp.exp(-self.margin))


@record_class
class TopK:
  """Keeps x if it is among the verifier's k likeliest tokens, whatever p says. It has no exact limit.

  Recovery is (lambda q - a)+, where a is what is kept: the law closest to q (in KL) that it can still reach. With
  published=True it is as in the paper's baseline, which keeps every token, even of probability 0, where fewer than k
  have any, and recovers from an indicator of the k tokens instead of from q: mass leaves the support of q.

  Source: the paper's released code (topk.py), and its correction.
  """

  k: jax.Array | float  # whole, >= 1; beyond V it is V
  published: bool = static(False)
  lossless: ClassVar[bool] = False

  def __post_init__(self):
    check_number('k', self.k, lambda k: (k >= 1) & (k == np.floor(k)), 'a whole number >= 1')

  def _keeps(self, q):
    k = jnp.clip(self.k, 1, q.shape[0])
    top = q >= largest_float(lambda floor: jnp.sum(q >= floor) >= k)
    return top if self.published else top & (q > 0)

  def accept_prob(self, p, q, x):
    """1 or 0."""
    above = jnp.sum(q > q[x])
    return jnp.where((above < self.k) & (self.published | (q[x] > 0)), 1.0, 0.0)

  def recovery(self, p, q, x):
    """(lambda q - a)+, normalised; as published, (1[top k] - p)+."""
    keeps = self._keeps(q)
    if self.published:
      return normalised(keeps - p, q)
    kept = jnp.where(keeps, p, 0.0)
    return normalised(_fill_level(kept, q, jnp.sum(jnp.where(keeps, 0.0, p))) * q - kept, q)

  def output_law(self, p, q):
    """p on the k tokens, and the rest of p by recovery."""
    keeps = self._keeps(q)
    return jnp.where(keeps, p, 0.0) + jnp.sum(jnp.where(keeps, 0.0, p)) * self.recovery(p, q, None)


# By the names used on command lines; a rule's fields are the numbers it takes.
RULES = {
    'exact': Exact,
    'cactus': Cactus,
    'cactus_exact': CactusExact,
    'clamp': Clamp,
    'lenience': Lenience,
    'mentored': Mentored,
    'interpolation': Interpolation,
    'chow': Chow,
    'diff': Diff,
    'opt': OPT,
    'token_v1': TokenV1,
    'token_v2': TokenV2,
    'token_v3': TokenV3,
    'threshold': Threshold,
    'typical': Typical,
    'top_k': TopK,
    'logit_margin': LogitMargin,
}
