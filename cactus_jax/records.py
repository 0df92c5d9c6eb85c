"""Records of numbers, as sampling parameters and rules are: pytrees whose numbers are checked, and given to rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


def record_class(cls):
  """Makes a class a frozen dataclass and a pytree: its fields are leaves, or subtrees, unless they are `static`.

  For classes that stand in for one another, as rules do. Not flax.struct.dataclass: jaxlib (0.10 to 0.12) holds the
  tree structures of two such classes with the same fields for equal, so jit now and then takes the program of one for
  the other's.
  """
  check = getattr(cls, '__post_init__', lambda self: None)

  def check_all(self):
    for field in dataclasses.fields(cls):
      value = getattr(self, field.name)
      if isinstance(field.default, bool) and not isinstance(value, bool):
        raise ValueError(f'{field.name}={value!r}: need True or False.')
    check(self)

  cls.__post_init__ = check_all
  cls = dataclasses.dataclass(frozen=True)(cls)
  is_static = lambda field: field.metadata.get('static', False)
  leaves = [field.name for field in dataclasses.fields(cls) if not is_static(field)]
  statics = [field.name for field in dataclasses.fields(cls) if is_static(field)]

  def flatten_with_keys(rule):
    keyed = [(jax.tree_util.GetAttrKey(name), getattr(rule, name)) for name in leaves]
    return keyed, tuple(getattr(rule, name) for name in statics)

  def unflatten(static_values, values):
    rule = object.__new__(cls)  # what is rebuilt was checked when it was made
    for name, value in (*zip(leaves, values), *zip(statics, static_values)):
      object.__setattr__(rule, name, value)
    return rule

  jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
  return cls


def static(default):
  """A field that is no number: another value of it is another program."""
  return dataclasses.field(default=default, metadata={'static': True})


def _as_numbers(value):
  """f64 array of what is a real number or several; None for anything else."""
  try:
    numbers = np.asarray(value)
    real = jnp.issubdtype(numbers.dtype, jnp.floating) or jnp.issubdtype(numbers.dtype, jnp.integer)
    return numbers.astype(np.float64) if real else None
  except (TypeError, ValueError):
    return None


def check_number(name, value, valid, need):
  """Raises ValueError unless `value` is a number, or numbers, each of them valid. A tracer passes: it has no value."""
  if isinstance(value, jax.core.Tracer):
    return
  numbers = _as_numbers(value)
  if numbers is None:
    raise ValueError(f'{name}={value!r:.80}: need {need}.')
  if not np.all(valid(numbers)):
    raise ValueError(f'{name}={value}: need {need}.')


def per_row(record, batch, slots=None):
  """The record with every leaf f32[batch], strongly typed: a new value then never means a new program.

  With slots given, a leaf may also have a value for each of so many drafted positions, [batch, slots] or [1, slots];
  it stays so, f32[batch, slots]. Raises ValueError for a leaf of any other shape.
  """

  def broadcast(leaf):
    if not isinstance(leaf, jax.Array) and _as_numbers(leaf) is None:
      raise ValueError(f'{type(record).__name__} holds {leaf!r:.80}: need a number.')
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    by_slot = slots is not None and array.shape in ((1, slots), (batch, slots))
    if array.shape not in ((), (batch,)) and not by_slot:
      each = '' if slots is None else f', or one for each of the {slots} drafted positions of each row'
      raise ValueError(f'{type(record).__name__} holds a value of shape {array.shape}: need one number, or one for '
                       f'each of the {batch} rows{each}.')
    return jnp.broadcast_to(jnp.asarray(array, jnp.float32), (batch, slots) if by_slot else (batch,))

  return jax.tree.map(broadcast, record, is_leaf=lambda leaf: isinstance(leaf, (list, tuple)))


def per_slot(record, slots):
  """A record with leaves [B] as one with leaves [B, slots]; what has that shape stays as it is."""
  spread = lambda leaf: leaf if leaf.ndim == 2 else jnp.broadcast_to(leaf[:, None], (leaf.shape[0], slots))
  return jax.tree.map(spread, record)


def differences(theirs, ours) -> list[str]:
  """What of our settings is not the same in theirs, in words."""
  return [f'{name} is {theirs.get(name)!r} there and {value!r} here' for name, value in ours.items()
          if theirs.get(name) != value]
