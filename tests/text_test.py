"""Prompts to text: what the host does before, between and after the rounds of decoding.

Most tests decode a `fakes.ScriptedLM`, whose text is known in advance, with a draft that is right where the test
wants it to be; so a given character or stop string can be put at any place of any round.
"""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import text as text_lib
from cactus_jax.models import transformer
from cactus_jax.models.config import ModelConfig
from tests import fakes

GREEDY = cj.SamplingParams(temperature=0.0)
PROMPT = 'hi'
FAMILY, ASTRONAUT = '👨‍👩‍👧‍👦', '👩‍🚀'  # several characters each, joined by U+200D
TEXTS = {
  'emoji': f'Up {ASTRONAUT} and {FAMILY}🏳️‍🌈👍🏽!',
  'cjk': '日本語のテスト。 文字 化け, 한국어',
  'mixed': f'the café {ASTRONAUT}日本 e\u0301 мир\n the 👍🏽',
  'replacement': 'a\ufffdb \ufffd\ufffd the end\ufffd',
}


@functools.lru_cache
def tokenizer():
  return fakes.byte_tokenizer()


def ids_of(text):
  """Ids of the bytes of a text in their fewest tokens."""
  return tokenizer()(text)['input_ids']


def decoded(ids):
  return tokenizer().decode(ids, skip_special_tokens=True)


def special(name):
  return tokenizer().convert_tokens_to_ids(f'<|{name}|>')


def config(**changes):
  """A context and end-of-sequence tokens that serve nearly every test, so that they share programs."""
  common = dict(vocab_size=len(tokenizer()), max_length=96, eos_ids=(special('user'), special('system')))
  return fakes.FakeConfig(**common | changes)


def end():
  return tokenizer().eos_token_id


def pair(answers, flaws=(), prompts=None, **settings):
  """Verifier and draft that answer raw prompts with these ids; the draft is wrong at the offsets `flaws`."""
  prompts = [PROMPT] * len(answers) if prompts is None else prompts
  scripts = [ids_of(prompt) + list(answer) for prompt, answer in zip(prompts, answers)]
  drafts = [list(script) for script in scripts]
  for prompt, draft in zip(prompts, drafts):
    for flaw in flaws:
      place = len(ids_of(prompt)) + flaw
      if place < len(draft):
        draft[place] = (draft[place] + 1) % 256
  return dict(
    target=fakes.scripted(scripts, config(**settings)), draft=fakes.scripted(drafts, config(**settings))
  )


def options(**changes):
  """Options that give the same shapes to all calls, which then share programs."""
  return dict(tokenizer=tokenizer(), raw=True, sampling=GREEDY, max_new_tokens=90) | changes


def answer(ids, flaws=(), **changes):
  """`generate_text` of one scripted answer."""
  return cj.generate_text([PROMPT], **(options(**pair([ids], flaws)) | changes))


def stream(ids, flaws=(), **changes):
  """The pieces of one scripted answer, and the stream."""
  pieces = cj.stream_text(PROMPT, **(options(**pair([ids], flaws)) | changes))
  return list(pieces), pieces


def figures(done):
  """Completions without its seconds, to be compared."""
  stats = dataclasses.replace(done.stats, seconds=None)
  return dataclasses.replace(done, stats=stats)


def tiny(**changes):
  """A random transformer of 2 layers with the tokenizer's vocabulary, padded."""
  sizes = dict(
    family='llama',
    vocab_size=len(tokenizer()) + 5,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=256,
    norm_eps=1e-5,
    rope_theta=10000.0,
    tie_embeddings=True,
  )
  shape = ModelConfig(**sizes | changes)
  params = transformer.random_params(jax.random.key(3), shape)
  return cj.Transformer(params.replace(embed=params.embed * 4), shape)


pytestmark = pytest.mark.usefixtures('quick_programs')


@pytest.fixture
def good_programs():
  """Programs that are worth their making, for a model of some size."""
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture(scope='module')
def target():
  return tiny()


@pytest.fixture(scope='module')
def draft(target):
  """Agrees with the target now and then."""
  return target.early_exit(1)


# Prompts.


def test_encode_of_chat_raw_and_conversations():
  turns = [{'role': 'system', 'content': 'be'}, {'role': 'user', 'content': 'the'}]
  chat = cj.encode(['the', turns], tokenizer(), raw=False)
  assert chat[0] == [special('user'), *ids_of('the'), end(), special('assistant')]
  assert chat[1] == [special('system'), *ids_of('be'), end(), *chat[0]]
  assert cj.encode(['the', ' the'], tokenizer(), raw=True) == [ids_of('the'), ids_of(' the')]
  assert all(type(token) is int for row in chat for token in row)


def test_raw_needs_no_chat_template():
  plain = fakes.byte_tokenizer(chat_template=None)
  assert cj.encode(['the'], plain, raw=True) == [ids_of('the')]


def test_the_chat_template_reaches_the_models():
  prompt, ids = 'the', ids_of(' yes')
  chat = cj.encode([prompt], tokenizer(), raw=False)[0]
  model = fakes.scripted([chat + ids + [end()]], config())
  done = cj.generate_text([prompt], target=model, draft=model, **options(raw=False))
  assert done.texts == [' yes'] and done.finish_reasons == ['eos']


# A row alone and in a batch.

BATCH = ['The dog', 'the cat, it ', 'hop on pop, the dog']  # 7, 10 and 14 tokens


@pytest.fixture(scope='module')
def run(target, draft):
  """How to answer prompts by the tiny pair; all rows have 25 to 32 slots, so that one program serves them."""

  def run(prompts, seeds, **changes):
    return cj.generate_text(
      prompts,
      **options(
        target=target,
        draft=draft,
        seed=seeds,
        max_new_tokens=18,
        sampling=cj.SamplingParams(),
        rule=cj.Cactus(0.1),
      )
      | changes,
    )

  return run


@pytest.fixture(scope='module', params=[0.0, 1.0], ids=['greedy', 'sampled'])
def batch(request, run):
  """`run` at one temperature, and the answers to the batch together; each row has its seed."""
  run = functools.partial(run, sampling=cj.SamplingParams(temperature=request.param))
  return run, run(BATCH, [5, 6, 7])


def rows_of(done):
  return list(zip(done.texts, done.tokens, done.from_draft, done.finish_reasons))


