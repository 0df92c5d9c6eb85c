"""The program of experiments/front.py: figures on known laws, and whole runs with a tiny model."""

import os
import pathlib

import front
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app, flags
from lib import record

import cactus_jax as cj
from cactus_jax import ledger
from cactus_jax.records import record_class
from cactus_jax.rules import TargetRule
from tests import checkpoints, fakes

FLAGS = flags.FLAGS
NUMBERS = {'exact': (0.0,), 'ceiling': (80.0,), 'clamp': (0.01, 1.0, 50.0), 'cactus': (1e-6, 0.1, 30.0)}
FEW = {rule: front.CURVES[rule]._replace(numbers={'truncated': numbers, 'full': numbers})
       for rule, numbers in NUMBERS.items()}
# Some rules of every kind, and all.
RULES = [pytest.param(['exact', 'cactus', 'clamp', 'clamp_by_position', 'mentored', 'top_k'], id='some'),
         pytest.param(list(front.CURVES), id='all', marks=pytest.mark.slow)]
PROMPTS = ['ab', 'cd', 'efg', 'hi there']


pytestmark = pytest.mark.usefixtures('quick_programs')
app.define_help_flags()  # once, or the flagsaver takes them away again


# Figures on known laws.


def random_laws(seed, shape, held):
  """Laws p, q that hold `held` tokens each and have most of them in common."""
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=shape)
  laws = []
  for noise in (0.8, 0.8):
    noisy = logits + noise * rng.normal(size=shape)
    kept = noisy >= np.sort(noisy, axis=-1)[..., -held, None]
    weights = np.where(kept, np.exp(noisy), 0.0)
    laws.append((weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32))
  return laws


def drawn_rounds(seed=0, N=24, K=3, V=40, held=9):
  """Rounds of random laws, the tokens drawn from them; in some nothing was drafted."""
  p, q = random_laws(seed, (N, K + 1, V), held)
  rng = np.random.default_rng(seed + 1)
  tokens = np.array([[rng.choice(V, p=p[n, k] / p[n, k].sum(dtype=np.float64)) for k in range(K)] for n in range(N)])
  num_drafted = np.where(np.arange(N) % 8 == 7, 0, K).astype(np.int32)
  return cj.Draft(tokens=tokens.astype(np.int32), probs=p[:, :K], num_drafted=num_drafted), q


def whole_rounds(pairs=8, V=12, shots=32):
  """Rounds of one token in which every token was drafted as often as p says: sums over them are expectations."""
  rng = np.random.default_rng(5)
  q = random_laws(6, (pairs, V), held=8)[1]
  counts = np.stack([rng.multinomial(shots, 0.5 * law / law.sum(dtype=np.float64) + 0.5 / V) for law in q])
  tokens = np.concatenate([np.repeat(np.arange(V), row) for row in counts]).astype(np.int32)
  repeat = lambda laws: np.repeat(laws.astype(np.float32), shots, axis=0)[:, None]
  q_both = np.concatenate([repeat(q), repeat(q)], axis=1)
  draft = cj.Draft(tokens=tokens[:, None], probs=repeat(counts / shots), num_drafted=np.ones(len(tokens), np.int32))
  return draft, q_both


def filled(rounds, curves, path, monkeypatch):
  """The front of some curves on given rounds, in the truncated setting, without calibrated numbers."""
  monkeypatch.setattr(front, 'CURVES', curves)
  monkeypatch.setattr(front, 'CALIBRATED', {})
  monkeypatch.setattr(front, 'rounds_of', lambda setting: jax.tree.map(jnp.asarray, rounds))
  result = front.Front(str(path), {})
  result.fill('truncated')
  return result


def thinned(curves, count):
  """Curves with `count` of the numbers of the truncated setting, spread evenly."""
  pick = lambda numbers: [numbers[i] for i in np.unique(np.linspace(0, len(numbers) - 1, count).astype(int))]
  return {rule: curve._replace(numbers={'truncated': tuple(pick(curve.numbers['truncated']))})
          for rule, curve in curves.items()}


