"""What a lossy rule spends, exactly: the ledger of a run, a budget that steers by it, figures from recorded laws.

At each position that a rule decides, the token it emits has the law h = `output_law`, where the verifier alone would
have used q. By the chain rule KL(text under the rule || text under the verifier) is at most the expected sum of
KL(h || q) over those positions, which is what the ledger holds, in nats; a bonus token is the verifier's own and costs
nothing. (At most: the text does not tell where its rounds began.)
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import divergence
from cactus_jax.records import check_number, per_row, per_slot, record_class
from cactus_jax.rules import Clamp, Exact
from cactus_jax.sampling import at_tokens

# The histogram of KL a position: bin 0 below SMALLEST, then so many bins for each factor of 10; the last is open.
SMALLEST, BINS_PER_DECADE, NUM_BINS = 1e-7, 12, 110
# How fast a budget's price follows what is spent: the factor e for 2 / RESPONSE tokens' worth of nats.
RESPONSE = 0.1


@flax.struct.dataclass
class Ledger:
  """What each row has spent; part of the decoding state if `DecodeConfig.ledger` is set."""

  tokens: jax.Array  # i32[B] new tokens, bonus included
  decided: jax.Array  # i32[B] those of them that the rule decided: kept or recovered
  kl: jax.Array  # f32[B] nats, sum of KL(h || q) over the decided positions
  max_kl: jax.Array  # f32[B] nats, the largest of them
  chi2: jax.Array  # f32[B] sum of Pearson's chi-square of h from q
  histogram: jax.Array  # i32[B, NUM_BINS] decided positions by their KL, see `bin_edges`
  flips: jax.Array  # i32[B] tokens that the verifier's law gives no probability: at temperature 0, those not its choice
  emitted_logprobs: jax.Array  # f32[B, S] ln h of each new token: of the law it was drawn from
  verifier_logprobs: jax.Array  # f32[B, S] ln q of each new token, by the same temperature and filters


class Charges(NamedTuple):
  """What a rule spends at each drafted position, if the round gets that far."""

  kl: jax.Array  # f32[B, K] nats
  chi2: jax.Array  # f32[B, K]
  emitted: jax.Array  # f32[B, K] the emitted law's probability of the drafted token


def empty(batch, slots) -> Ledger:
  """The ledger before the first token, for rows of `slots` tokens."""
  counts, sums, each = jnp.zeros(batch, jnp.int32), jnp.zeros(batch), jnp.zeros((batch, slots))
  return Ledger(tokens=counts, decided=counts, kl=sums, max_kl=sums, chi2=sums, flips=counts,
                histogram=jnp.zeros((batch, NUM_BINS), jnp.int32), emitted_logprobs=each, verifier_logprobs=each)


def bin_edges():
  """f64[NUM_BINS]: the upper edge of each bin in nats; the last is infinite."""
  return np.append(SMALLEST * 10.0 ** (np.arange(NUM_BINS - 1) / BINS_PER_DECADE), np.inf)


def _bin(kl):
  above = jnp.log10(jnp.maximum(kl, SMALLEST) / SMALLEST) * BINS_PER_DECADE
  inside = jnp.clip(jnp.ceil(above), 0, NUM_BINS - 1)
  return jnp.where(kl <= SMALLEST, 0, jnp.where(jnp.isnan(kl), NUM_BINS - 1, inside)).astype(jnp.int32)


def charge(rule, draft, target_probs, judged_probs) -> Charges:
  """What the rule spends at each drafted position.

  Args:
    rule: `VerificationRule` with leaves [B] or [B, K]. draft: `Draft`.
    target_probs: f32[B, K+1, V], the verifier's laws; judged_probs: those that the rule judges by.
  """
  B, K = draft.tokens.shape
  if not K or getattr(rule, 'lossless', False):
    nothing = jnp.zeros((B, K))
    return Charges(nothing, nothing, at_tokens(target_probs[:, :K], draft.tokens))
  rule = per_slot(rule, K)

  def of_position(index):
    b, i = index // K, index % K
    q = target_probs[b, i]
    h = jax.tree.map(lambda leaf: leaf[b, i], rule).output_law(draft.probs[b, i], judged_probs[b, i])
    return divergence.kl(h, q), divergence.chi2(h, q), h[draft.tokens[b, i]]

  # One by one: nothing of the size of all laws is made, and a rule's own short cuts (lax.cond) stay short cuts.
  return Charges(*(x.reshape(B, K) for x in jax.lax.map(of_position, jnp.arange(B * K))))


def record(ledger, rule, charges, draft, target_probs, judged_probs, block_BT, kept_BT, slots_BT) -> Ledger:
  """The ledger after a round.

  Args:
    rule, charges: from `plan`. draft, target_probs, judged_probs: as for `charge`.
    block_BT: i32[B, K+1], the tokens of the round. kept_BT: bool[B, K+1], those that went into the text.
    slots_BT: i32[B, K+1], where in the row they stand; out of range where not kept.
  """
  B, T = block_BT.shape
  K, rows_B = T - 1, jnp.arange(B)
  decided_BK = (kept_BT & (jnp.arange(T)[None] < draft.num_drafted[:, None]))[:, :K]
  spent = lambda nats_BK: jnp.sum(jnp.where(decided_BK, nats_BK, 0.0), axis=1)
  verifier_BT = at_tokens(target_probs, block_BT)
  emitted_BT = verifier_BT
  if K:
    emitted_BT = emitted_BT.at[:, :K].set(jnp.where(decided_BK, charges.emitted, verifier_BT[:, :K]))
    # Where a token replaced the drafted one, its own probability is wanted: at most one a row, the last decided.
    last_B = jnp.maximum(jnp.sum(decided_BK, axis=1) - 1, 0)
    rule_B = jax.tree.map(lambda leaf: leaf[rows_B, last_B], per_slot(rule, K))
    of_row = lambda cell: cell[0].output_law(*cell[1:3])[cell[3]]
    token_B = block_BT[rows_B, last_B]
    replaced_B = jax.lax.map(of_row, (rule_B, draft.probs[rows_B, last_B], judged_probs[rows_B, last_B], token_B))
    differs_B = jnp.any(decided_BK, axis=1) & (token_B != draft.tokens[rows_B, last_B])
    emitted_BT = emitted_BT.at[rows_B, last_B].set(
        jnp.where(differs_B, replaced_B, emitted_BT[rows_B, last_B]))
  put = lambda into_BS, what_BT: into_BS.at[rows_B[:, None], slots_BT].set(what_BT, mode='drop')
  return Ledger(
      tokens=ledger.tokens + jnp.sum(kept_BT, axis=1, dtype=jnp.int32),
      decided=ledger.decided + jnp.sum(decided_BK, axis=1, dtype=jnp.int32),
      kl=ledger.kl + spent(charges.kl),
      max_kl=jnp.maximum(ledger.max_kl, jnp.max(jnp.where(decided_BK, charges.kl, 0.0), axis=1, initial=0.0)),
      chi2=ledger.chi2 + spent(charges.chi2),
      histogram=ledger.histogram.at[rows_B[:, None], _bin(charges.kl)].add(decided_BK.astype(jnp.int32)),
      flips=ledger.flips + jnp.sum(kept_BT & (verifier_BT <= 0), axis=1, dtype=jnp.int32),
      emitted_logprobs=put(ledger.emitted_logprobs, jnp.log(emitted_BT)),
      verifier_logprobs=put(ledger.verifier_logprobs, jnp.log(verifier_BT)),
  )


@record_class
class Budget:
  """Instead of a rule: `Clamp` at the price that spends a given number of nats.

  kl_per_token is held on average over each row's text: the price rises while a row has spent less than its share, and
  falls when it has spent more. kl_total is never exceeded by any row: a position whose exact cost no longer fits is
  verified as in `Exact`. With kl_total alone it is spread evenly over the tokens asked for. 0 nats are `Exact`.

  As with rules, numbers or one per row. Nothing but the ledger is remembered between rounds.
  """

  kl_per_token: jax.Array | float | None = None  # nats
  kl_total: jax.Array | float | None = None  # nats

  def __post_init__(self):
    if self.kl_per_token is None and self.kl_total is None:
      raise ValueError('Budget() is without a limit: need kl_per_token, kl_total or both, in nats.')
    for name in ('kl_per_token', 'kl_total'):
      if getattr(self, name) is not None:
        check_number(name, getattr(self, name), lambda d: np.isfinite(d) & (d >= 0), 'a finite number of nats >= 0')

  @property
  def lossless(self):
    """Whether there is nothing to spend, so that the emitted law is the verifier's. (Not known inside jit.)"""
    return any(limit is not None and not np.any(np.asarray(limit)) for limit in (self.kl_per_token, self.kl_total))

  def price(self, ledger, tokens_left):
    """tau f32[B] of the next round. tokens_left: i32[B], those still asked for."""
    rate = self.kl_per_token if self.kl_per_token is not None else self.kl_total / (ledger.tokens + tokens_left)
    safe = jnp.where(rate > 0, rate, 1.0)
    behind = ledger.tokens - ledger.kl / safe  # tokens whose share is not spent yet
    tau = jnp.minimum(_usual_price(safe) * jnp.exp(RESPONSE / 2 * behind), 20.0)
    if self.kl_total is not None:
      left = jnp.maximum(self.kl_total - ledger.kl, 0.0)
      # At this price or below the next token is affordable: KL <= min(tau, tau^2 / 8), see `Clamp`.
      tau = jnp.minimum(tau, jnp.maximum(left, jnp.sqrt(8.0 * left)))
    return jnp.where(rate > 0, tau, 0.0)

  def affordable(self, ledger, kl_BK):
    """bool[B, K]: whether a row can pay for this position and for all before it, whatever comes."""
    if self.kl_total is None:
      return jnp.ones(kl_BK.shape, bool)
    # A little is held back, so that sums in another order do not exceed the total by a rounding.
    return ledger.kl[:, None] + jnp.cumsum(kl_BK, axis=1) <= self.kl_total[:, None] * (1 - 1e-5)


