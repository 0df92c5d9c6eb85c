"""From logits to laws to tokens: the only place where a law is made or drawn from.

A law is a probability vector over the vocabulary, float32, after temperature and filters. Drafting, verification,
recovery and bonus all use `to_probs` and `sample`; two functions that disagree by a rounding would already be a
biased decoder.
"""

import enum

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax.numerics import largest_float
from cactus_jax.records import check_number, record_class

# A temperature at or below this is greedy. Dividing logits by less would overflow where it does not just round.
GREEDY_TEMPERATURE = 1e-5
# `to_probs` looks for the filters' threshold among this many largest tokens before it searches the vocabulary.
HEAD = 64
# A vocabulary is looked at in blocks of so many tokens: the lanes of a TPU's vector registers.
BLOCK = 128


@record_class
class SamplingParams:
  """How a law is made from logits: one number, or one per row, in each field.

  Filters apply in the order of the fields, each to what the one before has left; tokens that tie with the last one
  kept are kept too. Raises ValueError for a value outside its range.
  """

  temperature: jax.Array | float = 1.0  # at or below 1e-5: all mass on the most likely token
  top_k: jax.Array | int = 0  # the k most likely tokens; 0 keeps all
  top_p: jax.Array | float = 1.0  # the smallest set of likeliest tokens whose mass reaches p; 1 keeps all
  min_p: jax.Array | float = 0.0  # tokens with at least this share of the top probability; 0 keeps all

  def __post_init__(self):
    finite = np.isfinite
    check_number('temperature', self.temperature, lambda x: finite(x) & (x >= 0), 'a finite number >= 0 (0 is greedy)')
    whole = lambda x: (x >= 0) & (x == np.floor(x))
    check_number('top_k', self.top_k, whole, 'a whole number >= 0 (0 keeps all tokens)')
    check_number('top_p', self.top_p, lambda x: (x > 0) & (x <= 1), 'a number in (0, 1] (1 keeps all tokens)')
    check_number('min_p', self.min_p, lambda x: (x >= 0) & (x <= 1), 'a number in [0, 1] (0 keeps all tokens)')


@flax.struct.dataclass
class Draft:
  """Up to K tokens proposed for each row, with the law each was drawn from."""

  tokens: jax.Array  # i32[B, K]
  probs: jax.Array  # f32[B, K, V]
  num_drafted: jax.Array  # i32[B] in 0..K: how many of the K are proposals, the rest is padding


def at_tokens(laws, tokens):
  """The entry of each token in its law, [B, T]. laws: [B, T, V], or logits; tokens: i32[B, T]."""
  return jnp.take_along_axis(laws, tokens[..., None], axis=2)[..., 0]


def is_greedy(temperature):
  """Whether a temperature means "the most likely token": one definition for everyone."""
  return temperature <= GREEDY_TEMPERATURE


def to_probs(logits_BTV, params):
  """The law of each position after temperature, top-k, top-p and min-p.

  Args:
    logits_BTV: [B, T, V], any float dtype; -inf masks a token.
    params: `SamplingParams` with leaves [B].
  Returns: f32[B, T, V], each law summing to 1. If the largest logit of a position is not finite (NaN anywhere, +inf,
    or nothing but -inf) its law is NaN throughout, for greedy rows too.
  """
  logits = logits_BTV.astype(jnp.float32)
  # NaN counts as infinite, since XLA's maximum on a CPU passes over it. One pass tells whether a position is usable.
  peak = jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1, keepdims=True)
  usable = jnp.abs(peak) < jnp.inf
  greedy = is_greedy(params.temperature)[:, None, None]
  temperature = jnp.where(greedy, 1.0, params.temperature[:, None, None])
  weights = jnp.exp((logits - jnp.where(usable, peak, 0.0)) / temperature)  # in [0, 1], 1 at the peak
  weights = jnp.where(weights >= _floor(weights, params)[..., None], weights, 0.0)
  mass = jnp.sum(weights, axis=-1, keepdims=True)
  probs = weights / jnp.where(usable, mass, jnp.nan)

  def with_greedy_rows(probs):
    certain = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(greedy, jnp.where(usable, certain, jnp.nan), probs)

  return jax.lax.cond(jnp.any(greedy), with_greedy_rows, lambda probs: probs, probs)


