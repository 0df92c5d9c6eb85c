"""Weights part by part: what each device of a mesh is given, and how much is read for it.

The eight devices are pretended by the CPU and must be there before JAX starts, so this file is a program too:
`JAX_NUM_CPU_DEVICES=8 python -m tests.weights_test OUT` writes what is wrong in each case.
"""

import functools
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cactus_jax import sharding
from cactus_jax.models import gguf, hf, int8, transformer, weights
from tests import checkpoints
from tests.hf_test import raises

ROOT = pathlib.Path(__file__).parent.parent
CHUNK = 500  # numbers read at once where the result is bfloat16; matrices have some 6,000

TINY = checkpoints.QWEN2 | {'num_hidden_layers': 1}  # with biases
CONFIGS = {
    'qwen2': TINY | {'num_attention_heads': 8, 'num_key_value_heads': 4},  # over 8 devices key heads are held twice
    'llama': TINY | {'model_type': 'llama', 'num_attention_heads': 8, 'num_key_value_heads': 4, 'vocab_size': 97},
    # 120 columns in groups of 40: of two devices the border is inside a head.
    'odd': TINY | {'num_attention_heads': 9, 'num_key_value_heads': 3, 'head_dim': 8, 'vocab_size': 97},
    'tied': TINY | {'num_attention_heads': 8, 'num_key_value_heads': 4, 'tie_word_embeddings': True},
}
MESHES = ('1x1x8', '2x2x2', '1x4x2', '8x1x1')  # data x fsdp x model
FORMATS = {
    'folder': (hf.load, checkpoints.write_folder),
    'shards': (hf.load, functools.partial(checkpoints.write_folder, shards=3)),
    'gguf': (gguf.load, checkpoints.write_gguf),
}
CASES = [(config, mesh, format_, dtype) for config in CONFIGS for mesh in MESHES for format_ in FORMATS
         for dtype in ('float32', 'bfloat16') if dtype == 'float32' or format_ != 'shards']


