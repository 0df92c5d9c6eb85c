"""From the tensors of a file to `Params`: what every format shares.

A format is a table of names plus a function that reads a part of one tensor. The table says where the format keeps
each of our weights, with '{}' for the number of the layer. Formats store a matrix as [out, in], and query, key and
value apart.
"""

import contextlib
import functools
import logging
import math
import os
import pathlib
import secrets
import shutil
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from tqdm.auto import tqdm

from cactus_jax import sharding
from cactus_jax.models import int8, transformer

CHUNK = 2**23  # numbers read at once
LINE = 64  # bytes that a CPU fetches together


def assemble(config, names, stored, read, *, source, dtype=None, mesh=None, quantize=None):
  """The `Params` of `config`, weight by weight: each device is given its part, read in pieces.

  So a process never holds more than one part of one weight beside those that are on its devices. After a second a
  progress bar appears on a terminal.

  Args:
    config: the sizes that the weights must have.
    names: our name of a weight -> its name in the format, for embed, final_norm, head and those of a layer.
    stored: {name: shape} of all tensors in the file, without those that are known to be no weights.
    read: (name, a slice for each axis) -> that part as a float array, as stored, matrices [out, in].
    source: what to call the file in errors.
    dtype: of the result; None is float32 on a CPU and bfloat16 elsewhere.
    mesh: whose devices share the weights, or None.
    quantize: None, or 'int8'; see `load_transformer`.
  Raises: ValueError naming the weights that are missing, unknown or of the wrong shape.
  """
  dtype = float_dtype(dtype)
  specs, tree = jax.tree_util.tree_flatten_with_path(transformer.abstract(config))
  pieces = [_pieces(config, names, path, spec) for path, spec in specs]
  expected = {name: shape for needs in pieces for name, shape in needs.items()}
  head, embed = names['head'], names['embed']
  repeated = config.tie_embeddings and stored.get(head) == stored.get(embed) is not None
  _check(expected, {name: shape for name, shape in stored.items() if not repeated or name != head}, names, source)
  if repeated:
    _check_repeated_head(head, embed, stored[head], read, source)

  leaves = []
  with tqdm(total=sum(math.prod(spec.shape) for _, spec in specs) * dtype.itemsize, unit='B', unit_scale=True,
            desc=f'Loading {source}', delay=1, leave=False, disable=True if jax.process_index() else None) as bar:
    for (path, spec), needs in zip(specs, pieces):
      part = functools.partial(_part, source, _field(path), config, read, list(needs), dtype)
      # Nothing here names the floats of what is quantised: they must be gone when the next weight is read.
      if quantize and is_product(path, spec):
        leaves.append(quantized(_place(spec, mesh, part), spec, mesh))
      else:
        leaves.append(_place(spec, mesh, part))
      bar.update(math.prod(spec.shape) * dtype.itemsize)
  params = jax.tree.unflatten(tree, leaves)
  return with_int8_head(params, config, mesh) if quantize else params


def to_int8(model):
  """A Transformer of floats as one whose matrices are `Int8`. Raises ValueError if they are."""
  if model.quantize:
    raise ValueError('the matrices of this model are 8-bit integers already; load it from floats to round them anew.')
  specs, tree = jax.tree_util.tree_flatten_with_path(transformer.abstract(model.config))
  leaves = [quantized(array, spec, model.mesh) if is_product(path, spec) else array
            for (path, spec), array in zip(specs, jax.tree.leaves(model.params), strict=True)]
  return model.replace(params=with_int8_head(jax.tree.unflatten(tree, leaves), model.config, model.mesh))


def is_product(path, spec):
  """Whether a weight is a matrix that multiplies activations: what 8 bits are for."""
  return spec.is_matrix and _field(path) != 'embed'


def with_int8_head(params, config, mesh):
  """Params whose other matrices are `Int8`, with a head that is: a copy of the embedding, where that serves as head."""
  if not config.tie_embeddings:
    return params
  return params.replace(head=quantized(params.embed, transformer.abstract(config).embed, mesh))


def quantized(array, spec, mesh) -> int8.Int8:
  """The matrix of this spec as `Int8`, [in, out]."""
  quantizer = _quantizer(spec.input_axis, None if mesh is None else sharding.tree_of(mesh, spec.as_int8()))
  return jax.block_until_ready(quantizer(array))


@functools.cache
def _quantizer(input_axis, shardings):
  return jax.jit(lambda array: int8.quantize(array if input_axis == 0 else array.T, 0), out_shardings=shardings)


def _place(spec, mesh, part):
  """The array whose parts are part(index)."""
  if mesh is None:
    return jax.block_until_ready(jax.device_put(part(tuple(slice(0, size) for size in spec.shape))))
  return sharding.from_parts(spec.shape, sharding.sharding_of(mesh, spec.axes, spec.shape), part)


