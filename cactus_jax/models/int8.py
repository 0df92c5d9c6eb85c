"""Numbers as 8-bit integers times a scale, and products of activations with such weights.

Weights have a scale for each output. Activations are rounded token by token as they come, to two digits of 8 bits: to
one alone, the few large channels that language models have (Dettmers et al., 2022) leave too little for all others.
Both digits are rows of one product of integers, which is exact. It costs little where reading the weights is what
takes the time, and XLA is quicker with two rows than with one.
"""

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


FINE = 254  # a step of the first digit is so many of the second, which holds half a step to either side


def product(x_BTD, weight: Int8, axis):
  """f32[B, T, F]: x times a matrix [D, F] (axis 0 is D) or [F, D] (axis 1 is D); x has some 15 bits."""
  x = quantize(x_BTD, -1)
  rest = (x_BTD.astype(jnp.float32) / _divisor(x.scale)[..., None] - x.values) * FINE
  digits = jnp.concatenate([x.values, jnp.round(rest).astype(jnp.int8)], axis=1)
  sums = jax.lax.dot_general(
      digits, weight.values, (((2,), (axis,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)
  coarse, fine = jnp.split(sums, 2, axis=1)
  return (coarse + fine / FINE) * x.scale[..., None] * weight.scale[None, None]


def _divisor(scale):
  return jnp.where(scale == 0, 1, scale)
