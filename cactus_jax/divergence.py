"""Divergences between laws, and the programme of the paper solved for one token. Pure mathematics, batch-free.

Notation as in the paper: q is the verifier's law, h a relaxed law, q_x the probability of one token, delta the limit
on the divergence of h from q in nats. (Letters stop here and in rules.py; elsewhere: draft_probs, target_probs.)

A divergence D_f(h || q) = sum_i q_i f(h_i / q_i) is given by its terms, as functions of q_i, h_i and h_i - q_i.
Each f is shifted by a multiple of t - 1, which changes no sum over laws but makes every term >= 0: nothing cancels.
"""

import jax
import jax.numpy as jnp

from cactus_jax.numerics import implicit_root, largest_float


def _where(condition, compute, otherwise):
  """compute(safe) where the condition holds; `safe` replaces a value by 1 elsewhere, so that no gradient is NaN."""
  return jnp.where(condition, compute(lambda value: jnp.where(condition, value, 1.0)), otherwise)


def _log_ratio(q, h, shift):
  """ln(h / q), accurate for h close to q and far from it; 0 where either is 0."""
  near = jnp.abs(shift) < 0.5 * q
  close = _where(near, lambda safe: jnp.log1p(jnp.where(near, shift, 0.0) / safe(q)), 0.0)
  far = _where((q > 0) & (h > 0), lambda safe: jnp.log(safe(h) / safe(q)), 0.0)
  return jnp.where(near, close, far)


def _kl(q, h, shift):
  return jnp.where((q <= 0) & (h > 0), jnp.inf, h * _log_ratio(q, h, shift) - shift)


def _reverse_kl(q, h, shift):
  return jnp.where((q > 0) & (h <= 0), jnp.inf, shift - q * _log_ratio(q, h, shift))


def _pearson(q, h, shift):
  return _where(q > 0, lambda safe: shift * shift / safe(q), jnp.where(h > 0, jnp.inf, 0.0))


def _neyman(q, h, shift):
  return _where(h > 0, lambda safe: shift * shift / safe(h), jnp.where(q > 0, jnp.inf, 0.0))


def _total_variation(q, h, shift):
  return jnp.abs(shift) / 2


def _squared_hellinger(q, h, shift):
  root = lambda mass: _where(mass > 0, lambda safe: jnp.sqrt(safe(mass)), 0.0)
  roots = root(q) + root(h)
  return _where(roots > 0, lambda safe: jnp.square(shift / safe(roots)), 0.0)


def _jensen_shannon(q, h, shift):
  middle = (q + h) / 2
  return (_kl(middle, h, shift / 2) + _kl(middle, q, -shift / 2)) / 2


# f(t): t ln t; -ln t; (t - 1)^2; (1 - t)^2 / t; |t - 1| / 2; (sqrt t - 1)^2; and Jensen-Shannon's, at most ln 2.
DIVERGENCES = {
    'kl': _kl,
    'reverse_kl': _reverse_kl,
    'pearson': _pearson,
    'neyman': _neyman,
    'total_variation': _total_variation,
    'squared_hellinger': _squared_hellinger,
    'jensen_shannon': _jensen_shannon,
}


def divergence(h, q, name):
  """D(h || q) for a name in `DIVERGENCES`, f32[]; infinite where the divergence is. h, q: f32[V], laws."""
  return jnp.sum(DIVERGENCES[name](q, h, h - q))


def kl(h, q):
  """KL(h || q) in nats, f32[]; infinite if h has mass where q has none. h, q: f32[V], laws."""
  return divergence(h, q, 'kl')


def chi2(h, q):
  """Pearson's chi-square of h from q, f32[]; infinite if h has mass where q has none. h, q: f32[V], laws."""
  return divergence(h, q, 'pearson')


def relaxed_prob(q_x, delta):
  """The most probability that a law within delta of q may give to one token, in the paper's closed form.

  gamma = min(1, q_x + sqrt(2 delta q_x (1 - q_x))): KL to second order around q_x, and exactly the root for Pearson's
  chi-square with limit 2 delta. The law that gives x this much and scales the other tokens down in proportion then
  satisfies KL(h || q) <= ln(1 + 2 delta) at every q_x.

  Args:
    q_x: f32[], probability of the token; a value that rounding has pushed beyond [0, 1] is clipped.
    delta: f32[] >= 0, nats.
  Returns: f32[] in [q_x, 1]; 0 if q_x is 0.
  Source: Hao and Mou (2026), arXiv 2604.04987, Corollary 5.
  """
  q_x = jnp.clip(q_x, 0.0, 1.0)
  square = 2.0 * delta * q_x * (1.0 - q_x)
  return jnp.minimum(q_x + _where(square > 0, lambda safe: jnp.sqrt(safe(square)), 0.0), 1.0)


def exact_relaxed_prob(q_x, delta, name):
  """As `relaxed_prob`, the root itself, for any divergence of `DIVERGENCES`.

  The gamma in [q_x, 1] at which a law with h_x = gamma, the others scaled down in proportion, is delta away from q:
  merging the others loses nothing, so D has two terms. D rises with gamma, so the largest rise gamma - q_x that stays
  within delta is found bit by bit: every digit in 30 steps, wherever the root lies and for every D alike. (Newton's
  steps need another start for each.)

  Returns: f32[] in [q_x, 1]; 1 if even that is within delta, and 0 if q_x is 0: most divergences are finite there.
  Source: Hao and Mou (2026), arXiv 2604.04987, Theorem 2.
  """
  q_x = jnp.clip(jnp.asarray(q_x, jnp.float32), 0.0, 1.0)
  inside = (q_x > 0) & (q_x < 1)
  mass = jnp.where(inside, q_x, 0.5)  # where there is nothing to solve a harmless problem stands in
  term = DIVERGENCES[name]
  distance = lambda mass, rise: term(mass, mass + rise, rise) + term(1.0 - mass, 1.0 - mass - rise, -rise)

  fixed, limit = jax.lax.stop_gradient((mass, jnp.asarray(delta, jnp.float32)))

  within = lambda rise: (rise <= 1.0 - fixed) & (distance(fixed, rise) <= limit)
  rise = largest_float(within, jnp.broadcast_shapes(fixed.shape, limit.shape))
  full = rise >= 1.0 - fixed

  inner = ~full & (rise > 0)  # at the ends the slope may be infinite
  near = jnp.where(inner, rise, 0.5 * (1.0 - fixed))
  _, slope = jax.jvp(lambda rise: distance(fixed, rise), (near,), (jnp.ones_like(near),))
  rise = implicit_root(rise, distance(mass, near) - delta, jnp.where(inner, slope, 0.0))
  gamma = jnp.where(full, 1.0, jnp.minimum(mass + rise, 1.0))
  return jnp.where(inside, gamma, jnp.where(q_x > 0, 1.0, 0.0))
