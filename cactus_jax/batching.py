"""Many prompts, a few rows at a time: a row whose text has ended is given the next prompt at once.

In a fixed batch all rows wait for the longest answer. Here the loop runs until one of them has ended, the host takes
its text, and another prompt is read into its place: continuous batching. A row's draws depend on its seed, its prompt
and its own rounds only, so neither the order nor its neighbours make a difference to its text.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from cactus_jax import decode, metrics, sharding, text
from cactus_jax.decode import Finish
from cactus_jax.rules import Exact
from cactus_jax.sampling import SamplingParams
from cactus_jax.text import Completions

# Fewer prompts of one size than this many batches are decoded with the next larger ones: their buffers are too large,
# but fewer rows stay idle at the end.
BATCHES_OF_A_SIZE = 4


def generate_each(
    prompts: Sequence,
    *,
    target,
    tokenizer,
    draft=None,
    rule=Exact(),
    sampling: SamplingParams = SamplingParams(),
    num_draft: int = 4,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    raw: bool = False,
    draft_tokenizer=None,
    ledger: bool = False,
    block_verification: bool = False,
    stop_entropy: float | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Completions]]:
  """Answers many prompts, each as soon as it is finished.

  Args: as for `generate_text`, and
    num_draft: a number.
    rule, sampling, seed: numbers for all prompts, or one for each.
    batch_size: prompts decoded together, at most; on a mesh rounded up so that all groups of devices have as many.
    progress: called by the host now and then with the number of new tokens so far.
  Returns: an iterator over (index of the prompt, its answer), in the order in which they are finished; prompts that
    can become longest are begun first. In `stats.seconds` of an answer first_token is what reading the prompt took and
    decode its share of the seconds that went by while it had a row, so that they add up to the time of all, less
    compiling. What is done between two answers is not counted.
  Raises: ValueError, before anything is compiled, for input that cannot be answered.
  """
  return iter(_Batches(prompts, batch_size, progress, dict(
      target=target, tokenizer=tokenizer, draft=draft, rule=rule, sampling=sampling, num_draft=num_draft,
      max_new_tokens=max_new_tokens, stop=stop, seed=seed, raw=raw, draft_tokenizer=draft_tokenizer, ledger=ledger,
      block_verification=block_verification, stop_entropy=stop_entropy)))


class _Batches:
  """The rows that are decoded, and what waits for one."""

  def __init__(self, prompts, batch_size, progress, options):
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
      raise ValueError(f'batch_size={batch_size!r}: need a whole number of at least 1.')
    self._job = job = text.Job(prompts, **options)
    if job.auto:
      raise ValueError(f'num_draft={options["num_draft"]!r}: prompts that come and go share one number; give it.')
    groups = sharding.row_groups(job.mesh)
    in_groups = lambda count: -(-count // groups) * groups
    self._size = in_groups(min(batch_size, len(job.rows)))
    self._entering = max(self._size // 8, 1)  # prompts that are read together
    self._read_rows = in_groups(self._entering)  # rows of that pass, of which those beyond are idle
    self._progress, self._clock, self._programs = progress, metrics.CompileClock(), set()
    self._compiled = 0.0  # seconds of compiling that an answer has been charged with
    self._finished_tokens = 0

  def __iter__(self):
    for max_length, waiting in self._sizes():
      yield from self._decode(self._job.config(max_length), waiting)

  def _sizes(self):
    """[(tokens that the rows hold, prompts)], the largest first."""
    most = [self._job.max_length(i) for i in range(len(self._job.rows))]
    sizes = []
    for size in sorted(set(most), reverse=True):
      prompts = [i for i, length in enumerate(most) if length == size]
      if sizes and len(prompts) < BATCHES_OF_A_SIZE * self._size:
        sizes[-1][1].extend(prompts)
      else:
        sizes.append((size, prompts))
    return sizes

  def _decode(self, config, waiting):
    """Answers prompts in rows of one size."""
    waiting = waiting[::-1]
    self._config, self._rows = config, np.full(self._size, -1)  # the prompt in each row; -1: none
    self._reading, self._decoding = np.zeros(self._size), np.zeros(self._size)  # seconds of each row
    with self._clock.running():
      self._clock.count(self._begin)
    while waiting or self._busy.any():
      with self._clock.running():
        self._fill(waiting)
        answers = self._step()
      yield from answers

  @property
  def _busy(self):
    return self._rows >= 0

  def _begin(self):
    """A state of idle rows, and the program of the loop."""
    self._state = None  # lets go of larger caches before there are others
    self._state = self._job.prefill(self._rows, self._config)
    self._take_laws()
    self._advance(0, 1)

  def _timed(self, work):
    """Seconds that work() takes, those of compiling left out."""
    start, compiled = time.perf_counter(), self._clock.seconds
    work()
    return time.perf_counter() - start - (self._clock.seconds - compiled)

  def _fill(self, waiting):
    """Reads prompts into rows that are free, some at a time."""
    free = np.flatnonzero(~self._busy)
    while waiting and len(free) >= min(self._entering, len(waiting)):
      count = min(self._entering, len(waiting))
      places, free = free[:count], free[count:]
      self._enter(places, [waiting.pop() for _ in places])

  def _enter(self, places, prompts):
    idle = self._read_rows - len(prompts)
    where = np.array([*places, *[self._size] * idle], np.int32)

    def read():
      fresh = self._job.prefill(np.array([*prompts, *[-1] * idle]), self._config)
      self._state = decode.replace_rows(self._state, where, fresh)
      jax.block_until_ready(self._state)

    program = self._config, text.bucket(self._job.prompt_lengths(prompts).max())
    begun, compiled, seconds = time.perf_counter(), self._clock.seconds, self._timed(read)
    if program not in self._programs and (self._clock.seconds > compiled or jax.process_count() > 1):
      self._clock.count_since(begun)  # JAX's own count of what it takes to make a program is not all of it
      seconds = self._timed(read)
    self._programs.add(program)
    self._rows[places], self._reading[places], self._decoding[places] = prompts, seconds / len(prompts), 0.0
    self._take_laws()

  def _take_laws(self):
    self._laws = self._job.placed(self._job.of_rows(self._job.laws, self._rows))

  def _advance(self, max_rounds, min_live):
    rule, sampling = self._laws
    self._state = jax.block_until_ready(decode.generate(
        *self._job.models, rule, sampling, self._state, self._config, max_rounds, min_live))

  def _step(self):
    """Rounds until a row has ended, or the host must look; the answers there are."""
    busy = self._busy
    start = self._job.prompt_lengths(self._rows)
    stopped, held = {}, None

    def work():
      nonlocal held, stopped
      looks = bool(self._job.stop) or self._progress is not None
      self._advance(text.ROUNDS_PER_LOOK if looks else None, int(busy.sum()))
      held = text.fetch_rows(self._state)
      if self._job.stop:
        stopped = self._stops(start, held)
        found = np.isin(np.arange(self._size), list(stopped))
        ends = dict(done=held.done | found, finish=np.where(found, np.int32(Finish.STOP), held.finish))
        held, self._state = held.replace(**ends), self._state.replace(**self._job.placed(ends))

    self._decoding[busy] += self._timed(work) / busy.sum()
    if self._progress is not None:
      self._progress(self._finished_tokens + int((held.length - start)[busy].sum()))
    ended = np.flatnonzero(busy & held.done)
    answers = [(int(self._rows[row]), self._answer(row, held, start, stopped)) for row in ended]
    self._rows[ended] = -1
    return answers

  def _stops(self, start, held):
    """{row: (number of its tokens up to the first stop string, text before it)} of those in which there is one."""
    tokens = lambda row: held.tokens[row, start[row] : held.length[row]].tolist()
    found = {row: text.first_stop(self._job.tokenizer, tokens(row), self._job.stop)
             for row in np.flatnonzero(self._busy)}
    return {row: stop for row, stop in found.items() if stop}

  def _answer(self, row, held, start, stopped):
    held = jax.tree.map(lambda leaf: leaf[row : row + 1], held)
    decoded = int(held.length[0] - start[row])
    compiled, self._compiled = self._clock.seconds - self._compiled, self._clock.seconds
    seconds = metrics.Seconds(compiled, self._reading[row], self._decoding[row], decoded)
    self._finished_tokens += decoded
    return text.completions(self._job, held, start[row : row + 1], {0: stopped[row]} if row in stopped else {}, seconds)
