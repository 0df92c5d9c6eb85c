"""scripts/make_tables.py and its figures: what is written, what is left out and said, what is refused."""

import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from lib import figures, tables

from tests import tables_test

ROOT = pathlib.Path(__file__).parent.parent
pytest.importorskip('matplotlib')


@pytest.fixture(scope='module')
def rows():
  """Answers of one task with scores and one without."""
  return tables_test.made_up(docs=12) + [
      row | {'score': None} for row in tables_test.made_up(docs=12, task='chat', drafts=(3,), rng=8)]


@pytest.fixture(scope='module')
def found(rows):
  return [tables.summarize(task, [row for row in rows if row['task'] == task]) for task in ('chat', 'gsm8k')]


def only(found, keep):
  """Summaries of the arms that are kept."""
  return [task | {'arms': list(filter(keep, task['arms']))} for task in found]


def command(*arguments):
  """(Other programs have flags of the same names, so it runs in a process of its own.)"""
  return subprocess.run([sys.executable, ROOT / 'scripts' / 'make_tables.py', *arguments], capture_output=True,
                        text=True, cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)})


def test_the_command(rows, found, tmp_path):
  """Two runs make the tables of all their rows together."""
  first, second = (tables_test.write_run(tmp_path / name, own, tail=tail) for name, own, tail in (
      ('a', rows[::2], ''), ('b', rows[1::2], '{"task": "gsm')))
  done = command(first, second, '--output', str(tmp_path / 'both'), '--arms=exact,cactus delta=1')
  assert (done.returncode, done.stderr) == (0, '')
  kinds = {f'{task}.{kind}' for task in ('gsm8k', 'chat') for kind in ('md', 'csv', 'tex', 'json')}
  drawn = {f'{name}.{kind}' for name in figures.FIGURES for kind in ('png', 'svg')}
  assert set(os.listdir(tmp_path / 'both')) == kinds | drawn
  for task in found:
    assert (tmp_path / 'both' / f'{task["task"]}.md').read_text() in done.stdout
    assert json.loads((tmp_path / 'both' / f'{task["task"]}.json').read_text())['arms'] == task['arms']
  assert done.stdout.endswith(f'{second}/rows.jsonl: the last line is incomplete and is left out.\n'
                              f'Tables and figures are in {tmp_path / "both"}\n')


def test_the_arm_that_scores_are_compared_with(rows, tmp_path):
  """--against; the value is no further run, and one that no run has is refused before anything is written."""
  folder = tables_test.write_run(tmp_path / 'a', [row for row in rows if row['task'] == 'gsm8k'])
  done = command(folder, '--against', 'cactus', '--output', str(tmp_path / 'x'))
  assert done.returncode == 2 and "--against: 'cactus' is no arm; there are cactus delta=0.5, cactus" in done.stderr
  done = command(folder, '--arms', 'cactus', '--output', str(tmp_path / 'x'))
  assert done.returncode == 2 and "--arms: 'cactus' is no arm that drafts" in done.stderr
  assert not (tmp_path / 'x').exists()
  done = command('--against', 'cactus delta=1', folder)
  assert (done.returncode, done.stderr) == (0, '')
  assert '| vs cactus delta=1 ' in done.stdout and 'vs SpS' not in done.stdout


def test_the_folder_of_one_run(rows, tmp_path):
  folder = tables_test.write_run(tmp_path / 'a', [row | {'task': 'a/b'} for row in rows if row['arm'] == 'plain'][:5])
  done = command(folder)
  assert (done.returncode, done.stderr) == (0, '')
  assert set(os.listdir(tmp_path / 'a' / 'tables')) == {f'a_b.{kind}' for kind in ('md', 'csv', 'tex', 'json')}
  assert 'positions is left out: no arm drafts tokens.\n' in done.stdout


@pytest.mark.parametrize('arguments, words', [
    ([], 'RUN is missing'),
    (['a', 'b'], '--output is missing: several runs'),
    (['a', '--temperature=1'], '--temperature means nothing here'),
    (['a', '--output=x'], 'a/run.json cannot be read'),
])
def test_the_command_refuses(tmp_path, arguments, words):
  done = command(*arguments)
  assert done.returncode == 2 and words in done.stderr and done.stderr.count('\n') == 1


def test_figures_are_written(found, tmp_path, monkeypatch):
  """In both kinds, and in the same bytes for the same summaries."""
  monkeypatch.setattr(figures, 'FIGURES', {'figure1': figures.figure1, 'positions': figures.positions})
  for folder in ('a', 'b'):
    assert figures.write(found, tmp_path / folder, ['typical']) == []
  for name in figures.FIGURES:
    assert (tmp_path / 'a' / f'{name}.png').read_bytes().startswith(b'\x89PNG')
    assert '<svg' in (tmp_path / 'a' / f'{name}.svg').read_text()
  for path in (tmp_path / 'a').iterdir():
    assert path.read_bytes() == (tmp_path / 'b' / path.name).read_bytes(), path.name


