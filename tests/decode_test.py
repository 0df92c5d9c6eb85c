"""The decoding loop on Markov chains, where the law and the text it must emit are known exactly."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import decode
from cactus_jax.decode import DecodeConfig, Finish
from cactus_jax.drafts import PromptLookup
from cactus_jax.rules import Cactus, Exact
from cactus_jax.sampling import SamplingParams
from tests import fakes, laws

V, B, MAX_LENGTH = fakes.VOCAB, fakes.BATCH, fakes.MAX_LENGTH
TARGET = fakes.random_markov(0, V)
DRAFT = fakes.near(TARGET, 1)
CONFIG = fakes.usual_config()
EOS_CONFIG = fakes.usual_config(eos_ids=(11, 5))
K = CONFIG.num_draft
CYCLE = fakes.cycle(V)
DRAFTS = {'model': DRAFT, 'lookup': PromptLookup(), 'none': None}
each_draft = pytest.mark.parametrize('kind', DRAFTS)
step = jax.jit(decode.decode_step, static_argnames='config')


def ragged_prompts(seed=0, longest=7):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, V, 1 + i % longest).tolist() for i in range(B)]


def greedy_text(chain, prompt, max_new):
  text = list(prompt)
  for _ in range(max_new):
    text.append(int(np.argmax(fakes.next_logits(chain, text))))
  return text


def assert_same_run(one, other):
  for name in ('tokens', 'length', 'finish', 'round', 'from_draft', 'done'):
    np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
  np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, one.stats, other.stats)


# What is emitted follows the law. 20,000 rows of a chain with 3 tokens, all from the same prompt.

ROWS, PROMPT, ROUNDS = 20_000, [0, 1, 0, 1], 6
SMALL = fakes.random_markov(10, 3), fakes.random_markov(11, 3)
SAMPLINGS = {'plain': {}, 'filtered': dict(temperature=0.7, top_p=0.9)}
RUNS = {  # draft, K, delta or None for the exact rule, sampling
  'none': ('none', 1, None, 'plain'),
  'model-1': ('model', 1, 0.0, 'plain'),  # exact too, and shares its program with cactus-1
  'model-2': ('model', 2, None, 'filtered'),
  'model-3': ('model', 3, None, 'plain'),
  'lookup-2': ('lookup', 2, None, 'plain'),
  'cactus-1': ('model', 1, 0.1, 'plain'),
  'cactus-3': ('model', 3, 0.05, 'plain'),
  'cactus-3-filtered': ('model', 3, 1.0, 'filtered'),
  'cactus-lookup-2': ('lookup', 2, 0.1, 'plain'),
}
each_run = pytest.mark.parametrize('name', RUNS)


@functools.cache
def rounds_of(name):
  """Some rounds by hand: the length before each and what each saw, and the tokens at the end."""
  kind, num_draft, delta, sampling = RUNS[name]
  draft = {'model': SMALL[1], 'lookup': PromptLookup(2), 'none': None}[kind]
  config = DecodeConfig(num_draft=num_draft, max_length=60, vocab_size=3)
  rule = Exact() if delta is None else Cactus(jnp.float32(delta))
  params = jax.tree.map(
    jnp.asarray, SamplingParams(**(dict(temperature=1.0, top_p=1.0) | SAMPLINGS[sampling]))
  )
  state = fakes.start(SMALL[0], draft, prompts=[PROMPT] * ROWS, max_new=50, config=config)
  rounds = []
  for _ in range(ROUNDS):
    before = np.asarray(state.length)
    state, info = step(SMALL[0], draft, rule, params, state, config)
    rounds.append((before, jax.tree.map(np.asarray, info)))
  assert not np.any(state.done)
  return rounds, np.asarray(state.tokens)


@functools.lru_cache
def small_laws(sampling):
  """The verifier's and the draft's law of the token after each two, f64[V, V, V]."""

  def law_of(chain):
    logits = np.asarray(chain.logits_VVV)
    return np.stack([[laws.filtered_law(x, **SAMPLINGS[sampling]) for x in row] for row in logits])

  return law_of(SMALL[0]), law_of(SMALL[1])


def reference_of(name):
  delta = RUNS[name][2]
  return laws.cactus_reference(delta) if delta else laws.exact_reference


@each_run
def test_the_laws_in_a_round_are_those_of_the_models(name):
  """At each position given the tokens before it, drafted ones included; drafts come from their law."""
  kind, num_draft, _, sampling = RUNS[name]
  q_VVV, p_VVV = small_laws(sampling)
  rounds, tokens = rounds_of(name)
  rows = np.arange(ROWS)
  for before, info in rounds:
    text = np.concatenate([tokens[rows[:, None], before[:, None] - [[2, 1]]], info.draft.tokens], axis=1)
    for i in range(num_draft + 1 if kind != 'none' else 1):
      a, b = text[:, i], text[:, i + 1]
      real = i <= info.draft.num_drafted
      np.testing.assert_allclose(info.target_probs[real, i], q_VVV[a, b][real], atol=1e-6)
      if i < info.draft.tokens.shape[1]:
        expected = np.eye(3)[info.draft.tokens[:, i]] if kind == 'lookup' else p_VVV[a, b]
        np.testing.assert_allclose(info.draft.probs[:, i], expected, atol=1e-6)
        assert np.all(info.draft.probs[rows, i, info.draft.tokens[:, i]] > 0)


@each_run
def test_emitted_tokens_follow_their_law(name):
  """Chi-square of all transitions, |z| < 5: the rule's law after a draft, the verifier's at a bonus."""
  kind, num_draft, _, sampling = RUNS[name]
  q_VVV, p_VVV = small_laws(sampling)
  rounds, tokens = rounds_of(name)
  drafted = np.zeros((3, 3, 3, 3))  # last two tokens, the proposal of a lookup, what was emitted
  bonus = np.zeros((3, 3, 3))
  ends = np.zeros((num_draft + 1, 2), int)  # num_accepted, and whether that was all
  for before, info in rounds:
    num_accepted, num_drafted = info.verdict.num_accepted, info.draft.num_drafted
    np.add.at(ends, (num_accepted, (num_accepted == num_drafted).astype(int)), 1)
    for i in range(num_draft + 1):
      rows = np.flatnonzero(num_accepted >= i)
      a, b, y = (tokens[rows, before[rows] + i + back] for back in (-2, -1, 0))
      is_bonus = num_drafted[rows] == i
      np.add.at(bonus, (a[is_bonus], b[is_bonus], y[is_bonus]), 1)
      if not np.all(is_bonus):
        x = info.draft.tokens[rows, i] if kind == 'lookup' else np.zeros(len(rows), int)
        np.add.at(drafted, tuple(part[~is_bonus] for part in (a, b, x, y)), 1)

  assert abs(laws.chi_square_z(bonus, q_VVV)) < 5
  if kind == 'none':
    return
  law = np.empty((3, 3, 3, 3))
  for a, b, x in np.ndindex(3, 3, 3):
    p = np.eye(3)[x] if kind == 'lookup' else p_VVV[a, b]
    law[a, b, x] = laws.emitted_law(p, *reference_of(name)(p, q_VVV[a, b]))
  assert abs(laws.chi_square_z(drafted, law)) < 5
  assert (
    np.all(ends[:num_draft, 0] > 500) and ends[num_draft, 1] > 500
  )  # rejections everywhere, and full accepts
  if kind == 'model' and RUNS[name][2]:  # the laws that must be told apart are apart
    assert np.abs(law[:, :, 0] - q_VVV).max() > 0.05


@each_run
def test_joint_law_of_four_tokens(name):
  """Over several rounds: the verifier's chain for an exact rule, the enumerated process for others.

  Chi-square over 81 texts, |z| < 5. A draw that is used in two rounds would pass every test of a single one.
  """
  kind, num_draft, delta, sampling = RUNS[name]
  if kind == 'lookup' and delta:
    pytest.skip('the law of the process depends on the whole text')
  q_VVV, p_VVV = small_laws(sampling)
  _, tokens = rounds_of(name)
  emitted = tokens[:, len(PROMPT) : len(PROMPT) + 4]
  counts = np.zeros((3,) * 4)
  np.add.at(counts, tuple(emitted.T), 1)
  law = laws.text_law(q_VVV, p_VVV, reference_of(name), num_draft, PROMPT[-2:], 4)
  chain = laws.text_law(q_VVV, q_VVV, laws.exact_reference, 1, PROMPT[-2:], 4)
  assert abs(law.sum() - 1) < 1e-6
  if not delta:
    np.testing.assert_allclose(law, chain, atol=1e-9)
  else:
    assert abs(laws.chi_square_z(counts.reshape(1, -1), chain.reshape(1, -1))) > 20
  assert abs(laws.chi_square_z(counts.reshape(1, -1), law.reshape(1, -1))) < 5


# Every rule through the loop, token by token and by blocks: 200,000 rows, 4 tokens each, with the ledger.

MANY = 200_000
LOOP_PAIR = fakes.random_markov(10, 3), fakes.near(fakes.random_markov(10, 3), 12)
FAST = ('exact', 'cactus-0.1', 'clamp-1', 'opt-0.213')
LOOPED = [case for case in laws.RULES if not case.exact and case.inside and not case.name.startswith('logit')]
each_looped_rule = pytest.mark.parametrize(
  'case',
  [pytest.param(c, id=c.name, marks=() if c.name in FAST else pytest.mark.slow) for c in LOOPED],
)


def law_of(chain):
  return np.stack([[laws.filtered_law(x) for x in row] for row in np.asarray(chain.logits_VVV)])


@functools.partial(jax.jit, static_argnames=('block', 'stop_entropy'))
def four_tokens(rule, block, stop_entropy=None):
  """The new tokens i32[MANY, 4] of the loop and its ledger."""
  config = DecodeConfig(num_draft=2 if stop_entropy is None else 3, max_length=8, vocab_size=3, ledger=True,
                        block_verification=block, stop_entropy=stop_entropy)
  prompt = jnp.tile(jnp.array([PROMPT]), (MANY, 1))
  length = jnp.full(MANY, len(PROMPT))
  keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), jnp.arange(MANY))
  state = decode.prefill(*LOOP_PAIR, prompt, length, keys, length + 4, config)
  state = decode.generate(*LOOP_PAIR, rule, SamplingParams(), state, config)
  return state.tokens[:, len(PROMPT) : len(PROMPT) + 4], state.ledger, state.round


def check_ledger(ledger):
  """Its sum is, on average, ln h/q of the tokens emitted: the difference has mean 0."""
  log_ratio = (np.asarray(ledger.emitted_logprobs, np.float64) - ledger.verifier_logprobs).sum(axis=1)
  difference = log_ratio - ledger.kl
  assert abs(difference.mean()) < 5 * difference.std() / np.sqrt(MANY) + 1e-6
  return log_ratio


@each_looped_rule
def test_joint_law_and_ledger_of_every_rule(case):
  """Chi-square of 81 texts against the enumerated process, |z| < 5; the ledger against the mean of ln h/q."""
  q_VVV, p_VVV = map(law_of, LOOP_PAIR)
  tokens, ledger, _ = jax.device_get(four_tokens(jax.tree.map(jnp.float32, case.rule), False))
  counts = np.zeros((3,) * 4)
  np.add.at(counts, tuple(tokens.T), 1)
  law = laws.text_law(q_VVV, p_VVV, case.reference, 2, PROMPT[-2:], 4)
  assert abs(laws.chi_square_z(counts.reshape(1, -1), law.reshape(1, -1))) < 5
  log_ratio = check_ledger(ledger)
  if case.rule.lossless:
    assert np.all(ledger.kl < 1e-5) and np.all(np.abs(log_ratio) < 1e-4)
  else:
    assert ledger.kl.mean() > 1e-3 and log_ratio.std() > 1e-2
    # What is spent bounds the divergence of the text's law from the verifier's (the text does not tell its rounds).
    plain = laws.text_law(q_VVV, q_VVV, laws.exact_reference, 1, PROMPT[-2:], 4)
    assert laws.kl(law.reshape(-1), plain.reshape(-1)) <= ledger.kl.mean() * 1.02 + 1e-4


BLOCKS = ('exact', 'clamp-0.2', *(pytest.param(name, marks=pytest.mark.slow) for name in (
  'static-cactus-0.3', 'clamp-1', 'interpolation-0.3', 'opt-0.213', 'tokenv3-0.113', 'typical-0.09-0.3')))


@pytest.mark.parametrize('name', BLOCKS)
def test_joint_law_of_block_verification(name):
  """Over several rounds, with laws that depend on the prefix; in no more rounds than token by token."""
  case = next(case for case in laws.RULES if case.name == name)
  q_VVV, p_VVV = map(law_of, LOOP_PAIR)
  rule = jax.tree.map(jnp.float32, case.rule)
  tokens, ledger, rounds = jax.device_get(four_tokens(rule, True))
  counts = np.zeros((3,) * 4)
  np.add.at(counts, tuple(tokens.T), 1)
  target = lambda p, q: laws.emitted_law(p, *case.reference(p, q))
  law = laws.block_text_law(q_VVV, p_VVV, target, 2, PROMPT[-2:], 4)
  if case.rule.lossless:
    chain = laws.text_law(q_VVV, q_VVV, laws.exact_reference, 1, PROMPT[-2:], 4)
    np.testing.assert_allclose(law, chain, atol=1e-12)
  assert abs(laws.chi_square_z(counts.reshape(1, -1), law.reshape(1, -1))) < 5
  check_ledger(ledger)
  fewer = jax.device_get(four_tokens(rule, False))[2] - rounds.astype(float)
  assert fewer.mean() >= -3 * fewer.std() / np.sqrt(MANY)
  assert name != 'exact' or fewer.mean() > 5 * fewer.std() / np.sqrt(MANY)


# A draft that ends where it is unsure.


def entropy(laws):
  return np.sum(jax.scipy.special.entr(laws), axis=-1)


@pytest.mark.parametrize('block', [False, True], ids=['token', 'block'])
def test_joint_law_where_an_unsure_draft_ends(block):
  """The verifier's chain: 200,000 rows, 81 texts, |z| < 5. Half of the draft's laws are beyond the limit."""
  q_VVV, p_VVV = map(law_of, LOOP_PAIR)
  limit = float(np.median(entropy(p_VVV)))
  tokens, ledger, rounds = jax.device_get(four_tokens(Exact(), block, limit))
  counts = np.zeros((3,) * 4)
  np.add.at(counts, tuple(tokens.T), 1)
  chain = laws.text_law(q_VVV, q_VVV, laws.exact_reference, 1, PROMPT[-2:], 4)
  assert abs(laws.chi_square_z(counts.reshape(1, -1), chain.reshape(1, -1))) < 5
  assert len(np.unique(rounds)) > 2 and 0 < ledger.decided.sum() < tokens.size
  np.testing.assert_allclose(ledger.kl, 0, atol=1e-5)


@flax.struct.dataclass
class Counted:
  """A model whose cache also counts its passes."""

  model: fakes.MarkovLM

  def __call__(self, tokens_BT, positions_BT, cache):
    logits_BTV, inner = self.model(tokens_BT, positions_BT, cache[0])
    return logits_BTV, (inner, cache[1] + 1)

  def init_cache(self, batch, length):
    return self.model.init_cache(batch, length), jnp.int32(0)


def test_a_draft_ends_before_the_first_law_of_too_large_an_entropy():
  """In each row by itself; when all have ended no step is computed, and what was not drafted is not counted."""
  draft, limit = Counted(DRAFT), 1.7
  config = dataclasses.replace(CONFIG, stop_entropy=limit)
  state = fakes.start(TARGET, draft, prompts=ragged_prompts(), max_new=12, config=config)
  seen, passes = set(), set()
  while not np.all(state.done):
    before = jax.device_get(state.replace(keys=None))
    state, info = step(TARGET, draft, Exact(), SamplingParams(), state, config)
    live = ~before.done
    sure = entropy(np.asarray(info.draft.probs)) <= limit
    num_drafted = np.cumprod(sure, axis=1).sum(axis=1) * live
    np.testing.assert_array_equal(info.draft.num_drafted, num_drafted)
    spent = int(state.draft_cache[1] - before.draft_cache[1])
    assert spent == 1 + min(num_drafted.max(), K - 1)
    tested = np.asarray(state.stats.tested - before.stats.tested)
    assert np.all(tested.sum(axis=1) <= num_drafted)
    accepted = np.asarray(info.verdict.num_accepted)
    went_on = np.asarray(~state.done) & live
    np.testing.assert_array_equal(tested.sum(axis=1)[went_on], np.minimum(accepted + 1, num_drafted)[went_on])
    seen |= set(num_drafted[live].tolist())
    passes.add(spent)
  assert seen == set(range(K + 1)) and len(passes) > 1


def test_at_no_entropy_at_all_only_the_sure_draft():
  """A greedy law has none: its draft never ends early. One of several tokens always has some."""
  config = dataclasses.replace(CONFIG, stop_entropy=0.0)
  run = functools.partial(fakes.run, TARGET, DRAFT, prompts=ragged_prompts(), max_new=30)
  greedy = SamplingParams(temperature=0.0)
  assert_same_run(run(config=config, sampling=greedy), run(config=CONFIG, sampling=greedy))
  never = run(config=config)
  assert not never.stats.tested.any() and np.all(never.round == 30)


def test_a_law_of_nan_does_not_end_a_draft_in_silence():
  broken = fakes.Broken(DRAFT, jnp.full(B, 12))
  config = dataclasses.replace(CONFIG, stop_entropy=1e3)
  state = fakes.run(TARGET, broken, prompts=ragged_prompts(), max_new=30, config=config)
  assert np.all(state.finish == Finish.NAN)


# Greedy, and drafts that are the target.


@pytest.mark.parametrize(
  'kind, num_draft', [('model', 1), ('model', 3), ('model', 8), ('lookup', 3), ('none', 3)]
)
def test_greedy_is_argmax_token_for_token(kind, num_draft):
  """At temperature 0 every draft and rule gives the text of plain argmax decoding."""
  prompts = ragged_prompts()
  state = fakes.run(
    TARGET,
    DRAFTS[kind],
    prompts=prompts,
    max_new=40,
    config=fakes.usual_config(num_draft),
    sampling=SamplingParams(temperature=0.0),
  )
  assert fakes.texts(state) == [greedy_text(TARGET, prompt, 40) for prompt in prompts]
  if kind != 'none':
    assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()
    assert state.round.max() < 40
  else:
    np.testing.assert_array_equal(state.round, 40)


@pytest.mark.parametrize('num_draft', [1, 3, 8])
def test_a_draft_that_is_the_target_is_always_right(num_draft):
  """Every proposal of 200 tokens is kept, sampled or greedy: a cache not topped up would lose some."""
  prompts = ragged_prompts()
  sampling = SamplingParams(temperature=np.where(np.arange(B) % 2, 1.0, 0.0))
  state = fakes.run(
    TARGET, TARGET, prompts=prompts, max_new=200, config=fakes.usual_config(num_draft), sampling=sampling
  )
  np.testing.assert_array_equal(state.stats.accepted, state.stats.tested)
  np.testing.assert_array_equal(state.round, -(-200 // (num_draft + 1)))
  new = np.arange(state.tokens.shape[1])[None] - np.array([len(p) for p in prompts])[:, None]
  expected = (new >= 0) & (new < 200) & (new % (num_draft + 1) != num_draft)
  np.testing.assert_array_equal(state.from_draft, expected)


def test_lookup_continues_a_cycle():
  """Once a text has come around, every proposal is right."""
  state = fakes.run(CYCLE, PromptLookup(), prompts=[[i % V] for i in range(B)], max_new=60, config=CONFIG)
  assert fakes.texts(state) == [[(i + j) % V for j in range(61)] for i in range(B)]
  np.testing.assert_array_equal(state.stats.accepted, state.stats.tested)
  np.testing.assert_array_equal(state.from_draft[:, V + 1 : 61].sum(axis=1), 36)


def test_greedy_and_sampled_rows_share_a_batch():
  """Temperatures 0, 1, 0, 0.7: greedy rows are argmax, others as where all rows have their temperature."""
  prompts = ragged_prompts()
  temperature = np.resize(np.float32([0, 1, 0, 0.7]), B)
  mixed = fakes.run(
    TARGET, DRAFT, prompts=prompts, max_new=40, config=CONFIG, sampling=SamplingParams(temperature)
  )
  texts = fakes.texts(mixed)
  for one in (1.0, 0.7):
    alike = fakes.texts(
      fakes.run(TARGET, DRAFT, prompts=prompts, max_new=40, config=CONFIG, sampling=SamplingParams(one))
    )
    assert all(texts[i] == alike[i] for i in range(B) if temperature[i] == np.float32(one))
  greedy = [greedy_text(TARGET, prompt, 40) for prompt in prompts]
  assert [texts[i] == greedy[i] for i in range(B)] == (temperature == 0).tolist()


# Rows do not depend on their mates.


@each_draft
def test_order_and_padding_of_the_batch_change_nothing(kind):
  prompts = ragged_prompts()
  run = functools.partial(fakes.run, TARGET, DRAFTS[kind], max_new=40, config=CONFIG, rule=Exact())
  usual = run(prompts=prompts)
  order = np.random.default_rng(0).permutation(B)
  shuffled = run(prompts=[prompts[i] for i in order], rows=order)
  assert fakes.texts(shuffled) == [fakes.texts(usual)[i] for i in order]
  np.testing.assert_array_equal(shuffled.round, usual.round[order])
  padded = run(prompts=prompts, width=16, fill=7)
  assert fakes.texts(padded) == fakes.texts(usual)
  np.testing.assert_array_equal(padded.from_draft, usual.from_draft)
  assert np.any(run(prompts=prompts, seed=1).tokens != usual.tokens)


def test_a_row_alone_is_the_row_in_a_batch():
  prompts = ragged_prompts()
  together = fakes.texts(fakes.run(TARGET, DRAFT, prompts=prompts, max_new=40, config=CONFIG))
  for row in (0, 5, 9, B - 1):
    alone = fakes.run(TARGET, DRAFT, prompts=[prompts[row]], rows=[row], max_new=40, config=CONFIG, width=8)
    assert fakes.texts(alone) == [together[row]]


def test_the_same_prompt_in_two_rows_gives_two_texts():
  texts = fakes.texts(fakes.run(TARGET, DRAFT, prompts=[[1, 2]] * B, max_new=40, config=CONFIG))
  assert len({tuple(text) for text in texts}) == B


# The end of a text.


def draft_that_errs():
  """Follows the cycle except after tokens 3 and 7."""
  return fakes.MarkovLM(
    CYCLE.logits_VVV.at[:, jnp.asarray([3, 7])].set(30.0 * jnp.eye(V)[jnp.asarray([5, 6])])
  )


@pytest.mark.parametrize('name', ['right', 'errs'])
def test_the_text_ends_with_the_first_eos(name):
  """The cycle 0..11 from every token, so that an end falls on every place in a block; nothing follows it."""
  prompts = [[i % V] for i in range(B)]
  draft = {'right': CYCLE, 'errs': draft_that_errs()}[name]
  state = fakes.run(CYCLE, draft, prompts=prompts, max_new=30, config=EOS_CONFIG)
  places = set()
  for row, (text, prompt) in enumerate(zip(fakes.texts(state), prompts)):
    expected = prompt + [(prompt[0] + 1) % V]
    while expected[-1] not in (11, 5):
      expected.append((expected[-1] + 1) % V)
    assert text == expected
    places.add((len(text) - 2) % (K + 1))
    assert not state.tokens[row, len(text) :].any() and not state.from_draft[row, len(text) :].any()
    assert not state.logprobs[row, len(text) :].any()
  assert places == set(range(K + 1))
  np.testing.assert_array_equal(state.finish, Finish.EOS)
  if name == 'errs':
    assert state.stats.accepted.sum() < state.stats.tested.sum()


def test_without_eos_ids_nothing_ends_a_text_but_its_length():
  state = fakes.run(CYCLE, CYCLE, prompts=[[i % V] for i in range(B)], max_new=30, config=CONFIG)
  np.testing.assert_array_equal(state.finish, Finish.LENGTH)
  np.testing.assert_array_equal(state.length, 31)


@pytest.mark.parametrize('short, finish', [(0, Finish.EOS), (1, Finish.LENGTH)])
def test_whichever_end_comes_first_counts(short, finish):
  """An eos that is the last token asked for ends the text as an eos; one after that is never seen."""
  prompts = [[5 + i % 5] for i in range(B)]
  max_new = np.array([11 - prompt[0] - short for prompt in prompts])
  state = fakes.run(CYCLE, CYCLE, prompts=prompts, max_new=max_new, config=EOS_CONFIG)
  assert fakes.texts(state) == [list(range(prompt[0], 12 - short)) for prompt in prompts]
  np.testing.assert_array_equal(state.finish, finish)


def test_an_eos_that_is_only_drafted_ends_nothing():
  """The draft proposes eos all the time, the target never emits it."""
  others = [token for token in range(V) if token not in EOS_CONFIG.eos_ids]
  following = np.zeros(V, int)
  following[others] = np.roll(others, -1)
  target = fakes.MarkovLM(jnp.asarray(np.broadcast_to(30.0 * np.eye(V)[following], (V, V, V)), jnp.float32))
  draft = fakes.MarkovLM(jnp.zeros((V, V, V), jnp.float32).at[..., 11].set(30.0))
  state = fakes.run(
    target, draft, prompts=[[others[i % 10]] for i in range(B)], max_new=30, config=EOS_CONFIG
  )
  assert fakes.texts(state) == [[others[(i + j) % 10] for j in range(31)] for i in range(B)]
  np.testing.assert_array_equal(state.finish, Finish.LENGTH)
  np.testing.assert_array_equal(state.stats.accepted, 0)
  np.testing.assert_array_equal(state.stats.tested.sum(axis=1), 30)


@each_draft
def test_as_many_tokens_as_were_asked_for(kind):
  """1 to K + 2, whatever the block would have held."""
  max_new = np.arange(B) % (K + 2) + 1
  prompts = ragged_prompts()
  for target, draft in ((TARGET, DRAFTS[kind]), (CYCLE, CYCLE if kind == 'model' else DRAFTS[kind])):
    state = fakes.run(target, draft, prompts=prompts, max_new=max_new, config=CONFIG)
    np.testing.assert_array_equal(state.length - [len(prompt) for prompt in prompts], max_new)
    np.testing.assert_array_equal(state.finish, Finish.LENGTH)
    np.testing.assert_array_equal(
      state.tokens[np.arange(state.tokens.shape[1])[None] >= state.length[:, None]], 0
    )


def test_nothing_asked_for_is_done_at_once():
  prompts = ragged_prompts()
  state = fakes.start(TARGET, DRAFT, prompts=prompts, max_new=np.where(np.arange(B) % 2, 3, 0), config=CONFIG)
  np.testing.assert_array_equal(state.done, np.arange(B) % 2 == 0)
  np.testing.assert_array_equal(state.finish[::2], Finish.LENGTH)
  state = fakes.on_host(decode.generate(TARGET, DRAFT, Exact(), SamplingParams(), state, CONFIG))
  np.testing.assert_array_equal(
    state.length - [len(prompt) for prompt in prompts], np.where(np.arange(B) % 2, 3, 0)
  )
  np.testing.assert_array_equal(state.round[::2], 0)


def test_a_full_buffer_ends_a_row():
  """Prompts up to and beyond max_length: each row fills up to it exactly, and nothing is overwritten."""
  lengths = MAX_LENGTH + np.arange(B) % 12 - 7  # up to 4 tokens beyond
  prompts = [(np.arange(length) % V).tolist() for length in lengths]
  state = fakes.run(CYCLE, CYCLE, prompts=prompts, max_new=50, config=CONFIG)
  np.testing.assert_array_equal(state.length, np.maximum(lengths, MAX_LENGTH))
  np.testing.assert_array_equal(state.finish, Finish.CACHE_FULL)
  assert fakes.texts(state) == [(np.arange(length) % V).tolist() for length in state.length]
  just_right = fakes.run(CYCLE, CYCLE, prompts=[[0] * (MAX_LENGTH - 5)] * B, max_new=5, config=CONFIG)
  np.testing.assert_array_equal(just_right.length, MAX_LENGTH)
  np.testing.assert_array_equal(just_right.finish, Finish.LENGTH)


# Models that fail.


@pytest.mark.parametrize('which', ['target', 'draft'])
@pytest.mark.parametrize('value', [float('nan'), float('inf')], ids=str)
def test_a_row_ends_where_a_model_gives_no_logits(which, value):
  """Odd rows fail at different positions and keep what they had, greedy or not. Even rows never notice."""
  prompts = ragged_prompts()
  since = np.where(np.arange(B) % 2, 8 + np.arange(B) % 11, 10_000).astype(np.int32)
  broken = lambda model, fails: fakes.Broken(
    model, jnp.asarray(since if fails else np.full_like(since, 10_000)), value
  )
  sampling = SamplingParams(temperature=np.where(np.arange(B) % 3, 1.0, 0.0))
  args = dict(prompts=prompts, max_new=40, config=CONFIG, sampling=sampling)
  clean = fakes.run(TARGET, DRAFT, **args)
  state = fakes.run(broken(TARGET, which == 'target'), broken(DRAFT, which == 'draft'), **args)
  failed = np.arange(B) % 2 == 1
  np.testing.assert_array_equal(state.finish, np.where(failed, Finish.NAN, Finish.LENGTH))
  assert np.all(state.done)
  for row, (text, expected) in enumerate(zip(fakes.texts(state), fakes.texts(clean))):
    assert text == expected[: len(text)]
    if failed[row]:  # the round that reaches the first bad position is lost, and no more
      assert since[row] - K - 1 <= len(text) <= since[row] + 2
      assert not state.tokens[row, len(text) :].any()
    else:
      assert text == expected
  assert np.all(np.isfinite(state.logprobs))
  assert len({len(text) for text in fakes.texts(state)}) > 5


# The loop.


def test_the_loop_is_decode_step_repeated():
  """`generate` equals a Python loop, call by call or bounded, and finished rows stay as they are."""
  prompts, max_new = ragged_prompts(), 5 + np.arange(B)
  begin = lambda: fakes.start(TARGET, DRAFT, prompts=prompts, max_new=max_new, config=EOS_CONFIG)
  sampling = SamplingParams(temperature=np.where(np.arange(B) % 4, 1.0, 0.0))
  whole = fakes.on_host(decode.generate(TARGET, DRAFT, Exact(), sampling, begin(), EOS_CONFIG))

  state, snapshots, steps = begin(), {}, 0
  while not np.all(state.done):
    state, _ = step(TARGET, DRAFT, Exact(), sampling, state, EOS_CONFIG)
    steps += 1
    host = fakes.on_host(state)
    of_row = lambda row: jax.tree.map(lambda x: x[row], host.replace(target_cache=None, draft_cache=None))
    for row in np.flatnonzero(host.done):
      snapshots.setdefault(row, of_row(row))
      jax.tree.map(np.testing.assert_array_equal, of_row(row), snapshots[row])
  assert_same_run(fakes.on_host(state), whole)
  assert set(whole.finish) == {Finish.EOS, Finish.LENGTH}
  assert steps == whole.round.max() > whole.round.min()

  for chunk in (1, 4):
    state, chunks = begin(), 0
    while not np.all(state.done):
      state = decode.generate(TARGET, DRAFT, Exact(), sampling, state, EOS_CONFIG, max_rounds=chunk)
      chunks += 1
    assert_same_run(fakes.on_host(state), whole)
    assert chunks == -(-steps // chunk)
  untouched = fakes.on_host(
    decode.generate(TARGET, DRAFT, Exact(), sampling, begin(), EOS_CONFIG, max_rounds=0)
  )
  assert fakes.texts(untouched) == prompts


def test_the_state_is_donated():
  """No copy of the caches stays behind, and the large buffers are written in place."""
  state = fakes.start(TARGET, DRAFT, prompts=ragged_prompts(), max_new=20, config=CONFIG)
  large = lambda state: [
    x.unsafe_buffer_pointer() for x in (state.tokens, state.target_cache, state.draft_cache)
  ]
  before, leaves = large(state), jax.tree.leaves(state)
  after = decode.generate(TARGET, DRAFT, Exact(), SamplingParams(), state, CONFIG)
  assert all(leaf.is_deleted() for leaf in leaves)
  assert large(after) == before


def test_what_the_caller_passed_is_not_donated():
  """Keys, lengths and limits can be used for a second run."""
  prompt, length, limit = jnp.ones((B, 4), jnp.int32), jnp.full(B, 4), jnp.full(B, 20)
  keys = jax.random.split(jax.random.key(0), B)
  runs = [
    decode.generate(
      TARGET,
      DRAFT,
      Exact(),
      SamplingParams(),
      decode.prefill(TARGET, DRAFT, prompt, length, keys, limit, CONFIG),
      CONFIG,
    )
    for _ in range(2)
  ]
  assert_same_run(*map(fakes.on_host, runs))
  assert runs[0].tokens is not prompt and not keys.is_deleted()


def test_the_caches_hold_the_text():
  """The invariant of DecodeState: the target's is valid before length - 1, the draft's before length - 2."""
  state = fakes.start(TARGET, DRAFT, prompts=ragged_prompts(), max_new=100, config=EOS_CONFIG)
  seen = set()
  for _ in range(20):
    state, info = step(
      TARGET, DRAFT, Exact(), SamplingParams(temperature=np.ones(B, np.float32)), state, EOS_CONFIG
    )
    host = fakes.on_host(state)
    for row, length in enumerate(host.length):
      np.testing.assert_array_equal(host.target_cache[row, : length - 1], host.tokens[row, : length - 1])
      np.testing.assert_array_equal(host.draft_cache[row, : length - 2], host.tokens[row, : length - 2])
    seen |= set(np.asarray(info.verdict.num_accepted).tolist())
  assert seen == set(range(K + 1))


def test_a_prompt_may_be_read_in_pieces(monkeypatch):
  """The same text from a prompt read 3 tokens at a time, in pieces no longer than that."""
  args = dict(prompts=ragged_prompts(longest=11), max_new=20, config=CONFIG)
  whole, sizes = fakes.run(TARGET, DRAFT, **args), []
  spy = lambda self, tokens, *rest, read=fakes.MarkovLM.__call__: (
    sizes.append(tokens.shape[1]) or read(self, tokens, *rest)
  )
  with monkeypatch.context() as patch:
    patch.setattr(decode, 'PREFILL_CHUNK', 3)
    patch.setattr(fakes.MarkovLM, '__call__', spy)
    decode._program(decode._prefill).clear_cache()
    state = fakes.start(TARGET, DRAFT, **args)
  decode._program(decode._prefill).clear_cache()
  assert set(sizes) == {3, 2}
  assert_same_run(
    fakes.on_host(decode.generate(TARGET, DRAFT, Exact(), SamplingParams(), state, CONFIG)), whole
  )


# What is reported.


@each_draft
def test_logprobs_are_the_verifiers_unfiltered_ones(kind):
  """Log-softmax of the raw logits, whatever the sampling, at each new token; 0 elsewhere."""
  prompts = ragged_prompts()
  sampling = SamplingParams(temperature=0.5, top_k=4)
  state = fakes.run(TARGET, DRAFTS[kind], prompts=prompts, max_new=30, config=CONFIG, sampling=sampling)
  for row, (text, prompt) in enumerate(zip(fakes.texts(state), prompts)):
    expected = np.zeros(state.logprobs.shape[1])
    for i in range(len(prompt), len(text)):
      expected[i] = np.log(laws.softmax(fakes.next_logits(TARGET, text[:i]))[text[i]])
    np.testing.assert_allclose(state.logprobs[row], expected, atol=1e-5)


@each_draft
def test_counters_agree_with_each_other(kind):
  prompts, max_new = ragged_prompts(), 30 + np.arange(B)
  state = fakes.run(
    TARGET,
    DRAFTS[kind],
    prompts=prompts,
    max_new=max_new,
    config=fakes.usual_config(),
    sampling=SamplingParams(temperature=np.where(np.arange(B) % 2, 0.0, 1.0)),
  )
  accepted, tested = state.stats.accepted, state.stats.tested
  emitted = state.length - [len(prompt) for prompt in prompts]
  np.testing.assert_array_equal(emitted, max_new)
  np.testing.assert_array_equal(accepted.sum(axis=1), state.from_draft.sum(axis=1))
  others = emitted - accepted.sum(axis=1)  # a recovery or bonus a round, but for a last round cut short
  assert np.all((others == state.round) | (others == state.round - 1))
  assert np.all(accepted <= tested) and np.all(tested <= state.round[:, None])
  assert np.all(tested[:, 1:] <= accepted[:, :-1])
  if kind == 'none':
    assert accepted.shape == tested.shape == (B, 0)
    np.testing.assert_array_equal(state.round, emitted)
  else:
    assert 0 < accepted.sum() < tested.sum()


@pytest.mark.parametrize('draft', [DRAFT, PromptLookup()], ids=['model', 'lookup'])
def test_flags_and_counters_are_those_of_the_rounds(draft):
  """Rebuilt from the verdict of every round, with an eos and a limit that cut some short.

  (A lookup often drafts fewer tokens than it may; the one after those is as much a bonus.)
  """
  prompts, config = ragged_prompts(), EOS_CONFIG
  state = fakes.start(TARGET, draft, prompts=prompts, max_new=7 + np.arange(B) % 9, config=config)
  shape = state.tokens.shape
  flags, accepted, tested = np.zeros(shape, bool), np.zeros((B, K), int), np.zeros((B, K), int)
  bonus, short = np.zeros(shape, bool), set()
  cut = set()
  while not np.all(state.done):
    length, done = np.asarray(state.length), np.asarray(state.done)
    state, info = step(
      TARGET, draft, Exact(), SamplingParams(temperature=np.ones(B, np.float32)), state, config
    )
    for row in np.flatnonzero(~done):
      count, num_accepted = int(state.length[row]) - length[row], int(info.verdict.num_accepted[row])
      num_drafted = int(info.draft.num_drafted[row])
      flags[row, length[row] : length[row] + min(count, num_accepted)] = True
      accepted[row, : min(count, num_accepted)] += 1
      tested[row, : min(count, num_accepted + 1, num_drafted)] += 1
      if count > num_accepted == num_drafted:
        bonus[row, length[row] + num_accepted] = True
        short.add(num_drafted < K)
      if count <= num_accepted:
        cut.add(int(state.finish[row]))
  if draft is DRAFT:
    assert cut == {Finish.EOS, Finish.LENGTH} and short == {False}
  else:
    assert True in short
  np.testing.assert_array_equal(state.from_draft, flags)
  np.testing.assert_array_equal(state.is_bonus, bonus)
  np.testing.assert_array_equal(state.stats.accepted, accepted)
  np.testing.assert_array_equal(state.stats.tested, tested)


# Vocabularies and wrong calls.


def test_padding_of_the_vocabulary_is_never_emitted():
  """Models with more columns than tokens, each its own number and all likeliest: the run without them."""
  prompts = ragged_prompts()
  args = dict(prompts=prompts, max_new=40, config=CONFIG, sampling=SamplingParams(temperature=0.9))
  assert_same_run(
    fakes.run(fakes.padded(TARGET, 3), fakes.padded(DRAFT, 5), **args), fakes.run(TARGET, DRAFT, **args)
  )


@pytest.mark.parametrize(
  'change, message',
  [
    (
      dict(num_draft=0),
      r'num_draft=0: speculative decoding needs at least 1 .* use draft=None for plain decoding',
    ),
    (dict(max_length=0), 'max_length=0: need at least 1'),
    (dict(vocab_size=0), 'vocab_size=0: need at least 1'),
    (dict(eos_ids=(3, 5)), r'eos_ids=\(3, 5\), pad_id=0: token 5 is outside the vocabulary 0\.\.4'),
    (dict(eos_ids=(-1,)), 'token -1 is outside the vocabulary'),
    (dict(pad_id=5), 'token 5 is outside the vocabulary'),
    (dict(stop_entropy=-0.5), 'stop_entropy=-0.5: need a number of nats >= 0, or None'),
    (dict(stop_entropy=float('nan')), 'stop_entropy=nan: need a number of nats'),
    (dict(stop_entropy='low'), "stop_entropy='low': need a number of nats"),
  ],
  ids=str,
)
def test_configurations_that_make_no_sense_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    DecodeConfig(**(dict(num_draft=2, max_length=20, vocab_size=5) | change))


@pytest.mark.parametrize('draft', [None, DRAFT, PromptLookup()])
def test_a_model_with_too_few_tokens_is_refused(draft):
  config = DecodeConfig(num_draft=2, max_length=20, vocab_size=V + 1)
  state = fakes.start(TARGET, draft, prompts=[[1, 2]], max_new=3, config=config)
  with pytest.raises(ValueError, match=f'a model gives {V} logits, config.vocab_size is {V + 1}: draft and verifier'):
    decode.generate(TARGET, draft, Exact(), SamplingParams(), state, config)


def test_a_prompt_without_tokens_is_refused():
  with pytest.raises(ValueError, match='each prompt needs at least 1 token and has at most 3'):
    fakes.start(TARGET, None, prompts=[[1, 2, 3], []], max_new=3, config=CONFIG)


def test_a_bad_law_behind_the_rejection_is_never_reached():
  """A verifier that fails on what a draft wrongly proposed does not end the row: it would not have been asked."""
  lost = jnp.arange(V) == 7  # the model fails after token 7, which only the draft ever writes
  sure = lambda token: 100.0 * jax.nn.one_hot(token, V)
  target = fakes.MarkovLM(jnp.where(lost[None, :, None], jnp.nan, jnp.broadcast_to(sure(3), (V, V, V))))
  draft = fakes.MarkovLM(jnp.broadcast_to(sure(7), (V, V, V)))
  state = fakes.run(target, draft, prompts=[[1], [2, 3]], max_new=5, config=CONFIG)
  np.testing.assert_array_equal(state.finish, Finish.LENGTH)
  assert fakes.texts(state) == [[1, 3, 3, 3, 3, 3], [2, 3, 3, 3, 3, 3, 3]]
  assert not state.from_draft.any()


def test_a_prompt_wider_than_the_buffers_is_refused():
  with pytest.raises(
    ValueError, match='prompts are padded to 215 tokens, the buffers hold 214: raise max_length or pad less'
  ):
    fakes.start(TARGET, DRAFT, prompts=[[1]] * B, width=215, max_new=3, config=CONFIG)
