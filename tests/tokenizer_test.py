"""Tokenizers in GGUF files: the tokens of transformers' own, or of the algorithm spelt out, on small vocabularies."""

import inspect
import itertools
import json
import re

import gguf as ggml
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_base import generate_merges

from cactus_jax.models import gguf
from tests import checkpoints, load_test

TEXTS = (*load_test.TEXTS, *load_test.NUMBERS, 'cafe\u0301, A\u030a', "DON'T, we'Ll", '12345678 1,234', 'a  b\n\n\nc')
TYPES = ggml.TokenType
SPECIAL = {'<|endoftext|>': TYPES.CONTROL, '<|im_start|>': TYPES.CONTROL, '<|im_end|>': TYPES.CONTROL,
           '<file_sep>': TYPES.USER_DEFINED}


def raises(*texts):
  return pytest.raises(ValueError, match='.*'.join(map(re.escape, texts)))


def read(tmp_path, types, **metadata):
  """The tokenizer of a file with {token: type} and this metadata, under the names of GGUFWriter's methods."""
  metadata |= {'token_list': list(types), 'token_types': list(types.values())}
  extra = [(f'add_{name}', value) for name, value in metadata.items() if value is not None]
  return gguf.load_tokenizer(checkpoints.write_gguf(tmp_path / 'tiny.gguf', extra=extra))


def assert_same(ours, theirs):
  for text in TEXTS:
    ids = ours(text).input_ids
    assert ids == theirs(text).input_ids, text
    assert ours.decode(ids) == theirs.decode(ids), text


# Merges of bytes.

PATTERNS = {
    'qwen2': PRETOKENIZE_REGEX,
    'llama3': inspect.signature(TikTokenConverter).parameters['pattern'].default,
}


def byte_level(pattern, model):
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


@pytest.fixture(scope='module')
def trained():
  """Of each pattern, as learnt from the texts: {token: type} in order, and merges."""
  def train(pattern):
    tokenizer = byte_level(pattern, models.BPE())
    tokenizer.train_from_iterator(TEXTS * 2, trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    model = json.loads(tokenizer.to_str())['model']
    return dict.fromkeys(model['vocab'], TYPES.NORMAL) | SPECIAL, [' '.join(merge) for merge in model['merges']]

  return {name: train(pattern) for name, pattern in PATTERNS.items()}


def fast(tokenizer):
  """What transformers makes of it, with the special tokens."""
  tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=kind == TYPES.CONTROL)
                        for token, kind in SPECIAL.items()])
  return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize('pre', ['qwen2', 'deepseek-r1-qwen'])
def test_qwen(tmp_path, trained, pre):
  types, merges = trained['qwen2']
  ours = read(tmp_path, types, tokenizer_model='gpt2', tokenizer_pre=pre, token_merges=merges)
  vocabulary = {token: i for i, token in enumerate(types)}
  theirs = transformers.Qwen2Tokenizer(vocabulary, [tuple(merge.split(' ')) for merge in merges])
  assert_same(ours, fast(theirs.backend_tokenizer))
  assert len(ours('12345678').input_ids) == 8
  assert ours('cafe\u0301').input_ids == ours('café').input_ids


def test_llama3(tmp_path, trained):
  types, merges = trained['llama3']
  whole = 'Ġleading'  # in the vocabulary, but no merge makes it
  types = {token: kind for token, kind in types.items() if token != whole} | {whole: TYPES.NORMAL}
  merges = [merge for merge in merges if merge.replace(' ', '') != whole]
  ours = read(tmp_path, types, tokenizer_model='gpt2', tokenizer_pre='llama-bpe', token_merges=merges,
              add_bos_token=False)
  theirs = byte_level(PATTERNS['llama3'], models.BPE(
      {token: i for i, token in enumerate(types)}, [tuple(merge.split(' ')) for merge in merges], ignore_merges=True))
  assert_same(ours, fast(theirs))
  assert ours.tokenize(' leading') == [whole]
  assert ours.tokenize('12345678')[0] == '123'
  assert ours('cafe\u0301').input_ids != ours('café').input_ids


# SentencePiece.

HEAD = {'<pad>': TYPES.CONTROL, '<eos>': TYPES.CONTROL, '<bos>': TYPES.CONTROL, '<unk>': TYPES.UNKNOWN,
        '<mask>': TYPES.CONTROL}
BYTES = {f'<0x{byte:02X}>': TYPES.BYTE for byte in range(256)}
IDS = {'bos_token_id': 2, 'unk_token_id': 3}


