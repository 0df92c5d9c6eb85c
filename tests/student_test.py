"""A distilled draft: what it reads, what it may propose, and its folder."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import decode
from cactus_jax.models import student as student_lib
from cactus_jax.models import transformer, weights
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.transformer import Transformer
from tests import fakes

pytestmark = pytest.mark.usefixtures('quick_programs')
CONFIG = ModelConfig(
    family='llama', vocab_size=268, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    mlp_dim=48, max_length=128, norm_eps=1e-5, rope_theta=1000.0, tie_embeddings=True)
HEAD = np.arange(3, 268, 2)
ATOL = 3e-5


def model(seed=0, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  return Transformer(transformer.random_params(jax.random.key(seed), config), config)


def student_of(target, reads_hidden, **options):
  """A student whose layers and fuse are not those it starts from."""
  student = student_lib.new_student(target, [0, 2], HEAD, reads_hidden=reads_hidden, **options)
  others = model(seed=7).params.layers[:2]
  fuse = 0.3 * jax.random.normal(jax.random.key(9), (64, 32)) if reads_hidden else None
  return student.replace(body=student.body.replace(params=student.body.params.replace(layers=others)), fuse=fuse)


@pytest.fixture(scope='module')
def target():
  return model()


@pytest.fixture(scope='module', params=[False, True], ids=['plain', 'reads_hidden'])
def student(request, target):
  return student_of(target, request.param)


@pytest.fixture(scope='module')
def tokenizer():
  return fakes.byte_tokenizer()


@jax.jit
def hidden_states(target, tokens_BT):
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  return target(tokens_BT, positions_BT, target.init_cache(*tokens_BT.shape, hidden=True))[1].hidden


@jax.jit
def _read_text(student, tokens_BT, hidden_BTD):
  own_BTD = student.read_text(tokens_BT, hidden_BTD)
  return transformer.logits(student.body.params, student.config, own_BTD), own_BTD


def logits_of_text(student, tokens_BT, hidden_BTD):
  """f32[B, T, V] by the path that training takes, and the student's hidden states."""
  logits_BTR, own_BTD = _read_text(student, tokens_BT, hidden_BTD)
  wide = np.full((*tokens_BT.shape, CONFIG.vocab_size), -np.inf, np.float32)
  wide[..., HEAD] = np.asarray(logits_BTR)
  return wide, own_BTD


def test_decoding_and_training_read_alike(student, target):
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 268, (2, 20)))
  hidden_BTD = hidden_states(target, tokens_BT)
  expected, _ = logits_of_text(student, tokens_BT, hidden_BTD)
  cache = student.init_cache(2, 24)
  for start, stop in ((0, 7), (7, 8), (8, 20)):
    if student.reads_hidden:
      cache = cache.replace(hidden=jnp.pad(hidden_BTD, ((0, 0), (0, 4), (0, 0))))
    positions_BT = jnp.broadcast_to(jnp.arange(start, stop)[None], (2, stop - start))
    logits_BTV, cache = student(tokens_BT[:, start:stop], positions_BT, cache)
    np.testing.assert_allclose(logits_BTV, expected[:, start:stop], atol=ATOL)


_law = jax.jit(lambda logits_11V, sampling: cj.sampling.to_probs(logits_11V, decode.per_row(sampling, 1))[0, 0])


def draft_laws_anew(student, target, text, drafted, sampling):
  """The laws of the drafted tokens after a text, each from the whole text, without any cache."""
  tokens, laws = np.zeros((1, 48), np.int32), []
  tokens[0, : len(text)], tokens[0, len(text) : len(text) + len(drafted)] = text, drafted
  read = len(text) - 1  # the verifier has not read the last token: from there on the student has its own states
  hidden_BTD = hidden_states(target, tokens)
  for end in range(len(text), len(text) + len(drafted)):
    logits_BTV, own_BTD = logits_of_text(student, tokens, hidden_BTD)
    laws.append(_law(logits_BTV[:, end - 1 : end], sampling))
    hidden_BTD = jnp.concatenate([hidden_BTD[:, :read], own_BTD[:, read:]], axis=1)
  return laws