def test_figures_of_nothing_are_left_out(found, tmp_path):
  nothing = only(found, lambda row: row['family'] == 'plain')
  assert figures.write(nothing, tmp_path) == [
      'figure1 is left out: no answers have scores that compare with those of plain or SpS and differ from them.',
      'delta_grid is left out: there are no arms of cactus.',
      'kl_front is left out: no arm has a ledger in which anything is spent.',
      'wall_time is left out: no arm has a time that compares with that of plain or SpS.',
      'positions is left out: no arm drafts tokens.']
  assert list(tmp_path.iterdir()) == []
  assert isinstance(figures.figure1(found[:1]), str), 'no scores'
  assert isinstance(figures.delta_grid(only(found, lambda row: row['family'] != 'cactus')), str)
  free = [task | {'arms': [row | {'kl_per_token': kl} for row in task['arms']]}
          for task in found for kl in (None, {'value': 0.0, 'interval': None})]
  assert isinstance(figures.kl_front(free), str)


def test_unknown_arms_and_a_missing_matplotlib_are_refused(found, tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="--arms: 'cactus' is no arm that drafts; there are cactus delta=0.5, cactus"):
    figures.write(found, tmp_path, ['exact', 'cactus'])
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='file cannot be written'):
    figures.write(found, tmp_path / 'file')
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r'matplotlib is missing.*pip install -e \.\[plot\]'):
    figures.write(found, tmp_path)


def points(axis):
  """[(label, [[x, y]])] of the lines of an axis that have markers."""
  return [(line.get_label(), line.get_xydata().tolist()) for line in axis.get_lines() if line.get_marker() in 'os^*']


@pytest.mark.parametrize('error', [0.0, None])
def test_figure1_leaves_out_panels_in_which_no_score_differs(found, error):
  """As where nothing is solved: the points would all lie on the line of the reference."""
  same = {'value': 0.0, 'interval': None, 'standard_error': error}

  def but(kept):
    """Summaries in which only arms of one m and family differ from the reference."""
    return [task | {'arms': [
      row if (row['num_draft'], row['family']) == kept or not row['score_vs_reference']
      else row | {'score_vs_reference': same} for row in task['arms']]} for task in found]

  assert isinstance(figures.figure1(but(None)), str)
  assert [axis.get_title() for axis in figures.figure1(but((3, 'cactus'))).axes] == ['gsm8k, m = 3']


def test_figure1_is_in_sigmas(found):
  axes = figures.figure1(found).axes
  assert [axis.get_title() for axis in axes] == ['gsm8k, m = 2', 'gsm8k, m = 3']
  rows = {(row['arm'], row['num_draft']): row for row in found[1]['arms']}
  for axis, m in zip(axes, (2, 3)):
    [curve] = [xy for label, xy in points(axis) if label == 'cactus, by delta']
    for (x, y), arm in zip(curve, ('cactus delta=0.5', 'cactus delta=1')):
      against = rows[arm, m]['score_vs_reference']
      assert x == pytest.approx(100 * rows[arm, m]['acceptance_rate']['value'])
      assert y == pytest.approx(against['value'] / against['standard_error'])
      assert against['value'] == pytest.approx(rows[arm, m]['score']['value'] - rows['plain', 0]['score']['value'])


def test_positions_are_shares_of_rounds(found):
  """Of all rounds, and of those that get so far; the arm of a family that keeps most, unless arms are named."""
  task, axes = found[0], figures.positions(found[:1]).axes
  rows = {row['arm']: row['sums'] for row in task['arms']}
  best = max(('cactus delta=0.5', 'cactus delta=1'), key=lambda arm: sum(rows[arm]['accepted_at']) / rows[arm]['calls'])
  for axis, among in zip(axes, ('calls', 'tested_at')):
    lines = [line.get_ydata().tolist() for line in axis.get_lines()]
    expected = [(100 * np.array(rows[arm]['accepted_at']) / np.array(rows[arm][among])).tolist()
                for arm in ('exact', best, 'typical')]
    np.testing.assert_allclose(lines, expected)
  assert len(figures.positions(found[:1], ['cactus delta=0.5', 'cactus delta=1']).axes[0].get_lines()) == 2


def test_wall_time_has_a_bar_for_each_arm(found):
  [first, second] = figures.wall_time(found).axes
  for axis, task in ((first, found[0]), (second, found[1])):
    widths = sorted(bar.get_width() for bar in axis.patches)
    np.testing.assert_allclose(widths, sorted(row['speed_up']['value'] for row in task['arms'] if row['speed_up']))
  assert [name.get_text() for name in first.get_yticklabels()] == [
      'SpS', 'cactus delta=0.5', 'cactus delta=1', 'typical']


