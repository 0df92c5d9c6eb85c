"""The decoder-only transformer: weights as a plain pytree, and one pure forward pass.

Layers are a Python loop over a tuple of per-layer arrays. A `lax.scan` over stacked weights compiles faster and
runs twice as slowly on a CPU, where one token is bound by reading each weight once.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from cactus_jax import sharding
from cactus_jax.models import cache as kv
from cactus_jax.models import layers, rope
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.int8 import Int8


@flax.struct.dataclass
class Layer:
  """Weights of one layer. Matrices are [in, out]: on a CPU that is the faster side for 1 to 8 tokens. They may be
  `Int8`.

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
  # None where the family has none.
  qkv_bias: jax.Array | None = None  # [G*(R+2)*H], grouped as qkv is
  q_norm: jax.Array | None = None  # [H], of every query head
  k_norm: jax.Array | None = None  # [H], of every key head
  post_attn_norm: jax.Array | None = None  # [D], of what attention adds
  post_mlp_norm: jax.Array | None = None  # [D], of what the mlp adds


@flax.struct.dataclass
class Params:
  """All weights of a decoder."""

  embed: jax.Array  # [V, D]
  layers: tuple[Layer, ...]
  final_norm: jax.Array  # [D]
  head: jax.Array | Int8 | None  # [V, D], or [D, V] where it is Int8; None: the embedding serves as head


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape and logical axes of one weight: the one declaration that loading, sharding and counting derive from."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]

  @property
  def is_matrix(self):
    return len(self.shape) == 2

  @property
  def input_axis(self):
    """Of a matrix, the axis that its product with activations sums over; the embedding's is that of a head."""
    return 1 if self.axes[0] == 'vocab' else 0

  def as_int8(self) -> Int8:
    """The specs of the `Int8` that holds this matrix: [in, out], with a scale for each output."""
    matrix = self if self.input_axis == 0 else ParamSpec(self.shape[::-1], self.axes[::-1])
    return Int8(values=matrix, scale=ParamSpec(matrix.shape[1:], matrix.axes[1:]))


def abstract(config: ModelConfig, quantize=None) -> Params:
  """The tree of `ParamSpec` that weights of `config` must match, plain or quantised (None or 'int8')."""
  D, F, V = config.embed_dim, config.mlp_dim, config.vocab_size
  NH, GH = config.num_heads * config.head_dim, config.cache_heads * config.head_dim
  norm, head_norm = ParamSpec((D,), ('norm',)), ParamSpec((config.head_dim,), ('norm',))
  layer = Layer(
      attn_norm=norm,
      qkv=ParamSpec((D, NH + 2 * GH), ('embed', 'heads')),
      o=ParamSpec((NH, D), ('heads', 'embed')),
      mlp_norm=norm,
      gate=ParamSpec((D, F), ('embed', 'mlp')),
      up=ParamSpec((D, F), ('embed', 'mlp')),
      down=ParamSpec((F, D), ('mlp', 'embed')),
      qkv_bias=ParamSpec((NH + 2 * GH,), ('heads',)) if config.qkv_bias else None,
      q_norm=head_norm if config.qk_norm else None,
      k_norm=head_norm if config.qk_norm else None,
      post_attn_norm=norm if config.post_norms else None,
      post_mlp_norm=norm if config.post_norms else None,
  )
  table = ParamSpec((V, D), ('vocab', 'embed'))
  head = None if config.tie_embeddings else table
  if quantize:
    layer = jax.tree.map(lambda spec: spec.as_int8() if spec.is_matrix else spec, layer)
    head = table.as_int8()
  return Params(embed=table, layers=(layer,) * config.num_layers, final_norm=norm, head=head)


def random_params(key, config: ModelConfig, dtype=jnp.float32) -> Params:
  """Weights of a plausible scale: norms multiply by 1, matrices N(0, 1/fan_in), biases N(0, 0.01)."""
  specs, tree = jax.tree.flatten(abstract(config))
  keys = jax.random.split(key, len(specs))

  def draw(key, spec):
    if spec.axes == ('heads',):
      return (jax.random.normal(key, spec.shape) * 0.1).astype(dtype)
    if len(spec.shape) == 1:
      return jnp.full(spec.shape, 1 - config.norm_offset, dtype)
    return (jax.random.normal(key, spec.shape) * spec.shape[spec.input_axis]**-0.5).astype(dtype)

  return jax.tree.unflatten(tree, [draw(*pair) for pair in zip(keys, specs)])


