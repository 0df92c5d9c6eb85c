"""Answers to the questions of many tasks, by many rules, for many seeds: what tables and figures are made from.

  python experiments/sweep.py --output=runs/first --tasks=ifeval --data_dir=data --max_questions=20 \\
      --max_new_tokens=128 --grid='plain; exact; cactus delta=0.25,1' --num_drafts=3,5
  python scripts/make_tables.py runs/first

--grid names arms: "plain", the verifier alone, or a rule with its numbers, of which each may have several values (one
arm each). All flags may stand in a file, one a line: --flagfile=FILE. Tasks are lm-eval's, or spec_bench, which has no
score. Requests are batched continuously: a row whose answer is finished is given the next question.

Every answer is a line of OUTPUT/rows.jsonl as soon as it is finished; the same command goes on where it stopped,
and one with more arms, numbers, seeds or tasks adds to what is there. OUTPUT/run.json has what all rows share, and
each start that answered something with its date, source and machine; rows of other settings are refused.

Meshes and pods are used as by generate.py, with the same flags.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import pathlib
import subprocess
import time
import warnings

import jax
from absl import flags
from lib import answers, pod, record, tasks
from lib import flags as common
from tqdm.auto import tqdm

import cactus_jax as cj
from cactus_jax import files, records

_OUTPUT = flags.DEFINE_string('output', None, 'Folder for rows.jsonl and run.json.', allow_override=True)
_TASKS = flags.DEFINE_list('tasks', ['ifeval'], 'Tasks of lm-eval, or spec_bench.', allow_override=True)
_DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with the data of the tasks; by default the hub.',
                                allow_override=True)
_GRID = flags.DEFINE_string('grid', 'plain; exact; cactus delta=1', 'Arms: rules with values of their numbers.')
_NUM_DRAFTS = flags.DEFINE_list('num_drafts', ['10'], 'Numbers of tokens drafted a round.')
_SEEDS = flags.DEFINE_list('seeds', ['0'], 'Seeds.')
_LIMIT = flags.DEFINE_integer('max_questions', None, 'Questions of each task, the first ones; by default all.', 1,
                              allow_override=True)
_FEWSHOT = flags.DEFINE_integer('num_fewshot', None, 'Examples before each question; by default as the task says. A '
                                'task that says 0 keeps to that.', 0, allow_override=True)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Questions answered together.', 1, allow_override=True)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A rule as it is compared; plain decoding has none, and no draft."""

  name: str
  rule: cj.VerificationRule | cj.Budget | None
  num_draft: int


def arms(rules, num_drafts) -> list[Arm]:
  """The arms of --grid, each with every number of drafted tokens. Raises ValueError for what names none."""
  found = []
  for item in filter(None, (item.strip() for item in rules.split(';'))):
    name, *pairs = item.split()
    if name == 'plain' and not pairs:
      found.append(Arm('plain', None, 0))
      continue
    if name not in common.RULES:
      raise ValueError(f'--grid: {name!r} is no rule; there are plain, {", ".join(sorted(common.RULES))}.')
    values = {}
    for pair in pairs:
      field, equals, listed = pair.partition('=')
      if not equals or not all(listed.split(',')) or field in values:
        raise ValueError(f'--grid: {pair!r} in {item!r}: numbers are written name=value, or name=value,value.')
      values[field] = [_value(value) for value in listed.split(',')]
    for chosen in itertools.product(*values.values()):
      pairs = [f'{field}={value:g}' if isinstance(value, float) else f'{field}={value}'
               for field, value in zip(values, chosen)]
      rule = _rule(item, name, dict(zip(values, chosen)))
      found += [Arm(' '.join([name, *pairs]), rule, num) for num in num_drafts]
  if not found:
    raise ValueError(f'--grid={rules!r}: need at least one rule.')
  if len({(arm.name, arm.num_draft) for arm in found}) < len(found):
    raise ValueError(f'--grid={rules!r}: an arm is named twice.')
  return found


def _rule(item, name, values):
  cls = common.RULES[name]
  own = {field.name: field for field in dataclasses.fields(cls)}
  for field in values:
    if field not in own:
      raise ValueError(f'--grid: {item!r}: {name} has no {field!r}' + (f', but {", ".join(own)}.' if own else '.'))
  missing = [field.name for field in own.values()
             if field.default is dataclasses.MISSING and field.name not in values]
  if missing:
    raise ValueError(f'--grid: {item!r} needs {", ".join(missing)}.')
  try:
    return cls(**values)
  except ValueError as error:
    raise ValueError(f'--grid: {item!r}: {error}') from None


