"""Laws against a reference that sorts, and draws against their law."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import sampling
from cactus_jax.records import per_row
from cactus_jax.sampling import Role, SamplingParams, to_probs
from tests import laws

LARGEST_UNIFORM = np.float32(1 - 2**-24)
law_of, sample = jax.jit(to_probs), jax.jit(sampling.sample)


def laws_of(logits_BV, rows=32, **params):
  """f64[B, V], each row with its own params; padded to so many rows, to compile little."""
  logits_BV = np.asarray(logits_BV)
  B = logits_BV.shape[0]
  pad = lambda x: np.concatenate([x, np.repeat(x[-1:], rows - B, axis=0)])
  params = {name: pad(np.broadcast_to(value, (B,))) for name, value in params.items()}
  law_BTV = law_of(pad(logits_BV)[:, None], per_row(SamplingParams(**params), rows))
  assert law_BTV.dtype == jnp.float32
  return np.asarray(law_BTV[:B, 0], np.float64)


def small_laws_of(logits_BV, **params):
  """The same for a few tokens; the others, up to 100, are masked."""
  logits_BV = np.asarray(logits_BV)
  V = logits_BV.shape[1]
  masked = np.full((logits_BV.shape[0], 100 - V), -np.inf, logits_BV.dtype)
  law = laws_of(np.concatenate([logits_BV, masked], axis=1), **params)
  np.testing.assert_array_equal(np.nan_to_num(law[:, V:]), 0)
  return law[:, :V]


def columns(settings):
  """Dicts of one row each -> a dict of arrays with a value per row."""
  defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
  rows = [defaults | row for row in settings]
  dtype = {'top_k': np.int32}
  return {name: np.array([row[name] for row in rows], dtype.get(name, np.float32)) for name in defaults}


SETTINGS = [
  {},
  {'temperature': 0.3},
  {'temperature': 1.7},
  {'temperature': 0.0},
  {'temperature': 100.0},
  {'top_k': 1},
  {'top_k': 2},
  {'top_k': 5},
  {'top_k': 64},
  {'top_k': 65},
  {'top_k': 100},
  {'top_k': 999},
  {'top_k': 1000},
  {'top_k': 5000},
  {'top_p': 0.01},
  {'top_p': 0.3},
  {'top_p': 0.9},
  {'top_p': 0.99},
  {'top_p': 0.9999},
  {'min_p': 0.02},
  {'min_p': 0.5},
  {'min_p': 1.0},
  {'top_k': 20, 'top_p': 0.95, 'temperature': 0.6},
  {'top_k': 3, 'top_p': 0.5},
  {'top_k': 200, 'top_p': 0.95},
  {'top_k': 64, 'top_p': 0.999},
  {'top_k': 65, 'top_p': 0.1},
  {'top_k': 1, 'top_p': 0.1},
  {'top_k': 5, 'min_p': 0.3},
  {'top_p': 0.8, 'min_p': 0.1},
  {'top_k': 150, 'top_p': 0.9, 'min_p': 0.05},
  {'temperature': 0.0, 'top_k': 3, 'top_p': 0.5, 'min_p': 0.1},
]


def normal_logits(rng, vocab):
  return 2 * rng.normal(size=vocab)


def nearly_flat_logits(rng, vocab):
  return 0.2 * rng.normal(size=vocab)


def tied_logits(rng, vocab):
  return rng.integers(-2, 3, vocab).astype(float)


def masked_logits(rng, vocab):
  return np.where(rng.random(vocab) < 0.5, -np.inf, normal_logits(rng, vocab))


@pytest.mark.parametrize('vocab', [1, 2, 12, 1000])
@pytest.mark.parametrize(
  'make', [normal_logits, nearly_flat_logits, tied_logits, masked_logits], ids=lambda f: f.__name__
)
def test_law_matches_a_sort(make, vocab):
  """Each filter alone and together, a setting for each row; all that tie with the last one kept are kept."""
  rng = np.random.default_rng(vocab)
  logits = np.stack([make(rng, vocab) for _ in SETTINGS]).astype(np.float32)
  logits[:, 0] = np.maximum(logits[:, 0], 0)  # never all masked
  got = laws_of(logits, **columns(SETTINGS))
  for row, setting in enumerate(SETTINGS):
    expected = laws.filtered_law(logits[row], **setting)
    np.testing.assert_array_equal(got[row] > 0, expected > 1e-37, err_msg=str(setting))
    np.testing.assert_allclose(got[row], expected, rtol=1e-4, atol=1e-7, err_msg=str(setting))


def test_top_p_on_a_flat_law():
  """Everything ties, so everything is kept; of unequal tokens, those that reach p."""
  flat = np.zeros((3, 1000), np.float32)
  np.testing.assert_allclose(laws_of(flat, top_p=np.float32([0.001, 0.5, 0.999])), 1e-3, rtol=1e-6)
  steps = np.log(np.arange(1000, 0, -1, dtype=np.float32))[None]
  for p in (0.003, 0.5, 0.98):
    np.testing.assert_array_equal(laws_of(steps, top_p=p) > 0, laws.filtered_law(steps[0], top_p=p)[None] > 0)


def test_top_p_keeps_the_token_that_reaches_p_and_no_more():
  law = np.float32([[0.5, 0.25, 0.125, 0.125]])
  kept = lambda p: np.count_nonzero(small_laws_of(np.log(law), top_p=p))
  assert [kept(p) for p in (0.01, 0.49, 0.51, 0.74, 0.76)] == [1, 1, 2, 2, 4]  # the last two tie


def test_ties_at_the_edge_of_top_k_are_kept_and_count_for_top_p():
  """[1, .5, .5, .5] with k = 2 leaves all four; 0.6 of their mass then takes the .5s too."""
  logits = np.log(np.float32([[1, 0.5, 0.5, 0.5, 1e-3]]))
  np.testing.assert_allclose(small_laws_of(logits, top_k=2)[0], [0.4, 0.2, 0.2, 0.2, 0], rtol=1e-6)
  np.testing.assert_allclose(small_laws_of(logits, top_k=2, top_p=0.6)[0], [0.4, 0.2, 0.2, 0.2, 0], rtol=1e-6)


def test_top_p_of_1_keeps_the_rarest():
  logits = np.log(np.float32([[1, 1e-9, 1e-20]]))
  assert np.all(small_laws_of(logits) > 0)
  assert np.all(small_laws_of(logits, top_k=3) > 0)


def test_min_p_is_a_share_of_the_top_probability():
  law = np.float32([[0.6, 0.3, 0.07, 0.03]])
  np.testing.assert_allclose(
    small_laws_of(np.log(law), min_p=0.11)[0], [0.6 / 0.97, 0.3 / 0.97, 0.07 / 0.97, 0], rtol=1e-5
  )


@pytest.mark.parametrize('temperature', [0.0, 1e-9, 1e-5])
def test_small_temperatures_are_all_argmax(temperature):
  """One-hot on the first of the largest, whatever the filters and however large the logits."""
  logits = np.float32([[1, 3, 3, 2], [-1e30, 1e30, 3, 1e30], [0, 0, 0, 0], [-np.inf, -5, -np.inf, -6]])
  for filters in ({}, {'top_k': 2, 'top_p': 0.3, 'min_p': 0.9}):
    np.testing.assert_array_equal(
      small_laws_of(logits, temperature=temperature, **filters), np.eye(4)[[1, 1, 0, 1]]
    )


def test_just_above_greedy_is_a_law():
  logits = np.float32([[1, 3, 3, 2], [-1e30, 1e30, 3, 1e30]])
  np.testing.assert_allclose(
    small_laws_of(logits, temperature=1.1e-5), [[0, 0.5, 0.5, 0], [0, 0.5, 0, 0.5]], atol=1e-6
  )


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('filters', [{}, {'top_k': 2}, {'top_k': 80, 'top_p': 0.9}, {'min_p': 0.5}], ids=str)
def test_logits_that_are_no_law_give_nan_throughout_and_only_there(temperature, filters):
  good = np.linspace(-3, 3, 100)
  one_nan, one_inf = good.copy(), good.copy()
  one_nan[7], one_inf[7] = np.nan, np.inf
  logits = np.float32([good, one_nan, one_inf, np.full(100, -np.inf), np.full(100, np.nan), good])
  law = laws_of(logits, temperature=temperature, **filters)
  assert np.all(np.isnan(law[1:5]))
  np.testing.assert_allclose(law[[0, 5]].sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('batch', [1, 6])
def test_one_nan_in_a_whole_vocabulary_is_seen(temperature, batch):
  """XLA's maximum over a long axis passes over NaN on a CPU, so a law must not rely on it."""
  logits = np.random.default_rng(0).normal(size=(batch, 2, 49_152)).astype(np.float32)
  logits[0, 1, 12_345] = np.nan
  law = np.array(law_of(logits, per_row(SamplingParams(temperature=temperature), batch)))
  assert np.all(np.isnan(law[0, 1]))
  law[0, 1] = 0
  assert np.all(np.isfinite(law))
  masked = jax.jit(lambda x, params: to_probs(jnp.where(x > 100, x, jnp.nan), params))  # fused with what made the NaN
  assert np.all(np.isnan(masked(logits, per_row(SamplingParams(temperature=temperature), batch))))


