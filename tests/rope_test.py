"""Rotary frequencies under every kind of scaling, by hand."""

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
