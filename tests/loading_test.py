"""The program of experiments/loading.py: what it writes, what it counts, and what it refuses."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import loading
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from lib import record

from cactus_jax.models import hf
from tests import checkpoints

ROOT = pathlib.Path(__file__).parent.parent
on_linux = pytest.mark.skipif(not loading.STATUS.exists(), reason='memory is read from /proc')


@pytest.fixture
def given():
  """given(*arguments): takes them as the command line."""
  with flagsaver.flagsaver():
    yield lambda *arguments: flags.FLAGS(['loading.py', *arguments])


@on_linux
@pytest.mark.slow
def test_tables_and_rows(tmp_path):
  source = checkpoints.write_gguf(tmp_path / 'tiny.gguf', extra=[
      ('add_tokenizer_model', 'gpt2'), ('add_tokenizer_pre', 'smollm'), ('add_token_list', ['a', 'b', 'ab']),
      ('add_token_merges', ['a b']), ('add_token_types', [1, 1, 1])])
  (tmp_path / 'folder').mkdir()
  command = [sys.executable, ROOT / 'experiments' / 'loading.py', '--gigabytes=0.02', '--repeats=1',
             f'--verifier={source}', f'--folder={tmp_path / "folder"}', f'--output={tmp_path / "rows.jsonl"}']
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
  assert (done.returncode, done.stderr) == (0, '')
  assert not list((tmp_path / 'folder').iterdir())
  rows = record.read_rows(tmp_path / 'rows.jsonl')
  assert [(row['what'], row.get('weights', row.get('loaded_by'))) for row in rows] == [
      ('seconds', 'float32'), ('seconds', 'int8'),
      ('memory', 'one process'), ('memory', 'process 0 of 2'), ('memory', 'process 1 of 2')]
  for row in rows:
    printed = re.search(rf'^  {row.get("weights", row.get("loaded_by"))} +([\d. -]+)$', done.stdout, re.MULTILINE)
    assert len(printed.group(1).split()) == 6
  for row in rows[:2]:
    assert row['imports'] > 0.3 and 0 < row['next_model'] < row['first_model'] and row['first_tokenizer'] > 0
  whole, *halves = rows[2:]
  for row in whole, *halves:
    assert row['peak'] - row['before'] - row['held'] == row['on_top'] < 10e6
  config, files = loading.shapes(0.02)
  size = sum(2 * int(np.prod(shape)) for file in files for shape in file.values())
  assert whole['held'] == size and whole['largest'] == 2 * config['vocab_size'] * config['hidden_size']
  for row in halves:
    assert 0.5 * size < row['held'] < 0.6 * size, 'half, and what is not shared out'
    assert row['largest'] == whole['largest'] / 8


@pytest.mark.parametrize('gigabytes', [0.005, 0.02])
def test_the_checkpoint_is_a_model_of_that_size(given, tmp_path, gigabytes):
  given(f'--folder={tmp_path}')
  with loading.checkpoint(gigabytes) as folder:
    params, config = hf.load(folder, dtype='bfloat16')
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert folder.parent == tmp_path and abs(size - gigabytes * 1e9) < 2e6
    assert config.tie_embeddings and np.ptp(np.asarray(params.layers[-1].qkv, np.float32)) > 1
  assert not list(tmp_path.iterdir())


def test_wide_layers():
  config, files = loading.shapes(2)
  assert config['hidden_size'] == 4096 and config['num_hidden_layers'] == len(files) - 1 == 4


@on_linux
def test_peak_sees_what_comes_and_goes():
  # In a process of its own: what other tests have left behind may be let go of meanwhile, and hide what comes.
  program = """
import time
import numpy as np
import loading
with loading.Peak() as peak:
  memory, start = np.ones(2**23), time.monotonic()
  while peak.most - peak.before < 60e6 and time.monotonic() < start + 10:  # on a busy machine it looks seldom
    time.sleep(0.05)
  del memory
print(peak.most - peak.before, loading.anonymous() - peak.before)
"""
  done = subprocess.run([sys.executable, '-c', program], cwd=ROOT / 'experiments', capture_output=True,
                        text=True, timeout=300, env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert (done.returncode, done.stderr) == (0, '')
  most, left = map(int, done.stdout.split())
  assert 60e6 < most < 80e6 and abs(left) < 10e6


@pytest.mark.parametrize('argument, message', [
    ('--gigabytes=-1', '--gigabytes=-1: need 0 or more.'),
    ('--gigabytes=nan', '--gigabytes=nan: need 0 or more.'),
    ('--repeats=0', '--repeats=0: need at least 1.'),
    ('--draft=none', '--draft means nothing here: models are loaded, and write nothing.'),
    ('--mesh_model=8', '--mesh_model means nothing here'),
])
def test_what_cannot_be_measured_is_refused(given, argument, message):
  given(argument)
  with pytest.raises(ValueError) as error:
    loading.main()
  assert str(error.value).startswith(message)


def test_needs_proc_for_memory(given, monkeypatch, tmp_path):
  monkeypatch.setattr(loading, 'STATUS', tmp_path / 'status')
  given()
  with pytest.raises(ValueError, match='is not there: memory can be measured on Linux only; --gigabytes=0 leaves it'):
    loading.main()
  given('--gigabytes=0')
  loading.check_flags()


def test_needs_room(given, monkeypatch, tmp_path):
  given(f'--folder={tmp_path}')
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(9e9, 7e9, 2e9))
  with pytest.raises(ValueError, match=r'has room for 2.0 GB, and --gigabytes=2 writes 2.0: give less, or another'):
    with loading.checkpoint(2):
      pass
  assert not list(tmp_path.iterdir())
  given(f'--folder={tmp_path}/none')
  with pytest.raises(ValueError, match='/none: no such folder'):
    with loading.checkpoint(2):
      pass


def test_a_process_that_fails_is_said(given, tmp_path):
  given()
  with pytest.raises(ValueError, match='ended with 2: error: .*/none.gguf: no such file or folder'):
    loading.figures_of(*loading.start('float32', tmp_path / 'none.gguf'))