@pytest.mark.parametrize('filters', [{'top_k': 80}, {}], ids=str)
def test_the_smallest_top_p_keeps_the_peak(filters):
  law = laws_of(np.stack([np.linspace(0, 5, 100), np.zeros(100)]), top_p=1e-40, **filters)
  np.testing.assert_allclose(law, [np.eye(100)[99], np.full(100, 0.01)], atol=1e-6)


def test_rows_do_not_depend_on_their_mates():
  """Bit-equal in any order and beside rows that need the search; alone, up to the order of a sum."""
  rng = np.random.default_rng(0)
  logits = (2 * rng.normal(size=(len(SETTINGS), 1000))).astype(np.float32)
  params = columns(SETTINGS)
  together = laws_of(logits, **params)
  order = rng.permutation(len(SETTINGS))
  np.testing.assert_array_equal(
    laws_of(logits[order], **{k: v[order] for k, v in params.items()}), together[order]
  )
  for row, setting in enumerate(SETTINGS):
    own = dict(logits_BV=logits[row : row + 1], **{k: v[row : row + 1] for k, v in params.items()})
    np.testing.assert_array_equal(laws_of(**own)[0], together[row], err_msg=str(setting))
    alone = laws_of(rows=1, **own)[0]
    np.testing.assert_array_equal(alone > 0, together[row] > 0, err_msg=str(setting))
    np.testing.assert_allclose(alone, together[row], rtol=1e-6, err_msg=str(setting))