def _usual_price(kl_per_token):
  """The price at which a draft from the verifier's family has been seen to spend about so much: where to start."""
  return 8.0 * kl_per_token**0.6


def plan(rule, ledger, draft, target_probs, judged_probs, tokens_left) -> tuple[Any, Charges | None]:
  """The rule of this round, and what it charges at each position if a ledger is kept.

  Args: rule, `VerificationRule` or `Budget` with leaves [B] or [B, K]; ledger, `Ledger` or None; draft, `Draft`;
    target_probs, judged_probs as for `charge`; tokens_left i32[B], how many tokens a row is still asked for.
  """
  K = draft.tokens.shape[1]
  if not isinstance(rule, Budget):
    return rule, None if ledger is None else charge(rule, draft, target_probs, judged_probs)
  clamp = per_slot(Clamp(rule.price(ledger, tokens_left)), K)
  charges = charge(clamp, draft, target_probs, judged_probs)
  affordable = rule.affordable(ledger, charges.kl)
  exact = charge(Exact(), draft, target_probs, judged_probs)
  return (Clamp(jnp.where(affordable, clamp.tau, 0.0)),
          jax.tree.map(lambda paid, free: jnp.where(affordable, paid, free), charges, exact))


class Expected(NamedTuple):
  """Expected figures of a rule on recorded rounds."""

  accepted_len: float  # drafted tokens kept a round: the paper's AL
  acceptance_rate: float  # share kept of the drafted tokens put to the test
  kl_per_token: float  # nats, over all tokens of the rounds, bonus included
  kl_99: float  # nats, the 99th percentile of KL over decided positions


