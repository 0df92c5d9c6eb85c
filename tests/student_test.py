"""A distilled draft: what it reads, what it may propose, and its folder."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import decode
from cactus_jax.models import layers as layers_lib
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


def student_of(target, hidden_layers, copy=0, **options):
  """A student whose layers and fuse are not those it starts from."""
  student = student_lib.new_student(target, [0, 2], HEAD, hidden_layers=hidden_layers, copy=copy, **options)
  others = model(seed=7).params.layers[:2]
  fuse = None if student.fuse is None else 0.3 * jax.random.normal(jax.random.key(9), student.fuse.shape)
  return student.replace(body=student.body.replace(params=student.body.params.replace(layers=others)), fuse=fuse,
                         copy=2.0 * jnp.arange(1, copy + 1) if copy else None)


@pytest.fixture(scope='module')
def target():
  """With norms that can be told apart."""
  one = model()
  draw = lambda i: 1 + 0.5 * jax.random.normal(jax.random.key(i), (32,))
  layers = tuple(layer.replace(attn_norm=draw(i)) for i, layer in enumerate(one.params.layers))
  return one.replace(params=one.params.replace(layers=layers, final_norm=draw(9)))


@pytest.fixture(scope='module', params=[(None, 0), ((), 0), ((0, 2), 2)],
                ids=['plain', 'reads_last', 'reads_three_and_copies'])
def student(request, target):
  return student_of(target, *request.param)


@pytest.fixture(scope='module')
def tokenizer():
  return fakes.byte_tokenizer()


def hidden_states(target, tokens_BT, student):
  """Those that a student reads."""
  return _hidden_states(target, tokens_BT, student.hidden_layers or ())


call = jax.jit(lambda model, *arguments: model(*arguments))
score_one = jax.jit(lambda model, *arguments: model.score_one(*arguments))


@functools.partial(jax.jit, static_argnames='layers')
def _hidden_states(target, tokens_BT, layers):
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  return target(tokens_BT, positions_BT, target.init_cache(*tokens_BT.shape, hidden_layers=layers))[1].hidden


@jax.jit
def _read_text(student, tokens_BT, hidden_BTD):
  own_BTD, _ = student.read_text(tokens_BT, hidden_BTD)
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  columns_BV = student.columns(tokens_BT)
  logits_BTC = student.column_logits(own_BTD, positions_BT, columns_BV, tokens_BT,
                                     student.rows_of(tokens_BT).swapaxes(1, 2))
  return logits_BTC, columns_BV, own_BTD


def logits_of_text(student, tokens_BT, hidden_BTD):
  """f32[B, T, V] by the path that training takes, and the student's hidden states."""
  logits_BTC, columns_BV, own_BTD = _read_text(student, tokens_BT, hidden_BTD)
  wide = np.full((*tokens_BT.shape, CONFIG.vocab_size), -np.inf, np.float32)
  for b, columns_V in enumerate(np.broadcast_to(columns_BV, (len(wide), CONFIG.vocab_size))):
    there = columns_V < logits_BTC.shape[-1]
    wide[b][:, there] = np.asarray(logits_BTC)[b][:, columns_V[there]]
  return wide, own_BTD


def test_decoding_and_training_read_alike(student, target):
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 20)))  # so few that there are repeats
  hidden_BTD = hidden_states(target, tokens_BT, student)
  expected, _ = logits_of_text(student, tokens_BT, hidden_BTD)
  cache = student.init_cache(2, 24)
  for start, stop in ((0, 7), (7, 8), (8, 20)):
    if student.reads_hidden:
      cache = cache.replace(hidden=jnp.pad(hidden_BTD, ((0, 0), (0, 4), (0, 0))))
    positions_BT = jnp.broadcast_to(jnp.arange(start, stop)[None], (2, stop - start))
    logits_BTV, cache = call(student, tokens_BT[:, start:stop], positions_BT, cache)
    np.testing.assert_allclose(logits_BTV, expected[:, start:stop], atol=ATOL)


_law = jax.jit(lambda logits_11V, sampling: cj.sampling.to_probs(logits_11V, decode.per_row(sampling, 1))[0, 0])


