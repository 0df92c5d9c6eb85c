"""Files that are there as a whole or not at all."""

import contextlib
import os
import pathlib
import secrets


@contextlib.contextmanager
def new_file(path, mode='w'):
  """A file to write, which takes the place of what is at `path` when all is on disk; if writing fails, that stays.

  A kill leaves what was written so far beside it, as .NAME.partial-...
  mode: 'w' for text, 'wb' for bytes. Folders above are made. Raises OSError where nothing can be written.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'.{path.name}.partial-{secrets.token_hex(4)}')
  try:
    with open(partial, mode, encoding=None if 'b' in mode else 'utf-8') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
