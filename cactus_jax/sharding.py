"""Where arrays live: the mesh, and the one table from logical axes to its axes.

A program is written for whole arrays. `jax.jit` splits it over the devices of a mesh by the shardings of what goes in
and by the constraints a model puts on what it makes. Mesh axes: `data` splits rows, `model` heads, mlp, and vocabulary,
`fsdp` rows too, and of the weights the axis that `model` leaves whole.
"""

import functools
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Logical axis -> mesh axes. What is not here is never split. Of several mesh axes as many are used, from the left, as
# divide the size; if the first does not, the axis is whole on every device.
AXES = {
    'batch': ('data', 'fsdp', 'replica'),
    'vocab': ('model',),
    'heads': ('model',),
    'mlp': ('model',),
    'embed': ('fsdp',),  # of weights; activations are whole
}


def make_mesh(data=1, model=1, fsdp=1, devices=None) -> Mesh:
  """The mesh of all devices (or those given), in an order in which neighbours on `model` are close.

  Axes are Auto: XLA chooses the shardings between those declared. Raises ValueError unless data * fsdp * model is the
  number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  if not devices:
    raise ValueError('devices is empty: need at least one.')
  for name, size in (('data', data), ('fsdp', fsdp), ('model', model)):
    if type(size) is not int or size < 1:
      raise ValueError(f'{name}={size!r}: need a whole number of at least 1.')
  if data * fsdp * model != len(devices):
    raise ValueError(f'data={data} x fsdp={fsdp} x model={model} is {data * fsdp * model}, but there are '
                     f'{len(devices)} devices: choose sizes whose product is {len(devices)}.')
  return jax.make_mesh((data, fsdp, model), ('data', 'fsdp', 'model'), axis_types=(AxisType.Auto,) * 3, devices=devices)


def check_mesh(mesh):
  """Raises ValueError for what is no mesh with the axes of `make_mesh`."""
  if not isinstance(mesh, Mesh) or not {'data', 'fsdp', 'model'} <= set(mesh.axis_names):
    raise ValueError(f'mesh={mesh!r:.60}: need a mesh, as from make_mesh(data=1, model=4).')


def narrow(mesh, model) -> Mesh:
  """The same devices, in the same order, with fewer of them sharing a model: `model` of them, and copies of it.

  For a draft too small for all devices: each group of `model` neighbours drafts for a share of the rows, or, where the
  rows do not share out, each for all of them, and all come to the same.
  """
  check_mesh(mesh)
  width = mesh.shape['model']
  if type(model) is not int or model < 1 or width % model:
    raise ValueError(f'model={model!r}: the draft can share the {width} devices of the model axis in groups of '
                     f'{", ".join(str(n) for n in range(1, width + 1) if width % n == 0)}.')
  devices = mesh.devices.reshape(*mesh.devices.shape[:-1], width // model, model)
  return Mesh(devices, (*mesh.axis_names[:-1], 'replica', 'model'), axis_types=(AxisType.Auto,) * (len(mesh.shape) + 1))


def sharding_of(mesh, axes, shape) -> NamedSharding:
  """The sharding of an array with these logical axes."""
  spec = []
  for axis, size in zip(axes, shape, strict=True):
    names, ways = (), 1
    for name in AXES.get(axis, ()):
      ways *= mesh.shape.get(name, 1)
      if size % ways:
        break
      names += (name,) if mesh.shape.get(name, 1) > 1 else ()
    spec.append(names or None)
  return NamedSharding(mesh, PartitionSpec(*spec))


def tree_of(mesh, specs):
  """The shardings of a tree of things with `shape` and `axes`."""
  return jax.tree.map(lambda spec: sharding_of(mesh, spec.axes, spec.shape), specs)


def constrain(x, mesh, *axes):
  """x, split as its logical axes say; without a mesh, x."""
  return x if mesh is None else jax.lax.with_sharding_constraint(x, sharding_of(mesh, axes, x.shape))


def rows(mesh) -> NamedSharding:
  """The sharding of arrays whose first axis counts rows and whose others are whole."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def row_groups(mesh) -> int:
  """How many groups of devices have rows of their own; a batch must be a multiple of it. 1 without a mesh."""
  return 1 if mesh is None else mesh.shape['data'] * mesh.shape['fsdp']


def batch_per_device(mesh, batch) -> int:
  """Of the rows of a batch, how many a device computes."""
  return batch if mesh is None else sharding_of(mesh, ('batch',), (batch,)).shard_shape((batch,))[0]


def place(tree, sharding):
  """Arrays, keys too, that every process knows, as arrays of the whole mesh. What is there already stays."""

  def put(x):
    if isinstance(x, jax.Array) and x.sharding == sharding:
      return x
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(put(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return from_host(np.asarray(x), sharding)

  return jax.tree.map(put, tree)


def from_host(array, sharding) -> jax.Array:
  """A numpy array that every process has, as one of the mesh; each device is given its part, and nothing is exchanged.

  (`jax.device_put` would gather the array from all processes, to see that it is the same.)
  """
  return from_parts(array.shape, sharding, lambda index: array[index])


def from_parts(shape, sharding, part) -> jax.Array:
  """An array of the mesh from part(index), a numpy array for a slice of each axis.

  Each part that this process has devices for is asked for once, and let go before the next.
  """
  devices = {}
  for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
    devices.setdefault(tuple(s.indices(size)[:2] for s, size in zip(index, shape)), []).append(device)
  arrays = []
  for bounds, holders in devices.items():
    array = part(tuple(slice(*pair) for pair in bounds))
    arrays += jax.block_until_ready([jax.device_put(array, device) for device in holders])
    del array
  return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)


def fetch(tree):
  """The tree on the host, as numpy arrays. Every process must ask, and each gets the same."""

  def whole(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
      return _gather(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return x

  return jax.device_get(jax.tree.map(whole, tree))


@functools.cache
def _gather(everywhere):
  return jax.jit(lambda x: x, out_shardings=everywhere)


def by_row(x, mesh):
  """x [B, ...] in whole rows, shared out over as many devices as divide B: for logits.

  What follows sees the vocabulary as a whole (sorts, sums, draws). Here it is a device's own affair; on rows that are
  split, each such operation would be an exchange between devices.
  """
  if mesh is None:
    return x
  groups = math.gcd(x.shape[0], mesh.size)
  rows = Mesh(mesh.devices.reshape(groups, -1), ('row', 'rest'), axis_types=(AxisType.Auto,) * 2)
  return jax.lax.with_sharding_constraint(x, NamedSharding(rows, PartitionSpec('row')))
