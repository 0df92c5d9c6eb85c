"""A model as an Orbax folder: written by every process, read back to any mesh and dtype, and checked bit by bit.

A folder has `params/`, which is Orbax's and holds the weights by name ('layers.0.qkv'), `model.json`, which has sizes,
switches and a fingerprint of every weight, and maybe the files of a tokenizer.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import sharding
from cactus_jax.models import hf, rope, transformer, weights
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.transformer import Params, Transformer

FORMAT, VERSION = 'cactus_jax', 1
MODEL, PARAMS = 'model.json', 'params'
CHUNK = 64 * 2**20  # bytes that are read as a whole: few, so that a device need not read what others hold
SCALE = '.scale'  # how names of the scales of 8-bit weights end: they are float32 whatever the dtype of the rest
AGAIN = 'make the checkpoint again with save_transformer'

load_tokenizer = hf.load_tokenizer  # its files are those of a Hugging Face folder


def save_transformer(folder, model: Transformer, *, tokenizer=None):
  """Writes a model, and its transformers tokenizer if given, to a new folder that `load_transformer` reads.

  Weights keep their dtype, or their 8 bits. A key head that is held several times (`ModelConfig.kv_copies`) is written
  once. Of several processes all must call it, on a file system that they share. Nothing is at `folder` until everything
  is written.
  Raises: ValueError if there is something at `folder`.
  """
  if not isinstance(model, Transformer):
    raise ValueError(f'{type(model).__name__}: only a Transformer can be saved, as from load_transformer.')
  hf.check_tokenizer(tokenizer)
  with weights.new_folder(folder) as partial:
    specs = _named(transformer.abstract(model.config, model.quantize))
    # One after the other: on a CPU, programs of several devices that are under way at once can wait for each other.
    arrays = {name: jax.block_until_ready(weights.without_copies(model.config, specs[name], array))
              for name, array in _named(model.params).items()}
    fingerprints = {name: int(sharding.fetch(_fingerprint(array))) for name, array in arrays.items()}
    checkpointer, ocp = _orbax()
    chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in arrays}
    try:
      checkpointer.save(partial / PARAMS, args=ocp.args.PyTreeSave(arrays, save_args=chunks))
    except Exception as error:  # no common base
      raise ValueError(f'{folder}: could not be written ({_first_line(error)}); is the disk full?') from error
    if jax.process_index() == 0:
      if tokenizer is not None:
        tokenizer.save_pretrained(partial)
      described = {
          'config': _to_json(dataclasses.replace(model.config, kv_copies=1)),
          'quantize': model.quantize,
          'weights': {name: {'dtype': array.dtype.name, 'fingerprint': fingerprints[name]}
                      for name, array in arrays.items()},
      }
      whole = {'format': FORMAT, 'version': VERSION, **described, 'checksum': _checksum(described)}
      (partial / MODEL).write_text(json.dumps(whole, indent=1), encoding='utf-8')


def is_checkpoint(folder) -> bool:
  """Whether a folder is one of ours, be it damaged."""
  folder = pathlib.Path(folder).expanduser()
  return (folder / MODEL).is_file() or (folder / PARAMS).is_dir()


def load(source, *, dtype=None, mesh=None, quantize=None) -> tuple[Params, ModelConfig]:
  """Weights and config of a folder that `save_transformer` wrote, on any mesh; each device reads its own part.

  Weights that were saved in 8 bits stay so. Raises ValueError for files that are missing, damaged or do not fit, and
  for weights whose bits have changed.
  """
  folder = pathlib.Path(source).expanduser().absolute()
  dtype = weights.float_dtype(dtype)
  stored, stored_as, table = _read_model(folder)
  checkpointer, ocp = _orbax()
  with _explained(folder):
    found = _named(ocp.PyTreeCheckpointHandler().metadata(folder / PARAMS).tree)
    found = {name: (*leaf.shape, leaf.dtype.name) for name, leaf in found.items()}
  needed = _named(transformer.abstract(stored, stored_as))
  _check(needed, table, found, folder)
  config, abstract = weights.for_mesh(stored, mesh), _abstract(needed, table, mesh)
  specs, tree = jax.tree_util.tree_flatten_with_path(transformer.abstract(config, stored_as))
  to_round = quantize if stored_as is None else None
  arrays = []
  for _, layer in itertools.groupby(specs, lambda pair: pair[0][:2]):  # one is in memory as it was stored, not all
    layer = {_name(path): (path, spec) for path, spec in layer}
    item = {name: abstract[name] for name in layer}
    arguments = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True)
    with _explained(folder):
      restored = checkpointer.restore(folder / PARAMS, args=arguments)
    changed = [name for name, array in restored.items()
               if sharding.fetch(_fingerprint(array)) != table[name]['fingerprint']]
    if changed:
      raise ValueError(f'{folder}: damaged: the bits of {weights.listed(changed)} are not those that were saved; '
                       f'{AGAIN}.')
    for name, (path, spec) in layer.items():
      array = _finish(restored.pop(name), config, spec, table[name]['dtype'] if name.endswith(SCALE) else dtype, mesh)
      arrays.append(weights.quantized(array, spec, mesh) if to_round and weights.is_product(path, spec) else array)
  params = jax.tree.unflatten(tree, arrays)
  return weights.with_int8_head(params, config, mesh) if to_round else params, config


def _read_model(folder):
  """The config in model.json, how weights are quantised, and {name: {'dtype', 'fingerprint'}} of the weights."""
  path = folder / MODEL
  for name in (MODEL, PARAMS):
    if not (folder / name).exists():
      raise ValueError(f'{folder}: lacks {name}, so it is no whole checkpoint; copy all of it, or {AGAIN}.')
  try:
    whole = json.loads(path.read_text(encoding='utf-8'))
    is_newer = whole['format'] == FORMAT and whole['version'] > VERSION
    if not is_newer:
      described = {name: whole[name] for name in ('config', 'quantize', 'weights')}
      if (whole['format'], whole['version'], whole['checksum']) != (FORMAT, VERSION, _checksum(described)):
        raise ValueError('its checksum is not that of what it holds')
      return _from_json(described['config']), described['quantize'], described['weights']
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(f'{path}: damaged, or changed by hand ({error}); {AGAIN}.') from error
  raise ValueError(f'{path}: version {whole["version"]} of the format, of which {VERSION} is the last that is known '
                   'here; install a newer cactus_jax.')


def _checksum(described):
  return zlib.crc32(json.dumps(described, sort_keys=True).encode())


def _to_json(config):
  return dataclasses.asdict(config) | {'rope_scaling': config.rope_scaling and rope.to_dict(config.rope_scaling)}


def _from_json(fields):
  fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
  return ModelConfig(**fields | {'rope_scaling': fields['rope_scaling'] and rope.from_dict(fields['rope_scaling'])})


def _check(specs, table, found, folder):
  """Raises unless the weights in a folder, {name: (*shape, dtype)}, are those that its model.json describes."""
  needed = {name: (*spec.shape, table.get(name, {}).get('dtype')) for name, spec in specs.items()}
  wrong = [f'{name} is {found.get(name)} where {needed.get(name)} is needed'
           for name in needed | found if needed.get(name) != found.get(name)]
  if wrong:
    raise ValueError(f'{folder}: {MODEL} does not belong to these weights: {weights.listed(wrong)}; {AGAIN}.')


def _abstract(specs, table, mesh):
  """{name: what Orbax is to restore} of weights as they were stored, on the devices that will hold them."""
  one_device = jnp.zeros(()).sharding
  return {
      name: jax.ShapeDtypeStruct(
          spec.shape, table[name]['dtype'],
          sharding=sharding.sharding_of(mesh, spec.axes, spec.shape) if mesh is not None else one_device)
      for name, spec in specs.items()
  }


def _finish(array, config, spec, dtype, mesh):
  """A weight as it is held, from one as it was stored: key heads repeated, floats in `dtype`."""
  dtype = dtype if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype
  if array.shape == spec.shape and array.dtype == dtype:
    return array
  return jax.block_until_ready(_finisher(config, spec, dtype, mesh)(array))


@functools.cache
def _finisher(config, spec, dtype, mesh):
  where = None if mesh is None else sharding.sharding_of(mesh, spec.axes, spec.shape)
  return jax.jit(lambda array: weights.with_copies(config, spec, array).astype(dtype), out_shardings=where)


@jax.jit
def _fingerprint(array):
  """u32 of all bits and their places, the same for any sharding: a sum of hashes, which wraps around.

  A change of one weight always changes it, any other but for one chance in 2^32. (A weighted sum of the bits would not
  do: two changed signs cancel.)
  """
  bits = jax.lax.bitcast_convert_type(array, f'uint{8 * array.dtype.itemsize}').astype(jnp.uint32)
  place, stride = jnp.zeros(array.shape, jnp.uint32), 1
  for axis in reversed(range(array.ndim)):
    place += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(stride % 2**32)
    stride *= array.shape[axis]
  return jnp.sum(_mix(bits + _mix(place + np.uint32(1))), dtype=jnp.uint32)


def _mix(x):
  """A permutation of u32 in which each bit moves all: the last step of MurmurHash3 (Appleby)."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> shift)) * np.uint32(factor)
  return x ^ (x >> 16)


def _named(tree):
  """{name: leaf} of a tree; a name is the path to it: layers.0.qkv."""
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path):
  return jax.tree_util.keystr(path, simple=True, separator='.')


def _orbax():
  """What writes and reads, and its module: late, since importing it takes a quarter of a second."""
  import orbax.checkpoint as ocp

  return ocp.PyTreeCheckpointer(), ocp


@contextlib.contextmanager
def _explained(folder):
  try:
    yield
  except Exception as error:  # no common base: of Orbax, of tensorstore, of a JSON parser
    raise ValueError(f'{folder}: {PARAMS} cannot be read ({type(error).__name__}: {_first_line(error)}); if files are '
                     f'missing or damaged, copy them again, or {AGAIN}.') from error


def _first_line(error):
  return (str(error).splitlines() or [''])[0][:160]