def test_batch_equals_each_row_alone(batch):
  run, together = batch
  alone = [rows_of(run([prompt], [seed]))[0] for prompt, seed in zip(BATCH, [5, 6, 7])]
  assert rows_of(together) == alone
  rejected = together.stats.drafted - together.stats.accepted
  assert together.stats.accepted > 0 and rejected > 0, 'the draft should be right sometimes'
  assert len({len(ids_of(prompt)) for prompt in BATCH}) == 3


@pytest.mark.slow
def test_batch_equals_each_row_alone_in_buffers_of_other_sizes(run):
  prompts = ['a', 'the cat, it ', 'hop on pop the cat is hopping on the top of it, and pop is not']
  together = run(prompts, [5, 6, 7])
  assert rows_of(together) == [rows_of(run([prompt], [seed]))[0] for prompt, seed in zip(prompts, [5, 6, 7])]


def test_order_of_the_rows_does_not_matter(batch):
  run, together = batch
  order = [2, 0, 1]
  permuted = run([BATCH[i] for i in order], [5 + i for i in order])
  assert rows_of(permuted) == [rows_of(together)[i] for i in order]
  assert permuted.stats.accepted_at == together.stats.accepted_at


def test_greedy_text_is_the_same_with_and_without_draft(run):
  done = run(BATCH, [1, 2, 3], sampling=GREEDY)
  plain = run(BATCH, 0, sampling=GREEDY, draft=None)
  assert plain.tokens == done.tokens and plain.texts == done.texts
  assert done.stats.verifier_calls < plain.stats.verifier_calls


# Seeds. A flat law shows the draws themselves, whatever the prompt.


@pytest.fixture(scope='module')
def flat():
  """Tokens of prompts of equal length by a flat law, one seed a row."""

  def run(prompts, seed):
    model = fakes.scripted([[0]] * len(prompts), config(), certainty=0.0)
    done = cj.generate_text(
      prompts, **options(target=model, draft=None, seed=seed, max_new_tokens=10, sampling=cj.SamplingParams())
    )
    return done.tokens

  return run


def test_same_seed_and_prompt_same_text(flat):
  a, b, c, d = flat(['ab', 'ab', 'ab', 'ab'], [1, 2, 1, 2**32 + 2])
  assert a == c and b == d and a != b
  assert flat(['xy', 'ab', 'zz', 'ab'], [7, 1, 8, 2])[1::2] == [a, b]


def test_one_seed_gives_different_prompts_different_draws(flat):
  a, b, c, d = flat(['ab', 'ac', 'ba', 'ab'], 3)
  assert a == d and len({tuple(row) for row in (a, b, c)}) == 3
  assert flat(['ab', 'ac', 'ba', 'ab'], np.int64(3))[0] == a
  assert flat(['ab', 'ac', 'ba', 'ab'], -1)[0] != a


def test_the_default_seed_is_fixed(flat, target):
  prompts = ['ab', 'ac', 'ba', 'ab']
  model = fakes.scripted([[0]] * 4, config(), certainty=0.0)
  default = cj.generate_text(prompts, target=model, tokenizer=tokenizer(), raw=True, max_new_tokens=10)
  assert default.tokens == flat(prompts, 0)


def test_row_keys_depend_on_seed_and_prompt_only():
  data = lambda seed, rows: np.asarray(jax.random.key_data(cj.row_keys(seed, rows))).tolist()
  keys = data([0, 1, 0, 0], [[5, 6], [5, 6], [5, 6], [6, 5]])
  assert keys[0] == keys[2] and len({tuple(key) for key in keys}) == 3
  assert data(1, [[5, 6]])[0] == keys[1]


# How a row ends.


@pytest.mark.parametrize('flaws', [(), (0, 2, 3, 9), range(60)], ids=['all kept', 'some kept', 'none kept'])
def test_max_new_tokens_is_exact(flaws):
  ids = ids_of('abcdefghijklmnopqrstuvwxyz')
  for count in range(1, 8):
    done = answer(ids, flaws, max_new_tokens=count)
    assert done.tokens == [ids[:count]]
    assert done.finish_reasons == ['length']
    assert done.stats.new_tokens == done.stats.decoded == count


def test_any_number_of_tokens_may_be_asked_for():
  ids = ids_of('abc') + [end()]
  for count in (2**31, 2**63, 10**30):
    done = answer(ids, max_new_tokens=count)
    assert done.texts == ['abc'] and done.finish_reasons == ['eos']


def test_any_of_several_eos_ids_ends_a_row_at_every_offset():
  ids = ids_of('abcdefghijkl')
  for offset in range(11):
    for eos in (*config().eos_ids, end()):
      script = ids[:offset] + [eos] + ids[offset:]
      done = answer(script)
      assert done.tokens == [script[: offset + 1]]
      assert done.finish_reasons == ['eos']
      assert done.texts == [decoded(script[: offset + 1])]
      assert len(done.from_draft[0]) == len(done.logprobs[0]) == done.stats.decoded == offset + 1


def test_eos_by_the_draft_alone_ends_nothing():
  ids = ids_of('abcdefghij') + [end()]
  models = pair([ids])
  script = models['draft'].script_BS
  for offset in range(1, 6):
    wrong = models['draft'].replace(script_BS=script.at[0, len(ids_of(PROMPT)) + offset].set(end()))
    done = cj.generate_text([PROMPT], **options(**models | {'draft': wrong}))
    assert done.texts == ['abcdefghij'] and done.finish_reasons == ['eos']


def test_the_end_of_the_context_is_said():
  ids = ids_of('abcdefghijklmnopqrstuvwxyz' * 4)
  done = answer(ids, max_new_tokens=95)
  assert done.finish_reasons == ['cache_full'] and done.tokens == [ids[:94]]
  assert answer(ids, max_new_tokens=94).finish_reasons == ['length']


def test_without_eos_ids_a_row_runs_to_the_end_of_the_shorter_context():
  no_eos = fakes.byte_tokenizer()
  no_eos.eos_token = None
  ids = ids_of('abcdefgh') + [end()] * 40
  models = pair([ids], eos_ids=())
  models['draft'] = models['draft'].replace(config=config(max_length=20))
  done = cj.generate_text([PROMPT], **options(**models, tokenizer=no_eos))
  assert done.finish_reasons == ['cache_full'] and done.tokens == [ids[:18]] and done.texts == ['abcdefgh']


