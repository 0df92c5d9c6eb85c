"""The same tokens on one device, on meshes of eight, and on two processes of four; and the mesh itself.

The devices are pretended by the CPU. They must be there before JAX starts, so what needs them runs in processes of its
own (mesh_program.py).
"""

import json
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cactus_jax import sharding
from cactus_jax.models import config

ROOT = pathlib.Path(__file__).parent.parent
MESHES = ('2x1x4', '8x1x1')  # data x fsdp x model; slow tests have more
TIMEOUT = 900


def start(out, *arguments):
  command = [sys.executable, '-m', 'tests.mesh_program', str(out), *map(str, arguments)]
  return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*programs):
  for program in programs:
    output, _ = program.communicate(timeout=TIMEOUT)
    assert program.returncode == 0, output[-3000:]


def on_two_processes(folder, *arguments):
  """What each of two processes of four devices found."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  outs = [folder / f'process{i}.json' for i in range(2)]
  finish(*(start(out, *arguments, '--processes=2', f'--process={i}', f'--port={port}') for i, out in enumerate(outs)))
  return [json.loads(out.read_text()) for out in outs]


def on_one_process(folder, *arguments):
  out = folder / 'out.json'
  finish(start(out, *arguments, '--text'))
  return json.loads(out.read_text())


@pytest.fixture(scope='module')
def one_process(tmp_path_factory):
  # Half of the pairs of draft and rule on each, all on both; the slow tests have the other halves too.
  return on_one_process(
      tmp_path_factory.mktemp('mesh'), 'none', *(f'{mesh}:{i % 2}' for i, mesh in enumerate(MESHES)))


def assert_same(found, reference):
  """Everything but the note on idle rows, and what a sum in another order may tip."""
  if 'int8' in found:
    np.testing.assert_allclose(found['int8']['logits'], reference['int8']['logits'], atol=0.03, rtol=0)
  for case, result in found.items():
    if case == 'int8':
      continue
    for what, value in result.items():
      if what != 'notes':
        assert value == reference[case][what], (case, what)


def test_the_reference_decodes(one_process):
  """What is compared is no trifle: rejections, full accepts, ends of text, and a row of its own length each."""
  reference = one_process['none']
  assert len(reference) == 13
  for case, result in reference.items():
    if case not in ('text', 'each', 'int8'):
      assert len({len(tokens) for tokens in result['tokens']}) > 3
      assert {1, 2} <= set(result['finish'])
  accepted = np.array(reference['model, Cactus(delta=0.5)']['accepted'])
  assert (accepted[:, 0] > accepted[:, 2]).any() and (accepted[:, 2] > 0).any()


def test_8_bits_are_those_of_the_model(one_process):
  """The logits that meshes are compared by: of some size, and not the same after two more tokens."""
  first, second = np.array(one_process['none']['int8']['logits'])
  assert 0.3 < first.std() < 3 and np.abs(first - second).max() > 0.3


@pytest.mark.parametrize('mesh', MESHES)
def test_same_tokens_on_every_mesh(one_process, mesh):
  assert len(one_process[mesh]) == 8
  assert_same(one_process[mesh], one_process['none'])


def test_uneven_batches_are_padded_and_said(one_process):
  assert one_process['none']['text']['notes'] == []
  (note,) = one_process['2x1x4']['text']['notes']
  assert '5 rows do not split over 2 groups of devices: 1 idle rows are added' in note
  assert '3 idle rows' in one_process['8x1x1']['text']['notes'][0]
  assert one_process['2x1x4']['text']['rows'] == [5, 5, 5]


def test_answers_one_after_the_other_are_those_of_a_batch(one_process):
  together, each = one_process['none']['text'], one_process['none']['each']
  assert each['tokens'] == together['tokens'] and each['finish'] == together['finish']
  assert {'stop', 'length'} <= set(each['finish'])


@pytest.mark.slow
def test_same_tokens_where_two_or_all_devices_share_the_model(one_process, tmp_path):
  found = on_one_process(tmp_path, '4x1x2:1', '1x1x8:1')
  for mesh in ('4x1x2', '1x1x8'):
    assert len(found[mesh]) == 8
    assert_same(found[mesh], one_process['none'])
  assert found['1x1x8']['text']['notes'] == [], 'no rows are added'


@pytest.mark.slow
def test_same_tokens_on_two_processes(one_process, tmp_path):
  for found in on_two_processes(tmp_path, '2x1x4:1', '--text'):
    assert len(found['2x1x4']) == 8
    assert_same(found['2x1x4'], one_process['none'])


@pytest.mark.slow
def test_same_tokens_on_two_processes_and_more_meshes(one_process, tmp_path):
  for found in on_two_processes(tmp_path, '2x2x2', '1x1x8', '8x1x1:0'):
    for mesh in ('2x2x2', '1x1x8', '8x1x1'):
      assert_same(found[mesh], one_process['none'])


# The mesh itself, on abstract devices.


def mesh_of(data=1, fsdp=1, model=1):
  return jax.sharding.AbstractMesh((data, fsdp, model), ('data', 'fsdp', 'model'))


@pytest.mark.parametrize(
    'axes, shape, spec',
    [
        (('vocab', 'embed'), (96, 64), P('model', 'fsdp')),
        (('embed', 'heads'), (64, 96), P('fsdp', 'model')),
        (('batch', 'heads', None, None), (4, 4, 7, 3), P(('data', 'fsdp'), 'model', None, None)),
        (('batch', 'heads', None, None), (4, 3, 7, 3), P(('data', 'fsdp'), None, None, None)),  # 3 heads on 4 devices
        (('batch',), (5,), P(None)),
        (('norm',), (64,), P(None)),
    ],
)
def test_the_table_of_axes(axes, shape, spec):
  mesh = mesh_of(data=2, fsdp=2, model=4)
  assert sharding.sharding_of(mesh, axes, shape) == jax.sharding.NamedSharding(mesh, spec)


def test_axes_of_one_device_are_left_out():
  assert tuple(sharding.sharding_of(mesh_of(), ('vocab', 'embed'), (96, 64)).spec) == (None, None)


@pytest.mark.parametrize(
    'sizes, text',
    [
        (dict(data=2, model=3), 'data=2 x fsdp=1 x model=3 is 6, but there are 1 devices'),
        (dict(model=0), 'model=0: need a whole number of at least 1'),
        (dict(data=1.0), 'data=1.0: need a whole number'),
        (dict(fsdp=True), 'fsdp=True: need a whole number'),
    ],
)
def test_refuses_a_mesh(sizes, text):
  with pytest.raises(ValueError, match=text.replace('.', r'\.')):
    sharding.make_mesh(**sizes, devices=jax.devices()[:1])


def test_refuses_to_narrow():
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  with pytest.raises(ValueError, match='model=2: the draft can share the 1 devices of the model axis in groups of 1'):
    sharding.narrow(mesh, 2)


@pytest.mark.parametrize('no_mesh', [None, 'a mesh', jax.make_mesh((1,), ('x',), devices=jax.devices()[:1])])
def test_refuses_what_is_no_mesh_of_ours(no_mesh):
  with pytest.raises(ValueError, match=r'need a mesh, as from make_mesh\(data=1, model=4\)'):
    sharding.narrow(no_mesh, 1)


def test_refuses_no_devices():
  with pytest.raises(ValueError, match='devices is empty'):
    sharding.make_mesh(devices=[])


@pytest.mark.parametrize('ways, copies', [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (3, 1), (6, 1), (32, 1)])
def test_key_heads_are_repeated_where_that_gives_each_device_whole_heads(ways, copies):
  split = SIXTEEN_AND_FOUR.split(ways)
  assert split.kv_copies == copies and split.cache_heads == 4 * copies
  assert split.split(1) == SIXTEEN_AND_FOUR, 'and back'


SIXTEEN_AND_FOUR = config.ModelConfig('llama', vocab_size=64, embed_dim=32, num_layers=1, num_heads=16, num_kv_heads=4,
                                      head_dim=8, mlp_dim=64, max_length=64, norm_eps=1e-6, rope_theta=1e4,
                                      tie_embeddings=True)


def test_axes_are_auto():
  mesh = sharding.narrow(sharding.make_mesh(devices=jax.devices()[:1]), 1)
  assert mesh.axis_names == ('data', 'fsdp', 'replica', 'model')
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
