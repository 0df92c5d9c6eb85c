"""Many prompts over a few rows: each answer is that of its prompt alone, and no row waits for another."""

import dataclasses
import time

import jax
import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import batching, decode, metrics, sharding, text
from tests import talker as talker_lib

TARGET, DRAFT = talker_lib.talker(), talker_lib.talker(certainty=1.4)
PROMPTS = ['go on ' * (i % 5) + 'abcdefghijk'[i] for i in range(11)]
STOP = ('ZB', 'Bh')
OPTIONS = dict(target=TARGET, draft=DRAFT, tokenizer=talker_lib.TOKENIZER, raw=True, num_draft=3, max_new_tokens=24,
               rule=cj.Cactus(0.1), sampling=cj.SamplingParams(temperature=0.9, top_k=20))

pytestmark = pytest.mark.usefixtures('quick_programs')


def each(prompts=PROMPTS, **changes):
  """{prompt: its answer}, in the order of finishing."""
  return dict(cj.generate_each(prompts, **OPTIONS | {'batch_size': 3} | changes))


def row(together, i):
  """What a batch says of one of its rows."""
  lists = {field.name: getattr(together, field.name) for field in dataclasses.fields(together)}
  return {name: value[i] for name, value in lists.items() if isinstance(value, list)}


def assert_same(answers, together):
  """Each answer is that row of a batch: exactly, but for logarithms, which other shapes round otherwise.

  (What a row spends past a stop string depends on when the host looks.)
  """
  assert sorted(answers) == list(range(len(together.texts)))
  for i, answer in answers.items():
    ours, theirs = row(answer, 0), row(together, i)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
      if name == 'kl' and answer.finish_reasons == ['stop']:
        assert value >= 0
      elif name in ('kl', 'logprobs', 'emitted_logprobs', 'verifier_logprobs'):
        np.testing.assert_allclose(value, theirs[name], atol=2e-4)
      else:
        assert value == theirs[name], (i, name)


@pytest.fixture(scope='module')
def together():
  """The answers as one batch, with the ledger and a stop string that some run into."""
  return cj.generate_text(PROMPTS, **OPTIONS, ledger=True, stop=STOP)


def test_the_batch_has_answers_of_many_kinds(together):
  assert {'eos', 'length', 'stop'} <= set(together.finish_reasons)
  assert len({len(tokens) for tokens in together.tokens}) > 4
  assert {'accepted', 'recovered', 'bonus'} == {origin for row in together.origins for origin in row}


@pytest.mark.parametrize('batch_size', [1, pytest.param(3, marks=pytest.mark.slow), 16])
def test_each_answer_is_that_of_a_batch(together, batch_size):
  answers = each(ledger=True, stop=STOP, batch_size=batch_size)
  assert_same(answers, together)


def test_counts_are_those_of_a_batch():
  counts = lambda stats: dataclasses.replace(stats, seconds=None)
  answers = each()
  assert counts(metrics.merge([answer.stats for answer in answers.values()])) == counts(
      cj.generate_text(PROMPTS, **OPTIONS).stats)


def test_rows_that_are_filled_together(together):
  """Of sixteen rows two are filled at a time, the last one with nothing beside it."""
  answers = dict(cj.generate_each(PROMPTS * 3, **OPTIONS, ledger=True, stop=STOP, batch_size=16))
  for i in range(0, 33, 11):
    assert_same({j: answers[i + j] for j in range(11)}, together)


def test_prompts_may_have_numbers_of_their_own():
  delta, temperature, seed = (np.linspace(low, high, 11) for low, high in ((0, 2), (0.3, 1.5), (5, 15)))
  own = dict(rule=cj.Cactus(delta), sampling=cj.SamplingParams(temperature=temperature), seed=seed.astype(int))
  together = cj.generate_text(PROMPTS, **OPTIONS | own)
  assert_same(each(**own), together)
  assert together.texts != cj.generate_text(PROMPTS, **OPTIONS).texts