def test_nan_ends_its_row_only():
  answers = [ids_of('abcdefgh'), ids_of('ABCDEFGH') + [end()], [-1]]
  answers[0][6] = -1
  done = cj.generate_text([PROMPT] * 3, **options(**pair(answers)))
  assert done.finish_reasons == ['nan', 'eos', 'nan']
  assert done.texts == ['abcde', 'ABCDEFGH', ''], 'what the rounds before the NaN gave is kept'
  assert done.logprobs[2] == done.from_draft[2] == []


# Stop strings.


def expected_stop(ids, stops):
  """(tokens up to the one that completes a stop string, text before it) by looking after every token."""
  for count in range(1, len(ids) + 1):
    text = decoded(ids[:count])
    found = [text.find(stop) for stop in stops if stop in text]
    if found:
      return ids[:count], text[: min(found)]
  return ids, decoded(ids)


def check_stop(ids, stop, flaws=(), **changes):
  """Completions, and a stream, after checking texts, tokens and lengths against `expected_stop`."""
  done = answer(ids, flaws, stop=stop, **changes)
  tokens, text = expected_stop(ids, [stop] if isinstance(stop, str) else stop)
  assert done.texts == [text] and done.tokens == [tokens]
  assert done.finish_reasons == ['stop']
  assert len(done.from_draft[0]) == len(done.logprobs[0]) == len(tokens)
  assert done.stats.new_tokens == len(tokens) <= done.stats.decoded
  pieces, streamed = stream(ids, flaws, stop=stop, **changes)
  assert ''.join(pieces) == text
  for count in range(len(pieces)):
    assert text.startswith(''.join(pieces[:count]))
  late = streamed.completions
  assert (late.texts, late.tokens, late.finish_reasons) == (done.texts, done.tokens, done.finish_reasons)
  assert late.logprobs == done.logprobs and late.from_draft == done.from_draft
  return done


@pytest.mark.parametrize('flaws', [(), (1, 4, 5), range(60)], ids=['all kept', 'some kept', 'none kept'])
@pytest.mark.parametrize(
  'stop', ['XY', 'X', 'XXXY', 'QXYZWVUT'], ids=['pair', 'one', 'begins with itself', 'longer than a block']
)
def test_stop_at_every_offset_of_a_block(stop, flaws):
  """Also across the border of two blocks, and shorter than one."""
  for offset in range(11):
    script = 'abcdefghijklmnopqrstu'[:offset] + stop + 'vw' * 20
    done = check_stop(ids_of(script) + [end()], stop, flaws)
    assert done.texts[0] == script[:offset]
    assert done.tokens[0] == ids_of(script[: offset + len(stop)])


def test_the_stop_string_completed_first_wins():
  ids = ids_of('one two three four five') + [end()]
  assert check_stop(ids, ['four', 'two', 'three']).texts == ['one ']
  assert check_stop(ids, ['five', 'four']).texts == ['one two three ']
  assert check_stop(ids, ['two three', 'wo']).texts == ['one t'], 'begun later, completed earlier'
  assert check_stop(ids, ['e t', 'ne two']).texts == ['on']


def test_of_two_stop_strings_completed_by_one_token_the_one_begun_earlier_cuts():
  ids = ids_of('so the end') + [end()]
  assert len(ids_of(' the')) == 1
  assert check_stop(ids, ['he', 'o the']).texts == ['s']
  assert check_stop(ids, ['the', 'he']).texts == ['so ']


def test_a_stop_string_that_one_token_holds_cuts_inside_it():
  ids = ids_of('so the end') + [end()]
  done = check_stop(ids, 'h')
  assert done.texts == ['so t'] and decoded(done.tokens[0]) == 'so the'


def test_a_stop_may_be_given_as_one_string():
  assert answer(ids_of('abcd'), stop='cd').texts == ['ab']


@pytest.mark.parametrize('flaws', [(), (0, 3, 7, 8)], ids=['all kept', 'some kept'])
@pytest.mark.parametrize('name', ['emoji', 'cjk', 'mixed'])
def test_stop_beside_and_inside_split_characters(name, flaws):
  text = TEXTS[name]
  ids = ids_of(text) + [end()]
  for place in range(1, len(text)):
    for stop in {text[place], text[place : place + 3]}:
      check_stop(ids, stop, flaws)


def test_stop_and_length_in_the_same_block():
  ids = ids_of('abcdefXYghij')
  for count in range(1, 13):
    done = answer(ids, stop='XY', max_new_tokens=count)
    if count < 8:
      assert (done.texts[0], done.finish_reasons) == ('abcdefXYghij'[:count], ['length'])
    else:
      assert (done.texts, done.finish_reasons) == (['abcdef'], ['stop'])
      assert done.tokens == [ids[:8]]


def test_stop_and_eos_in_the_same_block():
  for offset in range(9):
    ids = ids_of('abXYcdefg')
    ids.insert(offset, end())
    done = answer(ids, stop='XY')
    assert done.finish_reasons == (['eos'] if offset < 4 else ['stop'])
    assert done.texts == ['abX'[:offset] if offset < 4 else 'ab']


def test_stop_ends_its_row_only():
  answers = [ids_of('abcdXY' + 'z' * 40), ids_of('ABCDEFGHIJKLMNOPQ') + [end()], ids_of('no' * 50)]
  done = cj.generate_text([PROMPT] * 3, **options(**pair(answers), stop=['XY']))
  assert done.texts == ['abcd', 'ABCDEFGHIJKLMNOPQ', 'no' * 45]
  assert done.finish_reasons == ['stop', 'eos', 'length']
  assert done.stats.new_tokens == 6 + 18 + 90 <= done.stats.decoded < 90 + 18 + 90


def test_stop_leaves_other_calls_as_they_were(batch):
  run, together = batch
  cut = run(BATCH, [5, 6, 7], stop=[together.texts[0][3:5]])
  assert cut.finish_reasons[0] == 'stop'
  assert rows_of(run(BATCH, [5, 6, 7])) == rows_of(together)


def test_nothing_of_a_stopped_row_reaches_the_text_before_it(batch):
  """A stop string that never comes changes nothing but the looks of the host."""
  run, together = batch
  assert rows_of(run(BATCH, [5, 6, 7], stop=['never to be seen'])) == rows_of(together)


# Streams.


def check_stream(ids, flaws=(), **changes):
  """The pieces and the completions, after checking that the pieces add up to the text."""
  done = answer(ids, flaws, **changes)
  pieces, streamed = stream(ids, flaws, **changes)
  assert ''.join(pieces) == done.texts[0]
  assert all(pieces)
  late = streamed.completions
  assert figures(late) == figures(done)
  return pieces, done


