"""The number of drafted tokens: what is predicted and chosen, and that the text is the same whatever is chosen."""

import dataclasses
import functools
import itertools
import os
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import decode, schedule
from cactus_jax.schedule import AutoDraft, Chooser, Costs, acceptance_rates, best_num_draft, tokens_per_second
from tests import fakes, laws

MOST = 4
CHEAP = Costs(verify=(1.0, 1.1, 1.2, 1.3, 1.4), draft=0.05)


def seen(rate, tests=1000):
  """Counters of drafts that are kept at this rate at every position."""
  reached = tests * rate ** np.arange(MOST)
  return rate * reached, reached


# What is predicted.


def test_tokens_a_second_by_brute_force():
  """Every pattern of kept and rejected tokens; every pass of a round by itself."""
  rng = np.random.default_rng(0)
  for _ in range(20):
    costs = Costs(verify=tuple(rng.uniform(1, 3, MOST + 1)), draft=rng.uniform(), first=rng.uniform())
    rates = rng.uniform(size=MOST)
    for K in range(MOST + 1):
      tokens = 0.0
      for kept in itertools.product((True, False), repeat=K):
        chance = np.prod([r if k else 1 - r for r, k in zip(rates, kept)])
        tokens += chance * (len(list(itertools.takewhile(bool, kept))) + 1)
      seconds = costs.verify[K] + sum([costs.first] + [costs.draft] * (K - 1) if K else [])
      assert tokens_per_second(costs, rates, K) == pytest.approx(tokens / seconds)


def test_rates_lean_on_the_position_before_and_the_first_on_the_prior():
  prior, weight = schedule.PRIOR_RATE, schedule.PRIOR_TESTS
  np.testing.assert_allclose(acceptance_rates([0] * 3, [0] * 3), prior)
  first = (30 + weight * prior) / (40 + weight)
  second = (6 + weight * first) / (10 + weight)
  np.testing.assert_allclose(acceptance_rates([30, 6, 0, 0], [40, 10, 0, 0]), [first, second, second, second])
  np.testing.assert_allclose(acceptance_rates(*seen(0.3, 10**6)), 0.3, atol=1e-4)


def test_the_choice_is_the_best_candidate():
  rng = np.random.default_rng(1)
  chosen = set()
  for _ in range(200):
    steps = rng.uniform(0.01, 0.6, 8) * [2, 1, 1, 1, 1, 1, 1, 1]
    costs = Costs(verify=tuple(np.cumsum(steps)), draft=rng.uniform(0, 0.2))
    reached = np.sort(rng.integers(0, 50, 7))[::-1]
    accepted = rng.binomial(reached, rng.uniform())
    speeds = [tokens_per_second(costs, acceptance_rates(accepted, reached), k) for k in (0, 1, 2, 3, 4, 6, 7)]
    best = best_num_draft(costs, accepted, reached)
    assert best == (0, 1, 2, 3, 4, 6, 7)[int(np.argmax(speeds))] == best_num_draft(costs, accepted, reached)
    chosen.add(best)
  assert {0, 1, 2, 3, 7} <= chosen


def test_more_is_drafted_the_more_is_kept_and_nothing_where_it_is_dear():
  choices = [best_num_draft(CHEAP, *seen(rate)) for rate in (0.0, 0.05, 0.3, 0.6, 0.9, 1.0)]
  assert choices == sorted(choices) and choices[0] == 0 and choices[-1] == MOST and len(set(choices)) > 3
  for rate in (0.0, 0.5, 0.9):
    assert best_num_draft(dataclasses.replace(CHEAP, draft=2.0), *seen(rate)) == 0
    assert best_num_draft(Costs(verify=(1.0, 2.0, 3.0, 4.0, 5.0), draft=0.0), *seen(rate)) == 0
  # A first pass alone may be dear: then one drafted token does not pay, several do.
  assert best_num_draft(dataclasses.replace(CHEAP, first=0.9), *seen(0.95)) == MOST
  assert best_num_draft(dataclasses.replace(CHEAP, first=0.9), *seen(0.4)) == 0


