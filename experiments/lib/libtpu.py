"""What libtpu has to be told where it compiles and there is no TPU. Nothing here may import jax."""

import os

_SETTINGS = {
    'TPU_SKIP_MDS_QUERY': '1',
    # Of the machine that this is; libtpu complains where it cannot tell. The slice to compile for is named later.
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_LOG_DIR': 'disabled',  # else two files a run in /tmp
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # without a TPU there is nothing to lock
}


def prepare():
  """Sets the environment for compiling, before jax is imported: libtpu need not look for a TPU, nor ask a cloud."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  for name, value in _SETTINGS.items():
    os.environ.setdefault(name, value)
