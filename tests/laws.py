"""What rules and blocks must do, by enumeration in float64: written from the formulas, not from the package.

Notation as in the paper: p is the draft's law, q the verifier's, x a drafted token. A reference is a function
(p, q) -> (accept f64[V], recovery f64[V, V]): the probability of keeping each x, and in row x the law of what
replaces it. To test a new rule, add a `Case` to RULES; every property runs over that table.
"""

import dataclasses
import itertools
from typing import Callable

import numpy as np

from cactus_jax.rules import Cactus, Exact

DELTAS = (0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 100.0)


def exact_reference(p, q):
  """Speculative sampling: min(1, q_x / p_x), then (q - p)+."""
  return _accept(q, p), np.stack([_normalised(np.maximum(q - p, 0.0), q, x) for x in range(len(q))])


def cactus_reference(delta):
  """Constrained acceptance: h_x = gamma(q_x), the others scaled down; min(1, h_x / p_x), then (h - p)+."""

  def reference(p, q):
    h = np.stack([relaxed_law(q, x, delta) for x in range(len(q))])
    recovery = np.stack([_normalised(np.maximum(h[x] - p, 0.0), q, x) for x in range(len(q))])
    return _accept(np.diagonal(h), p), recovery

  return reference


def relaxed_law(q, x, delta):
  """The law h of Theorem 2 in closed form, where the drafted token is x."""
  q_x = min(q[x], 1.0)
  gamma = min(1.0, q_x + np.sqrt(2.0 * delta * q_x * (1.0 - q_x)))
  h = q * ((1.0 - gamma) / (1.0 - q_x) if q_x < 1.0 else 0.0)
  h[x] = gamma
  return h


def _accept(h, p):
  return np.where(h <= 0, 0.0, np.minimum(1.0, h / np.where(p > 0, p, 1e-300)))


def _normalised(weights, q, x):
  weights = np.where(np.arange(len(q)) == x, 0.0, weights)
  if weights.sum() <= 0:
    weights = np.where(np.arange(len(q)) == x, 0.0, q)
  if weights.sum() <= 0:
    weights = q
  return weights / weights.sum()


@dataclasses.dataclass(frozen=True)
class Case:
  """A rule and what is expected of it."""

  name: str
  rule: object
  reference: Callable
  between: bool = True  # the emitted law lies between p and q at every token
  efficient: bool = True  # accepts as often as any rule with its emitted law could: sum min(p, h)


RULES = [Case('exact', Exact(), exact_reference)] + [
  Case(f'cactus-{delta:g}', Cactus(delta), cactus_reference(delta)) for delta in DELTAS
]


def emitted_law(p, accept, recovery):
  """The law of the emitted token, f64[V]: over x ~ p, its acceptance and its recovery."""
  return p * accept + (p * (1.0 - accept)) @ recovery


def kl(h, q):
  """KL(h || q) in nats, infinite where h leaves the support of q."""
  seen = h > 0
  if np.any(q[seen] <= 0):
    return np.inf
  return float(np.sum(h[seen] * np.log(h[seen] / q[seen])))


def softmax(logits):
  weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def text_law(q_VVV, p_VVV, reference, num_draft, context, num_tokens):
  """The joint law of the next tokens of the whole decoder, f64[V] * num_tokens, by dynamic programming.

  The hidden state is the place in the block of the next token. At place i < K it is a drafted token that was kept
  (then place i + 1) or a recovery (then a new block, place 0); at place K it is the verifier's bonus (then place 0).
  Both laws depend on the last two tokens. A text's probability sums over every way to cut it into rounds.
  """
  V = q_VVV.shape[0]
  kept, recovered = np.empty_like(q_VVV), np.empty_like(q_VVV)
  for a, b in itertools.product(range(V), repeat=2):
    accept, recovery = reference(p_VVV[a, b], q_VVV[a, b])
    kept[a, b] = p_VVV[a, b] * accept
    recovered[a, b] = (p_VVV[a, b] * (1.0 - accept)) @ recovery
  law = np.empty((V,) * num_tokens)
  for text in itertools.product(range(V), repeat=num_tokens):
    place = np.eye(num_draft + 1)[0]
    a, b = context
    for y in text:
      restart = place[:-1].sum() * recovered[a, b, y] + place[-1] * q_VVV[a, b, y]
      place = np.concatenate([[restart], place[:-1] * kept[a, b, y]])
      a, b = b, y
    law[text] = place.sum()
  return law


