"""Strict mode, and the default model for the tests that need a real one."""

import pathlib
import sys

import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')
if not jax.config.jax_compilation_cache_dir:  # scripts/test.sh sets the environment variable behind it
  cache = pathlib.Path(__file__).parent.parent / '.pytest_cache' / 'jax'
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)

MAPS = pathlib.Path('/proc/self/maps')
MANY_MAPS = 20_000


@pytest.fixture(autouse=True)
def few_programs():
  """Lets go of compiled programs before they are too many.

  Each takes some twenty memory maps, of which Linux gives a process 65,530; the next program then crashes it.
  """
  yield
  if MAPS.exists() and MAPS.read_bytes().count(b'\n') > MANY_MAPS:
    jax.clear_caches()


@pytest.fixture(scope='module')
def quick_programs():
  """Programs that are made in half the time and run as slowly as they like."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture
def compiles():
  """The events of compiling so far, a list that grows."""
  events = []

  def listen(event, seconds, **_):
    if event == '/jax/core/compile/backend_compile_duration':
      events.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield events
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def run_program(monkeypatch, capsys):
  """run_program(main, *argv, **options of lib.flags.run): exit code, standard output and standard error."""
  from absl.testing import flagsaver
  from lib import flags as common

  def run(main, *argv, **options):
    monkeypatch.setattr(sys, 'argv', list(argv))
    capsys.readouterr()
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
      common.run(main, **options)
    return end.value.code or 0, *capsys.readouterr()

  return run


@pytest.fixture(scope='session')
def default_model_path():
  """The GGUF file of the default model; skips where it is not installed."""
  from cactus_jax.models import load

  try:
    return load.default_model_path()
  except ValueError as error:
    pytest.skip(str(error))


@pytest.fixture(scope='session')
def default_model(default_model_path):
  """SmolLM2-135M-Instruct in float32, shared by all tests of a process."""
  from cactus_jax.models import load

  return load.load_transformer(default_model_path, dtype='float32')


@pytest.fixture(scope='session')
def default_tokenizer(default_model_path):
  """The tokenizer of the default model."""
  from cactus_jax.models import load

  return load.load_tokenizer(default_model_path)