def test_an_arm_with_fewer_numbers_or_without_a_time():
  rows = [tables_test.answer(doc, arm, seconds=float(arm != 'topk')) for doc in range(3)
          for arm in ('plain', 'typical', 'typical epsilon=0.1', 'topk')]
  [axis] = figures.wall_time([tables.summarize('gsm8k', rows)]).axes
  assert [name.get_text() for name in axis.get_yticklabels()] == ['typical', 'typical epsilon=0.1']


def test_delta_grid_has_a_line_for_each_m(found):
  figure = figures.delta_grid(found)
  titled = {axis.get_title(): axis for axis in figure.axes if axis.get_title()}
  assert titled.keys() == {'chat', 'gsm8k'} and len(figure.axes) == 3, 'chat has no scores'
  lines = [xy for axis in figure.axes if axis.get_ylabel().startswith('AL') for _, xy in points(axis)]
  assert [len(line) for line in lines] == [2, 2, 2], 'chat has one m, gsm8k two'


@pytest.mark.parametrize('draw', [figures.delta_grid, figures.kl_front])
def test_no_line_joins_arms_of_other_documents(draw):
  """The arm in the middle lacks a document: it is pale, and the line goes by. Of another m, all lack one."""
  rows = [tables_test.answer(doc, f'cactus delta={delta}', m, kl=delta, accepted_at=[3, 1, 0][:m],
                             tested_at=[5, 3, 1][:m])
          for m in (2, 3) for delta in (0.25, 0.5, 1) for doc in range(2) if (delta, doc) != (0.5, 1) and doc + m < 4]
  rows.append(tables_test.answer(0, 'cactus_exact delta=1', kl=0.4))
  axes = draw([tables.summarize('gsm8k', rows)]).axes
  looks = [(len(line.get_xydata()), line.get_linestyle() != 'None', line.get_alpha())
           for axis in axes if axis.get_ylabel().startswith('AL') for line in axis.get_lines()
           if line.get_marker() not in ('None', '_', '')]
  pale = 1, False, figures.PALE
  assert sorted(looks, key=str) == [pale, pale, (2, True, None), (3, True, None)]


@pytest.mark.parametrize('cheap, dear', [(0.085, 0.115), (0.05, 0.12), (0.04, 0.17), (0.001, 0.4)])
def test_nats_can_be_read_off(cheap, dear):
  """Whether they lie near each other, where a logarithm would have one tick, or far apart."""
  rows = [tables_test.answer(doc, f'clamp tau={tau}', kl=10 * kl, accepted_at=[3, 1], tested_at=[5, 3])
          for tau, kl in ((1, cheap), (2, dear)) for doc in range(3)]
  figure = figures.kl_front([tables.summarize('gsm8k', rows)])
  figure.canvas.draw()
  [axis] = figure.axes
  low, high = axis.get_xlim()
  labelled = [tick.get_loc() for tick in axis.xaxis.get_major_ticks() if tick.label1.get_text()]
  assert sum(low <= place <= high for place in labelled) >= 2
  assert axis.get_xscale() == ('log' if dear > 4 * cheap else 'linear')


def names(axis):
  return [text for text in axis.texts if text.get_text()]


@pytest.mark.parametrize('draw', [figures.figure1, figures.kl_front, figures.delta_grid, figures.positions])
def test_names_do_not_overlap(draw):
  """Of 14 arms that keep nearly the same and cost nearly the same."""
  rng, rows = np.random.default_rng(9), []
  arms = [f'{rule}={number / 4:g}' for rule in ('cactus delta', 'clamp tau') for number in range(1, 7)]
  for (i, arm), doc in itertools.product(enumerate(['plain', 'exact', 'typical', *arms]), range(40)):
    calls = int(rng.integers(10, 20))
    kept = {} if arm == 'plain' else {'accepted_at': [int(rng.binomial(calls, 0.5 + 0.02 * i))], 'tested_at': [calls]}
    rows.append(tables_test.answer(doc, arm, 1, score=float(rng.random() < 0.5), verifier_calls=calls,
                                   kl=0.1 + 0.02 * i, **kept))
  figure = draw([tables.summarize('gsm8k', rows)])
  renderer = figure.canvas.get_renderer()
  for axis in figure.axes:
    assert len(names(axis)) >= 2
    for one, other in itertools.combinations([text.get_window_extent(renderer) for text in names(axis)], 2):
      assert not one.padded(-1).overlaps(other.padded(-1))


def test_names_of_lines_are_moved_apart_as_little_as_needed():
  assert figures._apart([1, 20, 40], 10) == [1, 20, 40]
  assert figures._apart([10, 10], 4) == [8, 12]
  assert figures._apart([0, 1, 2, 30], 10) == [-9, 1, 11, 30]
  values = sorted(np.random.default_rng(10).uniform(0, 100, size=12).tolist())
  moved = figures._apart(values, 5)
  assert min(np.diff(moved)) > 5 - 1e-9 and np.mean(moved) == pytest.approx(np.mean(values))