def test_little_is_not_worth_a_change():
  costs = Costs(verify=(1.0, 1.0, 1.0, 1.0, 1.0), draft=0.22)
  speeds = [tokens_per_second(costs, acceptance_rates(*seen(0.5)), k) for k in range(MOST + 1)]
  best = int(np.argmax(speeds))
  close = [k for k in range(MOST + 1) if k != best and speeds[best] < 1.03 * speeds[k]]
  far = [k for k in range(MOST + 1) if speeds[best] >= 1.03 * speeds[k]]
  assert close and far
  assert [best_num_draft(costs, *seen(0.5), current=k) for k in close] == close
  assert [best_num_draft(costs, *seen(0.5), current=k) for k in far] == [best] * len(far)


# What the host sees.


def test_the_chooser_counts_what_was_offered_and_looks_at_rows_that_go_on():
  costs = Costs(verify=(1.0, 1.3, 1.4, 1.5, 1.6), draft=0.05)
  chooser = Chooser(costs, MOST, batch=3)
  assert chooser.num_draft == best_num_draft(costs, *np.zeros((2, MOST))) == MOST
  rounds, accepted, done = np.zeros(3, int), np.zeros((3, MOST), int), np.zeros(3, bool)
  look = lambda: chooser.look(rounds.copy(), accepted.copy(), done.copy())
  rounds += 1
  accepted[0] += 1
  look()
  # Row 0 keeps all and ends; what the others keep alone is not worth drafting for.
  rounds += 8
  accepted[0] += 8
  accepted[1, 0] += 1
  done[0] = True
  assert chooser.num_draft == MOST
  look()
  assert chooser.num_draft == best_num_draft(costs, [1, 0, 0, 0], [18, 1, 0, 0], MOST) == 0
  rounds[1:] += 3
  look()
  np.testing.assert_array_equal(chooser.calls, [6, 0, 0, 0, 27])
  assert chooser.num_draft == 0


def test_a_position_is_reached_where_the_one_before_was_kept():
  """The first token is nearly always kept and the second never; then one is drafted."""
  chooser = Chooser(CHEAP, MOST, batch=1)
  chooser.look(np.array([1]), np.zeros((1, MOST), int), np.array([False]))
  chooser.look(np.array([17]), np.array([[16, 0, 0, 0]]), np.array([False]))
  assert chooser.num_draft == best_num_draft(CHEAP, [16, 0, 0, 0], [17, 16, 0, 0], MOST) == 1


def test_choices_do_not_depend_on_how_often_the_host_looks():
  """They are made after 5, 9, 17, 33, 49, 65, ... rounds, whether it streams or not."""
  changes = set()

  def numbers(size, kept):
    chooser, accepted, used, step = Chooser(CHEAP, MOST, batch=2), np.zeros((2, MOST), int), [], 1
    while len(used) < len(kept):
      start, stop = len(used), min(len(used) + step, len(kept))
      used += [chooser.num_draft] * (stop - start)
      accepted[:, : used[-1]] += kept[start:stop, :, : used[-1]].sum(axis=0)
      chooser.look(np.full(2, stop), accepted.copy(), np.zeros(2, bool))
      assert chooser.num_draft, 'drafting always pays here'
      step = min(size, chooser.rounds_to_choice)
    return used

  for seed in range(40):
    kept = np.random.default_rng(seed).binomial(1, 0.45, size=(97, 2, MOST)).cumprod(axis=2)
    usual = numbers(100, kept)
    changes |= {at for at, (before, now) in enumerate(itertools.pairwise(usual), 1) if before != now}
    for size in (1, 2, 3, 8):
      assert numbers(size, kept) == usual
  assert {5, 9, 17, 33, 49} <= changes <= {5, 9, 17, 33, 49, 65, 81}


# The law of the text: 10,000 rows of a chain with 3 tokens, each with a number that its own past decides.

ROWS, PROMPT = 10_000, [0, 1, 0, 1]
TARGET = fakes.random_markov(10, 3)
DRAFT = fakes.near(TARGET, 12)
CONFIG = decode.DecodeConfig(num_draft=MOST, max_length=40, vocab_size=3)
step = jax.jit(decode.decode_step, static_argnames='config')


def with_num_draft(k):
  return dataclasses.replace(CONFIG, num_draft=k)


