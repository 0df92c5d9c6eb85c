"""What a program would take on a chip: published peaks, and the arithmetic of a roofline and of speculation.

These are estimates: the longer of reading HBM and computing at full speed, and then the collectives one after another.
A program that runs is slower; what they are for is to compare programs, and to see what bounds them.
"""

import dataclasses

import numpy as np

# Seconds before the first byte of a collective arrives everywhere: a few hops of about a microsecond each way.
COLLECTIVE_LATENCY = 5e-6


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published figures of one chip."""

  flops: float  # bfloat16, a second
  hbm_bytes: float
  hbm_bandwidth: float  # bytes a second
  ici_bandwidth: float  # bytes a second, both directions of all links together
  slices: tuple[str, ...]  # topologies in growing size
  source: str


CHIPS = {
    'v5e': Chip(197e12, 16e9, 819e9, 400e9, ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
                'cloud.google.com/tpu/docs/v5e'),
    'v5p': Chip(459e12, 95e9, 2765e9, 1200e9, ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'),
                'cloud.google.com/tpu/docs/v5p'),
    'v6e': Chip(918e12, 32e9, 1638e9, 800e9, ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
                'cloud.google.com/tpu/docs/v6e'),
}


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Where the time of one pass goes."""

  hbm: float
  compute: float
  collectives: float

  @property
  def total(self):
    return max(self.hbm, self.compute) + self.collectives


def seconds(cost, flops, chip, devices, latency=COLLECTIVE_LATENCY) -> Seconds:
  """The roofline estimate.

  Args: cost, an `hlo.Cost` of one device; flops, of one device; devices, how many take part in a collective.
  """
  wire = sum(size * _wire(kind, devices) for kind, _, size in cost.collectives)
  return Seconds(hbm=cost.hbm_bytes / chip.hbm_bandwidth, compute=flops / chip.flops,
                 collectives=cost.num_collectives * latency + wire / (chip.ici_bandwidth / 2))


def _wire(kind, n):
  """Bytes that a device sends for each byte of a collective's result."""
  shares = {'all-reduce': 2 * (n - 1) / n, 'reduce-scatter': float(n - 1), 'collective-permute': 1.0}
  return shares.get(kind, (n - 1) / n)


def chips_of(slice_name) -> int:
  """'2x4' -> 8."""
  return int(np.prod([int(n) for n in slice_name.split('x')]))


def tokens_per_round(acceptance, num_draft):
  """Expected tokens of a round if each drafted token is kept with the same probability, independently."""
  return float(np.sum(np.asarray(acceptance, np.float64) ** np.arange(num_draft + 1)))


def speedup(acceptance, num_draft, plain, verify, draft):
  """Tokens a second of speculation over those of plain decoding, from the seconds of a step of each kind."""
  return tokens_per_round(acceptance, num_draft) / (verify + num_draft * draft) * plain


def best_num_draft(acceptance, num_draft, plain, verify, draft, most=32):
  """(K, speed-up) of the best number of drafted tokens; (0, 1.0) where none pays.

  Args: verify, seconds of verifying num_draft tokens and one; that of others is on the line through it and `plain`.
  """
  of = lambda k: plain + (verify - plain) * k / num_draft
  options = [(k, speedup(acceptance, k, plain, of(k), draft)) for k in range(1, most + 1)]
  best = max(options, key=lambda option: option[1])
  return best if best[1] > 1 else (0, 1.0)


def break_even(num_draft, plain, verify, draft):
  """The acceptance above which speculation pays; None where it never does."""
  if speedup(1.0, num_draft, plain, verify, draft) <= 1:
    return None
  low, high = 0.0, 1.0
  for _ in range(50):
    middle = (low + high) / 2
    low, high = (low, middle) if speedup(middle, num_draft, plain, verify, draft) > 1 else (middle, high)
  return high