@flax.struct.dataclass
class Transformer:
  """A decoder: weights and their sizes. Implements the LanguageModel protocol of decode.py."""

  params: Params
  config: ModelConfig = flax.struct.field(pytree_node=False)
  mesh: jax.sharding.Mesh | None = flax.struct.field(pytree_node=False, default=None)  # of its weights
  kv_dtype: str | None = flax.struct.field(pytree_node=False, default=None)  # of its caches; None: that of the weights

  def __call__(self, tokens_BT, positions_BT, cache):
    """Logits of the next token after each of T tokens, and the cache with those tokens in it.

    Args:
      tokens_BT: i32[B, T], ids in 0..V-1.
      positions_BT: i32[B, T], absolute position of each token; rows may stand at different places.
      cache: `KVCache` whose slots before each row's first position are valid.
    Returns: f32[B, T, V] and the new cache.
    """
    with jax.named_scope('forward'):
      return forward(self.params, self.config, tokens_BT, positions_BT, cache, self.mesh)

  def score_one(self, tokens_BT, positions_BT, cache, index_B):
    """`__call__`, with logits after one of the T tokens only, f32[B, 1, V]: that of index_B, i32[B]."""
    with jax.named_scope('forward'):
      return forward(self.params, self.config, tokens_BT, positions_BT, cache, self.mesh, index_B)

  @property
  def quantize(self):
    """'int8' if its matrices are 8-bit integers, else None."""
    return 'int8' if isinstance(self.params.head, Int8) else None

  def init_cache(self, batch, length, hidden_layers=None):
    """An empty cache.

    hidden_layers: rising; if not None, the cache also keeps at each position what each of these layers is given, past
      its norm, and last what the head is given.
    Raises: ValueError for layers that are not there.
    """
    dtype = self.params.embed.dtype
    cache = kv.init(self.config, batch, length, jnp.dtype(self.kv_dtype or dtype), self.mesh)
    if hidden_layers is None:
      return cache
    hidden_layers = check_hidden_layers(hidden_layers, self.config)
    shape = (batch, length, (1 + len(hidden_layers)) * self.config.embed_dim)
    return cache.replace(hidden=kv.init_positions(shape, dtype, self.mesh), hidden_layers=hidden_layers)

  def early_exit(self, num_layers):
    """The draft made of this model's first `num_layers` layers with its own norm and head; weights are shared.

    Source: Draft & Verify (Zhang et al., 2024), LayerSkip (Elhoushi et al., 2024). Raises ValueError outside
    1..num_layers-1.
    """
    if not 1 <= num_layers < self.config.num_layers:
      raise ValueError(
          f'early_exit({num_layers}): the model has {self.config.num_layers} layers; a draft needs at least 1 of '
          f'them and fewer than all, so choose 1..{self.config.num_layers - 1}.')
    return self.replace(
        params=self.params.replace(layers=self.params.layers[:num_layers]),
        config=dataclasses.replace(
            self.config, num_layers=num_layers, windows=self.config.windows[:num_layers]),
    )


def forward(params, config, tokens_BT, positions_BT, cache, mesh=None, index_B=None):
  """One pass over T new tokens a row; see `Transformer.__call__`, and with index_B `Transformer.score_one`."""
  x_BTD = embed(params, config, tokens_BT, mesh)
  x_BTD, cache = run_layers(params, config, x_BTD, positions_BT, cache, mesh)
  return logits(params, config, x_BTD if index_B is None else one_of(x_BTD, index_B), mesh), cache


def check_hidden_layers(hidden_layers, config) -> tuple[int, ...]:
  """The layers; raises ValueError for some that a model does not have, and for some that do not rise."""
  if list(hidden_layers) != sorted({i for i in hidden_layers if 0 <= i < config.num_layers}):
    raise ValueError(f'hidden_layers={tuple(hidden_layers)}: need rising ones of 0..{config.num_layers - 1}.')
  return tuple(hidden_layers)


def embed(params, config, tokens_BT, mesh=None):
  """What enters the first layer, [B, T, D]."""
  x_BTD = sharding.constrain(params.embed[tokens_BT], mesh, 'batch', None, None)
  return x_BTD if config.embed_scale is None else x_BTD * jnp.asarray(config.embed_scale, x_BTD.dtype)