@pytest.mark.parametrize('num_draft', [1, 2, 3, 4, 5])
@pytest.mark.parametrize('name', TEXTS)
def test_pieces_add_up_to_the_text(name, num_draft):
  """With everything kept, nothing kept and mixtures, a block ends at every place of every character."""
  text = TEXTS[name]
  ids = ids_of(text) + [end()]
  assert len(ids) > len(text), 'some characters should be split'
  flaws = [(), range(90), *(np.flatnonzero(np.random.default_rng(i).random(90) < 0.3) for i in range(6))]
  for wrong in flaws:
    pieces, done = check_stream(ids, wrong, num_draft=num_draft)
    assert done.texts == [text] and len(pieces) > 2
    if name != 'replacement':
      assert '\ufffd' not in ''.join(pieces)


def test_pieces_of_bytes_that_are_no_text():
  for seed in range(20):
    ids = np.random.default_rng(seed).integers(0, 256, 40).tolist() + [end()]
    check_stream(ids, range(0, 40, 3))


@pytest.mark.parametrize('stop', [(), [f'{ASTRONAUT}?', '👨\ufffd\ufffd']], ids=['', 'with stop strings'])
def test_a_character_cut_by_the_length_is_the_same_in_both(stop):
  ids = ids_of(TEXTS['emoji'])
  cut = 0
  for count in range(1, len(ids)):
    _, done = check_stream(ids_of('.' * (90 - count)) + ids, stop=stop)
    assert done.texts == ['.' * (90 - count) + decoded(ids[:count])] and done.finish_reasons == ['length']
    cut += done.texts[0].endswith('\ufffd')
  assert cut > 10


def test_what_may_become_a_stop_string_is_held_back_and_given_in_the_end():
  ids = ids_of('abcSTOabcSTabcSTO') + [end()]
  pieces, done = check_stream(ids, range(60), stop=['STOP', 'cSTQ'])
  assert done.texts == ['abcSTOabcSTabcSTO'] and done.finish_reasons == ['eos']
  assert pieces[-1] == 'STO'


def test_a_stream_of_a_conversation():
  turns = [{'role': 'user', 'content': 'the'}]
  chat = cj.encode([turns], tokenizer(), raw=False)[0]
  model = fakes.scripted([chat + ids_of('yes, the same') + [end()]], config())
  changes = options(target=model, draft=model, raw=False)
  streamed = cj.stream_text(turns, **changes)
  assert ''.join(streamed) == 'yes, the same'
  assert figures(streamed.completions) == figures(cj.generate_text(['the'], **changes))


def test_a_stream_may_be_left_and_read_again():
  ids = ids_of('abcdefghijklmnopqrstuXY and more')
  streamed = cj.stream_text(PROMPT, **options(**pair([ids])), stop=['XY'])
  with pytest.raises(ValueError, match='nothing is decoded yet: iterate over the stream first'):
    streamed.completions
  pieces = iter(streamed)
  assert next(pieces) == 'abcde'
  assert streamed.completions.finish_reasons == ['running'] and streamed.completions.texts == ['abcde']
  assert streamed.completions.stats.new_tokens == 5
  for _ in range(2):
    assert ''.join(streamed) == 'abcdefghijklmnopqrstu'
    assert streamed.completions.tokens == [expected_stop(ids, ['XY'])[0]]
    assert streamed.completions.finish_reasons == ['stop']


# Whose a piece of the text is.

ORIGINS = ('accepted', 'recovered', 'bonus')


def spans(tokens, origins, text=None):
  """`text.spans` of a row of these tokens."""
  text = decoded(tokens) if text is None else text
  done = types.SimpleNamespace(texts=[text], tokens=[tokens], origins=[origins])
  return list(text_lib.spans(done, tokenizer()))


def by_character(spans):
  return [(character, origin) for text, origin in spans for character in text]


def test_a_character_belongs_to_the_token_that_completes_it():
  tokens = ids_of('a€b the') + [end()]
  assert len(tokens) == 5 + 1 + 1, 'a character of three tokens, a word of one'
  origins = ['accepted', 'bonus', 'accepted', 'recovered', 'accepted', 'bonus', 'recovered']
  whole = [('a', 'accepted'), ('€', 'recovered'), ('b', 'accepted'), (' the', 'bonus')]
  assert spans(tokens, origins) == whole
  assert spans(tokens[:6], origins[:6], 'a€b th') == whole[:3] + [(' th', 'bonus')], 'cut by a stop string'
  assert spans([], []) == []


def test_spans_add_up_to_the_text_whatever_the_tokens():
  """Broken characters, whole ones of one to four bytes, words; each token of a random origin, the text cut anywhere."""
  split = broken = 0
  for seed in range(200):
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 256, 3).tolist(), *map(ids_of, ('é', '日本', ASTRONAUT, 'the', ' op', '\ufffd', '\n'))]
    tokens = sum((parts[i] for i in rng.integers(len(parts), size=rng.integers(12))), [])
    origins = rng.choice(ORIGINS, len(tokens)).tolist()
    text = decoded(tokens)[: rng.integers(100)]
    found = spans(tokens, origins, text)
    assert ''.join(piece for piece, _ in found) == text and all(piece for piece, _ in found)
    split += len(found) < len(tokens)
    broken += '\ufffd' in text
  assert split > 100 and broken > 50


@pytest.mark.parametrize('stop', [(), ['🌈👍', 'ト。', 'he 👍', 'nd\ufffd']], ids=['', 'with stop strings'])
@pytest.mark.parametrize('name', TEXTS)
def test_a_stream_gives_the_spans_of_the_whole_text(name, stop):
  ids = ids_of(TEXTS[name]) + [end()]
  seen = collections.Counter()
  for seed in range(6):
    wrong = np.flatnonzero(np.random.default_rng(seed).random(90) < 0.3)
    streamed = cj.stream_text(PROMPT, **options(**pair([ids], wrong), num_draft=2, stop=stop))
    pieces = list(streamed.spans())
    done = streamed.completions
    assert ''.join(piece for piece, _ in pieces) == done.texts[0] and all(piece for piece, _ in pieces)
    assert by_character(pieces) == by_character(text_lib.spans(done, tokenizer()))
    assert done.finish_reasons == ['stop' if stop else 'eos']
    seen.update(origin for _, origin in pieces)
  assert all(seen[origin] for origin in ORIGINS)


