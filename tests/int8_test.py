"""8-bit numbers: how far off they may be, and their products against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax.models import int8
from cactus_jax.models.int8 import Int8


def random(*shape, seed=0):
  """Numbers of very different sizes, with a row and a column of zeros."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))
  x[..., 1] = 0
  x[..., 2, :] = 0
  return np.float32(x)


@pytest.mark.parametrize('axis', [0, 1, -1])
def test_quantize(axis):
  """The nearest multiple of the scale, of which the largest number along the axis is 127."""
  x = random(7, 5, 6)
  rounded = int8.quantize(jnp.asarray(x), axis)
  assert rounded.values.dtype == jnp.int8 and rounded.scale.dtype == jnp.float32
  largest = np.abs(x).max(axis)
  np.testing.assert_allclose(rounded.scale, largest / 127, rtol=1e-6)
  values = np.asarray(rounded.values)
  assert values.min() >= -127 and values.max() <= 127
  np.testing.assert_array_equal(np.abs(values).max(axis), np.where(largest > 0, 127, 0))
  error = np.abs(np.asarray(int8.dequantize(rounded, axis), np.float64) - x)
  assert (error <= np.expand_dims(largest, axis) / 254 * (1 + 1e-5)).all() and error.max() > 0


def test_a_number_that_is_none_is_not_hidden():
  rounded = int8.quantize(jnp.array([[1.0, jnp.nan], [1.0, 2.0]]), 1)
  assert np.isnan(rounded.scale[0]) and np.isfinite(rounded.scale[1])
  assert np.isnan(int8.product(jnp.array([[[1.0, jnp.nan]]]), Int8(jnp.ones((2, 3), jnp.int8), jnp.ones(3)))).all()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('T', [1, 4])
def test_product(T, dtype):
  """Against float64: x is off by at most a 64,516th of its largest number, and nothing else is."""
  x = jnp.asarray(random(3, 4, 64)[:, :T]).astype(dtype)
  weight = int8.quantize(jnp.asarray(random(64, 40)), 0)
  found = jax.jit(int8.product)(x, weight)
  assert found.shape == (3, T, 40) and found.dtype == jnp.float32
  exact_x = np.asarray(x, np.float64)
  exact_w = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)
  rounding = np.abs(exact_x).max(-1, keepdims=True) / 64516 * np.abs(exact_w).sum(0)
  error = np.abs(np.asarray(found, np.float64) - exact_x @ exact_w)
  assert (error <= rounding + 1e-6 * (np.abs(exact_x) @ np.abs(exact_w))).all()
  assert dtype == 'bfloat16' or error.max() > 0


def test_one_digit_would_not_do():
  """The bound above is 254 times as sharp as 8 bits of activations could be."""
  x = np.float32(np.random.default_rng(1).normal(size=(1, 4, 64)))
  rounded = int8.quantize(jnp.asarray(x), -1)
  one_digit = np.abs(np.asarray(int8.dequantize(rounded, -1)) - x).max()
  assert one_digit > 100 * np.abs(x).max() / 64516


def test_a_token_does_not_depend_on_its_neighbours():
  x, weight = jnp.asarray(random(3, 4, 64)), int8.quantize(jnp.asarray(random(64, 40)), 0)
  together = int8.product(x, weight)
  for row, t in np.ndindex(3, 4):
    alone = int8.product(x[row : row + 1, t : t + 1], weight)
    np.testing.assert_allclose(alone[0, 0], together[row, t], rtol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('B, T, D', [(1, 1, int8.LINES), (1, 1, 64), (1, 1, 576), (1, 2, 64), (2, 1, 64)])
def test_product_of_few(B, T, D, dtype):
  x, weight = jnp.asarray(random(B, 3, D)[:, :T]).astype(dtype), int8.quantize(jnp.asarray(random(D, 40)), 0)
  found = jax.jit(int8.product_of_few)(x, weight)
  assert found.shape == (B, T, 40) and found.dtype == jnp.float32
  expected = np.asarray(x, np.float64) @ np.asarray(int8.dequantize(weight, 0), np.float64)
  np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_half_a_step_fits_the_second_digit():
  """Numbers that lie as far from the first digit as can be."""
  x = jnp.array([[[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]]])
  found = int8.product(x, Int8(jnp.eye(6, dtype=jnp.int8), jnp.ones(6)))
  np.testing.assert_allclose(found, x, atol=1e-5, rtol=0)
