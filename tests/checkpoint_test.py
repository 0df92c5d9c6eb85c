"""Orbax folders: the same bits on any mesh, a new folder or none, and no damage that goes unseen."""

import dataclasses
import gc
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import cactus_jax as cj
from cactus_jax import checkpoint
from cactus_jax.models import hf, rope, transformer, weights
from cactus_jax.models.config import from_hf_config
from cactus_jax.models.transformer import Transformer
from tests import checkpoint_program, checkpoints, fakes
from tests.checkpoints import FAMILIES
from tests.hf_test import raises

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT = 600
# Where one read fails, Orbax drops the others unfinished.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


def random_model(changes=(), dtype='float32', seed=0):
  config = from_hf_config(checkpoints.CONFIG | {'num_hidden_layers': 2} | dict(changes))
  return Transformer(transformer.random_params(jax.random.key(seed), config, dtype), config)


def named(model):
  """{name: its bytes and dtype} of the weights of a model."""
  return {name: (array.dtype.name, np.asarray(array).tobytes()) for name, array in
          checkpoint._named(model.params).items()}


def assert_same(found, expected):
  assert found.config == expected.config
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert named(found) == named(expected)


# Round trips.


@pytest.mark.parametrize('tied', [True, False])
def test_int8_stays_as_it_was_saved(tmp_path, tied):
  model = weights.to_int8(random_model({'tie_word_embeddings': tied, 'model_type': 'qwen2'}))
  cj.save_transformer(tmp_path / 'saved', model)
  for quantize in (None, 'int8'):
    assert_same(cj.load_transformer(tmp_path / 'saved', quantize=quantize), model)
  half = cj.load_transformer(tmp_path / 'saved', dtype='bfloat16')
  assert half.params.layers[1].qkv.scale.dtype == jnp.float32 and half.params.embed.dtype == jnp.bfloat16
  assert half.quantize == 'int8' and half.config == model.config


@pytest.mark.parametrize('tied', [True, False])
def test_floats_are_rounded_on_loading(tmp_path, tied):
  model = random_model({'tie_word_embeddings': tied})
  cj.save_transformer(tmp_path / 'saved', model)
  assert_same(cj.load_transformer(tmp_path / 'saved', quantize='int8'), weights.to_int8(model))


def test_int8_has_no_safetensors(tmp_path):
  with raises(f'{tmp_path}/hf: weights in 8 bits have no form that transformers reads; save the model of'):
    hf.save(tmp_path / 'hf', weights.to_int8(random_model()))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', FAMILIES)
def test_every_family(tmp_path, name):
  model = random_model(FAMILIES[name])
  cj.save_transformer(tmp_path / 'saved', model)
  assert_same(cj.load_transformer(tmp_path / 'saved', dtype='float32'), model)


@pytest.mark.parametrize('scaling', [
    None, rope.Linear(4.0), rope.Llama3(8.0, 1.0, 4.0, 64.0), rope.Yarn(4.0, 64.0, 32.0, 1.0, 1.1386, truncate=False)])
def test_config_as_json(scaling):
  config = dataclasses.replace(random_model().config, rope_scaling=scaling, windows=(None, 7), norm_eps=1 / 3)
  again = checkpoint._from_json(json.loads(json.dumps(checkpoint._to_json(config))))
  assert again == config and hash(again) == hash(config)


@pytest.mark.parametrize('held, asked', [
    ('bfloat16', 'bfloat16'), ('bfloat16', 'float32'), ('float32', 'bfloat16'), ('float16', 'float32')])
def test_dtypes(tmp_path, held, asked):
  model = random_model(dtype=held)
  cj.save_transformer(tmp_path / 'saved', model)
  cast = model.replace(params=jax.tree.map(lambda array: array.astype(asked), model.params))
  assert_same(cj.load_transformer(tmp_path / 'saved', dtype=asked), cast)


def test_default_dtype_and_no_dtype(tmp_path):
  cj.save_transformer(tmp_path / 'saved', random_model(dtype='bfloat16'))
  dtypes = {array.dtype for array in jax.tree.leaves(cj.load_transformer(str(tmp_path / 'saved')).params)}
  assert dtypes == {weights.default_dtype()}
  with raises('dtype=int8: weights are kept as floats'):
    cj.load_transformer(tmp_path / 'saved', dtype='int8')