def _value(text):
  """A number, a truth value, or a name."""
  if text in ('True', 'False'):
    return text == 'True'
  try:
    return float(text)
  except ValueError:
    return text


def whole_numbers(flag, texts, least) -> list[int]:
  """Different whole numbers of at least `least`."""
  found = []
  for text in texts:
    if not text.strip().isdigit() or int(text) < least or int(text) in found:
      raise ValueError(f'--{flag}={",".join(texts)}: need different whole numbers of at least {least}.')
    found.append(int(text))
  if not found:
    raise ValueError(f'--{flag} is empty: need at least one whole number.')
  return found


class Folder:
  """Where the rows of a sweep are, for one process at a time."""

  def __init__(self, path, settings, start):
    """Args: settings, what all rows must share; start, what is noted of this start."""
    path = pathlib.Path(path)
    try:
      path.mkdir(parents=True, exist_ok=True)
      self._lock = open(path / '.lock', 'w')
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f'{path} is being written by another run: wait for it, or choose another --output.') from None
    except OSError as error:
      raise ValueError(f'{path} cannot be written: {error}') from None
    held, rows = _read_run(path / 'run.json'), path / 'rows.jsonl'
    is_empty = not rows.exists() or not rows.stat().st_size
    if held is None and not is_empty:
      raise ValueError(f'{path} holds rows without run.json: choose another --output.')
    if is_empty:  # what a start that answered nothing wanted binds nobody
      held = {'settings': settings, 'starts': []}
    ours, theirs = settings | {'tasks': {}}, held['settings']
    other = records.differences(theirs | {'tasks': {}}, ours)
    shared = theirs['tasks'].keys() & settings['tasks'].keys()
    other += [f'{task}: {text}' for task in sorted(shared)
              for text in records.differences(theirs['tasks'][task], settings['tasks'][task])]
    if other:
      raise ValueError(f'{path} holds answers of other settings ({"; ".join(other)}): choose another --output.')
    self._path, self._start = path / 'run.json', start
    self._held = held | {'settings': theirs | {'tasks': theirs['tasks'] | settings['tasks']}}
    self._rows = record.Rows(rows, check=answers.check_answer)
    self.done = {}  # (task, arm, number of drafted tokens, seed) -> [(question, digest of its prompt)], those answered
    for row in self._rows.done:
      cell = self.done.setdefault((row['task'], row['arm'], row['num_draft'], row['seed']), [])
      cell.append((row['doc'], row.get('prompt')))
    self._describe()

  def _describe(self):
    try:
      with files.new_file(self._path) as file:
        json.dump(self._held, file, indent=1)
    except OSError as error:
      raise ValueError(f'{self._path} cannot be written: {error}') from None

  def close(self):
    """Lets another run write here."""
    self._lock.close()

  def append(self, row):
    """Writes a row and sees it through to the disk. Raises ValueError for one that no table could be made of."""
    answers.check_answer(row)
    if self._start:  # one that answers nothing has no part in what is here
      self._held['starts'] = [*self._held['starts'], self._start]
      self._describe()
      self._start = None
    self._rows.append(row)


def _read_run(path):
  if not path.exists():
    return None
  try:
    held = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(held['settings']['tasks'], dict) or not isinstance(held['starts'], list):
      raise ValueError('settings or starts are missing')
    return held
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is no run.json of a sweep ({error}): choose another --output.') from None


def settings_of(loaded) -> dict:
  """What determines an answer, its score and its time, beside the arm, the seed and the question."""
  held = {name: value for name, value in common.settings().items() if name not in ('rule', 'num_draft', 'seed', 'stop')}
  devices = f'{jax.device_count()} of {jax.devices()[0].device_kind}'
  return held | {'batch_size': _BATCH_SIZE.value, 'devices': devices,
                 'tasks': {task.name: {'metric': task.metric} for task in loaded}}


