"""Seconds to load a model, and the memory that loading needs beside the weights.

  python experiments/loading.py                      # 3 minutes on 2 CPU cores; 2 GB on the disk and 3 GB of memory
  python experiments/loading.py --gigabytes=0        # seconds only
  python experiments/loading.py --gigabytes=20 --folder=/mnt/big --repeats=1

Each figure is that of fresh processes, on CPUs. Seconds are those of --verifier, with its tokenizer: what Python and
imports take, the first load, and the next in the same process. Memory is that of loading a made-up checkpoint in
bfloat16, by one process on one device, and by two with four pretended devices each that share the model out eight ways.
A thread reads RssAnon of /proc/self/status every 2 ms: what a process has for itself. Pages of the files are not in
it: the system takes them back as it likes.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from absl import flags
from lib import flags as common
from lib import record

import cactus_jax as cj

_GIGABYTES = flags.DEFINE_float('gigabytes', 2, 'Size of the checkpoint that memory is measured with; 0: not measured.')
_FOLDER = flags.DEFINE_string('folder', None, 'Where it is written, for as long as it is needed; a temporary folder.')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Processes of each kind; figures are medians.', allow_override=True)
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to append the figures to.', allow_override=True)
_MEASURE = flags.DEFINE_enum('measure', None, ['float32', 'int8', 'memory'], 'What a process is that this one starts.')

STATUS = pathlib.Path('/proc/self/status')
WIDE, NARROW = (4096, 14336, 32, 8), (256, 896, 8, 4)  # embed_dim, mlp_dim, query and key heads: Llama 3 8B's, and tiny
ENOUGH = 1.0  # gigabytes for which the layers are wide
DEVICES = 8


def shapes(gigabytes):
  """The config.json of a checkpoint of about that size in bfloat16, and [{name: shape}] of its files."""
  D, F, N, G = WIDE if gigabytes >= ENOUGH else NARROW
  H, V = D // N, 8 * D
  layer = {
      'input_layernorm': (D,), 'self_attn.q_proj': (N * H, D), 'self_attn.k_proj': (G * H, D),
      'self_attn.v_proj': (G * H, D), 'self_attn.o_proj': (D, N * H), 'post_attention_layernorm': (D,),
      'mlp.gate_proj': (F, D), 'mlp.up_proj': (F, D), 'mlp.down_proj': (D, F),
  }
  layers = max(round((gigabytes * 1e9 - 2 * V * D) / sum(2 * math.prod(shape) for shape in layer.values())), 1)
  config = {
      'model_type': 'llama', 'vocab_size': V, 'hidden_size': D, 'num_hidden_layers': layers, 'num_attention_heads': N,
      'num_key_value_heads': G, 'intermediate_size': F, 'max_position_embeddings': 4096, 'rms_norm_eps': 1e-5,
      'rope_theta': 1e4, 'tie_word_embeddings': True, 'hidden_act': 'silu', 'eos_token_id': 0,
  }
  files = [{'model.embed_tokens.weight': (V, D), 'model.norm.weight': (D,)}]
  return config, files + [{f'model.layers.{i}.{name}.weight': shape for name, shape in layer.items()}
                          for i in range(layers)]


@contextlib.contextmanager
def checkpoint(gigabytes):
  """A folder with such a checkpoint, written a layer at a time; it goes in the end."""
  config, files = shapes(gigabytes)
  size = sum(2 * math.prod(shape) for file in files for shape in file.values())
  where = _FOLDER.value or tempfile.gettempdir()
  if not os.path.isdir(where):
    raise ValueError(f'--folder={where}: no such folder.')
  free = shutil.disk_usage(where).free
  if free < 1.05 * size:
    raise ValueError(f'{where} has room for {free / 1e9:.1f} GB, and --gigabytes={gigabytes:g} writes '
                     f'{size / 1e9:.1f}: give less, or another --folder.')
  few = np.random.default_rng(0).standard_normal(10_007).astype(ml_dtypes.bfloat16)
  with tempfile.TemporaryDirectory(prefix='cactus_loading_', dir=where) as folder:
    folder, index = pathlib.Path(folder), {}
    for i, file in enumerate(files):
      name = f'model-{i + 1:05}-of-{len(files):05}.safetensors'
      safetensors.numpy.save_file({name: np.resize(few, shape) for name, shape in file.items()}, folder / name)
      index |= dict.fromkeys(file, name)
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
    yield folder


class Peak:
  """The most memory that this process had for itself while in the block, in bytes."""

  def __enter__(self):
    gc.collect()
    self.before = self.most = anonymous()
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def _watch(self):
    while not self._ended.wait(0.002):
      self.most = max(self.most, anonymous())

  def __exit__(self, *_):
    self._ended.set()
    self._thread.join()
    self.most = max(self.most, anonymous())


def anonymous():
  """Bytes of memory that no file stands behind."""
  for line in STATUS.read_text().splitlines():
    if line.startswith('RssAnon:'):
      return 1024 * int(line.split()[1])
  raise ValueError(f'{STATUS} has no RssAnon: memory can be measured since Linux 4.5.')


def seconds_of(action):
  start = time.perf_counter()
  jax.block_until_ready(action())
  return time.perf_counter() - start


def measure_seconds(quantize):
  """The figures of a fresh process that loads a model and its tokenizer twice."""
  source, began = common.verifier_source(), time.time()
  imports = seconds_of(lambda: importlib.import_module('transformers') and None)
  model = lambda: cj.load_transformer(source, dtype='float32', quantize=quantize).params
  tokenizer = lambda: cj.load_tokenizer(source) and None
  times = [seconds_of(action) for _ in range(2) for action in (model, tokenizer)]
  names = ('first_model', 'first_tokenizer', 'next_model', 'next_tokenizer')
  return {'began': began, 'transformers': imports} | dict(zip(names, times, strict=True))


def measure_memory(mesh):
  """The figures of a fresh process that loads a checkpoint, or its part of one."""
  jax.block_until_ready(jax.device_put(np.zeros(3)))
  with Peak() as peak:
    start = time.perf_counter()
    params = jax.block_until_ready(cj.load_transformer(common.verifier_source(), mesh=mesh, dtype='bfloat16').params)
    duration = time.perf_counter() - start
  # Pretended devices may share memory, of what each of them holds.
  parts = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes
           for array in jax.tree.leaves(params) for shard in array.addressable_shards}
  held = sum(parts.values())
  return {'process': jax.process_index(), 'seconds': duration, 'before': peak.before, 'peak': peak.most, 'held': held,
          'largest': max(parts.values()), 'on_top': peak.most - peak.before - held}


def start(measure, source, *arguments, devices=1):
  """A process that measures; (process, when it began)."""
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices)}
  command = [sys.executable, __file__, f'--measure={measure}', f'--verifier={source}', *arguments]
  began = time.time()
  return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True), began


def figures_of(process, began):
  """What a process has measured."""
  _, err = process.communicate()
  if process.returncode:
    raise ValueError(f'a process that was to load the model ended with {process.returncode}: {err.strip()[-300:]}')
  figures = json.loads([line for line in err.splitlines() if line.startswith('{')][-1])
  if 'began' in figures:
    figures['imports'] = figures.pop('began') - began + figures.pop('transformers')
  return figures


def medians(runs):
  """{name: median} of several processes' figures."""
  return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def compare_seconds(source):
  """Prints the table of seconds and returns its figures."""
  kinds = ('float32', 'int8')
  runs = {kind: [] for kind in kinds}
  for _ in range(_REPEATS.value):  # in turns, since the speed of a machine drifts
    for kind in kinds:
      runs[kind].append(figures_of(*start(kind, source)))
  found = [{'what': 'seconds', 'weights': kind} | medians(runs[kind]) for kind in kinds]
  columns = ('imports', 'first_model', 'first_tokenizer', 'next_model', 'next_tokenizer')
  print(f'\nseconds to load {os.path.basename(source)}')
  print(f'  {"":14s}' + ''.join(f'{name.replace("_", " "):>17s}' for name in columns) + f'{"next, both":>17s}')
  for figure in found:
    both = figure['next_model'] + figure['next_tokenizer']
    print(f'  {figure["weights"]:14s}' + ''.join(f'{figure[name]:17.2f}' for name in columns) + f'{both:17.2f}')
  return found