def test_early_exit_and_home(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  exit_ = random_model().early_exit(1)
  cj.save_transformer('~/a/new/exit', exit_)
  assert_same(cj.load_transformer('~/a/new/exit', dtype='float32'), exit_)


def test_another_tool_reads_the_weights_by_name(tmp_path):
  model = random_model(dtype='bfloat16')
  cj.save_transformer(tmp_path / 'saved', model)
  read = ocp.PyTreeCheckpointer().restore(tmp_path / 'saved' / 'params')
  assert read.keys() == named(model).keys() >= {'embed', 'head', 'layers.1.qkv'}
  np.testing.assert_array_equal(read['layers.1.qkv'], model.params.layers[1].qkv)
  described = json.loads((tmp_path / 'saved' / 'model.json').read_text())['weights']
  assert described.keys() == read.keys() and {leaf['dtype'] for leaf in described.values()} == {'bfloat16'}


def test_tokenizer(tmp_path):
  tokenizer = fakes.byte_tokenizer()
  cj.save_transformer(tmp_path / 'saved', random_model(), tokenizer=tokenizer)
  assert cj.load_tokenizer(tmp_path / 'saved')('a b').input_ids == tokenizer('a b').input_ids
  cj.save_transformer(tmp_path / 'without', random_model())
  with raises(f'{tmp_path / "without"}: no tokenizer could be read'):
    cj.load_tokenizer(tmp_path / 'without')


# Meshes.


@pytest.fixture(scope='module')
def meshes(tmp_path_factory):
  """The folder in which a process of eight devices has saved and restored, and what it found."""
  return on_meshes(tmp_path_factory.mktemp('meshes'))


def on_meshes(folder, processes=1):
  checkpoints.write_folder(folder / 'hf', checkpoint_program.CONFIG)
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  command = [sys.executable, '-m', 'tests.checkpoint_program', folder, f'--processes={processes}', f'--port={port}']
  programs = [subprocess.Popen([*map(str, command), f'--process={i}'], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True) for i in range(processes)]
  for program in programs:
    output, _ = program.communicate(timeout=TIMEOUT)
    assert program.returncode == 0, output[-3000:]
  return folder, json.loads((folder / 'results.json').read_text())


def check_meshes(folder, results, count):
  """Every restored model was the one that the Hugging Face folder gives on that mesh, and copies were not saved."""
  copies = results.pop('kv_copies')
  assert copies == {'1x1x8': 4, '2x1x4': 2, '2x2x2': 1, '1x8x1': 1} | ({'none': 1} if 'none' in copies else {})
  assert len(results) == count
  assert {case: differ for case, differ in results.items() if differ} == {}
  assert len({(folder / mesh / 'model.json').read_text() for mesh in copies}) == 1
  read = {}
  for shard in (folder / 'hf_again').glob('*.safetensors'):
    read |= safetensors.numpy.load_file(shard)
  expected = checkpoints.tensors(checkpoint_program.CONFIG)
  assert read.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(read[name], array, name)


@pytest.mark.slow
def test_from_any_mesh_to_any_mesh(meshes):
  check_meshes(*meshes, 30)


@pytest.mark.slow
def test_on_two_processes(tmp_path):
  check_meshes(*on_meshes(tmp_path, processes=2), 20)


# Fingerprints.


def fingerprint(array):
  """The same, one number at a time."""
  def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16

  bits = array.reshape(-1).view(f'u{array.itemsize}').tolist()
  return sum(mix((b + mix(i + 1)) % 2**32) for i, b in enumerate(bits)) % 2**32


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'int8'])
@pytest.mark.parametrize('shape', [(7,), (5, 11), (2, 3, 4)])
def test_fingerprint(dtype, shape):
  array = (np.random.default_rng(0).standard_normal(shape) * 20).astype(jnp.dtype(dtype))
  assert int(checkpoint._fingerprint(array)) == fingerprint(array)


@pytest.mark.parametrize('change', [
    lambda a: a.__setitem__((0, 0), -a[0, 0]),
    lambda a: np.negative(a[:, :2], out=a[:, :2]),  # signs are the top bits: in a weighted sum they would cancel
    lambda a: a.__setitem__(slice(None), a[::-1].copy()),
    lambda a: a.__setitem__((slice(None), [0, 1]), a[:, [1, 0]]),
    lambda a: a.__setitem__(slice(0, 2), 0),
])
def test_fingerprint_sees(change):
  array = np.random.default_rng(0).standard_normal((8, 16)).astype(ml_dtypes.bfloat16)
  before = int(checkpoint._fingerprint(array))
  changed = array.copy()
  change(changed)
  assert int(checkpoint._fingerprint(changed)) != before


# Damage.


@pytest.fixture(scope='module')
def original(tmp_path_factory):
  model = random_model({'num_hidden_layers': 1})
  cj.save_transformer(folder := tmp_path_factory.mktemp('original') / 'saved', model)
  return folder, model