def start_of() -> dict:
  """What is noted of each start: when, by which source and flags, on what."""
  try:
    source = subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=pathlib.Path(__file__).parent, check=True,
                            capture_output=True, text=True).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    source = None  # a copy without its history
  return {'date': time.strftime('%Y-%m-%d %H:%M:%S'), 'git': source, 'device': common.machine(),
          'versions': pod.installation(), 'flags': common.given()}


def row_of(task, question, arm, seed, done) -> dict:
  """What is stored of an answer."""
  stats, spent, text = done.stats, done.stats.spent, done.texts[0]
  metrics = task.score(question.doc, text)
  return {
      'task': task.name,
      'doc': question.doc,
      'prompt': pod.digest(question.prompt),
      'arm': arm.name,
      'num_draft': arm.num_draft,
      'seed': seed,
      'score': metrics.get(task.metric),
      'metrics': metrics,
      'finish_reason': done.finish_reasons[0],
      'new_tokens': stats.new_tokens,
      'decoded': stats.decoded,
      'verifier_calls': stats.verifier_calls,
      'accepted_at': [*stats.accepted_at],
      'tested_at': [*stats.tested_at],
      'kl': spent and spent.kl,
      'decided': spent and spent.decided,
      'max_kl': spent and spent.max_kl,
      'seconds': round(stats.seconds.first_token + stats.seconds.decode, 4),
      'text': text,
  }


class Cell:
  """The questions of one task that one arm answers for one seed."""

  def __init__(self, task, arm, seed, done):
    """Args: done, [(question, digest of its prompt)] of those answered. Raises ValueError if they were others."""
    self.task, self.arm, self.seed = task, arm, seed
    done = dict(done)
    for question in task.questions:
      if done.get(question.doc, digest := pod.digest(question.prompt)) != digest:
        raise ValueError(f'{_OUTPUT.value} holds an answer to question {question.doc} of {task.name} with another '
                         'prompt: other data, or other examples. Choose another --output.')
    self.todo = [question for question in task.questions if question.doc not in done]

  def __str__(self):
    drafted = f', K = {self.arm.num_draft}' if self.arm.num_draft else ''
    return f'{self.task.name}, {self.arm.name}{drafted}, seed {self.seed}'

  def answers(self, options, progress):
    """(question, its answer), in the order in which they are finished."""
    by_stop = {}
    for question in self.todo:
      by_stop.setdefault(question.stop, []).append(question)
    for stop, questions in by_stop.items():
      for i, done in begin(self.arm, questions, options, stop=stop, seed=self.seed, progress=progress):
        yield questions[i], done


def begin(arm, questions, options, **more):
  """`generate_each` of an arm. What it cannot do raises ValueError here, before anything is compiled."""
  how = dict(rule=arm.rule, num_draft=arm.num_draft)
  if arm.rule is None:
    how = dict(draft=None, draft_tokenizer=None, num_draft=1, stop_entropy=None, block_verification=False)
  return cj.generate_each([question.prompt for question in questions], raw=True, **options | how | more)


def check(loaded, grid, options):
  """Raises ValueError for an arm that cannot be decoded, or a question that leaves no room for an answer."""
  tokenizer = options['tokenizer']
  context = min(model.config.max_length for model in (options['target'], options['draft']) if hasattr(model, 'config'))
  for task in loaded:
    for question in task.questions:
      if (length := len(tokenizer(question.prompt)['input_ids'])) >= context:
        raise ValueError(f'question {question.doc} of {task.name} has {length} tokens, the model a context of '
                         f'{context}, of which at least one must be left for the answer; ask with fewer examples '
                         '(--num_fewshot).')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # they are said when the arm's turn comes
    for arm in grid:
      try:
        begin(arm, loaded[0].questions[:1], options)
      except ValueError as error:
        raise ValueError(f'arm {arm.name}: {error}') from None


def run(cells, options, folder, bar) -> str:
  """Answers what the cells have to do, each answer stored as it is finished; what that took, in words."""
  decoding = compiling = 0.0
  start = time.perf_counter()
  for cell in filter(lambda cell: cell.todo, cells):
    tokens, seconds = 0, 0.0
    bar.set_postfix_str(f'{cell}: starting')

    def show(new_tokens, cell=cell):
      common.stop_if_interrupted()
      bar.set_postfix_str(f'{cell}: {new_tokens} tokens' + (f', {tokens / seconds:.0f} a second' if seconds else ''))

    for question, done in cell.answers(options, show):
      pod.on_first(lambda: folder.append(row_of(cell.task, question, cell.arm, cell.seed, done)))
      times = done.stats.seconds
      tokens, seconds = tokens + done.stats.new_tokens, seconds + times.first_token + times.decode
      compiling += times.compile
      bar.update()
    decoding += seconds
  total = time.perf_counter() - start
  rest = max(total - decoding - compiling, 0.0)
  return (f'{total:.0f} s: {decoding:.0f} of decoding, {compiling:.0f} of compiling, {rest:.1f} of everything else '
          f'({100 * rest / max(total - compiling, 1e-9):.1f} % of what is not compiling)')


