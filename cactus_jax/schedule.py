"""How many tokens to draft a round: what passes cost, what is kept, and the number that gives most tokens a second.

A round of K drafted tokens gives AL(K) + 1 tokens, for one pass of the verifier over K + 1 tokens and K steps of the
draft. K = 0 is plain decoding. The law of the text is that of any fixed K: the number depends on rounds that are over
and on costs, never on what a round is about to draw.
"""

import dataclasses
import functools
import hashlib
import json
import math
import numbers
import os
import pathlib
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import decode, files
from cactus_jax.sampling import to_probs

# Numbers of drafted tokens to choose from, up to the largest allowed, which is one too: each is a program to compile.
CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# Rounds from one choice to the next: as many as there were, between these. (Each choice ends a call of the program.)
LEAST_ROUNDS, MOST_ROUNDS = 4, 16
# Before anything is known of the drafts, as if so many tokens had been put to the test and this share of them kept. The
# share is high since a draft that is not tried is never known.
PRIOR_TESTS, PRIOR_RATE = 4.0, 0.7
# The number changes only for a gain of so much: predictions are no better than that.
LEAST_GAIN = 0.03
# Costs are medians of TURNS, each of STEPS passes, so that calling a compiled program is not counted as running it.
TURNS, STEPS = 3, 4

VERSION = 2  # of what is measured: costs that were kept of another one are not read

