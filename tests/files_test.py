"""New files: whole, or not there."""

import os

import pytest

from cactus_jax import files


def test_a_file_and_the_folders_above_it(tmp_path):
  path = tmp_path / 'a' / 'b.txt'
  with files.new_file(path) as file:
    file.write('ä')
    assert not path.exists()
  assert path.read_text(encoding='utf-8') == 'ä' and os.listdir(path.parent) == ['b.txt']
  with files.new_file(path, 'wb') as file:
    file.write(b'new')
  assert path.read_bytes() == b'new'


@pytest.mark.parametrize('error', [OSError('disk full'), KeyboardInterrupt()])
def test_what_fails_leaves_what_was_there(tmp_path, error):
  path = tmp_path / 'b.txt'
  path.write_text('old')
  with pytest.raises(type(error)), files.new_file(path) as file:
    file.write('new')
    raise error
  assert path.read_text() == 'old' and os.listdir(tmp_path) == ['b.txt']


def test_nowhere_to_write(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError), files.new_file(tmp_path / 'file' / 'b.txt'):
    pytest.fail('must not be entered')