@pytest.mark.parametrize('num_draft', [1, 3])
@pytest.mark.parametrize('rule', [cj.Exact(), cj.Lenience(1e6)], ids=['exact', 'keeps_all'])
def test_draft_laws_are_those_of_the_whole_text(student, target, num_draft, rule):
  """After rejections and after rounds that kept everything, from a prompt of one token, of few, and of more."""
  config = decode.DecodeConfig(num_draft=num_draft, max_length=40, vocab_size=268)
  sampling = cj.SamplingParams(temperature=1.5)
  state = fakes.start(target, student, prompts=[[5], [7, 9, 11], list(range(20, 31))], max_new=24, config=config)
  kept = set()
  for _ in range(6):
    before = fakes.texts(jax.tree.map(np.asarray, state.replace(keys=None)))
    state, info = decode.decode_step(target, student, rule, sampling, state, config)
    kept |= set(np.asarray(info.verdict.num_accepted).tolist())
    for row, text in enumerate(before):
      drafted = np.asarray(info.draft.tokens)[row]
      laws = draft_laws_anew(student, target, text, drafted, sampling)
      np.testing.assert_allclose(np.asarray(info.draft.probs)[row], laws, atol=ATOL)
  assert kept & {num_draft} if isinstance(rule, cj.Lenience) else 0 in kept


def test_what_the_verifier_thought_matters(target):
  """A student that reads hidden states has another law where they differ, though the tokens are the same."""
  student, tokens_BT = student_of(target, True), jnp.arange(12)[None]
  ours, theirs = (logits_of_text(student, tokens_BT, hidden_states(verifier, tokens_BT))[0][..., HEAD]
                  for verifier in (target, model(seed=3)))
  assert np.max(np.abs(ours - theirs)[:, 1:]) > 0.1


def test_greedy_text_is_the_verifiers(student, target, tokenizer):
  options = dict(target=target, tokenizer=tokenizer, sampling=cj.SamplingParams(temperature=0), max_new_tokens=24)
  plain = cj.generate_text(['abc', 'the cat'], **options)
  for num_draft in (1, 4):
    done = cj.generate_text(['abc', 'the cat'], draft=student, num_draft=num_draft, **options)
    assert done.tokens == plain.tokens


def test_head_proposes_only_its_tokens(student, target):
  config = decode.DecodeConfig(num_draft=4, max_length=64, vocab_size=268)
  state = fakes.start(target, student, prompts=[[5, 6]] * 8, max_new=40, config=config)
  others = np.setdiff1d(np.arange(268), HEAD)
  for _ in range(4):
    state, info = decode.decode_step(target, student, cj.Exact(), cj.SamplingParams(), state, config)
    assert np.isin(info.draft.tokens, HEAD).all()
    assert (np.asarray(info.draft.probs)[..., others] == 0).all()
    np.testing.assert_allclose(np.asarray(info.draft.probs).sum(-1), 1, atol=1e-5)


def test_window_hides_what_is_far(target):
  student = student_of(target, False, window=4)
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 268, (1, 20)))
  changed, _ = logits_of_text(student, tokens_BT.at[0, 0].set(3), None)
  same, _ = logits_of_text(student, tokens_BT, None)
  np.testing.assert_array_equal(changed[:, -1], same[:, -1])  # two layers of four positions do not reach so far
  assert not np.array_equal(changed[:, 3], same[:, 3])


