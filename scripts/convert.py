"""Converts a model and its tokenizer: to an Orbax folder that any mesh reads, or to a Hugging Face folder.

  python scripts/convert.py Qwen/Qwen3-14B ckpt/qwen3-14b --to=orbax --dtype=bfloat16
  python scripts/convert.py ckpt/qwen3-14b hf/qwen3-14b --to=safetensors --dtype=bfloat16
  python scripts/convert.py model.gguf hf/model --to=safetensors

The source is a hub id, a Hugging Face folder, a .gguf file, or a folder of `save_transformer`. Weights pass through the
memory of the host, which must hold all of them in the dtype that is asked for: float32 keeps every weight as it is, and
bfloat16 does too if the source is in bfloat16. --quantize=int8 writes an Orbax folder of 8-bit weights.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / 'experiments'))

import jax  # noqa: E402
from absl import flags  # noqa: E402
from lib import flags as common  # noqa: E402

import cactus_jax as cj  # noqa: E402
from cactus_jax.models import hf  # noqa: E402

WRITERS = {'orbax': cj.save_transformer, 'safetensors': hf.save}

_TO = flags.DEFINE_enum('to', None, list(WRITERS), 'What to write.')
_TOKENIZER = flags.DEFINE_boolean('tokenizer', True, 'Convert the tokenizer too.')


def main(source, destination):
  """Converts what the arguments and flags name."""
  common.refuse([name for name in common.SHARED if name not in ('dtype', 'quantize')], 'nothing is decoded')
  if _TO.value is None:
    raise ValueError(f'say what to write: {" or ".join(f"--to={name}" for name in WRITERS)}.')
  destination = os.path.expanduser(destination)
  if os.path.lexists(destination):
    raise ValueError(f'{destination}: is there already; name a new folder, or remove it.')
  tokenizer = None
  if _TOKENIZER.value:
    try:
      tokenizer = cj.load_tokenizer(source)
    except ValueError as error:
      raise ValueError(f'{error} (--notokenizer converts the weights alone.)') from error
  held = common.held()
  if held['quantize'] and _TO.value == 'safetensors':
    raise ValueError('--quantize means nothing to --to=safetensors: transformers reads no such weights; drop it.')
  dtype = held['dtype'] or 'float32'
  model = cj.load_transformer(source, dtype=dtype, quantize=held['quantize'])
  WRITERS[_TO.value](destination, model, tokenizer=tokenizer)
  size = sum(path.stat().st_size for path in pathlib.Path(destination).rglob('*') if path.is_file())
  weights = sum(array.size for array in jax.tree.leaves(model.params))
  print(f'{destination}: {model.config.family}, {weights:,} weights in {model.quantize or dtype}, '
        f'{"with its" if tokenizer else "without a"} tokenizer; {size / 1e6:,.1f} MB as {_TO.value}.')


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  common.run(main, arguments=('SOURCE', 'DESTINATION'))
