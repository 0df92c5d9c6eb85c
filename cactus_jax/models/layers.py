"""The parts of a decoder layer: functions of arrays, with no state and no configuration object."""

import functools

import jax
import jax.numpy as jnp

from cactus_jax.models import int8
from cactus_jax.models.int8 import Int8

FEW = 16  # tokens, up to which a product is bound by reading the matrix


def matmul(x_BTD, weight_DF, rows=None):
  """x @ weight, which may be `Int8`. rows: of B*T, how many a device has; None: all."""
  B, T, D = x_BTD.shape
  if isinstance(weight_DF, Int8):
    return _int8_product(x_BTD, weight_DF).astype(x_BTD.dtype)
  if (B * T if rows is None else rows) > 1:
    if B * T > FEW:
      return x_BTD @ weight_DF
    return jax.lax.platform_dependent(x_BTD, weight_DF, cpu=_columns_on_the_left, default=jnp.matmul)
  on_cpu = _matvec_in_quarters if B * T == 1 and D % 4 == 0 else jnp.matmul
  return jax.lax.platform_dependent(x_BTD, weight_DF, cpu=on_cpu, tpu=_as_eight(jnp.matmul), default=jnp.matmul)


def logits(x_BTD, head_VD, rows=None):
  """x @ head.T, f32[B, T, V]; where the head is `Int8`, it is [D, V]."""
  if isinstance(head_VD, Int8):
    return _int8_product(x_BTD, head_VD)
  product = lambda x_BTD, head_VD: jnp.einsum('BTD,VD->BTV', x_BTD, head_VD, preferred_element_type=jnp.float32)
  count = x_BTD.shape[0] * x_BTD.shape[1]
  if (count if rows is None else rows) > 1:
    if count > FEW:
      return product(x_BTD, head_VD)
    return jax.lax.platform_dependent(x_BTD, head_VD, cpu=_matrix_on_the_left, default=product)
  return jax.lax.platform_dependent(x_BTD, head_VD, tpu=_as_eight(product), default=product)


def _columns_on_the_left(x_BTD, weight_DF):
  """The product of a few tokens with a matrix, the tokens laid out by columns.

  XLA's CPU backend has two libraries. The one it prefers lays a matrix on the right out anew at a third more time, but
  refuses tokens that lie by columns; the barrier keeps the compiler from turning them back.
  """
  B, T, D = x_BTD.shape
  x_DN = jax.lax.optimization_barrier(x_BTD.reshape(B * T, D).T)
  return jax.lax.dot_general(x_DN, weight_DF, (((0,), (0,)), ((), ()))).reshape(B, T, -1)