def draft_laws_anew(student, target, text, drafted, sampling):
  """The laws of the drafted tokens after a text, each from the whole text, without any cache."""
  tokens, laws = np.zeros((1, 48), np.int32), []
  tokens[0, : len(text)], tokens[0, len(text) : len(text) + len(drafted)] = text, drafted
  read = len(text) - 1  # the verifier has not read the last token: from there on the student has its own states
  hidden_BTD = hidden_states(target, tokens, student)
  for end in range(len(text), len(text) + len(drafted)):
    logits_BTV, own_BTD = logits_of_text(student, tokens, hidden_BTD)
    laws.append(_law(logits_BTV[:, end - 1 : end], sampling))
    if student.reads_hidden:  # of the lower layers of the verifier there is nothing
      own_BTD = jnp.concatenate([0 * hidden_BTD[..., :-32], own_BTD], axis=-1)
      hidden_BTD = jnp.concatenate([hidden_BTD[:, :read], own_BTD[:, read:]], axis=1)
  return laws


@pytest.mark.parametrize('num_draft', [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize('rule', [cj.Exact(), cj.Lenience(1e6)], ids=['exact', 'keeps_all'])
def test_draft_laws_are_those_of_the_whole_text(student, target, num_draft, rule):
  """After rejections and after rounds that kept everything, from a prompt of one token, of few, and of more."""
  config = decode.DecodeConfig(num_draft=num_draft, max_length=40, vocab_size=268)
  sampling = cj.SamplingParams(temperature=1.5)
  prompts = [[5], [7, 9, 11, 7, 9], [*range(21, 27), *range(21, 26)]]
  state = fakes.start(target, student, prompts=prompts, max_new=24, config=config)
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


@pytest.mark.parametrize('columns', [slice(0, 32), slice(32, 64), slice(64, 96)])
def test_what_the_verifier_thought_matters(target, columns):
  """A student that reads hidden states has another law where any of them differ, though the tokens are the same."""
  student, tokens_BT = student_of(target, (0, 2)), jnp.arange(12)[None]
  ours, theirs = (hidden_states(verifier, tokens_BT, student) for verifier in (target, model(seed=3)))
  laws, others = (logits_of_text(student, tokens_BT, hidden)[0][..., HEAD]
                  for hidden in (ours, ours.at[..., columns].set(theirs[..., columns])))
  assert np.max(np.abs(laws - others)[:, 1:]) > 0.1


def test_hidden_states_are_what_layers_and_head_are_given(target):
  """By another way: of a verifier that ends where they are taken, what its head would be given under that norm."""
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 268, (2, 9)))
  found = hidden_states(target, tokens_BT, student_of(target, (0, 2)))
  positions_BT = jnp.broadcast_to(jnp.arange(9)[None], (2, 9))
  for i, place in ((0, 0), (2, 1)):
    x_BTD = transformer.embed(target.params, target.config, tokens_BT)
    if i:
      cut = target.early_exit(i)
      norm = target.params.layers[i].attn_norm
      x_BTD, _ = transformer.run_layers(
          cut.params.replace(final_norm=norm), cut.config, x_BTD, positions_BT, cut.init_cache(2, 9))
    else:
      x_BTD = layers_lib.rms_norm(x_BTD, target.params.layers[0].attn_norm, CONFIG.norm_eps)
    np.testing.assert_allclose(found[..., 32 * place : 32 * (place + 1)], x_BTD, atol=ATOL)


def test_latest_match():
  """Against a search by hand, in texts of three tokens; what follows the end of a text does not matter."""
  random = np.random.default_rng(0)
  tokens = random.integers(0, 3, (5, 24))
  positions = np.tile(np.arange(24), (5, 1))
  found, matched = map(np.asarray, student_lib.latest_match(jnp.asarray(tokens), jnp.asarray(positions), 4))
  for text, token_T, matched_T in zip(tokens, found, matched):
    for p in range(24):
      same = lambda end: next(n for n in range(5) if n == 4 or end < n or text[end - n] != text[p - n])
      best = max((same(end), end) for end in range(-1, p))
      assert matched_T[p] == best[0]
      assert best[0] == 0 or token_T[p] == text[best[1] + 1]
  assert set(matched.ravel()) == {0, 1, 2, 3, 4}
  last = student_lib.latest_match(jnp.asarray(np.where(positions > 11, 7, tokens)), jnp.asarray(positions[:, 11:12]), 4)
  np.testing.assert_array_equal(last[0][:, 0], found[:, 11])


