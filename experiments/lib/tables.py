"""Tables of finished answers: a row for each arm, with differences between arms that are paired by document.

Words are those of `cactus_jax.metrics`. Scores, shares and changes are fractions here, in JSON and in CSV, and percent
where they are shown.

Whatever has an interval is a statistic of sums over documents. RESAMPLES times, as many documents as there are are
drawn with replacement, all answers to a document together, since they resemble each other; the interval holds the
middle 95 % of what the statistic then is. Arms are compared on the documents and seeds that both have, and on the same
draws, so that what makes a document hard or long for both cancels.

Letters: R the documents as they are, then each resample; S seeds, D documents, C columns.
"""

import csv
import functools
import io
import json
import math
import re

import numpy as np

from lib import answers as answers_lib
from lib.answers import SUMS, split_arm

RESAMPLES = 10_000
FEW = 30  # documents; of fewer a bootstrap draws too little variety
FRONT = 'clamp'  # the family that by theory keeps the most of a draft for its nats: others are compared at equal ones

# What the paper (Hao and Mou 2026, arXiv 2604.04987) has, as others quote it.
CITED = ('score', 'accepted_len', 'rejected_change')  # %, tokens, %
PAPER = {
    # Qwen3-14B and 0.6B: a note on papernotes.org, of which two versions agree.
    '14B, m = 20': {
        'gsm8k': {'plain': (91.71, None, None), 'exact': (91.89, 5.11, 0), 'typical': (92.87, 6.78, -32),
                  'cactus delta=0.75': (92.15, 7.15, -36), 'cactus delta=1': (92.87, 7.00, -34)},
        'gpqa': {'plain': (40.07, None, None), 'exact': (40.91, 3.84, 0), 'typical': (40.40, 6.41, -46),
                 'cactus delta=0.75': (45.46, 6.46, -46), 'cactus delta=1': (45.46, 6.74, -50)},
    },
    # Qwen3-8B and 0.6B: the same note.
    '8B, m = 20': {'gpqa': {'exact': (42.93, None, None), 'typical': (38.89, None, None)}},
    # Another note, which names neither models nor m; by its scores it is not the 14B.
    'unnamed': {
        'gsm8k': {'exact': (84.46, 5.44, 0), 'cactus delta=1': (86.43, 7.61, None)},
        'ifeval': {'exact': (None, 2.59, 0), 'cactus delta=1': (None, 3.44, None)},
        'gpqa': {'exact': (None, 3.70, 0), 'cactus delta=1': (None, 5.44, None)},
    },
}


# Resampling.


@functools.lru_cache(maxsize=4)
def _draws(num_docs):
  """u16[R, D]: how often each document is drawn, in the first row once. The same at each call. One is not resampled."""
  rng, parts = np.random.default_rng(0), [np.ones((1, num_docs), np.uint16)]
  count, step = RESAMPLES if num_docs > 1 else 0, max(1, 2_000_000 // num_docs)  # in parts, for memory
  for start in range(0, count, step):
    rows = min(step, count - start)
    drawn = rng.integers(num_docs, size=(rows, num_docs)) + num_docs * np.arange(rows)[:, None]
    parts.append(np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.uint16))
  return np.concatenate(parts)