def test_every_rule_for_sampling_has_a_curve():
  assert set(cj.RULES) - {'logit_margin'} == set(front.CURVES) - {
    'ceiling', 'clamp_by_position', 'interpolation_published', 'top_k_published'}
  for rule, curve in front.CURVES.items():
    for setting in front.SETTINGS:
      numbers = curve.numbers[setting]
      assert len(set(numbers)) == len(numbers) and all(np.isfinite(numbers))
      assert rule in front.STYLES or rule in ('exact', 'ceiling', 'interpolation_published')


def test_compact_keeps_the_laws_in_their_order():
  draft, q = drawn_rounds()
  fewer, fewer_q = front.compact(draft, q)
  N, K, V = draft.probs.shape
  assert fewer_q.shape == fewer.probs.shape == (N, K, fewer_q.shape[2]) and 9 <= fewer_q.shape[2] <= 18
  at = lambda laws, tokens: np.take_along_axis(laws, tokens[..., None], axis=2)
  np.testing.assert_array_equal(at(fewer.probs, fewer.tokens), at(draft.probs, draft.tokens))
  np.testing.assert_array_equal(at(fewer_q, fewer.tokens), at(q[:, :K], draft.tokens))
  for ours, theirs in ((fewer.probs, draft.probs), (fewer_q, q[:, :K])):
    for n, k in np.ndindex(N, K):
      np.testing.assert_array_equal(ours[n, k][ours[n, k] > 0], theirs[n, k][theirs[n, k] > 0])


def test_whole_laws_are_left_as_they_are():
  draft, q = drawn_rounds(held=40)
  same, same_q = front.compact(draft, q)
  assert same is draft and np.array_equal(same_q, q[:, :-1])


def test_rounds_of_several_prompts_are_joined_at_the_widest():
  narrow, wide = front.compact(*drawn_rounds(held=4)), front.compact(*drawn_rounds(seed=3, held=9))
  draft, q = front.join([narrow, wide])
  width = wide[1].shape[2]
  assert narrow[1].shape[2] < width and draft.probs.shape == q.shape == (48, 3, width)
  np.testing.assert_array_equal(draft.tokens[24:], wide[0].tokens)
  np.testing.assert_allclose(np.asarray(q).sum(axis=2), 1.0, atol=1e-6)


@pytest.mark.parametrize('rules', RULES)
def test_no_rule_sees_that_laws_are_compact(rules, tmp_path, monkeypatch):
  curves = thinned({rule: front.CURVES[rule] for rule in rules}, 3)
  dense = filled(drawn_rounds(), curves, tmp_path / 'dense', monkeypatch).rows
  fewer = filled(front.compact(*drawn_rounds()), curves, tmp_path / 'fewer', monkeypatch).rows
  assert len(dense) == len(fewer) > 2 * len(rules)
  for ours, theirs in zip(fewer, dense):
    assert (ours['rule'], ours['number']) == (theirs['rule'], theirs['number'])
    for name in ledger.Expected._fields:
      if None in (ours[name], theirs[name]):
        assert ours[name] is theirs[name], ours
      else:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (name, ours, theirs)


@pytest.mark.parametrize('rules', RULES)
def test_no_rule_is_above_the_clamp(rules, tmp_path, monkeypatch):
  fine = front.CURVES['clamp']._replace(numbers={'truncated': tuple(np.geomspace(0.02, 40, 300))})
  others = thinned({rule: front.CURVES[rule] for rule in rules}, 5)
  result = filled(whole_rounds(), others | {'clamp': fine}, tmp_path / 'rows', monkeypatch)
  points = result.points('truncated', 'clamp')
  nats, kept = zip(*((row['kl_per_token'], row['acceptance_rate']) for row in points))
  [exact] = result.points('truncated', 'exact')
  compared = 0
  for row in result.rows:
    if row['kl_per_token'] is not None:
      best = np.interp(row['kl_per_token'], (0.0, *nats), (exact['acceptance_rate'], *kept))
      assert row['acceptance_rate'] <= best + 2e-5, (row, best)
      compared += row['rule'] != 'clamp' and row['acceptance_rate'] > exact['acceptance_rate']
  assert compared > 2 * len(rules) - 4


