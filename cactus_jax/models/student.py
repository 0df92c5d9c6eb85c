"""A draft that was distilled from its verifier: a few layers between the verifier's own embedding and head.

The embedding is the verifier's, and so are the rows of the head, of the R tokens that it writes most; others have no
probability in the draft's law, which costs acceptance and never exactness. Where `fuse` is there, the draft also
reads the verifier's hidden states (Li et al., EAGLE, 2024): what enters its first layer at position p is a product of
the token there and of what some of the verifier's layers (EAGLE-3, 2025) and its head were given at p - 1. Beyond the
text that the verifier has read, that is what the draft's own head was given, and nothing of the lower ones.

Where `copy` is there, the tokens of the text have probability too, whether the head has rows for them or not, and the
one that followed an earlier occurrence of the last few is lifted (prompt lookup, Saxena, 2023, as a part of the law,
with weights that are learned).

Columns of a law are the R rows of the head and, of a draft that copies, the S slots of its text: the column of a token
that has no row is the slot where it first stands.
"""

import dataclasses
import functools
import json
import pathlib
import warnings

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from cactus_jax import sharding
from cactus_jax.models import cache as kv
from cactus_jax.models import hf, int8, layers, transformer, weights
from cactus_jax.models.config import from_hf_config, to_hf_config
from cactus_jax.models.int8 import Int8
from cactus_jax.models.transformer import Transformer

FORMAT, VERSION = 'cactus_jax student', 2
DESCRIPTION, WEIGHTS = 'student.json', 'student.safetensors'
FUSE = 'model.fuse.weight'  # [D, (2+N)*D], as files have matrices
COPY = 'model.copy.bias'  # [L]
FIELDS = ('config', 'window', 'head_size', 'hidden_layers', 'tokenizer', 'embedding')  # of the description
EPS = 1e-6


@flax.struct.dataclass
class StudentCache:
  """What a student keeps of the text; slots are valid as those of a `KVCache` are."""

  layers: kv.KVCache  # of its own layers
  hidden: jax.Array | None  # [B, S, (1+N)*D], what it reads of the verifier, and its own beyond
  tokens: jax.Array | None  # i32[B, S], of which it copies
  rows: jax.Array | None  # the rows that the verifier's head has for them, in G parts, [B, G, S, D/G], as keys are


