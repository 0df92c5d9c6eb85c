"""The program of experiments/rule_cost.py: that what it compares does the same, and that it prints and stores it."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cost
from absl import flags
from absl.testing import flagsaver
from lib import record

import cactus_jax as cj
from cactus_jax import verify
from cactus_jax.records import per_row
from tests import laws

ROOT = pathlib.Path(__file__).parent.parent
FILTERED = rule_cost.SETTINGS['T 0.6, top-k 20, top-p 0.95']


pytestmark = pytest.mark.usefixtures('quick_programs')


def small_laws(seed, rows, num_draft, vocab=7):
  """p f32[rows, K, V], q f32[rows, K+1, V], some of them without some tokens, and tokens drawn from p."""
  rng = np.random.default_rng(seed)

  def law(*shape):
    weights = rng.dirichlet(np.full(vocab, 0.7), shape) * (rng.random((*shape, vocab)) < 0.8) + 1e-3 * np.eye(vocab)[0]
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

  p, q = law(rows, num_draft), law(rows, num_draft + 1)
  return p, q, drawn(rng, p)


def drawn(rng, p):
  """i64: a token from each law."""
  return np.argmax(p / rng.exponential(size=p.shape), axis=-1)


def test_every_rule_has_its_numbers():
  assert list(rule_cost.NUMBERS) == list(cj.RULES)
  assert all(isinstance(rule_cost.make_rule(name), cls) for name, cls in cj.RULES.items())


# The formulation in torch.


@pytest.mark.parametrize('delta', [0.0, 0.05, 1.0, 100.0])
def test_torch_formulation_is_cactus(delta):
  """Its acceptance probabilities and recovery laws are those of our rule, wherever there can be a rejection."""
  torch = pytest.importorskip('torch')
  p, q, x = small_laws(0, 50, 4)
  accept, recovery = rule_cost.torch_relaxed(*(torch.tensor(a) for a in (p, q[:, :-1], x)), delta)
  rule = cj.Cactus(delta)
  flat = p.reshape(-1, 7), q[:, :-1].reshape(-1, 7), x.reshape(-1)
  ours = np.asarray(jax.vmap(rule.accept_prob)(*flat)).reshape(x.shape)
  np.testing.assert_allclose(accept, ours, atol=1e-6)
  rejects = ours < 0.999
  assert rejects.mean() > (0.2 if delta < 100 else 0.0) and (ours > 0.999).any()
  ours = np.asarray(jax.vmap(rule.recovery)(*flat)).reshape(p.shape)
  np.testing.assert_allclose(recovery[rejects], ours[rejects], atol=2e-5)


def test_torch_verification_emits_the_law_of_cactus():
  """First tokens of 4,000 rows in each of 40 contexts, and the bonus: |z| > 5 by chance once in 10^6 runs."""
  torch = pytest.importorskip('torch')
  contexts, rows, K, delta = 40, 4000, 2, 0.1
  p, q, _ = small_laws(1, contexts, K)
  P, Q = (np.repeat(law, rows, axis=0) for law in (p, q))
  x = drawn(np.random.default_rng(2), P)
  torch.manual_seed(0)
  num_accepted, next_token = (
    a.numpy() for a in rule_cost.torch_verify(*(torch.tensor(a) for a in (P, Q, x)), delta)
  )
  assert all((num_accepted == n).sum() > 5000 for n in range(K + 1))

  def counts(tokens, chosen):
    context = np.arange(contexts).repeat(rows)[chosen]
    return np.bincount(context * 7 + tokens[chosen], minlength=contexts * 7).reshape(contexts, 7)

  rule = cj.Cactus(delta)
  emitted = np.asarray(jax.vmap(rule.output_law)(p[:, 0], q[:, 0]), np.float64)
  first = np.where(num_accepted > 0, x[:, 0], next_token)
  assert abs(laws.chi_square_z(counts(first, num_accepted >= 0), emitted)) < 5
  assert abs(laws.chi_square_z(counts(next_token, num_accepted == K), q[:, K].astype(np.float64))) < 5


def test_torch_verification_takes_noise_that_is_given():
  """Noise that is tiny for one token makes it the recovery wherever it can be."""
  torch = pytest.importorskip('torch')
  p, q, x = (torch.tensor(a) for a in small_laws(3, 200, 4))
  noise = torch.ones(200, 4, 7)
  noise[..., 3] = 1e-20
  num_accepted, next_token = rule_cost.torch_verify(p, q, x, 0.1, noise)
  slot = num_accepted.clamp(max=3)
  can_be = rule_cost.torch_relaxed(p, q[:, :4], x, 0.1)[1][torch.arange(200), slot, 3] > 0
  assert (can_be & (num_accepted < 4)).sum() > 50
  assert torch.equal((next_token == 3)[num_accepted < 4], can_be[num_accepted < 4])


# Compact laws.


@pytest.fixture(scope='module')
def whole_and_compact():
  """Laws of 60 tokens by the filters of the benchmark, and the same, compact."""
  draft, target_probs = jax.jit(rule_cost.make_laws, static_argnums=(0, 1, 2))(8, 5, 60, FILTERED)
  return (draft, target_probs), rule_cost.compact(draft, target_probs, width=48)


def test_compact_laws_are_the_same_laws(whole_and_compact):
  (draft, target_probs), (small, small_target, ids) = whole_and_compact
  assert small.probs.shape == (8, 5, 48) and small_target.shape == (8, 6, 48)
  assert (ids == 0).any() and (ids < 0).any()
  assert not np.any(np.asarray(small_target)[ids < 0]), 'padding has no probability'
  back = np.zeros((8, 6, 61), np.float32)  # what is padding goes to the last token
  np.put_along_axis(back, np.where(ids < 0, 60, ids), np.asarray(small_target), axis=-1)
  np.testing.assert_array_equal(back[..., :60], target_probs)
  np.testing.assert_allclose(small.probs.sum(-1), 1, atol=1e-6)
  np.testing.assert_array_equal(np.take_along_axis(ids[:, :5], small.tokens[..., None], axis=-1)[..., 0], draft.tokens)
  assert ((np.diff(ids, axis=-1) > 0) | (ids[..., 1:] < 0)).all(), 'tokens keep their order'


@pytest.mark.parametrize('name', cj.RULES)
def test_rules_do_the_same_on_compact_laws(name, whole_and_compact):
  """Same acceptance probabilities, and same emitted laws token by token."""
  (draft, target_probs), (small, small_target, ids) = whole_and_compact
  rule = rule_cost.make_rule(name)
  whole, compact = judged(rule, draft, target_probs), judged(rule, small, small_target)
  np.testing.assert_allclose(compact[0], whole[0], atol=2e-5)
  assert whole[0].min() < 0.9 and whole[0].max() > 0.9, 'some tokens are kept, some are not'
  flat = ids[:, :5].reshape(40, 48)
  there = np.where(flat >= 0, np.take_along_axis(np.asarray(whole[1]), np.maximum(flat, 0), axis=-1), 0)
  np.testing.assert_allclose(compact[1], there, atol=2e-5)
  np.testing.assert_allclose(there.sum(-1), 1, atol=1e-5)


@jax.jit
def judged(rule, draft, target_probs):
  """accept_prob f32[B K] and output_law f32[B K, V] at all drafted positions."""
  V = target_probs.shape[-1]
  p, q = draft.probs.reshape(-1, V), target_probs[:, :-1].reshape(-1, V)
  return jax.vmap(rule.accept_prob)(p, q, draft.tokens.reshape(-1)), jax.vmap(rule.output_law)(p, q)


@pytest.mark.parametrize('name', ['exact', 'cactus', 'clamp'])
def test_verification_on_compact_laws_emits_the_same_tokens(name, whole_and_compact):
  (draft, target_probs), (small, small_target, ids) = whole_and_compact
  rule = per_row(rule_cost.make_rule(name), 8)
  judge = jax.jit(verify.verify)
  lengths = set()
  for seed in range(4):
    keys = jax.random.split(jax.random.key(seed), 8)
    whole, compact = judge(rule, draft, target_probs, keys), judge(rule, small, small_target, keys)
    np.testing.assert_array_equal(compact.num_accepted, whole.num_accepted)
    np.testing.assert_array_equal(ids[np.arange(8), whole.num_accepted, compact.next_token], whole.next_token)
    lengths |= set(np.asarray(whole.num_accepted).tolist())
  assert len(lengths) > 2


def test_laws_that_are_too_wide_are_refused():
  p, q, x = small_laws(4, 1, 2)
  with pytest.raises(ValueError, match='a law and its draft\'s have [67] tokens together: compact laws hold 5.'):
    rule_cost.compact(cj.Draft(tokens=x, probs=p, num_drafted=np.full(1, 2)), q, width=5)


# The program.


@pytest.fixture
def run(capsys):
  """run(*arguments): what the program prints."""

  def main(*arguments):
    capsys.readouterr()
    flags.FLAGS(['rule_cost.py', *arguments])
    rule_cost.main()
    return capsys.readouterr().out

  with flagsaver.flagsaver():
    yield main


TINY = ('--batch=2', '--num_draft=3', '--vocab=256', '--repeats=1')


def test_tables_and_rows(run, monkeypatch, tmp_path):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'torch' else find_spec(name))
  output = tmp_path / 'rows.jsonl'
  out = run(*TINY, '--rules=clamp,exact', f'--output={output}')
  assert out.count('torch: left out, it is not installed') == 2
  arms = ['clamp', 'exact', 'clamp, by block', 'exact, by block', 'clamp, ledger', 'exact, ledger']
  printed = [line[2:26].strip() for line in out.splitlines()]
  assert [printed.count(arm) for arm in arms] == [3] * 6  # in each setting, and once more on compact laws
  assert out.count('two laws a row') == 2 and 'x faster' in out
  rows = record.read_rows(output)
  assert [row['arm'] for row in rows] == 2 * arms
  assert [row['setting'] for row in rows] == [setting for setting in rule_cost.SETTINGS for _ in arms]
  for row in rows:
    assert row['ms'] > 0 and 0 <= row['kept'] <= 3 and row['bandwidth'] > 0 and row['temporaries'] > 0
    assert (row['times_without_ledger'] is None) == ('ledger' not in row['arm']) and row['times_torch'] is None
    assert (row['compact_ms'] is None) == (row['setting'] == 'T 1, all tokens')
    assert (row['batch'], row['num_draft'], row['vocab'], row['turns']) == (2, 3, 256, 1)
  assert rows[1]['times_exact'] == 1 and rows[0]['numbers'] == {'tau': 1.0}
  assert rows[6]['compact_differs'] <= 1e-5


@pytest.mark.slow
def test_every_rule_and_torch_have_a_line(run, tmp_path):
  pytest.importorskip('torch')
  out = run(*TINY, f'--output={tmp_path / "rows.jsonl"}')
  printed = [line[2:26].strip() for line in out.splitlines()]
  assert all(printed.count(name) == 3 for name in cj.RULES)
  assert printed.count('torch') == printed.count('torch, noise given') == 2
  assert all(row['times_torch'] > 0 for row in record.read_rows(tmp_path / 'rows.jsonl'))


@pytest.mark.parametrize(
  'argument, message',
  [
    ('--batch=0', '--batch=0: need at least 1.'),
    ('--num_draft=0', '--num_draft=0: need at least 1.'),
    ('--vocab=1', '--vocab=1: need at least 2.'),
    ('--repeats=0', '--repeats=0: need at least 1.'),
    ('--rules=', '--rules=: need one or more of exact, cactus,'),
    ('--rules=exact,cactos', '--rules=exact,cactos: need one or more of exact, cactus,'),
    ('--output=/no/such/folder/rows.jsonl', '/no/such/folder/rows.jsonl cannot be written:'),
  ],
)
def test_what_cannot_be_measured_is_refused(run, argument, message):
  with pytest.raises(ValueError) as error:
    run(*TINY, argument)
  assert str(error.value).startswith(message) and '\n' not in str(error.value)


def test_arms_take_turns_and_slow_ones_are_called_once(monkeypatch):
  monkeypatch.setattr(rule_cost, 'FAST', 0.002)
  monkeypatch.setattr(rule_cost, 'SLOW', 0.02)
  calls, clock = [], [0.0]  # a clock of its own: that of a busy machine would call anything slow
  monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])

  def arm(name, seconds):
    def run(turn):
      calls.append((name, turn))
      clock[0] += seconds
      return np.array([turn, turn + 2])

    return run

  arms = {'slow': arm('slow', 0.03), 'middle': arm('middle', 0.005), 'fast': arm('fast', 1e-4)}
  measured = rule_cost.measure(arms, 3)
  order = [call for i, call in enumerate(calls) if i == 0 or call != calls[i - 1]]
  assert order == [(name, 0) for name in arms] + [(name, turn) for turn in (1, 2, 3) for name in ('middle', 'fast')]
  assert calls.count(('middle', 1)) == 1 and calls.count(('fast', 1)) > 1
  assert measured == {'slow': pytest.approx((0.03, 1, 1)), 'middle': pytest.approx((0.005, 3, 3)),
                      'fast': pytest.approx((1e-4, 3, 3))}


@pytest.fixture
def optimised_programs(quick_programs):
  """Programs as they are measured."""
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


def test_cactus_makes_no_array_of_all_laws(optimised_programs):
  """The claim that the column of temporaries is there for: a few laws a row, however many tokens are drafted."""
  abstract = jax.eval_shape(lambda: rule_cost.make_laws(2, 16, 4096, cj.SamplingParams()))
  laws_of_zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
  cactus = rule_cost.Program(rule_cost.plain, cj.Cactus(1.0), laws_of_zeros)
  assert 0 < 16 * cactus.temporaries < 8  # in laws a row
  assert rule_cost.Program(rule_cost.by_block, cj.Clamp(1.0), laws_of_zeros).temporaries > 1


@pytest.mark.slow
def test_the_program_runs(tmp_path):
  """As a user would: far from the repository, with the default number of drafted tokens."""
  environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': os.path.abspath(jax.config.jax_compilation_cache_dir)}
  command = [sys.executable, ROOT / 'experiments' / 'rule_cost.py']
  options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
  done = subprocess.run([*command, '--batch=1', '--vocab=64', '--repeats=1', '--rules=exact'], **options)
  assert done.returncode == 0 and done.stderr == '', done.stderr
  assert done.stdout.startswith('B=1 rows, K=20 drafted tokens, V=64; medians of 1 turns')
  done = subprocess.run([*command, '--num_draft=0'], **options)
  assert (done.returncode, done.stderr) == (2, 'error: --num_draft=0: need at least 1.\n')