def resampled(tables) -> list:
  """For each {name: f64[D]} the sums over documents, {name: f64[R]}. Of as many documents the draws are the same.

  What is None stays None. (All tables at once, since reading the draws is what takes time.)
  """
  found, by_size = [None] * len(tables), {}
  for i, table in enumerate(tables):
    if table is not None:
      by_size.setdefault(len(next(iter(table.values()))), []).append(i)
  for size, chosen in by_size.items():
    columns_DC, draws = np.stack([column for i in chosen for column in tables[i].values()], axis=1), _draws(size)
    parts = np.array_split(draws, -(-draws.size // 2_000_000))
    sums = iter(np.concatenate([part.astype(np.float64) @ columns_DC for part in parts]).T)
    for i in chosen:
      found[i] = {name: next(sums) for name in tables[i]}
  return found


def estimate(values_R) -> dict | None:
  """A statistic and its 95 % interval, from its values on the documents and on each resample; None for 0 / 0."""
  value, drawn = float(values_R[0]), values_R[1:]
  if math.isnan(value):
    return None
  known = len(drawn) and np.isfinite(drawn).all()
  return {'value': value, 'interval': np.quantile(drawn, [0.025, 0.975]).tolist() if known else None}


def _added_up(named, names, held_SD) -> dict:
  """{prefix + name: f64[D]}: sums of each {prefix: arm}, of what is held, by document of which some is."""
  return {prefix + name: np.where(held_SD, arm.sums_SD(name), 0).sum(axis=0)[held_SD.any(axis=0)]
          for prefix, arm in named.items() for name in names}


def by_document(arm) -> dict:
  """{name: f64[D]}: sums of an arm, by document that it has."""
  return _added_up({'': arm}, ('calls', 'accepted', 'tested', 'kl', 'kl_tokens'), arm.held_SD)


def pair(arm, other) -> dict | None:
  """{name: f64[D]}: sums of an arm, and as other_name of another, over the seeds and by the documents that both have.

  `score` is the difference of the two, each the mean over the seeds of a document. None where they share no document.
  """
  both_SD = arm.held_SD & other.held_SD
  if not both_SD.any():
    return None
  named = {'': arm, 'other_': other}
  scores = _added_up(named, ('score', 'answers'), both_SD)
  return _added_up(named, ('calls', 'accepted', 'new_tokens', 'seconds'), both_SD) | {
      'score': (scores['score'] - scores['other_score']) / scores['answers'], 'answers': scores['answers'],
      'documents': np.ones_like(scores['answers'])}


def beside(arm, curve) -> dict | None:
  """{name: f64[D]}: sums of an arm, and as low_name and high_name of the arms of a curve that spend next less and more.

  They are compared on the answers of the arm that have a ledger; arms of the curve that lack one of these are left out.
  None where the arm spends less than all that are left, or more.
  """
  with_ledger = lambda one: one.held_SD & (one.sums_SD('kl_tokens') == one.sums_SD('decoded'))
  held_SD = with_ledger(arm)
  spent = lambda one: one.sums_SD('kl')[held_SD].sum() / one.sums_SD('kl_tokens')[held_SD].sum()
  curve = sorted((one for one in curve if held_SD.any() and with_ledger(one)[held_SD].all()), key=spent)
  if len(curve) < 2 or not spent(curve[0]) <= spent(arm) <= spent(curve[-1]):
    return None
  high = max(1, next(i for i, one in enumerate(curve) if spent(one) >= spent(arm)))
  return _added_up({'': arm, 'low_': curve[high - 1], 'high_': curve[high]},
                   ('calls', 'accepted', 'kl', 'kl_tokens'), held_SD)


def above(found) -> dict:
  """How much more a curve keeps than an arm that spends as much: AL on the chord of its neighbours, less its own.

  Acceptance of a position is concave in what is spent there, and the chord a lower bound; AL of many drafted tokens
  need not be.
  """
  (spent, kept), (x0, y0), (x1, y1) = (
      (found[f'{of}kl'] / found[f'{of}kl_tokens'], found[f'{of}accepted'] / found[f'{of}calls'])
      for of in ('', 'low_', 'high_'))
  return estimate(y0 + (y1 - y0) * (spent - x0) / (x1 - x0) - kept)


def score_difference(found) -> dict:
  """Of a resampled pair the difference of scores: interval, standard error, p (twice the share of draws beyond 0)."""
  values_R = found['score'] / found['documents']
  drawn = np.round(values_R[1:], 12)  # what cancels is 0, not 1e-17
  error = p = None
  if len(drawn):
    beyond = min((drawn <= 0).sum(), (drawn >= 0).sum())
    error, p = float(drawn.std(ddof=1)), min(1.0, float(2 * (beyond + 1) / (len(drawn) + 1)))
  counts = {name: int(found[name][0]) for name in ('documents', 'answers')}
  return estimate(values_R) | {'standard_error': error, 'p': p} | counts


def score(arm) -> dict:
  """The mean over documents, and its standard error, over documents and, if there are several, over seeds."""
  held_SD, score_SD = (x[arm.held_SD.any(axis=1)][:, arm.held_SD.any(axis=0)] for x in (
      arm.held_SD, arm.sums_SD('score')))
  score_D, whole_D = score_SD.sum(axis=0) / held_SD.sum(axis=0), held_SD.all(axis=0)
  error = lambda means: float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
  # Seeds are compared on the documents that all of them have.
  over_seeds = error(score_SD[:, whole_D].mean(axis=1)) if whole_D.any() else None
  return {'value': float(score_D.mean()), 'error_over_seeds': over_seeds, 'error_over_documents': error(score_D)}


def standard_error(found) -> tuple[float | None, str]:
  """That of a `score` which is shown, and over what it is: seeds, if there are several."""
  over_seeds = found['error_over_seeds']
  return (found['error_over_documents'], 'documents') if over_seeds is None else (over_seeds, 'seeds')


# Tables.


def summarize(task, answers, run=None, against='exact') -> dict:
  """All that tables and figures show of the answers to a task; JSON.

  Args: run, what describes them together, by `answers.read_runs`; against, the arm, of the same number of drafted
    tokens, that scores are compared with.
  Returns: {'arms': [the figures of each], 'notes': [sentences], 'reference': the arm that speeds, and scores in the
    figures, are compared with: 'plain', or where there is none 'exact' of the same number of drafted tokens, ...}
  Raises: ValueError where some answers have a score and some have none.
  """
  unscored = sum(row['score'] is None for row in answers)
  if 0 < unscored < len(answers):
    raise ValueError(f'{task}: {unscored} of {len(answers)} answers have no score; need one for all or for none.')
  arms = answers_lib.arms_of(answers)
  named = {(arm.name, arm.num_draft): arm for arm in arms}
  reference = 'plain' if ('plain', 0) in named else 'exact'
  grid_SD = functools.reduce(np.logical_or, (arm.held_SD for arm in arms))

  def compared(name):
    others = [named.get((name, 0 if name == 'plain' else arm.num_draft)) for arm in arms]
    return [None if other is None or other is arm else pair(arm, other) for arm, other in zip(arms, others)]

  def with_front(arm):  # exact is its end, where nothing is spent
    curve = [other for other in arms if other.num_draft == arm.num_draft
             and split_arm(other.name)[0] in ('exact', FRONT)]
    return None if any(arm is one for one in curve) or not arm.num_draft else beside(arm, curve)

  with np.errstate(divide='ignore', invalid='ignore'):  # 0 / 0 becomes None
    kinds = {'own': map(by_document, arms), 'front': map(with_front, arms)}
    kinds |= {name: compared(name) for name in ('exact', against, reference)}  # each name once
    sums = resampled([table for tables in kinds.values() for table in tables])
    of = {kind: sums[i * len(arms) : (i + 1) * len(arms)] for i, kind in enumerate(kinds)}
    rows = [_figures(task, arm, not unscored, *each) for arm, *each in zip(
        arms, of['own'], of['exact'], of[against], of[reference], of['front'])]
  run = run or {'settings': {'tasks': {}}}
  found = {'task': task, 'metric': run['settings']['tasks'].get(task, {}).get('metric'), 'scored': not unscored,
           'against': against, 'reference': reference, 'documents': grid_SD.shape[1],
           'seeds': grid_SD.shape[0], 'answers': int(grid_SD.sum()), 'resamples': RESAMPLES, 'run': run, 'arms': rows}
  return found | {'notes': _notes(found)}


def _figures(task, arm, scored, own, with_sps, with_baseline, with_reference, with_front):
  """The figures of an arm, from resampled sums: its own, and those beside SpS and the other arms, or None."""
  m, (family, numbers) = arm.num_draft, split_arm(arm.name)
  total = {name: float(arm.sums_SD(name).sum()) for name in SUMS}
  ratio = lambda a, b: total[a] / total[b] if total[b] else None
  rejected = lambda sums, of='': (m * sums[of + 'calls'] - sums[of + 'accepted']) / (
      sums[of + 'calls'] + sums[of + 'accepted'])
  rate = lambda sums, of='': sums[of + 'new_tokens'] / sums[of + 'seconds']
  relative = lambda statistic, sums: statistic(sums) / statistic(sums, 'other_')
  return {
      'task': task, 'num_draft': m, 'arm': arm.name, 'family': family, 'numbers': numbers,
      'answers': int(total['answers']), 'documents': int(arm.held_SD.any(axis=0).sum()),
      'seeds': int(arm.held_SD.any(axis=1).sum()),
      'score': score(arm) if scored else None,
      'score_vs_arm': score_difference(with_baseline) if scored and with_baseline else None,
      'score_vs_reference': score_difference(with_reference) if scored and with_reference else None,
      'accepted_len': estimate(own['accepted'] / own['calls']) if m else None,
      'acceptance_rate': estimate(own['accepted'] / own['tested']) if m else None,
      'rejected_per_token': estimate(rejected(own)) if m else None,
      'rejected_change': estimate(relative(rejected, with_sps) - 1) if m and with_sps else None,
      'kl_per_token': estimate(own['kl'] / own['kl_tokens']), 'front_above': above(with_front) if with_front else None,
      'kl_tokens_share': ratio('kl_tokens', 'decoded'),
      'calls_per_solved': ratio('calls', 'score') if scored else None,
      'answer_length': ratio('new_tokens', 'answers'), 'finish_rate': ratio('finished', 'answers'),
      'tokens_per_second': ratio('new_tokens', 'seconds'),
      'speed_up': estimate(relative(rate, with_reference)) if with_reference else None,
      'metrics': arm.metrics, 'finish_reasons': arm.finish_reasons,
      'sums': total | {'accepted_at': arm.accepted_at, 'tested_at': arm.tested_at},
      'paper': {where: cells for where in PAPER if (cells := _paper(where, task, family, numbers))},
  }


def _paper(where, task, family, numbers):
  """What a part of PAPER has for an arm, or None."""
  return next((dict(zip(CITED, cells)) for start, arms in PAPER[where].items() if task.startswith(start)
               for name, cells in arms.items() if split_arm(name) == (family, numbers)), None)


def label(row) -> str:
  """An arm in words."""
  return row['arm'] + (f' m={row["num_draft"]}' if row['num_draft'] else '')


_ON_INTERVALS = '[95 % intervals] are from {resamples:,} resamples of documents.'


def _notes_on_differences(found):
  """What a reader has to know of scores that are compared."""
  against, notes = found['against'], []
  compared = [row['score_vs_arm'] for row in found['arms'] if row['score_vs_arm']]
  if compared:
    of = '' if against == 'plain' else ' of the same m'
    notes.append(f'{_versus(found)}: difference from {against}{of} on the same documents and seeds; p is two-sided, '
                 f'from {found["resamples"]:,} resamples of documents, as are all [95 % intervals].')
  else:
    notes.append(_ON_INTERVALS.format(**found))
  if compared and not any(difference['value'] or difference['standard_error'] for difference in compared):
    notes.append(f'No document tells an arm from {against}: these scores say nothing, whatever their intervals.')
  # Plain has an m of its own, at which there is nothing to compare it with.
  lacking = [label(row) for row in found['arms']
             if not row['score_vs_arm'] and row['arm'] != against and row['num_draft']]
  if lacking:
    notes.append(f'Scores not compared, since {against} has no answer to the same documents at the same m: '
                 f'{", ".join(lacking)}.')
  return notes


def _notes(found):
  """What a reader of the table has to know, a sentence each."""
  rows, settings = found['arms'], found['run']['settings']
  made_with = [f'{name} {value}' for name, value in settings.items()
               if name != 'tasks' and value is not False and value not in (None, '', [])]
  counts = ', '.join(f'{found[name]} {name[:-1]}' + 's' * (found[name] != 1) for name in ('documents', 'seeds'))
  notes = ['; '.join(filter(None, [counts, ', '.join(made_with), found['run'].get('device'), found['run'].get('git')]))
           + '.']
  if found['scored']:
    by = {}
    for row in rows:
      by.setdefault(standard_error(row['score'])[1], []).append(label(row))
    over = ' or '.join(by if len(by) == 1 else (f'{over} ({", ".join(names)})' for over, names in by.items()))
    notes.append(f'Score: {found["metric"] or "the main metric"}, ± one standard error over {over}.')
    notes += _notes_on_differences(found)
  else:
    notes.append(_ON_INTERVALS.format(**found))
  notes.append('AL: drafted tokens kept in a round, mean over rounds.')
  if any(row['rejected_change'] for row in rows):
    notes.append('Rej: change of the rejected tokens per emitted token, (m - AL) / (AL + 1), from SpS; m counts, '
                 'whether or not a round drafted as many.')
  if any(row['front_above'] for row in rows):
    notes.append(f'{FRONT}, equal KL: AL of {FRONT} at the same KL, on the straight line between its arms that spend '
                 'next less (or exact) and more, less that of the row, on the same documents and seeds.')
  if settings.get('ledger'):
    notes.append('Seconds are those of a run with the ledger, which costs rules other than exact some time.')
  if any(row['speed_up'] for row in rows):
    over = 'plain' if found['reference'] == 'plain' else 'exact of the same m, since there is no plain'
    notes.append(f'Speed-up: tokens a second over those of {over}, on the same documents and seeds.')
  incomplete = [f'{label(row)} ({row["answers"]} of {found["answers"]})' for row in rows
                if row['answers'] < found['answers']]
  if incomplete:
    notes.append(f'Incomplete: {", ".join(incomplete)}. What compares two arms is of the answers that both have; '
                 'their other columns do not compare. Figures join no line to arms with fewer answers than others of '
                 'their m, and have them pale.')
  lacking = [f'{label(row)} ({100 * row["kl_tokens_share"]:.0f} %)' for row in rows
             if 0 < (row['kl_tokens_share'] or 0) < 1]
  if lacking:
    notes.append(f'KL per token is of the answers with a ledger, where not all have one: {", ".join(lacking)}.')
  broken = [f'{label(row)} ({count} {reason})' for row in rows for reason, count in row['finish_reasons'].items()
            if reason not in (*answers_lib.FINISHED, 'length')]
  if broken:
    notes.append(f'Answers that neither finished nor reached their length: {", ".join(broken)}.')
  if found['documents'] < FEW:
    notes.append(f'Intervals and p of fewer than {FEW} documents promise too much.')
  if any(row['paper'] for row in rows):
    notes.append('Paper: Hao and Mou (2026), as others quote it, with the verifier and m of the header, whatever those '
                 'of the row; unnamed where they are not known.')
  return notes


# Showing.


def _percent(value, form='.1f'):
  return '-' if value is None else f'{100 * value:{form}}'


def _with_interval(found, form):
  """'1.31 [1.25, 1.38]'; form: a number to its text."""
  if found is None:
    return '-'
  return form(found['value']) + (f' [{", ".join(map(form, found["interval"]))}]' if found['interval'] else '')


def _number(value, form):
  return '-' if value is None else f'{value:{form}}'


def _value(found, form):
  return '-' if found is None else f'{found["value"]:{form}}'


def _score(found):
  if found is None:
    return '-'
  error = standard_error(found)[0]
  return _percent(found['value']) + ('' if error is None else f' ± {_percent(error)}')


def _p(found):
  return '-' if found is None or found['p'] is None else '<0.001' if found['p'] < 0.001 else f'{found["p"]:.3f}'


def _rej(found):
  return '-' if found is None else _percent(found['value'], '+.0f')


def _cited(cells):
  return ' / '.join(_number(cells[name], form) for name, form in zip(CITED, ('.2f', '.2f', '.0f'))) if cells else ''


VERSUS = 'vs'  # header of a column, which the arm completes that scores are compared with
# What is shown of an arm: header, and text of the row. Columns without content are left out.
COLUMNS = {
    'm': lambda row: str(row['num_draft'] or '-'),
    'arm': lambda row: row['arm'],
    'answers': lambda row: str(row['answers']),
    'score %': lambda row: _score(row['score']),
    VERSUS: lambda row: _with_interval(row['score_vs_arm'], lambda x: _percent(x, '+.1f')),
    'p': lambda row: _p(row['score_vs_arm']),
    'AL': lambda row: _value(row['accepted_len'], '.2f'),
    'Rej %': lambda row: _rej(row['rejected_change']),
    'accepted %': lambda row: '-' if row['acceptance_rate'] is None else _percent(row['acceptance_rate']['value']),
    'KL/token': lambda row: _value(row['kl_per_token'], '.3g'),
    f'{FRONT}, equal KL': lambda row: _with_interval(row['front_above'], '{:+.2f}'.format),
    'calls/solved': lambda row: _number(row['calls_per_solved'], '.1f'),
    'length': lambda row: _number(row['answer_length'], '.0f'),
    'finished %': lambda row: _percent(row['finish_rate']),
    'tokens/s': lambda row: _number(row['tokens_per_second'], '.1f'),
    'speed-up': lambda row: _with_interval(row['speed_up'], '{:.2f}'.format),
} | {f'paper, {where}: score / AL / Rej': functools.partial(lambda where, row: _cited(row['paper'].get(where)), where)
     for where in PAPER}


def _versus(found):
  return f'{VERSUS} {"SpS" if found["against"] == "exact" else found["against"]}'


def shown(found) -> tuple[list[str], list[list[str]]]:
  """Header and rows of the table, as text."""
  columns = [[_versus(found) if header == VERSUS else header, *map(text, found['arms'])]
             for header, text in COLUMNS.items()]
  kept = [column for column in columns if set(column[1:]) - {'-', ''}]
  header, *rows = map(list, zip(*kept))
  return header, rows


def markdown(found) -> str:
  """The table with its heading and notes."""
  header, rows = shown(found)
  widths = [max(map(len, column)) for column in zip(header, *rows)]
  line = lambda cells: '| ' + ' | '.join(cell.ljust(width) for cell, width in zip(cells, widths)) + ' |'
  dashes = '|' + '|'.join('-' * (width + 2) for width in widths) + '|'
  table = '\n'.join([line(header), dashes, *map(line, rows)])
  return f'## {found["task"]}\n\n{table}\n\n' + '\n'.join(f'* {note}' for note in found['notes']) + '\n'


_LATEX = {char: f'\\{char}' for char in '&%$#_{}'} | {
    '\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}', '±': r'$\pm$', '<': '$<$',
    '>': '$>$'}


def _latex_text(text):
  escaped = re.sub(r'[&%$#_{}\\~^±<>]', lambda char: _LATEX[char[0]], text)
  return re.sub(r'(?<![\w.])-(?=\d)', '$-$', re.sub(r'(?<!\S)-(?!\S)', '--', escaped))


def latex(found) -> str:
  """The table for LaTeX with booktabs, notes as comments."""
  header, rows = shown(found)
  lines = [r'% \usepackage{booktabs}', *(f'% {note}' for note in found['notes']),
           rf'\begin{{tabular}}{{rl{"r" * (len(header) - 2)}}}', r'\toprule']
  line = lambda cells: ' & '.join(map(_latex_text, cells)) + r' \\'
  lines += [line(header), r'\midrule']
  for before, row in zip([rows[0], *rows], rows):
    lines += [r'\midrule'] * (before[0] != row[0]) + [line(row)]
  return '\n'.join([*lines, r'\bottomrule', r'\end{tabular}', ''])


def _flat(value, name=''):
  """{'score_value': ..., 'speed_up_interval_low': ...}: what is nested under joined names, and nothing for None."""
  if not isinstance(value, (dict, list)):
    return {} if value is None else {name: value}
  names = ('low', 'high') if name.endswith('_interval') else range(len(value))
  items = value.items() if isinstance(value, dict) else zip(names, value)
  return {key: leaf for part, inner in items for key, leaf in _flat(inner, f'{name}_{part}' if name else part).items()}


def csv_text(found) -> str:
  """The figures of all arms, unrounded, a column for each number."""
  rows = [_flat({'task': found['task'], 'against': found['against']} | row) for row in found['arms']]
  text, fullest = io.StringIO(), sorted(rows, key=len, reverse=True)
  writer = csv.DictWriter(text, list(dict.fromkeys(name for row in fullest for name in row)), lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue()


def json_text(found) -> str:
  """All figures, unrounded, with intervals and notes."""
  return json.dumps(found, indent=1, ensure_ascii=False) + '\n'


WRITERS = {'md': markdown, 'csv': csv_text, 'tex': latex, 'json': json_text}