def _floor(weights_BTV, params):
  """The smallest weight that survives the filters, f32[B, T]. The weights are positive and at most 1.

  The vocabulary is never sorted. The threshold almost always lies among the HEAD largest weights; where it does not,
  it is found bit by bit. Which of the two serves a position depends on that position alone.
  """
  V = weights_BTV.shape[-1]
  top_k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V).astype(jnp.int32)[:, None]
  top_p = params.top_p[:, None]
  min_p = jnp.broadcast_to(params.min_p[:, None], weights_BTV.shape[:2])

  def from_head(_):
    """The floor where it is among the largest weights; the search runs only if it is not for some position."""
    head_BTH = _largest(weights_BTV, min(HEAD, V))
    width = head_BTH.shape[-1]
    at = lambda rank: jnp.take_along_axis(head_BTH, jnp.clip(rank, 0, width - 1)[..., None], axis=-1)[..., 0]
    # The k-th largest; what it ties with is kept too, and counts when top-p looks at what top-k has left.
    kth = jnp.where(top_k <= width, at(jnp.broadcast_to(top_k - 1, min_p.shape)), 0)
    mass_BTH = jnp.cumsum(jnp.where(head_BTH >= kth[..., None], head_BTH, 0), axis=-1)
    in_sight = jnp.broadcast_to(top_k <= width, min_p.shape)
    total = jax.lax.cond(jnp.all(in_sight), lambda _: mass_BTH[..., -1], lambda _: jnp.where(
        in_sight, mass_BTH[..., -1], jnp.sum(weights_BTV, axis=-1)), None)
    short = jnp.sum(mass_BTH < (top_p * total)[..., None], axis=-1)  # tokens before the one that reaches p
    floor = jnp.where(top_p < 1, jnp.maximum(kth, at(short)), kth)
    # top-p needs the mass that top-k has left: all of it in sight, with the ties of the k-th, or top-k off.
    all_seen = (top_k <= width) & ((head_BTH[..., -1] < kth) | (kth <= 0) | (width == V))
    found = jnp.where(top_p < 1, all_seen | ((top_k >= V) & (short < width)), (top_k <= width) | (top_k >= V))
    searched = jax.lax.cond(jnp.all(found), lambda _: floor, search, None)
    return jnp.where(found, floor, searched)

  def search(_):
    with jax.named_scope('fallback'):  # who counts what a compiled round costs leaves it out
      return _search_floor(weights_BTV, top_k, top_p)

  anything = jnp.any((params.top_k > 0) | (params.top_p < 1))
  return jnp.maximum(min_p, jax.lax.cond(anything, from_head, lambda _: jnp.zeros_like(min_p), None))


def _blocks(x_V):
  """[..., N, BLOCK]: the last axis in blocks, the last of them filled with zeros."""
  V = x_V.shape[-1]
  padded = x_V if V % BLOCK == 0 else jnp.pad(x_V, [(0, 0)] * (x_V.ndim - 1) + [(0, -V % BLOCK)])
  return padded.reshape(*x_V.shape[:-1], -1, BLOCK)


