"""Roots are those of scipy, in few calls, wherever they lie and however the function bends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from cactus_jax import numerics

# Name -> a rising function on [-4, 4], and how many calls its root may take.
RISING = {
  'straight': (lambda x: 3 * x - 1, 3),
  'convex': (lambda x: jnp.exp(x) - 0.1, 8),
  'concave': (lambda x: 2 - jnp.exp(-2 * x), 8),
  'steep in the middle': (lambda x: jnp.tanh(20 * (x - 1.7)), 20),
  'flat at the root': (lambda x: (x + 0.3) ** 3, 30),
  'flat elsewhere': (lambda x: jnp.maximum(x - 3, 0.0) - 0.5, 8),
  'a jump': (lambda x: jnp.where(x < 0.7, -1.0, 1.0), 45),
  'infinite before': (lambda x: jnp.log(jnp.maximum(x - 1, 0.0)) - 0.5, 12),
}


@pytest.mark.parametrize('name', RISING)
def test_the_root_of_a_rising_function(name):
  """Newton's method where it leads somewhere, bisection where it does not."""
  function, most = RISING[name]
  calls = []

  def error_and_slope(x):
    jax.debug.callback(calls.append, x)
    return jax.jvp(function, (x,), (jnp.ones_like(x),))

  root, slope = numerics.rising_root(error_and_slope, jnp.float32(-4), jnp.float32(4), jnp.float32(0), tolerance=1e-6)
  jax.effects_barrier()
  below = lambda x: max(float(function(jnp.float32(x))), -1e9)
  expected = optimize.brentq(below, -4, 4, xtol=1e-9)
  assert float(root) == pytest.approx(expected, abs=0.01 if 'flat at' in name else 3e-6)
  assert 1 < len(calls) <= most
  if np.isfinite(float(slope)) and 'jump' not in name:
    assert float(slope) == pytest.approx(float(jax.grad(function)(root)), rel=1e-5)


@pytest.mark.parametrize('start', [-4.0, 0.0, 4.0])
def test_roots_at_the_ends_and_many_at_once(start):
  """A bracket of one point is its own root; under vmap each problem ends for itself."""
  low, high = jnp.array([-4.0, 2.0, -4.0, -4.0]), jnp.array([4.0, 2.0, 4.0, 4.0])
  shift = jnp.array([1.0, 0.5, -4.0, 4.0])
  solve = lambda low, high, start, shift: numerics.rising_root(
    lambda x: (jnp.sinh(x - shift), jnp.cosh(x - shift)), low, high, start, tolerance=1e-6)[0]
  problems = low, high, jnp.clip(jnp.full(4, start), low, high), shift
  roots = jax.jit(jax.vmap(solve))(*problems)
  np.testing.assert_allclose(roots, [1.0, 2.0, -4.0, 4.0], atol=2e-6)
  np.testing.assert_array_equal(roots, [jax.jit(solve)(*problem) for problem in zip(*problems)])


def test_a_step_that_rounding_swallows_is_the_last():
  """Between neighbouring floats no root is within the tolerance, and Newton's step no longer moves it."""
  calls = []

  def error_and_slope(x):
    jax.debug.callback(calls.append, x)
    return 0.5 * (x - 79.3) + 1.3e-6, jnp.float32(0.5)

  root, _ = numerics.rising_root(error_and_slope, jnp.float32(0), jnp.float32(80), jnp.float32(40), tolerance=5e-7)
  jax.effects_barrier()
  assert float(root) == pytest.approx(79.3, abs=1e-5) and len(calls) <= 5


def test_nan_ends_at_once():
  """A function of broken laws has no root, and no loop that looks for one."""
  calls = []

  def error_and_slope(x):
    jax.debug.callback(calls.append, x)
    return x * jnp.nan, x

  numerics.rising_root(error_and_slope, jnp.float32(0), jnp.float32(1), jnp.float32(0.5), tolerance=1e-6)
  jax.effects_barrier()
  assert len(calls) == 1
