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


def rising_root(error_and_slope, low, high, start, tolerance):
  """Where a rising function is 0, by Newton's method held within a bracket.

  Ends at an error within the tolerance, where a step no longer moves the root, where the bracket is 2e-7 wide (of its
  upper end, if that is more than 1), or after 50 steps. Its loop has no reverse gradient: what the function closes over
  must carry none, see `implicit_root`.

  Args: error_and_slope, a function of f32[] to its value and derivative, both f32[]; low and high, where it is at most
    and at least 0; start, between them; tolerance, of the value.
  Returns: (root, slope there).
  """

  def unsettled(carry):
    low, high, _, error, _, moved, steps = carry
    wide = high - low > 2e-7 * jnp.maximum(jnp.abs(high), 1.0)
    return (jnp.abs(error) > tolerance) & wide & moved & (steps < 50)

  def refine(carry):
    low, high, root, error, slope, _, steps = carry
    low, high = jnp.where(error < 0, root, low), jnp.where(error < 0, high, root)
    newton = root - error / jnp.where(slope > 0, slope, 1.0)
    step = jnp.where((slope > 0) & (newton >= low) & (newton <= high), newton, (low + high) / 2)
    return low, high, step, *error_and_slope(step), step != root, steps + 1

  carry = low, high, start, *error_and_slope(start), True, 0
  _, _, root, _, slope, _, _ = jax.lax.while_loop(unsettled, refine, carry)
  return root, slope


def implicit_root(root, error, slope):
  """The root with the gradient of the equation error(root, parameters) = 0 that it solves.

  Args: root, found in any way, carries no gradient; error, the residual at it, carries that of the parameters; slope,
    d error / d root. Where the slope is not positive the root does not move.
  """
  moves = slope > 0
  step = jnp.where(moves, -error / jax.lax.stop_gradient(jnp.where(moves, slope, 1.0)), 0.0)
  return root + (step - jax.lax.stop_gradient(step))