@flax.struct.dataclass
class Student:
  """A distilled draft. Implements the LanguageModel protocol of decode.py; see `load_draft`, `new_student`."""

  body: Transformer  # embed [V, D] is the verifier's, head [R, D] rows of its head
  head_ids: jax.Array  # i32[R], the token of each row of the head, rising
  row_of: jax.Array  # i32[V], the row of each token, R for one that has none
  fuse: jax.Array | None = None  # [(2+N)*D, D] for the token, what N layers of the verifier are given, and its head
  # Nats, f32[L]: what is added to the logit of the token that followed the last tokens when they stood there before,
  # for 1 to L tokens that are the same; see `latest_match`.
  copy: jax.Array | None = None
  whole_head: jax.Array | Int8 | None = None  # the verifier's, of one that copies; None where it is the embedding
  # Those N, rising; None where there is no fuse.
  hidden_layers: tuple[int, ...] | None = flax.struct.field(pytree_node=False, default=None)

  def __call__(self, tokens_BT, positions_BT, cache):
    """Logits f32[B, T, V], -inf for tokens without a column, and the cache with these tokens; see `Transformer`."""
    hidden_BTD, cache = self.run(tokens_BT, positions_BT, cache)
    return self._logits(hidden_BTD, positions_BT, cache), cache

  def score_one(self, tokens_BT, positions_BT, cache, index_B):
    """`__call__`, with logits after one of the T tokens only, f32[B, 1, V]: that of index_B, i32[B]."""
    hidden_BTD, cache = self.run(tokens_BT, positions_BT, cache)
    position_B1 = jnp.take_along_axis(positions_BT, index_B[:, None], axis=1)
    return self._logits(transformer.one_of(hidden_BTD, index_B), position_B1, cache), cache

  def run(self, tokens_BT, positions_BT, cache):
    """The draft's own hidden states [B, T, D], and the cache with these tokens."""
    x_BTD = transformer.embed(self.body.params, self.body.config, tokens_BT, self.mesh)
    if self.copy is not None:
      cache = cache.replace(tokens=kv.write_positions(cache.tokens, tokens_BT, positions_BT, self.mesh),
                            rows=kv.write(cache.rows, self.rows_of(tokens_BT), positions_BT, self.mesh))
    if self.fuse is not None:
      before_BT1 = jnp.maximum(positions_BT - 1, 0)[..., None]
      before_BTW = jnp.take_along_axis(cache.hidden, before_BT1, axis=1).astype(x_BTD.dtype)
      x_BTD = fused(self.fuse, x_BTD, jnp.where(positions_BT[..., None] > 0, before_BTW, 0))
    own_BTD, own_cache = self._run_layers(x_BTD, positions_BT, cache.layers)
    if self.fuse is not None:
      hidden = kv.write_positions(cache.hidden, self.as_read(own_BTD), positions_BT, self.mesh)
      cache = cache.replace(hidden=hidden)
    return own_BTD, cache.replace(layers=own_cache)

  def _run_layers(self, x_BTD, positions_BT, cache, alone=False):
    return transformer.run_layers(self.body.params, self.body.config, x_BTD, positions_BT, cache, self.mesh, alone)

  def _logits(self, hidden_BTD, positions_BT, cache):
    columns_BV = self.columns(cache.tokens)
    logits_BTC = self.column_logits(hidden_BTD, positions_BT, columns_BV, cache.tokens, cache.rows)
    B, T, _ = logits_BTC.shape
    none_BT1 = jnp.full((B, T, 1), -jnp.inf)
    return jnp.take_along_axis(jnp.concatenate([logits_BTC, none_BT1], axis=-1), columns_BV[:, None], axis=-1)

  def rows_of(self, tokens_BT):
    """The verifier's head for tokens of a draft that copies, in the parts that the cache has, [B, T, G, D/G]."""
    embed = self.body.params.embed
    rows_BTD = head_rows(embed if self.whole_head is None else self.whole_head, tokens_BT).astype(embed.dtype)
    return rows_BTD.reshape(*tokens_BT.shape, *self._parts)

  @property
  def _parts(self):
    """(G, D/G): XLA's CPU backend writes a row in parts by a scatter, and a whole one, where D has no G parts, or one
    only, by copying all rows."""
    D, G = self.config.embed_dim, self.config.cache_heads
    return (1, D) if D % G else (G, D // G)

  def columns(self, tokens_BS):
    """The column of each token of the vocabulary in the laws over a text, i32[B, V]; of one without, their number.

    tokens_BS: what the text may have; None for a draft that copies nothing, whose laws are alike for all texts: [1, V].
    """
    if self.copy is None:
      return self.row_of[None]
    (B, S), R = tokens_BS.shape, len(self.head_ids)
    first_BV = jnp.full((B, len(self.row_of)), S, jnp.int32)
    first_BV = first_BV.at[jnp.arange(B)[:, None], tokens_BS].min(jnp.arange(S, dtype=jnp.int32)[None])
    return jnp.where(self.row_of[None] < R, self.row_of[None], R + first_BV)

  def column_logits(self, hidden_BTD, positions_BT, columns_BV, tokens_BS=None, rows_BGSH=None):
    """Logits f32[B, T, C] of the columns, -inf for slots that are none or that stand after the position.

    Args: columns_BV, of the texts; tokens_BS and rows_BGSH, the texts of a draft that copies, and the rows of them.
    """
    logits_BTR = transformer.logits(self.body.params, self.config, hidden_BTD, self.mesh)
    if self.copy is None:
      return logits_BTR
    R, slots_S = logits_BTR.shape[-1], jnp.arange(tokens_BS.shape[1])
    hidden_BTGH = hidden_BTD.reshape(*positions_BT.shape, *self._parts)
    logits_BGST = jnp.einsum('BGSH,BTGH->BGST', rows_BGSH, hidden_BTGH, preferred_element_type=jnp.float32)
    logits_BTS = logits_BGST.sum(axis=1).swapaxes(1, 2)
    if self.config.logit_softcap is not None:
      logits_BTS = layers.soft_cap(logits_BTS, self.config.logit_softcap)
    is_first_BS = jnp.take_along_axis(columns_BV, tokens_BS, axis=1) == R + slots_S[None]
    there_BTS = is_first_BS[:, None] & (slots_S[None, None] <= positions_BT[..., None])
    logits_BTC = jnp.concatenate([logits_BTR, jnp.where(there_BTS, logits_BTS, -jnp.inf)], axis=-1)
    token_BT, matched_BT = latest_match(tokens_BS, positions_BT, len(self.copy))
    more_BT = jnp.concatenate([jnp.zeros(1), self.copy.astype(jnp.float32)])[matched_BT]
    column_BT = jnp.take_along_axis(columns_BV, token_BT, axis=1)
    is_it_BTC = jnp.arange(logits_BTC.shape[-1])[None, None] == column_BT[..., None]
    return logits_BTC + jnp.where(is_it_BTC, more_BT[..., None], 0)

  def as_read(self, own_BTD):
    """Its own hidden states as it reads them, [B, T, (1+N)*D]."""
    return jnp.pad(own_BTD, ((0, 0), (0, 0), (len(self.hidden_layers) * own_BTD.shape[-1], 0)))

  def read_text(self, tokens_BT, hidden_BTW=None, past=None):
    """The draft's own hidden states [B, T, D] of whole texts, for training, and the keys and values of its layers.

    Args:
      hidden_BTW: for a draft that reads them, the hidden states at the same positions, [B, T, (1+N)*D].
      past: a `KVCache`; if there, each token sees this of the tokens before it, as a drafted token does of the text.
    """
    B, T = tokens_BT.shape
    x_BTD = transformer.embed(self.body.params, self.body.config, tokens_BT, self.mesh)
    if self.fuse is not None:
      before_BTW = jnp.pad(hidden_BTW[:, :-1], ((0, 0), (1, 0), (0, 0)))
      x_BTD = fused(self.fuse, x_BTD, before_BTW.astype(x_BTD.dtype))
    positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    empty = self.body.replace(kv_dtype=None).init_cache(B, T)  # integers would have no gradient
    return self._run_layers(x_BTD, positions_BT, empty if past is None else past, alone=past is not None)

  @property
  def config(self):
    """That of its layers, over the whole vocabulary."""
    return self.body.config

  @property
  def mesh(self):
    """Of its weights."""
    return self.body.mesh

  @property
  def quantize(self):
    """'int8' if its matrices are 8-bit integers, else None."""
    return self.body.quantize

  @property
  def reads_hidden(self):
    """Whether it reads the verifier's hidden states."""
    return self.fuse is not None

  def init_cache(self, batch, length):
    """An empty cache."""
    dtype, room = self.body.params.embed.dtype, functools.partial(kv.init_positions, mesh=self.mesh)
    G, H = self._parts
    width = None if self.fuse is None else self.fuse.shape[0] - self.config.embed_dim
    return StudentCache(
        layers=self.body.init_cache(batch, length),
        hidden=None if width is None else room((batch, length, width), dtype),
        tokens=None if self.copy is None else room((batch, length), jnp.int32),
        rows=None if self.copy is None else kv.init_by_head((batch, G, length, H), dtype, self.mesh))

  def observe(self, cache, target_cache):
    """The cache with the verifier's hidden states."""
    return cache.replace(hidden=target_cache.hidden)


def fused(fuse, embedded_BTD, before_BTW):
  """What enters the first layer: a product of token and hidden states, each at unit scale."""
  D = embedded_BTD.shape[-1]
  states = [before_BTW[..., i : i + D] for i in range(0, before_BTW.shape[-1], D)]
  return layers.matmul(jnp.concatenate([_unit(x) for x in (embedded_BTD, *states)], axis=-1), fuse)


def latest_match(tokens_BS, positions_BT, most):
  """What followed when the last tokens of a text stood there before, of the longest match the latest.

  Args: tokens_BS i32[B, S]; positions_BT i32[B, T], where texts end; most, tokens that are compared.
  Returns: that token, i32[B, T], and how many tokens before it are the same, i32[B, T] in 0..most.
  """
  S = tokens_BS.shape[1]
  slots_11S = jnp.arange(S)[None, None]
  matching_BTS = slots_11S < positions_BT[..., None]
  matched_BTS = jnp.zeros(matching_BTS.shape, jnp.int32)
  for back in range(most):  # whether the `back + 1` tokens that end at each slot are those that end the text
    last_BT = jnp.take_along_axis(tokens_BS, jnp.maximum(positions_BT - back, 0), axis=1)
    matching_BTS &= (slots_11S >= back) & (jnp.roll(tokens_BS, back, axis=1)[:, None] == last_BT[..., None])
    matched_BTS += matching_BTS
  end_BT = jnp.argmax(matched_BTS * S + jnp.where(matched_BTS > 0, slots_11S, 0), axis=-1)
  at_end = lambda x_BTS: jnp.take_along_axis(x_BTS, end_BT[..., None], axis=-1)[..., 0]
  return jnp.take_along_axis(tokens_BS, jnp.minimum(end_BT + 1, S - 1), axis=1), at_end(matched_BTS)


def _unit(x_BTD):
  return layers.rms_norm(x_BTD, jnp.ones(x_BTD.shape[-1:], x_BTD.dtype), EPS)


def student_config(config, num_layers, window=None):
  """The config of a student's body: the verifier's, with so many layers and maybe a window on all of them."""
  windows = (window,) * num_layers
  return dataclasses.replace(config, num_layers=num_layers, windows=windows, tie_embeddings=False)


def make_student(target, layer_params, final_norm, head_ids, *, fuse=None, copy=None, hidden_layers=None,
                 window=None) -> Student:
  """A student around given layers, in the verifier's dtype and on its mesh (where layers and fuse must be already).

  Args: target, the verifier, a Transformer; layer_params, a tuple of `Layer`; head_ids, the tokens that its head has
    rows for, rising; fuse, copy and hidden_layers, as `Student` has them.
  Raises: ValueError for a fuse that does not read these layers of this verifier.
  """
  config = student_config(target.config, len(layer_params), window)
  if hidden_layers is not None:
    hidden_layers = transformer.check_hidden_layers(hidden_layers, target.config)
  D = config.embed_dim
  reads = None if hidden_layers is None else ((2 + len(hidden_layers)) * D, D)
  if reads != (None if fuse is None else fuse.shape):
    raise ValueError(f'hidden_layers={hidden_layers} need a fuse of shape {reads}.')
  head_ids = np.asarray(head_ids, np.int32)
  rows = head_rows(_head(target), jnp.asarray(head_ids))
  params = transformer.Params(embed=target.params.embed, layers=tuple(layer_params), final_norm=final_norm,
                              head=rows.astype(target.params.embed.dtype))
  return Student(Transformer(params, config, target.mesh, target.kv_dtype), jnp.asarray(head_ids),
                 jnp.asarray(row_of(head_ids, config.vocab_size)), fuse, copy, _whole_head(target, copy), hidden_layers)


def row_of(head_ids, vocab_size):
  """i32[V]: the row of each token among head_ids, or their number."""
  rows = np.full(vocab_size, len(head_ids), np.int32)
  rows[np.asarray(head_ids)] = np.arange(len(head_ids))
  return rows


def _head(target):
  """The verifier's head, [V, D], or [D, V] where it is `Int8`."""
  return target.params.embed if target.config.tie_embeddings else target.params.head


def _whole_head(target, copy):
  """What a student needs of it beside the embedding."""
  return None if copy is None or target.config.tie_embeddings else target.params.head


def head_rows(head, tokens):
  """Rows of a head for some tokens, [..., D], as floats."""
  if isinstance(head, Int8):
    return jnp.moveaxis(int8.dequantize(Int8(head.values[:, tokens], head.scale[tokens]), 0), 0, -1)
  return head[tokens]


def new_student(target, layer_ids, head_ids, *, hidden_layers=None, copy=0, window=None) -> Student:
  """A student to be trained: some of the verifier's layers between its embedding and head.

  Of the weights that the verifier has no start for, `fuse` begins as what its head was given, and a little of all else.
  Args:
    layer_ids: which of the verifier's layers.
    hidden_layers: for a draft that reads hidden states, those whose input it reads beside what the head is given; None:
      it reads none.
    copy: how many tokens are compared to find what to copy; 0: it copies nothing.
  Raises: ValueError for layers that the verifier does not have, and for a verifier in 8 bits.
  """
  if target.quantize:
    raise ValueError('the verifier\'s matrices are 8-bit integers, from which no draft can be trained: load it as '
                     'floats.')
  count = target.config.num_layers
  if not layer_ids or not all(0 <= i < count for i in layer_ids):
    raise ValueError(f'layers={tuple(layer_ids)}: need at least one of 0..{count - 1}.')
  fuse = None
  if hidden_layers is not None:
    D = target.config.embed_dim
    noise = 0.02 * jax.random.normal(jax.random.key(0), ((2 + len(hidden_layers)) * D, D))
    fuse = (noise.at[-D:].add(jnp.eye(D))).astype(target.params.embed.dtype)
  return make_student(target, [target.params.layers[i] for i in layer_ids], target.params.final_norm, head_ids,
                      fuse=fuse, copy=jnp.arange(copy, dtype=jnp.float32) if copy else None,
                      hidden_layers=hidden_layers, window=window)


def save(folder, student, tokenizer, about=None):
  """Writes what a student does not share with its verifier to a new folder, which `load` reads.

  Weights are stored as float16, half the size. Nothing is at `folder` until everything is written.
  Args: tokenizer, the verifier's; about, what to note of how it was made, as JSON has it.
  Raises: ValueError if there is something at `folder`, or for a student in 8 bits.
  """
  if student.quantize:
    raise ValueError(f'{folder}: this draft is held in 8 bits; save the one that it was rounded from.')
  config, params = student.config, student.body.params
  names, tensors = hf.names_of(config), {'head_ids': np.asarray(student.head_ids)}
  specs = jax.tree_util.tree_flatten_with_path(_own(transformer.abstract(config)))[0]
  for (path, spec), array in zip(specs, jax.tree.leaves(_own(params)), strict=True):
    array = np.asarray(sharding.fetch(weights.without_copies(config, spec, array)))
    tensors |= weights.to_stored(dataclasses.replace(config, kv_copies=1), names, path, array)
  if student.fuse is not None:
    tensors[FUSE] = np.asarray(sharding.fetch(student.fuse)).T
  if student.copy is not None:
    tensors[COPY] = np.asarray(sharding.fetch(student.copy))
  half = lambda x: np.ascontiguousarray(x if x.dtype == np.int32 else x.astype(np.float16))
  whole = dataclasses.replace(config, windows=(), kv_copies=1, tie_embeddings=True)
  described = {
      'format': FORMAT, 'version': VERSION,
      'config': to_hf_config(whole, 'float16'),
      'window': config.windows[0] if config.windows else None,
      'head_size': len(student.head_ids),
      'hidden_layers': student.hidden_layers,
      'tokenizer': hf.digest(tokenizer),
      'embedding': _sample(params.embed),
      'about': about or {},
  }
  with weights.new_folder(folder) as partial:
    if jax.process_index() == 0:
      try:
        safetensors.numpy.save_file({name: half(x) for name, x in tensors.items()}, partial / WEIGHTS)
        (partial / DESCRIPTION).write_text(json.dumps(described, indent=1) + '\n', encoding='utf-8')
      except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f'{folder}: could not be written ({error}); is the disk full?') from error