@pytest.fixture
def saved(original, tmp_path):
  """A copy of a checkpoint, to be damaged."""
  yield shutil.copytree(original[0], tmp_path / 'saved')
  gc.collect()  # what Orbax dropped unfinished, here rather than in the middle of another test


def load(folder):
  return cj.load_transformer(folder, dtype='float32')


@pytest.mark.parametrize('lost', ['model.json', 'params'])
def test_names_what_is_lost(saved, lost):
  path = saved / lost
  shutil.rmtree(path) if path.is_dir() else path.unlink()
  with raises(f'{saved}: lacks {lost}, so it is no whole checkpoint; copy all of it, or make the checkpoint again'):
    load(saved)


def test_other_folders_are_no_checkpoints(tmp_path):
  with raises(f'{tmp_path}/config.json: no such file'):
    load(tmp_path)


def biggest(folder):
  return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize('damage', [
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    lambda path: path.write_bytes(b''),
])
def test_names_a_folder_with_damaged_files(saved, damage):
  damage(biggest(saved / 'params'))
  with raises(f'{saved}: params cannot be read (', '); if files are missing or damaged, copy them again, or make the'):
    load(saved)


def test_names_a_folder_without_the_list_of_files(saved):
  (saved / 'params' / 'manifest.ocdbt').unlink()
  with raises(f'{saved}: params cannot be read (ValueError: NOT_FOUND'):
    load(saved)


