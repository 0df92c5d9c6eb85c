"""Freed memory is kept, told by the pages that the system has to clear for the next call."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = """
import resource
import sys
from lib import malloc
if sys.argv[1] == 'keep':
  malloc.keep_freed()
import jax, jax.numpy as jnp
total = jax.jit(lambda x: jnp.sort(x + 1).sum())
x = jnp.ones(10_000_000)
total(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
  total(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the setting is of glibc')
def test_freed_memory_is_kept():
  faults = {how: int(subprocess.run([sys.executable, '-c', PROGRAM, how], cwd=ROOT / 'experiments', check=True,
                                    capture_output=True, text=True,
                                    env=os.environ | {'JAX_PLATFORMS': 'cpu'}).stdout) for how in ('leave', 'keep')}
  assert faults['keep'] < 0.5 * faults['leave'], faults