@pytest.fixture(scope='module')
def scored():
  """{token: type} in order, and scores: what merges made, the best first, then characters, but only Latin ones."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  latin = [''.join(char for char in text if char < '\u0250') for text in TEXTS]
  tokenizer.train_from_iterator(latin * 2, trainers.BpeTrainer(vocab_size=400, show_progress=False))
  vocabulary = json.loads(tokenizer.to_str())['model']['vocab']
  learnt = sorted(vocabulary, key=lambda token: (len(token) == 1, vocabulary[token]))
  types = HEAD | BYTES | dict.fromkeys(learnt, TYPES.NORMAL)
  return types, [0.0] * (len(types) - len(learnt)) + [-1.0 - i for i in range(len(learnt))]


def greedy(text, types, scores):
  """Ids by the algorithm: of all neighbours merge those whose token scores best; bytes for what is no token."""
  score = {token: score for (token, kind), score in zip(types.items(), scores) if kind == TYPES.NORMAL}
  ids = {token: i for i, token in enumerate(types)}
  parts = list(text.replace(' ', '▁'))
  while True:
    made = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
    if not made:
      break
    i = -max(made)[1]
    parts[i:i + 2] = [parts[i] + parts[i + 1]]
  return [i for part in parts
          for i in ([ids[part]] if part in score else [ids[f'<0x{byte:02X}>'] for byte in part.encode()])]


@pytest.mark.parametrize('prefix', [None, True, False])
def test_sentencepiece(tmp_path, scored, prefix):
  types, scores = scored
  ours = read(tmp_path, types, token_scores=scores, tokenizer_model='llama', add_space_prefix=prefix, **IDS)
  for text in TEXTS:
    ids = ours(text).input_ids
    assert ids == [2, *greedy(' ' + text if text and prefix is not False else text, types, scores)], text
    assert ours.decode(ids, skip_special_tokens=True) == text
  assert any(5 <= i < 261 for i in ours('日本').input_ids)  # as bytes


def test_gemma(tmp_path, scored):
  """llama.cpp writes tokens of spaces, which are the user's, as spaces, while transformers merges them."""
  types, scores = scored
  own = len(HEAD) + len(BYTES)
  with_spaces = lambda spaces: dict.fromkeys([*types][:own] + [spaces] + [*types][own:])
  scores = [*scores[:own], -0.5, *scores[own:]]
  ours = read(tmp_path, {token: types.get(token, TYPES.USER_DEFINED) for token in with_spaces('  ')},
              token_scores=scores, tokenizer_model='llama', tokenizer_pre='default', add_space_prefix=False,
              add_bos_token=True, **IDS)
  vocabulary = {token: i for i, token in enumerate(with_spaces('▁▁'))}
  merges = generate_merges(vocabulary, dict(zip(vocabulary, scores)))
  theirs = transformers.GemmaTokenizer(vocabulary, merges).backend_tokenizer
  for text in TEXTS:
    ids = ours(text).input_ids
    assert ids == [2, *theirs.encode(text, add_special_tokens=False).ids], text
    assert ours.decode(ids, skip_special_tokens=True) == text
  assert own in ours('a  b').input_ids


# The token that begins a text.


@pytest.mark.parametrize('model, pre, told, begins', [
    ('llama', 'default', None, True),
    ('llama', None, False, False),
    ('gpt2', 'llama-bpe', None, True),
    ('gpt2', 'llama-bpe', False, False),
    ('gpt2', 'qwen2', None, False),
    ('gpt2', 'deepseek-r1-qwen', True, True),
])
def test_bos(tmp_path, model, pre, told, begins):
  """As the file says, else as llama.cpp does for models of that kind."""
  types = {token: TYPES.NORMAL for token in ('x', 'y', 'z', 'xy')} | {'<s>': TYPES.CONTROL}
  ours = read(tmp_path, types, tokenizer_model=model, tokenizer_pre=pre, add_bos_token=told, bos_token_id=4,
              add_space_prefix=False, token_merges=['x y'], token_scores=[0.0] * 5)
  start = [4] * begins
  assert ours('xz').input_ids == [*start, 0, 2]
  assert ours('x', 'yz').input_ids == [*start, 0, *start, 1, 2]
  assert ours('x', add_special_tokens=False).input_ids == [0]
  assert ours.bos_token == '<s>'


# What must be refused.


@pytest.mark.parametrize('metadata, texts', [
    ({'tokenizer_model': 'gpt2', 'tokenizer_pre': 'tekken'},
     ["a tokenizer of {'model': 'gpt2', 'pre': 'tekken', 'add_bos_token': None, 'add_eos_token': None}: implemented "
      'are model llama, and model gpt2 with pre gpt-2 or smollm or llama-bpe or qwen2 or deepseek-r1-qwen, with no '
      'added end; load the tokenizer of the original model from the hub or a folder.']),
    ({'tokenizer_model': 't5'}, ["a tokenizer of {'model': 't5'", 'implemented are']),
    ({'tokenizer_model': 'llama', 'add_eos_token': True},
     ["a tokenizer of {'model': 'llama'", "'add_eos_token': True}", 'with no added end']),
    ({'tokenizer_model': 'llama'}, ['the tokenizer lacks tokenizer.ggml.scores, tokenizer.ggml.bos_token_id; load']),
    ({'tokenizer_model': 'gpt2', 'tokenizer_pre': 'qwen2'}, ['the tokenizer lacks tokenizer.ggml.merges; load']),
])
def test_refuses(tmp_path, metadata, texts):
  with raises(f'{tmp_path}/tiny.gguf: {texts[0]}', *texts[1:]):
    read(tmp_path, {'a': TYPES.NORMAL}, **metadata)
