"""Compiles decoding for a TPU slice that is not there, and says what it would cost.

  python scripts/aot_compile.py --pair=qwen3-14b+0.6b --topology=v5e:2x4
  python scripts/aot_compile.py --pair=llama3-8b+1b --topology=v6e:2x4 --batch=8 --data=2 --json=costs.jsonl
  python scripts/aot_compile.py --verifier_config=big/config.json --draft_config=small/config.json

Needs libtpu (`pip install -e .[tpu]`), which compiles on any Linux machine. The programs of the library itself are
compiled: prefill, and the loop of `generate` with the draft, without one, and for the draft alone; a line of the table
is one round. Memory, traffic from and to HBM and collectives are read off the compiled programs; times are estimates
from those and the chip's published figures. A pair of 14B and 0.6B takes ten minutes on two cores.
"""

import dataclasses
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / 'experiments'))

from lib import libtpu  # noqa: E402

libtpu.prepare()

import jax  # noqa: E402
from absl import flags  # noqa: E402
from lib import aot, pairs, record  # noqa: E402
from lib import flags as common  # noqa: E402

import cactus_jax as cj  # noqa: E402
from cactus_jax.models import hf  # noqa: E402

_PAIR = flags.DEFINE_enum('pair', None, list(pairs.PAIRS), 'A pair of the paper.')
_VERIFIER = flags.DEFINE_string('verifier_config', None, 'Instead of a pair: a config.json, or its folder.')
_DRAFT = flags.DEFINE_string('draft_config', None, 'The config.json of the draft, or its folder.')
_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:2x4', 'Chip and slice, as v5e:2x4, v5p:2x2x1, v6e:2x4.')
_DATA = flags.DEFINE_integer('data', 1, 'Groups of chips that share out the rows; the others share a model.', 1)
_FSDP = flags.DEFINE_integer('fsdp', 1, 'The same, each of them holding a part of every weight.', 1)
_BATCH = flags.DEFINE_integer('batch', 1, 'Rows.', 1)
_CACHE_LENGTH = flags.DEFINE_integer('cache_length', 2048, 'Slots of the caches.', 16)
_PROMPT_LENGTH = flags.DEFINE_integer('prompt_length', 512, 'Tokens of the prompts that prefill reads.', 1)
_LATENCY = flags.DEFINE_float('collective_us', 5.0, 'Microseconds that a collective takes, however small.', 0.0)
_ACCEPTANCE = flags.DEFINE_list('acceptance', [0.5, 0.6, 0.7, 0.8, 0.9], 'Rates to predict a speed-up for.')
_WHOLE = flags.DEFINE_boolean('whole', True, 'Also compile prefill, and the loop of verifier and draft together.')
_JSON = flags.DEFINE_string('json', None, 'JSONL file to append the figures to.')
# Flags of the programs that decode.
OTHERS = ('verifier', 'draft', 'block_verification', 'ledger', 'stop_entropy', 'temperature', 'top_k', 'top_p',
          'min_p', 'seed', 'max_new_tokens', 'stop', 'raw', 'quantize', 'draft_quantize', 'kv_dtype')


def read(path):
  """The config at a path: a config.json, or the folder of one."""
  if not path.is_dir() and path.name != 'config.json':
    raise ValueError(f'{path}: need a config.json, or the folder that has one.')
  return hf.read_config(path if path.is_dir() else path.parent)


def configs():
  """Name, verifier, draft, and the number of tokens they share."""
  if _PAIR.value is not None and (_VERIFIER.value is not None or _DRAFT.value is not None):
    raise ValueError('--pair and the config of a verifier or draft are both given: choose one.')
  if _PAIR.value is None and _VERIFIER.value is None and _DRAFT.value is None:
    raise ValueError(f'name a --pair ({", ".join(pairs.PAIRS)}), or else --verifier_config and --draft_config.')
  if _PAIR.value is not None:
    verifier, draft, num_tokens = pairs.PAIRS[_PAIR.value]
    return _PAIR.value, pairs.config_of(verifier), pairs.config_of(draft), num_tokens
  if _VERIFIER.value is None or _DRAFT.value is None:
    raise ValueError('--verifier_config and --draft_config belong together.')
  verifier, draft = (read(pathlib.Path(flag.value).expanduser()) for flag in (_VERIFIER, _DRAFT))
  return f'{_VERIFIER.value} + {_DRAFT.value}', verifier, draft, min(verifier.vocab_size, draft.vocab_size)


def acceptances():
  """The rates of --acceptance."""
  try:
    rates = [float(a) for a in _ACCEPTANCE.value]
  except ValueError:
    rates = []
  if not rates or not all(0 <= rate <= 1 for rate in rates):
    raise ValueError(f'--acceptance={",".join(map(str, _ACCEPTANCE.value))}: need rates between 0 and 1.')
  return rates


def main():
  """Compiles and reports what the flags describe."""
  common.refuse(OTHERS, 'programs are compiled, and nothing is decoded')
  name, verifier, draft, num_tokens = configs()
  setting = aot.Setting(
      topology=_TOPOLOGY.value, batch=_BATCH.value, num_draft=common.num_draft(), cache_length=_CACHE_LENGTH.value,
      prompt_length=_PROMPT_LENGTH.value, vocab_size=num_tokens, dtype=common.held()['dtype'] or 'bfloat16',
      data=_DATA.value, fsdp=_FSDP.value, latency=_LATENCY.value * 1e-6)
  rule, rates = common.rule(), acceptances()
  if not math.isfinite(setting.latency):
    raise ValueError(f'--collective_us={_LATENCY.value}: need a finite number of microseconds.')
  if isinstance(rule, cj.Budget):
    raise ValueError('--rule=budget: compile the rule whose number it steers, --rule=clamp.')
  jax.config.update('jax_enable_compilation_cache', False)  # what it keeps for a TPU cannot be read without one
  rows = record.Rows(_JSON.value) if _JSON.value else None
  print(f'{name} on {setting.topology}, batch {setting.batch}, K = {setting.num_draft}, {setting.cache_length} slots, '
        f'{setting.dtype}, {rule}', flush=True)
  found = aot.compile_pair(verifier, draft, rule, setting, rates, lambda line: print(f'  {line}', flush=True),
                           _WHOLE.value)
  print(f'\n{aot.table(found)}')
  if rows:
    rows.append({'pair': name, 'rule': str(rule), 'verifier': dataclasses.asdict(verifier),
                 'draft': dataclasses.asdict(draft)} | found)


common.set_defaults(num_draft=10, rule='cactus', delta=1.0)

if __name__ == '__main__':
  common.run(main)