# Figures and flags of the answers.


def test_identities_of_the_figures(batch):
  run, together = batch
  cut = run(BATCH, [5, 6, 7], stop=[together.texts[0][3:5]])
  for done in (together, cut):
    stats = done.stats
    assert stats.new_tokens == sum(map(len, done.tokens)) <= stats.decoded
    assert stats.verifier_calls <= stats.decoded <= 5 * stats.verifier_calls
    assert all(a <= t <= stats.verifier_calls for a, t in zip(stats.accepted_at, stats.tested_at))
    assert stats.tested_at[1:] <= stats.accepted_at[:-1] + (0,)
    assert 0 <= stats.decoded - stats.accepted <= stats.verifier_calls
    assert len(stats.accepted_at) == len(stats.tested_at) == 4
    assert 0 < stats.seconds.decoded <= stats.decoded - 3
  assert together.stats.new_tokens == together.stats.decoded
  assert together.stats.accepted == sum(map(sum, together.from_draft))
  assert cut.stats.new_tokens < cut.stats.decoded


def test_plain_decoding_calls_the_verifier_once_a_token():
  done = answer(ids_of('abcdefghij') + [end()], draft=None)
  assert done.texts == ['abcdefghij']
  assert done.stats.verifier_calls == done.stats.decoded == 11
  assert done.stats.accepted_at == done.stats.tested_at == ()
  assert done.from_draft == [[False] * 11] and done.lossless


def test_from_draft_marks_the_drafted_tokens_that_were_kept():
  done = answer(ids_of('abcdefghijklm') + [end()], flaws=[2, 8])
  # ab, and c for a wrong draft; defg, and h as a bonus; i for a wrong draft; jklm, and the end as a bonus.
  assert ''.join('.d'[flag] for flag in done.from_draft[0]) == 'dd.' + 'dddd.' + '.' + 'dddd.'
  assert done.stats.accepted_at == (3, 3, 2, 2) and done.stats.tested_at == (4, 3, 3, 2)
  assert done.stats.verifier_calls == 4


def test_a_draft_ends_where_it_is_unsure():
  """A draft of nearly flat laws offers nothing; one that is sure is not held back."""
  ids = ids_of('abcdefghijklm') + [end()]
  sure = pair([ids])
  unsure = sure | {'draft': sure['draft'].replace(certainty=jnp.float32(4.0))}
  sampled = dict(sampling=cj.SamplingParams(), stop_entropy=1.0)
  with_sure, with_unsure = (answer(ids, **sampled, **models) for models in (sure, unsure))
  assert with_sure.tokens == with_unsure.tokens == [ids]
  assert with_sure.stats.accepted_at == (3, 3, 3, 3) and with_unsure.stats.tested_at == (0, 0, 0, 0)


def test_logprobs_are_those_of_a_full_forward_pass(run, target):
  """By the law at temperature 1 without filters, over the tokenizer's tokens only."""
  filtered = cj.SamplingParams(temperature=0.7, top_k=5, top_p=0.9)
  done = run(BATCH, [5, 6, 7], sampling=filtered)
  assert 0 < sum(map(sum, done.from_draft)) < done.stats.new_tokens
  read = jax.jit(
    lambda model, tokens_BT: model(
      tokens_BT, jnp.arange(tokens_BT.shape[1])[None], model.init_cache(*tokens_BT.shape)
    )[0]
  )
  for prompt, new, logprobs, flags in zip(BATCH, done.tokens, done.logprobs, done.from_draft):
    assert len(new) == len(logprobs) == len(flags) > 0
    start = len(ids_of(prompt))
    tokens = np.zeros((1, 40), np.int32)
    tokens[0, : start + len(new)] = ids_of(prompt) + new
    law = jax.nn.log_softmax(read(target, tokens)[0, :, : len(tokenizer())], axis=-1)
    expected = [law[start - 1 + i, token] for i, token in enumerate(new)]
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


def test_lossless_is_said():
  ids = ids_of('abc') + [end()]
  assert answer(ids).lossless and answer(ids, rule=cj.Exact()).lossless
  assert not answer(ids, rule=cj.Cactus(1.0)).lossless
  assert answer(ids, rule=cj.Cactus(1.0), draft=None).lossless, 'nothing is relaxed where nothing is drafted'


# The ledger and budgets; a verifier that is not sure of itself, so that rules have something to relax.


def unsure(rule=cj.Exact(), certainty=4.0, **changes):
  """The answer of a verifier whose drafts are wrong at every third offset, at temperature 1."""
  ids = ids_of('abcdefghijklmnopqrst' * 4)
  models = pair([ids], range(0, 80, 3))
  models = {name: dataclasses.replace(model, certainty=jnp.float32(certainty)) for name, model in models.items()}
  sampling = cj.SamplingParams(temperature=1.0)
  return cj.generate_text([PROMPT] * 2, **(options(**models) | dict(rule=rule, sampling=sampling) | changes))


def test_a_ledger_is_kept_where_it_is_asked_for():
  plain = unsure(cj.Clamp(0.5))
  assert plain.stats.kl_per_token is None and plain.stats.kl_99 is None and plain.emitted_logprobs is None
  done = unsure(cj.Clamp(0.5), ledger=True)
  assert done.tokens == plain.tokens and not done.lossless and not done.stats.lossless
  stats = done.stats
  assert 0 < stats.kl_per_token == stats.spent.kl / stats.decoded
  assert stats.spent.kl / stats.spent.decided < stats.kl_99 <= stats.spent.max_kl
  for tokens, emitted, verifier in zip(done.tokens, done.emitted_logprobs, done.verifier_logprobs):
    assert len(tokens) == len(emitted) == len(verifier)
    assert max(map(abs, np.subtract(emitted, verifier))) > 0.01
  exact = unsure(ledger=True)
  assert exact.lossless and exact.stats.kl_per_token < 1e-6 and exact.emitted_logprobs == exact.verifier_logprobs
  both = text_lib.metrics.merge([stats, exact.stats])
  assert not both.lossless and both.spent.kl == stats.spent.kl + exact.stats.spent.kl
  assert text_lib.metrics.merge([stats, plain.stats]).spent is None