def test_the_law_of_the_text_is_the_verifiers_whatever_the_past_chooses():
  """Chi-square over 81 texts, |z| < 5. A round's outcome decides each row's next number, plain decoding included."""
  state = fakes.start(TARGET, DRAFT, prompts=[PROMPT] * ROWS, max_new=30, config=CONFIG)
  params = cj.SamplingParams(temperature=jnp.float32(1), top_p=jnp.float32(1))
  number_B, used = np.full(ROWS, 2), np.zeros(MOST + 1, int)
  for _ in range(4):
    before = np.asarray(state.stats.accepted).sum(axis=1)
    used += np.bincount(number_B, minlength=MOST + 1)
    parts = []
    for k in (0, 1, 2, MOST):
      start = state if k else state.replace(draft_cache=None)
      after, _ = step(TARGET, DRAFT if k else None, cj.Exact(), params, start, with_num_draft(k or MOST))
      parts.append(after if k else after.replace(draft_cache=state.draft_cache))
    which = np.searchsorted((0, 1, 2, MOST), number_B)

    def own(*leaves):
      if jax.dtypes.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
        return leaves[0]
      return jnp.stack(leaves)[which, np.arange(ROWS)]

    state = jax.tree.map(own, *parts)
    kept = np.asarray(state.stats.accepted).sum(axis=1) - before
    number_B = np.select([number_B == 0, kept == number_B, kept == 0], [0, MOST, 1], 0)
  assert np.all(used[[0, 1, 2, MOST]] > 1000)
  tokens = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + 4]
  counts = np.zeros((3,) * 4)
  np.add.at(counts, tuple(tokens.T), 1)
  q_VVV = np.stack([[laws.filtered_law(x) for x in row] for row in np.asarray(TARGET.logits_VVV)])
  law = laws.text_law(q_VVV, q_VVV, laws.exact_reference, 1, PROMPT[-2:], 4)
  assert abs(laws.chi_square_z(counts.reshape(1, -1), law.reshape(1, -1))) < 5
  stats = jax.device_get(state.stats)
  assert stats.accepted.shape == stats.tested.shape == (ROWS, MOST)
  assert np.all(stats.accepted <= stats.tested)
  np.testing.assert_array_equal(stats.accepted.sum(axis=1), np.asarray(state.from_draft).sum(axis=1))


# A draft that reads the verifier's hidden states.


@flax.struct.dataclass
class Shown:
  """A chain whose cache also holds a hidden state for each position it has read: its token, counted from 1."""

  chain: fakes.MarkovLM

  def __call__(self, tokens_BT, positions_BT, cache):
    tokens_BS, hidden_BS = cache
    logits_BTV, tokens_BS = self.chain(tokens_BT, positions_BT, tokens_BS)
    rows_B1 = jnp.arange(tokens_BT.shape[0])[:, None]
    return logits_BTV, (tokens_BS, hidden_BS.at[rows_B1, positions_BT].set(tokens_BT + 1, mode='drop'))

  def init_cache(self, batch, length, hidden_layers=None):
    assert hidden_layers == (7,), 'the draft asks for these'
    return self.chain.init_cache(batch, length), jnp.zeros((batch, length), jnp.int32)


@flax.struct.dataclass
class Reader:
  """A draft that notes, at each position it reads, the verifier's hidden state before it; its law depends on five."""

  logits_VV: jax.Array
  hidden_layers = (7,)

  def observe(self, cache, target_cache):
    return cache[0], target_cache[1]

  def __call__(self, tokens_BT, positions_BT, cache):
    noted_BS, hidden_BS = cache
    rows_B1 = jnp.arange(tokens_BT.shape[0])[:, None]
    hidden_BT = jnp.where(positions_BT > 0, hidden_BS[rows_B1, jnp.maximum(positions_BT - 1, 0)], 0)
    noted_BS = noted_BS.at[rows_B1, positions_BT].set(hidden_BT, mode='drop')
    back = lambda n: jnp.where(positions_BT >= n, noted_BS[rows_B1, jnp.maximum(positions_BT - n, 0)], 0)
    return self.logits_VV[sum(map(back, range(5))) % self.logits_VV.shape[0]], (noted_BS, hidden_BS)

  def init_cache(self, batch, length):
    return (jnp.full((batch, length), 99, jnp.int32),) * 2