def read_grid() -> tuple[list[Arm], list[int]]:
  """Arms and seeds of the flags."""
  common.refuse(['rule', 'static', 'num_draft', 'seed', *common.RULE_FIELDS], 'arms are named by --grid, --num_drafts '
                'and --seeds')
  common.refuse(['stop'], 'tasks have their own stop strings')
  grid = arms(_GRID.value, whole_numbers('num_drafts', _NUM_DRAFTS.value, 1))
  if common.draft_name() == 'none' and any(arm.rule for arm in grid):
    raise ValueError('--draft=none: only the arm plain needs no draft.')
  return grid, whole_numbers('seeds', _SEEDS.value, 0)


def open_folder(settings, held) -> tuple[Folder | None, dict]:
  """The folder, on the first process, which `held` lets go of in the end; and what it has answered, on all."""
  folder = None

  def open_it():
    nonlocal folder
    folder = held.enter_context(contextlib.closing(Folder(_OUTPUT.value, settings, start_of())))
    return [[*cell, answered] for cell, answered in folder.done.items()]

  done = {tuple(cell): answered for *cell, answered in pod.on_first(open_it)}
  return folder, done


def decode_options(tokenizer) -> dict:
  """What `generate_each` is given of the flags by all arms."""
  mesh = common.mesh()
  draft_mesh = common.draft_mesh(mesh)
  target = pod.together(lambda: common.verifier(mesh))
  draft, draft_tokenizer = pod.together(lambda: common.draft(target, draft_mesh, tokenizer))
  names = ('max_new_tokens', 'ledger', 'block_verification', 'stop_entropy')
  return {name: value for name, value in common.text_options().items() if name in names} | dict(
      target=target, draft=draft, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer, sampling=common.sampling(),
      batch_size=_BATCH_SIZE.value)


def main():
  """Answers what the grid of the flags asks for and OUTPUT has not."""
  if not _OUTPUT.value:
    raise ValueError('--output is missing: name a folder for rows.jsonl.')
  (grid, seeds), _ = read_grid(), common.sampling()
  tokenizer = pod.together(lambda: cj.load_tokenizer(common.verifier_source()))
  loaded = pod.together(lambda: tasks.load(
      _TASKS.value, data_dir=_DATA_DIR.value, tokenizer=tokenizer, num_fewshot=_FEWSHOT.value, limit=_LIMIT.value,
      raw=common.text_options()['raw']))
  pod.check_agreement({'the questions': pod.digest([q.prompt for task in loaded for q in task.questions])})
  with contextlib.ExitStack() as held:
    folder, done = open_folder(settings_of(loaded), held)
    cells = [Cell(task, arm, seed, done.get((task.name, arm.name, arm.num_draft, seed), ()))
             for seed in seeds for task in loaded for arm in grid]
    total, left = sum(len(cell.task.questions) for cell in cells), sum(len(cell.todo) for cell in cells)
    print(f'{total} answers, of which {total - left} are there; {len(grid)} arms; {common.describe_verifier()}; draft '
          f'{common.draft_name()}', flush=True)
    if left:
      options = decode_options(tokenizer)
      pod.together(lambda: check(loaded, grid, options))
      with tqdm(total=total, initial=total - left, unit='answer', disable=not pod.is_first()) as bar:
        try:
          said = run(cells, options, folder, bar)
        except KeyboardInterrupt:
          bar.close()
          print(f'\n{bar.n} of {total} answers are in {_OUTPUT.value}; the same command goes on after them.')
          raise
      print(said)
  print(f'python scripts/make_tables.py {_OUTPUT.value}')


if __name__ == '__main__':
  common.set_defaults(max_new_tokens=4096, ledger=True)
  common.run(main, meshes=True)