_measured = {}  # fingerprint -> Costs: of this process


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of what a round is made of, for one batch. Raises ValueError for what are no seconds."""

  verify: tuple[float, ...]  # a pass of the verifier over T = 1, 2, ... tokens a row
  draft: float  # a step of the draft after its first
  first: float | None = None  # its first pass, which re-reads the end of the text; None: as any other

  def __post_init__(self):
    is_seconds = lambda value: isinstance(value, numbers.Real) and math.isfinite(value) and value >= 0
    if not isinstance(self.verify, (tuple, list)) or not self.verify or not all(
        is_seconds(value) and value > 0 for value in self.verify):
      raise ValueError(f'verify={self.verify!r}: need seconds > 0 of passes over 1, 2, ... tokens.')
    for name in ('draft', 'first'):
      value = getattr(self, name)
      if not is_seconds(value) and not (name == 'first' and value is None):
        raise ValueError(f'{name}={value!r}: need seconds >= 0.')
    object.__setattr__(self, 'verify', tuple(map(float, self.verify)))

  def round(self, num_draft) -> float:
    """Seconds of a round of so many drafted tokens."""
    first = self.draft if self.first is None else self.first
    return self.verify[num_draft] + (first + (num_draft - 1) * self.draft if num_draft else 0.0)


@dataclasses.dataclass(frozen=True)
class AutoDraft:
  """To be given as num_draft: the number of drafted tokens that decodes fastest, chosen anew every few rounds.

  With costs given, the same call makes the same choices. Measured ones differ from run to run, and with the number of
  drafted tokens changes which tokens are drawn, though not their law.
  """

  max_num_draft: int = 8
  costs: Costs | None = None  # None: measured, once for each pair of models, batch and length of the buffers
  folder: str | os.PathLike | None = None  # where measured costs are kept for other processes; None: nowhere

  def __post_init__(self):
    most = self.max_num_draft
    if not isinstance(most, (int, np.integer)) or isinstance(most, bool) or most < 1:
      raise ValueError(f'max_num_draft={most!r}: need a whole number of at least 1.')
    if self.costs is not None and not isinstance(self.costs, Costs):
      raise ValueError(f'costs={self.costs!r:.60}: need Costs(verify, draft), in seconds, or None.')
    if self.costs is not None and len(self.costs.verify) != most + 1:
      raise ValueError(f'costs has the seconds of {len(self.costs.verify)} passes: max_num_draft={most} needs '
                       f'{most + 1}, over 1 to {most + 1} tokens.')
    if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
      raise ValueError(f'folder={self.folder!r:.60}: need the path of a folder, or None.')


def acceptance_rates(accepted, reached) -> np.ndarray:
  """The chance at each position that its token is kept, given that all before it were.

  Each position is taken to be like the one before it, the first like the prior, until it has been seen often enough; so
  one never reached has the rate of the last that was.
  """
  rates, rate = [], PRIOR_RATE
  for a, r in zip(accepted, reached, strict=True):
    rate = (float(a) + PRIOR_TESTS * rate) / (float(r) + PRIOR_TESTS)
    rates.append(rate)
  return np.array(rates)


def tokens_per_second(costs, rates, num_draft) -> float:
  """What a row is predicted to gain: (AL(K) + 1) / seconds of a round.

  Args: costs, `Costs`; rates, of at least num_draft positions, as from `acceptance_rates`.
  """
  return (np.sum(np.cumprod(rates[:num_draft])) + 1) / costs.round(num_draft)


def best_num_draft(costs, accepted, reached, current=None) -> int:
  """The candidate, from 0 to the number of positions, with most tokens a second; of equals the smallest.

  Args:
    costs: `Costs` of at least so many drafted tokens and one.
    accepted: rounds in which the token at each position was kept.
    reached: rounds that asked for a token at that position and kept all before it; those in which the draft then had
      none to offer count too, since nothing was gained there.
    current: the number in use, if any: it stays unless another is better by `LEAST_GAIN`.
  """
  most, rates = len(reached), acceptance_rates(accepted, reached)
  speed = functools.partial(tokens_per_second, costs, rates)
  best = max(sorted({k for k in CANDIDATES if k < most} | {most}), key=speed)
  return current if current is not None and speed(best) < (1 + LEAST_GAIN) * speed(current) else best


class Chooser:
  """The host's view of the drafts of a batch, and how many tokens the next rounds draft: `num_draft`."""

  def __init__(self, costs, max_num_draft, batch):
    self._costs, self._rounds, self._due = costs, 0, 1 + LEAST_ROUNDS
    self._seen = np.zeros(batch, int), np.zeros((batch, max_num_draft), int)
    self._reached = np.zeros((batch, max_num_draft), int)
    self.calls = np.zeros(max_num_draft + 1, int)  # verifier calls, rows together, by the number of drafted tokens
    self.num_draft = best_num_draft(costs, *np.zeros((2, max_num_draft)))

  @property
  def rounds_to_choice(self):
    """Rounds from here to the next choice, while anything is drafted."""
    return self._due - self._rounds

  def look(self, rounds_B, accepted_BK, done_B):
    """Takes note of rounds of num_draft tokens, and of `num_draft` for the next; of the rows that go on, all count.

    Args: rounds_B, accepted_BK, counters of the state after them (a state without draft has none of the latter).
    """
    before_B, before_BK = self._seen
    passed_B, K = rounds_B - before_B, self.num_draft
    self.calls[K] += passed_B.sum()
    self._rounds += passed_B.max()
    if not K:
      self._seen = rounds_B, before_BK
      return  # the draft has not read what was written since: it stays out to the end of the text
    self._reached[:, 0] += passed_B
    self._reached[:, 1:K] += (accepted_BK - before_BK)[:, : K - 1]
    self._seen = rounds_B, accepted_BK
    # The host may look more often, as it does to stream; the choices are the same.
    if self._rounds >= self._due:
      self._due = self._rounds + min(max(self._rounds - 1, LEAST_ROUNDS), MOST_ROUNDS)
      live_B = ~done_B
      self.num_draft = best_num_draft(
          self._costs, accepted_BK[live_B].sum(axis=0), self._reached[live_B].sum(axis=0), K)


def costs_of(target, draft, sampling, batch, config, folder, make_state) -> Costs:
  """What passes cost, measured unless this process or the folder knows it.

  Args:
    sampling: `SamplingParams` with leaves [B]. config: `DecodeConfig` of the most drafted tokens a round.
    folder: a path or None. make_state: makes the state after `prefill` that is measured on, to be thrown away.
  """
  # How early a draft ends is a matter of the text: its steps are measured whole, for any stop_entropy.
  config = dataclasses.replace(config, stop_entropy=None)
  name = fingerprint(target, draft, batch, config)
  if name not in _measured:
    path = None if folder is None else pathlib.Path(folder) / f'{name}.json'
    costs = path and _read(path, config.num_draft)
    if costs is None:
      costs = measure(target, draft, sampling, make_state(), config)
      if path:
        _write(path, costs)
    _measured[name] = costs
  return _measured[name]


