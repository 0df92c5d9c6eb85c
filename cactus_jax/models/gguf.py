"""Reads a GGUF file, the format of llama.cpp: sizes, weights (maybe quantised) and tokenizer in one."""

import pathlib

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cactus_jax.models import weights
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
}

# Field of ModelConfig -> metadata after 'llama.'.
NEEDED = {
    'embed_dim': 'embedding_length',
    'num_layers': 'block_count',
    'num_heads': 'attention.head_count',
    'mlp_dim': 'feed_forward_length',
    'max_length': 'context_length',
    'norm_eps': 'attention.layer_norm_rms_epsilon',
}
OPTIONAL = (
    'attention.head_count_kv',
    'attention.key_length',
    'attention.value_length',
    'rope.dimension_count',
    'rope.freq_base',
    'vocab_size',
)
IRRELEVANT = ('GGUF.', 'general.', 'tokenizer.', 'quantize.')  # beginnings of keys that do not change a model

# Control tokens that end an answer, whatever the metadata call the end; from llama.cpp's list.
END_TOKENS = {'<|endoftext|>', '<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end_of_text|>', '</s>'}

# How a tokenizer cuts text before merging, under llama.cpp's name; \p{N} of its patterns is our Digits.
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {
    'gpt-2': _WORDS,
    'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS]),
}


def load(path, *, dtype=None, mesh=None, quantize=None) -> tuple[Params, ModelConfig]:
  """Weights, dequantised, and config of a GGUF file.

  Raises ValueError for a model that is not implemented and for a file that is damaged or does not fit.
  """
  path = pathlib.Path(path).expanduser()
  reader = _open(path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  stored = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
  config = weights.for_mesh(_config(reader, stored, path), mesh)

  def read(name, index):
    array = _dequantize(tensors[name], path)
    if name.endswith(('attn_q.weight', 'attn_k.weight')):
      array = _unpermute(array, config.head_dim)
    return array[index]

  params = weights.assemble(
      config, NAMES, stored, read, source=path, dtype=dtype, mesh=mesh, quantize=quantize)
  return params, config


def load_tokenizer(path):
  """The tokenizer in a GGUF file, as transformers would save it for the original model.

  transformers reads it too, but only if torch is installed, and without the split into digits, so that two
  spaces before a number are other tokens than in training.

  Raises ValueError for a tokenizer that is not implemented.
  """
  transformers = weights.import_transformers()

  fields = _open(pathlib.Path(path).expanduser()).fields
  kind = {key: _token_value(fields, key) for key in ('model', 'pre', 'add_bos_token', 'add_eos_token')}
  if kind['model'] != 'gpt2' or kind['pre'] not in SPLITS or kind['add_bos_token'] or kind['add_eos_token']:
    raise ValueError(
        f'{path}: a tokenizer of {kind}: implemented are model gpt2 with pre {" or ".join(SPLITS)} and no '
        'added tokens; load the tokenizer of the original model from the hub or a folder.')
  tokens = _token_value(fields, 'tokens')
  merges = [tuple(merge.split(' ')) for merge in _token_value(fields, 'merges')]
  tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
  tokenizer.pre_tokenizer = SPLITS[kind['pre']]
  tokenizer.decoder = decoders.ByteLevel()
  types = _token_value(fields, 'token_type')
  for special, wanted in ((True, gguf.TokenType.CONTROL), (False, gguf.TokenType.USER_DEFINED)):
    added = [token for token, type_ in zip(tokens, types) if type_ == wanted]
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=special) for token in added])
  roles = {'bos_token': 'bos', 'eos_token': 'eos', 'unk_token': 'unknown', 'pad_token': 'padding'}
  ids = {role: _token_value(fields, f'{name}_token_id') for role, name in roles.items()}
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizer,
      chat_template=_value(fields.get('tokenizer.chat_template')),
      **{role: tokens[i] for role, i in ids.items() if i is not None},
  )