@pytest.mark.parametrize('draft', [None, cj.PromptLookup()], ids=['plain', 'lookup'])
def test_other_drafts(draft):
  changes = dict(draft=draft, rule=cj.Exact())
  answers = each(**changes)
  assert_same(answers, cj.generate_text(PROMPTS, **OPTIONS | changes))
  if draft is None:
    assert {origin for answer in answers.values() for origin in answer.origins[0]} == {'bonus'}


def test_a_budget_is_each_rows_own():
  changes = dict(rule=cj.Budget(kl_total=0.5))
  answers = each(**changes)
  assert_same(answers, cj.generate_text(PROMPTS, **OPTIONS | changes))
  assert 0 < max(answer.kl[0] for answer in answers.values()) <= 0.5


@pytest.mark.parametrize('size, groups', [(3, 1), (4, 4)])
def test_no_row_waits_for_another(monkeypatch, size, groups):
  """The loop runs no more rounds than one that always has its rows full, but for the last answers.

  Nor where rows are shared out to groups of devices, each of which must have as many: prompts are then read beside
  idle rows.
  """
  monkeypatch.setattr(sharding, 'row_groups', lambda mesh: groups)
  rounds, busy = [], []
  generate = decode.generate

  def counted(target, draft, rule, sampling, state, *rest):
    before, live = np.asarray(state.round), np.asarray(~state.done)
    state = generate(target, draft, rule, sampling, state, *rest)
    rounds.append(int((np.asarray(state.round) - before).max()))
    busy.append(int(live.sum()))
    return state

  monkeypatch.setattr(decode, 'generate', counted)
  answers = each(batch_size=size)
  calls = [answers[i].stats.verifier_calls for i in range(11)]
  assert sum(rounds) <= sum(calls) / size + max(calls)
  assert sum(rounds) < sum(max(calls[i : i + size]) for i in range(0, 11, size)), 'what fixed batches would take'
  full = [count for count, number in zip(busy, rounds) if number]
  assert set(full[:-size]) == {size}, 'as long as prompts wait, all rows are busy'
  assert {i: answer.tokens for i, answer in answers.items()} == {i: answer.tokens for i, answer in each().items()}


def test_a_row_with_a_stop_string_is_decoded_no_further(monkeypatch):
  """With a row for each prompt: those that are live are those without an answer."""
  answered, live = [], []
  generate = decode.generate

  def counted(target, draft, rule, sampling, state, *rest):
    if answered:
      live.append((int(np.sum(~np.asarray(state.done))), 11 - len(answered)))
    return generate(target, draft, rule, sampling, state, *rest)

  monkeypatch.setattr(decode, 'generate', counted)
  for _, answer in cj.generate_each(PROMPTS, **OPTIONS, batch_size=16, stop=STOP):
    answered.append(answer.finish_reasons[0])
  assert 'stop' in answered[:-1] and len(live) > 2 and all(a == b for a, b in live), live


def test_answers_come_as_they_are_finished():
  """Answers are there before later prompts are begun, and in the order in which they end."""
  seen, order = [], []
  for index, answer in cj.generate_each(PROMPTS, **OPTIONS, batch_size=2, progress=seen.append):
    order.append(index)
    if len(order) == 1:
      assert seen[-1] < 3 * OPTIONS['max_new_tokens'], 'no third prompt has been answered'
  assert sorted(order) == list(range(11)) and order != sorted(order)
  assert seen == sorted(seen) and len(seen) > 5
  assert seen[-1] == sum(answer.stats.decoded for answer in each(batch_size=2).values())


def test_seconds_add_up():
  each()  # makes the programs
  start, waited = time.perf_counter(), 0.0
  parts = []
  for _, answer in cj.generate_each(PROMPTS, **OPTIONS, batch_size=3):
    parts.append(answer.stats.seconds)
    time.sleep(0.02)
    waited += 0.02
  total = time.perf_counter() - start
  assert all(part.first_token > 0 and part.decode > 0 for part in parts)
  counted = sum(part.first_token + part.decode + part.compile for part in parts)
  assert 0.5 * (total - waited) < counted < total - waited
  assert metrics.merge([answer.stats for answer in each().values()]).tokens_per_second > 0