def expected(rule, draft, target_probs) -> Expected:
  """What a rule would have done in recorded rounds, in expectation over everything but the drafted tokens.

  A round gets to position i with the product of the acceptance probabilities before it, so no random draw is needed.
  Args: rule with numbers, or one for each drafted position [1, K], for leaves; draft, target_probs: N recorded rounds
    as rows.
  Raises: ValueError for a Budget, which depends on the text before, and for a rule that judges by other laws than the
    sampling's.
  """
  N, K = draft.tokens.shape
  if not N or np.shape(target_probs)[:1] != (N,) or np.shape(target_probs)[1] < K:
    raise ValueError(f'{N} rounds of {K} drafted tokens and target_probs of shape {np.shape(target_probs)}: need one '
                     'round or more, and the verifier\'s laws at the drafted positions of each, [N, K or K+1, V].')
  _check_judgeable(rule)
  rule = per_row(rule, 1, slots=K)
  accept, kl = jax.device_get(_judged(rule, draft, target_probs))
  drafted = np.arange(K)[None] < np.asarray(draft.num_drafted)[:, None]
  accept = np.where(drafted, accept, 0.0).astype(np.float64)
  reach = np.concatenate([np.ones((N, 1)), np.cumprod(accept, axis=1)], axis=1)  # positions 0..K
  tested = np.where(drafted, reach[:, :K], 0.0)
  accepted = reach[:, 1:].sum()
  order = np.argsort(kl, axis=None)
  weight = np.cumsum(tested.reshape(-1)[order])
  at_99 = kl.reshape(-1)[order][np.searchsorted(weight, 0.99 * weight[-1])] if weight[-1] > 0 else 0.0
  return Expected(
      accepted_len=float(accepted / N),
      acceptance_rate=float(accepted / tested.sum()) if tested.any() else 0.0,
      kl_per_token=float(np.sum(tested[tested > 0] * kl[tested > 0]) / (N + accepted)),  # infinite KL may lie beyond
      kl_99=float(at_99),
  )


def _check_judgeable(rule):
  if isinstance(rule, Budget) or getattr(rule, 'judged_by', None) is not None:
    raise ValueError(f'{type(rule).__name__} cannot be judged on recorded rounds: it needs more than their laws.')
  if isinstance(rule, type) or not hasattr(rule, 'output_law'):
    raise ValueError(f'{rule!r:.60} is no rule: need one with its numbers, as Clamp(tau=0.5).')


