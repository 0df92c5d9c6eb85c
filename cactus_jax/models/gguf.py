"""Reads a GGUF file, the format of llama.cpp: sizes, weights (maybe quantised) and tokenizer in one."""

import dataclasses
import math
import pathlib
import struct

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from cactus_jax.models import rope, weights
from cactus_jax.models.config import ModelConfig, default_head_dim
from cactus_jax.models.transformer import Params

# Our weight -> theirs; '{}' is the layer.
NAMES = {
    'embed': 'token_embd.weight',
    'attn_norm': 'blk.{}.attn_norm.weight',
    'q': 'blk.{}.attn_q.weight',
    'k': 'blk.{}.attn_k.weight',
    'v': 'blk.{}.attn_v.weight',
    'o': 'blk.{}.attn_output.weight',
    'mlp_norm': 'blk.{}.ffn_norm.weight',
    'gate': 'blk.{}.ffn_gate.weight',
    'up': 'blk.{}.ffn_up.weight',
    'down': 'blk.{}.ffn_down.weight',
    'final_norm': 'output_norm.weight',
    'head': 'output.weight',
    'q_bias': 'blk.{}.attn_q.bias',
    'k_bias': 'blk.{}.attn_k.bias',
    'v_bias': 'blk.{}.attn_v.bias',
    'q_norm': 'blk.{}.attn_q_norm.weight',
    'k_norm': 'blk.{}.attn_k_norm.weight',
    'post_attn_norm': 'blk.{}.post_attention_norm.weight',
    'post_mlp_norm': 'blk.{}.post_ffw_norm.weight',
}
FACTORS = 'rope_freqs.weight'  # no weight, but what each rotary frequency is divided by

# Field of ModelConfig -> metadata after the architecture's name.
NEEDED = {
    'embed_dim': 'embedding_length',
    'num_layers': 'block_count',
    'num_heads': 'attention.head_count',
    'mlp_dim': 'feed_forward_length',
    'max_length': 'context_length',
    'norm_eps': 'attention.layer_norm_rms_epsilon',
}
PATTERN = 'attention.sliding_window_pattern'  # a period, or for each layer whether it has a window
YARN_BOUNDS = {'yarn_beta_fast': ('beta_fast', 32.0), 'yarn_beta_slow': ('beta_slow', 1.0)}  # key -> field, default
ARRAY = gguf.GGUFValueType.ARRAY
IRRELEVANT = ('GGUF.', 'general.', 'tokenizer.', 'quantize.')  # beginnings of keys that do not change a model

# Architectures that keep a state from which the last tokens cannot be taken back, as a rejected draft asks for.
RECURRENT = frozenset("""
arwkv7 falcon-h1 granitehybrid jamba kimi-linear lfm2 lfm2moe mamba mamba2 nemotron_h nemotron_h_moe plamo2
qwen35 qwen35moe qwen3next rwkv6 rwkv6qwen2 rwkv7
""".split())

# Tokens that end an answer, whatever the metadata call the end; from llama.cpp's list.
END_TOKENS = {
    '<|endoftext|>', '<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end_of_text|>', '</s>', '<end_of_turn>',
    '<｜end▁of▁sentence｜>',
}


def _pieces(number):
  """Cuts text into words, numbers as that pattern says, and the rest."""
  pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + number
             + r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])


# How a byte-level tokenizer cuts text before merging, under llama.cpp's name; \p{N} of its patterns is our Digits.
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {
    'gpt-2': _WORDS,
    'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS]),
    'llama-bpe': _pieces(r'\p{N}{1,3}'),
    'qwen2': _pieces(r'\p{N}'),
    'deepseek-r1-qwen': _pieces(r'\p{N}'),
}
COMPOSED = ('qwen2', 'deepseek-r1-qwen')  # those that compose accents with their letters first
BOS_UNLESS_TOLD = {'llama', 'llama-bpe'}  # models and splits that begin a text with a token if the file does not say