def run_layers(params, config, x_BTD, positions_BT, cache, mesh=None, alone=False):
  """What leaves the last layer and the final norm, the hidden state [B, T, D], and the cache with these tokens.

  alone: whether each token is read as if it were the only new one, after what the cache has before it.
  """
  B, T = positions_BT.shape
  R = config.num_heads // config.cache_heads
  rows = sharding.batch_per_device(mesh, B) * T
  matmul = functools.partial(layers.matmul, rows=rows)
  scaling = config.rope_scaling
  angles = layers.rope_angles(positions_BT, rope.frequencies(config.head_dim, config.rope_theta, scaling),
                              scaling.attention_factor if scaling else 1.0)
  local_angles = angles
  if config.local_rope_theta is not None:
    local_angles = layers.rope_angles(positions_BT, rope.frequencies(config.head_dim, config.local_rope_theta))
  norm = functools.partial(layers.rms_norm, eps=config.norm_eps, offset=config.norm_offset)
  windows = config.windows or (None,) * config.num_layers
  whole = lambda x_BTD: sharding.constrain(x_BTD, mesh, 'batch', None, None)
  new_k, new_v, given = [], [], []
  for i, (layer, window, k_BGSH, v_BGSH) in enumerate(zip(params.layers, windows, cache.k, cache.v, strict=True)):
    h_BTD = norm(x_BTD, layer.attn_norm)
    if i in cache.hidden_layers:
      given.append(h_BTD)
    # The barrier keeps XLA's TPU backend from laying the matrix out anew, in each step, to suit the reshape below.
    qkv = jax.lax.optimization_barrier(matmul(h_BTD, layer.qkv))
    if config.qkv_bias:
      qkv += layer.qkv_bias[None, None]
    qkv = qkv.reshape(B, T, config.cache_heads, R + 2, config.head_dim)
    qk = qkv[:, :, :, : R + 1]
    if config.qk_norm:
      qk = layers.norm_heads(qk, layer.q_norm, layer.k_norm, config.norm_eps, config.norm_offset)
    qk = layers.rope(qk, *(angles if window is None else local_angles))
    k_BTGH, v_BTGH = kv.as_cached(k_BGSH, qk[:, :, :, R]), kv.as_cached(v_BGSH, qkv[:, :, :, R + 1])
    new_k.append(kv.write(k_BGSH, k_BTGH, positions_BT, mesh))
    new_v.append(kv.write(v_BGSH, v_BTGH, positions_BT, mesh))
    past = (k_BGSH, v_BGSH) if alone else (_either(k_BGSH, new_k[-1]), _either(v_BGSH, new_v[-1]))
    h_BTD = layers.attention(qk[:, :, :, :R], k_BTGH, v_BTGH, *past, positions_BT, config.query_scale,
                             config.attn_softcap, window, alone)
    h_BTD = matmul(h_BTD, layer.o)
    x_BTD = whole(x_BTD + (norm(h_BTD, layer.post_attn_norm) if config.post_norms else h_BTD))
    h_BTD = norm(x_BTD, layer.mlp_norm)
    h_BTD = layers.gated_mlp(h_BTD, layer.gate, layer.up, layer.down, config.activation, rows)
    x_BTD = whole(x_BTD + (norm(h_BTD, layer.post_mlp_norm) if config.post_norms else h_BTD))
  x_BTD = norm(x_BTD, params.final_norm)
  hidden = cache.hidden
  if hidden is not None:
    hidden = kv.write_positions(hidden, jnp.concatenate([*given, x_BTD], axis=-1), positions_BT, mesh)
  return x_BTD, cache.replace(k=tuple(new_k), v=tuple(new_v), hidden=hidden)


def _either(old, new):
  """The cache to attend to: where these tokens stand in it, it is masked, so both come to the same.

  XLA's CPU backend would copy the old one, which it is about to write to; its TPU backend would bring all of the new
  one to VMEM and back.
  """
  return jax.lax.platform_dependent(old, new, cpu=lambda old, new: new, default=lambda old, new: old)


def one_of(hidden_BTD, index_B):
  """The hidden state of one token in each row, [B, 1, D]."""
  return jnp.take_along_axis(hidden_BTD, index_B[:, None, None], axis=1)


def logits(params, config, hidden_BTD, mesh=None):
  """f32[B, T, V] of hidden states, whole rows on a device."""
  B, T, _ = hidden_BTD.shape
  head_VD = params.embed if params.head is None else params.head
  rows = sharding.batch_per_device(mesh, B) * T
  logits_BTV = sharding.constrain(layers.logits(hidden_BTD, head_VD, rows), mesh, 'batch', None, 'vocab')
  if config.logit_softcap is not None:
    logits_BTV = layers.soft_cap(logits_BTV, config.logit_softcap)
  return sharding.by_row(logits_BTV, mesh)