def test_a_budget_keeps_its_ledger_and_its_word():
  done = unsure(cj.Budget(kl_total=0.5))
  assert not done.lossless and 0 < done.stats.spent.kl <= 2 * 0.5 and done.stats.spent.max_kl <= 0.5
  assert 0 < unsure(cj.Budget(kl_per_token=0.02)).stats.kl_per_token < 0.03
  with pytest.warns(UserWarning, match=r'a Budget of 0 nats is Exact\(\)'):
    nothing = unsure(cj.Budget(kl_total=0.0))
  assert nothing.lossless and nothing.tokens == unsure().tokens


def test_block_verification_is_for_rules_with_a_fixed_target():
  for rule in (cj.Exact(), cj.Clamp(0.5), cj.Static(cj.Cactus(0.3)), cj.Budget(kl_per_token=0.1)):
    assert unsure(rule, block_verification=True).stats.accepted > 0
  for rule in (cj.Cactus(0.3), cj.TopK(3), cj.CactusExact(0.1)):
    name = type(rule).__name__
    with pytest.raises(ValueError, match=rf'{name} has no fixed target law .* use Static\({name}\(...\)\)'):
      unsure(rule, block_verification=True)


def test_lossy_rules_say_that_they_do_nothing_at_temperature_0():
  plain = unsure(sampling=GREEDY)
  for rule in (cj.Cactus(1.0), cj.Static(cj.Cactus(1.0)), cj.Lenience(2.0, published=True), cj.Budget(kl_total=1.0)):
    with pytest.warns(UserWarning, match=r'at temperature 0 .* so \w+ keeps a token only if it is the verifier'):
      assert unsure(rule, sampling=GREEDY).tokens == plain.tokens
  with pytest.warns(UserWarning, match='LogitMargin is made for temperature 0'):
    unsure(cj.LogitMargin(1.0))


@pytest.mark.parametrize(
  'rule, changes',
  [
    (cj.Exact(), dict(sampling=GREEDY)),
    (cj.Cactus(1.0), {}),
    (cj.Cactus(1.0), dict(sampling=GREEDY, draft=None)),
    (cj.LogitMargin(1.0), dict(sampling=GREEDY)),
    (cj.TopK(3, published=True), dict(sampling=GREEDY)),
    (cj.Static(cj.Chow(0.5, published=True)), dict(sampling=GREEDY)),
    (cj.Static(cj.Exact()), dict(sampling=GREEDY)),
    (cj.Cactus(1.0), dict(sampling=cj.SamplingParams(temperature=[0.0, 1.0]))),
  ],
  ids=str,
)
def test_nothing_is_said_where_a_rule_does_something(rule, changes, recwarn):
  unsure(rule, **changes)
  assert not [warning for warning in recwarn if warning.category is UserWarning]


def test_a_number_is_found_for_a_cost():
  """On recorded rounds; decoding with it costs about so much."""
  models = pair([ids_of('abcdefghijklmnopqrst' * 4)], range(0, 80, 3))
  models = {name: dataclasses.replace(model, certainty=jnp.float32(4.0)) for name, model in models.items()}
  common = dict(options(**models), sampling=cj.SamplingParams(temperature=1.0))
  draft, target_probs = cj.record_rounds([PROMPT], **common)
  assert draft.tokens.shape == (len(target_probs), 4) and target_probs.shape[1:] == (5, len(tokenizer()))
  np.testing.assert_allclose(target_probs.sum(axis=-1), 1, atol=1e-5)
  tau, figures = cj.calibrate(cj.Clamp, [PROMPT], kl_per_token=0.02, **common)
  assert figures.kl_per_token == pytest.approx(0.02, rel=0.01) and tau > 0
  assert unsure(cj.Clamp(tau), ledger=True).stats.kl_per_token == pytest.approx(0.02, rel=0.4)
  with pytest.raises(ValueError, match='draft=None: without a draft there are no rounds'):
    cj.record_rounds([PROMPT], **common | dict(draft=None))
  with pytest.raises(ValueError, match='low=1e-07 to high=50, and at 1e-07: b=1e-07: need a finite number >= 1'):
    cj.calibrate(cj.Lenience, [PROMPT], kl_per_token=0.02, **common)
  for name, value in dict(rule=cj.Exact(), ledger=True, block_verification=True, progress=print, stop=['a']).items():
    with pytest.raises(ValueError, match='rounds are recorded with the rule Exact'):
      cj.record_rounds([PROMPT], **common, **{name: value})


@pytest.mark.parametrize('stop', [(), ['never to be seen']])
def test_progress_rises_to_the_number_of_new_tokens(stop):
  seen = []
  ids = ids_of('abcdefghijklmnopqrst' * 5)
  done = answer(ids, range(90), stop=stop, progress=seen.append)
  assert seen == sorted(seen) and len(seen) > 5
  assert seen[-1] == done.stats.new_tokens == 90
  assert figures(answer(ids, range(90), stop=stop)) == figures(done)


# Programs are made once.


def test_steady_state_compiles_nothing(run, compiles):
  """The pair of `run` has answered three prompts of up to 14 tokens before, in buckets of 16 and 32."""
  row_values = np.array([0.1, 0.2, 0])  # arrays need a conversion of their own, once
  done = run(BATCH, 0, rule=cj.Cactus(row_values))
  run(BATCH, 0, stop=[done.texts[0][2]])
  del compiles[:]
  run(BATCH, 0)
  run(['hopping on', 'cat, cat, ', 'hop on pop'], [3, 4, 2**40])
  for temperature in (0.0, 1, 0.5, np.float32(0.3), row_values):
    run(BATCH, 2, sampling=cj.SamplingParams(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1))
  for delta in (0, 1.0, 3 * row_values):
    run(BATCH, 2, rule=cj.Cactus(delta))
  for count in (11, 17, 18):
    run(BATCH, 0, max_new_tokens=count)
  run(BATCH, 0, stop=['never to be seen', done.texts[0][3]], progress=lambda count: None)
  assert not compiles


def test_many_prompt_lengths_compile_once_a_bucket(compiles):
  made = {}
  for length in range(1, 17):
    del compiles[:]
    model = fakes.scripted([[5]], config())
    cj.generate_text(['a' * length], **options(target=model, draft=None, max_new_tokens=8))
    made.setdefault((text_lib.bucket(length), text_lib.bucket(length + 8)), []).append(len(compiles))
  assert list(made) == [(16, 16), (16, 24)]
  for first, *others in made.values():
    assert first and not any(others)


