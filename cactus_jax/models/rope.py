"""Rotary frequencies, and what stretches them for contexts longer than the model was first trained for.

Angles are position times frequency (RoFormer, Su et al., 2021, equation 15). A kind of scaling is a class here and a
row in `KINDS`; its fields have the names that a config.json uses.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class Linear:
  """All frequencies divided by a factor: position interpolation (Chen et al., 2023)."""

  factor: float
  attention_factor: ClassVar[float] = 1.0  # what cos and sin are multiplied by

  def stretch(self, frequencies, theta):
    """Frequencies [H/2] of the base `theta` for the longer context."""
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
  """As Llama 3.1 has it: a frequency with few turns in the original context is divided, one with many is kept.

  Few is fewer than low_freq_factor, many more than high_freq_factor; between them the two are mixed.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: float  # tokens
  attention_factor: ClassVar[float] = 1.0

  def __post_init__(self):
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(f'{self}: low_freq_factor must be below high_freq_factor; check the config.')

  def stretch(self, frequencies, theta):
    """Frequencies [H/2] of the base `theta` for the longer context."""
    turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
    kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
    return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (Peng et al., 2023): as Llama3, but mixed by the number of the frequency, and with sharper attention."""

  factor: float
  original_max_position_embeddings: float  # tokens
  beta_fast: float = 32.0  # turns in the original context above which a frequency is kept
  beta_slow: float = 1.0  # turns below which it is divided
  attention_factor: float | None = None  # None: by the factor, as the paper suggests
  truncate: bool = True  # whether the bounds of mixing are whole numbers
  mscale: float | None = None  # this and the next, if both are given, are in the attention_factor that None stands for
  mscale_all_dim: float | None = None

  def __post_init__(self):
    if self.beta_slow > self.beta_fast:
      raise ValueError(f'{self}: beta_slow must not be above beta_fast; check the config.')
    if self.attention_factor is None:
      sharper = lambda scale: 0.1 * scale * math.log(max(self.factor, 1.0)) + 1
      scales = (self.mscale, self.mscale_all_dim) if self.mscale and self.mscale_all_dim else (1.0, 0.0)
      object.__setattr__(self, 'attention_factor', sharper(scales[0]) / sharper(scales[1]))

  def stretch(self, frequencies, theta):
    """Frequencies [H/2] of the base `theta` for the longer context."""
    half = frequencies.size

    def number(turns):  # of the frequency, maybe fractional, that turns so often in the original context
      return half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low, high = number(self.beta_fast), number(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    divided = np.clip((np.arange(half) - low) / ((high - low) or 1e-3), 0, 1)
    return divided * frequencies / self.factor + (1 - divided) * frequencies


Scaling = Linear | Llama3 | Yarn
KINDS = {'linear': Linear, 'llama3': Llama3, 'yarn': Yarn}  # by their rope_type in a config.json


def frequencies(head_dim, theta, scaling: Scaling | None = None):
  """f32[H/2], radians a position, of the pairs of a head."""
  plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  return np.float32(plain if scaling is None else scaling.stretch(plain, theta))


def to_dict(scaling: Scaling) -> dict:
  """As a config.json has it: its rope_type and its numbers."""
  (kind,) = (name for name, cls in KINDS.items() if cls is type(scaling))
  return {'rope_type': kind} | dataclasses.asdict(scaling)


def from_dict(given: dict) -> Scaling:
  """The inverse of `to_dict`; raises KeyError or TypeError for what is none."""
  return KINDS[given['rope_type']](**{name: value for name, value in given.items() if name != 'rope_type'})
