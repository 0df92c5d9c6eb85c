"""Strict mode, and the default model for the tests that need a real one."""

import os
import pathlib

import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')
cache = jax.config.jax_compilation_cache_dir  # scripts/test.sh sets the environment variable behind it
if not cache:
  cache = str(pathlib.Path(__file__).parent.parent / '.pytest_cache' / 'jax')
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
# Processes that share a folder of compiled programs may read what another is still writing, and crash.
cache = os.path.join(cache, os.environ.get('PYTEST_XDIST_WORKER', ''))
jax.config.update('jax_compilation_cache_dir', cache)
os.environ['JAX_COMPILATION_CACHE_DIR'] = cache  # for the programs that tests start


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