def test_copying_lifts_one_token(target):
  """That which followed the longest match, by what that length is worth; without a match, none."""
  student = student_of(target, (), copy=3).replace(copy=jnp.array([0.5, 1.5, 4.0]))
  tokens_BT = jnp.array([[9, 5, 7, 3, 11, 5, 7, 13, 9, 5, 7, 15, 4, 10, 4]])
  hidden_BTD = hidden_states(target, tokens_BT, student)
  lifted, own_BTD = logits_of_text(student, tokens_BT, hidden_BTD)
  expected = logits_of_text(student.replace(copy=None), tokens_BT, hidden_BTD)[0][0]
  for token, first in ((4, 12), (10, 13)):  # of which the head has no rows
    expected[first:, token] = np.asarray(own_BTD[0] @ target.params.embed[token])[first:]
  for at, token, more in ((5, 7, 0.5), (6, 3, 1.5), (8, 5, 0.5), (9, 7, 1.5), (10, 3, 4.0), (14, 10, 0.5)):
    expected[at, token] += more
  np.testing.assert_allclose(lifted[0], expected, atol=ATOL)


def test_scoring_one_token_scores_it_as_all(student, target):
  for model in (student, target):
    tokens_BT = jnp.array([[5, 7, 9, 5, 7, 7], [11, 5, 11, 7, 9, 5]])  # what follows the last 7, and the first 11
    positions_BT = jnp.broadcast_to(jnp.arange(6)[None], (2, 6))
    cache = model.init_cache(2, 6)
    logits_BTV, whole = call(model, tokens_BT, positions_BT, cache)
    logits_B1V, one = score_one(model, tokens_BT, positions_BT, cache, jnp.array([5, 2]))
    np.testing.assert_allclose(logits_B1V[:, 0], np.asarray(logits_BTV)[[0, 1], [5, 2]], atol=ATOL)
    jax.tree.map(np.testing.assert_array_equal, one, whole)


def test_greedy_text_is_the_verifiers(student, target, tokenizer):
  options = dict(target=target, tokenizer=tokenizer, sampling=cj.SamplingParams(temperature=0), max_new_tokens=24)
  plain = cj.generate_text(['abc', 'the cat'], **options)
  for num_draft in (1, 4):
    done = cj.generate_text(['abc', 'the cat'], draft=student, num_draft=num_draft, **options)
    assert done.tokens == plain.tokens


def test_head_proposes_its_tokens_and_a_copy_those_of_the_text(student, target):
  config = decode.DecodeConfig(num_draft=4, max_length=64, vocab_size=268)
  state = fakes.start(target, student, prompts=[[6, 8, 5, 6]] * 8, max_new=40, config=config)
  others = np.setdiff1d(np.arange(268), HEAD)
  copied = 0
  for _ in range(4):
    texts = fakes.texts(jax.tree.map(np.asarray, state.replace(keys=None)))
    state, info = decode.decode_step(target, student, cj.Exact(), cj.SamplingParams(), state, config)
    drafted, probs = np.asarray(info.draft.tokens), np.asarray(info.draft.probs)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    for row, text in enumerate(texts):
      for k in range(4):
        text_too = np.intersect1d([*text, *drafted[row, :k]], others) if student.copy is not None else []
        np.testing.assert_array_equal(np.flatnonzero(probs[row, k]), np.union1d(HEAD, text_too))
        copied += drafted[row, k] in text_too
  assert (copied > 0) == (student.copy is not None)