class TestFolder:

  @pytest.fixture
  def saved(self, student, tokenizer, tmp_path):
    student_lib.save(tmp_path / 'draft', student, tokenizer, {'step': 3})
    return tmp_path / 'draft'

  def test_comes_back(self, saved, student, target, tokenizer):
    found = student_lib.load(saved, target, tokenizer)
    assert found.config == student.config and found.reads_hidden == student.reads_hidden
    assert found.body.params.embed is target.params.embed
    for ours, theirs in zip(jax.tree.leaves(student), jax.tree.leaves(found), strict=True):
      np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)  # half precision
    described = json.loads((saved / 'student.json').read_text())
    assert described['about'] == {'step': 3}
    size = sum(path.stat().st_size for path in saved.iterdir())
    layers = sum(leaf.size for leaf in jax.tree.leaves(student.body.params.layers))
    assert size < 2 * layers + 2 * 64 * 32 + 8000  # neither embedding nor head

  def test_in_8_bits(self, saved, target, tokenizer):
    found, rounded = (student_lib.load(saved, target, tokenizer, quantize=how) for how in (None, 'int8'))
    assert rounded.quantize == 'int8' and rounded.body.params.head.values.shape == (32, len(HEAD))
    tokens_BT = jnp.arange(9)[None]
    hidden_BTD = hidden_states(target, tokens_BT)
    exact, near = (np.asarray(one(tokens_BT, tokens_BT, one.init_cache(1, 9).replace(
        hidden=hidden_BTD if one.reads_hidden else None))[0]) for one in (found, rounded))
    np.testing.assert_allclose(near[..., HEAD], exact[..., HEAD], atol=0.1)

  def test_of_a_verifier_in_8_bits(self, saved, target, tokenizer):
    found = student_lib.load(saved, weights.to_int8(target), tokenizer)
    np.testing.assert_allclose(found.body.params.head, np.asarray(target.params.embed)[HEAD], atol=1e-6)

  def test_refuses_what_does_not_belong(self, saved, target, tokenizer):
    with pytest.raises(ValueError, match='another tokenizer'):
      student_lib.load(saved, target, fakes.byte_tokenizer(extra=['<|more|>']))
    with pytest.raises(ValueError, match='268 tokens of 32 numbers'):
      student_lib.load(saved, model(vocab_size=272), tokenizer)
    with pytest.warns(UserWarning, match='another embedding'):
      student_lib.load(saved, model(seed=1), tokenizer)

  def test_refuses_what_is_damaged(self, saved, target, tokenizer, student):
    with pytest.raises(ValueError, match='is there already'):
      student_lib.save(saved, student, tokenizer)
    path = saved / 'student.safetensors'
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(ValueError, match='student.safetensors: damaged'):
      student_lib.load(saved, target, tokenizer)
    path.write_bytes(content)
    described = saved / 'student.json'
    whole = json.loads(described.read_text())
    for broken, words in (({'version': 9}, 'known here'), ({'format': 'other'}, 'known here'),
                          ({'head_size': 7}, 'does not belong'),
                          ({'reads_hidden': not whole['reads_hidden']}, 'does not belong')):
      described.write_text(json.dumps(whole | broken))
      with pytest.raises(ValueError, match=words):
        student_lib.load(saved, target, tokenizer)
    described.write_text('{')
    with pytest.raises(ValueError, match='no description'):
      student_lib.load(saved, target, tokenizer)


def test_refuses_layers_and_verifiers_that_do_not_do(target):
  for layers in ([], [3], [-1]):
    with pytest.raises(ValueError, match='layers='):
      student_lib.new_student(target, layers, HEAD)
  with pytest.raises(ValueError, match='8-bit'):
    student_lib.new_student(weights.to_int8(target), [0], HEAD)


def test_as_transformer(target):
  """A draft with all tokens that reads no hidden states is a model of its own."""
  whole = student_lib.new_student(target, [0, 1], np.arange(268))
  own, tokens_BT = student_lib.as_transformer(whole), jnp.arange(6)[None]
  np.testing.assert_allclose(
      own(tokens_BT, tokens_BT, own.init_cache(1, 6))[0], whole(tokens_BT, tokens_BT, whole.init_cache(1, 6))[0])
  with pytest.raises(ValueError, match='reads hidden'):
    student_lib.as_transformer(student_of(target, True))
  with pytest.raises(ValueError, match='of 268 tokens'):
    student_lib.as_transformer(student_of(target, False))