def test_a_reader_of_hidden_states_re_reads_all_that_a_larger_round_added():
  """Its laws and notes are those of the whole text, after rounds of fewer tokens than the one before too."""
  rng = np.random.default_rng(0)
  logits_VV = jnp.asarray(rng.normal(size=(12, 12)), jnp.float32)
  # The verifier likes all tokens as much as the next, so most drafts are kept.
  target, draft = Shown(fakes.random_markov(0, 12, scale=0.3)), Reader(0.3 * logits_VV)
  config = fakes.usual_config(MOST)
  prompts = [rng.integers(0, 12, 1 + i % 7).tolist() for i in range(fakes.BATCH)]
  state = fakes.start(target, draft, prompts=prompts, max_new=100, config=config)
  all_kept = last = 0
  for before, k in itertools.pairwise([MOST, MOST, 1, 2, MOST, 1, 1, 3, 2]):
    texts = fakes.texts(fakes.on_host(state))
    kept = np.asarray(state.stats.accepted)
    state, info = step(target, draft, cj.Exact(), cj.SamplingParams(), state, dataclasses.replace(config, num_draft=k))
    noted = np.asarray(state.draft_cache[0])
    for row, text in enumerate(texts):
      np.testing.assert_array_equal(noted[row, : len(text)], [0, *(np.array(text[:-1]) + 1)])
      law = laws.filtered_law(0.3 * np.asarray(logits_VV)[sum(t + 1 for t in text[-6:-1]) % 12])
      np.testing.assert_allclose(info.draft.probs[row, 0], law, atol=1e-5)
    if before == MOST and k < MOST:
      all_kept += np.sum(last == MOST)
    last = np.sum(np.asarray(state.stats.accepted) - kept, axis=1)
  assert all_kept > 10, 'rounds of all tokens went before rounds of fewer'


@flax.struct.dataclass
class Counted(Reader):
  """A reader that counts the tokens of its passes."""

  widths = set()

  def __call__(self, tokens_BT, positions_BT, cache):
    self.widths.add(tokens_BT.shape[1])
    return super().__call__(tokens_BT, positions_BT, cache)


def test_a_reader_catches_up_before_a_loop_of_fewer_tokens():
  """Rounds of a loop re-read no more than they may have added; what a larger one added is read once, before."""
  rng = np.random.default_rng(1)
  target, draft = Shown(fakes.random_markov(0, 12, scale=0.3)), Counted(jnp.zeros((12, 12)))
  config = fakes.usual_config(MOST)
  prompts = [rng.integers(0, 12, 1 + i % 7).tolist() for i in range(fakes.BATCH)]
  state = fakes.start(target, draft, prompts=prompts, max_new=100, config=config)
  all_kept, missed, widths = 0, {True: 0, False: 0}, {}
  for k, rounds, catches_up in ((MOST, 1, False), (1, 3, True), (MOST, 2, False), (2, 1, True), (MOST, 2, False),
                                (1, 1, False)):
    if catches_up:
      state = decode.catch_up(draft, state)
    Counted.widths.clear()
    state = decode.generate(
        target, draft, cj.Exact(), cj.SamplingParams(), state, dataclasses.replace(config, num_draft=k), rounds)
    widths.setdefault(k, max(Counted.widths, default=0))  # when it was traced
    noted, texts = np.asarray(state.draft_cache[0]), fakes.texts(fakes.on_host(state))
    for row, text in enumerate(texts):
      known = max(len(text) - 1 - k, 0)
      missed[catches_up] += np.sum(noted[row, :known] != [0, *(np.array(text) + 1)][:known])
    all_kept += np.sum(np.asarray(state.stats.accepted)[:, MOST - 1]) if k == MOST else 0
  assert all_kept > 10, 'rounds of all tokens went before those of fewer'
  assert widths == {MOST: MOST + 1, 1: 2, 2: 3}
  assert missed[True] == 0 and missed[False] > 0