def test_bucket():
  expected = [
    (0, 16),
    (1, 16),
    (16, 16),
    (17, 24),
    (24, 24),
    (25, 32),
    (33, 48),
    (49, 64),
    (65, 96),
    (97, 128),
    (1000, 1024),
  ]
  assert [(n, text_lib.bucket(n)) for n, _ in expected] == expected
  for length in range(16, 5000):
    assert length <= text_lib.bucket(length) < 1.5 * length
    assert text_lib.bucket(text_lib.bucket(length)) == text_lib.bucket(length)


# Input that cannot be answered.


def message_cases():
  """Name -> (what is changed in a call, the text of the error)."""
  user = {'role': 'user', 'content': 'x'}
  plain = lambda: fakes.byte_tokenizer(chat_template=None)
  return {
    'one string': (dict(prompts='hi'), 'prompts is one string: pass a list of prompts, [prompt].'),
    'no prompts': (dict(prompts=[]), 'prompts is empty: pass at least one prompt.'),
    'empty prompt': (dict(prompts=['a', '']), 'prompt 1 is empty: need at least one token to continue from.'),
    'empty chat prompt': (dict(prompts=[''], raw=False), 'prompt 0 is empty: need at least one token'),
    'empty conversation': (dict(prompts=['a', []], raw=False), 'prompt 1 is empty: need at least one token'),
    'no chat template': (
      dict(tokenizer=plain(), raw=False),
      'this tokenizer has no chat template: pass raw=True to take the prompts as plain text.',
    ),
    'raw conversation': (
      dict(prompts=['a', [user]]),
      'prompt 1 is list: with raw=True every prompt is a string.',
    ),
    'no prompt at all': (
      dict(prompts=[None], raw=False),
      'prompt 0 is None: need a string, or a list of messages',
    ),
    'a number': (
      dict(prompts=['a', 3], raw=False),
      'prompt 1 is 3: need a string, or a list of messages with role and',
    ),
    'bare message': (
      dict(prompts=[user], raw=False),
      "prompt 0 is {'role': 'user', 'content': 'x'}: need a string, or a list of messages",
    ),
    'no role': (
      dict(prompts=[[{'content': 'x'}]], raw=False),
      "prompt 0 is [{'content': 'x'}]: need a string, or a list of messages",
    ),
    'nested': (
      dict(prompts=[[[user]]], raw=False),
      "prompt 0 is [[{'role': 'user', 'content': 'x'}]]: need a string, or a list of messages",
    ),
    'template refuses': (
      dict(prompts=[[{'role': 'nobody', 'content': 'x'}]], raw=False),
      'prompt 0 does not fit the chat template: nobody may not speak',
    ),
    'too long': (
      dict(prompts=['a', 'a' * 32], target=fakes.scripted([[5]], config(max_length=32))),
      'prompt 1 has 32 tokens; the context of the model is 32, of which at least one must be left for the '
      'answer: shorten the prompt.',
    ),
    'too long for the draft': (
      dict(prompts=['a' * 40], draft=fakes.scripted([[5]], config(max_length=32))),
      'prompt 0 has 40 tokens; the context of the model is 32',
    ),
    'no new tokens': (dict(max_new_tokens=0), 'max_new_tokens=0: need at least 1.'),
    'negative': (dict(max_new_tokens=-3), 'max_new_tokens=-3: need at least 1.'),
    'empty stop': (dict(stop=['a', '']), "stop=['a', '']: need non-empty strings."),
    'empty stop string': (dict(stop=''), "stop='': need non-empty strings."),
    'stop of numbers': (dict(stop=[3]), 'stop=[3]: need non-empty strings.'),
    'a special token as a stop': (dict(stop='<|user|>'), "stop='<|user|>' is a special token"),
    'a draft by name': (dict(draft='lookup'), "draft='lookup': need a model, a DraftSource such as PromptLookup()"),
    'a class as draft': (dict(draft=cj.PromptLookup), 'need a model, a DraftSource such as PromptLookup(), or None'),
    'a rule by name': (dict(rule='cactus'), "rule='cactus': need a verification rule, such as Exact()"),
    'a class as rule': (dict(rule=cj.Exact), 'need a verification rule, such as Exact()'),
    'sampling as a dict': (dict(sampling={'top_k': 5}), "sampling={'top_k': 5}: need SamplingParams(...)"),
    'no target': (dict(target=None), 'target=None: need a model, as from load_transformer'),
    'a path as tokenizer': (dict(tokenizer='x'), "tokenizer='x': need a tokenizer, as from load_tokenizer"),
    'half a token': (dict(max_new_tokens=2.5), 'max_new_tokens=2.5: need a whole number'),
    'half a draft': (dict(num_draft=1.5), 'num_draft=1.5: need a whole number'),
    'a draft beyond the context': (
      dict(num_draft=10**6),
      'num_draft=1000000: a round cannot draft more than the context of',
    ),
    'half a character': (dict(prompts=['\ud800 hi']), 'prompt 0 is no text that can be tokenised'),
    'no draft tokens': (
      dict(num_draft=0),
      'num_draft=0: speculative decoding needs at least 1 drafted token a round; use '
      'draft=None for plain decoding.',
    ),
    'entropy of no draft': (dict(stop_entropy=1.0), 'stop_entropy=1.0 means nothing to draft=None: it ends the draft'),
    'entropy of a lookup': (
      dict(stop_entropy=1.0, draft=cj.PromptLookup()),
      'stop_entropy=1.0 means nothing to draft=PromptLookup',
    ),
    'negative entropy': (
      dict(stop_entropy=-1.0, draft=fakes.scripted([[5]], config())),
      'stop_entropy=-1.0: need a number of nats >= 0, or None.',
    ),
    'seeds': (
      dict(prompts=['a', 'b'], seed=[1, 2, 3]),
      'seed=[1, 2, 3]: need a whole number, or one for each of the 2 prompts.',
    ),
    'a seed that is no whole number': (
      dict(prompts=['a', 'b'], seed=[0.5, 0.7]),
      'seed=[0.5, 0.7]: need a whole number, or one for each of the 2 prompts.',
    ),
    'values': (
      dict(sampling=cj.SamplingParams(temperature=np.ones(2))),
      'SamplingParams holds a value of shape (2,): need one number, or one for each of the 1 rows.',
    ),
    'deltas': (dict(rule=cj.Cactus(np.ones(3))), 'Cactus holds a value of shape (3,)'),
    'small verifier': (
      dict(target=fakes.scripted([[5]], fakes.FakeConfig(vocab_size=9))),
      "the tokenizer has 267 tokens, the verifier only 9: it is not this model's tokenizer.",
    ),
    'small draft': (
      dict(draft=fakes.scripted([[5]], fakes.FakeConfig(vocab_size=266))),
      'the tokenizer has 267 tokens, the draft only 266',
    ),
    'eos': (
      dict(target=fakes.scripted([[5]], config(eos_ids=(300,)))),
      'eos_ids=(263, 300), pad_id=0: token 300 is outside the vocabulary 0..266.',
    ),
    'more draft tokens': (
      dict(draft_tokenizer=fakes.byte_tokenizer(extra=['<|tool|>'])),
      "draft and verifier have different tokenizers: only the draft has token 267, '<|tool|>'. A "
      "draft must share its verifier's tokenizer.",
    ),
    'more verifier tokens': (
      dict(
        tokenizer=fakes.byte_tokenizer(extra=['<|tool|>']),
        draft_tokenizer=tokenizer(),
        target=fakes.scripted([[5]], fakes.FakeConfig(vocab_size=270)),
      ),
      "only the verifier has token 267, '<|tool|>'",
    ),
  }


