"""The front: what each rule keeps at each cost in nats, exactly, on the laws of a real pair that are recorded once.

  python experiments/front.py                                  # a quarter of an hour and 1 GB of disk on 2 CPU cores
  python experiments/front.py --draft=lookup --laws=/tmp/laws --rows=/tmp/front.jsonl --figure=/tmp/front.png

A fixed list of prompts is decoded losslessly at two settings of the sampling, and what was drafted, by which laws, and
the verifier's laws are kept on disk, a file for each prompt. Every rule is then judged on them over a grid of its
number by `ledger.expected`, without decoding again, and each figure is a row on disk before the next is computed: the
same command again goes on where it stopped. A picture and tables at equal cost follow.

The default draft, the verifier without its last layer, is no draft to speed anything up: it stands in for a small model
that is well matched, as untrained exits below it are not.
"""

import dataclasses
import functools
import importlib.util
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from lib import flags as common
from lib import record
from tqdm.auto import tqdm

import cactus_jax as cj
from cactus_jax import files, ledger, records

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results')
DEFAULT_LAWS = os.path.join(os.path.dirname(common.DEFAULT_CACHE), 'front')
_LAWS = flags.DEFINE_string('laws', DEFAULT_LAWS, 'Folder of the recorded laws; what is there is not recorded again.')
_ROWS = flags.DEFINE_string('rows', os.path.join(RESULTS, 'front.jsonl'), 'JSONL file to append the figures to.')
_FIGURE = flags.DEFINE_string('figure', os.path.join(RESULTS, 'front.png'), 'The picture; empty: none.')
_NUM_PROMPTS = flags.DEFINE_integer('num_prompts', 24, 'Prompts to record.', lower_bound=1, upper_bound=24)
_DENSE_ROUNDS = flags.DEFINE_integer(
    'dense_rounds', 144, 'Rounds judged, spread evenly over the prompts, where laws hold the whole vocabulary.',
    lower_bound=1)

SETTINGS = {
    'truncated': cj.SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    'full': cj.SamplingParams(temperature=1.0),
}
TITLES = {'truncated': 'T 0.6, top-k 20, top-p 0.95', 'full': 'T 1, whole vocabulary'}
TARGETS = (0.01, 0.03, 0.1)  # nats a token, for the tables
CALIBRATED = {'clamp': cj.Clamp, 'cactus': cj.Cactus}

PROMPTS = [
    'Why do leaves change colour in autumn?',
    'Write a short story about a lighthouse keeper who finds a letter.',
    'How do I remove a coffee stain from a shirt?',
    'Explain what a prime number is, with three examples.',
    'Write a Python function that counts the vowels in a string.',
    'What should I pack for a weekend in the mountains?',
    'Describe the water cycle in four sentences.',
    'Give me a slogan for a small bakery.',
    'Translate into Spanish: Where is the nearest train station?',
    'What are the advantages of working from home?',
    'Write a polite email that asks for a later deadline.',
    'How does a refrigerator keep food cold?',
    'Tell me a joke about a cat and a piano.',
    'What is 17 times 23? Show the steps.',
    'Name the planets of the solar system in order.',
    'Compare tea and coffee.',
    'Write a haiku about rain on a tin roof.',
    'Explain supply and demand to a teenager.',
    'What happened in the year 1969?',
    'Give three tips for learning to swim as an adult.',
    'Rewrite more formally: we messed up the order, sorry about that.',
    'Who was Marie Curie?',
    'Suggest a name for a robot that waters plants, and say why.',
    'What is the difference between weather and climate?',
]


class Curve(NamedTuple):
  """A rule with one number, and the numbers it is judged at."""

  make: Callable[[float, Any], Any]  # (number, recorded rounds) -> rule
  numbers: dict[str, tuple]  # by setting


def _curve(make, *, truncated, full=None):
  return Curve(make, {'truncated': tuple(truncated), 'full': tuple(truncated if full is None else full)})


def _steps(low, high, count=10):
  return [float(f'{x:.3g}') for x in np.geomspace(low, high, count)]


def _by_class(cls, **grids):
  return _curve(lambda number, rounds: cls(number), **grids)


