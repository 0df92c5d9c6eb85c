"""Figures of a run: how much was accepted, what a verifier call yielded, and where the seconds went.

Words, the same everywhere: accepted_len is the number of drafted tokens kept in a round, 0..K, without recovery or
bonus; tokens_per_call is accepted_len + 1, but for rounds that the end of a text cut short; kl_per_token is what the
rule spent by the ledger, in nats, over all tokens decoded.
"""

import contextlib
import dataclasses
import itertools
import time

import jax
import numpy as np

from cactus_jax import ledger as ledger_lib
from cactus_jax import sharding


def _ratio(a, b):
  return float(a) / float(b) if b else 0.0


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Wall-clock seconds of one call, compilation apart from running."""

  compile: float  # tracing, lowering and compiling (or fetching compiled code), whenever it happened
  first_token: float  # reading the prompts and the first round
  decode: float  # the rounds after the first
  decoded: int  # tokens that those rounds gave
  measure: float = 0.0  # measuring what passes cost, where the number of drafted tokens is chosen by it


@dataclasses.dataclass(frozen=True)
class Spent:
  """What a rule spent, by the ledger, summed over rows."""

  decided: int  # tokens that the rule decided: kept or recovered, not bonus
  kl: float  # nats, sum over them of KL from the verifier's law
  max_kl: float  # nats, the largest of them
  chi2: float  # sum over them of Pearson's chi-square
  flips: int  # tokens that the verifier's law gives no probability
  histogram: tuple[int, ...]  # of KL, see `ledger.bin_edges`

  @property
  def kl_99(self):
    """Nats that 99 % of the decided tokens do not exceed, to the edge of a bin of the histogram (a fifth)."""
    if not self.decided:
      return 0.0
    bin = int(np.searchsorted(np.cumsum(self.histogram), 0.99 * self.decided))
    return 0.0 if bin == 0 else min(float(ledger_lib.bin_edges()[bin]), self.max_kl)


@dataclasses.dataclass(frozen=True)
class Stats:
  """What happened in a batch, or in several: the counts add up, the ratios follow. Ratios of nothing are 0."""

  new_tokens: int  # in the answers
  decoded: int  # also those past a stop string, decoded before the host saw it
  verifier_calls: int  # rounds, summed over rows
  accepted_at: tuple[int, ...]  # rounds in which the token drafted at position i was kept
  tested_at: tuple[int, ...]  # rounds in which position i was put to the test: drafted, and all before it kept
  seconds: Seconds
  lossless: bool = True  # whether the tokens follow the verifier's own law
  spent: Spent | None = None  # None if no ledger was kept
  # Where the number of drafted tokens was chosen: the verifier calls that had K = 0, 1, ... of them. Else None.
  calls_by_num_draft: tuple[int, ...] | None = None

  @property
  def accepted(self):
    """Drafted tokens that were kept."""
    return sum(self.accepted_at)

  @property
  def drafted(self):
    """Drafted tokens put to the test: up to and including the first rejection of each round."""
    return sum(self.tested_at)

  @property
  def tokens_per_call(self):
    """Tokens a verifier call yields a row."""
    return _ratio(self.decoded, self.verifier_calls)

  @property
  def accepted_len(self):
    """The paper's AL: drafted tokens kept a round, mean over rounds of live rows."""
    return _ratio(self.accepted, self.verifier_calls)

  @property
  def acceptance_rate(self):
    """Share of the drafted tokens put to the test that were kept."""
    return _ratio(self.accepted, self.drafted)

  @property
  def position_rate(self):
    """Share of rounds in which the token at each position was kept."""
    return tuple(_ratio(a, self.verifier_calls) for a in self.accepted_at)

  @property
  def position_rate_given_tested(self):
    """Share of the rounds that got as far as each position in which its token was kept."""
    return tuple(_ratio(a, t) for a, t in zip(self.accepted_at, self.tested_at))

  @property
  def kl_per_token(self):
    """Nats spent, over all tokens decoded; None if no ledger was kept."""
    return None if self.spent is None else _ratio(self.spent.kl, self.decoded)

  @property
  def kl_99(self):
    """Nats that 99 % of the tokens decided by the rule do not exceed; None if no ledger was kept."""
    return None if self.spent is None else self.spent.kl_99

  @property
  def tokens_per_second(self):
    """Tokens a second after the first round, all rows together, compilation left out."""
    return _ratio(self.seconds.decoded, self.seconds.decode)


