"""Compiles for TPU slices that are not there and prints as JSON what aot_test.py asks of the programs.

A process of its own: libtpu has to be named before jax starts.
"""

import dataclasses
import json
import os
import sys

from lib import libtpu

libtpu.prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from lib import aot, chips, hlo, pairs  # noqa: E402

import cactus_jax as cj  # noqa: E402
from cactus_jax import sharding  # noqa: E402
from cactus_jax.models import cache  # noqa: E402
from cactus_jax.models.config import from_hf_config  # noqa: E402

# Two layers of a verifier of 8B parameters. Four chips hold 190 MB of it each: more than their VMEM, in which a smaller
# model would stay from round to round.
VERIFIER = from_hf_config(pairs.CONFIGS['qwen3-8b'] | {'num_hidden_layers': 2, 'vocab_size': 2048})
DRAFT = from_hf_config(pairs.CONFIGS['qwen3-0.6b'] | {'num_hidden_layers': 2, 'vocab_size': 2048})


def array(mesh, shape, *spec, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def simple_programs():
  """{name: (function, arguments, bytes that it has to read and write, bytes of its all-reduces)}."""
  devices = np.array(aot.devices_of('v5e:2x2'))
  one, four = Mesh(devices[:1], ('x',)), Mesh(devices, ('x',))
  x, w, square = (array(one, shape) for shape in ((8, 2048), (2048, 8192), (2048, 2048)))
  table, rows = array(one, (32768, 2048)), array(one, (8,), dtype=jnp.int32)
  number, flag = array(one, (), dtype=jnp.int32), array(one, (), dtype=bool)
  row, weights = 2048 * 2, 2048 * 2048 * 2
  tanh = lambda x, w: jnp.tanh(x @ w)
  whole = NamedSharding(four, PartitionSpec())
  return {
      'matmul': (lambda x, w: x @ w, (x, w), 8 * row + 4 * weights + 4 * 8 * row, 0),
      'loop': (lambda x, w: jax.lax.fori_loop(0, 5, lambda _, x: tanh(x, w), x), (x, square),
               5 * weights + 2 * 8 * row, 0),
      'loop from 3': (lambda x, w: jax.lax.fori_loop(3, 8, lambda _, x: tanh(x, w), x), (x, square),
                      5 * weights + 2 * 8 * row, 0),
      'loop over layers': (lambda x, w: jax.lax.scan(lambda x, w: (tanh(x, w), None), x, w)[0],
                           (x, array(one, (6, 2048, 2048))), 6 * weights + 2 * 8 * row, 0),
      'endless loop': (lambda x, w, n: jax.lax.while_loop(
          lambda c: c[1] < n, lambda c: (tanh(c[0], w), c[1] + 1), (x, 0)), (x, square, number),
          weights + 2 * 8 * row, 0),
      'row update': (lambda table, x, i: jax.lax.dynamic_update_slice(table, x, (i, 0)), (table, x, number),
                     2 * 8 * row, 0),
      'row updates': (lambda table, x, i: table.at[i].set(x, mode='drop'), (table, x, rows), 2 * 8 * row, 0),
      'embedding': (lambda table, x, i: table[i], (table, x, rows), 2 * 8 * row, 0),
      'branch': (lambda x, flag, w: jax.lax.cond(flag, lambda x: x @ w, lambda x: x * 2, x), (x, flag, square),
                 weights + 2 * 8 * row, 0),
      'all-reduce': (lambda x, w: jax.lax.with_sharding_constraint(x @ w, whole),
                     (array(four, (8, 8192), None, 'x'), array(four, (8192, 2048), 'x')),
                     weights + 2 * 8 * row, 8 * row),
  }


def reading(text):
  """How much of a text the parser has read, and what it refers to without having read it."""
  module = hlo.Module(text)
  missing = lambda i, scope: [*(name for name in i.operands if name not in scope),
                              *(name for name in i.called if name not in module.computations)]
  dangling = [name for scope in module.computations.values() for i in scope.values() for name in missing(i, scope)]
  return {'lines': sum(line.startswith('  ') and ' = ' in line for line in text.splitlines()),
          'instructions': sum(map(len, module.computations.values())),
          'blocks': text.count('\n}'), 'computations': len(module.computations), 'dangling': dangling}


def simple():
  found = {}
  for name, (function, arguments, wanted, reduced) in simple_programs().items():
    donated = {'donate_argnums': 0} if 'update' in name else {}
    text = jax.jit(function, **donated).lower(*arguments).compile().as_text()
    cost = hlo.Module(text).cost()
    found[name] = {'bytes': cost.hbm_bytes, 'wanted': wanted, 'reduced': reduced, 'collectives': cost.collectives,
                   'reading': reading(text)}
  return found


def programs(topology, batch):
  """A step of plain decoding and a verification."""
  setting = aot.Setting(topology, batch=batch, num_draft=3, cache_length=256, prompt_length=32, vocab_size=2048)
  work = aot.Compiler(setting)
  target = work.model(VERIFIER)
  found, texts, module = {}, [], hlo.Module
  hlo.Module = lambda text: texts.append(text) or module(text)
  for name, draft, tokens in (('plain', None, 1), ('verify', cj.PromptLookup(), 4)):
    program = work.loop(name, target, draft, cj.Cactus(1.0) if draft else cj.Exact())
    least = aot.least_bytes(target, work.state(target, None).target_cache, setting, tokens)
    found[name] = aot.figures(
        program, aot.flops_of(target, setting, tokens), work.chip, work.mesh.shape['model'], setting, least)
    parts = program.module.costs(program.body, lambda i: '/forward/' in i.op_name)
    found[name]['in forward'] = {kind: count for kind, count, _ in parts[True].collectives}
  hlo.Module = module
  for name, text in zip(found, texts, strict=True):
    found[name]['reading'] = reading(text)
  return found


def message(function):
  """What a ValueError says."""
  try:
    function()
  except ValueError as error:
    return str(error)
  return None


def errors():
  """Every refusal that needs libtpu, and one for its lack."""
  setting = aot.Setting('v5e:2x4', batch=2, num_draft=3, cache_length=64, prompt_length=32, vocab_size=2048)
  refused = lambda **changes: message(lambda: aot.Compiler(dataclasses.replace(setting, **changes)))
  found = {
      'good': refused(),
      'one chip': refused(topology='v5e:1x1'),
      'known to nobody': refused(topology='v9:2x2'),
      'no slice': refused(topology='v5e'),
      'odd slice': refused(topology='v5e:3x3'),
      'no numbers': refused(topology='v5e:2xtwo'),
      'data': refused(data=3),
      'fsdp': refused(data=2, fsdp=8),
      'batch': refused(data=4),
      'cache': refused(cache_length=35),
      'cache just long enough': refused(cache_length=36),
  }
  library = os.environ.pop('TPU_LIBRARY_PATH')
  found['no library'] = refused()
  os.environ['TPU_LIBRARY_PATH'] = '/nowhere/libtpu.so'
  found['no file'] = refused()
  os.environ['TPU_LIBRARY_PATH'] = library
  return found


def slices():
  """Every slice that is recommended, as libtpu has it."""
  return {f'{family}:{name}': len(aot.devices_of(f'{family}:{name}'))
          for family, chip in chips.CHIPS.items() for name in chip.slices}


def sizes():
  """Pairs that are too large for a slice: what is said, and what they need on every slice in truth."""
  found = []
  for pair, topology, changes in (
      ('qwen3-32b+1.7b', 'v5e:2x2', {}),
      ('qwen3-14b+0.6b', 'v5e:1x1', {'batch': 4}),
      ('qwen3-14b+0.6b', 'v5e:1x1', {'batch': 55}),  # would fill four chips to the brim
      ('qwen3-14b+0.6b', 'v5e:2x2', {'batch': 64, 'cache_length': 8192}),  # its key heads split no more than 8 ways
      ('qwen3-8b+0.6b', 'v5e:4x4', {'data': 16, 'batch': 16}),
      ('qwen3-32b+1.7b', 'v5e:2x4', {'fsdp': 2, 'batch': 4, 'cache_length': 40960}),
      ('llama3-8b+1b', 'v6e:2x2', {'batch': 128, 'cache_length': 8192}),
      ('qwen3-32b+1.7b', 'v5p:2x2x1', {'batch': 128, 'cache_length': 8192}),
  ):
    verifier, draft = map(pairs.config_of, pairs.PAIRS[pair][:2])
    setting = aot.Setting(topology, **{
        'batch': 1, 'num_draft': 10, 'cache_length': 2048, 'prompt_length': 512, 'vocab_size': 1000} | changes)
    case = {'topology': topology, 'hbm': aot.chip_of(topology).hbm_bytes, 'needs': {}}
    for name in aot.chip_of(topology).slices:
      at = dataclasses.replace(setting, topology=topology.partition(':')[0] + ':' + name)
      if chips.chips_of(name) % (at.data * at.fsdp):
        continue
      work = aot.Compiler(at)
      models = work.model(verifier), work.model(draft)
      shape = lambda model: (at.batch, model.config.cache_heads, at.cache_length, model.config.head_dim)
      slots = lambda model: [jax.ShapeDtypeStruct(
          shape(model), jnp.bfloat16, sharding=sharding.sharding_of(model.mesh, cache.AXES, shape(model))
      )] * (2 * model.config.num_layers)
      case['needs'][at.topology] = aot.bytes_on_device([(model.params, slots(model)) for model in models])
      if at.topology == topology:
        case['message'] = message(lambda: work.check_fits('the pair', *models))
    found.append(case)
  return found


if __name__ == '__main__':
  jax.config.update('jax_enable_compilation_cache', False)
  ask = {'simple': simple, 'one row': lambda: programs('v5e:2x2', 1), 'eight rows': lambda: programs('v5e:2x4', 8),
         'errors': errors, 'slices': slices, 'sizes': sizes}
  print(json.dumps({name: ask[name]() for name in sys.argv[1:]}))
