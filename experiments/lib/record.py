"""Rows on disk: read with line numbers, appended one at a time, resumed after an interruption."""

import json
import os


def read_rows(path, check=None) -> list[dict]:
  """The JSON objects of a JSONL file; blank lines are skipped.

  Args: check, called with each row, may raise ValueError.
  Raises: ValueError naming the file and line.
  """
  return _rows(path, _content(path), check)


def read_finished_rows(path, check=None) -> tuple[list[dict], bool]:
  """As `read_rows`, without a last line that was cut while it was written, and whether there is one."""
  content = _content(path)
  unfinished, _ = _last_line(content)
  return _rows(path, content[: len(content) - unfinished], check), unfinished > 0


def _content(path):
  try:
    with open(path, 'rb') as file:
      return file.read()
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error}') from None


def _rows(path, content, check):
  try:
    text = content.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} cannot be read: {error}') from None
  rows = []
  for number, line in enumerate(text.split('\n'), 1):
    if line.strip():
      try:
        row = _object(line)
        if check:
          check(row)
      except ValueError as error:
        raise ValueError(f'{path}, line {number}: {error}') from None
      rows.append(row)
  return rows


def _object(line):
  try:
    row = json.loads(line)
  except ValueError as error:
    raise ValueError(f'no JSON object ({error}); mend the line, or take it out') from None
  if not isinstance(row, dict):
    raise ValueError(f'need a JSON object, got {type(row).__name__}')
  return row


class Rows:
  """A JSONL file that grows a row at a time; what is in it when it is opened counts as done.

  Nothing is changed before the first row is appended, so a caller may still find that this is not its file.
  """

  def __init__(self, path, check=None):
    """Args: check, as for `read_rows`."""
    self.done, self._unfinished, self._separator = [], 0, b''
    try:
      self._file = open(path, 'ab')
      if os.path.isfile(path):
        content = _content(path)
        self._unfinished, self._separator = _last_line(content)
        self.done = _rows(path, content[: len(content) - self._unfinished], check)
    except OSError as error:
      raise ValueError(f'{path} cannot be written: {error}') from None

  def append(self, row):
    """Writes a row and sees it through to the disk."""
    try:
      if self._unfinished:
        print(f'{self._file.name}: the last line is incomplete and is dropped')
        self._file.truncate(self._file.seek(0, os.SEEK_END) - self._unfinished)
      self._file.write(self._separator + json.dumps(row, ensure_ascii=False).encode() + b'\n')
      self._unfinished, self._separator = 0, b''
      self._file.flush()
      os.fsync(self._file.fileno())
    except OSError as error:
      raise ValueError(f'{self._file.name} cannot be written: {error}; the rows before this one are safe.') from None


def _last_line(content):
  """How a file without a newline at its end goes on: (bytes of an unfinished row, to be cut; what to write first)."""
  last = content.rpartition(b'\n')[2]
  if not last:
    return 0, b''
  try:
    json.loads(last)
  except ValueError:
    return (len(last), b'') if last.startswith(b'{') else (0, b'\n')
  return 0, b'\n'