def held(config, stored):
  """{path: array} of the weights of a `ModelConfig`, whole, from tensors under Hugging Face names."""
  layer = {'attn_norm': 'input_layernorm', 'o': 'self_attn.o_proj', 'mlp_norm': 'post_attention_layernorm',
           'gate': 'mlp.gate_proj', 'up': 'mlp.up_proj', 'down': 'mlp.down_proj'}
  found = {'.embed': stored['model.embed_tokens.weight'], '.final_norm': stored['model.norm.weight']}
  found |= {f'.layers[0].{ours}': stored[f'model.layers.0.{theirs}.weight'].T for ours, theirs in layer.items()}
  if 'lm_head.weight' in stored:
    found['.head'] = stored['lm_head.weight']
  H, R, copies = config.head_dim, config.num_heads // config.cache_heads, config.kv_copies
  for kind in ('weight', 'bias') if config.qkv_bias else ('weight',):
    q, k, v = (stored[f'model.layers.0.self_attn.{part}_proj.{kind}'] for part in 'qkv')
    rows = [part for g in range(config.cache_heads) for part in (
        q[g * R * H:][:R * H], k[g // copies * H:][:H], v[g // copies * H:][:H])]
    found['.layers[0].qkv' + ('_bias' if kind == 'bias' else '')] = np.concatenate(rows).T
  return found


# What eight devices are given; run as a program.


def wrong_parts(params, config, mesh, dtype, expected):
  """Weights of which a device has another part than its own, or that are placed otherwise than they should be."""
  specs, wrong = transformer.abstract(config), []
  for (path, array), spec in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs), strict=True):
    whole = expected.pop(jax.tree_util.keystr(path)).astype(dtype)
    same = all(np.array_equal(shard.data, whole[shard.index]) for shard in array.addressable_shards)
    at_home = array.sharding == sharding.sharding_of(mesh, spec.axes, spec.shape)
    wrong += [] if same and at_home and array.dtype == dtype else [jax.tree_util.keystr(path)]
  return wrong + list(expected)


class Reads:
  """Counts how often `assemble` asks for each number of each tensor, and what is held then."""

  def __init__(self):
    self.counts, self.largest, self.held, self._others = {}, 0, 0, floats_held()

  def watch(self, assemble):
    """`assemble` that is watched."""

    def watched(config, names, stored, read, **options):
      self.counts = {name: np.zeros(shape, int) for name, shape in stored.items()}

      def counted(name, index):
        piece = read(name, index)
        assert piece.shape == tuple(s.stop - s.start for s in index)
        if not self.counts[name].any():  # later, parts of this weight are held
          self.held = max(self.held, floats_held() - self._others)
        self.counts[name][index] += 1
        self.largest = max(self.largest, piece.size)
        return piece

      return assemble(config, names, stored, counted, **options)

    return watched

  def wrong(self, copies):
    """Tensors that were not read once, or as often as key heads are held."""
    key_parts = ('k_proj', 'v_proj', 'attn_k.', 'attn_v.')
    return [name for name, count in self.counts.items()
            if np.any(count != (copies if any(part in name for part in key_parts) else 1))]


def floats_held():
  """Bytes of all matrices of floats."""
  return sum(a.nbytes for a in jax.live_arrays() if a.ndim == 2 and jnp.issubdtype(a.dtype, jnp.floating))


def wrong_int8(load, path, mesh):
  """What is not as in the model that is rounded on one device, bit by bit: a maximum has no order to depend on."""
  reads, before = Reads(), {id(array) for array in jax.live_arrays()}
  original = weights.assemble
  weights.assemble = reads.watch(original)
  params, config = load(path, mesh=mesh, dtype='float32', quantize='int8')
  weights.assemble = original
  left = {id(array) for array in jax.live_arrays()} - before - {id(array) for array in jax.tree.leaves(params)}
  wrong = ['floats are kept'] if left else []
  wrong += ['floats are kept while others are read'] if reads.held > params.embed.nbytes else []
  specs = transformer.abstract(config, 'int8')
  alone = load(path, dtype='float32')[0]
  if config.kv_copies > 1:
    alone = jax.tree.map(lambda array, spec: weights.with_copies(config, spec, array), alone,
                         transformer.abstract(config))
  whole = {jax.tree_util.keystr(path): array for path, array in jax.tree_util.tree_leaves_with_path(alone)}
  whole.setdefault('.head', whole['.embed'])
  expected = {}
  for name, array in whole.items():
    if array.ndim < 2 or name == '.embed':
      expected[name] = array
    else:
      rounded = int8.quantize(jnp.asarray(array.T if name == '.head' else array), 0)
      expected |= {f'{name}.values': rounded.values, f'{name}.scale': rounded.scale}
  for (path, array), spec in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs), strict=True):
    name = jax.tree_util.keystr(path)
    same = np.array_equal(array, expected[name]) and array.dtype == expected.pop(name).dtype
    wrong += [] if same and array.sharding == sharding.sharding_of(mesh, spec.axes, spec.shape) else [name]
  return wrong + list(expected)


def wrong_from_parts():
  """What `sharding.from_parts` does otherwise than it says."""
  wrong, whole = [], np.arange(96, dtype=np.float32).reshape(8, 12)
  for devices in (jax.devices(), jax.devices()[::-1]):
    mesh = sharding.make_mesh(data=2, fsdp=2, model=2, devices=devices)
    for spec, parts in ((PartitionSpec(), 1), (PartitionSpec('model', 'fsdp'), 4), (PartitionSpec(None, 'data'), 2)):
      asked, alive = [], []

      def part(index):
        if any(array() is not None for array in alive):
          wrong.append(f'{spec}: an earlier part is still held')
        memory = np.empty(100, np.float32)  # a CPU device copies what does not begin with a cache line
        start = memory.ctypes.data % 64 // 4 == 0
        array = memory[start:][:whole[index].size].reshape(whole[index].shape)
        array[:] = whole[index]
        asked.append(str(index))
        alive.append(weakref.ref(memory))
        return array

      array = sharding.from_parts(whole.shape, NamedSharding(mesh, spec), part)
      if not (len(asked) == len(set(asked)) == parts):
        wrong.append(f'{spec}: asked for {asked}')
      if array.sharding != NamedSharding(mesh, spec) or len(array.addressable_shards) != 8 or not np.array_equal(
          array, whole) or not all(np.array_equal(s.data, whole[s.index]) for s in array.addressable_shards):
        wrong.append(f'{spec}: not the array')
  return wrong