def _part(source, field, config, read, names, dtype, index):
  """What is at `index`, a slice for each axis, of one of our weights."""
  out = _empty([s.stop - s.start for s in index], dtype)
  view, (rows, *others) = (out, index) if _kept(field) else (out.T, index[::-1])
  for name, run, offset in _runs(field, config, names, rows):
    for start, stop in chunks(run, others):
      piece = read(name, (slice(start + offset, stop + offset), *others))
      if not np.isfinite(np.sum(piece, dtype=np.float32)):
        raise ValueError(f'{source}: {name} has values that are infinite or no numbers; get the file again.')
      _write(view[start - rows.start : stop - rows.start], piece)
  return out


def _runs(field, config, names, rows):
  """(name, some of the rows, what to add to find them in that tensor) of these rows of a weight as it is stored.

  Query, key and value: per key head its R query heads, its key, its value. Copies of a key head share its query heads
  out.
  """
  if field not in _GROUPED:
    return [(names[0], rows, 0)]
  runs, H = [], config.head_dim
  R = config.num_heads // config.cache_heads
  size = (R + 2) * H
  for g in range(rows.start // size, -(-rows.stop // size)):
    start = g * size
    for name, head, num in zip(names, (g * R, g // config.kv_copies, g // config.kv_copies), (R, 1, 1), strict=True):
      run = slice(max(start, rows.start), min(start + num * H, rows.stop))
      runs += [(name, run, head * H - start)] if run.start < run.stop else []
      start += num * H
  return runs


def _empty(shape, dtype):
  """np.empty that begins with a cache line: a CPU device takes such memory as it is, and copies other."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + LINE, np.uint8)
  start = -memory.ctypes.data % LINE
  return memory[start : start + size].view(dtype).reshape(shape)


def _write(view, piece):
  """view[:] = piece, a cache line of a column at a time: into a matrix that is transposed, up to four times as fast."""
  lines = LINE // view.itemsize
  for start in range(0, len(view), lines):
    view[start : start + lines] = piece[start : start + lines].astype(view.dtype, copy=False)


def digest(tree) -> int:
  """A number that tells weights apart: of the first few of every array."""
  first = sharding.fetch([leaf.reshape(-1)[:64] for leaf in jax.tree.leaves(tree)])
  return zlib.crc32(b''.join(np.asarray(part).tobytes() for part in first))


def chunks(rows, others=()):
  """(start, stop) of the pieces in which these rows are read; `others` are the slices of the other axes."""
  step = max(CHUNK // max(math.prod(s.stop - s.start for s in others), 1), 1)
  return [(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]


def for_mesh(config, mesh):
  """The config with its key heads repeated as the mesh asks; warns of what cannot be split."""
  if mesh is None:
    return config
  ways = mesh.shape['model']
  config = config.split(ways)
  sizes = {
      f'{config.num_heads} query and {config.num_kv_heads} key heads': config.cache_heads,
      f'an mlp of {config.mlp_dim}': config.mlp_dim,
      f'a vocabulary of {config.vocab_size}': config.vocab_size,
  }
  whole = [what for what, size in sizes.items() if size % ways]
  if whole:
    warnings.warn(f'{", ".join(whole)} cannot be shared out among {ways} devices: each of them computes with all.',
                  stacklevel=4)
  return config


def float_dtype(dtype):
  """The dtype of weights that were asked for in `dtype`, maybe None; raises ValueError for one they cannot have."""
  try:
    found = default_dtype() if dtype is None else jnp.dtype(dtype)
  except TypeError:
    found = None
  if found not in (jnp.float32, jnp.bfloat16, jnp.float16):
    raise ValueError(f'dtype={dtype if found is None else found.name!s}: weights are kept as floats; use float32, '
                     'bfloat16 or float16.')
  return found


def default_dtype():
  """float32 on a CPU, which has no bfloat16 arithmetic worth using, and bfloat16 on accelerators."""
  return jnp.dtype(jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16)


# Our weight -> the three that formats store apart.
_GROUPED = {'qkv': ('q', 'k', 'v'), 'qkv_bias': ('q_bias', 'k_bias', 'v_bias')}


def _pieces(config, names, path, spec):
  """{name in the file: shape there} of the tensors that make up one weight."""
  field = _field(path)
  if field in _GROUPED:
    rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    shapes = {part: (n, *spec.shape[:-1]) for part, n in zip(_GROUPED[field], rows)}
  else:
    shapes = {field: spec.shape if _kept(field) else spec.shape[::-1]}
  return {names[part].format(*(key.idx for key in path[1:-1])): shape for part, shape in shapes.items()}


def to_stored(config, names, path, array):
  """{name in the format: array there} of one of our weights, without copies of key heads: as `_part` reads it."""
  arrays = [array if _kept(_field(path)) else array.T]
  if _field(path) in _GROUPED:
    into = array.shape[:-1]
    grouped = array.T.reshape(config.num_kv_heads, -1, config.head_dim, *into)
    arrays = [part.reshape(-1, *into) for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]
  return dict(zip(_pieces(config, names, path, array), arrays, strict=True))


def without_copies(config, spec, array):
  """A weight of `config` with each key head once, as `config` with kv_copies=1 has it."""
  if config.kv_copies == 1 or spec.axes[-1] != 'heads':
    return array
  return _without_copies(array, config.num_kv_heads, config.kv_copies, config.head_dim)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _without_copies(array, heads, copies, head_dim):
  *into, _ = array.shape
  array = array.reshape(*into, heads, copies, -1, head_dim)
  q = array[..., :-2, :].reshape(*into, heads, -1, head_dim)
  return jnp.concatenate([q, array[..., 0, -2:, :]], axis=-2).reshape(*into, -1)


def with_copies(config, spec, array):
  """A weight with as many copies of key heads as `config` has, from one with each once."""
  if config.kv_copies == 1 or spec.axes[-1] != 'heads':
    return array
  *into, _ = array.shape
  array = array.reshape(*into, config.num_kv_heads, -1, config.head_dim)
  q = array[..., :-2, :].reshape(*into, config.num_kv_heads, config.kv_copies, -1, config.head_dim)
  kv = jnp.broadcast_to(array[..., None, -2:, :], (*q.shape[:-2], 2, config.head_dim))
  return jnp.concatenate([q, kv], axis=-2).reshape(*into, -1)


def _kept(field):
  """Whether a weight is stored as we keep it; others are transposed, which changes no vector."""
  return field in ('embed', 'head')


def _field(path):
  return path[-1].name


def _check_repeated_head(head, embed, shape, read, source):
  """Raises unless a stored head is the embedding, to which the config ties it."""
  rows, columns = (slice(0, size) for size in shape)
  pieces = [(slice(*piece), columns) for piece in chunks(rows, [columns])]
  if not all(np.array_equal(read(head, piece), read(embed, piece)) for piece in pieces):
    raise ValueError(
        f'{source}: {head} differs from {embed}, but the config ties them; set tie_word_embeddings=false.')


def _check(expected, stored, names, source):
  problems = {
      'missing': [name for name in expected if name not in stored],
      'unknown': [name for name in stored if name not in expected],
      'of the wrong shape': [
          f'{name} {tuple(stored[name])} where {shape} is needed'
          for name, shape in expected.items() if name in stored and tuple(stored[name]) != shape
      ],
  }
  found = '; '.join(f'{kind}: {listed(what)}' for kind, what in problems.items() if what)
  if found:
    advice = 'check that the config belongs to these weights'
    if names['head'] in problems['missing']:
      advice += ', and set tie_word_embeddings if the embedding is the head'
    raise ValueError(f'{source}: weights {found}; {advice}.')


def import_transformers():
  """transformers, for its tokenizers: late, since importing it takes a second, and without its advice to get torch."""
  logging.disable(logging.WARNING)
  try:
    import transformers
  finally:
    logging.disable(logging.NOTSET)
  return transformers


@contextlib.contextmanager
def new_folder(folder):
  """A temporary folder beside `folder` that takes its place when all is written, and goes if that fails.

  All processes must enter; the first makes and moves it. Raises ValueError if something is at `folder` already, or if
  nothing can be made there.
  """
  if not isinstance(folder, (str, os.PathLike)):
    raise ValueError(f'{folder!r}: need the path of a new folder.')
  folder = pathlib.Path(folder).expanduser().absolute()
  first = jax.process_index() == 0
  taken, token = multihost_utils.broadcast_one_to_all(
      np.array([os.path.lexists(folder), secrets.randbits(31)], np.int32))
  if taken:
    raise ValueError(f'{folder}: is there already; name a new folder, or remove it.')
  partial = folder.with_name(f'.{folder.name}.partial-{token:08x}')
  error = None
  if first:
    try:
      partial.mkdir(parents=True)
    except OSError as caught:
      error = caught
  if multihost_utils.broadcast_one_to_all(np.array(error is not None)):
    raise ValueError(f'{folder}: no folder can be made there ({error or "see the first process"}); name another.')
  try:
    yield partial
    multihost_utils.sync_global_devices(f'{partial} is written')
    if first:
      partial.rename(folder)
    multihost_utils.sync_global_devices(f'{folder} is there')
  except BaseException:
    if first:
      shutil.rmtree(partial, ignore_errors=True)
    raise


def listed(names, most=8):
  """The first names for an error message."""
  rest = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + rest