class _Reader(gguf.GGUFReader):
  """GGUFReader over a plain array: slices of a memmap made it 2.5 s for 10^5 tokens instead of 0.8 s."""

  @property
  def data(self):
    return self._data

  @data.setter
  def data(self, memmap):
    self._data = memmap.view(np.ndarray)


def _open(path):
  if not path.is_file():
    raise ValueError(f'{path}: no such file; pass the path of a GGUF file.')
  try:
    return _Reader(path)
  except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
    raise ValueError(f'{path}: damaged or no GGUF file ({error}); download it again.') from error


def _config(reader, stored, path):
  meta = {key: field for key, field in reader.fields.items() if not key.startswith(IRRELEVANT)}
  family = _value(reader.fields.get('general.architecture'))
  if family != 'llama':
    raise ValueError(f'{path}: general.architecture={family!r}: the supported families are llama.')
  meta = {key.removeprefix('llama.'): _value(field) for key, field in meta.items()}
  strange = [
      f'{key}={value!r}' for key, value in meta.items()
      if key not in (*NEEDED.values(), *OPTIONAL) or isinstance(value, list)  # a list: one value per layer
  ]
  if 'rope_freqs.weight' in stored:
    strange.append('rope_freqs.weight (rope scaling)')
  if strange:
    raise ValueError(
        f'{path}: {weights.listed(strange)}: not implemented, and skipping it could give a wrong model; '
        'use a file without it or implement it in models/gguf.py.')
  missing = [f'llama.{key}' for key in NEEDED.values() if key not in meta]
  if missing or NAMES['embed'] not in stored:
    raise ValueError(f'{path}: lacks {weights.listed(missing or [NAMES["embed"]])}; download it again.')
  sizes = {ours: meta[theirs] for ours, theirs in NEEDED.items()}
  config = ModelConfig(
      family=family,
      vocab_size=meta.get('vocab_size', stored[NAMES['embed']][0]),
      num_kv_heads=meta.get('attention.head_count_kv', sizes['num_heads']),
      head_dim=meta.get('attention.key_length') or default_head_dim(sizes['embed_dim'], sizes['num_heads']),
      rope_theta=meta.get('rope.freq_base', 10000.0),
      tie_embeddings=NAMES['head'] not in stored,
      eos_ids=_eos_ids(reader.fields),
      **sizes,
  )
  for key in ('attention.value_length', 'rope.dimension_count'):
    if meta.get(key, config.head_dim) != config.head_dim:
      raise ValueError(
          f'{path}: llama.{key}={meta[key]}: only the head dimension, {config.head_dim}, is implemented; use '
          'another file.')
  return config


def _eos_ids(fields):
  """Ids of the tokens that end an answer or a document: those that the metadata name, and END_TOKENS."""
  ids = {_token_value(fields, f'{name}_token_id') for name in ('eos', 'eot', 'eom')}
  tokens, types = _token_value(fields, 'tokens') or (), _token_value(fields, 'token_type') or ()
  ids |= {i for i, (token, type_) in enumerate(zip(tokens, types))
          if type_ == gguf.TokenType.CONTROL and token in END_TOKENS}
  return tuple(sorted(ids - {None}))


def _token_value(fields, key):
  return _value(fields.get(f'tokenizer.ggml.{key}'))


def _value(field):
  return field.contents() if field else None


def _dequantize(tensor, path):
  try:
    return gguf.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(
        f'{path}: {tensor.name} is {tensor.tensor_type.name}, which cannot be read; use a file with another '
        'quantisation, such as Q8_0.') from error


def _unpermute(array, head_dim):
  """Rows of a query or key matrix as Hugging Face orders them, for `layers.rope`.

  llama.cpp rotates neighbours (2i, 2i + 1), so its converter interleaves the two halves of each head.
  """
  pairs = array.reshape(-1, head_dim // 2, 2, array.shape[1])
  return pairs.swapaxes(1, 2).reshape(array.shape)