def test_prompts_of_other_sizes_have_smaller_buffers(monkeypatch):
  """Long prompts first; a few of one size go with the next larger."""
  monkeypatch.setattr(batching, 'BATCHES_OF_A_SIZE', 1)
  made = []
  prefill = decode.prefill
  monkeypatch.setattr(decode, 'prefill', lambda *args: made.append(args[-1].max_length) or prefill(*args))
  prompts = [*PROMPTS[:2], 'x' * 60, *PROMPTS[2:6]]
  answers = each(prompts, batch_size=2)
  assert sorted(set(made), reverse=True) == [96, 48, 32]
  assert made == sorted(made, reverse=True)
  assert_same(answers, cj.generate_text(prompts, **OPTIONS))


def test_an_answer_longer_than_the_cache_ends_there():
  prompts = ['w' * 90, 'w' * 20]
  answers = each(prompts, max_new_tokens=4000)
  assert_same(answers, cj.generate_text(prompts, **OPTIONS | {'max_new_tokens': 4000}))
  assert answers[0].finish_reasons == ['cache_full'] and len(answers[0].tokens[0]) == 6


def test_nothing_is_compiled_twice(compiles):
  each()
  compiles.clear()
  each(seed=4, rule=cj.Cactus(0.3))
  assert not compiles


@pytest.mark.parametrize('changes, message', [
    (dict(batch_size=0), 'batch_size=0: need a whole number of at least 1'),
    (dict(batch_size=True), 'batch_size=True: need a whole number'),
    (dict(num_draft='auto'), "num_draft='auto': prompts that come and go share one number"),
    (dict(prompts=[]), 'prompts is empty'),
    (dict(prompts=['x' * 96]), 'prompt 0 has 96 tokens; the context of the model is 96'),
    (dict(seed=[1, 2]), 'need a whole number, or one for each of the 11 prompts'),
    (dict(rule=cj.Cactus([0.1, 0.2])), 'each of the 11 rows'),
])
def test_refuses(changes, message):
  """By the call itself, before an answer is asked for."""
  with pytest.raises(ValueError, match=message):
    cj.generate_each(**OPTIONS | {'prompts': PROMPTS} | changes)


def test_warnings_name_the_caller():
  with pytest.warns(UserWarning, match='at temperature 0') as caught:
    cj.generate_each(PROMPTS, **OPTIONS | {'sampling': cj.SamplingParams(temperature=0)})
  assert caught[0].filename == __file__
  with pytest.warns(UserWarning, match='at temperature 0') as caught:
    cj.generate_text(PROMPTS, **OPTIONS | {'sampling': cj.SamplingParams(temperature=0), 'max_new_tokens': 1})
  assert caught[0].filename == __file__


@pytest.mark.parametrize('min_live', [1, 2, 3])
def test_the_loop_ends_when_fewer_rows_are_live(min_live):
  """min_live: the first round after which fewer rows are live is the last."""
  prompts = [PROMPTS[i] for i in (0, 3, 6)]
  lengths = sorted(answer.stats.verifier_calls for answer in each(prompts).values())
  assert len(set(lengths)) == 3
  job = text.Job(prompts, **OPTIONS, stop=(), seed=0, draft_tokenizer=None, ledger=False, block_verification=False,
                 stop_entropy=None)
  config = job.config(96)
  state = job.prefill([0, 1, 2], config)
  state = decode.generate(TARGET, DRAFT, *job.laws, state, config, None, min_live)
  assert int(np.asarray(state.round).max()) == lengths[3 - min_live]
  assert int(np.sum(~np.asarray(jax.device_get(state.done)))) < min_live