def _published(cls, **grids):
  return _curve(lambda number, rounds: cls(number, published=True), **grids)


# Every rule of RULES but logit_margin, which is made for temperature 0, where all the others are exact match. By their
# numbers most curves run from 0.001 to 0.3 nats a token; there are fewer where judging a whole vocabulary is slow.
CURVES = {
    'exact': _curve(lambda number, rounds: cj.Exact(), truncated=[0]),
    # All that a rule can keep which emits nothing that the verifier cannot.
    'ceiling': _by_class(cj.Clamp, truncated=[80]),
    'clamp': _by_class(cj.Clamp, truncated=_steps(0.18, 12, 12), full=_steps(0.14, 3.5, 12)),
    'clamp_by_position': _curve(lambda tau, rounds: cj.Clamp(ledger.prices_by_position(tau, *rounds)),
                                truncated=_steps(0.1, 6, 16), full=_steps(0.08, 2, 12)),
    'cactus': _by_class(cj.Cactus, truncated=_steps(1.5e-3, 15, 10), full=_steps(5e-7, 0.04, 8)),
    'cactus_exact': _by_class(cj.CactusExact, truncated=_steps(1.5e-3, 5, 10), full=_steps(1.5e-7, 1.5e-3, 8)),
    'lenience': _by_class(cj.Lenience, truncated=1 + np.geomspace(0.03, 50, 10), full=1 + np.geomspace(0.03, 10, 10)),
    'mentored': _by_class(cj.Mentored, truncated=_steps(2.3e-3, 3, 10), full=_steps(1e-3, 0.22, 8)),
    'interpolation': _by_class(cj.Interpolation, truncated=_steps(0.03, 0.8, 10), full=_steps(0.0015, 0.23, 10)),
    # Infinite where the draft leaves the verifier's support, and as the one above where that is the whole vocabulary.
    'interpolation_published': _published(cj.Interpolation, truncated=_steps(0.03, 0.8, 4), full=[]),
    'chow': _by_class(cj.Chow, truncated=np.linspace(0, 0.45, 10), full=np.linspace(0.005, 0.635, 10)),
    'diff': _by_class(cj.Diff, truncated=np.linspace(-0.9, 0, 12), full=np.linspace(-0.6, -0.05, 12)),
    'opt': _by_class(cj.OPT, truncated=np.linspace(-1.1, 0.2, 12), full=np.linspace(-1.2, -0.1, 12)),
    'token_v1': _by_class(cj.TokenV1, truncated=np.linspace(-0.9, 0, 10), full=np.linspace(-0.8, 0.04, 12)),
    'token_v2': _by_class(cj.TokenV2, truncated=np.linspace(0, 0.64, 9), full=np.linspace(0, 0.14, 8)),
    'token_v3': _by_class(cj.TokenV3, truncated=np.linspace(0, 0.95, 10), full=np.linspace(0, 0.95, 10)),
    'threshold': _by_class(cj.Threshold, truncated=[0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99],
                           full=[0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97]),
    # Its two numbers are tied as in its defaults.
    'typical': _curve(lambda epsilon, rounds: cj.Typical(epsilon, epsilon**0.5), truncated=_steps(0.001, 1, 8)),
    'top_k': _by_class(cj.TopK, truncated=[1, 2, 3, 4, 5, 6, 8, 12], full=[1, 2, 3, 5, 10, 20, 50]),
    'top_k_published': _published(cj.TopK, truncated=[1, 2, 3, 4, 5, 6, 8, 12], full=[1, 3, 10]),
}


# Recording.


@functools.cache
def _models():
  target = common.verifier()
  draft, draft_tokenizer = common.draft(target)
  tokenizer = cj.load_tokenizer(common.verifier_source())
  return dict(target=target, draft=draft, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)


def made_with() -> dict:
  """What determines the recorded laws, but for prompt and sampling."""
  ours = common.settings()
  names = ('verifier', 'draft', 'num_draft', 'max_new_tokens', 'seed', 'raw')
  return {name: ours[name] for name in names} | common.held()


