"""Numbers as 8-bit integers times a scale, and products of activations with such weights.

Weights have a scale for each output. Activations are rounded token by token as they come, to two digits of 8 bits: to
one alone, the few large channels that language models have (Dettmers et al., 2022) leave too little for all others.
Both digits are rows of one product of integers, which is exact, and costs little where reading the weights is what
takes the time. One or two tokens on a CPU are not rounded at all: a product in floats is quicker there.
"""

import functools
import operator

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Int8:
  """The numbers values * scale."""

  values: jax.Array  # i8, in -127..127
  scale: jax.Array  # f32, of the shape of values without the axis that shares it


def quantize(x, axis) -> Int8:
  """The nearest such numbers, the largest along `axis` being 127 times its scale."""
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=axis) / 127
  values = jnp.round(x / jnp.expand_dims(_divisor(scale), axis))
  return Int8(values=values.astype(jnp.int8), scale=scale)


def dequantize(x: Int8, axis):
  """f32, of the shape of the values."""
  return x.values * jnp.expand_dims(x.scale, axis)


LINES = 16  # of a matrix, which are added up in one go
FINE = 254  # a step of the first digit is so many of the second, which holds half a step to either side


def product(x_BTD, weight_DF: Int8):
  """f32[B, T, F]: x @ weight, with x rounded to some 15 bits."""
  x = quantize(x_BTD, -1)
  rest = (x_BTD.astype(jnp.float32) / _divisor(x.scale)[..., None] - x.values) * FINE
  digits = jnp.concatenate([x.values, jnp.round(rest).astype(jnp.int8)], axis=1)
  sums = jax.lax.dot_general(
      digits, weight_DF.values, (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)
  coarse, fine = jnp.split(sums, 2, axis=1)
  return (coarse + fine / FINE) * x.scale[..., None] * weight_DF.scale[None, None]


def product_of_few(x_BTD, weight_DF: Int8):
  """The same for one or two tokens on a CPU, in floats, where D is a multiple of `LINES`.

  XLA's CPU backend has a library for products of integers, which lays the matrix out anew each time, and nothing good
  for one vector. Written as sums of a few lines, which it vectorises and shares among cores, and one last product, this
  reads the matrix twice as fast.
  """
  (B, T, D), F = x_BTD.shape, weight_DF.values.shape[1]
  # Tied to the tokens, the matrix is not turned to floats once and for all, before a loop over tokens.
  x_BTD, values_DF = jax.lax.optimization_barrier((x_BTD.astype(jnp.float32), weight_DF.values))
  x, lines = x_BTD.reshape(B, T, LINES, D // LINES, 1), values_DF.reshape(LINES, D // LINES, F)
  partial = functools.reduce(
      operator.add, (x[:, :, i] * lines[i].astype(jnp.float32)[None, None] for i in range(LINES)))
  partial = jax.lax.optimization_barrier(partial)  # or XLA makes one sum of all, line by line, in the slow way
  return (jnp.ones((B, T, 1, D // LINES)) @ partial)[:, :, 0] * weight_DF.scale[None, None]


def _divisor(scale):
  return jnp.where(scale == 0, 1, scale)
