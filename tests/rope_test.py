"""Rotary frequencies under every kind of scaling, by hand."""

import math

import numpy as np
import pytest

from cactus_jax.models import rope


def test_plain():
  np.testing.assert_allclose(rope.frequencies(8, 10000.0), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear():
  expected = [1 / 4, 1 / 40, 1 / 400, 1 / 4000]
  np.testing.assert_allclose(rope.frequencies(8, 10000.0, rope.Linear(4.0)), expected, rtol=1e-6)


def test_llama3():
  """Of 8, 4, 2, 1 and 1/2 turns in the original context, with bounds 1 and 4 and a factor of 8."""
  frequencies = np.array([8.0, 4.0, 2.0, 1.0, 0.5]) * 2 * np.pi / 64
  scaled = rope.Llama3(8.0, 1.0, 4.0, 64).stretch(frequencies, 1.0)
  np.testing.assert_allclose(scaled / frequencies, [1, 1, 1 / 3 + 2 / 3 / 8, 1 / 8, 1 / 8], rtol=1e-5)


def test_llama3_refuses_bounds_in_the_wrong_order():
  with pytest.raises(ValueError, match='low_freq_factor must be below high_freq_factor'):
    rope.Llama3(8.0, 4.0, 4.0, 64)


def yarn_by_hand(theta, scaling):
  """The paper's ramp over the numbers of frequencies, one at a time, for heads of 16."""
  number = lambda turns: 8 * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns), theta)
  low, high = number(scaling.beta_fast), number(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  kept = [1.0 if i <= low else 0.0 if i >= high else (high - i) / (high - low) for i in range(8)]
  return kept, [theta ** (-i / 8) * (kept[i] + (1 - kept[i]) / scaling.factor) for i in range(8)]


@pytest.mark.parametrize('theta, scaling, kept', [
    # 5.1 turns of the first frequency, 0.68 of the last; bounds at numbers 1.84 and 5.66.
    (10.0, rope.Yarn(4.0, 32, beta_fast=3.0), [1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
    (10.0, rope.Yarn(4.0, 32, beta_fast=3.0, truncate=False),
     [1, 1, (5.657 - 2) / 3.817, (5.657 - 3) / 3.817, (5.657 - 4) / 3.817, (5.657 - 5) / 3.817, 0, 0]),
    (1000.0, rope.Yarn(4.0, 512), [1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),  # bounds 32 and 1 at 1.08 and 5.10
])
def test_yarn(theta, scaling, kept):
  by_hand, expected = yarn_by_hand(theta, scaling)
  np.testing.assert_allclose(by_hand, kept, atol=1e-3)
  np.testing.assert_allclose(rope.frequencies(16, theta, scaling), expected, rtol=1e-6)


def test_yarn_with_equal_bounds_has_a_step():
  """All of 2 turns in the original context: at number 4 of base 16 and 16 pi tokens."""
  scaling = rope.Yarn(4.0, 16 * math.pi, beta_fast=2.0, beta_slow=2.0, truncate=False)
  ratio = rope.frequencies(16, 16.0, scaling) / rope.frequencies(16, 16.0)
  np.testing.assert_allclose(ratio, [1] * 5 + [0.25] * 3, rtol=1e-5)


@pytest.mark.parametrize('given, expected', [
    ({}, 1 + 0.1 * math.log(4)),
    ({'factor': 0.5}, 1.0),
    ({'attention_factor': 0.7, 'mscale': 2.0, 'mscale_all_dim': 1.0}, 0.7),
    ({'mscale': 2.0, 'mscale_all_dim': 0.5}, (1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4))),
    ({'mscale': 2.0}, 1 + 0.1 * math.log(4)),
    ({'mscale_all_dim': 2.0}, 1 + 0.1 * math.log(4)),
])
def test_attention_factor_of_yarn(given, expected):
  scaling = rope.Yarn(**{'factor': 4.0, 'original_max_position_embeddings': 32} | given)
  assert scaling.attention_factor == pytest.approx(expected)


def test_yarn_refuses_bounds_in_the_wrong_order():
  with pytest.raises(ValueError, match='beta_slow must not be above beta_fast'):
    rope.Yarn(4.0, 32, beta_fast=1.0, beta_slow=2.0)


@pytest.mark.parametrize('theta, given', [
    (10.0, {'beta_fast': 3.0}), (10.0, {'beta_fast': 3.0, 'truncate': False}), (1000.0, {}),
    (1e4, {'mscale': 0.7, 'mscale_all_dim': 1.0, 'original_max_position_embeddings': 4096}), (10.0, {'factor': 1.0}),
    (10.0, {'original_max_position_embeddings': 2}),  # fewer tokens than a turn: transformers keeps all frequencies
    (2.0, {'original_max_position_embeddings': 10**6}),  # all turn often: it divides all
])
def test_yarn_of_transformers(theta, given):
  """Degenerate bounds included, for a checkpoint was judged with what they give there."""
  pytest.importorskip('torch')
  from transformers import LlamaConfig, modeling_rope_utils

  given = {'factor': 4.0, 'original_max_position_embeddings': 512} | given
  config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=given | {
      'rope_type': 'yarn', 'rope_theta': theta})
  expected, attention_factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS['yarn'](config)
  scaling = rope.Yarn(**given)
  np.testing.assert_allclose(rope.frequencies(16, theta, scaling), expected, rtol=2e-6)
  assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-6)