def test_positions_share_the_params_of_their_row():
  logits_BTV = np.random.default_rng(0).normal(size=(3, 4, 100)).astype(np.float32)
  params = dict(temperature=np.float32([0.5, 0, 1]), top_k=np.int32([0, 3, 2]))
  got = law_of(logits_BTV, per_row(SamplingParams(**params), 3))
  for t in range(4):
    np.testing.assert_allclose(got[:, t], laws_of(logits_BTV[:, t], **params), rtol=1e-6)


def test_low_precision_logits_make_full_precision_laws():
  """bfloat16 logits are widened first: the law is that of the rounded logits, and sums to 1."""
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 49_152)) * 3, jnp.bfloat16)
  law = laws_of(logits, rows=3, temperature=0.7)
  np.testing.assert_allclose(law, laws.softmax(np.asarray(logits, np.float64) / np.float32(0.7)), rtol=1e-4)
  np.testing.assert_allclose(law.sum(axis=-1), 1, atol=1e-6)


def test_laws_over_a_whole_vocabulary_sum_to_1():
  logits = np.random.default_rng(1).normal(size=(3, 49_152)).astype(np.float32)
  law = laws_of(logits, rows=3, top_p=np.float32([1, 0.9, 1]), top_k=np.int32([0, 0, 1000]))
  np.testing.assert_allclose(law.sum(axis=-1), 1, atol=1e-6)
  assert np.count_nonzero(law[2]) == 1000


def test_shift_of_logits_changes_nothing():
  logits = np.round(np.random.default_rng(0).normal(size=(1, 100)) * 4).astype(np.float32)
  np.testing.assert_array_equal(laws_of(logits, top_p=0.9), laws_of(logits + 1024, top_p=0.9))