def write_laws(path, draft, target_probs, settings):
  """Writes recorded rounds so that the file is there as a whole or not at all."""
  mostly_zeros = np.count_nonzero(target_probs) < target_probs.size / 10
  pack = np.savez_compressed if mostly_zeros else np.savez  # packing a whole vocabulary gains a tenth and takes minutes
  try:
    with files.new_file(path, 'wb') as file:
      pack(file, tokens=draft.tokens, probs=draft.probs, num_drafted=draft.num_drafted, target_probs=target_probs,
           settings=json.dumps(settings))
  except OSError as error:
    raise ValueError(f'{path} cannot be written: {error}') from None


def read_laws(path, settings):
  """(`Draft`, target_probs) of a file, or None where there is no whole one. Raises ValueError for other settings."""
  try:
    with np.load(path) as file:
      held = {name: file[name] for name in ('tokens', 'probs', 'num_drafted', 'target_probs', 'settings')}
  except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
    return None
  check_same(path, json.loads(held.pop('settings').item()), settings, '--laws')
  target_probs = held.pop('target_probs')
  return cj.Draft(**held), target_probs


def check_same(path, theirs, ours, flag):
  """Raises ValueError if what a file was made with is not what is wanted here."""
  other = records.differences(theirs, ours)
  if other:
    raise ValueError(f'{path} was made with other settings ({"; ".join(other)}): choose another {flag}.')


def laws_of(index, setting):
  """The rounds of one prompt, from its file or else decoded and put there."""
  sampling = SETTINGS[setting]
  settings = made_with() | {'sampling': dataclasses.asdict(sampling), 'prompt': PROMPTS[index]}
  path = os.path.join(_LAWS.value, f'{setting}-{index:02}.npz')
  rounds = read_laws(path, settings)
  if rounds is None:
    options = {name: settings[name] for name in ('num_draft', 'max_new_tokens', 'seed', 'raw')}
    rounds = cj.record_rounds([PROMPTS[index]], sampling=sampling, **_models(), **options)
    write_laws(path, *rounds, settings)
  return rounds


# Judging.


def compact(draft, target_probs):
  """The same rounds over fewer tokens: at each position those that p or q holds, in their order, then some of neither.

  A rule knows tokens by their probabilities alone, so its figures stay what they were. The law of the bonus token,
  which no rule decides, is left out.
  """
  N, K, V = draft.probs.shape
  target_probs = target_probs[:, :K]
  held = (draft.probs > 0) | (target_probs > 0)
  np.put_along_axis(held, draft.tokens[..., None], True, axis=2)
  width = held.sum(axis=2).max()
  if width == V:
    return draft, target_probs
  order = np.argsort(~held, axis=2, kind='stable')[..., :width]
  rank = np.cumsum(held, axis=2) - 1
  gather = lambda values, at: np.take_along_axis(values, at, axis=2)
  return draft.replace(
      tokens=gather(rank, draft.tokens[..., None])[..., 0].astype(np.int32),
      probs=gather(draft.probs, order),
  ), gather(target_probs, order)


def join(parts):
  """Rounds of several prompts as one, padded to the widest with tokens of probability 0."""
  width = max(target_probs.shape[2] for _, target_probs in parts)
  widen = lambda leaf: leaf if leaf.ndim < 3 else np.pad(leaf, ((0, 0), (0, 0), (0, width - leaf.shape[2])))
  return jax.tree.map(lambda *leaves: jnp.concatenate([widen(leaf) for leaf in leaves]), *parts)