def _matrix_on_the_left(x_BTD, head_VD):
  """The product of a few tokens with a head, written as that of the head with the tokens.

  XLA's CPU backend lays a matrix on the right out anew; on the left it reads it as it lies, by four tokens at a time:
  of more than four there are a multiple. In four parts of the head it is a fifth quicker than as a whole.
  """
  B, T, D = x_BTD.shape
  rows, V = B * T, head_VD.shape[0]
  parts = 1 if V % 4 else 4
  x_ND = jnp.pad(x_BTD.reshape(rows, D), ((0, -rows % 4 if rows > 4 else 0), (0, 0)))
  logits_PVN = jax.lax.dot_general(
      head_VD.reshape(parts, V // parts, D), jnp.broadcast_to(x_ND, (parts, *x_ND.shape)),
      (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
  return logits_PVN.reshape(V, -1)[:, :rows].T.reshape(B, T, V)


def _int8_product(x_BTD, weight_DF):
  B, T, D = x_BTD.shape
  on_cpu = int8.product_of_few if B * T <= 2 and D % int8.LINES == 0 else int8.product
  return jax.lax.platform_dependent(x_BTD, weight_DF, cpu=on_cpu, default=int8.product)


def _as_eight(product):
  """The product with one token a row as one with eight, seven of them zero.

  XLA's TPU backend takes a product with a single vector from the matrix unit and gives it to the vector unit, which
  needs three times as long as reading the weights takes.
  """
  return lambda x_B1D, weight: product(jnp.pad(x_B1D, ((0, 0), (0, 7), (0, 0))), weight)[:, :1]


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


def rope_angles(positions_BT, frequencies, amplitude=1.0):
  """cos and sin, f32[B, T, H/2], of position times frequency, times the amplitude (`rope.py`)."""
  angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
  return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rope(x_BTGRH, cos, sin):
  """Rotates pairs (i, i + H/2) of each head: the "rotate half" layout of Hugging Face checkpoints."""
  first, second = jnp.split(x_BTGRH.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None, None], sin[:, :, None, None]
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTGRH.dtype)


def attention(q_BTGRH, k_BTGH, v_BTGH, k_BGSH, v_BGSH, positions_BT, scale=None, cap=None, window=None,
              alone=False):
  """Causal attention of T new tokens over themselves and a cache of S slots; slot s holds the key of position s.

  The cache is as it was before these tokens: of it a row sees the slots before its first new position, whatever finite
  number stands in the others, so moving a row's length back is a complete rollback. R query heads share a key head.
  (To write first and to attend to the cache alone is the same mathematics, but makes XLA's TPU backend bring every
  cache to VMEM, write there, and carry all of it back.)

  Args:
    q_BTGRH, k_BTGH, v_BTGH: of the new tokens, at consecutive positions in each row. (One that is read twice, at one
      position, counts twice and changes nothing.)
    k_BGSH, v_BGSH: the cache, of floats or `Int8`, as those of the new tokens are. positions_BT: i32[B, T].
    scale: of the scores; None is H^-1/2.
    cap: of the scores (`soft_cap`), or None.
    window: how many positions a query sees, its own included, or None for all.
    alone: whether each token sees the cache before itself, and of the new ones itself only.
  Returns: [B, T, G*R*H].
  """
  B, T, G, R, H = q_BTGRH.shape
  # One batched matrix product over [B, G] with the T*R queries of a group as its rows; as an einsum over five axes
  # the same product takes twice as long on a CPU.
  batch = ((0, 1), (0, 1))
  q_BGQH = q_BTGRH.swapaxes(1, 2).reshape(B, G, T * R, H)

  def scores(k_BGSH, slots_BTS, seen_BTS):
    k_BGSH, k_scale_BGS = _split(k_BGSH, q_BTGRH.dtype)
    scores = jax.lax.dot_general(q_BGQH, k_BGSH, (((3,), (3,)), batch), preferred_element_type=jnp.float32)
    scores = scores * (H**-0.5 if scale is None else scale)
    if k_scale_BGS is not None:
      scores *= k_scale_BGS[:, :, None]
    if cap is not None:
      scores = soft_cap(scores, cap)
    if window is not None:
      seen_BTS &= positions_BT[..., None] - slots_BTS < window
    return jnp.where(jnp.repeat(seen_BTS, R, axis=1)[:, None], scores, -jnp.inf)

  by_head = lambda new_BTGH: jax.tree.map(lambda x: x.swapaxes(1, 2), new_BTGH)
  slots_11S = jnp.arange(jax.tree.leaves(k_BGSH)[0].shape[2])[None, None]
  before_BTS = slots_11S < (positions_BT if alone else positions_BT[:, :1])[..., None]
  old_BGQS = scores(k_BGSH, slots_11S, jnp.broadcast_to(before_BTS, (B, T, slots_11S.size)))
  seen_by = jnp.equal if alone else jnp.less_equal
  new_BGQT = scores(by_head(k_BTGH), positions_BT[:, None], seen_by(positions_BT[:, None], positions_BT[..., None]))
  # A token sees itself, so the peak is finite.
  peak_BGQ1 = jnp.maximum(jnp.max(old_BGQS, axis=-1, keepdims=True), jnp.max(new_BGQT, axis=-1, keepdims=True))
  old_BGQS, new_BGQT = jnp.exp(old_BGQS - peak_BGQ1), jnp.exp(new_BGQT - peak_BGQ1)
  mass_BGQ1 = jnp.sum(old_BGQS, axis=-1, keepdims=True) + jnp.sum(new_BGQT, axis=-1, keepdims=True)

  def mean(weights_BGQS, v_BGSH):
    v_BGSH, v_scale_BGS = _split(v_BGSH, q_BTGRH.dtype)
    if v_scale_BGS is not None:
      weights_BGQS = weights_BGQS * v_scale_BGS[:, :, None]
    return jax.lax.dot_general(
        weights_BGQS.astype(v_BGSH.dtype), v_BGSH, (((3,), (2,)), batch), preferred_element_type=jnp.float32)

  out_BGQH = (mean(old_BGQS, v_BGSH) + mean(new_BGQT, by_head(v_BTGH))) / mass_BGQ1
  out_BGQH = out_BGQH.astype(q_BTGRH.dtype)
  return out_BGQH.reshape(B, G, T, R * H).swapaxes(1, 2).reshape(B, T, -1)


def _split(cached, dtype):
  """What a product with cached numbers needs: the numbers, or integers as `dtype` and the scale they lack."""
  return (cached.values.astype(dtype), cached.scale) if isinstance(cached, Int8) else (cached, None)


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True)}


def gated_mlp(x_BTD, gate_DF, up_DF, down_FD, activation='silu', rows=None):
  """down(activation(gate x) * up x): SwiGLU, or GEGLU with the tanh approximation of gelu (Shazeer, 2020)."""
  hidden_BTF = ACTIVATIONS[activation](matmul(x_BTD, gate_DF, rows)) * matmul(x_BTD, up_DF, rows)
  return matmul(hidden_BTF, down_FD, rows)