@pytest.mark.parametrize('quantized', [False, True])
def test_copies_have_the_rows_of_the_verifiers_head(quantized):
  target = model(tie_embeddings=False, logit_softcap=2.0)
  student = student_of(target, None, copy=2)
  if quantized:
    target = weights.to_int8(target)
    student = student.replace(whole_head=target.params.head)
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 12)))
  logits_BTV, _ = logits_of_text(student, tokens_BT, None)
  own_BTD = _read_text(student, tokens_BT, None)[2]
  expected_BTV = np.asarray(layers_lib.soft_cap(layers_lib.logits(own_BTD, target.params.head), 2.0))
  assert not np.isin([4, 6, 8], HEAD).any()
  for b, t in np.ndindex(2, 12):
    for token in {4, 6, 8}:
      seen = token in np.asarray(tokens_BT)[b, : t + 1]
      assert np.isfinite(logits_BTV[b, t, token]) == seen
  # Where nothing is lifted, the logits are the head's.
  _, matched_BT = student_lib.latest_match(tokens_BT, jnp.broadcast_to(jnp.arange(12), (2, 12)), 2)
  there = np.isfinite(logits_BTV) & (np.asarray(matched_BT) == 0)[..., None]
  assert there[..., [4, 6, 8]].any()
  np.testing.assert_allclose(logits_BTV[there], expected_BTV[there], atol=0.02 if quantized else ATOL)


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('quantized', [False, True])
def test_a_folder_for_an_untied_verifier(quantized, tokenizer, tmp_path):
  """In bfloat16: its own head is what the text is copied by."""
  target = model(tie_embeddings=False)
  student_lib.save(tmp_path / 'draft', student_of(target, None, copy=2), tokenizer)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
  half = weights.to_int8(half) if quantized else half
  found = student_lib.load(tmp_path / 'draft', half, tokenizer)
  tokens_BT = jnp.array([[4, 5, 6, 8, 5, 9]])
  logits_BTV, cache = found(tokens_BT, jnp.arange(6)[None], found.init_cache(1, 8))
  assert cache.rows.dtype == jnp.bfloat16
  expected_BTV, _ = logits_of_text(student_of(target, None, copy=2), tokens_BT, None)
  there = np.isfinite(expected_BTV)
  np.testing.assert_array_equal(np.isfinite(logits_BTV), there)
  np.testing.assert_allclose(np.asarray(logits_BTV)[there], expected_BTV[there], atol=0.2)


def test_window_hides_what_is_far(target):
  student = student_of(target, None, window=4)
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
    assert found.config == student.config and found.hidden_layers == student.hidden_layers
    assert (found.copy is None) == (student.copy is None)
    assert found.body.params.embed is target.params.embed
    for ours, theirs in zip(jax.tree.leaves(student), jax.tree.leaves(found), strict=True):
      np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)  # half precision
    described = json.loads((saved / 'student.json').read_text())
    assert described['about'] == {'step': 3}
    size = sum(path.stat().st_size for path in saved.iterdir())
    layers = sum(leaf.size for leaf in jax.tree.leaves(student.body.params.layers))
    assert size < 2 * layers + 2 * 128 * 32 + 8000  # neither embedding nor head

  def test_in_8_bits(self, saved, target, tokenizer):
    found, rounded = (student_lib.load(saved, target, tokenizer, quantize=how) for how in (None, 'int8'))
    assert rounded.quantize == 'int8' and rounded.body.params.head.values.shape == (32, len(HEAD))
    tokens_BT = jnp.arange(9)[None]
    hidden_BTD = hidden_states(target, tokens_BT, found)
    exact, near = (np.asarray(call(one, tokens_BT, tokens_BT, one.init_cache(1, 9).replace(
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
                          ({'hidden_layers': [0, 1, 2]}, 'does not belong'),
                          ({'hidden_layers': [] if whole['hidden_layers'] is None else None}, 'does not belong')):
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
  for layers in ([3], [1, 0], [1, 1], [-1]):
    with pytest.raises(ValueError, match='hidden_layers=.*: need rising ones of 0..2'):
      student_lib.new_student(target, [0], HEAD, hidden_layers=tuple(layers))
  with pytest.raises(ValueError, match='need a fuse of shape .96, 32.'):
    student_lib.make_student(target, target.params.layers[:1], target.params.final_norm, HEAD, hidden_layers=(1,))
  with pytest.raises(ValueError, match='8-bit'):
    student_lib.new_student(weights.to_int8(target), [0], HEAD)


def test_as_transformer(target):
  """A draft with all tokens that reads no hidden states is a model of its own."""
  whole = student_lib.new_student(target, [0, 1], np.arange(268))
  own, tokens_BT = student_lib.as_transformer(whole), jnp.arange(6)[None]
  np.testing.assert_allclose(
      own(tokens_BT, tokens_BT, own.init_cache(1, 6))[0], whole(tokens_BT, tokens_BT, whole.init_cache(1, 6))[0])
  with pytest.raises(ValueError, match='reads hidden'):
    student_lib.as_transformer(student_of(target, ()))
  with pytest.raises(ValueError, match='or copies'):
    student_lib.as_transformer(student_of(target, None, copy=2))
  with pytest.raises(ValueError, match='of 268 tokens'):
    student_lib.as_transformer(student_of(target, None))