def test_before_the_number_changes_its_program_is_made_and_the_draft_catches_up(monkeypatch):
  """Making it is not decoding; and only a smaller number needs the draft to have read what a larger one added."""
  calls, generate, catch_up = [], decode.generate, decode.catch_up

  def noted_generate(target, draft, rule, sampling, state, config, rounds=None):
    calls.append((0 if draft is None else config.num_draft, rounds))
    if rounds == 0:
      time.sleep(0.2)
    return generate(target, draft, rule, sampling, state, config, rounds)

  def noted_catch_up(*arguments):
    calls.append('catch up')
    return catch_up(*arguments)

  monkeypatch.setattr(decode, 'generate', noted_generate)
  monkeypatch.setattr(decode, 'catch_up', noted_catch_up)
  done = answer(flaws=range(50, 200, 2))
  made = [at for at, call in enumerate(calls) if call[1] == 0]
  falls = [at for at in made if calls[at][0] < calls[at - 1][0]]
  assert 0 < len(falls) < len(made), 'the number falls, and rises'
  assert [at for at, call in enumerate(calls) if call == 'catch up'] == [at + 1 for at in falls]
  used = [call[0] for at, call in enumerate(calls) if call != 'catch up' and at not in made]
  assert sum(a != b for a, b in itertools.pairwise(used)) == len(made)
  assert done.stats.seconds.compile >= 0.2 * len(made)


# Text.


GREEDY = cj.SamplingParams(temperature=0.0)


@functools.lru_cache
def tokenizer():
  return fakes.byte_tokenizer()


pytestmark = pytest.mark.usefixtures('quick_programs')


IDS = [97 + i % 7 for i in range(200)]


def options(flaws=(), certainty=30.0, **changes):
  """A verifier that writes IDS and a draft that is wrong at these offsets."""
  config = fakes.FakeConfig(vocab_size=len(tokenizer()), max_length=256)
  wrong = [(token + 1) % 256 if i in flaws else token for i, token in enumerate(IDS)]
  start = tokenizer()('hi')['input_ids']
  models = [fakes.scripted([start + ids], config, certainty) for ids in (IDS, wrong)]
  return dict(target=models[0], draft=models[1], tokenizer=tokenizer(), raw=True, sampling=GREEDY, max_new_tokens=200,
              num_draft=AutoDraft(MOST, CHEAP)) | changes


def answer(**changes):
  return cj.generate_text(['hi'], **options(**changes))


def check_figures(stats):
  assert sum(stats.calls_by_num_draft) == stats.verifier_calls
  assert len(stats.calls_by_num_draft) == MOST + 1 and len(stats.accepted_at) == len(stats.tested_at) == MOST
  assert all(a <= t for a, t in zip(stats.accepted_at, stats.tested_at))
  offered = np.cumsum(stats.calls_by_num_draft[::-1])[::-1][1:]
  assert np.all(np.array(stats.tested_at) <= offered), 'no more is tested than was to be drafted'


def test_the_text_is_the_same_while_the_number_changes():
  """Right for a while, then every second token is wrong: the number falls, and the text is the plain one."""
  flaws = range(50, 200, 2)
  done, plain = answer(flaws=flaws), answer(flaws=flaws, draft=None)
  assert done.tokens == plain.tokens == [IDS]
  check_figures(done.stats)
  assert sum(count > 0 for count in done.stats.calls_by_num_draft) >= 3
  assert done.stats.calls_by_num_draft[0] == 0 and done.stats.calls_by_num_draft[MOST] >= 9
  assert done.stats.accepted == sum(done.from_draft[0]) and done.stats.decoded == 200
  assert plain.stats.calls_by_num_draft is None and plain.stats.accepted_at == ()
  assert answer(flaws=flaws).stats.calls_by_num_draft == done.stats.calls_by_num_draft


def test_a_hopeless_draft_is_left_out():
  done = answer(flaws=range(200))
  assert done.tokens == [IDS] and not any(done.from_draft[0])
  check_figures(done.stats)
  assert done.stats.calls_by_num_draft[0] > 150 and sum(done.stats.calls_by_num_draft[1:]) >= 9
  assert done.stats.tested_at[0] == sum(done.stats.calls_by_num_draft[1:])


def test_a_draft_that_cannot_pay_is_never_run():
  dear = dataclasses.replace(CHEAP, draft=5.0)
  broken = options()['draft'].replace(certainty=jnp.float32(float('nan')))
  done = answer(num_draft=AutoDraft(MOST, dear), draft=broken)
  assert done.tokens == [IDS] and done.stats.calls_by_num_draft == (200, 0, 0, 0, 0)
  both = cj.metrics.merge([done.stats, answer().stats])
  check_figures(both)
  assert both.accepted_at == answer().stats.accepted_at


