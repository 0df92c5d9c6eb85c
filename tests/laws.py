"""What rules and blocks must do, by enumeration in float64: written from the formulas, not from the package.

Notation as in the paper: p is the draft's law, q the verifier's, x a drafted token. A reference is a function
(p, q) -> (accept f64[V], recovery f64[V, V]): the probability of keeping each x, and in row x the law of what
replaces it. To test a new rule, add a `Case` to RULES; every property runs over that table.
"""

import dataclasses
import functools
import itertools
from typing import Callable

import numpy as np
from scipy import optimize, special

from cactus_jax import rules
from cactus_jax.rules import Cactus, Exact

DELTAS = (0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 100.0)


def exact_reference(p, q):
  """Speculative sampling: min(1, q_x / p_x), then (q - p)+."""
  return _accept(q, p), np.stack([_normalised(np.maximum(q - p, 0.0), q, x) for x in range(len(q))])


def cactus_reference(delta, gamma=None):
  """Constrained acceptance: h_x = gamma(q_x), the others scaled down; min(1, h_x / p_x), then (h - p)+."""

  def reference(p, q):
    h = np.stack([relaxed_law(q, x, delta, gamma) for x in range(len(q))])
    recovery = np.stack([_normalised(np.maximum(h[x] - p, 0.0), q, x) for x in range(len(q))])
    return _accept(np.diagonal(h), p), recovery

  return reference


def closed_gamma(q_x, delta):
  """The closed form of the paper."""
  return min(1.0, q_x + np.sqrt(2.0 * delta * q_x * (1.0 - q_x)))


# f of each divergence as it is written in books, from which everything is enumerated.
GENERATORS = {
  'kl': lambda t: special.xlogy(t, t),
  'reverse_kl': lambda t: -np.log(t),
  'pearson': lambda t: (t - 1) ** 2,
  'neyman': lambda t: (1 - t) ** 2 / t,
  'total_variation': lambda t: abs(t - 1) / 2,
  'squared_hellinger': lambda t: (np.sqrt(t) - 1) ** 2,
  'jensen_shannon': lambda t: (special.xlogy(t, 2 * t / (t + 1)) + np.log(2 / (t + 1))) / 2,
}


def exact_gamma(name):
  """The larger root of Theorem 2 by bisection on its equation, as a function of (q_x, delta)."""
  f = GENERATORS[name]

  def gamma(q_x, delta):
    if not 0 < q_x < 1:
      return float(q_x >= 1)
    with np.errstate(divide='ignore', invalid='ignore'):
      excess = lambda g: float(q_x * f(np.float64(g / q_x)) + (1 - q_x) * f(np.float64((1 - g) / (1 - q_x)))) - delta
      if delta <= 0:
        return q_x
      return 1.0 if excess(1.0) <= 0 else optimize.brentq(excess, q_x, 1.0, xtol=1e-16, rtol=1e-15, maxiter=500)

  return gamma


def relaxed_law(q, x, delta, gamma=None):
  """The law h of Theorem 2 where the drafted token is x, in closed form unless another gamma is given."""
  q_x = min(q[x], 1.0)
  gamma = (gamma or closed_gamma)(q_x, delta)
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


def target_reference(target):
  """Speculative sampling towards a fixed law target(p, q)."""

  def reference(p, q):
    t = target(p, q)
    return _accept(t, p), np.stack([_normalised(np.maximum(t - p, 0.0), q, x) for x in range(len(q))])

  return reference


def _root(excess, low, high):
  """A zero of a rising function; an end if it has none inside."""
  if excess(low) >= 0:
    return low
  return high if excess(high) <= 0 else optimize.brentq(excess, low, high, xtol=1e-14)


def clamp_law(p, q, tau):
  """clip(p, a q, b q) with ln(b / a) = tau."""
  law = lambda s: np.clip(p, np.exp(s - tau) * q, np.exp(s) * q)
  return law(_root(lambda s: law(s).sum() - 1, 0.0, tau))


def lenience_law(p, q, b):
  """clip(p, a q, b q) for this b."""
  law = lambda a: np.clip(p, a * q, b * q)
  return law(_root(lambda a: law(a).sum() - 1, 0.0, 1.0))


