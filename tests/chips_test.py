"""The arithmetic of what programs would take: rooflines, and what speculation gains."""

import dataclasses
import re

import numpy as np
import pytest
from lib import chips, hlo

CHIP = chips.Chip(flops=100e12, hbm_bytes=16e9, hbm_bandwidth=1e12, ici_bandwidth=200e9, slices=('1x1',), source='')
RATES = [0.0, 0.1, 0.5, 0.8, 0.95, 1.0]


def cost(hbm_bytes=0.0, *collectives):
  return hlo.Cost(hbm_bytes, 0.0, collectives)


# Rooflines.


def test_a_pass_takes_the_longer_of_reading_and_computing():
  slow_to_read = chips.seconds(cost(2e9), flops=1e11, chip=CHIP, devices=1)
  assert slow_to_read == chips.Seconds(hbm=2e-3, compute=1e-3, collectives=0.0)
  assert slow_to_read.total == 2e-3
  assert chips.seconds(cost(2e9), flops=5e11, chip=CHIP, devices=1).total == 5e-3


def test_collectives_are_added():
  found = chips.seconds(cost(1e9, ('all-reduce', 4.0, 8e6)), 0.0, CHIP, devices=8, latency=5e-6)
  # Each chip sends 2 * 7/8 of the result, over half of what its links carry both ways together.
  assert found.collectives == pytest.approx(4 * 5e-6 + 8e6 * 2 * 7 / 8 / 100e9)
  assert found.total == pytest.approx(1e-3 + found.collectives)


@pytest.mark.parametrize('kind, share', [
    ('all-reduce', 2 * 3 / 4), ('all-gather', 3 / 4), ('all-to-all', 3 / 4), ('reduce-scatter', 3.0),
    ('collective-permute', 1.0)])
def test_bytes_that_a_chip_sends(kind, share):
  """Of each byte of the result, on rings of 4 chips; a reduce-scatter's result is a quarter of what it reduces."""
  found = chips.seconds(cost(0.0, (kind, 1.0, 1e6)), 0.0, CHIP, devices=4, latency=0.0)
  assert found.collectives == pytest.approx(share * 1e6 / 100e9)


def test_a_reduce_scatter_and_an_all_gather_send_what_an_all_reduce_does():
  send = lambda *collectives: chips.seconds(cost(0.0, *collectives), 0.0, CHIP, devices=8, latency=0.0).collectives
  assert send(('reduce-scatter', 1.0, 1e6), ('all-gather', 1.0, 8e6)) == pytest.approx(send(('all-reduce', 1.0, 8e6)))


def test_one_chip_sends_nothing():
  kinds = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all')
  for kind in kinds:
    assert chips.seconds(cost(0.0, (kind, 1.0, 1e6)), 0.0, CHIP, devices=1, latency=0.0).total == 0, kind


def test_published_figures_are_plausible():
  for name, chip in chips.CHIPS.items():
    assert chip.source.startswith('cloud.google.com/tpu/docs/'), name
    # All of these compute a few hundred operations in the time that reading a byte takes.
    assert 100 < chip.flops / chip.hbm_bandwidth < 600, name
    assert 10e9 < chip.hbm_bytes < 200e9 and 1e11 < chip.ici_bandwidth < chip.hbm_bandwidth, name
    sizes = [chips.chips_of(s) for s in chip.slices]
    assert sizes == sorted(set(sizes)), 'growing'
    assert all(re.fullmatch(r'\d+x\d+(x\d+)?', s) for s in chip.slices)
    assert dataclasses.is_dataclass(chip)


def test_chips_of_a_slice():
  assert [chips.chips_of(s) for s in ('1x1', '2x4', '16x16', '2x2x1', '4x4x8')] == [1, 8, 256, 4, 128]


# Speculation.