@jax.jit
def _judged(rule, draft, target_probs):
  """accept_prob f32[N, K] of the drafted tokens and KL f32[N, K], a position at a time as in `charge`."""
  N, K = draft.tokens.shape
  rule = jax.tree.map(lambda leaf: leaf[0], per_slot(rule, K))

  def of_position(index):
    n, i = index // K, index % K
    p, q, here = draft.probs[n, i], target_probs[n, i], jax.tree.map(lambda leaf: leaf[i], rule)
    return here.accept_prob(p, q, draft.tokens[n, i]), divergence.kl(here.output_law(p, q), q)

  return tuple(x.reshape(N, K) for x in jax.lax.map(of_position, jnp.arange(N * K)))


def calibrate(make_rule, draft, target_probs, kl_per_token, low=1e-7, high=50.0):
  """The number for which make_rule(number) spends kl_per_token on recorded rounds, and the figures it has there.

  Args:
    make_rule: a rule's class, or any function of one number whose rule spends more for a larger number, or less.
    draft, target_probs: recorded rounds as rows. kl_per_token: nats wanted.
    low, high: bounds of the search, which is by bisection of the logarithm.
  Returns: (number, `Expected`).
  Raises: ValueError if the bounds do not enclose the wanted figure.
  """
  check_search(make_rule, kl_per_token, low, high)
  spends = lambda number: expected(make_rule(number), draft, target_probs).kl_per_token
  ends = spends(low), spends(high)
  if not min(ends) <= kl_per_token <= max(ends):
    raise ValueError(f'kl_per_token={kl_per_token}: on these rounds the rule spends {ends[0]:.3g} nats at {low:g} and '
                     f'{ends[1]:.3g} at {high:g}; ask for a number between, or widen low and high.')
  rises = ends[0] <= ends[1]
  for _ in range(40):
    middle = float(np.sqrt(low * high))
    low, high = (middle, high) if (spends(middle) <= kl_per_token) == rises else (low, middle)
    if high / low < 1 + 1e-4:
      break
  number = low if rises else high  # of the two, the one that does not spend more
  return number, expected(make_rule(number), draft, target_probs)


def check_search(make_rule, kl_per_token, low, high):
  """Raises ValueError for what `calibrate` cannot search for, or between."""
  one = lambda d: np.isfinite(d) & (d > 0) & (np.ndim(d) == 0)
  check_number('kl_per_token', kl_per_token, one, 'one finite number of nats > 0')
  for name, value in (('low', low), ('high', high)):
    check_number(name, value, one, 'one finite number > 0')
  if not low < high:
    raise ValueError(f'low={low}, high={high}: need low < high.')
  if not callable(make_rule):
    raise ValueError(f'make_rule={make_rule!r:.60}: need a class, or a function of one number, that makes a rule.')
  for number in (low, high, float(np.sqrt(low * high))):
    try:
      rule = make_rule(number)
    except (TypeError, ValueError) as error:
      raise ValueError(f'the search runs from low={low:g} to high={high:g}, and at {number:g}: {error} Pass a low and '
                       'a high that suit the rule, or a function that makes one of any number between.') from None
    _check_judgeable(rule)


def prices_by_position(tau, draft, target_probs):
  """Prices f32[1, K] that fall along the draft, for `Clamp`: more tokens for the nats than one price everywhere.

  A token kept early is worth more than itself: w_i = 1 + V_{i+1}, where V_i, the maximum over prices of A w_i -
  lambda K, is what the draft is still worth at position i, with A the acceptance and K the KL at a price, and lambda =
  1 / tau. The price of position i is w_i tau.

  Args: tau, the price at the last position, nats; draft, target_probs: recorded rounds as rows, from which A and K
    are taken.
  """
  check_number('tau', tau, lambda d: np.isfinite(d) & (d > 0) & (np.ndim(d) == 0), 'one finite number of nats > 0')
  K = draft.tokens.shape[1]
  prices = tau * np.geomspace(0.5, K + 1, 24)
  drafted = np.arange(K)[None] < np.asarray(draft.num_drafted)[:, None]
  curve = []
  for price in prices:
    accept, kl = jax.device_get(_judged(per_row(Clamp(price), 1), draft, target_probs))
    curve.append((accept[drafted].mean(), kl[drafted].mean()))
  accept, kl = np.array(curve).T
  worth, weights = 0.0, []
  for _ in range(K):
    weights.append(1.0 + worth)
    worth = max(0.0, float(np.max(accept * (1.0 + worth) - kl / tau)))
  return np.float32(tau * np.array(weights[::-1]))[None]
