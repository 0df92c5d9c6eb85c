"""Conversations that a tiny verifier writes: their laws, and that nothing is lost or doubled."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import corpus
from tests import fakes, talker
from tests.talker import TOKENIZER, VOCAB

SETTINGS = corpus.Settings(temperatures=(1.5, 1.5, 1.5, 0.4), top=24, max_prompt=24, max_answer=16,
                           hidden_layers=(0, 1))
PROMPTS = ['the', 'hi', 'the', 'a' * 99, 'what']
TOKENS = 250


pytestmark = pytest.mark.usefixtures('quick_programs')


@pytest.fixture(scope='module')
def target():
  return talker.talker()


@pytest.fixture
def write(target, monkeypatch, tmp_path):
  """write(**options of corpus.write): the folder after it, in shards of five."""
  monkeypatch.setattr(corpus, 'SHARD', 5)

  def write(folder=tmp_path / 'corpus', target=target, tokenizer=TOKENIZER, **options):
    options = dict(num_tokens=TOKENS, settings=SETTINGS, batch=4) | options
    write.num_tokens = corpus.write(folder, target, tokenizer, **options)
    return folder

  return write


def conversations(folder, layers=SETTINGS.hidden_layers):
  return [one for path in corpus.shards(folder) for one in corpus.read(path, layers)]


def dropped(folder):
  return [i for path in corpus.shards(folder) for i in np.load(path)['dropped'].tolist()]


def contents(folder):
  return {path.name: path.read_bytes() for path in corpus.shards(folder)}


@jax.jit
def read_anew(target, tokens_BT):
  """Log-probabilities and hidden states of whole texts in one pass."""
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  empty = target.init_cache(*tokens_BT.shape, hidden_layers=SETTINGS.hidden_layers)
  logits_BTV, cache = target(tokens_BT, positions_BT, empty)
  return jax.nn.log_softmax(logits_BTV[..., :VOCAB]), cache.hidden


def check_laws(target, found):
  tokens_BT = np.zeros((len(found), SETTINGS.max_prompt + SETTINGS.max_answer), np.int32)
  for row, one in zip(tokens_BT, found):
    row[: len(one.tokens)] = one.tokens
  logprobs_BTV, hidden_BTD = map(np.asarray, read_anew(target, tokens_BT))
  for one, logprobs_TV, hidden_TD in zip(found, logprobs_BTV, hidden_BTD):
    laws = logprobs_TV[one.prompt_length - 1 : len(one.tokens) - 1]
    assert one.top_ids.shape == one.top_logprobs.shape == (len(laws), SETTINGS.top)
    expected = -np.sort(-laws, axis=1)[:, : SETTINGS.top]
    np.testing.assert_allclose(np.take_along_axis(laws, one.top_ids, 1), expected, atol=1e-4)
    np.testing.assert_allclose(one.top_logprobs, expected, rtol=1e-3, atol=1e-3)
    assert one.hidden.dtype == np.float16 and (one.hidden[-1] == 0).all()
    np.testing.assert_allclose(one.hidden[:-1], hidden_TD[: len(one.tokens) - 1], atol=4e-3)


@pytest.mark.parametrize('batch', [4, 24])  # whose rows are replaced one at a time, and up to three
def test_laws_and_hidden_states_are_the_verifiers(write, target, batch):
  """Of answers to what it wrote itself, whose rows all replaced others, and to prompts, some of which were first."""
  found = conversations(write(prompts=PROMPTS, batch=batch))
  assert {one.index for one in found} & {0, 2, 6} and len(found) > 15
  assert len({len(one.tokens) - one.prompt_length for one in found}) > 5
  check_laws(target, found)


def test_every_other_turn_goes_on_from_an_opening(write, tmp_path):
  """The same for a conversation in any batch; what was begun is part of the turn that is answered."""
  settings = dataclasses.replace(SETTINGS, openings=('QQ', 'ZZZ'), seed=3)
  user = TOKENIZER.convert_tokens_to_ids('<|user|>')
  texts = []
  for batch in (4, 9):
    found = conversations(write(tmp_path / str(batch), settings=settings, batch=batch, num_tokens=400))
    check_laws(talker.talker(), found)
    assert all(one.tokens[0] == user and len(one.tokens[: one.prompt_length]) <= SETTINGS.max_prompt for one in found)
    texts.append({one.index: TOKENIZER.decode(one.tokens[1 : one.prompt_length - 2]) for one in found})
  begun = [text[:2] for text in texts[0].values() if text[:2] in ('QQ', 'ZZ')]
  assert set(begun) == {'QQ', 'ZZ'} and 0.2 < len(begun) / len(texts[0]) < 0.8
  assert all(len(text) > 3 for text in texts[0].values() if text[:2] in ('QQ', 'ZZ'))
  for i in set(texts[0]) & set(texts[1]):
    assert texts[0][i] == texts[1][i]


@pytest.mark.parametrize('every', [1, 3])
def test_so_many_answer_prompts_that_are_given(write, every):
  prompts = [f'p{i}' for i in range(9)]
  found = conversations(write(prompts=prompts, settings=dataclasses.replace(SETTINGS, given_every=every)))
  encoded = {tuple(prompt): i for i, prompt in enumerate(cj.encode(prompts, TOKENIZER, raw=False))}
  given = {one.index: encoded.get(tuple(one.tokens[: one.prompt_length].tolist())) for one in found}
  assert len(given) > 9 and any(i % every == 0 and i // every < 9 for i in given)
  for i, prompt in given.items():
    assert prompt == (i // every if i % every == 0 and i // every < 9 else None)


def test_reads_the_hidden_states_of_some_layers(write):
  [path, *_] = corpus.shards(write())
  whole = np.load(path)['hidden'][: len(corpus.read(path)[0].tokens)]
  for layers, columns in (((0, 1), [0, 1, 2]), ((1,), [1, 2]), ((), [2])):
    expected = np.concatenate([whole[:, 32 * i : 32 * (i + 1)] for i in columns], axis=1)
    np.testing.assert_array_equal(corpus.read(path, layers)[0].hidden, expected)
  with pytest.raises(ValueError, match=r'has those of layers \[0, 1\]; of layers \[0, 5\] they are to be read'):
    corpus.read(path, (0, 5))


def test_answers_follow_the_temperatures_in_turn(write):
  ranks = {False: [], True: []}
  for one in conversations(write()):
    answer = one.tokens[one.prompt_length :]
    assert (one.top_ids == answer[:, None]).any(axis=1).all()
    ranks[one.index % 4 == 3] += np.argmax(one.top_ids == answer[:, None], axis=1).tolist()
  assert np.mean(ranks[False]) > 2 * np.mean(ranks[True]), 'every fourth is nearly greedy'
  assert max(ranks[False]) < SETTINGS.top_k


def test_what_a_conversation_is(write):
  """A turn of the user, written by the verifier or given, in the chat template, and an answer."""
  folder = write(prompts=PROMPTS)
  user, assistant, end = TOKENIZER.convert_tokens_to_ids(['<|user|>', '<|assistant|>', '<|end|>'])
  encoded, found = cj.encode(PROMPTS, TOKENIZER, raw=False), conversations(folder)
  for one in found:
    prompt, answer = one.tokens[: one.prompt_length].tolist(), one.tokens[one.prompt_length :].tolist()
    assert prompt[0] == user and prompt[-2:] == [end, assistant] and 4 <= len(prompt) <= SETTINGS.max_prompt
    assert answer[-1] == end or len(answer) == SETTINGS.max_answer
    assert end not in answer[:-1]
  prompts = {one.index: one.tokens[: one.prompt_length].tolist() for one in found}
  assert len(set(map(tuple, prompts.values()))) == len(prompts)
  # Prompts stand at even numbers; the third is the first again, the fourth is too long.
  for i, prompt in {0: encoded[0], 2: encoded[1], 6: encoded[4]}.items():
    assert prompts.get(i, prompt) == prompt
  assert 4 in dropped(folder) and prompts.keys() & {0, 2, 6}
  assert write.num_tokens == sum(len(one.tokens) - one.prompt_length for one in found) >= TOKENS
  settings = json.loads((folder / 'corpus.json').read_text())
  assert settings['temperatures'] == [1.5, 1.5, 1.5, 0.4] and settings['embed_dim'] == 32


def by_index(found):
  return {one.index: one.tokens.tolist() for one in found}


def test_a_conversation_depends_on_its_number_and_the_seed_only(write, tmp_path):
  texts = [by_index(conversations(write(tmp_path / str(batch), batch=batch))) for batch in (2, 9, 24)]
  other = by_index(conversations(write(tmp_path / 'seed', settings=dataclasses.replace(SETTINGS, seed=1))))
  shared = set.intersection(*map(set, texts))
  assert len(shared) > 12
  for i in shared:
    assert texts[0][i] == texts[1][i] == texts[2][i]
  assert not set(map(tuple, texts[1].values())) & set(map(tuple, other.values()))


# Kills.


class Killed(Exception):
  pass


def kill_at(call, function=lambda *_, **__: None, after=False):
  """The function, but killed at its n-th call, before it does anything or after."""
  count = 0

  def killed(*arguments, **options):
    nonlocal count
    count += 1
    if count == call and not after:
      raise Killed
    result = function(*arguments, **options)
    if count == call:
      raise Killed
    return result

  return killed


def half_savez(call):
  """np.savez that is killed in the middle of its n-th file."""
  whole = kill_at(call, np.savez)

  def savez(file, **contents):
    try:
      whole(file, **contents)
    except Killed:
      file.write(b'PK half of it')
      raise

  return savez


@pytest.fixture(scope='module')
def uninterrupted(target, tmp_path_factory):
  folder = tmp_path_factory.mktemp('uninterrupted') / 'corpus'
  corpus.write(folder, target, TOKENIZER, PROMPTS, num_tokens=2 * TOKENS, settings=SETTINGS, batch=4)
  return by_index(conversations(folder))


@pytest.mark.parametrize('moment', ['first step', 'step 20', 'step 45', 'in a file', 'before a rename',
                                    'after a rename', 'settings'])
def test_a_kill_loses_nothing_that_is_whole(write, monkeypatch, tmp_path, uninterrupted, moment):
  options = {'prompts': PROMPTS}
  with monkeypatch.context() as patched:
    if 'step' in moment:
      options['progress'] = kill_at({'first step': 1, 'step 20': 20, 'step 45': 45}[moment])
    elif moment == 'in a file':
      patched.setattr(np, 'savez', half_savez(2))
    else:  # the first rename is that of the settings
      call = {'before a rename': 3, 'after a rename': 2, 'settings': 1}[moment]
      patched.setattr(os, 'replace', kill_at(call, os.replace, after=moment == 'after a rename'))
    with pytest.raises(Killed):
      write(**options)
  before = contents(tmp_path / 'corpus')
  assert len(before) == 1 or moment not in ('in a file', 'before a rename', 'after a rename')
  (tmp_path / 'corpus' / '.shard-00007.npz.partial-0').write_bytes(b'what a kill without warning leaves')
  folder = write(prompts=PROMPTS)
  assert not list(folder.glob('.*'))
  files = contents(folder)
  assert all(files[name] == content for name, content in before.items()) and len(files) > 3
  check_whole(folder, write.num_tokens, uninterrupted)
  assert contents(write(prompts=PROMPTS)) == files, 'there is nothing left to do'


def check_whole(folder, num_tokens, expected):
  """Every number is there once, with the text it has in any run; the tokens are counted right."""
  found = conversations(folder)
  numbers = [one.index for one in found] + dropped(folder)
  assert len(numbers) == len(set(numbers))
  assert num_tokens == sum(len(one.tokens) - one.prompt_length for one in found) >= TOKENS
  assert len({tuple(one.tokens[: one.prompt_length].tolist()) for one in found}) == len(found)
  for i, tokens in by_index(found).items():
    assert expected.get(i, tokens) == tokens


def test_a_corpus_grows(write, uninterrupted):
  few = contents(write(num_tokens=50, prompts=PROMPTS))
  folder = write(prompts=PROMPTS)
  assert contents(folder).items() > few.items()
  check_whole(folder, write.num_tokens, uninterrupted)


def test_progress_counts_tokens(write):
  seen = []
  write(progress=seen.append)
  assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == write.num_tokens


# What is not kept.


@pytest.mark.parametrize('answer, expected', [
    ([], True), ([5], True), ([5, 6], False), ([5, 5, 5], False), ([5] * 4, False), ([5] * 5, False), ([5] * 6, True),
    (list(range(40)), False), (list(range(10)) * 2, False), (list(range(10)) * 4, True)])
def test_is_degenerate(answer, expected):
  assert corpus.is_degenerate(answer) == corpus.is_degenerate(np.array(answer)) == expected


@dataclasses.dataclass(frozen=True)
class ScriptConfig(fakes.FakeConfig):
  embed_dim: int = 1


def scripted(script):
  return fakes.scripted([script], ScriptConfig(VOCAB), width=64)


RAW = dataclasses.replace(SETTINGS, raw=True, hidden_layers=None, temperatures=(1.0,))


def test_loops_and_repeats_are_dropped(write):
  """A verifier that says 8 9 10 ... after a text of two tokens and repeats itself after a long one."""
  end = TOKENIZER.eos_token_id
  model = scripted([0, *range(7, 15), end, *range(7, 15), end] + [3] * 40)
  folder = write(target=model, settings=RAW, prompts=['ab', 'cdefghijklmnopqrstuv', 'cd', 'ab', 'efghijklmno'],
                 num_tokens=8 + 9 + 8 + 7)
  found = {one.index: one for one in conversations(folder, None)}
  assert {i: len(one.tokens) - one.prompt_length for i, one in found.items()} == {0: 8, 1: 9, 4: 8, 8: 8}
  assert found[1].tokens.tolist() == [end, *range(7, 15), end] and found[1].hidden is None
  assert {2, 3, 5, 6} <= set(dropped(folder)), 'a loop, and repeats'
  assert 'hidden' not in np.load(corpus.shards(folder)[0])


def test_a_verifier_of_no_use_does_not_run_forever(write, monkeypatch, tmp_path):
  monkeypatch.setattr(corpus, 'GIVE_UP', 30)
  with pytest.raises(ValueError, match='of the last 40 texts of the verifier none could be kept'):
    write(target=scripted([3]), settings=RAW)
  with pytest.raises(ValueError, match='of the last 40 texts of the verifier none could be kept'):  # no turn ends
    write(tmp_path / 'chat', target=scripted(range(60)), settings=dataclasses.replace(RAW, raw=False))


def test_nan_stops(write):
  with pytest.raises(ValueError, match='the verifier gave logits that are no numbers'):
    write(target=scripted([0, 3, 4, -1]), settings=RAW)


def test_raw_texts_go_on_from_their_first_token(write, target):
  found = conversations(write(settings=dataclasses.replace(SETTINGS, raw=True), prompts=['the', 'hi', 'hi'],
                              tokenizer=fakes.byte_tokenizer(chat_template=None)))
  assert {one.prompt_length for one in found if one.index % 2 or one.index > 4} == {1}
  assert {one.tokens[0] for one in found if one.index % 2} == {TOKENIZER.eos_token_id}
  check_laws(target, found)


# What has to be mended.


@pytest.mark.parametrize('changes, message', [
    ({'top': 0}, 'top=0: need at least 1'), ({'given_every': 0}, 'given_every=0: need at least 1'),
    ({'raw': True, 'openings': ('Why ',)}, 'openings: they begin a user'),
    ({'max_answer': 0}, 'max_answer=0'), ({'temperatures': ()}, 'temperatures'),
    ({'top_k': 33}, 'top_k=33: the laws are kept of 32'), ({'temperatures': (0.5, -1.0)}, 'temperature=-1.0'),
    ({'ask_temperature': float('nan')}, 'temperature=nan'), ({'top_p': 0.0}, 'top_p=0.0')])
def test_settings_that_make_no_corpus(changes, message):
  with pytest.raises(ValueError, match=message):
    corpus.Settings(**changes)


@pytest.mark.parametrize('options, message', [
    ({'settings': dataclasses.replace(SETTINGS, max_answer=90)}, 'are 114 tokens, the context of the verifier is 96'),
    ({'settings': dataclasses.replace(SETTINGS, openings=('a' * 23,))}, "opening 'aaa.*has 23 tokens: need at least 1"),
    ({'settings': dataclasses.replace(SETTINGS, openings=('',))}, "opening '' has 0 tokens"),
    ({'settings': dataclasses.replace(SETTINGS, hidden_layers=(1, 2))}, 'need rising ones of 0..1'),
    ({'settings': dataclasses.replace(SETTINGS, top=999)}, 'top=999: the verifier has 268 tokens'),
    ({'settings': dataclasses.replace(SETTINGS, max_prompt=1)}, 'max_prompt=1: the chat template alone takes 1 tokens'),
    ({'prompts': ['a' * 30, 'b' * 40]}, 'all 2 prompts are longer than max_prompt=24 tokens'),
    ({'prompts': ['']}, 'prompt 0 is empty'),
    ({'tokenizer': fakes.byte_tokenizer(chat_template=None)}, 'no chat template .* use raw'),
    ({'tokenizer': fakes.byte_tokenizer(chat_template='{{ 1 }}')}, 'does not show where a user\'s turn begins'),
])
def test_what_cannot_be_written(write, options, message):
  with pytest.raises(ValueError, match=message):
    write(**options)


def test_a_folder_of_other_settings(write, tmp_path):
  before = contents(write(num_tokens=40))
  with pytest.raises(ValueError, match=r'other settings \(top_p is 0.95 there and 0.9 here; seed is 0 there and 2'):
    write(settings=dataclasses.replace(SETTINGS, top_p=0.9, seed=2))
  with pytest.raises(ValueError, match='tokenizer is [0-9]+ there and [0-9]+ here'):
    write(tokenizer=fakes.byte_tokenizer(extra=['<|more|>']))
  path = tmp_path / 'corpus' / 'corpus.json'
  for text in ('{', '[]'):
    path.write_text(text)
    with pytest.raises(ValueError, match='corpus.json: damaged'):
      write()
  path.unlink()
  with pytest.raises(ValueError, match='holds shards without corpus.json'):
    write()
  assert contents(tmp_path / 'corpus') == before


@pytest.mark.parametrize('keep', [0, 40, 0.5, -30])
def test_a_damaged_shard_is_named(write, keep, uninterrupted):
  folder = write(prompts=PROMPTS)
  victim = corpus.shards(folder)[1]
  others = {name: content for name, content in contents(folder).items() if name != victim.name}
  whole = victim.read_bytes()
  victim.write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else keep])
  for act in (lambda: corpus.read(victim), lambda: write(prompts=PROMPTS)):
    with pytest.raises(ValueError, match='shard-00001.npz: damaged .* delete it'):
      act()
  victim.unlink()
  write(prompts=PROMPTS)
  assert contents(folder).items() > others.items(), 'no other file is touched'
  check_whole(folder, write.num_tokens, uninterrupted)


def test_a_shard_that_lacks_something(write):
  folder = write(num_tokens=40)
  path = corpus.shards(folder)[0]
  shard = dict(np.load(path))
  np.savez(path, **{name: array for name, array in shard.items() if name != 'top_ids'})
  with pytest.raises(ValueError, match='shard-00000.npz: damaged .*top_ids'):
    corpus.read(path)


@pytest.mark.parametrize('where', ['replace', 'savez'])
def test_a_full_disk(write, monkeypatch, where, tmp_path, uninterrupted):
  def full(*_, **__):
    if len(corpus.shards(tmp_path)) < 2 and where == 'replace':
      return replace(*_)
    raise OSError(28, 'No space left on device')

  replace, folder = os.replace, tmp_path
  write(folder, num_tokens=40, prompts=PROMPTS)
  before = contents(folder)
  with monkeypatch.context() as patched:
    patched.setattr(*(os, 'replace') if where == 'replace' else (np, 'savez'), full)
    with pytest.raises(ValueError, match='shard-0000[12].npz could not be written .*No space left on device.*whole'):
      write(folder, prompts=PROMPTS)
  assert contents(folder).items() >= before.items()
  write(folder, prompts=PROMPTS)
  check_whole(folder, write.num_tokens, uninterrupted)


def test_a_folder_that_cannot_be_made(write, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='file/corpus: could not be written'):
    write(tmp_path / 'file' / 'corpus')
