"""The key/value cache: one slot per absolute position, written per row, with no length inside."""

import flax.struct
import jax
import jax.numpy as jnp

from cactus_jax import sharding

AXES = ('batch', 'heads', None, None)  # of [B, G, S, H]


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer. Which slots are valid is the decoder's knowledge (`DecodeState`), not ours."""

  k: tuple[jax.Array, ...]  # per layer [B, G, S, H]
  v: tuple[jax.Array, ...]


def init(config, batch, length, dtype, mesh=None):
  """An empty cache of `length` slots a row."""
  shape = (batch, config.cache_heads, length, config.head_dim)
  zeros = lambda: tuple(sharding.constrain(jnp.zeros(shape, dtype), mesh, *AXES) for _ in range(config.num_layers))
  return KVCache(k=zeros(), v=zeros())


def write(cache_BGSH, new_BTGH, positions_BT, mesh=None):
  """The cache with each row's T new entries at that row's own positions; a position beyond the end is dropped."""
  B, G = cache_BGSH.shape[:2]
  rows_B11, heads_1G1 = jnp.arange(B)[:, None, None], jnp.arange(G)[None, :, None]
  new_BGTH = new_BTGH.swapaxes(1, 2).astype(cache_BGSH.dtype)
  written = cache_BGSH.at[rows_B11, heads_1G1, positions_BT[:, None]].set(new_BGTH, mode='drop')
  return sharding.constrain(written, mesh, *AXES)
