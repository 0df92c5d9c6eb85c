"""The forward pass as a language model: caching, positions, causality, capacity, early exit."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax.models import int8, layers, rope, transformer, weights
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.int8 import Int8
from cactus_jax.models.transformer import Transformer

CONFIG = ModelConfig(
    family='llama', vocab_size=50, embed_dim=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8,
    mlp_dim=48, max_length=64, norm_eps=1e-5, rope_theta=1000.0, tie_embeddings=True)
SWITCHED = dataclasses.replace(
    CONFIG, rope_scaling=rope.Llama3(4.0, 1.0, 3.0, 16.0), local_rope_theta=50.0, qkv_bias=True, qk_norm=True,
    norm_offset=1.0, post_norms=True, activation='gelu_tanh', embed_scale=5.0, query_scale=0.5, attn_softcap=2.0,
    logit_softcap=3.0, windows=(3, None))
LENGTH = 24
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (3, LENGTH)))
ATOL = 2e-5  # of float32 sums in another order, on logits of a few units


@pytest.fixture(scope='module')
def model():
  return random_model(CONFIG)


def random_model(config):
  return Transformer(transformer.random_params(jax.random.key(0), config), config)


VARIANTS = {
    'llama': lambda: random_model(CONFIG),
    'switched': lambda: random_model(SWITCHED),
    'int8': lambda: weights.to_int8(random_model(SWITCHED)),
    'int8_cache': lambda: random_model(SWITCHED).replace(kv_dtype='int8'),
}


@pytest.fixture(scope='module', params=VARIANTS)
def either(request):
  """A Llama, a model with every switch turned, and that one in 8 bits."""
  return VARIANTS[request.param]()


def positions_from(starts, num):
  return jnp.asarray(starts)[:, None] + jnp.arange(num)[None]


call = jax.jit(lambda model, tokens_BT, positions_BT, cache: model(tokens_BT, positions_BT, cache))


def uncached(model, tokens_BT):
  """Logits of whole rows in one call."""
  B, T = tokens_BT.shape
  return call(model, tokens_BT, positions_from([0] * B, T), model.init_cache(B, T))[0]


def assert_close(actual, expected, model=None):
  """Of a model in 8 bits a sum in another order may tip a rounding, by a 32,258th of the largest activation."""
  in_8_bits = model is not None and (model.kv_dtype or isinstance(model.params.head, Int8))
  np.testing.assert_allclose(actual, expected, atol=(50 if in_8_bits else 1) * ATOL, rtol=0)


def test_logits_are_worth_comparing(either):
  logits = uncached(either, TOKENS)
  assert logits.shape == (3, LENGTH, 50) and logits.dtype == jnp.float32
  assert float(jnp.std(logits)) > 0.5
  assert np.unique(np.argmax(logits, axis=-1)).size > 10


def test_untied_head(model):
  head = 2 * model.params.embed
  untied = Transformer(model.params.replace(head=head), dataclasses.replace(CONFIG, tie_embeddings=False))
  assert_close(uncached(untied, TOKENS), 2 * uncached(model, TOKENS))


FEW = pytest.mark.parametrize('shape', [(1, 2), (1, 3), (1, 5), (2, 4), (3, 3), (1, 16), (1, 17)])


@FEW
@pytest.mark.parametrize('vocab', [33, 36])
def test_logits_of_a_few_tokens(shape, vocab):
  """However many there are (up to a number of them, on a CPU, the matrix stands on the left, in parts if it can)."""
  random = np.random.default_rng(0)
  x_BTD, head_VD = random.normal(size=(*shape, 16)), random.normal(size=(vocab, 16))
  found = layers.logits(jnp.asarray(x_BTD, jnp.float32), jnp.asarray(head_VD, jnp.float32))
  np.testing.assert_allclose(found, x_BTD @ head_VD.T, atol=1e-5)
  half = layers.logits(jnp.asarray(x_BTD, jnp.bfloat16), jnp.asarray(head_VD, jnp.bfloat16))
  assert half.dtype == jnp.float32
  np.testing.assert_allclose(half, x_BTD @ head_VD.T, atol=0.2)


@FEW
def test_products_of_a_few_tokens(shape):
  random = np.random.default_rng(0)
  x_BTD, weight_DF = random.normal(size=(*shape, 16)), random.normal(size=(16, 24))
  found = layers.matmul(jnp.asarray(x_BTD, jnp.float32), jnp.asarray(weight_DF, jnp.float32))
  np.testing.assert_allclose(found, x_BTD @ weight_DF, atol=1e-5)


@pytest.mark.parametrize('steps', [[10] + [1] * 14, [1] * 24, [7, 4, 1, 5, 7]])
def test_cached_equals_uncached(either, steps):
  cache, done, parts = either.init_cache(3, LENGTH + 5), 0, []
  for num in steps:
    tokens = TOKENS[:, done : done + num]
    logits, cache = call(either, tokens, positions_from([done] * 3, num), cache)
    parts.append(logits)
    done += num
  assert_close(jnp.concatenate(parts, axis=1), uncached(either, TOKENS), either)


def test_rows_at_different_positions(either):
  """Rows of lengths 5, 9 and 14, prefilled with garbage behind them, then stepped by 4 tokens each."""
  lengths, num = np.array([5, 9, 14]), 4
  prompt = jnp.where(jnp.arange(14)[None] < lengths[:, None], TOKENS[:, :14], 49)
  _, cache = call(either, prompt, positions_from([0] * 3, 14), either.init_cache(3, LENGTH))
  expected = uncached(either, TOKENS)
  for _ in range(2):
    rows = np.arange(3)[:, None]
    where = positions_from(lengths, num)
    logits, cache = call(either, TOKENS[rows, where], where, cache)
    assert_close(logits, expected[rows, where], either)
    lengths = lengths + num


def test_rollback(either):
  """A rejected draft of other tokens leaves no trace once its slots are written again."""
  expected = uncached(either, TOKENS)
  _, cache = call(either, TOKENS[:, :10], positions_from([0] * 3, 10), either.init_cache(3, LENGTH))
  _, cache = call(either, (TOKENS[:, 10:16] + 1) % 50, positions_from([10] * 3, 6), cache)
  logits, cache = call(either, TOKENS[:, 10:13], positions_from([10] * 3, 3), cache)
  assert_close(logits, expected[:, 10:13], either)
  logits, _ = call(either, TOKENS[:, 13:14], positions_from([13] * 3, 1), cache)
  assert_close(logits, expected[:, 13:14], either)


def test_padding_and_capacity_change_nothing(either):
  expected = uncached(either, TOKENS[:, :8])
  padded = jnp.pad(TOKENS[:, :8], ((0, 0), (0, 9)), constant_values=7)
  logits, _ = call(either, padded, positions_from([0] * 3, 17), either.init_cache(3, 40))
  assert_close(logits[:, :8], expected, either)


def test_a_row_does_not_depend_on_its_batch(either):
  assert_close(uncached(either, TOKENS[1:2]), uncached(either, TOKENS)[1:2], either)


def test_causal(model):
  """No gradient flows from logits at t to a later embedding, and some flows from the one at t."""
  t = 5

  def score(params, tokens):
    logits, _ = transformer.forward(
        params, CONFIG, tokens, positions_from([0], LENGTH), model.init_cache(1, LENGTH))
    return jnp.sum(logits[:, t] ** 2)

  distinct = jnp.arange(LENGTH)[None]  # token i at position i, so that rows of the gradient are positions
  untied = model.params.replace(head=model.params.embed)
  gradient = jnp.abs(jax.jit(jax.grad(score))(untied, distinct).embed).max(axis=1)
  assert float(gradient[: t + 1].min()) > 1e-4
  np.testing.assert_array_equal(gradient[t + 1 : LENGTH], 0)


def test_only_relative_positions_matter():
  """Rotary embeddings (RoFormer, section 3.2): a query and a key see the distance of their positions."""
  query, key = jax.random.normal(jax.random.key(1), (2, 8))
  places = jnp.array([[4, 21, 9, 26]])  # 17 apart twice
  angles = layers.rope_angles(places, rope.frequencies(8, 1000.0))
  turn = lambda x: layers.rope(jnp.tile(x, (1, 4, 1, 1, 1)), *angles)[0, :, 0, 0]
  scores = turn(query) @ turn(key).T
  assert_close(scores[0, 1], scores[2, 3])
  assert abs(float(scores[0, 1] - scores[0, 2])) > 1e-2


def test_writes_beyond_the_end_are_dropped(either):
  expected = uncached(either, TOKENS[:, :12])
  _, cache = call(either, TOKENS[:, :10], positions_from([0] * 3, 10), either.init_cache(3, 12))
  _, full = call(either, TOKENS[:, 10:16], positions_from([10] * 3, 6), cache)  # four of six have no slot
  for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(full)):
    np.testing.assert_array_equal(after[:, :, :10], before[:, :, :10])
  logits, again = call(either, TOKENS[:, 11:12], positions_from([11] * 3, 1), full)
  assert_close(logits, expected[:, 11:12], either)
  logits, beyond = call(either, TOKENS[:, :3], positions_from([12, 50, 13], 3), again)
  assert jnp.isfinite(logits).all()
  for before, after in zip(jax.tree.leaves(again), jax.tree.leaves(beyond)):
    np.testing.assert_array_equal(after, before)


def test_half_precision(either):
  half = either.replace(
      params=jax.tree.map(lambda x: x if x.dtype == jnp.int8 else x.astype(jnp.bfloat16), either.params))
  logits, cache = call(half, TOKENS, positions_from([0] * 3, LENGTH), half.init_cache(3, LENGTH))
  assert logits.dtype == jnp.float32
  dtypes = {array.dtype.name for array in jax.tree.leaves(cache)}
  assert dtypes == ({'int8', 'float32'} if either.kv_dtype else {'bfloat16'})
  # bfloat16 has 8 bits: errors near 2^-8 of activations of order 1, over two layers.
  np.testing.assert_allclose(logits, uncached(either, TOKENS), atol=0.15, rtol=0)


def test_random_params_match_the_abstract_tree(either):
  specs = transformer.abstract(either.config, 'int8' if isinstance(either.params.head, Int8) else None)
  assert jax.tree.map(lambda array: array.shape, either.params) == jax.tree.map(lambda spec: spec.shape, specs)
  assert all(len(spec.shape) == len(spec.axes) for spec in jax.tree.leaves(specs))


# In 8 bits.


def test_int8_is_close_to_what_was_rounded():
  """Both errors are seen, and are what 8 bits of weights or of cached keys and values make of logits of order 1."""
  exact = uncached(VARIANTS['switched'](), TOKENS)
  for name, least, most in (('int8', 2e-3, 0.05), ('int8_cache', 2e-3, 0.05)):
    error = np.abs(np.asarray(uncached(VARIANTS[name](), TOKENS) - exact))
    assert least < np.sqrt(np.mean(error**2)) < most, name


def test_int8_keeps_embedding_norms_and_biases():
  kept, rounded = random_model(SWITCHED).params, VARIANTS['int8']().params
  for ours, theirs in zip(rounded.layers, kept.layers, strict=True):
    for name in ('attn_norm', 'mlp_norm', 'qkv_bias', 'q_norm', 'k_norm', 'post_attn_norm', 'post_mlp_norm'):
      np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert {type(getattr(ours, name)) for name in ('qkv', 'o', 'gate', 'up', 'down')} == {Int8}
  np.testing.assert_array_equal(rounded.embed, kept.embed)
  np.testing.assert_array_equal(rounded.head.values, int8.quantize(kept.embed, 1).values.T)


def test_int8_model_is_that_of_its_numbers():
  """Weights written out as floats again give the same logits, but for what 15 bits of activations leave out."""
  rounded = VARIANTS['int8']()
  is_int8 = lambda x: isinstance(x, Int8)
  written = jax.tree.map(lambda x: int8.dequantize(x, 0) if is_int8(x) else x, rounded.params.layers, is_leaf=is_int8)
  params = rounded.params.replace(layers=written, head=int8.dequantize(rounded.params.head, 0).T)
  assert_close(uncached(rounded, TOKENS), uncached(rounded.replace(params=params), TOKENS), rounded)


def test_early_exit_shares_weights(model):
  draft = model.early_exit(1)
  assert draft.config == dataclasses.replace(CONFIG, num_layers=1)
  mine, all_of = jax.tree.leaves(draft.params), jax.tree.leaves(model.params)
  pointers = {array.unsafe_buffer_pointer() for array in all_of}
  assert {array.unsafe_buffer_pointer() for array in mine} < pointers
  assert len(mine) == len(all_of) - 7


def test_early_exit_is_the_first_layers(model):
  copy = jax.tree.map(jnp.copy, model.params)
  expected = Transformer(copy.replace(layers=copy.layers[:1]), dataclasses.replace(CONFIG, num_layers=1))
  draft = model.early_exit(1)
  np.testing.assert_array_equal(uncached(draft, TOKENS), uncached(expected, TOKENS))
  assert len(draft.init_cache(1, 4).k) == 1
  assert float(jnp.abs(uncached(draft, TOKENS) - uncached(model, TOKENS)).max()) > 0.5


def test_random_norms_multiply_by_one():
  for config in (CONFIG, SWITCHED):
    layer = transformer.random_params(jax.random.key(0), config).layers[1]
    norms = layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, layer.post_attn_norm, layer.post_mlp_norm
    assert all((norm + config.norm_offset == 1).all() for norm in norms if norm is not None)
  assert 0.05 < float(jnp.std(layer.qkv_bias)) < 0.2


def test_early_exit_keeps_the_windows_of_its_layers():
  config = dataclasses.replace(CONFIG, num_layers=4, windows=(3, None, 4, None))
  model = Transformer(transformer.random_params(jax.random.key(0), config), config)
  draft = model.early_exit(3)
  assert draft.config.windows == (3, None, 4)
  wrong = Transformer(draft.params, dataclasses.replace(draft.config, windows=(3, None, None)))
  assert float(jnp.abs(uncached(draft, TOKENS) - uncached(wrong, TOKENS)).max()) > 0.01


@pytest.mark.parametrize('window', [1, 3, 8])
def test_window(model, window):
  """Layers that all have a window of w see w - 1 positions back each, and no gradient flows from further."""
  config = dataclasses.replace(CONFIG, windows=(window, window))
  t = 20

  def score(embed, tokens):
    params = model.params.replace(embed=embed, head=model.params.embed)
    logits, _ = transformer.forward(params, config, tokens, positions_from([0], LENGTH), model.init_cache(1, LENGTH))
    return jnp.sum(logits[:, t] ** 2)

  gradient = jnp.abs(jax.jit(jax.grad(score))(model.params.embed, jnp.arange(LENGTH)[None])).max(axis=1)
  first = t - 2 * (window - 1)
  assert float(gradient[first : t + 1].min()) > 1e-7
  np.testing.assert_array_equal(gradient[:first], 0)
  np.testing.assert_array_equal(gradient[t + 1 : LENGTH], 0)


@pytest.mark.parametrize('windows', [(3,), (3, 0), (3, True), (3, 4.0)])
def test_refuses_windows(windows):
  with pytest.raises(ValueError, match=re.escape(f'windows={windows}: ')):
    dataclasses.replace(CONFIG, windows=windows)


@pytest.mark.parametrize('num_layers', [-1, 0, 2, 3])
def test_early_exit_refuses(model, num_layers):
  text = f'early_exit({num_layers}): the model has 2 layers; a draft needs at least 1 of them'
  with pytest.raises(ValueError, match=re.escape(text)):
    model.early_exit(num_layers)
