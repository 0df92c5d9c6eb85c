"""Reads a Hugging Face checkpoint: a folder or a hub id, with config.json and safetensors files."""

import contextlib
import dataclasses
import json
import pathlib

import huggingface_hub
import safetensors

from cactus_jax.models import weights
from cactus_jax.models.config import ModelConfig, eos_ids_of, from_hf_config
from cactus_jax.models.transformer import Params

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
FLOATS = ('F64', 'F32', 'F16', 'BF16')

TOKENIZER_FILES = ('*.json', '*.jinja', 'merges.txt', 'tokenizer.model')
WEIGHT_FILES = ('*.json', 'model*.safetensors')


def load(source, *, dtype=None, mesh=None) -> tuple[Params, ModelConfig]:
  """Weights and config of a checkpoint folder or hub id.

  Raises ValueError for a model that is not implemented and for files that are missing, damaged or do not fit.
  """
  folder = fetch(source, (*WEIGHT_FILES, *TOKENIZER_FILES))
  config = weights.for_mesh(read_config(folder), mesh)
  with contextlib.ExitStack() as stack:
    files = _open_tensors(folder, stack)
    stored = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    read = lambda name, index: files[name].get_slice(name)[index]
    names = POST_NORM_NAMES if config.post_norms else NAMES
    params = weights.assemble(config, names, stored, read, source=folder, dtype=dtype, mesh=mesh)
  return params, config


def load_tokenizer(source):
  """The tokenizer of a checkpoint folder or hub id; raises ValueError if there is none."""
  transformers = weights.import_transformers()

  folder = fetch(source, TOKENIZER_FILES)
  try:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
  except Exception as error:  # a damaged file raises whatever its parser does
    raise ValueError(f'{folder}: no tokenizer could be read ({error}); it needs tokenizer.json and '
                     'tokenizer_config.json.') from error


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
  if not path.exists():
    raise ValueError(f'{path}: no such file; a checkpoint folder needs config.json and safetensors files.')
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path}: not readable as JSON ({error}); download it again.') from error


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
  whole, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  if whole.exists():
    return [whole]
  if not index.exists():
    pickled = weights.listed(sorted(path.name for path in folder.glob('*.bin')))
    advice = f'convert {pickled}, which can run code when read, to safetensors' if pickled else 'download it'
    raise ValueError(f'{folder}: has no model.safetensors, nor the index of shards; {advice}.')
  shards = [folder / name for name in sorted(set(_read_json(index)['weight_map'].values()))]
  absent = [path.name for path in shards if not path.exists()]
  if absent:
    raise ValueError(f'{folder}: lacks {weights.listed(absent)}, which {index.name} lists; download them.')
  return shards
