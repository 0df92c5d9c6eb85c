"""From the tensors of a file to `Params`: what every format shares.

A format is a table of names plus a function that reads one tensor. The table says where the format keeps each
of our weights, with '{}' for the number of the layer. Formats store a matrix as [out, in], and query, key and
value apart.
"""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import sharding
from cactus_jax.models import transformer


def assemble(config, names, stored, read, *, source, dtype=None, mesh=None):
  """The `Params` of `config`, one weight at a time, so that little more than the result is ever in memory.

  Args:
    config: the sizes that the weights must have.
    names: our name of a weight -> its name in the format, for embed, final_norm, head and those of a layer.
    stored: {name: shape} of all tensors in the file, without those that are known to be no weights.
    read: (name, a slice per axis) -> that part as a float array, matrices [out, in].
    source: what to call the file in errors.
    dtype: of the result; None is float32 on a CPU and bfloat16 elsewhere.
    mesh: whose devices share the weights, or None.
  Raises: ValueError naming the weights that are missing, unknown or of the wrong shape.
  """
  dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f'dtype={dtype.name}: weights are kept as floats; use float32 or bfloat16.')
  specs, tree = jax.tree_util.tree_flatten_with_path(transformer.abstract(config))
  pieces = [_pieces(config, names, path, spec) for path, spec in specs]
  expected = {name: shape for needs in pieces for name, shape in needs.items()}
  stored = dict(stored)
  if config.tie_embeddings:
    _drop_tied_head(names, stored, read, source)
  _check(expected, stored, names, source)

  def build(path, spec, needs):
    array = _to_ours(_field(path), config, [read(name, _whole(shape)) for name, shape in needs.items()])
    assert array.shape == spec.shape, (path, array.shape, spec.shape)
    array = np.array(array, dtype, order='C')  # a copy: what is read may be a view of the file
    if mesh is None:
      return jax.device_put(array)
    return sharding.from_host(array, sharding.sharding_of(mesh, spec.axes, spec.shape))

  return jax.tree.unflatten(tree, [build(*pair, needs) for pair, needs in zip(specs, pieces)])


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


def _to_ours(field, config, arrays):
  """One of our weights from its stored tensors."""
  if field in _GROUPED:
    # Per key head: its R query heads, its key, its value. Copies of a key head share its query heads out.
    into = arrays[0].shape[1:]
    repeat = lambda a: np.repeat(a.reshape(config.num_kv_heads, 1, config.head_dim, *into), config.kv_copies, axis=0)
    q, k, v = arrays
    grouped = [q.reshape(config.cache_heads, -1, config.head_dim, *into), repeat(k), repeat(v)]
    return np.concatenate(grouped, axis=1).reshape(-1, *into).T
  return arrays[0] if _kept(field) else arrays[0].T


def _kept(field):
  """Whether a weight is stored as we keep it; others are transposed, which changes no vector."""
  return field in ('embed', 'head')


def _field(path):
  return path[-1].name


def _whole(shape):
  """The index of all of a tensor, as `read` takes it."""
  return tuple(slice(0, n) for n in shape)


def _drop_tied_head(names, stored, read, source):
  """Forgets a stored head that repeats the embedding; raises if it does not."""
  head, embed = names['head'], names['embed']
  if stored.get(head) == stored.get(embed) is not None:
    if not np.array_equal(*(read(name, _whole(stored[name])) for name in (head, embed))):
      raise ValueError(
          f'{source}: {head} differs from {embed}, but the config ties them; set tie_word_embeddings=false.')
    del stored[head]


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


def listed(names, most=8):
  """The first names for an error message."""
  rest = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + rest
