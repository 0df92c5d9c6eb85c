"""Figures: the counts add up, ratios of nothing are 0, and the seconds of compiling are told apart."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import decode, metrics
from cactus_jax.decode import DecodeConfig
from tests import fakes


def stats(**changes):
  """5 rounds of 3 drafted tokens each: 3, 2 and 0 kept at the three positions."""
  seconds = metrics.Seconds(compile=4.0, first_token=0.5, decode=2.0, decoded=8)
  fields = dict(
    new_tokens=9, decoded=10, verifier_calls=5, accepted_at=(3, 2, 0), tested_at=(5, 3, 2), seconds=seconds
  )
  return metrics.Stats(**fields | changes)


def test_ratios_of_a_literal_run():
  s = stats()
  assert (s.accepted, s.drafted) == (5, 10)
  assert s.tokens_per_call == 2.0  # decoded tokens, whether or not a stop string cut them off later
  assert s.accepted_len == 1.0
  assert s.acceptance_rate == 0.5
  assert s.position_rate == (0.6, 0.4, 0.0)
  assert s.position_rate_given_tested == (0.6, pytest.approx(2 / 3), 0.0)
  assert s.tokens_per_second == 4.0


def test_ratios_of_nothing_are_0():
  nothing = metrics.Stats(0, 0, 0, (0, 0), (0, 0), metrics.Seconds(0.0, 0.0, 0.0, 0))
  for name in (
    'tokens_per_call',
    'accepted_len',
    'acceptance_rate',
    'tokens_per_second',
    'accepted',
    'drafted',
  ):
    assert getattr(nothing, name) == 0, name
  assert nothing.position_rate == nothing.position_rate_given_tested == (0.0, 0.0)
  plain = metrics.Stats(3, 3, 3, (), (), metrics.Seconds(0.0, 0.1, 0.2, 2))
  assert plain.position_rate == () and plain.acceptance_rate == 0 and plain.tokens_per_call == 1


def test_merge_adds_counts_and_keeps_the_first_first_token():
  seconds = metrics.Seconds(compile=1.0, first_token=9.0, decode=3.0, decoded=2)
  other = metrics.Stats(1, 2, 3, (1, 1, 1), (2, 1, 1), seconds)
  both = metrics.merge([stats(), other])
  assert both == metrics.Stats(10, 12, 8, (4, 3, 1), (7, 4, 3), metrics.Seconds(5.0, 0.5, 5.0, 10))
  assert metrics.merge([stats()]) == stats()
  assert both.tokens_per_call == 12 / 8, 'weighted by calls, not a mean of means'
  plain = stats(accepted_at=(), tested_at=())
  assert metrics.merge([plain, plain]).position_rate == ()


def test_figures_of_a_run_agree_with_its_tokens():
  config = DecodeConfig(num_draft=3, max_length=64, vocab_size=5, eos_ids=(0,))
  target, draft = fakes.random_markov(0, 5), fakes.random_markov(1, 5)
  prompts, max_new = [[1], [2, 3], [4, 1, 2], [4, 4]], [1, 17, 40, 3]
  state = fakes.run(target, draft, prompts=prompts, max_new=max_new, config=config, seed=1)
  seconds = metrics.Seconds(0.0, 0.0, 0.0, 0)
  lengths = [len(prompt) for prompt in prompts]
  s = metrics.summarize(state, lengths, 7, seconds, lossless=True)
  emitted = sum(len(row) for row in fakes.texts(state)) - sum(lengths)
  assert (s.new_tokens, s.seconds) == (7, seconds) and s.decoded == emitted
  assert s.verifier_calls == state.round.sum()
  assert s.accepted == state.from_draft.sum()
  assert set(state.finish.tolist()) == {decode.Finish.EOS, decode.Finish.LENGTH}
  assert 0 < s.accepted < s.drafted, 'some drafts should be kept and some not'
  assert s.verifier_calls - len(prompts) <= s.decoded - s.accepted <= s.verifier_calls, (
    'a round that is not cut has one more'
  )
  for accepted, tested in zip(s.accepted_at, s.tested_at):
    assert accepted <= tested
  for accepted, tested in zip(s.accepted_at, s.tested_at[1:]):
    assert tested <= accepted, 'a position is tested where the one before it was kept'
  assert all(type(count) is int for count in (s.decoded, s.verifier_calls, *s.accepted_at, *s.tested_at))


def test_figures_of_no_rounds_are_defined():
  config = DecodeConfig(num_draft=2, max_length=8, vocab_size=5)
  state = fakes.start(
    fakes.random_markov(0, 5), fakes.random_markov(1, 5), prompts=[[1]], max_new=[0], config=config
  )
  s = metrics.summarize(state, [1], 0, metrics.Seconds(0.0, 0.0, 0.0, 0), lossless=True)
  assert (s.decoded, s.verifier_calls, s.accepted_at, s.tested_at) == (0, 0, (0, 0), (0, 0))
  assert s.tokens_per_call == s.acceptance_rate == 0 and decode.Finish(int(state.finish[0])).name == 'LENGTH'


# The clock.


@pytest.fixture
def event(monkeypatch):
  """event(end, duration, name): JAX's word that work of `duration` seconds ended at `end`."""

  def tell(end, duration, name='/jax/core/compile/backend_compile_duration'):
    monkeypatch.setattr(time, 'perf_counter', lambda: end)
    jax.monitoring.record_event_duration_secs(name, duration)

  return tell


def test_clock_counts_nested_and_overlapping_events_once(event):
  clock = metrics.CompileClock()
  assert clock.seconds == 0
  with clock.running() as same:
    assert same is clock
    event(103, 2)  # 101..103
    event(103.5, 0.25)  # inside the next
    event(104, 2)  # 102..104 overlaps
    event(108, 3, '/jax/core/compile/jaxpr_trace_duration')  # 105..108
    event(107, 1)  # inside, heard later
  assert clock.seconds == pytest.approx((104 - 101) + (108 - 105))


def test_clock_counts_all_of_some_work(monkeypatch):
  """What JAX does not tell of too, and what it tells of only once."""
  clock, now = metrics.CompileClock(), [100.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])

  def work():
    now[0] = 104.0
    jax.monitoring.record_event_duration_secs('/jax/core/compile/backend_compile_duration', 3)  # 101..104
    now[0] = 105.0

  with clock.running():
    clock.count(work)
    now[0] = 107.0
  assert clock.seconds == pytest.approx(105 - 100)


def test_clock_counts_only_compiling_and_only_while_open(event):
  clock = metrics.CompileClock()
  event(101, 1)
  with clock.running():
    event(103, 1)
    event(105, 1, '/jax/compilation_cache/cache_retrieval_time_sec')
  event(107, 1)
  assert clock.seconds == pytest.approx(1)
  with clock.running():
    event(109, 1)
  assert clock.seconds == pytest.approx(2)


def test_clock_is_closed_by_an_error(event):
  clock, other = metrics.CompileClock(), metrics.CompileClock()
  with other.running():
    with pytest.raises(KeyError), clock.running():
      raise KeyError
    event(101, 1)
  assert clock.seconds == 0 and other.seconds == pytest.approx(1)


def test_clock_hears_jax():
  clock = metrics.CompileClock()
  salt = np.random.default_rng().integers(1 << 30)  # a program that no cache holds
  start = time.perf_counter()
  with clock.running():
    double = jax.jit(lambda x: 2 * x + int(salt))
    double(jnp.ones(3)).block_until_ready()
    passed = time.perf_counter() - start
    first = clock.seconds
    double(jnp.ones(3)).block_until_ready()
  assert 0 < first <= passed and clock.seconds == first