def main(out):
  warnings.simplefilter('error')
  found = {'from_parts': wrong_from_parts(), 'warned': []}
  meshes = {name: sharding.make_mesh(**dict(zip(('data', 'fsdp', 'model'), map(int, name.split('x')))))
            for name in MESHES}
  usual, original = weights.CHUNK, weights.assemble
  with tempfile.TemporaryDirectory() as folder:
    for config_name, mesh_name, format_, dtype in CASES:
      (load, write), config, mesh = FORMATS[format_], CONFIGS[config_name], meshes[mesh_name]
      stored = checkpoints.tensors(config)
      path = pathlib.Path(folder) / f'{config_name}-{format_}.gguf'
      if not path.exists():
        write(path, config, stored)
      reads = Reads()
      weights.CHUNK, weights.assemble = usual if dtype == 'float32' else CHUNK, reads.watch(original)
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        params, fitted = load(path, mesh=mesh, dtype=dtype)
      wrong = wrong_parts(params, fitted, mesh, jnp.dtype(dtype), held(fitted, stored))
      found[str([config_name, mesh_name, format_, dtype])] = {
          'parts': wrong, 'reads': reads.wrong(fitted.kv_copies), 'largest': reads.largest,
          'copies': fitted.kv_copies, 'warned': [str(w.message) for w in caught]}
      weights.CHUNK, weights.assemble = usual, original
      if dtype == 'float32' and format_ == 'folder' and config_name != 'odd':
        with warnings.catch_warnings():
          warnings.simplefilter('ignore')
          found[f'{config_name} {mesh_name} int8'] = wrong_int8(load, path, mesh)
  with open(out, 'w', encoding='utf-8') as file:
    json.dump(found, file)


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """What the program found."""
  out = tmp_path_factory.mktemp('weights') / 'found.json'
  done = subprocess.run([sys.executable, '-m', 'tests.weights_test', out], cwd=ROOT, capture_output=True, text=True,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'}, timeout=600)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(out.read_text())


@pytest.mark.parametrize('config', CONFIGS)
def test_each_device_has_its_part_and_each_part_is_read_once(found, config):
  for case in CASES:
    if case[0] == config:
      result = found[str([*case])]
      assert result['parts'] == result['reads'] == [], case
      assert result['largest'] > CHUNK / 2 and (case[3] == 'float32' or result['largest'] <= CHUNK), case
      assert result['copies'] == (2 if case[1] == '1x1x8' and config != 'odd' else 1)


def test_what_does_not_share_out_is_said(found):
  says = lambda *case: found[str([*case, 'folder', 'float32'])]['warned']
  (note,) = says('odd', '2x2x2')
  assert note.startswith('9 query and 3 key heads, a vocabulary of 97 cannot be shared out among 2 devices')
  assert says('odd', '8x1x1') == says('qwen2', '1x1x8') == []


@pytest.mark.parametrize('config', ['qwen2', 'llama', 'tied'])
def test_int8_on_a_mesh_is_that_of_the_whole(found, config):
  assert {mesh: found[f'{config} {mesh} int8'] for mesh in MESHES} == dict.fromkeys(MESHES, [])


def test_from_parts(found):
  assert found['from_parts'] == []


# On one device.

TIED = hf.from_hf_config(CONFIGS['tied'])


def assemble(stored, read, config=TIED, **options):
  return weights.assemble(config, hf.NAMES, {name: array.shape for name, array in stored.items()}, read,
                          source='here', dtype='float32', **options)


def reader(stored):
  return lambda name, index: stored[name][index]


def refuse(name, index):
  raise AssertionError(f'{name} is read')


@pytest.mark.parametrize('change, text', [
    (lambda stored: stored.pop('model.norm.weight'), 'missing: model.norm.weight'),
    (lambda stored: stored.update(other=np.ones(3)), 'unknown: other'),
    (lambda stored: stored.update({'model.norm.weight': np.ones(3)}), 'of the wrong shape: model.norm.weight (3,)'),
])
def test_nothing_is_read_of_a_file_that_does_not_fit(change, text):
  stored = checkpoints.tensors(CONFIGS['tied'])
  stored['lm_head.weight'] = stored['model.embed_tokens.weight']
  change(stored)
  with raises('here: weights ', text):
    assemble(stored, refuse)


def test_a_repeated_head_is_compared_piece_by_piece(monkeypatch):
  monkeypatch.setattr(weights, 'CHUNK', CHUNK)
  stored = checkpoints.tensors(CONFIGS['tied'])
  stored['lm_head.weight'] = stored['model.embed_tokens.weight'].copy()
  reads = Reads()
  reads.watch(assemble_of(stored))(None, None, {name: array.shape for name, array in stored.items()}, reader(stored))
  assert reads.largest <= CHUNK and np.all(reads.counts['lm_head.weight'] == 1)
  assert np.all(reads.counts['model.embed_tokens.weight'] == 2)
  stored['lm_head.weight'][-1, -1] += 1
  with raises('lm_head.weight differs from model.embed_tokens.weight'):
    assemble(stored, reader(stored))


def assemble_of(stored):
  return lambda config, names, shapes, read, **_: assemble(stored, read)


@pytest.mark.parametrize('rows, others, sizes', [
    (slice(3, 10), [slice(5, 10)], [4, 3]),
    (slice(0, 3), [slice(0, 100)], [1, 1, 1]),  # a row is not cut
    (slice(7, 60), [], [20, 20, 13]),
    (slice(4, 4), [slice(0, 5)], []),
])
def test_chunks(monkeypatch, rows, others, sizes):
  monkeypatch.setattr(weights, 'CHUNK', 20)
  pieces = weights.chunks(rows, others)
  assert [stop - start for start, stop in pieces] == sizes
  assert [i for start, stop in pieces for i in range(start, stop)] == list(range(rows.start, rows.stop))


@pytest.mark.parametrize('held', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', [(1,), (70,), (1, 5), (70, 33), (33, 70)])
def test_write(held, dtype, shape):
  piece = np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(held))
  out = weights._empty(shape[::-1], jnp.dtype(dtype))
  weights._write(out.T, piece)
  np.testing.assert_array_equal(out, piece.T.astype(jnp.dtype(dtype)))


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='other devices have memory of their own')
def test_a_cpu_takes_memory_as_it_is():
  for size in (3, 1000, 2**20):
    memory = weights._empty((size,), np.dtype(np.float32))
    memory[:] = 1
    array = jax.device_put(memory)
    memory[-1] = 2
    assert array[-1] == 2