@pytest.mark.parametrize('draft', ['model', 'lookup'])
def test_a_stream_and_a_look_for_stops_make_the_same_choices(draft):
  """Sampled, so that other numbers would draw other tokens."""
  changes = dict(flaws=range(0, 200, 2), certainty=7.0, sampling=cj.SamplingParams(), seed=3)
  changes |= {'draft': cj.PromptLookup()} if draft == 'lookup' else {}
  done = answer(**changes)
  stream = cj.stream_text('hi', **options(**changes))
  assert ''.join(stream) == done.texts[0]
  stopped = answer(**changes, stop=['\x00 never'])
  assert stopped.tokens == stream.completions.tokens == done.tokens
  calls = [run.stats.calls_by_num_draft for run in (done, stream.completions, stopped)]
  assert calls[0] == calls[1] == calls[2] and sum(count > 0 for count in calls[0]) > 1
  assert done.stats.accepted > 0


def test_a_draft_too_unsure_to_offer_anything_is_left_out():
  """What it does not offer is not tested, and still counts against it."""
  unsure = options()['draft'].replace(certainty=jnp.float32(4.0))
  done = answer(draft=unsure, sampling=cj.SamplingParams(), stop_entropy=1.0)
  assert done.tokens == [IDS] and done.stats.tested_at == (0,) * MOST
  check_figures(done.stats)
  assert done.stats.calls_by_num_draft[0] > 150


def test_a_ledger_and_blocks_go_with_it():
  done = answer(flaws=range(60, 200, 2), ledger=True, block_verification=True, rule=cj.Clamp(0.1),
                sampling=cj.SamplingParams(), certainty=8.0)
  check_figures(done.stats)
  assert sum(count > 0 for count in done.stats.calls_by_num_draft) > 1
  assert done.stats.spent.decided == done.stats.drafted


def test_a_second_call_compiles_nothing(compiles):
  answer(flaws=range(50, 200, 2))
  del compiles[:]
  answer(flaws=range(50, 200, 2))
  answer(flaws=range(50, 200, 2), seed=4)
  assert not compiles


# Measuring.


@pytest.fixture
def measured(monkeypatch):
  """The costs measured so far, a list that grows; nothing is known at the start."""
  found, real = [], schedule.measure

  def measure(*arguments):
    found.append(real(*arguments))
    return found[-1]

  monkeypatch.setattr(schedule, 'measure', measure)
  monkeypatch.setattr(schedule, '_measured', {})
  return found


def test_costs_are_measured_once(measured, compiles, tmp_path):
  auto = AutoDraft(MOST, folder=tmp_path / 'costs')
  done = answer(num_draft=auto)
  [costs] = measured
  assert len(costs.verify) == MOST + 1 and done.tokens == [IDS] and done.stats.seconds.measure > 0
  assert sum(done.stats.calls_by_num_draft) == done.stats.verifier_calls
  for _ in range(2):
    answer(num_draft=AutoDraft(MOST))
  assert len(measured) == 1
  # Another process finds them on disk; what is no use there is measured anew.
  [path] = (tmp_path / 'costs').iterdir()
  schedule._measured.clear()
  answer(num_draft=auto)
  assert len(measured) == 1 and list(schedule._measured.values()) == [costs]
  for nonsense in ('{"verify": [1, 2], "draft"', '{"verify": [1.0], "draft": 1.0}', '[1]'):
    path.write_text(nonsense)
    schedule._measured.clear()
    answer(num_draft=auto)
  assert len(measured) == 4
  answer(num_draft=auto, stop_entropy=1.0)
  assert len(measured) == 4, 'steps of a draft cost the same wherever it ends'
  answer(num_draft=auto, max_new_tokens=20)
  assert len(measured) == 5, 'other buffers have other costs'


@pytest.mark.parametrize('draft', ['reader', 'lookup', 'model'])
def test_whatever_drafts_can_be_measured(draft):
  target = Shown(fakes.random_markov(0, 12)) if draft == 'reader' else fakes.random_markov(0, 12)
  drafts = {'reader': Reader(jnp.zeros((12, 12))), 'lookup': cj.PromptLookup(), 'model': fakes.random_markov(1, 12)}
  config = fakes.usual_config(MOST)
  state = fakes.start(target, drafts[draft], prompts=[[1, 2, 3]] * 4, max_new=9, config=config)
  sampling = jax.tree.map(lambda x: jnp.full(4, x, jnp.float32), cj.SamplingParams())
  costs = schedule.measure(target, drafts[draft], sampling, state, config)
  assert len(costs.verify) == MOST + 1 and costs.first > 0 and min(costs.verify) > 0


