"""Roots that every other file may need: exact ones of monotone tests, and gradients of any."""

import jax
import jax.numpy as jnp


def largest_float(holds, shape=()):
  """The largest float32 in [0, 1] for which a falling test still holds (that it holds at 0 is taken for granted).

  Non-negative floats order as their bit patterns, so the number is built from its highest bit down: 30 calls of the
  test, every digit exact, however small the number.

  Args: holds, a function of f32[shape] to bool[shape].
  """

  def set_bit(i, bits):
    trial = bits | (1 << (29 - i))
    return jnp.where(holds(jax.lax.bitcast_convert_type(trial, jnp.float32)) & (trial <= 0x3F800000), trial, bits)

  bits = jax.lax.fori_loop(0, 30, set_bit, jnp.zeros(shape, jnp.int32))  # 0x3f800000, of 30 bits, is 1.0
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def implicit_root(root, error, slope):
  """The root with the gradient of the equation error(root, parameters) = 0 that it solves.

  Args: root, found in any way, carries no gradient; error, the residual at it, carries that of the parameters; slope,
    d error / d root. Where the slope is not positive the root does not move.
  """
  moves = slope > 0
  step = jnp.where(moves, -error / jax.lax.stop_gradient(jnp.where(moves, slope, 1.0)), 0.0)
  return root + (step - jax.lax.stop_gradient(step))