@pytest.fixture(scope='module')
def alike():
  """Thirty classes of rules that differ in nothing but their law: mixtures with a share of their own."""

  def mixture(i):
    @record_class
    class Mixture(TargetRule):
      unused: float

      def target(self, p, q):
        return i / 30 * p + (1 - i / 30) * q

    return Mixture

  return [mixture(i) for i in range(30)]


def test_rules_with_like_fields_are_not_taken_for_each_other(alike, tmp_path, monkeypatch):
  draft, q = whole_rounds(pairs=2)
  curves = {str(i): front.Curve(lambda number, rounds, cls=cls: cls(number), {'truncated': (0.5,)})
            for i, cls in enumerate(alike)}
  rows = filled((draft, q), curves, tmp_path / 'rows', monkeypatch).rows
  p_x, q_x = (np.take_along_axis(laws[:, 0], draft.tokens, axis=1)[:, 0] for laws in (draft.probs, q))
  for i, row in enumerate(rows):
    assert row['acceptance_rate'] == pytest.approx(np.mean(np.minimum(1, i / 30 + (1 - i / 30) * q_x / p_x)), abs=1e-5)


def test_figures_between_two_numbers():
  row = lambda kl, length: dict(kl_per_token=kl, acceptance_rate=length / 4, accepted_len=length)
  points = [row(0.001, 1.0), row(0.1, 2.0), row(0.001, 1.8), row(None, 4.0)]
  place = front.interpolated(points[:2], 0.0505)  # half way: as if either number were taken by chance
  assert place == pytest.approx({'acceptance_rate': 0.375, 'accepted_len': 1.5})
  assert front.interpolated(points, 0.0505)['accepted_len'] == pytest.approx(1.9), 'the better of two places'
  assert front.interpolated(points[:2], 0.1)['accepted_len'] == pytest.approx(2.0), 'ends belong to the curve'
  for beyond in (0.0009, 0.11):
    assert front.interpolated(points, beyond) is None


# Files of laws.


@pytest.fixture
def laws_file(tmp_path):
  return str(tmp_path / 'laws' / 'truncated-00.npz')


def test_laws_are_read_as_they_were_written(laws_file):
  for held in (2, 40):  # mostly zeros, none
    draft, q = drawn_rounds(held=held)
    front.write_laws(laws_file, draft, q, {'a': [1, 'x']})
    jax.tree.map(np.testing.assert_array_equal, front.read_laws(laws_file, {'a': [1, 'x']}), (draft, q))
  assert os.listdir(os.path.dirname(laws_file)) == ['truncated-00.npz']


def test_laws_of_other_settings_are_refused(laws_file):
  front.write_laws(laws_file, *drawn_rounds(), {'draft': 'lookup', 'seed': 0})
  with pytest.raises(ValueError) as error:
    front.read_laws(laws_file, {'draft': 'none', 'seed': 0})
  assert str(error.value) == (f"{laws_file} was made with other settings (draft is 'lookup' there and 'none' here): "
                              'choose another --laws.')


def test_a_file_that_is_not_whole_is_never_read(laws_file):
  for held in (2, 40):
    front.write_laws(laws_file, *drawn_rounds(held=held), {})
    whole = pathlib.Path(laws_file).read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
      pathlib.Path(laws_file).write_bytes(whole[:size])
      assert front.read_laws(laws_file, {}) is None, size
  assert front.read_laws(laws_file + 'missing', {}) is None


@pytest.mark.parametrize('held', [2, 40])
def test_a_write_that_is_interrupted_leaves_no_file(laws_file, held, monkeypatch):
  def half(file, **arrays):
    file.write(b'PK\x03\x04 and then')
    raise KeyboardInterrupt

  monkeypatch.setattr(np, 'savez_compressed', half)
  monkeypatch.setattr(np, 'savez', half)
  with pytest.raises(KeyboardInterrupt):
    front.write_laws(laws_file, *drawn_rounds(held=held), {})
  assert not os.path.exists(laws_file) and front.read_laws(laws_file, {}) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot be written: '):
    front.write_laws(str(tmp_path / 'file' / 'laws.npz'), *drawn_rounds(), {})


