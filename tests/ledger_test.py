"""The ledger against sums by hand, budgets against adversaries, and figures from recorded rounds against the loop."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import decode, ledger
from cactus_jax.ledger import Budget
from cactus_jax.records import record_class
from cactus_jax.rules import Cactus, Clamp, Exact, Interpolation, LogitMargin, Static, TargetRule, TopK
from cactus_jax.sampling import Draft, SamplingParams
from tests import fakes, laws

V, B, K = fakes.VOCAB, fakes.BATCH, 3
TARGET = fakes.random_markov(0, V)
DRAFT = fakes.near(TARGET, 1)
CONFIG = decode.DecodeConfig(num_draft=K, max_length=fakes.MAX_LENGTH, vocab_size=V, ledger=True)
PROMPTS = [[1, 2]] * B


def rounds(rule, count=12, config=CONFIG, target=TARGET, draft=DRAFT, max_new=60, sampling=SamplingParams()):
  """The state before and after each round, what it saw, and the last state."""
  state = fakes.start(target, draft, prompts=PROMPTS, max_new=max_new, config=config)
  seen = []
  for _ in range(count):
    after, info = decode.decode_step(target, draft, rule, sampling, state, config)
    seen.append((state, after, jax.tree.map(np.asarray, info)))
    state = after
  return seen, fakes.on_host(state)


@pytest.mark.parametrize(
  'rule, reference',
  [(Clamp(0.7), laws.target_reference(functools.partial(laws.clamp_law, tau=0.7))),
   (Cactus(0.3), laws.cactus_reference(0.3)),
   (Exact(), laws.exact_reference)],
  ids=['clamp', 'cactus', 'exact'],
)  # fmt: skip
def test_the_ledger_is_the_sum_over_the_positions_that_were_decided(rule, reference):
  """Round by round in float64, with end-of-sequence tokens and the limit cutting rounds short."""
  config = decode.DecodeConfig(num_draft=K, max_length=fakes.MAX_LENGTH, vocab_size=V, ledger=True, eos_ids=(11,))
  seen, last = rounds(rule, 8, config, max_new=15)
  kl, chi2 = [[] for _ in range(B)], np.zeros(B)
  cut = 0
  for before, after, info in seen:
    for row in range(B):
      new = int(after.length[row] - before.length[row])
      cut += 0 < new < info.verdict.num_accepted[row] + 1
      for i in range(new):
        where = int(before.length[row]) + i
        q = info.target_probs[row, i].astype(np.float64)
        token = int(after.tokens[row, where])
        if i < K:
          p = info.draft.probs[row, i].astype(np.float64)
          h = laws.emitted_law(p, *reference(p, q))
          kl[row].append(laws.kl(h, q))
          chi2[row] += laws.f_divergence(h, q, 'pearson')
        else:
          h = q
        assert last.ledger.emitted_logprobs[row, where] == pytest.approx(np.log(h[token]), abs=1e-4)
        assert last.ledger.verifier_logprobs[row, where] == pytest.approx(np.log(q[token]), abs=1e-4)
  assert cut > 0
  books = last.ledger
  np.testing.assert_array_equal(books.tokens, last.length - 2)
  np.testing.assert_array_equal(books.decided, [len(spent) for spent in kl])
  np.testing.assert_allclose(books.kl, [sum(spent) for spent in kl], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(books.max_kl, [max(spent) for spent in kl], rtol=1e-4, atol=2e-6)
  np.testing.assert_allclose(books.chi2, chi2, rtol=1e-3, atol=1e-4)
  np.testing.assert_array_equal(books.histogram.sum(axis=1), books.decided)
  np.testing.assert_array_equal(books.flips, 0)
  edges = ledger.bin_edges()
  for row in range(B):
    index = np.flatnonzero(books.histogram[row])[-1]
    assert books.max_kl[row] <= edges[index] * 1.0001 and (index == 0 or books.max_kl[row] > edges[index - 1] * 0.9999)
  assert rule.lossless == (books.kl.max() < 1e-4)
  assert np.any(books.decided < books.tokens), 'no bonus was emitted'


def test_keeping_a_ledger_changes_no_token():
  run = functools.partial(fakes.run, TARGET, DRAFT, prompts=PROMPTS, max_new=60, rule=Clamp(0.7))
  without = run(config=fakes.usual_config())
  assert without.ledger is None
  np.testing.assert_array_equal(run(config=CONFIG).tokens, without.tokens)


def test_a_rule_that_leaves_the_support_costs_infinitely_much():
  """Where filters cut tokens that the draft has; what the verifier would never emit is counted."""
  sampling = SamplingParams(temperature=1.0, top_p=0.5)
  wide = fakes.near(TARGET, 3, noise=3.0)
  _, last = rounds(Interpolation(0.9, published=True), draft=wide, sampling=sampling)
  assert np.any(np.isinf(last.ledger.kl)) and last.ledger.flips.sum() > 0
  assert last.ledger.histogram[:, -1].sum() > 0
  _, last = rounds(Interpolation(0.9), draft=wide, sampling=sampling)
  assert np.all(np.isfinite(last.ledger.kl)) and last.ledger.flips.sum() == 0 and last.ledger.kl.mean() > 0.1


# Greedy.


def test_a_logit_margin_of_0_is_exact_match_where_logits_tie():
  tied = fakes.MarkovLM(jnp.round(TARGET.logits_VVV))
  run = functools.partial(fakes.run, tied, fakes.MarkovLM(jnp.round(DRAFT.logits_VVV)), prompts=PROMPTS, max_new=60,
                          config=CONFIG, sampling=SamplingParams(temperature=0.0))  # fmt: skip
  strict = run(rule=LogitMargin(0.0))
  np.testing.assert_array_equal(strict.tokens, run(rule=Exact()).tokens)
  assert strict.ledger.flips.sum() == 0


def test_a_logit_margin_counts_its_flips():
  """At temperature 0: 0 is exact match; a margin keeps drafts within it, and each flip is one of those."""
  greedy = SamplingParams(temperature=0.0)
  exact = fakes.run(TARGET, DRAFT, prompts=PROMPTS, max_new=60, config=CONFIG, rule=Exact(), sampling=greedy)
  strict, last = rounds(LogitMargin(0.0), 40, sampling=greedy)
  np.testing.assert_array_equal(last.tokens, exact.tokens)
  assert last.ledger.flips.sum() == 0 and np.all(last.ledger.kl == 0)
  seen, last = rounds(LogitMargin(0.8), 40, sampling=greedy)
  flips = np.zeros(B, int)
  logits = np.asarray(TARGET.logits_VVV)
  for row in range(B):
    text = last.tokens[row, : last.length[row]]
    for a, b, y in zip(text[:-2], text[1:], text[2:]):
      short = logits[a, b].max() - logits[a, b, y]
      assert short <= 0.8 + 1e-5
      flips[row] += short > 0
  np.testing.assert_array_equal(last.ledger.flips, flips)
  assert flips.sum() > 20 and np.all(np.isinf(last.ledger.kl[flips > 0]))
  assert last.stats.accepted.sum() / last.round.sum() > exact.stats.accepted.sum() / exact.round.sum()


# Numbers for each drafted position.


def test_a_rule_may_have_a_number_for_each_drafted_position():
  """A price only at the first position: the others are verified as in speculative sampling."""
  by_slot = Clamp(np.float32([[1.5, 0.0, 0.0]]))
  seen, _ = rounds(by_slot)
  verdicts = np.concatenate([info.verdict.num_accepted for *_, info in seen])
  alike, _ = rounds(Clamp(np.tile(np.float32([1.5, 0.0, 0.0]), (B, 1))))
  np.testing.assert_array_equal(verdicts, np.concatenate([info.verdict.num_accepted for *_, info in alike]))
  charged = jax.vmap(jax.vmap(lambda tau, p, q: ledger.divergence.kl(Clamp(tau).output_law(p, q), q)))
  _, last = rounds(by_slot, 1)
  state, _, info = rounds(by_slot, 1)[0][0]
  expected = charged(np.tile(np.float32([1.5, 0.0, 0.0]), (B, 1)), info.draft.probs, info.target_probs[:, :K])
  decided = np.arange(K)[None] <= info.verdict.num_accepted[:, None]
  np.testing.assert_allclose(last.ledger.kl, np.sum(expected * decided, axis=1), atol=1e-6)
  assert np.all(np.asarray(expected)[:, 1:] < 1e-6) and np.any(np.asarray(expected)[:, 0] > 1e-3)
  with pytest.raises(ValueError, match=r'shape \(1, 2\): .* one for each of the 3 drafted positions of each row'):
    rounds(Clamp(np.float32([[1.0, 2.0]])), 1)


# Budgets.

# A verifier that is all but sure, and drafts that spread over what it would hardly say: each relaxed token is dear.
DEAR = fakes.cycle(V, certainty=6.0), fakes.random_markov(5, V, scale=0.3)
PAIRS = {'near': (TARGET, DRAFT), 'dear': DEAR, 'far': (TARGET, fakes.random_markov(9, V, scale=3.0))}


@pytest.mark.parametrize('pair', PAIRS)
@pytest.mark.parametrize('extra', [{}, dict(kl_per_token=5.0)], ids=['spread', 'greedy'])
def test_a_total_is_never_exceeded(pair, extra):
  """Whatever the models, by rows with totals from nothing to plenty; even if each token may cost 5 nats."""
  totals = np.geomspace(1e-4, 30, B).astype(np.float32)
  totals[0] = 0
  state = fakes.run(*PAIRS[pair], prompts=PROMPTS, max_new=150, config=CONFIG, rule=Budget(kl_total=totals, **extra))
  spent = state.ledger.kl
  assert np.all(spent <= totals) and spent[0] == 0
  assert np.mean(spent[8:14] > 0.2 * totals[8:14]) > 0.5, 'hardly anything was spent'
  alone = fakes.run(*PAIRS[pair], prompts=PROMPTS[:1], rows=[7], max_new=150, config=CONFIG,
                    rule=Budget(kl_total=float(totals[7]), **jax.tree.map(float, extra)))  # fmt: skip
  np.testing.assert_array_equal(alone.tokens[0], state.tokens[7])


def test_a_budget_of_nothing_is_exact():
  run = functools.partial(fakes.run, TARGET, DRAFT, prompts=PROMPTS, max_new=60, config=CONFIG)
  exact = run(rule=Exact())
  for budget in (Budget(kl_total=0.0), Budget(kl_per_token=0), Budget(kl_per_token=0.1, kl_total=0)):
    assert budget.lossless
    state = run(rule=budget)
    np.testing.assert_array_equal(state.tokens, exact.tokens)
    assert np.all(state.ledger.kl < 1e-5)
  assert not Budget(kl_per_token=0.1).lossless and not Budget(kl_total=[0.0, 0.1]).lossless


@pytest.mark.parametrize('rate', [0.003, 0.01, 0.05])
@pytest.mark.parametrize('pair', ['near', 'far'])
def test_a_rate_is_held(pair, rate):
  """Within 5 % over 500 tokens, on average over rows; each row within 15 %."""
  config = decode.DecodeConfig(num_draft=K, max_length=510, vocab_size=V, ledger=True)
  state = fakes.run(*PAIRS[pair], prompts=PROMPTS, max_new=500, config=config, rule=Budget(kl_per_token=rate))
  np.testing.assert_array_equal(state.ledger.tokens, 500)
  spent = state.ledger.kl / 500
  assert np.mean(spent) == pytest.approx(rate, rel=0.05)
  np.testing.assert_allclose(spent, rate, rtol=0.15)


def test_a_budget_can_be_verified_by_blocks():
  config = decode.DecodeConfig(num_draft=K, max_length=510, vocab_size=V, ledger=True, block_verification=True)
  state = fakes.run(TARGET, DRAFT, prompts=PROMPTS, max_new=500, config=config, rule=Budget(kl_per_token=0.02))
  assert np.mean(state.ledger.kl / 500) == pytest.approx(0.02, rel=0.07)


def test_a_rule_that_jit_could_confuse_is_refused():
  """And a budget by position, which means nothing."""

  @flax.struct.dataclass
  class Mine(TargetRule):
    number: float

    def target(self, p, q):
      return q

  with pytest.raises(ValueError, match='Mine is no cactus_jax.record_class: make it one'):
    fakes.run(TARGET, DRAFT, prompts=PROMPTS, max_new=5, config=CONFIG, rule=Mine(0.1))
  with pytest.raises(ValueError, match=r'Budget holds a value of shape \(1, 3\)'):
    fakes.run(TARGET, DRAFT, prompts=PROMPTS, max_new=5, config=CONFIG, rule=Budget(kl_total=[[0.1] * 3]))


def test_a_budget_needs_a_ledger():
  with pytest.raises(ValueError, match='steers by what it has spent: set ledger=True'):
    fakes.run(TARGET, DRAFT, prompts=PROMPTS, max_new=5, config=fakes.usual_config(), rule=Budget(kl_per_token=0.1))


def test_without_a_draft_nothing_is_spent():
  state = fakes.run(TARGET, None, prompts=PROMPTS, max_new=20, config=CONFIG, rule=Budget(kl_per_token=0.1))
  assert np.all(state.ledger.kl == 0) and np.all(state.ledger.decided == 0) and np.all(state.ledger.tokens == 20)


# Recorded rounds.


@functools.lru_cache
def recorded(count=60, seed_rule=Exact()):
  seen, last = rounds(seed_rule, count, max_new=200)
  parts = [jax.tree.map(lambda leaf: leaf[~np.asarray(before.done)], (info.draft, info.target_probs))
           for before, _, info in seen]  # fmt: skip
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), last


@pytest.mark.parametrize('rule', [Clamp(0.7), Cactus(0.2), TopK(3)], ids=['clamp', 'cactus', 'top_k'])
def test_expected_figures_are_those_of_the_loop(rule):
  """On the rounds of the very rule, where the sums of the loop have the expected figures for their mean."""
  (draft, target_probs), last = recorded(60, rule)
  figures = ledger.expected(rule, draft, target_probs)
  assert figures.kl_per_token == pytest.approx(last.ledger.kl.sum() / last.ledger.tokens.sum(), rel=0.05)
  assert figures.accepted_len == pytest.approx(last.stats.accepted.sum() / last.round.sum(), rel=0.05)
  assert figures.acceptance_rate == pytest.approx(last.stats.accepted.sum() / last.stats.tested.sum(), rel=0.05)
  edges = np.append(0.0, ledger.bin_edges())
  share = np.cumsum(last.ledger.histogram.sum(axis=0)) / last.ledger.decided.sum()
  assert edges[np.searchsorted(share, 0.97)] * 0.8 <= figures.kl_99 <= edges[np.searchsorted(share, 0.997) + 1] * 1.2


def test_expected_figures_by_hand():
  """Two rounds of two tokens, one of which has a single proposal."""
  p = np.float32([[[0.5, 0.5], [0.8, 0.2]], [[0.9, 0.1], [0.5, 0.5]]])
  q = np.float32([[[0.25, 0.75], [0.4, 0.6], [0.5, 0.5]], [[0.6, 0.4], [0.5, 0.5], [0.5, 0.5]]])
  draft = Draft(tokens=np.int32([[0, 0], [0, 1]]), probs=p, num_drafted=np.int32([2, 1]))
  figures = ledger.expected(Exact(), draft, q)
  assert figures.accepted_len == pytest.approx((0.5 + 0.5 * 0.5 + 2 / 3) / 2)
  assert figures.acceptance_rate == pytest.approx((0.5 + 0.25 + 2 / 3) / (1 + 0.5 + 1))
  assert figures.kl_per_token == pytest.approx(0, abs=1e-6)
  figures = ledger.expected(Interpolation(1.0), draft, q)
  spent = laws.kl(p[0, 0], q[0, 0]) + laws.kl(p[0, 1], q[0, 1]) + laws.kl(p[1, 0], q[1, 0])
  assert figures.accepted_len == pytest.approx(1.5) and figures.acceptance_rate == pytest.approx(1.0)
  assert figures.kl_per_token == pytest.approx(spent / 5, rel=1e-4)


def test_the_clamp_keeps_most_at_the_same_cost():
  """On the same rounds, calibrated to the same nats a token."""
  blocks, _ = recorded()
  for nats in (0.005, 0.03):
    _, clamp = ledger.calibrate(Clamp, *blocks, nats)
    assert clamp.kl_per_token == pytest.approx(nats, rel=2e-3)
    for make, high in ((Cactus, 50.0), (Interpolation, 1.0)):
      number, other = ledger.calibrate(make, *blocks, nats, high=high)
      assert other.kl_per_token == pytest.approx(nats, rel=2e-3)
      assert clamp.acceptance_rate > other.acceptance_rate > ledger.expected(Exact(), *blocks).acceptance_rate


def test_what_cannot_be_judged_on_recorded_rounds():
  """A rule that judges by other laws, and a budget, which depends on the text."""
  blocks, _ = recorded()
  for rule in (LogitMargin(1.0), Static(LogitMargin(1.0)), Budget(kl_total=1.0)):
    with pytest.raises(ValueError, match='cannot be judged on recorded rounds'):
      ledger.expected(rule, *blocks)
  by_list = ledger.expected(Clamp(tau=[[0.9, 0.5, 0.1]]), *blocks)
  assert by_list == ledger.expected(Clamp(np.float32([[0.9, 0.5, 0.1]])), *blocks)
  with pytest.raises(ValueError, match=r'shape \(1, 2\)'):
    ledger.expected(Clamp(tau=[[0.9, 0.5]]), *blocks)


def test_calibration_says_what_it_cannot_reach():
  blocks, _ = recorded()
  with pytest.raises(ValueError, match='low=1e-07 to high=50, and at 50: alpha=50'):
    ledger.calibrate(Interpolation, *blocks, 0.1)
  with pytest.raises(ValueError, match='low=2, high=1: need low < high'):
    ledger.calibrate(Clamp, *blocks, 0.1, low=2, high=1)
  with pytest.raises(ValueError, match=r'kl_per_token=9: on these rounds the rule spends .* at 1e-07 and .* at 50'):
    ledger.calibrate(Clamp, *blocks, 9)
  for nats in (0, -1, float('nan'), 'x'):
    with pytest.raises(ValueError, match='need one finite number of nats > 0'):
      ledger.calibrate(Clamp, *blocks, nats)


def test_calibration_searches_either_way():
  """A threshold spends less for a larger number."""
  blocks, _ = recorded()
  number, figures = ledger.calibrate(lambda x: Interpolation(1 - x), *blocks, 0.02, low=1e-4, high=1.0)
  rising, same = ledger.calibrate(Interpolation, *blocks, 0.02, low=1e-4, high=1.0)
  assert number == pytest.approx(1 - rising, abs=1e-3)
  assert figures.kl_per_token == pytest.approx(0.02, rel=3e-3) and figures.kl_per_token <= 0.02
  assert same.accepted_len == pytest.approx(figures.accepted_len, rel=1e-3)
  for make in ('clamp', Clamp(0.1), Budget, LogitMargin, lambda x: x, TopK):
    with pytest.raises(ValueError, match='need a class|cannot be judged|is no rule|need a whole number'):
      ledger.calibrate(make, *blocks, 0.02)


def test_prices_fall_along_the_draft_and_give_more_tokens():
  """At the same nats a token, a price by position keeps more than one price everywhere."""
  blocks, _ = recorded()
  prices = ledger.prices_by_position(0.4, *blocks)
  assert prices.shape == (1, K) and prices[0, -1] == np.float32(0.4)
  assert np.all(np.diff(prices[0]) < -0.05) and prices[0, 0] < 0.4 * (K + 1)
  by_position = ledger.expected(Clamp(prices), *blocks)
  _, even = ledger.calibrate(Clamp, *blocks, by_position.kl_per_token)
  assert by_position.accepted_len > even.accepted_len
  with pytest.raises(ValueError, match='tau=0: need one finite number of nats > 0'):
    ledger.prices_by_position(0, *blocks)


def test_bins():
  edges = ledger.bin_edges()
  assert len(edges) == ledger.NUM_BINS and edges[0] == ledger.SMALLEST and edges[-1] == np.inf and edges[-2] > 80
  values = np.float32([0, 1e-9, 1e-7, 2e-7, 0.01, 1.0, 30.0, 1e5, np.inf])
  expected = [np.searchsorted(edges, value * (1 - 1e-6)) for value in values]
  np.testing.assert_array_equal(ledger._bin(jnp.asarray(values)), expected)


@record_class
class Undefined(TargetRule):
  """A rule whose law is not one where the draft is sure."""

  number: float

  def target(self, p, q):
    return jnp.where(jnp.max(p) > 0.5, jnp.nan, q) * self.number


def test_a_rule_without_a_law_ends_the_row():
  """As a model without usable logits does; nothing of that round is committed."""
  state = fakes.run(TARGET, DRAFT, prompts=PROMPTS, max_new=60, config=CONFIG, rule=Undefined(1.0))
  assert np.all(state.finish == decode.Finish.NAN) and np.all(np.isfinite(state.ledger.kl))
  assert np.all(np.isfinite(state.ledger.emitted_logprobs))