def lenience_published_law(p, q, b):
  """min(p, b q), and the rest in proportion to (q - p)+."""
  kept, residual = np.minimum(p, b * q), np.maximum(q - p, 0)
  return kept + (1 - kept.sum()) * residual / residual.sum() if residual.sum() > 1e-12 else q


def f_divergence(h, q, name):
  """sum q f(h / q), with the limits of f where q or h is 0."""
  if name == 'total_variation':
    return np.abs(h - q).sum() / 2
  if name == 'kl':
    return kl(h, q)
  if name == 'reverse_kl':
    return kl(q, h)
  if name == 'squared_hellinger':
    return np.sum((np.sqrt(h) - np.sqrt(q)) ** 2)
  if name == 'jensen_shannon':
    return (kl(h, (h + q) / 2) + kl(q, (h + q) / 2)) / 2
  over, under = (h, q) if name == 'pearson' else (q, h)
  if np.any((under <= 0) & (over > 0)):
    return np.inf
  seen = under > 0
  return np.sum((over[seen] - under[seen]) ** 2 / under[seen])


def mentored_law(p, q, limit, name):
  """The clamp with this divergence from q, or the widest of all where even that is within it."""
  law = lambda tau: clamp_law(p, q, tau)
  return law(_root(lambda tau: min(f_divergence(law(tau), q, name), 1e9) - limit, 0.0, 80.0))


def within(p, q):
  """p on the support of q."""
  inside = np.where(q > 0, p, 0.0)
  return inside / inside.sum() if inside.sum() > 0 else q


def interpolation_law(p, q, alpha, published=False):
  """A mixture of both."""
  return alpha * (p if published else within(p, q)) + (1 - alpha) * q


def deferral_law(defers):
  """q where defers(p, q), else p."""

  def law(p, q, alpha, published=False):
    p = p if published else within(p, q)
    return q if defers(p, q, alpha) else p

  return law


def trusting_law(trusts):
  """p on the tokens that trusts(p, q) names, q for the rest."""

  def law(p, q, number, published=False):
    p = p if published else within(p, q)
    kept = np.where(trusts(p, q, number), p, 0.0)
    return kept + (1 - kept.sum()) * q

  return law


chow_law = deferral_law(lambda p, q, alpha: p.max() < 1 - alpha)
diff_law = deferral_law(lambda p, q, alpha: p.max() < q.max() - alpha)
opt_law = deferral_law(lambda p, q, alpha: p.max() < q.max() - alpha * np.abs(p - q).sum() / 2)
token_v1_law = trusting_law(lambda p, q, alpha: p >= q.max() - alpha)
token_v2_law = trusting_law(lambda p, q, alpha: q >= q.max() - alpha)
token_v3_law = trusting_law(lambda p, q, alpha: q >= (1 - alpha) * q.max())
threshold_law = trusting_law(lambda p, q, threshold: q >= threshold)


def filtering_reference(keeps):
  """All tokens of the set keeps(q) are kept, any other is replaced by the verifier's likeliest."""

  def reference(p, q):
    return np.where(keeps(q) & (q > 0), 1.0, 0.0), np.tile(np.eye(len(q))[np.argmax(q)], (len(q), 1))

  return reference


def typical_reference(epsilon, alpha):
  """The rule of Medusa; its likeliest token always passes."""
  entropy = lambda q: -np.sum(q * np.log(q + 1e-5))
  return filtering_reference(lambda q: (q > min(epsilon, alpha * np.exp(-entropy(q)))) | (q == q.max()))


def margin_reference(margin):
  """Tokens whose log-probability is within a margin of the largest."""
  first = lambda q: np.arange(len(q)) == np.argmax(q)
  return filtering_reference(lambda q: first(q) | (q > q.max() * np.float32(np.exp(np.float32(-margin)))))