def rounds_of(setting):
  """All rounds of a setting, compact; where they cannot be, about --dense_rounds of them."""
  parts, count = [], _NUM_PROMPTS.value
  for index in tqdm(range(count), desc=f'laws, {setting}', unit='prompt'):
    common.stop_if_interrupted()
    draft, target_probs = compact(*laws_of(index, setting))
    if SETTINGS[setting].top_k == 0:
      N, share = len(draft.tokens), -(-_DENSE_ROUNDS.value // count)
      kept = np.unique(((np.arange(share) + 0.5) * N / share).astype(int))
      draft, target_probs = jax.tree.map(lambda leaf: leaf[kept], (draft, target_probs))
    parts.append((draft, target_probs))
  return join(parts)


def figures(rule, rounds) -> dict:
  """`ledger.expected` with six digits; None for what is infinite."""
  expected = ledger.expected(rule, *rounds)._asdict()
  return {name: float(f'{x:.6g}') if np.isfinite(x) else None for name, x in expected.items()}


class Front:
  """The rows on disk, by (setting, rule, number), and the rows of calibrated numbers, by (setting, rule, nats)."""

  def __init__(self, path, settings):
    self._rows, self._settings = record.Rows(path), settings
    for row in self._rows.done:
      check_same(path, row, settings, '--rows')
    self.rows = list(self._rows.done)

  def points(self, setting, rule):
    """Rows of a curve in the order of the number."""
    own = [row for row in self.rows if (row['setting'], row['rule']) == (setting, rule) and row['number'] is not None]
    return sorted(own, key=lambda row: row['number'])

  def calibrated(self, setting, rule, target):
    """The row of a calibrated number, or None."""
    own = [row for row in self.rows if (row['setting'], row['rule'], row['target']) == (setting, rule, target)]
    return own[0] if own else None

  def missing(self, setting):
    """(rule, number, target) that have no row yet; for calibrated ones the number is None."""
    there = {(row['rule'], row['number']) for row in self.rows if row['setting'] == setting}
    grid = [(rule, float(number), None) for rule, curve in CURVES.items() for number in curve.numbers[setting]]
    wanted = [(rule, None, target) for rule in CALIBRATED for target in TARGETS]
    return [key for key in grid if key[:2] not in there] + [
        key for key in wanted if self.calibrated(setting, key[0], key[2]) is None]

  def fill(self, setting):
    """Computes what is missing, a row at a time."""
    missing = self.missing(setting)
    if not missing:
      return
    rounds = rounds_of(setting)
    for rule, number, target in tqdm(missing, desc=f'rules, {setting}', unit='figure'):
      common.stop_if_interrupted()
      if target is not None:
        number = self._number_for(setting, rule, target, rounds)
      found = {} if number is None else figures(CURVES[rule].make(number, rounds), rounds)
      row = {'setting': setting, 'rule': rule, 'number': number, 'target': target, **found,
             'rounds': len(rounds[0].tokens), **self._settings}
      self._rows.append(row)
      self.rows.append(row)

  def _number_for(self, setting, rule, target, rounds):
    """The number that spends the target, sought near where the curve has it; None where it does not reach so far."""
    points = [row for row in self.points(setting, rule) if row['kl_per_token']]
    nats, numbers = (np.array([row[name] for row in points]) for name in ('kl_per_token', 'number'))
    if not points or not nats[0] <= target <= nats[-1]:
      return None
    guess = float(np.exp(np.interp(np.log(target), np.log(nats), np.log(numbers))))
    for near in (1.03, 1.3, 30.0):  # first where a search is short
      try:
        number, _ = ledger.calibrate(CALIBRATED[rule], *rounds, target, guess / near, guess * near)
        return float(f'{number:.6g}')
      except ValueError:
        if near == 30.0:
          raise


def interpolated(points, target):
  """Acceptance and AL of a curve where it spends the target; the best place if several, None if there is none.

  Between two rows both are taken to be linear in KL, as they are for a rule that takes either number by chance.
  """
  names = ('acceptance_rate', 'accepted_len')
  found = []
  for left, right in zip(points, points[1:]):
    ends = [row['kl_per_token'] for row in (left, right)]
    if None in ends or min(ends) <= 0 or not min(ends) <= target <= max(ends):
      continue
    share = 0.0 if ends[0] == ends[1] else (target - ends[0]) / (ends[1] - ends[0])
    found.append({name: float((1 - share) * left[name] + share * right[name]) for name in names})
  return max(found, key=lambda place: place['accepted_len'], default=None)


# Showing.


def table(front, setting) -> str:
  """Acceptance and AL of every rule at equal nats, and the numbers that spend them."""
  [exact], [ceiling] = front.points(setting, 'exact'), front.points(setting, 'ceiling')
  lines = [f'{TITLES[setting]}: {exact["rounds"]} rounds; acceptance and AL at nats a token, and for some the number',
           f'  {"":26s}' + ''.join(f'{target:>12g}{"":12s}' for target in TARGETS)]
  for rule in CURVES:
    if rule in ('exact', 'ceiling'):
      continue
    cells = []
    for target in TARGETS:
      place = interpolated(front.points(setting, rule), target)
      calibrated = front.calibrated(setting, rule, target)
      number = f'  {calibrated["number"]:<9.3g}' if calibrated and calibrated['number'] else ' ' * 11
      cells.append(f'{place["acceptance_rate"]:6.3f}{place["accepted_len"]:7.3f}{number}' if place else
                   f'{"-":>6s}{"-":>7s}{"":11s}')
    lines.append(f'  {rule:26s}{"".join(cells)}'.rstrip())
  for name, row in (('exact, 0 nats', exact), ('ceiling', ceiling)):
    nats = '' if name != 'ceiling' else f'  at {row["kl_per_token"]:.3g} nats'
    lines.append(f'  {name:26s}{row["acceptance_rate"]:6.3f}{row["accepted_len"]:7.3f}{nats}')
  return '\n'.join(lines)


# colour, line, marker, width; the two families that matter in colours of their own.
STYLES = {
    'clamp': ('#1f5fbf', '-', '', 3.0),
    'clamp_by_position': ('#1f5fbf', ':', '', 1.8),
    'cactus': ('#1a8a3a', '-', '', 3.0),
    'cactus_exact': ('#1a8a3a', ':', '', 1.8),
    'lenience': ('#00a5b5', '-', 'o', 1.0),
    'mentored': ('#7a5195', '-', 's', 1.0),
    'interpolation': ('#d62d8a', '-', '^', 1.0),
    'chow': ('#e08a00', '-', 'v', 1.0),
    'diff': ('#e08a00', '--', 'x', 1.0),
    'opt': ('#e08a00', '-', 'd', 1.0),
    'token_v1': ('#c0392b', '-', '1', 1.0),
    'token_v2': ('#c0392b', '--', '+', 1.0),
    'token_v3': ('#c0392b', '-', '*', 1.0),
    'threshold': ('#8c6d31', '-', 'P', 1.0),
    'typical': ('#555555', '-', 'h', 1.0),
    'top_k': ('#999999', '-', '<', 1.0),
    'top_k_published': ('#999999', '--', '>', 1.0),
}
SHOWN = (1e-3, 0.3)  # nats a token
LABELS = {'clamp': (0.012, (0.38, 0.62)), 'cactus': (0.02, (0.42, 0.07))}  # nats pointed at, and place in the panel


def _pyplot():
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError('matplotlib is missing, which draws the picture: pip install -e .[plot], or pass --figure= for '
                     'none.')
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  return plt


def draw(front, path):
  """The picture: a column for each setting; acceptance rate and AL against nats."""
  plt = _pyplot()
  import PIL.Image  # comes with matplotlib

  with plt.rc_context({'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}):
    figure, axes = plt.subplots(2, len(SETTINGS), figsize=(9, 7.2), sharex=True, layout='constrained')
    handles = {}
    for column, setting in enumerate(SETTINGS):
      for row, name in enumerate(('acceptance_rate', 'accepted_len')):
        handles |= _panel(axes[row, column], front, setting, name)
      axes[0, column].set_title(TITLES[setting], fontweight='bold', fontsize=10)
      axes[1, column].set_xlabel('KL from the verifier, nats a token')
    axes[0, 0].set_ylabel('acceptance rate')
    axes[1, 0].set_ylabel('accepted length (AL), tokens a round')
    figure.legend([handles[rule] for rule in STYLES if rule in handles], [r for r in STYLES if r in handles],
                  loc='outside lower center', ncols=6, frameon=False, fontsize=9)
    whole = io.BytesIO()
    figure.savefig(whole, dpi=130)
    plt.close(figure)
  try:
    PIL.Image.open(whole).convert('RGB').quantize(96).save(path, format='png', optimize=True)  # a third of the size
  except OSError as error:
    raise ValueError(f'{path} cannot be written: {error}') from None


def _panel(axis, front, setting, name):
  """Draws one panel; the handles of its curves by rule."""
  [exact], [ceiling] = front.points(setting, 'exact'), front.points(setting, 'ceiling')
  base, handles, tops = exact[name], {}, []
  for rule, (colour, line, marker, width) in STYLES.items():
    points = [row for row in front.points(setting, rule) if row['kl_per_token']]
    inside = [row[name] for row in points if row['kl_per_token'] <= SHOWN[1]]
    if not inside:
      continue
    tops.append(max(inside))
    # Straight in KL between the points, hence bent on this axis.
    fine = np.linspace(0, len(points) - 1, 40 * (len(points) - 1) + 1)
    along = lambda field: np.interp(fine, np.arange(len(points)), [row[field] for row in points])
    [handles[rule]] = axis.plot(along('kl_per_token'), along(name), color=colour, linestyle=line, marker=marker,
                                markersize=4, markevery=40, linewidth=width, label=rule, zorder=3 if width > 1 else 2)
    if rule in LABELS:
      where, place = LABELS[rule]
      here = np.interp(np.log(where), [np.log(row['kl_per_token']) for row in points], [row[name] for row in points])
      axis.annotate(rule, (where, here), xytext=place, textcoords='axes fraction', color=colour, fontweight='bold',
                    fontsize=11, ha='center', va='center', zorder=4, arrowprops={'arrowstyle': '-', 'color': colour})
  top = max(tops, default=base)
  height = top - base or 1.0
  shown = ceiling[name] <= top + 0.3 * height
  if shown:
    top = max(top, ceiling[name])
    axis.axhline(ceiling[name], color='black', linewidth=1, linestyle='--', zorder=1)
  axis.axhline(base, color='black', linewidth=1.2, zorder=1)
  axis.set_xscale('log')
  axis.set_xlim(*SHOWN)
  axis.set_ylim(base - 0.25 * height, top + 0.08 * height)
  axis.grid(alpha=0.2)
  format = '{:.2f}'.format
  axis.annotate(f'SpS (exact) {format(base)}', (0.02, base), xycoords=('axes fraction', 'data'), xytext=(0, -4),
                textcoords='offset points', va='top')
  axis.annotate(f'ceiling {format(ceiling[name])}' + ('' if shown else ', off the scale'),
                (0.02, ceiling[name] if shown else 1.0), xytext=(0, -4), textcoords='offset points', va='top',
                xycoords=('axes fraction', 'data' if shown else 'axes fraction'))
  return handles


def check_flags():
  """Raises ValueError for flags that mean nothing here, or that would fail after the work is done."""
  common.refuse(['temperature', 'top_k', 'top_p', 'min_p'], 'the two settings are fixed')
  common.refuse(['rule', *common.RULE_FIELDS, 'static', 'stop', 'stop_entropy', 'block_verification', 'ledger'],
                'every rule is judged on whole rounds')
  if common.settings()['draft'] == 'none':
    raise ValueError('--draft=none: without a draft there is nothing to accept or reject.')
  if common.num_draft() < 1:
    raise ValueError(f'--num_draft={common.num_draft()}: need at least 1 drafted token a round.')
  if _FIGURE.value:
    _pyplot()
  for name, path in (('rows', _ROWS.value), ('figure', _FIGURE.value)):
    folder = os.path.dirname(os.path.abspath(path))
    if path and not os.path.isdir(folder):
      raise ValueError(f'--{name}={path}: there is no folder {folder}.')


def main():
  """Records, judges, prints and draws what is not there yet."""
  check_flags()
  front = Front(_ROWS.value, made_with() | {'prompts': _NUM_PROMPTS.value, 'dense_rounds': _DENSE_ROUNDS.value})
  for setting in SETTINGS:
    front.fill(setting)
  for setting in SETTINGS:
    print(f'\n{table(front, setting)}')
  if _FIGURE.value:
    draw(front, _FIGURE.value)
    print(f'\n{_FIGURE.value} is drawn from {_ROWS.value}')


if __name__ == '__main__':
  common.set_defaults(draft='early_exit:29', max_new_tokens=40)
  common.run(main)
