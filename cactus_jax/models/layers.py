"""The parts of a decoder layer: functions of arrays, with no state and no configuration object."""

import jax
import jax.numpy as jnp


def matmul(x_BTD, weight_DF):
  """x @ weight."""
  if x_BTD.shape[0] * x_BTD.shape[1] > 1:
    return x_BTD @ weight_DF
  on_cpu = jnp.matmul if weight_DF.shape[0] % 4 else _matvec_in_quarters
  return jax.lax.platform_dependent(x_BTD, weight_DF, cpu=on_cpu, tpu=_matvec_as_rows, default=jnp.matmul)


def logits(x_BTD, head_VD):
  """x @ head.T, f32[B, T, V]."""
  product = lambda x_BTD, head_VD: jnp.einsum('BTD,VD->BTV', x_BTD, head_VD, preferred_element_type=jnp.float32)
  if x_BTD.shape[0] * x_BTD.shape[1] > 1:
    return product(x_BTD, head_VD)
  as_rows = lambda x_11D, head_VD: product(jnp.pad(x_11D, ((0, 0), (0, 7), (0, 0))), head_VD)[:, :1]
  return jax.lax.platform_dependent(x_BTD, head_VD, tpu=as_rows, default=product)


def _matvec_as_rows(x_11D, weight_DF):
  """The product with a single token as one with eight rows, seven of them zero.

  XLA's TPU backend takes a product with one vector from the matrix unit and gives it to the vector unit, which needs
  three times as long as reading the weights takes.
  """
  return (jnp.pad(x_11D, ((0, 0), (0, 7), (0, 0))) @ weight_DF)[:, :1]


def _matvec_in_quarters(x_11D, weight_DF):
  """The product with a single token as a sum over four slices of D.

  XLA's CPU backend shares the batches of a batched product among cores; it gives a plain product with one vector to
  one core, unless the matrix is large.
  """
  D, F = weight_DF.shape
  parts_4F = jax.lax.dot_general(
      x_11D.reshape(4, D // 4), weight_DF.reshape(4, D // 4, F), (((1,), (1,)), ((0,), (0,))))
  return parts_4F.sum(axis=0).reshape(1, 1, F)


def rms_norm(x_BTD, weight_D, eps):
  """x / sqrt(mean x^2 + eps) * weight, computed in float32 (Zhang and Sennrich, 2019)."""
  x = x_BTD.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  return (x * weight_D[None, None].astype(jnp.float32)).astype(x_BTD.dtype)


def rope_angles(positions_BT, head_dim, theta):
  """cos and sin, f32[B, T, H/2], of position times frequency (RoFormer, Su et al., 2021, equation 15)."""
  frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
  return jnp.cos(angles), jnp.sin(angles)


def rope(x_BTGRH, cos, sin):
  """Rotates pairs (i, i + H/2) of each head: the "rotate half" layout of Hugging Face checkpoints."""
  first, second = jnp.split(x_BTGRH.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None, None], sin[:, :, None, None]
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTGRH.dtype)


def attention(q_BTGRH, k_BTGH, v_BTGH, k_BGSH, v_BGSH, positions_BT):
  """Causal attention of T new tokens over themselves and a cache of S slots; slot s holds the key of position s.

  The cache is as it was before these tokens: of it a row sees the slots before its first new position, whatever stands
  in the others, so moving a row's length back is a complete rollback. R query heads share a key head. (To write first
  and to attend to the cache alone is the same mathematics, but makes XLA's TPU backend bring every cache to VMEM, write
  there, and carry all of it back.)

  Args: q, k, v of the new tokens, at consecutive positions in each row; the cache; positions_BT i32[B, T].
  Returns: [B, T, G*R*H].
  """
  B, T, G, R, H = q_BTGRH.shape
  S = k_BGSH.shape[2]
  # One batched matrix product over [B, G] with the T*R queries of a group as its rows; as an einsum over five axes
  # the same product takes twice as long on a CPU.
  batch = ((0, 1), (0, 1))
  q_BGQH = q_BTGRH.swapaxes(1, 2).reshape(B, G, T * R, H)

  def scores(k_BGSH, seen_BTS):
    scores_BGQS = jax.lax.dot_general(
        q_BGQH, k_BGSH, (((3,), (3,)), batch), preferred_element_type=jnp.float32) * H**-0.5
    return jnp.where(jnp.repeat(seen_BTS, R, axis=1)[:, None], scores_BGQS, -jnp.inf)

  old_BGQS = scores(k_BGSH, jnp.broadcast_to(jnp.arange(S)[None, None] < positions_BT[:, :1, None], (B, T, S)))
  new_BGQT = scores(k_BTGH.swapaxes(1, 2), positions_BT[:, None] <= positions_BT[..., None])
  peak = jnp.maximum(jnp.max(old_BGQS, axis=-1, keepdims=True), jnp.max(new_BGQT, axis=-1, keepdims=True))
  old_BGQS, new_BGQT = jnp.exp(old_BGQS - peak), jnp.exp(new_BGQT - peak)
  mass = jnp.sum(old_BGQS, axis=-1, keepdims=True) + jnp.sum(new_BGQT, axis=-1, keepdims=True)
  values = lambda weights, v_BGSH: jax.lax.dot_general(
      weights.astype(v_BGSH.dtype), v_BGSH, (((3,), (2,)), batch), preferred_element_type=jnp.float32)
  out_BGQH = ((values(old_BGQS, v_BGSH) + values(new_BGQT, v_BTGH.swapaxes(1, 2))) / mass).astype(v_BGSH.dtype)
  return out_BGQH.reshape(B, G, T, R * H).swapaxes(1, 2).reshape(B, T, -1)


def gated_mlp(x_BTD, gate_DF, up_DF, down_FD):
  """down(silu(gate x) * up x): SwiGLU (Shazeer, 2020)."""
  return matmul(jax.nn.silu(matmul(x_BTD, gate_DF)) * matmul(x_BTD, up_DF), down_FD)