def is_student(folder) -> bool:
  """Whether a folder holds a distilled draft."""
  return (pathlib.Path(folder).expanduser() / DESCRIPTION).is_file()


def read_about(folder) -> dict:
  """What was noted of how the draft of a folder was made. Raises ValueError for a folder without a description."""
  return _described(pathlib.Path(folder).expanduser()).get('about', {})


def load(folder, target, tokenizer, *, quantize=None) -> Student:
  """The draft of a folder that `save` wrote, with its verifier's embedding and head, on its mesh and in its dtype.

  Args: target and tokenizer, the verifier and its tokenizer; quantize, None or 'int8': of layers and head.
  Raises: ValueError for a folder that is damaged, or of another tokenizer or size of verifier; warns where the
    verifier's embedding is not the one that the draft was trained on.
  """
  folder = pathlib.Path(folder).expanduser()
  described = _described(folder)
  if described['tokenizer'] != hf.digest(tokenizer):
    raise ValueError(f'{folder} is the draft of a verifier with another tokenizer: its tokens are not these.')
  config = from_hf_config(described['config'])
  ours, theirs = (config.vocab_size, config.embed_dim), (target.config.vocab_size, target.config.embed_dim)
  if ours != theirs:
    raise ValueError(f'{folder} is the draft of a verifier with {ours[0]} tokens of {ours[1]} numbers, this one has '
                     f'{theirs[0]} of {theirs[1]}.')
  if not np.allclose(described['embedding'], _sample(target.params.embed), rtol=0.05):
    warnings.warn(f'{folder} was trained for a verifier with another embedding: few of its tokens may be accepted.',
                  stacklevel=2)
  try:
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'{folder / WEIGHTS}: damaged or missing ({error}); copy it again.') from None
  hidden_layers = described['hidden_layers']
  head_ids, fuse, copy = (tensors.pop(name, None) for name in ('head_ids', FUSE, COPY))
  if (head_ids is None or len(head_ids) != described['head_size'] or np.any(np.diff(head_ids) <= 0) or head_ids[0] < 0
      or head_ids[-1] >= config.vocab_size or (fuse is not None) != (hidden_layers is not None)
      or fuse is not None and fuse.shape[1] != (2 + len(hidden_layers)) * config.embed_dim):
    raise ValueError(f'{folder}: {DESCRIPTION} does not belong to these weights; copy both again.')
  if hidden_layers is not None:
    hidden_layers = transformer.check_hidden_layers(hidden_layers, target.config)
  names, mesh = hf.names_of(config), target.mesh
  head = np.asarray(sharding.fetch(head_rows(_head(target), jnp.asarray(head_ids))))
  tensors[names['embed']] = head
  num_layers, window = config.num_layers, described['window']
  # The rows of the head stand in for the embedding while the rest is read.
  small = weights.for_mesh(dataclasses.replace(config, vocab_size=len(head_ids), tie_embeddings=True), mesh)
  params = weights.assemble(
      small, names, {name: x.shape for name, x in tensors.items()}, lambda name, index: tensors[name][index],
      source=folder, dtype=target.params.embed.dtype, mesh=mesh, quantize=quantize)
  params = params.replace(embed=target.params.embed, head=params.embed if params.head is None else params.head)
  config = dataclasses.replace(small, vocab_size=config.vocab_size, tie_embeddings=False,
                               windows=(window,) * num_layers, eos_ids=target.config.eos_ids,
                               max_length=target.config.max_length)
  place = lambda x: jnp.asarray(x) if mesh is None else sharding.from_host(
      np.asarray(x), sharding.sharding_of(mesh, (None,) * x.ndim, x.shape))
  return Student(Transformer(params, config, mesh, target.kv_dtype), place(head_ids.astype(np.int32)),
                 place(row_of(head_ids, config.vocab_size)),
                 None if fuse is None else place(fuse.T.astype(target.params.embed.dtype)),
                 None if copy is None else place(copy.astype(np.float32)),
                 _whole_head(target, copy), hidden_layers)


