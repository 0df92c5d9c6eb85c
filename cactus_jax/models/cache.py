"""The key/value cache: one slot per absolute position, written per row, with no length inside."""

import flax.struct
import jax
import jax.numpy as jnp

from cactus_jax import sharding
from cactus_jax.models import int8
from cactus_jax.models.int8 import Int8

AXES = ('batch', 'heads', None, None)  # of [B, G, S, H], and the first three of the scales [B, G, S]


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer. Which slots are valid is the decoder's knowledge (`DecodeState`), not ours."""

  k: tuple[jax.Array | Int8, ...]  # per layer [B, G, S, H]; Int8: with a scale for each key head and position
  v: tuple[jax.Array | Int8, ...]
  # [B, S, (1+N)*D], for drafts that read it: at each position what N layers are given, and last what the head is.
  hidden: jax.Array | None = None
  hidden_layers: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())  # those N layers, rising


def init(config, batch, length, dtype, mesh=None):
  """An empty cache of `length` slots a row, of floats or, for the dtype int8, `Int8`."""
  shape = (batch, config.cache_heads, length, config.head_dim)
  empty = lambda: (Int8(values=init_by_head(shape, dtype, mesh), scale=init_by_head(shape[:3], jnp.float32, mesh))
                   if dtype == jnp.int8 else init_by_head(shape, dtype, mesh))
  return KVCache(k=tuple(empty() for _ in range(config.num_layers)),
                 v=tuple(empty() for _ in range(config.num_layers)))


def init_by_head(shape, dtype, mesh=None):
  """Room for what `write` writes, [B, G, S, H] or [B, G, S]."""
  return sharding.constrain(jnp.zeros(shape, dtype), mesh, *AXES[: len(shape)])


def init_positions(shape, dtype, mesh=None):
  """Room for something at each position of each row, [B, S, ...]."""
  return sharding.constrain(jnp.zeros(shape, dtype), mesh, 'batch', *(None,) * (len(shape) - 1))


def write_positions(old_BS, new_BT, positions_BT, mesh=None):
  """What was there with each row's T new entries at that row's own positions; one beyond is dropped."""
  rows_B1 = jnp.arange(old_BS.shape[0])[:, None]
  written = old_BS.at[rows_B1, positions_BT].set(new_BT.astype(old_BS.dtype), mode='drop')
  return sharding.constrain(written, mesh, 'batch', *(None,) * (old_BS.ndim - 1))


def write(cached, new_BTGH, positions_BT, mesh=None):
  """The cached array with each row's T new entries (`as_cached`) at that row's own positions; one beyond is dropped."""
  return jax.tree.map(lambda old, new: _write(old, new, positions_BT, mesh), cached, new_BTGH)


def _write(old_BGS, new_BTG, positions_BT, mesh):
  """For values, which have a last axis H, and for scales, which have not."""
  B, G = old_BGS.shape[:2]
  rows_B11, heads_1G1 = jnp.arange(B)[:, None, None], jnp.arange(G)[None, :, None]
  written = old_BGS.at[rows_B11, heads_1G1, positions_BT[:, None]].set(new_BTG.swapaxes(1, 2), mode='drop')
  return sharding.constrain(written, mesh, *AXES[: written.ndim])


def as_cached(cached, new_BTGH):
  """New entries as the cache holds them: attended to so, what a token sees does not depend on when it was written."""
  return int8.quantize(new_BTGH, -1) if isinstance(cached, Int8) else new_BTGH.astype(cached.dtype)