def _largest(weights_BTV, count):
  """The `count` largest weights of each position, falling, [B, T, count]; weights are not negative.

  They all stand in the `count` blocks with the largest maxima. So the vocabulary is read once, and what is sorted is
  short: a TPU sorts everything it is asked the largest of.
  """
  # The barriers keep XLA from merging later reads into top_k, which on a CPU turns it into a full sort.
  largest = lambda x, what: jax.lax.optimization_barrier(jax.lax.top_k(x, count)[what])
  blocks_BTNW = _blocks(weights_BTV)
  if blocks_BTNW.shape[-2] <= count:
    return largest(weights_BTV, 0)
  block_BTC = largest(jnp.max(blocks_BTNW, axis=-1), 1)
  candidates_BTCW = jnp.take_along_axis(blocks_BTNW, block_BTC[..., None], axis=2)
  return largest(candidates_BTCW.reshape(*weights_BTV.shape[:2], -1), 0)


def _search_floor(weights_BTV, top_k, top_p):
  """The threshold of top-k then top-p for any k and p, in 60 passes over the vocabulary and without a sort."""

  above = lambda floor: weights_BTV >= floor[..., None]
  kth = largest_float(lambda floor: jnp.sum(above(floor), axis=-1) >= top_k, weights_BTV.shape[:2])
  kept_BTV = jnp.where(above(kth), weights_BTV, 0)
  mass = lambda floor: jnp.sum(jnp.where(above(floor), kept_BTV, 0), axis=-1)
  nucleus = largest_float(lambda floor: mass(floor) >= top_p * jnp.sum(kept_BTV, axis=-1), weights_BTV.shape[:2])
  # The peak, 1.0, always survives, even a top_p so small that its product with the mass rounds to 0.
  return jnp.where(top_p < 1, jnp.maximum(kth, nucleus), kth)


def sample(probs_BV, uniform_B):
  """One token a row by inversion of the cumulative law: a single uniform a draw.

  Two levels, so that the vocabulary is read once: the block of tokens that the uniform falls into, then the token
  inside it. A token of probability 0 is never drawn, whatever the rounding of the sums. The uniform has 2^23 values:
  that is how finely a law can be followed.

  Args: probs_BV f32[B, V], each row a law; uniform_B f32[B] in [0, 1). Returns: i32[B].
  """
  B, V = probs_BV.shape
  blocks_BNW = _blocks(probs_BV)
  mass_BN = jnp.sum(blocks_BNW, axis=-1)
  block, before = _invert(mass_BN, uniform_B * jnp.sum(mass_BN, axis=-1))
  inside_BW = jnp.take_along_axis(blocks_BNW, block[:, None, None], axis=1)[:, 0]
  token, _ = _invert(inside_BW, uniform_B * jnp.sum(mass_BN, axis=-1) - before)
  return jnp.minimum(block * BLOCK + token, V - 1)


def _invert(mass_BN, point_B):
  """First positive entry whose running sum exceeds the point (else the last positive one), and the sum before it."""
  ends_BN = jnp.cumsum(mass_BN, axis=-1)
  positive_BN = mass_BN > 0
  beyond_BN = (ends_BN > point_B[:, None]) & positive_BN
  last_B = mass_BN.shape[-1] - 1 - jnp.argmax(positive_BN[:, ::-1], axis=-1)
  index_B = jnp.where(jnp.any(beyond_BN, axis=-1), jnp.argmax(beyond_BN, axis=-1), last_B).astype(jnp.int32)
  at = lambda x_BN: jnp.take_along_axis(x_BN, index_B[:, None], axis=-1)[:, 0]
  return index_B, at(ends_BN) - at(mass_BN)


class Role(enum.IntEnum):
  """What a uniform is for; each role has its own stream, since a shared one would correlate the draws."""

  DRAFT = 0
  ACCEPT = 1
  EMIT = 2


def round_keys(keys_B, round_B):
  """One key a row for this round of that row: never the batch row, never the position, which a rollback redraws."""
  return jax.vmap(jax.random.fold_in)(keys_B, round_B)


def uniforms(keys_B, role, num_slots):
  """f32[B, num_slots] in [0, 1): the uniforms of one role in one round, each slot with a key of its own."""

  def draw(key, slot):
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, role), slot), dtype=jnp.float32)

  return jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(keys_B, jnp.arange(num_slots))
