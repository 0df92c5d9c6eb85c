"""Rows on disk: read with line numbers, appended one at a time, resumed after an interruption."""

import json
import os


def read_rows(path, check=None) -> list[dict]:
  """The JSON objects of a JSONL file; blank lines are skipped.

  Args: check, called with each row, may raise ValueError.
  Raises: ValueError naming the file and line.
  """
  rows = []
  try:
    with open(path, encoding='utf-8') as lines:
      for number, line in enumerate(lines, 1):
        if line.strip():
          try:
            row = json.loads(line)
            if not isinstance(row, dict):
              raise ValueError(f'need a JSON object, got {type(row).__name__}')
            if check:
              check(row)
          except ValueError as error:
            raise ValueError(f'{path}, line {number}: {error}') from None
          rows.append(row)
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from None
  return rows


class Rows:
  """A JSONL file that grows a row at a time; what is in it when it is opened counts as done."""

  def __init__(self, path):
    self.done = []
    try:
      self._file = open(path, 'a', encoding='utf-8')
      if os.path.isfile(path):
        _end_last_line(path)
        self.done = read_rows(path)
    except OSError as error:
      raise ValueError(f'{path} cannot be written: {error}') from None

  def append(self, row):
    """Writes a row and sees it through to the disk."""
    self._file.write(json.dumps(row, ensure_ascii=False) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())


def _end_last_line(path):
  """Cuts a last row that was never finished, to be computed again; what does not begin as a row is left."""
  with open(path, 'rb+') as file:
    last = file.read().rpartition(b'\n')[2]
    if not last.startswith(b'{'):
      return
    try:
      json.loads(last)
      file.write(b'\n')
    except ValueError:
      print(f'{path}: the last line is incomplete and is dropped')
      file.truncate(file.tell() - len(last))
