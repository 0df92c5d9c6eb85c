"""Finished answers: read from runs of experiments/sweep.py, and added up by arm, seed and document.

An arm is a rule, or the verifier alone, at a number of drafted tokens.

Letters: S seeds, D documents, F sums of SUMS.
"""

import collections
import json
import math
import os
from typing import NamedTuple

import numpy as np

from cactus_jax import records
from lib import record

KEY = ('task', 'doc', 'arm', 'num_draft', 'seed')
FINISHED = ('eos', 'stop')
# What is added up. kl_tokens: those decoded in answers that have a ledger.
SUMS = ('answers', 'score', 'new_tokens', 'decoded', 'calls', 'accepted', 'tested', 'seconds', 'finished', 'kl',
        'kl_tokens')


# Reading.


def _is_count(value):
  return type(value) is int and value >= 0


def _are_counts(value):
  return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _is_number(value):
  return isinstance(value, (int, float))


# What an answer must have: what is right, and how to say it.
FIELDS = {
    'task': (lambda x: isinstance(x, str), 'a name'),
    'doc': (lambda x: isinstance(x, (int, str)), 'a number or name'),
    'arm': (lambda x: isinstance(x, str) and bool(x.strip()), 'a name'),
    'num_draft': (_is_count, 'a whole number from 0'),
    'seed': (lambda x: type(x) is int, 'a whole number'),
    'score': (lambda x: x is None or _is_number(x) and 0 <= x <= 1, 'a number from 0 to 1, or null'),
    'metrics': (lambda x: isinstance(x, dict), 'an object of numbers'),
    'finish_reason': (lambda x: isinstance(x, str), 'a name'),
    'new_tokens': (_is_count, 'a whole number from 0'),
    'decoded': (_is_count, 'a whole number from 0'),
    'verifier_calls': (_is_count, 'a whole number from 0'),
    'accepted_at': (_are_counts, 'whole numbers from 0'),
    'tested_at': (_are_counts, 'whole numbers from 0'),
    'kl': (lambda x: x is None or _is_number(x) and x != -math.inf, 'nats, or null'),
    'seconds': (lambda x: _is_number(x) and 0 <= x < math.inf, 'seconds'),
}


def check_answer(row):
  """Raises ValueError for a row that is no answer, saying what is wrong with it."""
  missing = [name for name in FIELDS if name not in row]
  if missing:
    raise ValueError(f'{", ".join(missing)} missing: need a row of experiments/sweep.py')
  for name, (is_right, need) in FIELDS.items():
    if not is_right(row[name]):
      raise ValueError(f'{name} is {row[name]!r:.60}: need {need}')
  for name in ('accepted_at', 'tested_at'):
    if len(row[name]) != row['num_draft']:
      raise ValueError(f'{name} has {len(row[name])} positions: need num_draft={row["num_draft"]}')
  if any(accepted > tested for accepted, tested in zip(row['accepted_at'], row['tested_at'])):
    raise ValueError(f'accepted_at is {row["accepted_at"]} of tested_at {row["tested_at"]}: need no more than tested')


def read_runs(folders) -> tuple[list[dict], dict, list[str]]:
  """The answers of one or several runs, what describes them together, and notes on what a reader should know.

  The description has `settings`, in which `tasks` are those of all runs, and `device` and `git`.
  Raises: ValueError for a row that is wrong or a second of its kind, with file and line, and for runs that differ in
    more than their tasks.
  """
  answers, notes, seen, runs = [], [], set(), {}

  def check(row):
    check_answer(row)
    key = tuple(row[name] for name in KEY)
    if key in seen:
      raise ValueError(f'a second answer of {", ".join(f"{name}={row[name]!r}" for name in KEY)}: remove one')
    seen.add(key)

  for folder in folders:
    run = _description(folder)
    for other in runs:
      _check_alike(other, runs[other]['settings'], folder, run['settings'])
    runs[folder] = run
    path = os.path.join(folder, 'rows.jsonl')
    found, is_cut = record.read_finished_rows(path, check)
    if is_cut:
      notes.append(f'{path}: the last line is incomplete and is left out.')
    answers += found
  if not answers:
    raise ValueError(f'{", ".join(folders)}: no answer is finished yet; let experiments/sweep.py go on.')
  noted = [note for run in runs.values() for note in (run, *run.get('starts', ()))]
  devices, commits = ({str(note[name]): 0 for note in noted if note.get(name)} for name in ('device', 'git'))
  if len(devices) > 1:
    notes.append(f'The answers are of different machines ({", ".join(devices)}): speeds of arms may not compare.')
  tasks = {name: task for run in runs.values() for name, task in run['settings']['tasks'].items()}
  settings = next(iter(runs.values()))['settings'] | {'tasks': tasks}
  return answers, {'settings': settings, 'device': ', '.join(devices), 'git': ', '.join(commits)}, notes


