"""Reads and writes Hugging Face checkpoints: a folder or a hub id, with config.json and safetensors files."""

import contextlib
import dataclasses
import json
import pathlib
import zlib

import huggingface_hub
import jax
import numpy as np
import safetensors.numpy

from cactus_jax import sharding
from cactus_jax.models import transformer, weights
from cactus_jax.models.config import ModelConfig, eos_ids_of, from_hf_config, to_hf_config
from cactus_jax.models.transformer import Params, Transformer

# Our weight -> theirs; '{}' is the layer.
NAMES = {
    'embed': 'model.embed_tokens.weight',
    'attn_norm': 'model.layers.{}.input_layernorm.weight',
    'q': 'model.layers.{}.self_attn.q_proj.weight',
    'k': 'model.layers.{}.self_attn.k_proj.weight',
    'v': 'model.layers.{}.self_attn.v_proj.weight',
    'o': 'model.layers.{}.self_attn.o_proj.weight',
    'mlp_norm': 'model.layers.{}.post_attention_layernorm.weight',
    'gate': 'model.layers.{}.mlp.gate_proj.weight',
    'up': 'model.layers.{}.mlp.up_proj.weight',
    'down': 'model.layers.{}.mlp.down_proj.weight',
    'final_norm': 'model.norm.weight',
    'head': 'lm_head.weight',
    'q_bias': 'model.layers.{}.self_attn.q_proj.bias',
    'k_bias': 'model.layers.{}.self_attn.k_proj.bias',
    'v_bias': 'model.layers.{}.self_attn.v_proj.bias',
    'q_norm': 'model.layers.{}.self_attn.q_norm.weight',
    'k_norm': 'model.layers.{}.self_attn.k_norm.weight',
}
# Where a norm follows attention, it has the name that the one before the mlp has elsewhere.
POST_NORM_NAMES = NAMES | {
    'mlp_norm': 'model.layers.{}.pre_feedforward_layernorm.weight',
    'post_attn_norm': 'model.layers.{}.post_attention_layernorm.weight',
    'post_mlp_norm': 'model.layers.{}.post_feedforward_layernorm.weight',
}
BUFFERS = ('rotary_emb.inv_freq',)  # endings of tensors that old checkpoints hold and a model recomputes
INDEX = 'model.safetensors.index.json'
FLOATS = ('F64', 'F32', 'F16', 'BF16')

TOKENIZER_FILES = ('*.json', '*.jinja', 'merges.txt', 'tokenizer.model')
WEIGHT_FILES = ('*.json', 'model*.safetensors')


def load(source, *, dtype=None, mesh=None, quantize=None) -> tuple[Params, ModelConfig]:
  """Weights and config of a checkpoint folder or hub id.

  Raises ValueError for a model that is not implemented and for files that are missing, damaged or do not fit.
  """
  folder = fetch(source, (*WEIGHT_FILES, *TOKENIZER_FILES))
  config = weights.for_mesh(read_config(folder), mesh)
  with contextlib.ExitStack() as stack:
    files = _open_tensors(folder, stack)
    stored = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    read = lambda name, index: files[name].get_slice(name)[index]
    params = weights.assemble(
        config, names_of(config), stored, read, source=folder, dtype=dtype, mesh=mesh, quantize=quantize)
  return params, config


def load_tokenizer(source):
  """The tokenizer of a checkpoint folder or hub id; raises ValueError if there is none."""
  transformers = weights.import_transformers()

  folder = fetch(source, TOKENIZER_FILES)
  try:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
  except Exception as error:  # a damaged file raises whatever its parser does
    text = ' '.join(str(error).split())
    raise ValueError(f'{folder}: no tokenizer could be read ({text}); it needs tokenizer.json and '
                     'tokenizer_config.json.') from error


def save(folder, model: Transformer, tokenizer=None, max_shard=4 * 10**9):
  """Writes a model, and its transformers tokenizer if given, as a new folder that transformers reads.

  Weights keep their dtype. Of several processes all must call it, and the first writes. Nothing is at `folder` until
  everything is written.
  Args: max_shard, bytes of one safetensors file, as many as are in memory at once; a larger weight has a file alone.
  Raises: ValueError if there is something at `folder`, or if a config.json cannot describe the model.
  """
  check_tokenizer(tokenizer)
  if model.quantize:
    raise ValueError(f'{folder}: weights in 8 bits have no form that transformers reads; save the model of '
                     'floats that they were rounded from.')
  config = dataclasses.replace(model.config, kv_copies=1)
  described = to_hf_config(config, model.params.embed.dtype.name)
  with weights.new_folder(folder) as partial:
    shards = _shards(model, max_shard)
    index, size = {}, 0
    for i, shard in enumerate(shards):
      file = 'model.safetensors' if len(shards) == 1 else f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
      tensors = {}
      for path, spec, array in shard:
        array = sharding.fetch(weights.without_copies(model.config, spec, array))
        stored = weights.to_stored(config, names_of(config), path, array)
        tensors |= {name: np.ascontiguousarray(array) for name, array in stored.items()}
      index |= dict.fromkeys(tensors, file)
      size += sum(array.nbytes for array in tensors.values())
      if jax.process_index() == 0:
        try:
          safetensors.numpy.save_file(tensors, partial / file, metadata={'format': 'pt'})
        except (OSError, safetensors.SafetensorError) as error:
          raise ValueError(f'{folder}: could not be written ({error}); is the disk full?') from error
    if jax.process_index() == 0:
      _write_json(partial / 'config.json', described)
      _write_json(partial / 'generation_config.json', {'eos_token_id': described['eos_token_id']})
      if len(shards) > 1:
        _write_json(partial / INDEX, {'metadata': {'total_size': size}, 'weight_map': index})
      if tokenizer is not None:
        tokenizer.save_pretrained(partial)


