"""What becomes of memory that XLA's CPU backend frees."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def keep_freed():
  """Has the C library keep freed memory for the next who asks, instead of giving it back to the system.

  A compiled program asks for its temporaries anew in each call. Those of 32 MB and more, as of batches of texts, glibc
  maps and unmaps each time, and the system then clears every page of them: up to two thirds of a step. (Of the
  memory of threads it keeps none so large, so all share the program's own.) Other C libraries have no such setting,
  and are left alone.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is not None:
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_ARENA_MAX, 1)