def cores() -> int:
  """CPU cores that this process may use: fewer than there are where it is pinned to some."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def fingerprint(target, draft, batch, config) -> str:
  """A name for whatever the costs depend on: kinds and shapes of both models, batch, buffers, devices."""
  leaves, tree = jax.tree.flatten((target, draft))
  shapes = [(jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves]
  devices = jax.device_count(), jax.devices()[0].device_kind, cores()
  everything = VERSION, str(tree), shapes, batch, config, devices, jax.__version__
  return hashlib.sha256(repr(everything).encode()).hexdigest()[:16]


def _read(path, max_num_draft):
  """The costs in a file; None if there is none, or none of use."""
  try:
    return AutoDraft(max_num_draft, Costs(**json.loads(path.read_text()))).costs
  except (OSError, ValueError, TypeError):
    return None


def _write(path, costs):
  """Never half a file, whoever else writes or reads it."""
  try:
    with files.new_file(path) as file:
      file.write(json.dumps(dataclasses.asdict(costs)) + '\n')
  except OSError as error:
    warnings.warn(f'measured costs are not kept: {error}', stacklevel=2)


def measure(target, draft, sampling, state, config) -> Costs:
  """What passes over the text of `state` cost. The state is used up: its buffers are given to the programs.

  Between the widths that are timed, a pass of the verifier costs what is on the line between them. The rule and its
  ledger are left out: a rule that must solve for its law makes long drafts dearer than this says.
  """
  K = config.num_draft
  widths, lengths = sorted({1, 2, K // 2 + 1, K + 1}), sorted({1, K})
  programs = {
      **{('verify', T): functools.partial(_passes, target, sampling, tokens_BT=jnp.zeros(
          (state.length.shape[0], T), jnp.int32)) for T in widths},
      **{('draft', k): functools.partial(
          _proposals, draft, sampling, config=dataclasses.replace(config, num_draft=k)) for k in lengths},
  }
  times = {name: [] for name in programs}
  for turn in range(TURNS + 2):  # two do not count: the first compiles, and on a mesh the second may once more
    for name, program in programs.items():  # in turns, so that a machine whose speed drifts drifts for all
      start = time.perf_counter()
      state = jax.block_until_ready(program(state=state))
      if turn > 1:
        times[name].append((time.perf_counter() - start) / STEPS)
  seconds = {name: float(np.median(times[name])) for name in times}
  first = seconds['draft', 1]
  return Costs(
      verify=tuple(np.interp(range(1, K + 2), widths, [seconds['verify', T] for T in widths]).tolist()),
      draft=max(seconds['draft', K] - first, 0.0) / (K - 1) if K > 1 else first,
      first=first,
  )


# In both programs what a step reads depends on what the step before it drew: nothing can be taken out of the loop.


@functools.partial(jax.jit, donate_argnames='state')
def _passes(target, sampling, state, tokens_BT):
  """The state after `STEPS` passes of the verifier over T tokens a row, with their laws."""
  positions_BT = state.length[:, None] - 1 + jnp.arange(tokens_BT.shape[1])[None]

  def one(_, carry):
    tokens_BT, cache = carry
    logits_BTV, cache = target(tokens_BT, positions_BT, cache)
    return jnp.argmax(to_probs(logits_BTV, sampling), axis=-1).astype(jnp.int32), cache

  _, cache = jax.lax.fori_loop(0, STEPS, one, (tokens_BT, state.target_cache))
  return state.replace(target_cache=cache)


@functools.partial(jax.jit, static_argnames='config', donate_argnames='state')
def _proposals(draft, sampling, state, config):
  """The state after `STEPS` proposals of config.num_draft tokens a row, each in place of the last token of the text."""
  rows_B = jnp.arange(state.length.shape[0])

  def one(_, state):
    drafted, cache = decode.propose(draft, sampling, state, state.keys, config, back=config.num_draft + 1)
    tokens = state.tokens.at[rows_B, state.length - 1].set(drafted.tokens[:, -1])
    return state.replace(tokens=tokens, draft_cache=cache)

  return jax.lax.fori_loop(0, STEPS, one, state)
