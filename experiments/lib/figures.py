"""Figures of tabled answers, from the summaries of `tables.summarize`: mostly a panel for each task and m.

Families of rules differ by marker and line, not by colour alone, and points and lines are named where they stand.
"""

import importlib.util
import itertools
import math
import os

from cactus_jax import files
from lib import tables

DPI = 150
RC = {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.titlesize': 9.5,
      'axes.titleweight': 'bold', 'legend.frameon': False, 'hatch.linewidth': 0.6, 'svg.hashsalt': 'cactus_jax'}
# Colour, marker and line of a family; those that are not here take what follows, in the order of their names.
STYLES = {'exact': ('black', '*', '-'), 'cactus': ('#1a8a3a', 'o', '-'), 'clamp': ('#1f5fbf', 's', '--'),
          'typical': ('#a8620c', '^', ':')}
OTHERS = (('#7a5195', 'D', '-.'), ('#c0392b', 'v', (0, (5, 1))), ('#008b95', 'P', (0, (3, 1, 1, 1))),
          ('#d62d8a', 'X', (0, (1, 1))), ('#555555', '<', (0, (7, 2))), ('#8c6d31', '>', (0, (3, 1, 1, 1, 1, 1))),
          ('#3d3d8f', 'h', (0, (2, 2))), ('#6b8e23', 'd', (0, (6, 1, 1, 1))), ('#999999', 'p', (0, (4, 3))))
LINES, HATCHES = ('-', '--', ':', '-.'), ('', '/////', 'xxxxx', '.....')  # of one m, the next, ...
MOST_LINES = 6  # in a panel of positions, unless arms are named
SMALL = 7.5  # points, text inside panels
PALE = 0.4  # opacity of arms with fewer answers than others of as many drafted tokens, which no line joins


def write(found, folder, arms=None) -> list[str]:
  """Writes every figure as .png and .svg.

  Args: found, summaries; arms, names of those in the figure of positions.
  Returns: for each figure that is left out, a line with the reason.
  Raises: ValueError where matplotlib is missing, an arm is unknown or nothing can be written.
  """
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError('matplotlib is missing, which draws the figures: pip install -e .[plot]. The tables are written.')
  import matplotlib

  check_arms(found, arms)
  left_out = []
  for name, draw in FIGURES.items():
    with matplotlib.rc_context(RC):
      figure = draw(found, arms) if draw is positions else draw(found)
      if isinstance(figure, str):
        left_out.append(f'{name} is left out: {figure}.')
        continue
      try:
        for kind, options in (('png', {'dpi': DPI}), ('svg', {'metadata': {'Date': None}})):
          with files.new_file(os.path.join(folder, f'{name}.{kind}'), 'wb') as file:
            figure.savefig(file, format=kind, **options)
      except OSError as error:
        raise ValueError(f'{folder} cannot be written: {error}') from None
  return left_out


def check_arms(found, arms):
  """Raises ValueError for a name that no arm has which drafts; None for no names."""
  known = {row['arm'] for task in found for row in task['arms'] if row['num_draft']}
  for name in arms or ():
    if name not in known:
      raise ValueError(f'--arms: {name!r} is no arm that drafts; there are {", ".join(sorted(known))}.')


# Figures: each returns one, or why there is none.


def figure1(found):
  """Score against acceptance, per task and m: what does keeping more cost?

  y is the score less that of the verifier alone (of SpS where there is none), in units of sigma: the standard error of
  this very difference, which is the standard deviation of the mean paired difference over resamples of the documents,
  for each arm its own. In the band, |y| < 2, a difference is not told from luck.
  """

  def place(row):
    against = row['score_vs_reference']
    if not against or not row['acceptance_rate'] or not (against['standard_error'] or against['value'] == 0):
      return None
    return 100 * row['acceptance_rate']['value'], against['value'] / (against['standard_error'] or 1)

  styles, labels, ends = _styles(found), {}, {}
  # Where no document tells any arm from the reference all would lie on its line: no panel.
  figure, panels = _panels(found, lambda row: place(row) and row['score_vs_reference']['standard_error'])
  if not panels:
    return 'no answers have scores that compare with those of plain or SpS and differ from them'
  for axis, task, rows in panels:
    labels[axis] = _curves(axis, rows, place, styles)
    axis.margins(0.15)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -2.6), max(high, 2.6))
    axis.axhspan(-2, 2, color='0.93', zorder=0)
    axis.axhline(0, color='black', linewidth=1, zorder=1)
    ends[axis] = [(0, _reference(task), 'black'), (2, '+2σ', '0.4'), (-2, '−2σ', '0.4')]
    axis.set_xlabel('acceptance, %')
    axis.set_ylabel(f'score less that of {_reference(task)}, σ')
  return _finished(figure, labels, ends)