def check_tokenizer(tokenizer):
  """Raises ValueError for what is neither None nor a tokenizer that can be saved."""
  if tokenizer is not None and not hasattr(tokenizer, 'save_pretrained'):
    raise ValueError(f'tokenizer={tokenizer!r:.60}: need a transformers tokenizer, as from load_tokenizer, or None.')


def digest(tokenizer) -> int:
  """A number that tells tokenizers apart: of all tokens in the order of their ids."""
  return zlib.crc32('\n'.join(map(str, tokenizer.convert_ids_to_tokens(range(len(tokenizer))))).encode())


def _shards(model, most):
  """Lists of (path, spec, array), each of at most so many bytes."""
  specs = jax.tree_util.tree_flatten_with_path(transformer.abstract(model.config))[0]
  shards, size = [[]], 0
  for (path, spec), array in zip(specs, jax.tree.leaves(model.params), strict=True):
    if shards[-1] and size + array.nbytes > most:
      shards, size = [*shards, []], 0
    shards[-1].append((path, spec, array))
    size += array.nbytes
  return shards


def names_of(config) -> dict[str, str]:
  """Our name of a weight -> the one in a checkpoint of this family."""
  return POST_NORM_NAMES if config.post_norms else NAMES


def _write_json(path, contents):
  path.write_text(json.dumps(contents, indent=2) + '\n', encoding='utf-8')


def fetch(source, patterns):
  """The local folder of a source: itself, or the files of a hub id after downloading what is not cached."""
  folder = pathlib.Path(source).expanduser()
  if folder.is_dir():
    return folder
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(str(source), allow_patterns=list(patterns)))
  except Exception as error:  # no common base: HTTP, offline mode, no such repository, malformed id
    raise ValueError(
        f'{source}: neither a folder here nor a model that could be had from the Hugging Face hub '
        f'({type(error).__name__}: {str(error).splitlines()[0]}); pass a local folder, or check name and connection.'
    ) from error


def read_config(folder) -> ModelConfig:
  """The config of a checkpoint, with the end tokens that its generation settings add."""
  config = from_hf_config(_read_json(folder / 'config.json'))
  if (folder / 'generation_config.json').exists():
    more = eos_ids_of(_read_json(folder / 'generation_config.json'))
    config = dataclasses.replace(config, eos_ids=tuple(sorted({*config.eos_ids, *more})))
  return config


def _read_json(path):
  if not path.is_file():
    raise ValueError(f'{path}: no such file; a checkpoint folder needs config.json and safetensors files (a distilled '
                     'draft has student.json instead).')
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not readable as JSON ({error}); download it again.') from error
  if not isinstance(found, dict):
    raise ValueError(f'{path}: holds {found!r:.40} where an object is needed; download it again.')
  return found


def _open_tensors(folder, stack):
  """{name: open file that holds it} of all tensors; the files stay open as long as `stack`."""
  files, twice, not_float = {}, [], []
  for path in _weight_files(folder):
    try:
      file = stack.enter_context(safetensors.safe_open(path, framework='numpy'))
    except (OSError, safetensors.SafetensorError) as error:
      raise ValueError(f'{path}: damaged or no safetensors file ({error}); download it again.') from error
    for name in file.keys():
      if not name.endswith(BUFFERS):
        twice += [name] if name in files else []
        not_float += [f'{name} ({kind})'] if (kind := file.get_slice(name).get_dtype()) not in FLOATS else []
        files[name] = file
  if twice:
    raise ValueError(f'{folder}: two files hold {weights.listed(twice)}; keep the shards of one checkpoint.')
  if not_float:
    raise ValueError(
        f'{folder}: {weights.listed(not_float)}: weights must be one of {", ".join(FLOATS)}; use a '
        'checkpoint that is not quantised.')
  return files


def _weight_files(folder):
  whole, index = folder / 'model.safetensors', folder / INDEX
  if whole.exists():
    return [whole]
  if not index.exists():
    pickled = weights.listed(sorted(path.name for path in folder.glob('*.bin')))
    advice = f'convert {pickled}, which can run code when read, to safetensors' if pickled else 'download it'
    raise ValueError(f'{folder}: has no model.safetensors, nor the index of shards; {advice}.')
  listed = _read_json(index).get('weight_map')
  if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
    raise ValueError(f'{index}: lacks the map from weights to files, weight_map; download it again.')
  shards = [folder / pathlib.Path(name).name for name in sorted(set(listed.values()))]
  absent = [path.name for path in shards if not path.exists()]
  if absent:
    raise ValueError(f'{folder}: lacks {weights.listed(absent)}, which {index.name} lists; download them.')
  return shards