def as_transformer(student) -> Transformer:
  """The same draft as a model of its own, with a copy of embedding and head, which other programs can load.

  Raises ValueError for one that reads hidden states or copies, or whose head lacks tokens.
  """
  if student.reads_hidden or student.copy is not None:
    raise ValueError('a draft that reads hidden states, or copies, is no model of its own; train one that does '
                     'neither.')
  if len(student.head_ids) != student.config.vocab_size:
    raise ValueError(f'the head of this draft has {len(student.head_ids)} of {student.config.vocab_size} tokens, which '
                     'other programs do not know; train one with all.')
  return student.body


def _described(folder):
  path = folder / DESCRIPTION
  try:
    described = json.loads(path.read_text(encoding='utf-8'))
    if described['format'] != FORMAT or described['version'] != VERSION:
      raise ValueError(f'its format is {described["format"]} {described["version"]}, known here is {FORMAT} {VERSION}')
    if missing := [name for name in FIELDS if name not in described]:
      raise ValueError(f'it lacks {", ".join(missing)}')
    return described
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path}: no description of a distilled draft ({error}); copy the folder again.') from None


def _own(params):
  """What of weights, or their specs, is the student's own."""
  return params.replace(embed=None, head=None)


def _sample(embed):
  """Norms of a few rows of an embedding, by which it is known again in any dtype."""
  rows = np.linspace(0, embed.shape[0] - 1, 16).astype(np.int32)
  norms = jnp.linalg.norm(embed[rows].astype(jnp.float32), axis=-1)
  return [round(float(x), 4) for x in sharding.fetch(norms)]
