"""The program of experiments/variants.py: that its figures are those of the models it compares."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import variants
from lib import record

import cactus_jax as cj
from cactus_jax.models.config import FAMILIES
from tests import checkpoints, fakes

PROMPTS = [[5, 6, 7], [8, 9]]


pytestmark = pytest.mark.usefixtures('quick_programs')


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  """A random model with the vocabulary of the byte tokenizer and a tied head."""
  config = checkpoints.CONFIG | {'vocab_size': 288, 'tie_word_embeddings': True}
  return cj.load_transformer(
      os.fspath(checkpoints.write_folder(tmp_path_factory.mktemp('tiny') / 'model', config)), dtype='float32')


def test_compared():
  """Against the definitions in float64, with a column more on one side."""
  rng = np.random.default_rng(0)
  a, b = rng.normal(size=(5, 7)), rng.normal(size=(5, 8))
  cosine, kl, same = variants._compared(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
  b = b[:, :7]
  np.testing.assert_allclose(cosine, (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1)), rtol=1e-5)
  p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (a, b))
  np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(1), rtol=1e-4)
  np.testing.assert_array_equal(same, a.argmax(1) == b.argmax(1))
  assert 0 < np.mean(same) < 1


def test_same_from_start():
  assert variants.same_from_start([1, 2, 3], [1, 2, 4]) == 2
  assert variants.same_from_start([1, 2, 3], [1, 2, 3]) == 3
  assert variants.same_from_start([4, 2, 3], [1, 2, 3]) == 0


def test_greedy_is_what_the_model_finds_likeliest(tiny):
  texts = variants.greedy(tiny, PROMPTS, 6, 288)
  for prompt, tokens in zip(PROMPTS, texts):
    assert tokens[: len(prompt)] == prompt and len(tokens) == len(prompt) + 6
    logits = fakes.logits(tiny, np.array([tokens]))[0]
    assert tokens[len(prompt) :] == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()


def test_quality_tells_the_variants_apart(tiny):
  models = {name: make(tiny) for name, make in variants.VARIANTS.items()}
  found = variants.quality(models, PROMPTS, 8)
  for name in ('float32', 'padded', 'untied'):
    assert found[name]['same_top'] == 1 and found[name]['agree'] == 8 and abs(found[name]['kl']) < 1e-6, name
  for name in variants.ROUNDED:
    assert 1e-6 < found[name]['kl'] < 0.05 and found[name]['kl'] <= found[name]['kl_99'], name
    assert 0.99 < found[name]['cosine'] < 1, name
  assert models['untied'].params.head is not None and models['padded'].config.vocab_size == 288 + variants.PADDING


def test_quality_is_of_the_answers_alone(tiny):
  """A model that errs at every position of the prompts but the last is the same model here."""

  class Wrong(type(tiny)):
    def __call__(self, tokens_BT, positions_BT, cache):
      logits, cache = super().__call__(tokens_BT, positions_BT, cache)
      return jnp.where(positions_BT[..., None] < 1, -logits, logits), cache

  jax.tree_util.register_pytree_node(
      Wrong, lambda m: ((m.params,), (m.config, m.mesh, m.kv_dtype)), lambda aux, leaves: Wrong(leaves[0], *aux))
  wrong = Wrong(tiny.params, tiny.config, tiny.mesh, tiny.kv_dtype)
  assert variants.quality({'a': tiny, 'b': wrong}, PROMPTS, 5)['b']['kl'] < 1e-6
  assert variants.quality({'a': tiny, 'b': wrong}, [[5], [6]], 5)['b']['kl'] > 0.1


@pytest.mark.parametrize('family', FAMILIES)
def test_there_is_a_small_model_of_every_family(family):
  model = variants.of_family(family)
  assert model.config.family == family
  assert model.config.qkv_bias == (family == 'qwen2') and model.config.post_norms == family.startswith('gemma')


@pytest.fixture
def cli(tiny, run_program, monkeypatch):
  """cli(*arguments): exit code, standard output and standard error of a run on the tiny model."""
  monkeypatch.setattr(cj, 'default_model_path', lambda: pathlib.Path('/models/tiny.gguf'))
  monkeypatch.setattr(cj, 'default_draft_path', lambda: None)
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: tiny)
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer())
  monkeypatch.setattr(variants, 'FAMILIES', ['qwen2'])
  return lambda *arguments: run_program(variants.main, 'variants.py', '--tokens=4', '--repeats=1', *arguments)


@pytest.mark.slow
def test_prints_and_stores(cli, tmp_path):
  code, out, err = cli('--variants=int8,untied', f'--output={tmp_path}/rows.jsonl', '--num_draft=2')
  assert code == 0 and err == ''
  assert out.startswith('tiny.gguf, medians of 1 turns, K = 2; quality on 4 texts of 4 tokens')
  rows = record.read_rows(tmp_path / 'rows.jsonl')
  assert [(row['model'], row['variant']) for row in rows if 'kl' in row] == [
      ('tiny.gguf', 'float32'), ('tiny.gguf', 'int8'), ('tiny.gguf', 'untied'), ('random qwen2', 'int8')]
  assert {(row['variant'], row['tokens']) for row in rows if 'products_ms' in row} >= {
      ('float32', 1), ('float32', 3), ('int8', 1), ('int8', 3)}
  for row in rows:
    assert row['variant'] in out and all(row[name] > 0 for name in row if name.endswith('_ms'))
  assert 0 < rows[1]['megabytes'] < rows[0]['megabytes'] < rows[2]['megabytes']


@pytest.mark.parametrize('arguments, text', [
    (['--variants=int4'], '--variants=int4: int4 is none of float32, int8, int8 cache, int8 both, bfloat16, padded,'),
    (['--quantize=int8'], '--quantize means nothing here: all are compared.'),
    (['--draft=none'], '--draft means nothing here: nothing is drafted.'),
    (['--tokens=1'], 'tokens'),
    (['--repeats=0'], '--repeats=0: need at least 1.'),
    (['--num_draft=0'], '--num_draft=0: need at least 1.'),
])
def test_refuses(cli, arguments, text):
  code, out, err = cli(*arguments)
  assert code == 2 and text in err and out == ''