def top_k_reference(k, published=False):
  """The k likeliest are kept; recovery by water-filling, or as published from their indicator."""

  def reference(p, q):
    top = q >= np.sort(q)[::-1][min(k, len(q)) - 1]
    if published:
      recovery = np.maximum(top - p, 0.0)
    else:
      top &= q > 0
      kept = np.where(top, p, 0.0)
      fill = lambda level: np.maximum(level * q - kept, 0.0)
      recovery = fill(_root(lambda level: fill(level).sum() - (1 - kept.sum()), 0.0, 1.0))
    recovery = recovery / recovery.sum() if recovery.sum() > 1e-12 else q / q.sum()
    return top.astype(float), np.tile(recovery, (len(q), 1))

  return reference


def static_reference(reference):
  """Speculative sampling towards the law that another rule emits."""
  return target_reference(lambda p, q: emitted_law(p, *reference(p, q)))


@dataclasses.dataclass(frozen=True)
class Case:
  """A rule and what is expected of it."""

  name: str
  rule: object
  reference: Callable
  between: bool = True  # the emitted law lies between p and q at every token
  efficient: bool = True  # accepts as often as any rule with its emitted law could: sum min(p, h)
  inside: bool = True  # no mass where the verifier has none
  replaces: bool = True  # what is rejected is not drawn again
  exact: bool = False  # at the number where it is speculative sampling


# The number at which each rule is speculative sampling.
EXACT_AT = {
  'Cactus': 0.0, 'CactusExact': 0.0, 'Clamp': 0.0, 'Lenience': 1.0, 'Mentored': 0.0, 'Interpolation': 0.0, 'Chow': -9.0,
  'Diff': -9.0, 'OPT': -1e6, 'TokenV1': -9.0, 'TokenV2': -9.0, 'TokenV3': -9.0, 'Threshold': 2.0,
}  # fmt: skip


def _target_case(cls, law, number, **expected):
  name = f'{cls.__name__.lower()}-{number:g}' + ('-published' if expected.get('published') else '')
  options = {'published': True} if expected.pop('published', False) else {}
  reference = target_reference(
    lambda p, q: law(p, q, number) if law is lenience_published_law else law(p, q, number, **options))
  return Case(name, cls(number, **options), reference, exact=number == EXACT_AT[cls.__name__], **expected)


RULES = (
  [Case('exact', Exact(), exact_reference)]
  + [Case(f'cactus-{delta:g}', Cactus(delta), cactus_reference(delta), exact=delta == 0) for delta in DELTAS]
  + [
    Case(f'cactus_exact-{name}-{delta:g}', rules.CactusExact(delta, name), cactus_reference(delta, exact_gamma(name)))
    for name in GENERATORS
    for delta in (0.03, 0.6)
  ]
  + [_target_case(rules.Clamp, clamp_law, tau) for tau in (0.0, 0.2, 1.0, 5.0)]
  + [_target_case(rules.Lenience, lenience_law, b) for b in (1.0, 1.3, 4.0)]
  + [_target_case(rules.Lenience, lenience_published_law, 1.3, published=True)]
  + [
    Case(f'mentored-{name}-{limit:g}', rules.Mentored(limit, name),
         target_reference(lambda p, q, limit=limit, name=name: mentored_law(p, q, limit, name)))
    for name, limit in (('reverse_kl', 0.02), ('reverse_kl', 0.3), ('kl', 0.05), ('total_variation', 0.1))
  ]
  + [_target_case(rules.Interpolation, interpolation_law, alpha, between=False) for alpha in (0.0, 0.3, 1.0)]
  + [_target_case(rules.Interpolation, interpolation_law, 0.3, published=True, inside=False)]
  + [_target_case(rules.OPT, opt_law, 0.213, between=False, published=True, inside=False)]
  + [_target_case(rules.TokenV1, token_v1_law, 0.113, between=False, published=True, inside=False)]
  + [_target_case(rules.Chow, chow_law, alpha, between=False) for alpha in (-9.0, 0.317, 0.713)]
  + [_target_case(rules.Diff, diff_law, alpha, between=False) for alpha in (-9.0, 0.137, 0.513)]
  + [_target_case(rules.OPT, opt_law, alpha, between=False) for alpha in (-1e6, 0.213, 1.37)]
  + [_target_case(rules.TokenV1, token_v1_law, alpha, between=False) for alpha in (-9.0, 0.113, 0.537)]
  + [_target_case(rules.TokenV2, token_v2_law, alpha, between=False) for alpha in (-9.0, 0.113, 0.537)]
  + [_target_case(rules.TokenV3, token_v3_law, alpha, between=False) for alpha in (-9.0, 0.113, 0.837)]
  + [_target_case(rules.Threshold, threshold_law, number, between=False) for number in (2.0, 0.117, 0.011)]
  + [
    Case(f'typical-{epsilon:g}-{alpha:g}', rules.Typical(epsilon, alpha), typical_reference(epsilon, alpha), False)
    for epsilon, alpha in ((0.09, 0.3), (0.5, 0.9), (0.01, 0.1))
  ]
  + [Case(f'logit_margin-{m:g}', rules.LogitMargin(m), margin_reference(m), False) for m in (0.0, 0.7, 3.1)]
  + [
    Case(f'top_k-{k}', rules.TopK(k), top_k_reference(k), between=False, efficient=False, replaces=False)
    for k in (1, 2, 4, 50)
  ]
  + [
    Case(f'top_k-{k}-published', rules.TopK(k, published=True), top_k_reference(k, True), between=False,
         efficient=False, inside=False, replaces=False)
    for k in (2, 4)
  ]
  + [Case('static-cactus-0.3', rules.Static(Cactus(0.3)), static_reference(cactus_reference(0.3)))]
)


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