def compare_memory(gigabytes):
  """Prints the table of memory and returns its figures."""
  runs = {'one process': [], 'process 0 of 2': [], 'process 1 of 2': []}
  with checkpoint(gigabytes) as folder:
    size = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    for _ in range(_REPEATS.value):
      runs['one process'].append(figures_of(*start('memory', folder)))
      with socket.socket() as free:
        free.bind(('localhost', 0))
        job = [f'--coordinator=localhost:{free.getsockname()[1]}', '--num_processes=2', f'--mesh_model={DEVICES}']
      pair = [start('memory', folder, *job, f'--process_id={i}', devices=DEVICES // 2) for i in range(2)]
      for figure in [figures_of(*process) for process in pair]:
        runs[f'process {figure["process"]} of 2'].append(figure)
  found = [{'what': 'memory', 'loaded_by': name} | medians(figures) for name, figures in runs.items()]
  columns = ('before', 'held', 'peak', 'on_top', 'largest')
  print(f'\nMB of memory to load a checkpoint of {size / 1e9:.2f} GB in bfloat16; what is on top of before and held; '
        'the largest part of a weight')
  print(f'  {"":16s}' + ''.join(f'{name.replace("_", " "):>10s}' for name in columns) + f'{"seconds":>10s}')
  for figure in found:
    print(f'  {figure["loaded_by"]:16s}' + ''.join(f'{figure[name] / 1e6:10.1f}' for name in columns)
          + f'{figure["seconds"]:10.2f}')
  return found


def check_flags():
  """Raises ValueError for a flag that cannot be used."""
  common.refuse([name for name in common.SHARED if name != 'verifier'], 'models are loaded, and write nothing')
  if not 0 <= _GIGABYTES.value < math.inf:
    raise ValueError(f'--gigabytes={_GIGABYTES.value:g}: need 0 or more.')
  if _REPEATS.value < 1:
    raise ValueError(f'--repeats={_REPEATS.value}: need at least 1.')
  if _GIGABYTES.value and not STATUS.exists():
    raise ValueError(f'{STATUS} is not there: memory can be measured on Linux only; --gigabytes=0 leaves it out.')


def main():
  """Prints the tables, and appends their figures to --output; or measures, for the process that does."""
  if _MEASURE.value:
    figures = (measure_memory(common.mesh()) if _MEASURE.value == 'memory'
               else measure_seconds(None if _MEASURE.value == 'float32' else _MEASURE.value))
    print(json.dumps(figures), file=sys.stderr)  # which every process of several has
    return
  check_flags()
  rows = record.Rows(_OUTPUT.value) if _OUTPUT.value else None
  print(f'{common.machine()}; medians of {_REPEATS.value}', flush=True)
  found = compare_seconds(common.verifier_source())
  if _GIGABYTES.value:
    found += compare_memory(_GIGABYTES.value)
  for figure in found if rows else ():
    rows.append({'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__, **figure})


if __name__ == '__main__':
  common.run(main, meshes=True)