@pytest.mark.parametrize('rate', RATES)
@pytest.mark.parametrize('num_draft', [1, 4, 10])
def test_tokens_of_a_round_have_a_closed_form(rate, num_draft):
  expected = num_draft + 1 if rate == 1 else (1 - rate ** (num_draft + 1)) / (1 - rate)
  assert chips.tokens_per_round(rate, num_draft) == pytest.approx(expected)


@pytest.mark.parametrize('rate', RATES)
def test_tokens_of_a_round_are_those_of_a_simulation(rate):
  kept = np.random.default_rng(0).random((200_000, 6)) < rate
  tokens = 1 + np.cumprod(kept, axis=1).sum(axis=1)
  error = 5 * tokens.std() / np.sqrt(tokens.size) + 1e-12
  assert abs(tokens.mean() - chips.tokens_per_round(rate, 6)) <= error


def test_no_draft_gives_a_token_a_round():
  assert chips.tokens_per_round(0.8, 0) == 1


def test_speedup_by_hand():
  # Half of 3 drafted tokens: 1 + 1/2 + 1/4 + 1/8 tokens, in 2 + 3 * 0.5 instead of 2 each.
  assert chips.speedup(0.5, 3, plain=2.0, verify=2.0, draft=0.5) == pytest.approx(1.875 * 2 / 3.5)
  assert chips.speedup(1.0, 3, plain=2.0, verify=2.0, draft=0.0) == pytest.approx(4), 'a free draft that is never wrong'
  assert chips.speedup(0.0, 3, plain=2.0, verify=2.0, draft=0.0) == pytest.approx(1)


def test_at_the_break_even_acceptance_speculation_makes_no_difference():
  for num_draft, verify, draft in ((1, 1.1, 0.2), (4, 1.3, 0.1), (10, 1.5, 0.05)):
    even = chips.break_even(num_draft, 1.0, verify, draft)
    assert 0 < even < 1
    assert chips.speedup(even, num_draft, 1.0, verify, draft) == pytest.approx(1)
    assert chips.speedup(even + 0.01, num_draft, 1.0, verify, draft) > 1
    assert chips.speedup(even - 0.01, num_draft, 1.0, verify, draft) < 1


def test_break_even_at_the_ends():
  # One drafted token: 1 + a tokens in verify + draft, so a = verify + draft - 1.
  assert chips.break_even(1, 1.0, 1.1, 0.2) == pytest.approx(0.3)
  assert chips.break_even(1, 1.0, 1.0, 0.0) == pytest.approx(0, abs=1e-9)
  assert chips.break_even(1, 1.0, 1.5, 0.5) is None, 'as slow as plain decoding at best'
  assert chips.break_even(4, 1.0, 5.0, 1.0) is None


def test_the_best_number_of_drafted_tokens_is_the_best():
  for rate in (0.3, 0.6, 0.9):
    best, gain = chips.best_num_draft(rate, 10, 1.0, 1.3, 0.1)
    gains = [chips.speedup(rate, k, 1.0, 1.0 + 0.03 * k, 0.1) for k in range(1, 33)]  # 1.3 for ten
    assert gain == max(gains) == gains[best - 1]
  counts = [chips.best_num_draft(rate, 10, 1.0, 1.1, 0.1)[0] for rate in np.linspace(0.2, 0.99, 20)]
  assert counts == sorted(counts), 'the better the draft, the more of it'


def test_the_best_number_at_the_ends():
  assert chips.best_num_draft(0.0, 10, 1.0, 1.1, 0.1) == (0, 1.0), 'nothing is kept'
  assert chips.best_num_draft(0.3, 1, 1.0, 1.4, 0.1) == (0, 1.0), 'too little is kept'
  best, gain = chips.best_num_draft(1.0, 10, 1.0, 1.1, 0.1)
  assert (best, gain) == (32, pytest.approx(33 / (1 + 0.32 + 3.2))), 'as many as are tried'
  assert chips.best_num_draft(1.0, 10, 1.0, 1.1, 0.1, most=5)[0] == 5
