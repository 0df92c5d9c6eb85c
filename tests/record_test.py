"""Rows on disk: what cannot be read is said with its line, and what was interrupted goes on."""

import json

import pytest
from lib import record


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'rows.jsonl')


def write(path, content):
  with open(path, 'wb') as file:
    file.write(content if isinstance(content, bytes) else content.encode())
  return path


def read(path):
  with open(path, 'rb') as file:
    return file.read()


def test_rows_are_read_in_order_and_blank_lines_skipped(path):
  write(path, '{"a": 1}\n\n  \n{"a": "日本 👩‍🚀\\n\\u2028"}\r\n{"a": "\u2028\u0085"}')
  assert record.read_rows(path) == [{'a': 1}, {'a': '日本 👩‍🚀\n\u2028'}, {'a': '\u2028\u0085'}]
  assert record.read_rows(write(path, '')) == []


@pytest.mark.parametrize(
  'line, reason',
  [
    ('{"a": 1', 'line 3: no JSON object (Expecting'),
    ('nonsense', 'line 3: no JSON object (Expecting value'),
    ('[1, 2]', 'line 3: need a JSON object, got list'),
    ('"text"', 'line 3: need a JSON object, got str'),
    ('null', 'line 3: need a JSON object, got NoneType'),
    ('{"a": 1} {"a": 2}', 'line 3: no JSON object (Extra data'),
    ('{"bad": 1}', 'line 3: no good'),
  ],
)
def test_a_bad_line_is_named(path, line, reason):
  def check(row):
    if 'bad' in row:
      raise ValueError('no good')

  write(path, f'{{"a": 1}}\n\n{line}\n{{"a": 2}}\n')
  with pytest.raises(ValueError) as error:
    record.read_rows(path, check=check)
  assert str(error.value).startswith(f'{path}, {reason}')
  assert error.value.__suppress_context__, 'one message, not a chain of them'


def test_what_cannot_be_read_is_named(path, tmp_path):
  for bad in (path, str(tmp_path), write(str(tmp_path / 'latin1'), b'{"a": "\xe9"}\n')):
    with pytest.raises(ValueError, match='cannot be read: ') as error:
      record.read_rows(bad)
    assert str(error.value).startswith(bad)


def test_rows_are_appended_and_found_again(path):
  rows = record.Rows(path)
  assert rows.done == []
  rows.append({'index': 0, 'text': '日本 👩‍🚀\n'})
  assert record.read_rows(path) == [{'index': 0, 'text': '日本 👩‍🚀\n'}], 'on disk at once'
  assert '日本'.encode() in read(path) and read(path).count(b'\n') == 1
  rows.append({'index': 1})
  again = record.Rows(path)
  assert again.done == [{'index': 0, 'text': '日本 👩‍🚀\n'}, {'index': 1}]
  again.append({'index': 2})
  assert [row['index'] for row in record.Rows(path).done] == [0, 1, 2]


def test_a_last_row_cut_at_any_byte_is_repaired(path, capsys):
  whole = json.dumps({'index': 0}) + '\n'
  last = json.dumps({'index': 1, 'text': '日本 👩‍🚀'}, ensure_ascii=False).encode()
  for cut in range(len(last) + 1):
    write(path, whole.encode() + last[:cut])
    rows = record.Rows(path)
    complete = [{'index': 0}] + ([json.loads(last)] if cut == len(last) else [])
    assert rows.done == complete
    assert read(path) == whole.encode() + last[:cut], 'nothing is changed before a row is appended'
    rows.append({'index': 2})
    said = capsys.readouterr().out
    assert (f'{path}: the last line is incomplete and is dropped' in said) == (0 < cut < len(last))
    assert record.read_rows(path) == complete + [{'index': 2}]


@pytest.mark.parametrize(
  'content', ['some notes', '# Title\n\nno newline at the end', '{"a": 1}\n[1]', '{\n  "a": 1\n}']
)
def test_a_file_that_holds_no_rows_is_left_as_it_is(path, content):
  write(path, content)
  with pytest.raises(ValueError, match='line '):
    record.Rows(path)
  assert read(path) == content.encode()


def test_where_nothing_can_be_written_is_said(tmp_path):
  for bad in (str(tmp_path / 'no' / 'rows.jsonl'), str(tmp_path)):
    with pytest.raises(ValueError, match='cannot be written: ') as error:
      record.Rows(bad)
    assert str(error.value).startswith(bad)


def test_what_may_not_be_touched_is_said(path, monkeypatch):
  write(path, '{"a": 1}\n{"b')

  def refusing(name, mode='r', **options):
    if mode == forbidden:
      raise PermissionError(13, 'Permission denied', name)
    return open(name, mode, **options)

  monkeypatch.setattr(record, 'open', refusing, raising=False)
  for forbidden in ('ab', 'rb'):
    with pytest.raises(ValueError, match='cannot be .*: .*Permission denied'):
      record.Rows(path)