def delta_grid(found):
  """Score (± a standard error) and AL (95 % interval) against delta: a line for each family of Cactus and each m."""
  is_cactus = lambda row: row['family'].startswith('cactus') and row['numbers'].get('delta', -1) >= 0
  tasks = [task for task in found if any(map(is_cactus, task['arms']))]
  if not tasks:
    return 'there are no arms of cactus'
  styles, ends = _styles(found), {}
  is_solved = lambda task: task['scored'] and any(row['score']['value'] for row in task['arms'])
  fields = ['score'] * any(map(is_solved, tasks)) + ['accepted_len']
  figure, axes = _figure(len(fields), len(tasks), 4.4, 2.8)
  for (i, field), (j, task) in itertools.product(enumerate(fields), enumerate(tasks)):
    axis, lines = axes[i][j], {}
    if field == 'score' and not is_solved(task):
      axis.remove()
      continue
    for row in sorted(filter(is_cactus, task['arms']), key=lambda row: row['numbers']['delta']):
      lines.setdefault((row['num_draft'], row['family']), []).append(row)
    drafts, ends[axis] = sorted({m for m, _ in lines}), []
    for row in task['arms']:
      if row['family'] == 'exact' and row['num_draft'] in drafts or row['family'] == 'plain' and field == 'score':
        value, m = _with_bar(row, field)[0], row['num_draft']
        axis.axhline(value, color='0.4', linewidth=1, linestyle=LINES[drafts.index(m) % 4] if m else (0, (1, 4)))
        ends[axis].append((value, f'SpS, m = {m}' if m else 'plain', '0.3'))
    for (m, family), rows in lines.items():
      colour, marker, _ = styles[family]
      nth = drafts.index(m)
      shift = 1.03 ** (nth - (len(drafts) - 1) / 2)  # so that bars do not hide each other
      beside = [row for row in task['arms'] if row['num_draft'] == m]
      for group, look in _by_answers(rows, LINES[nth % 4], beside):
        values, bars = zip(*(_with_bar(row, field) for row in group))
        axis.errorbar([row['numbers']['delta'] * shift for row in group], values, list(zip(*bars)), color=colour,
                      marker=marker, markersize=5, markerfacecolor='white' if nth % 2 else colour, capsize=2.5,
                      linewidth=1.4, elinewidth=0.8, **look)
      ends[axis].append((_with_bar(rows[-1], field)[0], f'{family}, m = {m}', colour))
    _delta_axis(axis, sorted({row['numbers']['delta'] for rows in lines.values() for row in rows}))
    axis.set_title(task['task'] if i == 0 or not is_solved(task) else '')
    axis.set_xlabel('delta, nats')
    axis.set_ylabel('score, %' if field == 'score' else 'AL, tokens a round')
  return _finished(figure, {}, ends)


def kl_front(found):
  """AL (95 % interval) against what an arm spends, per task and m: at equal nats, which family keeps most?"""

  def place(row):
    kl, kept = row['kl_per_token'], row['accepted_len']
    return (kl['value'], kept['value']) if kl and kept and 0 < kl['value'] < math.inf else None

  styles, labels, ends = _styles(found), {}, {}
  figure, panels = _panels(found, place)
  if not panels:
    return 'no arm has a ledger in which anything is spent'
  for axis, _, rows in panels:
    labels[axis] = _curves(axis, rows, place, styles)
    for row in filter(place, rows):
      axis.plot([place(row)[0]] * 2, _interval(row['accepted_len']), color=styles[row['family']][0], linewidth=0.9)
    for row in rows:
      if row['family'] == 'exact':
        axis.axhspan(*_interval(row['accepted_len']), color='0.88', zorder=0)
        axis.axhline(row['accepted_len']['value'], color='black', linewidth=1.2, zorder=1)
        ends[axis] = [(row['accepted_len']['value'], 'SpS', 'black')]
    axis.margins(0.12)
    spent = [place(row)[0] for row in filter(place, rows)]
    if max(spent) > 4 * min(spent):  # else a logarithmic axis would have a single tick, or none
      axis.set_xscale('log')
      low, high = axis.get_xlim()
      axis.xaxis.get_major_locator().set_params(subs=(1,) if high > 100 * low else (1, 2, 5))
      axis.xaxis.set_major_formatter('{x:g}')
      axis.xaxis.set_minor_formatter('')
    axis.grid(alpha=0.2)
    axis.set_xlabel('KL from the verifier, nats a token')
    axis.set_ylabel('AL, tokens a round')
  return _finished(figure, labels, ends)