# Whole runs.


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  """A random model of three layers with the vocabulary of the byte tokenizer."""
  config = checkpoints.CONFIG | {'vocab_size': 288, 'eos_token_id': 263}
  folder = checkpoints.write_folder(tmp_path_factory.mktemp('tiny') / 'model', config)
  return cj.load_transformer(os.fspath(folder), dtype='float32')


@pytest.fixture
def cli(tiny, run_program, monkeypatch, tmp_path):
  """cli(*arguments): exit code, standard output and standard error of a run in tmp_path."""
  monkeypatch.setattr(front, 'CURVES', FEW)
  monkeypatch.setattr(front, 'PROMPTS', PROMPTS)
  monkeypatch.setattr(front, 'TARGETS', (0.01, 0.1))
  monkeypatch.setattr(cj, 'default_model_path', lambda: pathlib.Path('/models/tiny.gguf'))
  monkeypatch.setattr(cj, 'default_draft_path', lambda: None)
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: tiny)
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer())

  def run(*arguments):
    places = [f'--{name}={tmp_path / value}' for name, value in
              (('laws', 'laws'), ('rows', 'rows.jsonl'), ('figure', 'front.png'))]
    usual = ['--raw', '--draft=early_exit:2', '--max_new_tokens=8', '--num_draft=2', '--num_prompts=3']
    front._models.cache_clear()
    return run_program(front.main, 'front.py', *places, *usual, *arguments)

  return run


@pytest.fixture
def counted(monkeypatch):
  """Counts calls: prompts recorded, rules judged."""
  calls = {'recorded': [], 'judged': []}
  record_rounds, expected = cj.record_rounds, ledger.expected

  def recording(prompts, **options):
    calls['recorded'].append((prompts[0], options['sampling'].temperature))
    return record_rounds(prompts, **options)

  def judging(rule, *rounds):
    calls['judged'].append(type(rule).__name__)
    return expected(rule, *rounds)

  monkeypatch.setattr(cj, 'record_rounds', recording)
  monkeypatch.setattr(ledger, 'expected', judging)
  return calls


def test_a_run_is_complete_and_not_repeated(cli, counted, tmp_path):
  pytest.importorskip('matplotlib')
  code, out, _ = cli()
  assert code == 0
  rows = record.read_rows(str(tmp_path / 'rows.jsonl'))
  grid = [(setting, rule, number, None) for setting in front.SETTINGS for rule, curve in FEW.items()
          for number in curve.numbers[setting]]
  wanted = [(setting, rule, target) for setting in front.SETTINGS for rule in front.CALIBRATED
            for target in (0.01, 0.1)]
  key = lambda row: tuple(row[name] for name in ('setting', 'rule', 'number', 'target'))
  assert sorted(key(row) for row in rows if row['target'] is None) == sorted(grid)
  assert sorted((row['setting'], row['rule'], row['target']) for row in rows if row['target']) == sorted(wanted)
  for row in rows:
    assert row['rounds'] > 3 and row['draft'] == 'early_exit:2' and row['num_draft'] == 2 and row['prompts'] == 3
    if row['target'] and row['number']:
      assert row['kl_per_token'] == pytest.approx(row['target'], rel=1e-3)
  assert sum(row['target'] is not None and row['number'] is not None for row in rows) > 4
  assert 'T 0.6, top-k 20, top-p 0.95' in out and 'clamp' in out and 'ceiling' in out
  assert len(counted['recorded']) == 6 and set(counted['recorded']) >= {('ab', 0.6), ('ab', 1.0)}

  image = (tmp_path / 'front.png').read_bytes()
  assert image.startswith(b'\x89PNG\r\n\x1a\n') and image.endswith(b'IEND\xaeB`\x82')
  before = (tmp_path / 'rows.jsonl').read_bytes()
  for calls in counted.values():
    calls.clear()
  assert cli()[:2] == (0, out)
  assert counted == {'recorded': [], 'judged': []}
  assert (tmp_path / 'rows.jsonl').read_bytes() == before