# The progress bar.


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def bars(monkeypatch):
  """Every bar that is made, on a terminal; and that terminal."""
  made, original = [], weights.tqdm
  terminal = Terminal()
  monkeypatch.setattr(
      weights, 'tqdm', lambda **options: made.append(original(**options, file=terminal)) or made[-1])
  return made, terminal


def load_slowly(seconds):
  stored = checkpoints.tensors(CONFIGS['tied'])
  waits = iter([seconds])

  def read(name, index):
    time.sleep(next(waits, 0))
    return stored[name][index]

  return assemble(stored, read)


def test_a_slow_load_has_a_bar(bars):
  params = load_slowly(1.1)
  (bar,), terminal = bars
  assert bar.n == bar.total == sum(array.nbytes for array in jax.tree.leaves(params))
  assert 'Loading here' in terminal.getvalue()
  assert terminal.getvalue().endswith('\r'), 'it is wiped away'


def test_a_quick_load_has_none(bars):
  load_slowly(0)
  assert bars[0][0].n > 0 and bars[1].getvalue() == ''


@pytest.mark.parametrize('process, terminal', [(1, True), (0, False)])
def test_other_processes_and_files_have_none(bars, monkeypatch, process, terminal):
  monkeypatch.setattr(jax, 'process_index', lambda: process)
  monkeypatch.setattr(Terminal, 'isatty', lambda self: terminal)
  load_slowly(1.1)
  assert bars[1].getvalue() == ''


if __name__ == '__main__':
  main(sys.argv[1])
