"""Tables and figures of runs of experiments/sweep.py.

  python scripts/make_tables.py runs/first                            # into runs/first/tables; seconds
  python scripts/make_tables.py runs/first runs/second --output=both  # several runs, of the same settings
  python scripts/make_tables.py runs/first --against='clamp tau=2'    # scores less that arm's, instead of SpS's

Writes a table for each task (TASK.md, .csv, .tex with booktabs, .json; JSON and CSV are unrounded and have all
intervals) and the figures (.png, .svg; `pip install -e .[plot]`), and prints the tables. What is there is replaced.
"""

import itertools
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / 'experiments'))

from absl import flags  # noqa: E402
from lib import answers, figures, tables  # noqa: E402
from lib import flags as common  # noqa: E402

from cactus_jax import files  # noqa: E402

_OUTPUT = flags.DEFINE_string('output', None, 'Folder to write to; by default RUN/tables of the only run.')
_AGAINST = flags.DEFINE_string('against', 'exact', 'The arm that scores are compared with, of the same number of '
                               'drafted tokens; exact is SpS.')
_ARMS = flags.DEFINE_list('arms', None, 'Arms in the figure of positions, as exact,cactus delta=1; by default SpS and '
                          'one of each family.')


def main(*runs):
  """Tabulates and draws what the runs hold."""
  common.refuse(common.SHARED, 'answers are read, and nothing is decoded')
  if _OUTPUT.value is None and len(runs) > 1:
    raise ValueError('--output is missing: several runs have no folder of their own for tables.')
  folder = _OUTPUT.value or os.path.join(runs[0], 'tables')
  rows, run, notes = answers.read_runs(runs)
  by_task, names = {}, {row['arm'] for row in rows}
  for row in rows:
    by_task.setdefault(row['task'], []).append(row)
  if _AGAINST.value not in names | {'exact'}:
    raise ValueError(f'--against: {_AGAINST.value!r} is no arm; there are {", ".join(sorted(names))}.')
  found = [tables.summarize(task, by_task[task], run, _AGAINST.value) for task in sorted(by_task)]
  figures.check_arms(found, _ARMS.value)
  try:
    for task, (kind, write) in itertools.product(found, tables.WRITERS.items()):
      name = re.sub(r'[^\w.-]', '_', task['task'])
      with files.new_file(os.path.join(folder, f'{name}.{kind}')) as file:
        file.write(write(task))
  except OSError as error:
    raise ValueError(f'{folder} cannot be written: {error}') from None
  print('\n'.join(map(tables.markdown, found)))
  drawn = figures.write(found, folder, _ARMS.value)
  print('\n'.join([*notes, *drawn, f'Tables and figures are in {folder}']))


def num_runs(argv) -> int:
  """How many arguments are no flags, nor values of flags written apart."""
  flags_alone = {dashes + flag.name for flag in (_OUTPUT, _AGAINST, _ARMS) for dashes in ('-', '--')}
  return sum(not word.startswith('-') and before not in flags_alone for before, word in itertools.pairwise(argv))


if __name__ == '__main__':
  common.run(main, arguments=('RUN',) * max(1, num_runs(sys.argv)))