def test_fingerprints_tell_apart_what_costs_depend_on(monkeypatch):
  config = fakes.usual_config(MOST)
  usual = (fakes.random_markov(0, 12), fakes.random_markov(1, 12), 4, config)
  others = [
    (fakes.random_markov(0, 13), *usual[1:]),
    (usual[0], None, *usual[2:]),
    (usual[0], cj.PromptLookup(2), *usual[2:]),
    (usual[0], cj.PromptLookup(3), *usual[2:]),
    (*usual[:2], 5, config),
    (*usual[:3], dataclasses.replace(config, max_length=300)),
    (jax.tree.map(lambda x: x.astype(jnp.bfloat16), usual[0]), *usual[1:]),
  ]
  names = [schedule.fingerprint(*case) for case in [usual, *others]]
  assert len(set(names)) == len(names)
  assert schedule.fingerprint(fakes.random_markov(7, 12), *usual[1:]) == names[0], 'numbers cost nothing'
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(77), raising=False)
  assert schedule.cores() == 77 and schedule.fingerprint(*usual) not in names, 'as a process pinned to fewer cores'


# What cannot be answered.


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: AutoDraft(0), 'max_num_draft=0: need a whole number of at least 1'),
    (lambda: AutoDraft(2.5), 'max_num_draft=2.5: need a whole number'),
    (lambda: AutoDraft(True), 'max_num_draft=True: need a whole number'),
    (lambda: AutoDraft(3, CHEAP), 'costs has the seconds of 5 passes: max_num_draft=3 needs 4, over 1 to 4 tokens'),
    (lambda: AutoDraft(3, (1, 2)), r'costs=\(1, 2\): need Costs\(verify, draft\)'),
    (lambda: AutoDraft(folder=3), 'folder=3: need the path'),
    (lambda: Costs((), 1.0), r'verify=\(\): need seconds > 0'),
    (lambda: Costs((1.0, 0.0), 1.0), r'verify=\(1.0, 0.0\): need seconds > 0'),
    (lambda: Costs((1.0, float('nan')), 1.0), 'need seconds > 0'),
    (lambda: Costs(1.0, 1.0), 'verify=1.0: need seconds > 0'),
    (lambda: Costs((1.0,), -1.0), 'draft=-1.0: need seconds >= 0'),
    (lambda: Costs((1.0,), None), 'draft=None: need seconds >= 0'),
    (lambda: Costs((1.0,), 1.0, float('inf')), 'first=inf: need seconds >= 0'),
  ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(num_draft='fast'), "num_draft='fast': need a whole number, 'auto' or AutoDraft"),
    (dict(num_draft=AutoDraft), "need a whole number, 'auto' or AutoDraft"),
    (dict(num_draft=0), 'num_draft=0: speculative decoding needs at least 1'),
    (dict(num_draft=-1), 'num_draft=-1: speculative decoding needs at least 1'),
    (dict(rule=cj.Clamp(tau=[[0.4, 0.3, 0.2, 0.1]])), 'Clamp has numbers for each drafted position, and num_draft is'),
  ],
)
def test_input_that_cannot_be_answered(changes, message, compiles):
  with pytest.raises(ValueError, match=message):
    answer(**changes)
  assert len(compiles) <= 12, 'the keys of the rows at most, operation by operation'


def test_rounds_are_recorded_with_one_number():
  for call in (cj.record_rounds, functools.partial(cj.calibrate, cj.Clamp, kl_per_token=0.01)):
    for number in ('auto', AutoDraft(MOST, CHEAP)):
      with pytest.raises(ValueError, match='num_draft=.*: rounds are recorded with one number of drafted tokens'):
        call(['hi'], **options(num_draft=number))


def test_several_processes_do_not_measure_each_for_itself(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(ValueError, match='each process would measure for itself'):
    answer(num_draft='auto')


def test_without_a_draft_there_is_nothing_to_choose(measured):
  done = answer(num_draft='auto', draft=None)
  assert done.tokens == [IDS] and not measured and done.stats.calls_by_num_draft is None