def test_names_a_weight_with_a_flipped_bit(original, saved):
  """One bit, in the file that has most of the weights."""
  path = biggest(saved / 'params')
  data, rng, found = path.read_bytes(), random.Random(0), set()
  for _ in range(12):
    flipped = bytearray(data)
    flipped[rng.randrange(len(data) // 2)] ^= 1 << rng.randrange(8)  # an index, not all needed, is at the end
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match='the bits of .* are not those|params cannot be read') as error:
      load(saved)
    assert str(error.value).startswith(f'{saved}: ') and 'make the checkpoint again' in str(error.value)
    found |= {name for name in named(original[1]) if f' {name} ' in str(error.value)}
  assert found


def test_no_damage_goes_unseen(original, saved):
  """Whatever happens to whichever file: the same model, or an error that names the folder."""
  rng, outcomes = random.Random(1), []
  for path in [path for path in saved.rglob('*') if path.is_file()]:
    data = path.read_bytes()
    for kind in ('lost', 'cut', 'flip', 'flip', 'flip', 'flip', 'zeros'):
      at, changed = rng.randrange(len(data)), bytearray(data)
      changed[at] ^= 1 << rng.randrange(8)
      zeros = data[:at] + bytes(len(data[at:at + 64])) + data[at + 64:]
      path.write_bytes({'lost': b'', 'cut': data[:at], 'flip': changed, 'zeros': zeros}[kind])
      if kind == 'lost':
        path.unlink()
      try:
        assert_same(load(saved), original[1])
        outcomes.append('same')
      except ValueError as error:
        assert str(error).startswith(str(saved)), (path, kind)
        outcomes.append('named')
    path.write_bytes(data)
  assert_same(load(saved), original[1])
  assert {'same', 'named'} == set(outcomes)  # some files are not needed to restore


def test_bits_that_were_changed_with_care(original, saved):
  """Weights of the right shapes in an intact Orbax folder, but for one that is not what was saved."""
  arrays = checkpoint._named(original[1].params)
  arrays['layers.0.up'] = arrays['layers.0.up'].at[3, 5].multiply(-1)
  shutil.rmtree(saved / 'params')
  ocp.PyTreeCheckpointer().save(saved / 'params', arrays)
  with raises(f'{saved}: damaged: the bits of layers.0.up are not those that were saved; make the checkpoint again'):
    load(saved)


@pytest.mark.parametrize('changes, text', [
    ({'num_hidden_layers': 2}, 'layers.1.attn_norm is None where (64, \'float32\') is needed, layers.1.qkv is None'),
    ({'vocab_size': 97}, "embed is (96, 64, 'float32') where (97, 64, 'float32') is needed"),
    ({'num_hidden_layers': 1, 'tie_word_embeddings': True}, "head is (96, 64, 'float32') where None is needed"),
])
def test_refuses_weights_of_another_config(saved, tmp_path, changes, text):
  cj.save_transformer(tmp_path / 'other', random_model({'num_hidden_layers': 1} | changes))
  shutil.copy(tmp_path / 'other' / 'model.json', saved)
  with raises(f'{saved}: model.json does not belong to these weights: ', text):
    load(saved)


def test_refuses_weights_of_another_dtype(saved, tmp_path):
  cj.save_transformer(tmp_path / 'other', random_model({'num_hidden_layers': 1}, dtype='bfloat16'))
  shutil.copy(tmp_path / 'other' / 'model.json', saved)
  with raises("embed is (96, 64, 'float32') where (96, 64, 'bfloat16') is needed"):
    load(saved)


def test_refuses_the_tree_of_another_tool(saved):
  shutil.rmtree(saved / 'params')
  ocp.PyTreeCheckpointer().save(saved / 'params', {'decoder': {'norm': np.ones(3, np.float32)}})
  with raises('model.json does not belong to these weights: embed is None where', 'and 3 more'):
    load(saved)


@pytest.mark.parametrize('change, text', [
    (lambda text: text[:-2], 'damaged, or changed by hand (Expecting'),
    (lambda text: text.replace('5000.0', '5001.0'), 'damaged, or changed by hand (its checksum is not that of what it'),
    (lambda text: text.replace('"fingerprint": ', '"fingerprint": 1', 1), 'its checksum is not that'),
    (lambda text: text.replace('"config"', '"konfig"'), "damaged, or changed by hand ('config')"),
    (lambda text: text.replace('"cactus_jax"', '"another"'), 'damaged, or changed by hand'),
    (lambda text: text.replace('"version": 1', '"version": "1"'), 'damaged, or changed by hand'),
    (lambda text: '[]', 'damaged, or changed by hand'),
    (lambda text: text.replace('"version": 1', '"version": 2').replace('config', 'settings'),
     'version 2 of the format, of which 1 is the last that is known here; install a newer cactus_jax.'),
])
def test_refuses_a_damaged_model_json(saved, change, text):
  path = saved / 'model.json'
  before = path.read_text()
  path.write_text(change(before))
  assert path.read_text() != before
  with raises(f'{path}: ', text):
    load(saved)


def test_model_json_that_is_no_text(saved):
  (saved / 'model.json').write_bytes(b'\xff\xfe\x00')
  with raises(f'{saved}/model.json: damaged, or changed by hand ('):
    load(saved)


# All or nothing.


@pytest.mark.parametrize('there', ['folder', 'empty folder', 'file', 'dangling link'])
def test_refuses_what_is_there(tmp_path, monkeypatch, there):
  target = tmp_path / 'saved'
  if 'folder' in there:
    target.mkdir()
    (target / 'mine').write_text('precious') if there == 'folder' else None
  elif there == 'file':
    target.write_text('precious')
  else:
    target.symlink_to(tmp_path / 'nowhere')
  before = sorted(tmp_path.rglob('*'))
  monkeypatch.setattr(checkpoint, '_fingerprint', lambda array: pytest.fail('it computed'))
  with raises(f'{target}: is there already; name a new folder, or remove it.'):
    cj.save_transformer(target, random_model())
  assert sorted(tmp_path.rglob('*')) == before


def test_refuses_what_is_no_model(tmp_path):
  with raises('Params: only a Transformer can be saved, as from load_transformer.'):
    cj.save_transformer(tmp_path / 'saved', random_model().params)
  assert list(tmp_path.iterdir()) == []


class Interrupts:
  """A tokenizer whose saving comes to grief, when weights are written already."""

  def __init__(self, error):
    self.error, self.there = error, None

  def save_pretrained(self, folder):
    self.there = sorted(path.name for path in folder.parent.iterdir())
    raise self.error


@pytest.mark.parametrize('error', [OSError('disk full'), KeyboardInterrupt()])
def test_nothing_is_left_of_what_fails(tmp_path, error):
  tokenizer = Interrupts(error)
  with pytest.raises(type(error)):
    cj.save_transformer(tmp_path / 'saved', random_model(), tokenizer=tokenizer)
  assert [name[:15] for name in tokenizer.there] == ['.saved.partial-']
  assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_is_no_checkpoint(tmp_path, monkeypatch):
  monkeypatch.setattr(shutil, 'rmtree', lambda *_, **__: None)
  with pytest.raises(OSError, match='killed'):
    cj.save_transformer(tmp_path / 'saved', random_model(), tokenizer=Interrupts(OSError('killed')))
  (partial,) = tmp_path.iterdir()
  with raises('saved: no such file or folder'):
    load(tmp_path / 'saved')
  with raises(f'{partial}: lacks model.json, so it is no whole checkpoint'):
    load(partial)
  cj.save_transformer(tmp_path / 'saved', random_model())
  assert sorted(os.listdir(tmp_path)) == sorted([partial.name, 'saved'])
  assert_same(load(tmp_path / 'saved'), random_model())
