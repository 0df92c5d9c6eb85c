"""Programs of experiments/ as two processes of four devices each, as on two hosts of a pod: mostly generate.py.

The devices are pretended by the CPU. Each run is that of a user: the same command on every host, but for its number.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from tests import checkpoints, fakes

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = checkpoints.CONFIG | {'vocab_size': 288, 'eos_token_id': 263, 'num_hidden_layers': 1}
PROMPTS = ['one more', 'in the ', 'abcabcab', '12 times', 'why not?', 'hello yo', 'the end ']
SECONDS = 120  # in which a run, be it the slowest, must have ended


class Job:
  """The same command on two processes; `arguments`, `environments` and `folders` are what each has of its own."""

  def __init__(self, command, arguments=((), ()), environments=({}, {}), folders=(None, None), program='generate.py'):
    address = f'--coordinator=localhost:{free_port()}'
    self.processes = [start([*command, address, '--num_processes=2', f'--process_id={i}', *arguments[i]], 4,
                            environments[i], folders[i], program) for i in range(2)]

  def end(self, seconds=SECONDS):
    """(exit code, standard output, standard error) of each process."""
    return [end(process, seconds) for process in self.processes]


def free_port():
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


def start(arguments, devices, environment=(), folder=None, program='generate.py'):
  environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(devices),
      'XLA_FLAGS': '--xla_backend_optimization_level=0',  # programs are several, and short
      'JAX_COMPILATION_CACHE_DIR': os.path.abspath(jax.config.jax_compilation_cache_dir or ROOT / 'build' / 'jax'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
  } | dict(environment)
  line = [sys.executable, ROOT / 'experiments' / program, *arguments]
  return subprocess.Popen(line, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)


def end(process, seconds=SECONDS):
  try:
    out, err = process.communicate(timeout=seconds)
  except subprocess.TimeoutExpired:
    process.kill()
    raise AssertionError(f'still running after {seconds} s: {process.communicate()}') from None
  return process.returncode, out, err


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """What every host has: models, and a file of prompts."""
  folder = tmp_path_factory.mktemp('pod')
  for name, seed in (('model', 0), ('draft', 1)):
    checkpoints.write_folder(folder / name, CONFIG, checkpoints.tensors(CONFIG, seed))
    fakes.byte_tokenizer().save_pretrained(folder / name)
  (folder / 'prompts.jsonl').write_text(''.join(json.dumps({'prompt': prompt}) + '\n' for prompt in PROMPTS))
  return folder


@pytest.fixture(scope='module')
def command(folder):
  """command(output, *arguments): what answers the prompts in four batches, of which the last is smaller."""
  usual = [f'--verifier={folder}/model', f'--draft={folder}/draft', f'--prompts_file={folder}/prompts.jsonl', '--raw',
           '--rule=cactus', '--delta=1', '--temperature=1', '--num_draft=2', '--max_new_tokens=7', '--batch_size=2',
           '--nocompare_plain']
  return lambda output, *arguments: [*usual, f'--output={output}', *arguments]


MESH = ('--mesh_data=2', '--draft_devices=1', '--heartbeat_timeout=10')


def rows_of(path):
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def same_but_for_rounding(row):
  return {name: value for name, value in row.items() if name != 'logprobs'}


@pytest.fixture(scope='module')
def whole(folder, command):
  """The rows of one process with one device."""
  output = folder / 'whole.jsonl'
  code, out, err = end(start(command(output), 1))
  assert code == 0, err
  rows = rows_of(output)
  assert [row['index'] for row in rows] == list(range(7)) and any(any(row['from_draft']) for row in rows)
  return rows


@pytest.fixture
def hosts(tmp_path):
  """The folders in which two hosts have their files."""
  for name in 'ab':
    (tmp_path / name).mkdir()
  return tmp_path / 'a', tmp_path / 'b'


def finished(job, hosts):
  """Standard output and error of the first process of a job that went well; the other says and writes nothing."""
  (code, out, err), (other_code, other_out, other_err) = job.end()
  assert code == other_code == 0, err + other_err
  assert other_out == '' and 'prompt' not in other_err and 'Note' not in other_err
  assert not list(hosts[1].iterdir())
  return out, err


@pytest.mark.slow
def test_two_processes_answer_as_one(command, whole, hosts):
  out, err = finished(Job(command('out.jsonl', *MESH, '--mesh_model=4'), folders=hosts), hosts)
  assert '8 devices of 2 processes: data=2 x fsdp=1 x model=4, draft on groups of 1\n' in out
  assert '7/7' in err and 'new tokens' in out
  assert 'idle rows' not in err, 'nobody can help that seven prompts are odd'
  rows = rows_of(hosts[0] / 'out.jsonl')
  assert list(map(same_but_for_rounding, rows)) == list(map(same_but_for_rounding, whole))
  for row, reference in zip(rows, whole):
    assert row['logprobs'] == pytest.approx(reference['logprobs'], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('victim, how', [
    (1, signal.SIGKILL),
    (0, signal.SIGKILL),
    (1, signal.SIGTERM),
    (1, signal.SIGSTOP),  # it hangs, its connections open
])
def test_a_job_goes_on_where_a_process_was_lost(command, whole, hosts, victim, how):
  output = hosts[0] / 'out.jsonl'
  job = Job(command('out.jsonl', *MESH), folders=hosts)
  lost, other = job.processes[victim], job.processes[1 - victim]
  deadline = time.monotonic() + SECONDS
  while not (output.exists() and output.read_bytes().count(b'\n') >= 2):
    assert time.monotonic() < deadline and other.poll() is None and lost.poll() is None, job.end(1)
    time.sleep(0.02)
  lost.send_signal(how)
  code, _, err = end(other, 40)
  assert code not in (0, 2), err
  if how == signal.SIGSTOP:
    lost.kill()
  assert end(lost, 5)[0] == (128 + signal.SIGTERM if how == signal.SIGTERM else -signal.SIGKILL)
  content = output.read_bytes()
  done = content.count(b'\n')
  assert 2 <= done < 7, 'it was to be lost on the way'
  output.write_bytes(content + b'{"index": 5, "prom')  # as if its host had gone down too

  out, _ = finished(Job(command('out.jsonl', *MESH), folders=hosts), hosts)
  assert f'{done} of 7 prompts are answered already' in out and 'the last line is incomplete and is dropped' in out
  assert list(map(same_but_for_rounding, rows_of(output))) == list(map(same_but_for_rounding, whole))


# What the user has to mend: one line on each process, and exit code 2, at once.


def refused(job, seconds=60):
  """The one line that both processes say."""
  ends = job.end(seconds)
  for code, out, err in ends:
    assert code == 2 and 'devices' not in out, (code, out, err)
    assert err.startswith('error: ') and err.count('\n') == 1, err
  assert ends[0][2] == ends[1][2]
  return ends[0][2]


def test_other_flags_packages_and_sources_are_named(folder, command, tmp_path):
  stub = tmp_path / 'numpy-9.9.9.dist-info'
  stub.mkdir()
  (stub / 'METADATA').write_text('Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n')
  shutil.copytree(ROOT / 'cactus_jax', tmp_path / 'cactus_jax', ignore=shutil.ignore_patterns('__pycache__'))
  with open(tmp_path / 'cactus_jax' / 'models' / 'layers.py', 'a') as source:
    source.write('# changed\n')
  environments = {}, {'PYTHONPATH': str(tmp_path), 'JAX_ENABLE_X64': '1'}
  line = refused(Job(command(tmp_path / 'out.jsonl'), (['--seed=1'], ['--stop=x']), environments))
  assert 'the processes do not agree: ' in line
  assert '--seed is 1 on process 0, 0 on process 1; ' in line
  assert "--stop is [] on process 0, ['x'] on process 1; " in line
  assert "on process 0, '9.9.9' on process 1; " in line.partition('package numpy is ')[2]
  assert 'the source of cactus_jax is ' in line and 'source of experiments' not in line
  assert 'jax_enable_x64 is False on process 0, True on process 1; ' in line
  assert line.count(' on process 1') == 5
  assert not (tmp_path / 'out.jsonl').exists()


def test_other_numbers_of_devices_are_named(folder, command):
  line = refused(Job(command(folder / 'none.jsonl'), environments=({}, {'JAX_NUM_CPU_DEVICES': '2'})))
  assert 'do not agree: the number of local devices is 4 on process 0, 2 on process 1. Start all with' in line


def test_other_prompts_are_named(command, hosts, tmp_path):
  for host, rows in zip(hosts, ('ab', 'abc')):
    (host / 'prompts.jsonl').write_text(''.join(f'{{"prompt": "{row}"}}\n' for row in rows))
  line = refused(Job(command('out.jsonl', '--prompts_file=prompts.jsonl'), folders=hosts))
  assert 'do not agree: the prompts is ' in line and "'2 (" in line and "'3 (" in line
  assert not list(tmp_path.rglob('out.jsonl'))


def test_what_one_process_cannot_read_or_write_ends_all(command, hosts, tmp_path):
  (hosts[0] / 'prompts.jsonl').write_text('{"prompt": "a"}\n')
  line = refused(Job(command('out.jsonl', '--prompts_file=prompts.jsonl'), folders=hosts))
  assert 'error: on process 1: prompts.jsonl cannot be read: ' in line
  line = refused(Job(command(tmp_path / 'none' / 'out.jsonl')))
  assert 'error: ' + str(tmp_path / 'none' / 'out.jsonl') + ' cannot be written: ' in line


def test_a_mesh_that_does_not_fit(command, tmp_path):
  line = refused(Job(command(tmp_path / 'out.jsonl', '--mesh_data=3', '--mesh_model=2')))
  assert line == ('error: data=3 x fsdp=1 x model=2 is 6, but there are 8 devices: choose sizes whose product is 8.\n')


# One process whose fellows never come.


def test_several_processes_must_be_known(command, tmp_path):
  code, _, err = end(start(command(tmp_path / 'out.jsonl', '--distributed'), 4))
  assert code == 2 and err.startswith('error: this process finds no others (') and err.count('\n') == 1
  assert 'give --coordinator, --num_processes and --process_id.' in err


def test_a_process_that_waits_can_be_ended(command, tmp_path):
  lone = [f'--coordinator=localhost:{free_port()}', '--num_processes=2', '--process_id=0']
  process = start(command(tmp_path / 'out.jsonl', *lone), 4)
  for line in process.stderr:
    assert line == 'Waiting for the other processes ...\n'
    break
  process.terminate()
  assert end(process, 5)[0] == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_process_does_not_wait_for_ever(command, tmp_path):
  lone = [f'--coordinator=localhost:{free_port()}', '--num_processes=2', '--process_id=1', '--start_timeout=2']
  code, _, err = end(start(command(tmp_path / 'out.jsonl', *lone), 4), 30)
  assert code not in (0, 2) and 'DEADLINE_EXCEEDED' in err


def test_refuses_an_address_that_is_none(command, tmp_path):
  lone = ['--coordinator=nonsense', '--num_processes=2', '--process_id=0']
  code, _, err = end(start(command(tmp_path / 'out.jsonl', *lone), 4), 60)
  assert code == 2 and '--coordinator=nonsense: need the address of process 0 as host:port' in err


def test_refuses_draft_devices_before_anything_is_loaded(command, tmp_path):
  code, out, err = end(start(command(tmp_path / 'out.jsonl', '--draft=lookup', '--draft_devices=1'), 4), 60)
  assert code == 2 and '--draft_devices means nothing to --draft=lookup' in err
  assert 'verifier' not in out


@pytest.mark.slow
def test_a_sweep_of_two_processes_is_that_of_one(folder, hosts):
  """And goes on where one was lost; the first process alone has files."""
  (folder / 'spec_bench.jsonl').write_text(''.join(json.dumps({'turns': [prompt]}) + '\n' for prompt in PROMPTS))
  command = [f'--verifier={folder}/model', f'--draft={folder}/draft', f'--data_dir={folder}', '--tasks=spec_bench',
             '--grid=plain; cactus delta=0.5,1', '--num_drafts=2', '--seeds=0,1', '--max_new_tokens=7',
             '--batch_size=2']
  told = lambda path: sorted(
      (row['arm'], row['seed'], row['doc'], row['text'], row['verifier_calls'], row['accepted_at'])
      for row in rows_of(path / 'rows.jsonl'))
  code, _, err = end(start([*command, f'--output={folder}/swept'], 1, program='sweep.py'))
  assert code == 0, err
  whole = told(folder / 'swept')
  assert len(whole) == 3 * 2 * 7

  command += ['--output=swept', *MESH, '--mesh_model=4']
  job = Job(command, folders=hosts, program='sweep.py')
  deadline, rows = time.monotonic() + SECONDS, hosts[0] / 'swept' / 'rows.jsonl'
  while not (rows.exists() and rows.read_bytes().count(b'\n') > 5):
    assert time.monotonic() < deadline and job.processes[0].poll() is None, end(job.processes[0])
    time.sleep(0.05)
  job.processes[1].kill()
  assert [code != 0 for code, _, _ in job.end()] == [True, True]
  some = told(rows.parent)
  assert 5 < len(some) < len(whole)
  (code, out, err), (other_code, other_out, other_err) = Job(command, folders=hosts, program='sweep.py').end()
  assert code == other_code == 0, err + other_err
  assert f'42 answers, of which {len(some)} are there' in out and other_out == '' and '42/42' in err
  assert told(rows.parent) == whole and not list(hosts[1].iterdir())