def _description(folder):
  path = os.path.join(folder, 'run.json')
  try:
    with open(path, encoding='utf-8') as file:
      run = json.load(file)
  except (OSError, ValueError) as error:
    why = getattr(error, 'strerror', None) or error
    raise ValueError(f'{path} cannot be read ({why}): need a folder that experiments/sweep.py made, its run.json as '
                     'it was written.') from None
  settings = run.get('settings') if isinstance(run, dict) else None
  if not isinstance(settings, dict) or not isinstance(settings.get('tasks'), dict):
    raise ValueError(f'{path} names no settings with tasks: need a folder that experiments/sweep.py made.')
  return run


def _check_alike(first, theirs, second, ours):
  """Raises ValueError for runs that differ in more than which tasks they have."""
  names = (theirs.keys() | ours.keys()) - {'tasks'}
  tasks = theirs['tasks'].keys() & ours['tasks'].keys()
  flat = lambda settings: {name: settings.get(name) for name in sorted(names)} | {
      f'task {name}': settings['tasks'][name] for name in sorted(tasks)}
  differences = records.differences(flat(theirs), flat(ours))
  if differences:
    raise ValueError(f'{first} and {second} have different settings ({"; ".join(differences)}): make tables of each.')


# Adding up.


class Arm(NamedTuple):
  """The answers of an arm to one task, added up."""

  name: str
  num_draft: int
  cells_SDF: np.ndarray  # f64; zeros where there is no answer
  accepted_at: list[int]  # over all answers, by drafted position
  tested_at: list[int]
  finish_reasons: dict[str, int]
  metrics: dict[str, float]  # means over answers

  def sums_SD(self, name):
    """One of SUMS."""
    return self.cells_SDF[..., SUMS.index(name)]

  @property
  def held_SD(self):
    """Where there is an answer."""
    return self.sums_SD('answers') > 0


def split_arm(name) -> tuple[str, dict]:
  """Family and numbers of an arm: of 'cactus delta=1', 'cactus' and {'delta': 1.0}. Other words stay in the family."""
  family, numbers = [], {}
  for word in name.split():
    key, _, value = word.partition('=')
    try:
      numbers[key] = float(value)
    except ValueError:
      family.append(word)
  return ' '.join(family), numbers


def arms_of(answers) -> list[Arm]:
  """The arms of one task, by number of drafted tokens; in each, the verifier alone, SpS, then rules by name and number.

  All have the same seeds and documents, in the same order, whatever the order of the answers.
  """
  any_type = lambda value: (isinstance(value, str), value)
  index = lambda name: {value: i for i, value in enumerate(sorted({row[name] for row in answers}, key=any_type))}
  seeds, docs, grouped = index('seed'), index('doc'), {}
  for row in answers:
    grouped.setdefault((row['num_draft'], row['arm']), []).append(row)

  def order(key):
    family, numbers = split_arm(key[1])
    return key[0], family != 'plain', family != 'exact', family, tuple(numbers.items()), key[1]

  def arm(num_draft, name):
    rows, metrics = grouped[num_draft, name], collections.defaultdict(list)
    cells_SDF = np.zeros((len(seeds), len(docs), len(SUMS)))
    cells_SDF[[seeds[row['seed']] for row in rows], [docs[row['doc']] for row in rows]] = [_sums(row) for row in rows]
    for row in rows:
      for metric, value in row['metrics'].items():
        if _is_number(value):
          metrics[metric].append(value)
    return Arm(
        name, num_draft, cells_SDF,
        accepted_at=[sum(column) for column in zip(*(row['accepted_at'] for row in rows))],
        tested_at=[sum(column) for column in zip(*(row['tested_at'] for row in rows))],
        finish_reasons=dict(sorted(collections.Counter(row['finish_reason'] for row in rows).items())),
        metrics={metric: math.fsum(values) / len(values) for metric, values in sorted(metrics.items())})

  return [arm(*key) for key in sorted(grouped, key=order)]


def _sums(row):
  has_kl = row['kl'] is not None and not math.isnan(row['kl'])
  return (1, row['score'] or 0, row['new_tokens'], row['decoded'], row['verifier_calls'], sum(row['accepted_at']),
          sum(row['tested_at']), row['seconds'], row['finish_reason'] in FINISHED, row['kl'] if has_kl else 0,
          row['decoded'] if has_kl else 0)