@pytest.mark.parametrize('case', message_cases())
def test_input_that_cannot_be_answered(case, compiles):
  changes, message = message_cases()[case]
  model = fakes.scripted([[5]], config())
  del compiles[:]
  with pytest.raises(ValueError) as error:
    cj.generate_text(changes.pop('prompts', [PROMPT]), **options(target=model) | changes)
  assert message in str(error.value) and '\n' not in str(error.value)
  assert len(compiles) <= 12, 'the keys of the rows at most, operation by operation'


def test_the_first_differing_token_is_named():
  ours, theirs = (
    fakes.byte_tokenizer(extra=['<|a|>', '<|b|>']),
    fakes.byte_tokenizer(extra=['<|c|>', '<|b|>', '<|d|>']),
  )
  with pytest.raises(
    ValueError, match=r"different tokenizers: token 267 is '<\|a\|>' for the verifier and '<\|c\|>' for"
  ):
    cj.check_tokenizers(ours, theirs)
  cj.check_tokenizers(ours, ours)
  cj.check_tokenizers(ours, fakes.byte_tokenizer(extra=['<|a|>', '<|b|>']))


def test_a_stream_is_checked_before_it_is_read():
  model = fakes.scripted([[5]], config())
  with pytest.raises(ValueError, match='prompt 0 is empty'):
    cj.stream_text('', **options(target=model))
  with pytest.raises(ValueError, match='progress: a stream reports by its pieces'):
    cj.stream_text(PROMPT, **options(target=model), progress=print)


@pytest.mark.parametrize(
  'name', ['repetition_penalty', 'logit_bias', 'presence_penalty', 'num_beams', 'temperature', 'strem']
)
def test_an_option_that_is_not_implemented_is_an_error(name):
  model = fakes.scripted([[5]], config())
  for call in (lambda **o: cj.generate_text([PROMPT], **o), lambda **o: cj.stream_text(PROMPT, **o)):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
      call(**options(target=model), **{name: 1.0})
  if name != 'temperature':
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
      cj.SamplingParams(**{name: 1.0})


def test_vocabularies_may_be_padded_to_different_sizes():
  """Ids beyond the tokenizer's are never drafted and never emitted, however likely the models find them."""
  ids = ids_of('abcdefgh')
  ids[1], ids[3] = len(tokenizer()), len(tokenizer()) + 2
  models = pair([ids + [end()]], flaws=[6], vocab_size=len(tokenizer()) + 5)
  models['draft'] = models['draft'].replace(config=config(vocab_size=len(tokenizer()) + 60))
  done = cj.generate_text([PROMPT], **options(**models))
  assert done.tokens == [ids[:1] + [0] + ids[2:3] + [0] + ids[4:] + [end()]], (
    'of equally likely tokens the first'
  )
  np.testing.assert_allclose(done.logprobs[0][1], -np.log(len(tokenizer())), atol=1e-5)
  assert done.stats.accepted == 7 and done.stats.verifier_calls == 3


# The default model.


def test_default_model_streams_what_a_full_pass_would_say(default_model, default_tokenizer, good_programs):
  """Greedy prompt lookup on a prompt that asks for what it holds."""
  prompt = 'Repeat this: the quick brown fox 日本 the quick brown fox.'
  streamed = cj.stream_text(
    prompt,
    target=default_model,
    tokenizer=default_tokenizer,
    sampling=GREEDY,
    draft=cj.PromptLookup(),
    max_new_tokens=16,
  )
  pieces = list(streamed)
  done = streamed.completions
  assert ''.join(pieces) == done.texts[0] and len(pieces) > 2
  assert done.stats.verifier_calls < done.stats.new_tokens <= 16
  [ids] = cj.encode([prompt], default_tokenizer, raw=False)
  read = jax.jit(
    lambda model, tokens_BT: model(
      tokens_BT, jnp.arange(tokens_BT.shape[1])[None], model.init_cache(*tokens_BT.shape)
    )[0]
  )
  laws_TV = jax.nn.log_softmax(
    read(default_model, np.array([ids + done.tokens[0]]))[0, len(ids) - 1 : -1], axis=-1
  )
  assert jnp.argmax(laws_TV, axis=-1).tolist() == done.tokens[0]
  np.testing.assert_allclose(done.logprobs[0], jnp.max(laws_TV, axis=-1), atol=1e-3)


@pytest.mark.slow
def test_default_model_answers_a_batch_as_row_by_row(default_model, default_tokenizer, good_programs):
  prompts = [
    'Why is the sky blue?',
    'Hi',
    [{'role': 'user', 'content': 'Name five fruits and their colours.'}],
  ]
  run = lambda prompts, seeds: cj.generate_text(
    prompts,
    target=default_model,
    draft=default_model.early_exit(20),
    tokenizer=default_tokenizer,
    seed=seeds,
    rule=cj.Cactus(1.0),
    sampling=cj.SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    max_new_tokens=20,
  )
  together = run(prompts, [1, 2, 3])
  alone = [rows_of(run([prompt], [seed]))[0] for prompt, seed in zip(prompts, [1, 2, 3])]
  assert rows_of(together) == alone