def test_rows_that_are_missing_are_computed_and_no_others(cli, counted, tmp_path):
  assert cli('--figure=')[0] == 0
  assert not (tmp_path / 'front.png').exists()
  lines = (tmp_path / 'rows.jsonl').read_text().splitlines(keepends=True)
  lost = [line for line in lines if '"clamp", "number": 50.0' in line]
  assert len(lost) == 2
  kept = ''.join(line for line in lines if line not in lost)
  (tmp_path / 'rows.jsonl').write_text(kept + lost[0][:20])  # as an interruption leaves it
  for calls in counted.values():
    calls.clear()
  assert cli('--figure=')[0] == 0
  assert counted == {'recorded': [], 'judged': ['Clamp', 'Clamp']}
  assert sorted((tmp_path / 'rows.jsonl').read_text().splitlines(keepends=True)) == sorted(lines)


def test_an_interrupted_recording_goes_on(cli, counted, tmp_path, monkeypatch):
  record_rounds = cj.record_rounds

  def tired(prompts, **options):
    if len(counted['recorded']) == 2:
      raise KeyboardInterrupt
    return record_rounds(prompts, **options)

  with monkeypatch.context() as patch:
    patch.setattr(cj, 'record_rounds', tired)
    assert cli('--figure=')[0] == 130
  assert sorted(os.listdir(tmp_path / 'laws')) == ['truncated-00.npz', 'truncated-01.npz']
  half = tmp_path / 'laws' / 'truncated-01.npz'
  half.write_bytes(half.read_bytes()[:-30])
  counted['recorded'].clear()
  assert cli('--figure=')[0] == 0
  assert counted['recorded'] == [('cd', 0.6), ('efg', 0.6), ('ab', 1.0), ('cd', 1.0), ('efg', 1.0)]


@pytest.mark.slow
def test_a_draft_that_copies(cli, tmp_path):
  assert cli('--draft=lookup', '--figure=')[0] == 0
  rows = record.read_rows(str(tmp_path / 'rows.jsonl'))
  assert {row['draft'] for row in rows} == {'lookup'}


@pytest.mark.parametrize('arguments, message', [
  (['--draft=none'], '--draft=none: without a draft there is nothing to accept or reject.'),
  (['--draft=early_exit:x'], '--draft=early_exit:x: need the number of layers, as in early_exit:8.'),
  (['--num_draft=0'], '--num_draft=0: need at least 1 drafted token a round.'),
  (['--num_prompts=0'], 'flag --num_prompts=0: 0 is not an integer in the range [1, 24]'),
  (['--dense_rounds=0'], 'flag --dense_rounds=0: 0 is not a positive integer'),
  (['--temperature=1'], '--temperature means nothing here: the two settings are fixed'),
  (['--rule=cactus', '--delta=1'], '--rule means nothing here: every rule is judged'),
  (['--figure=/nowhere/front.png'], '--figure=/nowhere/front.png: there is no folder /nowhere.'),
  (['--rows=/nowhere/rows'], '--rows=/nowhere/rows: there is no folder /nowhere.'),
  (['--laws=/dev/null/laws'], 'cannot be written: '),
])
def test_bad_flags_are_named_in_one_line(cli, arguments, message):
  code, _, err = cli(*arguments)
  line = err.splitlines()[-1]
  assert code == 2 and line.startswith('error: ') and message in line and 'Traceback' not in err


def test_rows_of_other_settings_are_refused(cli, tmp_path):
  (tmp_path / 'rows.jsonl').write_text('{"setting": "full", "verifier": "other"}\n')
  code, _, err = cli()
  assert code == 2 and 'was made with other settings (verifier is \'other\' there' in err
  assert err.endswith('choose another --rows.\n') and err.count('\n') == 1


def test_what_draws_may_be_missing(cli, monkeypatch):
  monkeypatch.setattr(front.importlib.util, 'find_spec', lambda name: None)
  code, _, err = cli()
  assert (code, err) == (2, 'error: matplotlib is missing, which draws the picture: pip install -e .[plot], or pass '
                            '--figure= for none.\n')