def law_pairs(rng, vocab, count):
  """Random pairs (p, q), f32[count, V]: dense, sparse, peaked, close, disjoint, and the corners."""

  def normalised(weights):
    weights = np.asarray(weights, np.float64)
    return weights / weights.sum(axis=-1, keepdims=True)

  def sparse(law):
    zero = rng.random(vocab) < 0.4
    zero[rng.integers(vocab)] = False
    kept = np.where(zero, 0.0, law)
    return normalised(kept) if kept.sum() > 0 else law

  pairs = list(corner_pairs(vocab))
  while len(pairs) < count:
    concentration = rng.choice([0.05, 0.3, 1.0, 5.0])
    p, q = (normalised(rng.dirichlet(np.full(vocab, concentration)) + 1e-12) for _ in range(2))
    kind = rng.integers(7)
    if kind == 1:
      p, q = sparse(p), sparse(q)
    elif kind == 2:  # the verifier's nucleus is smaller than the draft's
      q = sparse(normalised(p * np.exp(0.3 * rng.normal(size=vocab))))
    elif kind == 3:
      p = sparse(q)
    elif kind == 4:  # almost the same law, as a good draft has
      p = normalised(q * np.exp(1e-3 * rng.normal(size=vocab)))
    elif kind == 5:  # a certain proposal, as prompt lookup makes
      p = np.eye(vocab)[rng.integers(vocab)]
    elif kind == 6 and vocab > 1:  # disjoint supports
      split = rng.permutation(vocab) < rng.integers(1, vocab)
      p, q = (normalised(np.where(side, law, 0.0) + side * 1e-9) for side, law in ((split, p), (~split, q)))
    pairs.append((p, q))
  p, q = (np.asarray(laws, np.float32) for laws in zip(*pairs))
  return p, q


def corner_pairs(vocab):
  """Pairs at the edges: one-hot laws, p = q, probabilities of 1 + 1 ulp, tiny and subnormal ones."""
  one, flat = np.eye(vocab), np.full(vocab, 1.0 / vocab)
  for i in range(2):
    yield one[i], one[i]
    yield one[i], one[1 - i]
    yield flat, one[i]
    yield one[i], flat
  yield flat, flat
  skewed = np.arange(1.0, vocab + 1) ** 2
  skewed /= skewed.sum()
  yield skewed, skewed
  yield skewed[::-1], skewed
  for tiny in (1e-8, 1e-20, 1e-37, 1e-44):
    almost = np.where(np.arange(vocab) == 0, 1.0, tiny)  # float32 rounds 1 - tiny to 1
    yield flat, almost
    yield almost, flat
    yield almost, almost[::-1]
    yield one[1], almost
  above = one[0] * np.float64(
    np.nextafter(np.float32(1), np.float32(2))
  )  # 1 + 1 ulp, as a rounded sum may give
  yield above, above
  yield flat, above
  yield above, flat
  yield one[0], above


def filtered_law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The law after temperature, then top-k, top-p and min-p, each with its ties, by sorting."""
  logits = np.asarray(logits, np.float64)
  if temperature <= 1e-5:
    return np.eye(len(logits))[np.argmax(logits)]
  law = softmax(logits / temperature)
  if 0 < top_k < len(law):
    law = np.where(law >= np.sort(law)[-top_k], law, 0.0)
    law /= law.sum()
  if top_p < 1:
    ordered = np.sort(law)[::-1]
    last = np.argmax(np.cumsum(ordered) >= top_p - 1e-9)
    law = np.where(law >= ordered[last], law, 0.0)
    law /= law.sum()
  law = np.where(law >= min_p * law.max(), law, 0.0)
  return law / law.sum()


def chi_square_z(counts, law):
  """How many standard deviations Pearson's statistic lies from its mean, over the rows of counts [..., V].

  Cells that expect fewer than 5 counts are pooled within their row; a token of probability 0 must not occur. Under
  the law the value is about standard normal.
  """
  counts, law = (np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1]) for x in (counts, law))
  assert np.all(counts[law <= 0] == 0), 'a token of probability 0 was emitted'
  statistic, freedom = 0.0, 0
  for seen, expected in zip(counts, law * counts.sum(axis=-1, keepdims=True)):
    small = expected < 5
    if small.all():
      continue
    cells = [(seen[i], expected[i]) for i in np.flatnonzero(~small)]
    if expected[small].sum() >= 5:
      cells.append((seen[small].sum(), expected[small].sum()))
    elif small.any():
      cells[0] = (cells[0][0] + seen[small].sum(), cells[0][1] + expected[small].sum())
    statistic += sum((s - e) ** 2 / e for s, e in cells)
    freedom += len(cells) - 1
  assert freedom > 0, 'nothing to compare'
  return (statistic - freedom) / np.sqrt(2 * freedom)