def wall_time(found):
  """Tokens a second over those of the verifier alone (of SpS of the same m where there is none); 95 % intervals."""
  is_timed = lambda row: row['speed_up'] and math.isfinite(row['speed_up']['value'])
  tasks = [(task, rows) for task in found if (rows := list(filter(is_timed, task['arms'])))]
  if not tasks:
    return 'no arm has a time that compares with that of plain or SpS'
  every = sorted((row for _, rows in tasks for row in rows),
                 key=lambda row: (row['family'] != 'exact', row['family'], tuple(row['numbers'].values()), row['arm']))
  names, drafts = list(dict.fromkeys(row['arm'] for row in every)), sorted({row['num_draft'] for row in every})
  columns, thick = min(3, len(tasks)), 0.8 / len(drafts)
  height = 0.17 * len(names) * (len(drafts) + 0.6) + 0.9
  figure, axes = _figure(-(-len(tasks) // columns), columns, 3.2 + 1 / columns, height, sharey=True)
  for axis, (task, rows) in itertools.zip_longest(itertools.chain(*axes), tasks, fillvalue=(None, None)):
    if task is None:
      axis.remove()
      continue
    for row in rows:
      i, value, interval = drafts.index(row['num_draft']), row['speed_up']['value'], _interval(row['speed_up'])
      y = names.index(row['arm']) + (i - (len(drafts) - 1) / 2) * thick
      axis.barh(y, value, 0.9 * thick, color='white' if i % 2 else '0.85', edgecolor='black', linewidth=0.6,
                hatch=HATCHES[i % 4], label=f'm = {row["num_draft"]}')
      axis.plot(interval, [y, y], color='black', linewidth=1.5)
      axis.annotate(f'{value:.2f}', (interval[1], y), (3, 0), textcoords='offset points', va='center', fontsize=SMALL)
    axis.axvline(1, color='black', linewidth=1, linestyle='--')
    axis.set_yticks(range(len(names)), [_name(name) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.margins(x=0.15)
    axis.set_title(task['task'])
    axis.set_xlabel(f'tokens a second over those of {_reference(task)}')
  return _finished(figure, {}, {})


def positions(found, arms=None):
  """How often the token at each drafted position is kept: of all rounds, and of those that get so far, per task and m.

  arms: names; by default SpS and, of every other family, the arm that keeps most, at most MOST_LINES in all.
  """
  styles, ends, chosen = _styles(found), {}, []
  for task, m, rows in _cells(found):
    rows = [row for row in rows if row['sums']['calls'] and (arms is None or row['arm'] in arms)]
    if arms is None:
      best = {row['family']: row for row in sorted(rows, key=lambda row: row['accepted_len']['value'])}
      rows = [best[family] for family in styles if family in best][:MOST_LINES]
    if rows:
      chosen.append((task, m, rows))
  if not chosen:
    return 'no arm drafts tokens'
  figure, axes = _figure(len(chosen), 2, 4.4, 2.7)
  for pair, (task, m, rows) in zip(axes, chosen):
    for axis, is_conditional in zip(pair, (False, True)):
      ends[axis] = []
      for row in rows:
        colour, marker, line = styles[row['family']]
        among = row['sums']['tested_at'] if is_conditional else [row['sums']['calls']] * m
        rates = [100 * kept / all if all else math.nan for kept, all in zip(row['sums']['accepted_at'], among)]
        nth = [other['arm'] for other in rows if other['family'] == row['family']].index(row['arm'])
        axis.plot(range(1, m + 1), rates, color=colour, marker=marker, markersize=5, linewidth=1.3,
                  linestyle=LINES[nth % 4] if nth else line, fillstyle=('full', 'none', 'left', 'top')[nth % 4],
                  markerfacecoloralt='white')
        ends[axis] += [(rate, _name(row['arm']), colour) for rate in rates if not math.isnan(rate)][-1:]
      axis.set_title(f'{task["task"]}, m = {m}: ' + ('rounds that get so far' if is_conditional else 'all rounds'))
      axis.set_xlabel('drafted position')
      axis.set_ylabel('kept, %')
      axis.xaxis.get_major_locator().set_params(integer=True)
      axis.grid(alpha=0.2)
  return _finished(figure, {}, ends)


FIGURES = {'figure1': figure1, 'delta_grid': delta_grid, 'kl_front': kl_front, 'wall_time': wall_time,
           'positions': positions}


# Parts.


def _name(arm):
  return 'SpS' if arm == 'exact' else arm


def _reference(task):
  return _name(task['reference'])


def _styles(found):
  """{family: (colour, marker, line)}, SpS first."""
  families = {row['family'] for task in found for row in task['arms'] if row['num_draft']}
  others = sorted(families - STYLES.keys())
  return {family: style for family, style in STYLES.items() if family in families} | dict(
      zip(others, itertools.cycle(OTHERS)))


def _interval(estimated):
  """Both ends; the value itself where nothing was resampled."""
  return estimated['interval'] or [estimated['value']] * 2


def _with_bar(row, field):
  """(value, (length of the bar below, above)) of a score in percent, or of an estimate."""
  value = row[field]['value']
  if field == 'score':
    error = 100 * (tables.standard_error(row[field])[0] or 0)
    return 100 * value, (error, error)
  low, high = _interval(row[field])
  return value, (value - low, high - value)


def _cells(found):
  """(task, m, the arms that draft m tokens), for every task and m that there is."""
  for task in found:
    for m in sorted({row['num_draft'] for row in task['arms']} - {0}):
      yield task, m, [row for row in task['arms'] if row['num_draft'] == m]


def _figure(rows, columns, width, height, **options):
  """A figure and its axes, a list for each row; width and height of a panel in inches."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure((width * columns, height * rows + 0.3), dpi=DPI, layout='constrained')
  figure.get_layout_engine().set(wspace=0.03, hspace=0.03)
  FigureCanvasAgg(figure)
  return figure, figure.subplots(rows, columns, squeeze=False, **options).tolist()


def _panels(found, place):
  """A figure, a row for each task and a column for each m, and (axis, task, arms) where arms have a place."""
  cells = [cell for cell in _cells(found) if any(map(place, cell[2]))]
  tasks, drafts = list(dict.fromkeys(task['task'] for task, _, _ in cells)), sorted({m for _, m, _ in cells})
  if not cells:
    return None, []
  figure, axes = _figure(len(tasks), len(drafts), 4.6, 3.6)
  panels, unused = [], {axis for row in axes for axis in row}
  for task, m, rows in cells:
    axis = axes[tasks.index(task['task'])][drafts.index(m)]
    axis.set_title(f'{task["task"]}, m = {m}')
    panels.append((axis, task, rows))
    unused.remove(axis)
  for axis in unused:
    axis.remove()
  return figure, panels


def _by_answers(rows, line, beside):
  """(arms, how to draw them): those with as many answers as any beside them joined by a line, the others pale.

  These have other documents, and what lies between easy documents and hard ones is no effect of a number.
  """
  most = max(row['answers'] for row in beside)
  whole, fewer = ([row for row in rows if (row['answers'] < most) == is_fewer] for is_fewer in (False, True))
  looks = (whole, {'linestyle': line}), (fewer, {'linestyle': '', 'alpha': PALE})
  return [(group, look) for group, look in looks if group]


def _curves(axis, rows, place, styles):
  """Draws the arms that have a place, a family joined in the order of its numbers; [(x, y, text, colour)] of each."""
  labels = []
  for family, (colour, marker, line) in styles.items():
    own = sorted((row for row in rows if row['family'] == family and place(row)),
                 key=lambda row: tuple(row['numbers'].values()))
    if own:
      named = ', '.join(own[0]['numbers'])
      label = f'{family}, by {named}' if len(own) > 1 else None
      for group, look in _by_answers(own, line, rows):
        axis.plot(*zip(*map(place, group)), color=colour, marker=marker, linewidth=1.2, zorder=3,
                  markersize=9 if marker == '*' else 5.5, label=label, **look)
        label = None  # once in the legend
    for row in own:
      text = ', '.join(f'{number:g}' for number in row['numbers'].values()) if len(own) > 1 else _name(row['arm'])
      labels.append((*place(row), text, colour))
  return labels


def _delta_axis(axis, deltas):
  """A logarithmic axis, linear below the smallest delta if there is 0, with a tick at each delta that has room."""
  above = [delta for delta in deltas if delta > 0]
  if above and above == deltas:
    axis.set_xscale('log')
  elif above:
    axis.set_xscale('symlog', linthresh=above[0])
  ticks = deltas[:1]
  for delta in deltas[1:]:
    if ticks[-1] == 0 or delta >= 1.3 * ticks[-1]:
      ticks.append(delta)
  axis.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
  axis.set_xticks([], minor=True)
  axis.grid(alpha=0.2)


def _finished(figure, labels, ends):
  """The figure with its legend, its points named and its lines named at their right ends.

  labels: {axis: [(x, y, text, colour)]}; ends: {axis: [(y, text, colour)]}.
  """
  handles = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
  if handles:
    figure.legend(handles.values(), handles.keys(), loc='outside lower center', handlelength=3.5,
                  ncols=min(len(handles), max(2, int(figure.get_figwidth() / 1.7))))
  notes = {axis: [axis.annotate(text, (1, y), (4, 0), xycoords=('axes fraction', 'data'), textcoords='offset points',
                                va='center', color=colour, fontsize=SMALL)
                  for y, text, colour in sorted(own, key=lambda end: end[0])] for axis, own in ends.items()}
  figure.draw_without_rendering()  # what follows needs to know where everything is
  figure.set_layout_engine('none')
  points = 72 / figure.dpi
  for axis, own in notes.items():
    heights = [axis.transData.transform((0, note.xy[1]))[1] * points for note in own]
    for note, before, after in zip(own, heights, _apart(heights, 1.15 * SMALL)):
      note.set_position((4, after - before))
  for axis, own in labels.items():
    _name_points(figure, axis, own)
  return figure


def _apart(values, distance):
  """Sorted numbers moved as little as keeps them a distance apart: groups that collide are spread about their mean."""
  groups = []
  for value in values:
    groups.append([value])
    while len(groups) > 1 and _centre(groups[-1]) - _centre(groups[-2]) < distance * (
        len(groups[-1]) + len(groups[-2])) / 2:
      groups[-2:] = [groups[-2] + groups[-1]]
  return [_centre(group) + distance * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))]


def _centre(group):
  return sum(group) / len(group)


def _name_points(figure, axis, labels):
  """Writes each label beside its point, in the nearest place that is free; with a line to the point if that is far."""
  import numpy as np
  from matplotlib.transforms import Bbox

  scale, renderer, frame = figure.dpi / 72, figure.canvas.get_renderer(), axis.get_window_extent()
  taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale)
           for x, y in axis.transData.transform([label[:2] for label in labels])]
  for line in axis.get_lines():  # along which nothing is to be written
    for (x, y), (to_x, to_y) in itertools.pairwise(line.get_transform().transform(line.get_xydata())):
      steps = max(2, int(math.hypot(to_x - x, to_y - y) / (3 * scale)))
      taken += [Bbox.from_bounds(*(at - scale), 2 * scale, 2 * scale)
                for at in np.linspace((x, y), (to_x, to_y), steps)]
  for x, y, text, colour in labels:
    note = axis.annotate(text, (x, y), (0, 0), textcoords='offset points', color=colour, fontsize=SMALL, ha='center',
                         va='center')
    box, best = note.get_window_extent(renderer), None
    for far, angle in itertools.product((1, 1.7, 2.6, 3.6, 4.8), np.arange(16) * np.pi / 8):
      dx, dy = (far * 8 * scale + box.width / 2) * np.cos(angle), (far * 7 * scale + box.height / 2) * np.sin(angle)
      moved = box.translated(dx, dy)
      outside = not (frame.x0 <= moved.x0 and moved.x1 <= frame.x1 and frame.y0 <= moved.y0 and moved.y1 <= frame.y1)
      cost = 100 * outside + sum(moved.overlaps(other) for other in taken)
      if best is None or cost < best[0]:
        best = cost, far, dx, dy, moved
      if not cost:
        break
    _, far, dx, dy, moved = best
    note.set_position((dx / scale, dy / scale))
    taken.append(moved.padded(scale))
    if far > 2:  # a line from the edge of the text that is nearest
      edge = [np.clip(0, at - size / 2, at + size / 2) / scale for at, size in ((dx, box.width), (dy, box.height))]
      axis.annotate('', (x, y), edge, textcoords='offset points', zorder=2, arrowprops={
          'arrowstyle': '-', 'color': colour, 'linewidth': 0.5, 'shrinkA': 1, 'shrinkB': 2})