def block_rounds(q_VVV, p_VVV, target, num_draft, context):
  """One round of block verification towards target(p, q): {tokens emitted: probability}, and the mean number kept.

  Algorithm 2 of Sun et al. by the book: P_i = min(1, P_{i-1} t / p), Z_i = sum (P_i t - p)+, h_i = Z_i / (Z_i + 1 -
  P_i) and h_K = P_K; the longest prefix with u_i <= h_i is kept, and (P t - p)+ or the bonus follows. Laws depend on
  the last two tokens.
  """
  V = q_VVV.shape[0]
  outcomes, kept = {}, 0.0
  for x in itertools.product(range(V), repeat=num_draft):
    text = [*context, *x]
    laws = [(p_VVV[text[i], text[i + 1]], q_VVV[text[i], text[i + 1]]) for i in range(num_draft + 1)]
    targets = [target(p, q) for p, q in laws]
    drafted = np.prod([laws[i][0][x[i]] for i in range(num_draft)])
    if drafted == 0:
      continue
    reach = [1.0]
    for i in range(num_draft):
      reach.append(min(1.0, reach[-1] * targets[i][x[i]] / laws[i][0][x[i]]))
    residuals = [np.maximum(reach[i] * targets[i] - laws[i][0], 0.0) for i in range(num_draft)]
    passes = [1.0]
    for i in range(1, num_draft):
      total = residuals[i].sum()
      passes.append(total / (total + 1 - reach[i]) if total + 1 - reach[i] > 0 else 1.0)
    passes.append(reach[num_draft])
    later = 1.0
    for length in range(num_draft, -1, -1):
      chance = drafted * later * passes[length]
      later *= 1 - passes[length]
      if length == num_draft:
        law = laws[-1][1]
      else:
        law = residuals[length] / residuals[length].sum() if residuals[length].sum() > 0 else targets[length]
      kept += chance * length
      for y in range(V):
        emitted = (*x[:length], y)
        outcomes[emitted] = outcomes.get(emitted, 0.0) + chance * law[y]
  return outcomes, kept


def block_text_law(q_VVV, p_VVV, target, num_draft, context, num_tokens):
  """The joint law of the next tokens under block verification, f64[V] * num_tokens, round after round."""
  V = q_VVV.shape[0]

  @functools.lru_cache(maxsize=None)
  def following(context, count):
    law = np.zeros((V,) * count)
    for emitted, chance in block_rounds(q_VVV, p_VVV, target, num_draft, context)[0].items():
      if len(emitted) >= count:
        law[emitted[:count]] += chance
      else:
        rest = following((*context, *emitted)[-2:], count - len(emitted))
        law[emitted] += chance * rest
    return law

  return following(tuple(context), num_tokens)


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