# Draws.

VOCABS = (1, 2, 3, 255, 256, 257, 5000)


@functools.partial(jax.jit, static_argnames='piece')
def draw(probs_V, uniform_N, piece=256):
  """i32[N]: the token of each uniform."""

  def draw_piece(uniform_P):
    return sampling.sample(jnp.broadcast_to(probs_V, (piece, probs_V.shape[0])), uniform_P)

  return jax.lax.map(draw_piece, uniform_N.reshape(-1, piece)).reshape(-1)


@functools.cache
def many_uniforms():
  return np.asarray(
    jax.jit(lambda key: sampling.uniforms(key[None], Role.EMIT, 16_384)[0])(jax.random.key(0))
  )


def sparse_law(rng, vocab):
  """A law with zeros among its tokens, at both ends where it can."""
  law = rng.dirichlet(np.full(vocab, 0.5)) + 1e-6
  law[rng.random(vocab) < 0.3] = 0
  if vocab > 2:
    law[[0, -1]], law[vocab // 2] = 0, 1.0 / vocab
  law += law.sum() == 0
  return (law / law.sum()).astype(np.float32)


@pytest.mark.parametrize('vocab', VOCABS)
def test_draws_follow_the_law(vocab):
  """Over a grid of uniforms each token comes as often as its law says, within 2 points; zeros never."""
  points = 4096
  law = sparse_law(np.random.default_rng(vocab), vocab)
  tokens = np.asarray(draw(law, (np.arange(points, dtype=np.float32) + 0.5) / points))
  counts = np.bincount(tokens, minlength=vocab)
  assert counts.shape == (vocab,)
  assert np.abs(counts - law * points).max() <= 2
  assert np.all(counts[law == 0] == 0)
  assert np.all(np.diff(tokens) >= 0)  # inversion: in the order of the vocabulary


@pytest.mark.parametrize('vocab', [7, 5000])
def test_random_draws_follow_the_law(vocab):
  """Chi-square of 16,384 draws with the uniforms that decoding uses; |z| < 5."""
  law = sparse_law(np.random.default_rng(vocab), vocab)
  tokens = draw(law, many_uniforms())
  assert abs(laws.chi_square_z(np.bincount(tokens, minlength=vocab), law)) < 5


@pytest.mark.parametrize('vocab', VOCABS)
def test_extreme_uniforms_never_draw_the_impossible(vocab):
  """u = 0 and the largest below 1, on laws with zeros at the ends, of one token, and with sums just off 1."""
  rng = np.random.default_rng(0)
  rows = [sparse_law(rng, vocab) for _ in range(30)]
  rows += [np.eye(vocab, dtype=np.float32)[i] for i in (0, vocab // 2, vocab - 1)]
  rows += [law * np.float32(scale) for law in rows for scale in (1 - 1e-6, 1 + 1e-6)]
  tiny = np.full(vocab, 1e-30, np.float32)
  tiny[vocab // 2] = 1
  rows.append(tiny)
  law = np.stack(rows)
  for uniform in (np.float32(0), np.float32(2**-24), LARGEST_UNIFORM):
    token = np.asarray(sample(law, np.full(len(law), uniform, np.float32)))
    assert np.all((token >= 0) & (token < vocab))
    assert np.all(law[np.arange(len(law)), token] > 0)
  first = np.asarray(sample(law, np.zeros(len(law), np.float32)))
  np.testing.assert_array_equal(first, np.argmax(law > 0, axis=-1))


def test_a_law_of_nan_draws_some_token_of_the_vocabulary():
  token = np.asarray(sample(np.full((2, 300), np.nan, np.float32), np.float32([0.0, 0.5])))
  assert np.all((token >= 0) & (token < 300))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=str)
def test_flat_law_draws_the_whole_vocabulary(dtype):
  """Mean id of 8,192 draws from 32,768 tokens: (V - 1) / 2 within 3 standard errors of 104.5."""
  V, draws = 32_768, 8192
  law = law_of(jnp.zeros((1, 1, V), dtype), per_row(SamplingParams(), 1))[0, 0]
  tokens = np.asarray(draw(law, many_uniforms()[:draws], piece=32))
  error = V / np.sqrt(12 * draws)
  assert abs(tokens.mean() - (V - 1) / 2) < 3 * error
  assert len(np.unique(tokens)) > 0.85 * V * (1 - np.exp(-draws / V))


@pytest.mark.parametrize('place', [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_rare_tokens_are_drawn_as_often_as_they_should(place):
  """A token of probability 1e-6 has 16.8 of the 2^24 uniforms, at either end or inside."""
  law = np.full(3, (1 - 1e-6) / 2, np.float32)
  law[place] = 1e-6
  assert abs(int(count_draws(law, place)) - 2**24 * 1e-6) <= 2


@jax.jit
def count_draws(law, token):
  def count_piece(start):
    uniform = (start * 2**18 + jnp.arange(2**18)).astype(jnp.float32) * 2.0**-24
    return jnp.sum(sampling.sample(jnp.broadcast_to(law, (2**18, 3)), uniform) == token)

  return jnp.sum(jax.lax.map(count_piece, jnp.arange(64)))


# Keys.

ROWS, SLOTS = 2000, 4


@jax.jit
def round_uniforms(keys, rounds, role):
  return sampling.uniforms(sampling.round_keys(keys, rounds), role, SLOTS)


def stream(seed=1, number=0, role=Role.ACCEPT):
  keys = jax.random.split(jax.random.key(seed), ROWS)
  return np.asarray(round_uniforms(keys, np.full(ROWS, number), np.int32(role)))


def test_uniforms_are_float32_in_the_unit_interval():
  drawn = stream()
  assert drawn.dtype == np.float32 and drawn.shape == (ROWS, SLOTS)
  assert np.all((drawn >= 0) & (drawn < 1))
  assert abs(drawn.mean() - 0.5) < 5 / np.sqrt(12 * drawn.size)


def test_every_role_slot_round_and_row_has_its_own_uniform():
  """All different, and uncorrelated between any two streams: |z| < 5 with 2,000 rows."""
  streams = np.concatenate([stream(number=number, role=role) for number in range(2) for role in Role], axis=1)
  assert streams.shape == (ROWS, 6 * SLOTS)
  assert all(len(np.unique(row)) == 6 * SLOTS for row in streams)
  assert len(np.unique(streams)) > streams.size * 0.99
  correlation = np.corrcoef(streams.T) - np.eye(6 * SLOTS)
  assert np.abs(correlation).max() * np.sqrt(ROWS) < 5


def test_uniforms_of_a_batch_are_those_of_each_row():
  """By the definition: the row's key, then its round, the role and the slot."""
  keys, rounds = jax.random.split(jax.random.key(2), ROWS), np.arange(ROWS) % 7
  together = round_uniforms(keys, rounds, np.int32(Role.DRAFT))
  order = np.random.default_rng(0).permutation(ROWS)
  np.testing.assert_array_equal(
    round_uniforms(keys[order], rounds[order], np.int32(Role.DRAFT)), together[order]
  )
  fold = jax.random.fold_in
  for row in range(3):
    for slot in range(SLOTS):
      key = fold(fold(fold(keys[row], rounds[row]), Role.DRAFT), slot)
      assert jax.random.uniform(key) == together[row, slot]


# Values that make no sense.


@pytest.mark.parametrize(
  'field, value, need',
  [
    ('temperature', -0.1, r'temperature=-0.1: need a finite number >= 0 \(0 is greedy\)'),
    ('temperature', float('nan'), 'temperature=nan: need a finite number'),
    ('temperature', float('inf'), 'temperature=inf: need a finite number'),
    ('temperature', np.array([1.0, -1.0]), r'temperature=\[ 1. -1.\]: need'),
    ('temperature', jnp.asarray(-1.0), 'temperature=-1.0: need'),
    ('temperature', '1', "temperature='1': need"),
    ('temperature', True, 'temperature=True: need'),
    ('top_k', -1, r'top_k=-1: need a whole number >= 0 \(0 keeps all'),
    ('top_k', 2.5, 'top_k=2.5: need a whole number'),
    ('top_k', float('nan'), 'top_k=nan: need a whole number'),
    ('top_p', 0, r'top_p=0: need a number in \(0, 1\] \(1 keeps all tokens\)'),
    ('top_p', 1.5, r'top_p=1.5: need a number in \(0, 1\]'),
    ('top_p', float('nan'), r'top_p=nan: need a number in \(0, 1\]'),
    ('min_p', 1.1, r'min_p=1.1: need a number in \[0, 1\] \(0 keeps all tokens\)'),
    ('min_p', -0.1, r'min_p=-0.1: need a number in \[0, 1\]'),
  ],
  ids=lambda x: str(x)[:12],
)
def test_values_out_of_range_are_refused(field, value, need):
  with pytest.raises(ValueError, match=need):
    SamplingParams(**{field: value})


@pytest.mark.parametrize(
  'value', [np.ones(3, np.float32), np.ones((4, 1), np.float32), jnp.ones(5)], ids=np.shape
)
def test_values_for_another_number_of_rows_are_refused(value):
  with pytest.raises(
    ValueError, match=r'SamplingParams holds a value of shape \(.*\): need one number, or one for each of'
  ):
    per_row(SamplingParams(temperature=value), 4)


@pytest.mark.parametrize(
  'values',
  [
    dict(temperature=1, top_p=1, min_p=0),
    dict(min_p=1),
    dict(top_k=2.0),
    dict(top_k=np.int64(2), temperature=np.float64(1)),
  ],
  ids=str,
)
def test_whole_numbers_mean_what_their_floats_mean(values):
  """1 and 1.0, 2 and 2.0: the same law, and leaves of the same types, so the same program."""
  logits = np.random.default_rng(0).normal(size=(1, 100)).astype(np.float32)
  usual = {k: int(v) if k == 'top_k' else float(v) for k, v in values.items()}
  ours, theirs = (per_row(SamplingParams(**v), 1) for v in (values, usual))
  for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert one.shape == other.shape == (1,) and one.dtype == other.dtype
    assert not one.weak_type and not other.weak_type
  np.testing.assert_array_equal(laws_of(logits, **values), laws_of(logits, **usual))


@pytest.mark.parametrize('make', [list, tuple, np.array, jnp.asarray], ids=lambda f: f.__name__)
def test_one_value_a_row_may_be_any_sequence(make):
  params = per_row(SamplingParams(temperature=make([0.0, 1.0, 0.7])), 3)
  np.testing.assert_allclose(params.temperature, [0, 1, 0.7])


def test_params_survive_jit():
  logits = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
  by_jit = jax.jit(lambda logits, params: to_probs(logits[:, None], per_row(params, 2)))
  for params in (SamplingParams(), SamplingParams(temperature=0.5, top_k=3)):
    np.testing.assert_allclose(by_jit(logits, params)[:, 0], laws_of(logits, **vars(params)), rtol=1e-6)


@pytest.mark.parametrize('filters', list(itertools.product([0, 3, 100], [1.0, 0.6])), ids=str)
def test_what_is_kept_grows_with_each_filter(filters):
  """Filters only remove: every law is a renormalised part of the unfiltered one."""
  logits = np.random.default_rng(5).normal(size=(1, 1000)).astype(np.float32)
  whole, part = laws_of(logits)[0], laws_of(logits, top_k=filters[0], top_p=filters[1])[0]
  kept = part > 0
  np.testing.assert_allclose(part[kept], whole[kept] / whole[kept].sum(), rtol=1e-5)
  assert whole[kept].min() >= whole[~kept].max(initial=0)


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='about the program that XLA makes for a CPU')
@pytest.mark.parametrize('batch', [1, 8])
def test_the_vocabulary_is_never_sorted(batch):
  """A sort costs more than all the rest; XLA makes one of a top_k whose result it can simplify into later slices."""
  args = jnp.zeros((batch, 5, 49_152)), per_row(SamplingParams(temperature=0.6, top_k=20, top_p=0.95), batch)
  program = law_of.lower(*args).compile().as_text()
  assert 'custom_call_target="TopK"' in program
  assert ' sort(' not in program
