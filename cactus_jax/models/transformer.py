"""The decoder-only transformer: weights as a plain pytree, and one pure forward pass.

Layers are a Python loop over a tuple of per-layer arrays. A `lax.scan` over stacked weights compiles faster and
runs twice as slowly on a CPU, where one token is bound by reading each weight once.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from cactus_jax import sharding
from cactus_jax.models import cache as kv
from cactus_jax.models import layers
from cactus_jax.models.config import ModelConfig


@flax.struct.dataclass
class Layer:
  """Weights of one layer. Matrices are [in, out]: on a CPU that is the faster side for 1 to 8 tokens.

  Query, key and value are one matrix, since XLA's CPU backend gives a product as small as the key's one core only;
  they are grouped by key head, so that the axis can be split over devices as the heads are.
  """

  attn_norm: jax.Array  # [D]
  qkv: jax.Array  # [D, G*(R+2)*H]: per key head its R query heads, its key, its value
  o: jax.Array  # [N*H, D]
  mlp_norm: jax.Array  # [D]
  gate: jax.Array  # [D, F]
  up: jax.Array  # [D, F]
  down: jax.Array  # [F, D]


@flax.struct.dataclass
class Params:
  """All weights of a decoder."""

  embed: jax.Array  # [V, D]
  layers: tuple[Layer, ...]
  final_norm: jax.Array  # [D]
  head: jax.Array | None  # [V, D]; None: the embedding serves as head


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape and logical axes of one weight: the one declaration that loading, sharding and counting derive from."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]


def abstract(config: ModelConfig) -> Params:
  """The tree of `ParamSpec` that weights of `config` must match."""
  D, F, V = config.embed_dim, config.mlp_dim, config.vocab_size
  NH, GH = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  layer = Layer(
      attn_norm=ParamSpec((D,), ('embed',)),
      qkv=ParamSpec((D, NH + 2 * GH), ('embed', 'heads')),
      o=ParamSpec((NH, D), ('heads', 'embed')),
      mlp_norm=ParamSpec((D,), ('embed',)),
      gate=ParamSpec((D, F), ('embed', 'mlp')),
      up=ParamSpec((D, F), ('embed', 'mlp')),
      down=ParamSpec((F, D), ('mlp', 'embed')),
  )
  table = ParamSpec((V, D), ('vocab', 'embed'))
  return Params(
      embed=table,
      layers=(layer,) * config.num_layers,
      final_norm=ParamSpec((D,), ('embed',)),
      head=None if config.tie_embeddings else table,
  )


def random_params(key, config: ModelConfig, dtype=jnp.float32) -> Params:
  """Weights of the right shapes with a plausible scale: norms 1, matrices N(0, 1/fan_in)."""
  specs, tree = jax.tree.flatten(abstract(config))
  keys = jax.random.split(key, len(specs))

  def draw(key, spec):
    if len(spec.shape) == 1:
      return jnp.ones(spec.shape, dtype)
    fan_in = spec.shape[1] if spec.axes[0] == 'vocab' else spec.shape[0]
    return (jax.random.normal(key, spec.shape) * fan_in**-0.5).astype(dtype)

  return jax.tree.unflatten(tree, [draw(*pair) for pair in zip(keys, specs)])


@flax.struct.dataclass
class Transformer:
  """A decoder: weights and their sizes. Implements the LanguageModel protocol of decode.py."""

  params: Params
  config: ModelConfig = flax.struct.field(pytree_node=False)
  mesh: jax.sharding.Mesh | None = flax.struct.field(pytree_node=False, default=None)  # of its weights

  def __call__(self, tokens_BT, positions_BT, cache):
    """Logits of the next token after each of T tokens, and the cache with those tokens in it.

    Args:
      tokens_BT: i32[B, T], ids in 0..V-1.
      positions_BT: i32[B, T], absolute position of each token; rows may stand at different places.
      cache: `KVCache` whose slots before each row's first position are valid.
    Returns: f32[B, T, V] and the new cache.
    """
    return forward(self.params, self.config, tokens_BT, positions_BT, cache, self.mesh)

  def init_cache(self, batch, length):
    """An empty cache in the dtype of the weights."""
    return kv.init(self.config, batch, length, self.params.embed.dtype, self.mesh)

  def early_exit(self, num_layers):
    """The draft made of this model's first `num_layers` layers with its own norm and head; weights are shared.

    Source: Draft & Verify (Zhang et al., 2024), LayerSkip (Elhoushi et al., 2024). Raises ValueError outside
    1..num_layers-1.
    """
    if not 1 <= num_layers < self.config.num_layers:
      raise ValueError(
          f'early_exit({num_layers}): the model has {self.config.num_layers} layers; a draft needs at least 1 of '
          f'them and fewer than all, so choose 1..{self.config.num_layers - 1}.')
    return Transformer(
        params=self.params.replace(layers=self.params.layers[:num_layers]),
        config=dataclasses.replace(self.config, num_layers=num_layers),
        mesh=self.mesh,
    )


def forward(params, config, tokens_BT, positions_BT, cache, mesh=None):
  """One pass over T new tokens a row; see `Transformer.__call__`."""
  B, T = tokens_BT.shape
  R = config.num_heads // config.num_kv_heads
  cos, sin = layers.rope_angles(positions_BT, config.head_dim, config.rope_theta)
  whole = lambda x_BTD: sharding.constrain(x_BTD, mesh, 'batch', None, None)
  x_BTD = whole(params.embed[tokens_BT])
  new_k, new_v = [], []
  for layer, k_BGSH, v_BGSH in zip(params.layers, cache.k, cache.v, strict=True):
    h_BTD = layers.rms_norm(x_BTD, layer.attn_norm, config.norm_eps)
    qkv = jax.lax.optimization_barrier(layers.matmul(h_BTD, layer.qkv)).reshape(B, T, config.num_kv_heads, R + 2, config.head_dim)
    qk = layers.rope(qkv[:, :, :, : R + 1], cos, sin)
    k_BTGH, v_BTGH = qk[:, :, :, R], qkv[:, :, :, R + 1]
    attended_BTN = layers.attention(qk[:, :, :, :R], k_BTGH, v_BTGH, k_BGSH, v_BGSH, positions_BT)
    x_BTD += layers.matmul(attended_BTN, layer.o)
    x_BTD = whole(x_BTD)
    h_BTD = layers.rms_norm(x_BTD, layer.mlp_norm, config.norm_eps)
    x_BTD += layers.gated_mlp(h_BTD, layer.gate, layer.up, layer.down)
    x_BTD = whole(x_BTD)
    new_k.append(kv.write(k_BGSH, k_BTGH, positions_BT, mesh))
    new_v.append(kv.write(v_BGSH, v_BTGH, positions_BT, mesh))
  x_BTD = layers.rms_norm(x_BTD, params.final_norm, config.norm_eps)
  head_VD = params.embed if params.head is None else params.head
  logits_BTV = layers.logits(x_BTD, head_VD)
  logits_BTV = sharding.by_row(sharding.constrain(logits_BTV, mesh, 'batch', None, 'vocab'), mesh)
  return logits_BTV, kv.KVCache(k=tuple(new_k), v=tuple(new_v))