def load(path, *, dtype=None, mesh=None, quantize=None) -> tuple[Params, ModelConfig]:
  """Weights, dequantised, and config of a GGUF file.

  Raises ValueError for a model that is not implemented and for a file that is damaged or does not fit.
  """
  path = pathlib.Path(path).expanduser()
  reader = _open(path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  try:
    _check_types(reader.tensors)
    config = weights.for_mesh(_config(reader.fields, tensors), mesh)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  stored = {name: _shape(tensor) for name, tensor in tensors.items() if name != FACTORS}
  permuted = ('attn_q.weight', 'attn_k.weight') if config.family == 'llama' else ()

  def read(name, index):
    if not name.endswith(permuted):
      array = _dequantize(tensors[name], index)
      return array - config.norm_offset if config.norm_offset and name.endswith('norm.weight') else array
    rows, columns = index
    first, end = rows.start // config.head_dim, -(-rows.stop // config.head_dim)  # the heads that have these rows
    whole = _dequantize(tensors[name], (slice(first * config.head_dim, end * config.head_dim), columns))
    return _unpermute(whole, config.head_dim)[rows.start - first * config.head_dim:][:rows.stop - rows.start]

  params = weights.assemble(
      config, NAMES, stored, read, source=path, dtype=dtype, mesh=mesh, quantize=quantize)
  return params, config


def load_tokenizer(path):
  """The tokenizer in a GGUF file, as transformers would save it for the original model.

  transformers reads some too, but only if torch is installed, and without the split into digits, so that two
  spaces before a number are other tokens than in training.

  Raises ValueError for a tokenizer that is not implemented.
  """
  transformers = weights.import_transformers()

  fields = _open(pathlib.Path(path).expanduser()).fields
  kind = {key: _token_value(fields, key) for key in ('model', 'pre', 'add_bos_token', 'add_eos_token')}
  roles = {'bos_token': 'bos', 'eos_token': 'eos', 'unk_token': 'unknown', 'pad_token': 'padding'}
  ids = {role: _token_value(fields, f'{name}_token_id') for role, name in roles.items()}
  known = kind['model'] == 'llama' or kind['model'] == 'gpt2' and kind['pre'] in SPLITS
  if not known or kind['add_eos_token']:
    raise ValueError(
        f'{path}: a tokenizer of {kind}: implemented are model llama, and model gpt2 with pre {" or ".join(SPLITS)}, '
        'with no added end; load the tokenizer of the original model from the hub or a folder.')
  starts = kind['add_bos_token']
  if starts is None:
    starts = bool(BOS_UNLESS_TOLD & {kind['model'], kind['pre']})
  needed = ['tokens', 'token_type', 'scores' if kind['model'] == 'llama' else 'merges', *['bos_token_id'] * starts]
  missing = [f'tokenizer.ggml.{key}' for key in needed if _token_value(fields, key) is None]
  if missing:
    raise ValueError(f'{path}: the tokenizer lacks {", ".join(missing)}; load that of the original model from the hub '
                     'or a folder.')
  tokens, types = _token_value(fields, 'tokens'), _token_value(fields, 'token_type')
  tokenizer = _sentencepiece(fields, tokens, types) if kind['model'] == 'llama' else _byte_level(fields, tokens)
  for special, wanted in ((True, gguf.TokenType.CONTROL), (False, gguf.TokenType.USER_DEFINED)):
    added = [token for token, type_ in zip(tokens, types) if type_ == wanted]
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=special) for token in added])
  named = {role: tokens[i] for role, i in ids.items() if i is not None}
  if starts:
    bos = named['bos_token']
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, '$A'], pair=[bos, '$A', f'{bos}:1', '$B:1'], special_tokens=[(bos, ids['bos_token'])])
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizer, chat_template=_value(fields.get('tokenizer.chat_template')), **named)


