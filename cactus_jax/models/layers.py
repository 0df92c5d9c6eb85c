"""The parts of a decoder layer: functions of arrays, with no state and no configuration object."""

import functools

import jax
import jax.numpy as jnp


def matmul(x_BTD, weight_DF):
  """x @ weight."""
  if x_BTD.shape[0] * x_BTD.shape[1] > 1 or weight_DF.shape[0] % 4:
    return x_BTD @ weight_DF
  return jax.lax.platform_dependent(x_BTD, weight_DF, cpu=_matvec_in_quarters, default=jnp.matmul)


def _matvec_in_quarters(x_11D, weight_DF):
  """The product with a single token as a sum over four slices of D.

  XLA's CPU backend shares the batches of a batched product among cores; it gives a plain product with one vector to
  one core, unless the matrix is large.
  """
  D, F = weight_DF.shape
  parts_4F = jax.lax.dot_general(
      x_11D.reshape(4, D // 4), weight_DF.reshape(4, D // 4, F), (((1,), (1,)), ((0,), (0,))))
  return parts_4F.sum(axis=0).reshape(1, 1, F)


def rms_norm(x_BTD, weight_D, eps, offset=0.0):
  """x / sqrt(mean x^2 + eps) * (offset + weight), computed in float32 (Zhang and Sennrich, 2019).

  Some families store the weight as its distance from 1; their offset is 1.
  """
  x = x_BTD.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  weight = weight_D.reshape((1,) * (x.ndim - weight_D.ndim) + weight_D.shape).astype(jnp.float32)
  if offset:
    weight += offset
  return (x * weight).astype(x_BTD.dtype)


def norm_heads(qk_BTGRH, q_norm_H, k_norm_H, eps, offset=0.0):
  """RMS norm of each head (Henry et al., 2020): the last of the R is the key's, all others are queries."""
  weight_RH = jnp.stack([q_norm_H] * (qk_BTGRH.shape[3] - 1) + [k_norm_H])
  return rms_norm(qk_BTGRH, weight_RH, eps, offset)


def soft_cap(x, cap):
  """x bent into (-cap, cap) by a tanh (Bello et al., 2016; Gemma 2)."""
  return cap * jnp.tanh(x / cap)


def rope_angles(positions_BT, head_dim, theta, llama3=None):
  """cos and sin, f32[B, T, H/2], of position times frequency (RoFormer, Su et al., 2021, equation 15).

  llama3: None or the four numbers of `llama3_frequencies`.
  """
  frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  if llama3 is not None:
    frequencies = llama3_frequencies(frequencies, *llama3)
  angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
  return jnp.cos(angles), jnp.sin(angles)


def llama3_frequencies(frequencies, factor, low, high, original_length):
  """Frequencies for a context `factor` times the original one, as Llama 3.1 has them.

  A frequency with fewer than `low` turns in the original context is divided by the factor, one with more than `high`
  is kept, and between them the two are mixed.
  """
  turns = original_length * frequencies / (2 * jnp.pi)
  kept = jnp.clip((turns - low) / (high - low), 0, 1)
  return (1 - kept) * frequencies / factor + kept * frequencies


def rope(x_BTGRH, cos, sin):
  """Rotates pairs (i, i + H/2) of each head: the "rotate half" layout of Hugging Face checkpoints."""
  first, second = jnp.split(x_BTGRH.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None, None], sin[:, :, None, None]
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTGRH.dtype)


def attention(q_BTGRH, k_BGSH, v_BGSH, positions_BT, scale=None, cap=None, window=None):
  """Causal attention of T new tokens over a cache of S slots; slot s holds the key of absolute position s.

  The mask on absolute positions is the whole rule of validity: a slot beyond the query's own position is never
  seen, whatever number it holds, so moving a row's length back is a complete rollback. R query heads share a key head.

  Args:
    scale: of the scores; None is H^-1/2.
    cap: of the scores (`soft_cap`), or None.
    window: how many positions a query sees, its own included, or None for all.
  Returns: [B, T, G*R*H].
  """
  B, T, G, R, H = q_BTGRH.shape
  S = k_BGSH.shape[2]
  # One batched matrix product over [B, G] with the T*R queries of a group as its rows; as an einsum over five axes
  # the same product takes twice as long on a CPU.
  batch = ((0, 1), (0, 1))
  q_BGQH = q_BTGRH.swapaxes(1, 2).reshape(B, G, T * R, H)
  scores = jax.lax.dot_general(q_BGQH, k_BGSH, (((3,), (3,)), batch), preferred_element_type=jnp.float32)
  scores = scores * (H**-0.5 if scale is None else scale)
  if cap is not None:
    scores = soft_cap(scores, cap)
  unseen = -jnp.inf
  seen_BTS = jnp.arange(S)[None, None] <= positions_BT[..., None]
  if window is not None:
    seen_BTS &= positions_BT[..., None] - jnp.arange(S)[None, None] < window
    # A position beyond the end of the cache may have no slot in its window: finite, lest its softmax be NaN.
    unseen = jnp.finfo(scores.dtype).min
  seen_BQS = jnp.repeat(seen_BTS, R, axis=1)
  weights = jax.nn.softmax(jnp.where(seen_BQS[:, None], scores, unseen), axis=-1).astype(v_BGSH.dtype)
  out_BGQH = jax.lax.dot_general(weights, v_BGSH, (((3,), (2,)), batch))
  return out_BGQH.reshape(B, G, T, R * H).swapaxes(1, 2).reshape(B, T, -1)


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True)}


def gated_mlp(x_BTD, gate_DF, up_DF, down_FD, activation='silu'):
  """down(activation(gate x) * up x): SwiGLU, or GEGLU with the tanh approximation of gelu (Shazeer, 2020)."""
  return matmul(ACTIVATIONS[activation](matmul(x_BTD, gate_DF)) * matmul(x_BTD, up_DF), down_FD)
