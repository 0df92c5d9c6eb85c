"""Divergences and the relaxed probability of one token, against float64 and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from cactus_jax import divergence
from tests import laws

QS = np.concatenate(
  [[0.0, 1e-30, 1e-12, 1e-8], np.logspace(-6, -0.01, 60), [1 - 1e-3, 1 - 2**-24, 1.0]]
).astype(np.float32)
DELTAS = np.concatenate([[0.0], np.logspace(-4, 1, 40)]).astype(np.float32)


def gamma_grid():
  return np.asarray(divergence.relaxed_prob(jnp.asarray(QS)[:, None], jnp.asarray(DELTAS)[None]), np.float64)


def test_kl_matches_float64():
  for p, q in zip(*laws.law_pairs(np.random.default_rng(0), 6, 60)):
    normal = np.finfo(np.float32).tiny
    p, q = (np.where(x < normal, 0, x) for x in (p, q))
    np.testing.assert_allclose(
      divergence.kl(p, q), np.sum(special.rel_entr(p.astype(np.float64), q)), rtol=1e-5, atol=1e-6
    )


def test_kl_by_hand():
  law = lambda *values: jnp.asarray(values, jnp.float32)
  np.testing.assert_allclose(
    divergence.kl(law(0.5, 0.5), law(0.25, 0.75)), 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-6
  )
  assert divergence.kl(law(0.5, 0.5), law(1, 0)) == np.inf
  np.testing.assert_allclose(divergence.kl(law(1, 0), law(0.5, 0.5)), np.log(2), rtol=1e-6)
  assert divergence.kl(law(1, 0), law(1, 0)) == 0
  assert np.all(np.isfinite(jax.grad(divergence.kl)(law(1, 0), law(0.5, 0.5))))


def test_relaxed_prob_solves_pearsons_chi_square():
  """(gamma - q)^2 = 2 delta q (1 - q) unless clipped to 1, which happens iff q >= 1 / (1 + 2 delta)."""
  gamma, q, delta = gamma_grid(), QS.astype(np.float64)[:, None], DELTAS.astype(np.float64)[None]
  expected = np.minimum(1, q + np.sqrt(2 * delta * q * (1 - q)))
  np.testing.assert_allclose(gamma, expected, rtol=1e-5)
  clearly = np.abs(q * (1 + 2 * delta) - 1) > 1e-5
  np.testing.assert_array_equal((gamma >= 1 - 1e-7)[clearly], (q * (1 + 2 * delta) >= 1)[clearly])


def test_relaxed_prob_rises_with_delta_and_stays_within_q_and_1():
  gamma = gamma_grid()
  assert np.all(np.isfinite(gamma))
  assert np.all(np.diff(gamma, axis=1) >= 0)
  assert np.all((gamma >= QS[:, None]) & (gamma <= 1))
  np.testing.assert_array_equal(gamma[0], 0)  # a token the verifier cannot emit
  np.testing.assert_array_equal(gamma[:, 0], QS)
  np.testing.assert_array_equal(gamma[-1], 1)


def test_relaxed_prob_of_what_rounding_pushed_out_of_range():
  above = np.nextafter(np.float32(1), np.float32(2))
  for delta in (0.0, 0.5):
    assert divergence.relaxed_prob(above, delta) == 1
    assert divergence.relaxed_prob(np.float32(1.01), delta) == 1
    assert divergence.relaxed_prob(np.float32(-1e-9), delta) == 0


def kl_of_relaxed(gamma, q):
  return special.rel_entr(gamma, q) + special.rel_entr(1 - gamma, 1 - q)


def test_relaxed_law_is_within_ln_1_plus_2_delta():
  """KL(h || q) <= ln(1 + 2 delta) at every q, with equality at q = 1 / (1 + 2 delta)."""
  gamma, q = gamma_grid()[1:-1], QS.astype(np.float64)[1:-1, None]
  spent = kl_of_relaxed(gamma, q)
  limit = np.log1p(2 * DELTAS.astype(np.float64))[None]
  assert np.all(spent <= limit + 1e-5)
  delta = DELTAS[1:].astype(np.float64)
  at = np.float32(1 / (1 + 2 * delta))
  gamma = np.asarray(divergence.relaxed_prob(jnp.asarray(at), jnp.asarray(DELTAS[1:])), np.float64)
  np.testing.assert_allclose(
    kl_of_relaxed(gamma, at.astype(np.float64)), np.log1p(2 * delta), rtol=2e-3, atol=1e-5
  )


def test_relaxed_law_is_within_delta_where_gamma_is_at_most_a_half():
  """Corollary 6."""
  gamma, q = gamma_grid(), QS.astype(np.float64)[:, None]
  spent, few = kl_of_relaxed(gamma, q), gamma <= 0.5
  assert np.sum(few) > 100
  assert np.all((spent <= DELTAS[None] + 1e-6)[few])
  assert np.any(spent > DELTAS[None] * 1.01)  # the condition is needed