def _byte_level(fields, tokens):
  """A tokenizer of bytes that are merged in the order of a list, as GPT-2's."""
  split = _token_value(fields, 'pre')
  merges = [tuple(merge.split(' ')) for merge in _token_value(fields, 'merges')]
  tokenizer = tokenizers.Tokenizer(models.BPE(
      {token: i for i, token in enumerate(tokens)}, merges, ignore_merges=split == 'llama-bpe'))
  if split in COMPOSED:
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = SPLITS[split]
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _sentencepiece(fields, tokens, types):
  """A tokenizer of characters, or their bytes, of which those are merged whose token scores best."""
  texts = (gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED)
  scored = [(score, token) for score, token, type_ in zip(_token_value(fields, 'scores'), tokens, types)
            if type_ in texts]
  parts = {token for _, token in scored}
  merges = [(token[:i], token[i:]) for _, token in sorted(scored, key=lambda pair: pair[0], reverse=True)
            for i in range(1, len(token)) if token[:i] in parts and token[i:] in parts]
  unknown = _token_value(fields, 'unknown_token_id')
  tokenizer = tokenizers.Tokenizer(models.BPE(
      {token: i for i, token in enumerate(tokens)}, merges, fuse_unk=True, byte_fallback=True,
      unk_token=None if unknown is None else tokens[unknown]))
  spaces, back = [normalizers.Replace(' ', '▁')], [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  if _token_value(fields, 'add_space_prefix') in (None, True):
    # As in llama.cpp, also after a special token; newer tokenizers of transformers do so only where a text begins.
    spaces, back = [normalizers.Prepend('▁'), *spaces], [*back, decoders.Strip(' ', 1, 0)]
  tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(spaces), decoders.Sequence(back)
  return tokenizer


class _Reader(gguf.GGUFReader):
  """GGUFReader in a tenth of the time: over a plain array, not a memmap, and without a call for each of 10^5 tokens."""

  @property
  def data(self):
    return self._data

  @data.setter
  def data(self, memmap):
    self._data = memmap.view(np.ndarray)

  def _get_field_parts(self, orig_offs, raw_type):
    kind = self._get(orig_offs, np.uint32)[0] if raw_type == ARRAY else raw_type
    if raw_type != ARRAY or kind == ARRAY:
      return super()._get_field_parts(orig_offs, raw_type)
    count = self._get(orig_offs + 4, np.uint64)
    parts, offset = [self._get(orig_offs, np.uint32), count], orig_offs + 12
    if kind == gguf.GGUFValueType.STRING:
      length = struct.Struct('>Q' if self.endianess == gguf.GGUFEndian.BIG else '<Q')
      for _ in range(count[0]):
        start = offset + length.size
        offset = start + length.unpack_from(self._data, offset)[0]
        parts.append(self._data[start:offset])
    else:
      values = self._get(offset, self.gguf_scalar_to_np[kind], count[0])
      parts, offset = [*parts, values], offset + values.nbytes
    return offset - orig_offs, parts, list(range(2, len(parts))), [ARRAY, gguf.GGUFValueType(kind)]


def _open(path):
  if not path.is_file():
    raise ValueError(f'{path}: no such file; pass the path of a GGUF file.')
  try:
    return _Reader(path)
  except (ValueError, IndexError, KeyError, OverflowError, MemoryError, struct.error) as error:
    raise ValueError(f'{path}: damaged or no GGUF file ({error}); download it again.') from error


def _check_types(tensors):
  for tensor in {tensor.tensor_type: tensor for tensor in tensors}.values():
    try:
      gguf.dequantize(np.atleast_2d(tensor.data)[:1], tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(f'{tensor.name} is {tensor.tensor_type.name}, which cannot be read; use a file with another '
                       'quantisation, such as Q8_0.') from error


def _config(fields, tensors):
  architecture = _value(fields.get('general.architecture'))
  if architecture in RECURRENT:
    raise ValueError(
        f'general.architecture={architecture!r} keeps a recurrent state, which cannot be rolled back to a position, as '
        f'a rejected draft asks for; the supported architectures are {", ".join(ARCHITECTURES)}.')
  if architecture not in ARCHITECTURES:
    raise ValueError(
        f'general.architecture={architecture!r}: the supported architectures are {", ".join(ARCHITECTURES)}.')
  meta = {key.removeprefix(f'{architecture}.'): _value(field) for key, field in fields.items()
          if not key.startswith(IRRELEVANT)}
  _refuse({key: value for key, value in meta.items() if isinstance(value, list) and key != PATTERN})  # one per layer
  missing = [f'{architecture}.{key}' for key in NEEDED.values() if key not in meta]
  if missing or NAMES['embed'] not in tensors:
    raise ValueError(f'lacks {weights.listed(missing or [NAMES["embed"]])}; download it again.')
  plain = _plain(architecture, meta, tensors)
  config = dataclasses.replace(ARCHITECTURES[architecture](plain, meta), eos_ids=_eos_ids(fields))
  _refuse(meta)
  return config


def _refuse(meta):
  if meta:
    strange = [f'{key}={value!r}' for key, value in meta.items()]
    raise ValueError(
        f'{weights.listed(strange)}: not implemented, and skipping it could give a wrong model; use a file without it '
        'or implement it in models/gguf.py.')


def _plain(family, meta, tensors):
  """The config without what sets its architecture apart; takes what it handles out of the metadata."""
  sizes = {ours: meta.pop(theirs) for ours, theirs in NEEDED.items()}
  head_dim = meta.pop('attention.key_length', None) or default_head_dim(sizes['embed_dim'], sizes['num_heads'])
  for key in ('attention.value_length', 'rope.dimension_count'):
    if (given := meta.pop(key, head_dim)) != head_dim:
      raise ValueError(f'{key}={given}: only the head dimension, {head_dim}, is implemented; use another file.')
  theta = meta.pop('rope.freq_base', 10000.0)
  return ModelConfig(
      family=family,
      vocab_size=meta.pop('vocab_size', _shape(tensors[NAMES['embed']])[0]),
      num_kv_heads=meta.pop('attention.head_count_kv', sizes['num_heads']),
      head_dim=head_dim,
      rope_theta=theta,
      rope_scaling=_scaling(meta, tensors.get(FACTORS), head_dim, theta),
      tie_embeddings=NAMES['head'] not in tensors,
      **sizes,
  )


def _scaling(meta, factors, head_dim, theta):
  """What stretches rotary frequencies, from the metadata or from the tensor of factors, or None."""
  prefix = 'rope.scaling.'
  given = {key.removeprefix(prefix): meta.pop(key) for key in [*meta] if key.startswith(prefix)}
  given.pop('finetuned', None)  # how the weights were made, not what to do with them
  kind = given.pop('type', 'none')
  if kind == 'none' and not given:
    return None if factors is None else _llama3(_dequantize(factors, np.s_[:]), head_dim, theta)
  factor, original = given.get('factor', 0), 'original_context_length'
  if factors is None and factor >= 1:
    if kind == 'linear' and given.keys() == {'factor'}:
      return rope.Linear(factor)
    if kind == 'yarn' and {'factor', original} <= given.keys() <= {'factor', original, *YARN_BOUNDS}:
      return rope.Yarn(
          factor=factor,
          original_max_position_embeddings=float(given[original]),
          attention_factor=0.1 * math.log(factor) + 1,
          **{field: given.get(key, default) for key, (field, default) in YARN_BOUNDS.items()},
      )
  also = '' if factors is None else f' beside {FACTORS}'
  raise ValueError(
      f'{prefix}type={kind!r} with {given}{also}: only linear with factor, and yarn with factor, {original} and maybe '
      f'{" and ".join(YARN_BOUNDS)}, are implemented; use a file with other rotary embeddings.')


def _llama3(factors, head_dim, theta):
  """The scaling that divides frequencies by `factors` [H/2].

  They tell its bounds and its context up to a common scale: how much of a frequency is kept is linear in it, between
  the bounds. The scale is that of low_freq_factor=1, as in every Llama 3.
  """
  frequencies = rope.frequencies(head_dim, theta).astype(np.float64)
  factor = float(factors.max())
  mixed = (factors > 1.001) & (factors < factor / 1.001)
  if factors.shape == frequencies.shape and mixed.sum() > 1:
    kept = (1 / factors[mixed] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(frequencies[mixed], kept, 1)
    if slope > 0 > offset:
      width = float(-1 / offset)  # from 1, where nothing is kept, to high_freq_factor
      found = rope.Llama3(factor, 1.0, round(1 + width, 3), float(round(2 * math.pi * slope * width)))
      if np.allclose(frequencies / found.stretch(frequencies, theta), factors, rtol=1e-4, atol=0):
        return found
  raise ValueError(
      f'{FACTORS}: not the factors of a Llama 3 with low_freq_factor=1 (some kept, at least two mixed, the rest '
      'divided); use a file with other rotary embeddings.')


def _gemma2(plain, meta):
  return dataclasses.replace(
      _gemma(plain, meta, window=4096, period=2, layers_27b=46),
      attn_softcap=meta.pop('attn_logit_softcapping', 50.0),
      logit_softcap=meta.pop('final_logit_softcapping', 30.0),
  )


def _gemma3(plain, meta):
  return dataclasses.replace(
      _gemma(plain, meta, window=None, period=6, layers_27b=62),
      family='gemma3_text',
      qk_norm=True,
      local_rope_theta=meta.pop('rope.freq_base_swa', 10000.0),
      logit_softcap=meta.pop('final_logit_softcapping', None),
  )


def _gemma(plain, meta, *, window, period, layers_27b):
  """What the Gemmas share; only the 27B sizes scale queries by another dimension than the head's, as llama.cpp knows.

  Args:
    window, period: unless the metadata give them; every `period`-th layer sees all.
  """
  window = meta.pop('attention.sliding_window', window)
  pattern = meta.pop(PATTERN, period)
  if not isinstance(pattern, list):
    pattern = [pattern == 0 or (i + 1) % pattern > 0 for i in range(plain.num_layers)]
  query_dim = plain.embed_dim // plain.num_heads if plain.num_layers == layers_27b else plain.head_dim
  return dataclasses.replace(
      plain,
      norm_offset=1.0,
      post_norms=True,
      activation='gelu_tanh',
      embed_scale=plain.embed_dim**0.5,
      query_scale=query_dim**-0.5,
      windows=tuple(window if local else None for local in pattern),
  )


# A function of the plain config and the metadata, which takes what it handles out of them.
ARCHITECTURES = {
    'llama': lambda plain, meta: plain,
    'qwen2': lambda plain, meta: dataclasses.replace(plain, qkv_bias=True),
    'qwen3': lambda plain, meta: dataclasses.replace(plain, qk_norm=True),
    'gemma2': _gemma2,
    'gemma3': _gemma3,
}


def _eos_ids(fields):
  """Ids of the tokens that end an answer or a document: those that the metadata name, and END_TOKENS."""
  ids = {_token_value(fields, f'{name}_token_id') for name in ('eos', 'eot', 'eom')}
  tokens, types = _token_value(fields, 'tokens') or (), _token_value(fields, 'token_type') or ()
  ids |= {i for i, (token, type_) in enumerate(zip(tokens, types))
          if type_ in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED) and token in END_TOKENS}
  return tuple(sorted(ids - {None}))


def _token_value(fields, key):
  return _value(fields.get(f'tokenizer.ggml.{key}'))


def _value(field):
  return field.contents() if field else None


def _shape(tensor):
  return tuple(int(n) for n in reversed(tensor.shape))


def _dequantize(tensor, index):
  """Floats of the part of a tensor at `index`, a slice per axis; other rows of a matrix are not touched."""
  data = tensor.data
  if data.ndim > 1:
    data, index = data[index[0]], (slice(None), *index[1:])
  return gguf.dequantize(data, tensor.tensor_type)[index]


def _unpermute(array, head_dim):
  """Rows of a query or key matrix as Hugging Face orders them, for `layers.rope`.

  llama.cpp rotates neighbours (2i, 2i + 1), so its converter interleaves the two halves of each head.
  """
  pairs = array.reshape(-1, head_dim // 2, 2, array.shape[1])
  return pairs.swapaxes(1, 2).reshape(array.shape)
