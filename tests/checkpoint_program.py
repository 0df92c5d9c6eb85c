"""Saves and restores a model on meshes of eight devices, and writes what came out; run by checkpoint_test.py.

  python -m tests.checkpoint_program FOLDER
  python -m tests.checkpoint_program FOLDER --processes=2 --process=0 --port=12345

FOLDER has a checkpoint, hf/, of `CONFIG`.
"""

import argparse
import json
import os
import pathlib
import warnings

from tests import checkpoints

DEVICES = 8
MESHES = ('1x1x8', '2x1x4', '2x2x2', '1x8x1')  # data x fsdp x model; 2 key heads are held 4, 2, 1 and 1 times
CONFIG = checkpoints.CONFIG | {'num_attention_heads': 8, 'head_dim': 8}


def arguments():
  parser = argparse.ArgumentParser()
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--processes', type=int, default=1)
  parser.add_argument('--process', type=int, default=0)
  parser.add_argument('--port', type=int)
  return parser.parse_args()


def differences(found, expected):
  """Where two models are not the same: in config, or in bits, dtype or sharding of a weight."""
  import jax
  import numpy as np

  from cactus_jax import sharding

  differ = [] if found.config == expected.config else ['config']
  for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(found.params), jax.tree.leaves(expected.params),
                                  strict=True):
    one_device = expected.mesh is None and ours.sharding.device_set == theirs.sharding.device_set
    same = (ours.dtype == theirs.dtype and (one_device or ours.sharding == theirs.sharding)
            and np.array_equal(*sharding.fetch((ours, theirs))))
    differ += [] if same else [jax.tree_util.keystr(path)]
  return differ


def main():
  args = arguments()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={DEVICES // args.processes}'
  import jax

  if args.processes > 1:
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'localhost:{args.port}', args.processes, args.process)
  import cactus_jax as cj
  from cactus_jax.models import hf

  warnings.simplefilter('error')
  source = args.folder / 'hf'
  meshes = {name: cj.make_mesh(**dict(zip(('data', 'fsdp', 'model'), map(int, name.split('x'))))) for name in MESHES}
  if args.processes == 1:
    meshes['none'] = None
  models = {name: cj.load_transformer(source, mesh=mesh, dtype='float32') for name, mesh in meshes.items()}
  results = {'kv_copies': {name: model.config.kv_copies for name, model in models.items()}}
  for name, model in models.items():
    cj.save_transformer(args.folder / name, model)
  hf.save(args.folder / 'hf_again', models['1x1x8'], max_shard=60_000)
  for saved in meshes:
    for name, mesh in meshes.items():
      for dtype in ('float32', 'bfloat16') if saved == MESHES[0] else ('float32',):
        expected = models[name] if dtype == 'float32' else cj.load_transformer(source, mesh=mesh, dtype=dtype)
        found = cj.load_transformer(args.folder / saved, mesh=mesh, dtype=dtype)
        results[f'{saved} to {name} in {dtype}'] = differences(found, expected)
  if args.process == 0:
    (args.folder / 'results.json').write_text(json.dumps(results))


if __name__ == '__main__':
  main()