def summarize(state, prompt_length, new_tokens, seconds, lossless, calls_by_num_draft=None) -> Stats:
  """The figures of a finished (or interrupted) `DecodeState`.

  Args: prompt_length int[B], where each row started; new_tokens, how many tokens were kept of what was decoded;
    lossless, whether the rule was; calls_by_num_draft, counts, where that number was chosen.
  """
  length, rounds, counters, ledger = sharding.fetch((state.length, state.round, state.stats, state.ledger))
  spent = ledger and Spent(
      decided=int(ledger.decided.sum()),
      kl=float(ledger.kl.astype(np.float64).sum()),
      max_kl=float(ledger.max_kl.max()),
      chi2=float(ledger.chi2.astype(np.float64).sum()),
      flips=int(ledger.flips.sum()),
      histogram=tuple(ledger.histogram.sum(axis=0).tolist()),
  )
  return Stats(
      new_tokens=new_tokens,
      decoded=int((length - np.asarray(prompt_length)).sum()),
      verifier_calls=int(rounds.sum()),
      accepted_at=tuple(counters.accepted.sum(axis=0).tolist()),
      tested_at=tuple(counters.tested.sum(axis=0).tolist()),
      seconds=seconds,
      lossless=lossless,
      spent=spent,
      calls_by_num_draft=None if calls_by_num_draft is None else tuple(map(int, calls_by_num_draft)),
  )


def merge(parts) -> Stats:
  """The figures of several batches together; the first token's seconds are those of the first batch."""
  total = lambda name: sum(getattr(part, name) for part in parts)
  # (A batch that was decoded without its draft has no columns.)
  columns = lambda name: tuple(map(sum, itertools.zip_longest(*(getattr(part, name) for part in parts), fillvalue=0)))
  seconds = lambda name: sum(getattr(part.seconds, name) for part in parts)
  ledgers = [part.spent for part in parts]
  spent = None if None in ledgers else Spent(
      **{name: sum(getattr(ledger, name) for ledger in ledgers) for name in ('decided', 'kl', 'chi2', 'flips')},
      max_kl=max(ledger.max_kl for ledger in ledgers),
      histogram=tuple(map(sum, zip(*(ledger.histogram for ledger in ledgers)))),
  )
  return Stats(
      new_tokens=total('new_tokens'),
      decoded=total('decoded'),
      verifier_calls=total('verifier_calls'),
      accepted_at=columns('accepted_at'),
      tested_at=columns('tested_at'),
      seconds=Seconds(seconds('compile'), parts[0].seconds.first_token, seconds('decode'), seconds('decoded'),
                      seconds('measure')),
      lossless=all(part.lossless for part in parts),
      spent=spent,
      calls_by_num_draft=None if parts[0].calls_by_num_draft is None else columns('calls_by_num_draft'),
  )


class CompileClock:
  """Counts the seconds that JAX spends on making programs, by its own events, or by the clock."""

  def __init__(self):
    self._spans = []

  def _record(self, event, duration, **_):
    if event.startswith('/jax/core/compile/'):
      end = time.perf_counter()
      self._spans.append((end - duration, end))

  @property
  def seconds(self):
    """The length of the union of the events: traces nest."""
    total, reached = 0.0, 0.0
    for start, end in sorted(self._spans):
      total += max(0.0, end - max(start, reached))
      reached = max(reached, end)
    return total

  def count(self, work):
    """Counts all the time that work() takes."""
    start = time.perf_counter()
    work()
    self.count_since(start)

  def count_since(self, start):
    """Counts all the time since `start`, by `time.perf_counter`."""
    self._spans.append((start, time.perf_counter()))

  @contextlib.contextmanager
  def running(self):
    """Counts while the context is open."""
    jax.monitoring.register_event_duration_secs_listener(self._record)
    try:
      yield self
    finally:
      jax.monitoring.unregister_event_duration_listener(self._record)
