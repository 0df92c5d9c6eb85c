"""Conversations that a verifier writes itself, with its laws: what its draft is distilled from.

The verifier first writes a user's turn, where its chat template expects one, then answers it; or it answers prompts
that are given. At each token of an answer its likeliest tokens are kept with their log-probabilities, and at each
position some hidden states if wanted, so that the verifier never has to read the text again. Rows that end are
replaced, so that none waits for the longest.

A corpus is a folder of shards, each of which appears under its name only when it is whole: `shard-00000.npz` with
  index i32[N], the number of each conversation; dropped i32[], those that were not kept; digest u32[N], of prompts
  prompt_length, length i32[N], tokens; length counts prompt and answer
  tokens i32[sum length], one conversation after another
  top_ids i32[sum (length - prompt_length), top], top_logprobs f16[...]: of the law of each answered token, T = 1, nats
  hidden f16[sum length, (1+N)*D], of each position but the last of a conversation, which the verifier has not read:
    what N layers are given, past their norms, and what the head is
and `corpus.json`, which has the settings that all shards share.
"""

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import warnings
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import decode, files, text
from cactus_jax.decode import DecodeConfig, Finish
from cactus_jax.models import hf, weights
from cactus_jax.models.transformer import check_hidden_layers
from cactus_jax.records import differences
from cactus_jax.rules import Exact
from cactus_jax.sampling import SamplingParams

SETTINGS = 'corpus.json'
SHARD = 128  # conversations a file
GIVE_UP = 1000  # texts in a row of which none could be kept
DISTINCT = 0.5  # an answer with a smaller share of distinct runs of four tokens is a loop, and is dropped
MARK = 'MARKmarkMARK'  # stands for the user's turn in a chat template

# How people begin, for `Settings.openings`: what a verifier asks itself is otherwise much of a kind. (None ends in a
# space, which the next word's token brings.)
OPENINGS = (
    'Summarize the following article:', 'Summarize:', 'Write a one-sentence summary of this text:\n',
    'Read the passage and answer the question.\n\nPassage:', 'Context:', 'Use the documents below to answer.\n\n',
    'Question:', 'Who', 'When', 'Where', 'Which', 'How many', 'What is the name of',
    'Translate from German to English:', 'Translate this into English:', 'Translate into French:',
    'Rewrite the following paragraph:', 'Correct the grammar of this text:', 'Make this more formal:\n',
    'Extract all names and dates from this text:', 'Put the following data into a table:\n', 'List',
    'Classify the sentiment of this review:', 'Write a Python function that', 'Write a program in C++ that',
    'Explain what this code does:\n', 'Write HTML and JavaScript for', 'Solve for x:', 'What is the sum of',
    'A train', 'If', 'Suppose', 'Pretend to be', 'You are a', 'Imagine you are', 'Act as',
    'Write a blog post about', 'Write an email to', 'Write a short story', 'Write a poem', 'Describe', 'Compare',
    'Explain', 'Why', 'How does', 'What are the differences between', 'Give me advice on', 'Is it true that',
    'Discuss the history of', 'In economics,', 'In physics,', 'What happens when', 'Can you help me',
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a corpus is made with. Raises ValueError for what makes no corpus."""

  temperatures: tuple[float, ...] = (0.6, 0.6, 0.6, 1.0)  # of answers, in turn
  ask_temperature: float = 1.0  # of user's turns
  top_k: int = 20
  top_p: float = 0.95
  top: int = 32  # likeliest tokens whose log-probabilities are kept
  # Of the verifier, rising: what they are given is kept beside what the head is; None keeps no hidden states.
  hidden_layers: tuple[int, ...] | None = ()
  openings: tuple[str, ...] = ()  # of user's turns: every other turn that the verifier writes goes on from one of them
  given_every: int = 2  # of so many conversations one answers a prompt that is given, as long as there are some
  max_prompt: int = 144  # tokens, template included
  max_answer: int = 240  # tokens
  seed: int = 0
  raw: bool = False  # without a chat template: the text goes on from the prompt, or from its first token

  def __post_init__(self):
    for name in ('top', 'max_prompt', 'max_answer', 'given_every'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: need at least 1.')
    if not self.temperatures:
      raise ValueError('temperatures is empty: need at least one.')
    if not self.top_k <= self.top:
      raise ValueError(f'top_k={self.top_k}: the laws are kept of {self.top} tokens, so it can be at most that.')
    object.__setattr__(self, 'openings', tuple(self.openings))
    if self.openings and self.raw:
      raise ValueError('openings: they begin a user\'s turn, which there is none of in raw texts.')
    if self.hidden_layers is not None:
      object.__setattr__(self, 'hidden_layers', tuple(self.hidden_layers))  # a list could be no part of a program's key
    for temperature in (*self.temperatures, self.ask_temperature):
      SamplingParams(temperature, self.top_k, self.top_p)  # sees that they are numbers it can have


@dataclasses.dataclass(frozen=True)
class Conversation:
  """One conversation of a corpus; see the file's head."""

  index: int
  prompt_length: int
  tokens: np.ndarray
  top_ids: np.ndarray
  top_logprobs: np.ndarray
  hidden: np.ndarray | None


@dataclasses.dataclass
class _Row:
  """What stands in a row of the batch."""

  index: int
  asks: bool  # whether it writes the user's turn
  prompt: list[int]


def write(folder, target, tokenizer, prompts=(), *, num_tokens, settings=Settings(), batch=64, progress=None):
  """Lets the verifier write conversations until the folder has num_tokens answered tokens; goes on where it stopped.

  Args:
    prompts: strings or conversations that are answered, as settings.given_every says; the verifier writes all others
      itself.
    batch: rows decoded together.
    progress: called with the number of answered tokens in the folder and in memory.
  Returns: the number of answered tokens in the folder.
  Raises: ValueError for a folder with other settings or a damaged shard, a tokenizer without chat template (unless
    settings.raw), prompts that are all longer than settings.max_prompt, and for a verifier whose texts are of no use:
    NaN, or GIVE_UP in a row that could not be kept.
  """
  folder = pathlib.Path(folder)
  encoded = text.encode(prompts, tokenizer, settings.raw) if prompts else []
  prepare(folder, settings, target, tokenizer, encoded)
  if (there := count_tokens(folder)) >= num_tokens:
    return there
  job = _Job(folder, target, tokenizer, encoded, settings, batch, there)
  try:
    while job.num_tokens < num_tokens:
      job.step()
      if progress is not None:
        progress(job.num_tokens)
  finally:
    job.save()
  return job.num_tokens


def count_tokens(folder) -> int:
  """Answered tokens in a corpus. Raises ValueError for a damaged shard."""
  lengths = [_load(path, ('length', 'prompt_length')) for path in shards(folder)]
  return sum(int((shard['length'] - shard['prompt_length']).sum()) for shard in lengths)


def prepare(folder, settings, target, tokenizer, prompts):
  """Makes the folder of a corpus, or sees that it is one of the same settings. Raises ValueError if it is not."""
  longest = settings.max_prompt + settings.max_answer
  if longest > target.config.max_length:
    raise ValueError(f'max_prompt={settings.max_prompt} and max_answer={settings.max_answer} are {longest} tokens, the '
                     f'context of the verifier is {target.config.max_length}.')
  if settings.top > target.config.vocab_size:
    raise ValueError(f'top={settings.top}: the verifier has {target.config.vocab_size} tokens.')
  if settings.hidden_layers is not None:
    check_hidden_layers(settings.hidden_layers, target.config)
  ours = json.loads(json.dumps(dataclasses.asdict(settings))) | _writer(target, tokenizer)
  ours['prompts'] = f'{len(prompts)} ({zlib.crc32(json.dumps(prompts).encode())})'
  path = folder / SETTINGS
  if path.exists():
    _compare(folder, ours, 'of other settings', 'choose another folder')
    return
  if shards(folder):
    raise ValueError(f'{folder}: holds shards without {SETTINGS}; choose another folder.')
  try:
    with files.new_file(path) as file:
      json.dump(ours, file, indent=1)
  except OSError as error:
    raise ValueError(f'{folder}: could not be written ({error}).') from error


def check_verifier(folder, target, tokenizer):
  """Raises ValueError for a corpus that was written by another verifier, or for none."""
  _compare(folder, _writer(target, tokenizer), 'of another verifier', 'write one with this verifier')


def _writer(target, tokenizer):
  return {'vocab_size': target.config.vocab_size, 'embed_dim': target.config.embed_dim,
          'tokenizer': hf.digest(tokenizer), 'weights': weights.digest(target)}


def _compare(folder, ours, what, advice):
  """Raises ValueError where settings of a corpus are not these."""
  if other := differences(_read_settings(folder), ours):
    raise ValueError(f'{folder} holds a corpus {what} ({"; ".join(other)}): {advice}.')


def _read_settings(folder) -> dict:
  path = pathlib.Path(folder) / SETTINGS
  try:
    settings = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(settings, dict):
      raise ValueError(f'it holds {settings!r:.40}')
  except (OSError, ValueError) as error:
    raise ValueError(f'{path}: damaged or missing ({error}); choose another folder.') from None
  return settings


class _Job:
  """A corpus in the making: the rows that are decoded, what waits for one, and what waits for a file."""

  def __init__(self, folder, target, tokenizer, encoded, settings, batch, num_tokens):
    self._folder, self._target, self._tokenizer, self._settings = folder, target, tokenizer, settings
    self._opening = opening(tokenizer, settings.raw)
    if len(self._opening) >= settings.max_prompt and not settings.raw:
      raise ValueError(f'max_prompt={settings.max_prompt}: the chat template alone takes {len(self._opening)} tokens '
                       'before a user\'s turn.')
    begun = [list(tokenizer(one, add_special_tokens=False)['input_ids']) for one in settings.openings]
    for one, tokens in zip(settings.openings, begun):
      if not 0 < len(tokens) < settings.max_prompt - len(self._opening):
        raise ValueError(f'opening {one!r:.60} has {len(tokens)} tokens: need at least 1, and with the chat template '
                         f'fewer than max_prompt={settings.max_prompt}.')
    self._begun = [*begun, *[[]] * max(len(begun), 1)]  # every other turn goes on from nothing
    self._given = [prompt for prompt in encoded if len(prompt) <= settings.max_prompt]
    if encoded and not self._given:
      raise ValueError(f'all {len(encoded)} prompts are longer than max_prompt={settings.max_prompt} tokens.')
    if len(self._given) < len(encoded):
      warnings.warn(f'{len(encoded) - len(self._given)} of {len(encoded)} prompts are longer than max_prompt='
                    f'{settings.max_prompt} tokens, and are left out.', stacklevel=3)
    self._config = DecodeConfig(
        num_draft=1,
        max_length=settings.max_prompt + settings.max_answer,
        vocab_size=len(tokenizer),
        eos_ids=text.end_tokens(target, tokenizer),
        hidden_layers=settings.hidden_layers)
    for path in folder.glob('.shard-*.partial-*'):  # what a kill left of one
      path.unlink()
    self._taken, self._digests, self.num_tokens, self._num_shards = set(), set(), num_tokens, 0
    for path in shards(folder):
      shard = _load(path, ('index', 'dropped', 'digest'))
      self._taken |= {*shard['index'].tolist(), *shard['dropped'].tolist()}
      self._digests |= set(shard['digest'].tolist())
      self._num_shards = int(path.stem.rpartition('-')[2]) + 1  # of those before it some may have been deleted
    self._numbers = (i for i in itertools.count() if i not in self._taken)
    self._waiting = collections.deque()  # answers whose prompt has been written
    self._kept, self._dropped = [], []  # since the last shard
    self._in_vain = 0  # texts dropped since one was kept

    self._rows: list[_Row | None] = [None] * batch
    self._temperature = np.ones(batch, np.float32)
    self._count = np.zeros(batch, np.int64)  # laws of each row so far
    room = (batch, max(settings.max_answer, settings.max_prompt), settings.top)
    self._top_ids, self._top_logprobs = np.zeros(room, np.int32), np.zeros(room, np.float16)
    self._entering = max(batch // 8, 1)  # rows that are filled together
    idle = self._prefill([_Row(0, True, self._opening[:1])] * batch)
    self._state = idle.replace(done=jnp.ones(batch, bool))
    self._fill()

  def step(self):
    """One token of every row; rows that have ended make room for others."""
    sampling = SamplingParams(temperature=self._temperature, top_k=self._settings.top_k, top_p=self._settings.top_p)
    self._state, seen = _step(self._target, sampling, self._state, self._config, self._settings.top)
    done, top_ids, top_logprobs = jax.device_get(seen)
    live = np.flatnonzero([row is not None for row in self._rows])
    self._top_ids[live, self._count[live]] = top_ids[live]
    self._top_logprobs[live, self._count[live]] = top_logprobs[live]
    self._count[live] += 1
    if done[live].any():
      self._receive(live[done[live]])
      if sum(row is None for row in self._rows) >= self._entering:
        self._fill()

  def save(self):
    """Writes what has ended since the last shard to one of its own."""
    if not self._kept and not self._dropped:
      return
    # Let go of first: whatever interrupts this, nothing is written twice.
    kept, dropped, number = self._kept, self._dropped, self._num_shards
    self._kept, self._dropped, self._num_shards = [], [], number + 1
    join = lambda name, dtype: np.concatenate(
        [np.asarray(getattr(one, name), dtype) for one in kept] or [np.zeros(0, dtype)])
    contents = {
        'index': np.array([one.index for one in kept], np.int32),
        'dropped': np.array(dropped, np.int32),
        'digest': np.array([self._digest(one) for one in kept], np.uint32),
        'prompt_length': np.array([one.prompt_length for one in kept], np.int32),
        'length': np.array([len(one.tokens) for one in kept], np.int32),
        'tokens': join('tokens', np.int32),
        'top_ids': join('top_ids', np.int32),
        'top_logprobs': join('top_logprobs', np.float16),
    }
    if self._settings.hidden_layers is not None:
      contents['hidden'] = join('hidden', np.float16)
    path = self._folder / f'shard-{number:05}.npz'
    try:
      with files.new_file(path, 'wb') as file:
        np.savez(file, **contents)
    except OSError as error:
      raise ValueError(f'{path} could not be written ({error}); is the disk full? The shards before it are whole: the '
                       'same command goes on after them.') from error

  def _receive(self, ended):
    """Takes the texts of rows that have ended."""
    tokens, length, finish = jax.device_get((self._state.tokens, self._state.length, self._state.finish))
    for i in ended:
      row, self._rows[i] = self._rows[i], None
      if finish[i] == Finish.NAN:
        raise ValueError('the verifier gave logits that are no numbers: are its weights damaged?')
      new = tokens[i, len(row.prompt) : length[i]]
      if row.asks:
        self._ask(row, new[:-1] if finish[i] == Finish.EOS else [])
        continue
      conversation = Conversation(
          index=row.index, prompt_length=len(row.prompt), tokens=tokens[i, : length[i]],
          top_ids=self._top_ids[i, : len(new)].copy(), top_logprobs=self._top_logprobs[i, : len(new)].copy(),
          hidden=None if self._settings.hidden_layers is None else self._hidden(i, length[i]))
      repeats = self._settings.raw and self._digest(conversation) in self._digests
      if repeats or is_degenerate(new):
        self._drop(row)
      else:
        self._digests.add(self._digest(conversation))
        self._kept.append(conversation)
        self.num_tokens += len(new)
        self._in_vain = 0
    if len(self._kept) >= SHARD:
      self.save()

  def _ask(self, row, rest):
    """Has a user's turn answered, unless it is none (it did not end), or was there before."""
    tokens = [*row.prompt[len(self._opening) :], *rest] if len(rest) else []
    message = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
    prompt = text.encode([message], self._tokenizer, raw=False)[0] if message else []
    if not 0 < len(prompt) <= self._settings.max_prompt or not self._is_new(prompt):
      self._drop(row)
    else:
      self._waiting.append(_Row(row.index, False, prompt))

  def _drop(self, row):
    self._dropped.append(row.index)
    self._in_vain += 1
    if self._in_vain >= max(GIVE_UP, 10 * len(self._rows)):
      raise ValueError(f'of the last {self._in_vain} texts of the verifier none could be kept: they are loops, or '
                       'user\'s turns that do not end, or were there before. Give it prompts, or other temperatures.')

  def _is_new(self, prompt):
    digest = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
    is_new = digest not in self._digests
    self._digests.add(digest)
    return is_new

  def _digest(self, one):
    """By what a conversation is told from others: its prompt, or all of it where there is no prompt."""
    tokens = one.tokens if self._settings.raw else one.tokens[: one.prompt_length]
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())

  def _hidden(self, i, length):
    hidden = np.asarray(_row_of(self._state.target_cache.hidden, i))[:length].astype(np.float16)
    hidden[-1] = 0  # of the last token, which was not read
    return hidden

  def _next_row(self):
    """What enters the batch next: an answer that waits, or the next conversation."""
    if self._waiting:
      return self._waiting.popleft()
    while True:
      i = next(self._numbers)
      which, asks = divmod(i, self._settings.given_every)
      if asks or which >= len(self._given):
        return _Row(i, not self._settings.raw, [*self._opening, *self._beginning(i)])
      if self._settings.raw or self._is_new(self._given[which]):
        return _Row(i, False, self._given[which])
      self._dropped.append(i)

  def _beginning(self, i):
    """What the user's turn of a conversation begins with, tokens: the same whatever else is written."""
    return self._begun[np.random.default_rng((self._settings.seed, i)).integers(len(self._begun))]

  def _fill(self):
    """Gives rows that are free the next texts, those of like length together."""
    free = [i for i, row in enumerate(self._rows) if row is None]
    pairs = list(zip(free, sorted((self._next_row() for _ in free), key=lambda row: len(row.prompt))))
    for start in range(0, len(pairs), self._entering):
      self._enter(pairs[start : start + self._entering])

  def _enter(self, pairs):
    places, rows = zip(*pairs)
    extra = self._entering - len(rows)
    fresh = self._prefill([*rows, *rows[:1] * extra])
    where = np.array([*places, *[len(self._rows)] * extra], np.int32)
    self._state = decode.replace_rows(self._state, where, fresh)
    temperatures = self._settings.temperatures
    for place, row in pairs:
      self._rows[place], self._count[place] = row, 0
      answer = temperatures[row.index % len(temperatures)]
      self._temperature[place] = self._settings.ask_temperature if row.asks else answer

  def _keys(self, rows):
    """The same for a conversation, whatever was decoded before it."""
    seeds = [zlib.crc32(repr((self._settings.seed, row.index, row.asks)).encode()) for row in rows]
    return text.row_keys(seeds, [row.prompt for row in rows])

  def _prefill(self, rows):
    length = np.array([len(row.prompt) for row in rows], np.int32)
    padded = np.zeros((len(rows), min(text.bucket(length.max()), self._config.capacity)), np.int32)
    for i, row in enumerate(rows):
      padded[i, : len(row.prompt)] = row.prompt
    most = [self._settings.max_prompt - len(row.prompt) if row.asks else self._settings.max_answer for row in rows]
    limit = length + np.maximum(np.array(most, np.int32), 1)
    return decode.prefill(self._target, None, padded, length, self._keys(rows), limit, self._config)


@functools.partial(jax.jit, static_argnames=('config', 'top'), donate_argnames='state')
def _step(target, sampling, state, config, top):
  """A round of plain decoding: the state, and (whether each row has ended, its law's likeliest tokens, their ln)."""
  state, info = decode.decode_step(target, None, Exact(), sampling, state, config)
  logits_BV = info.target_logits[:, 0].astype(jnp.float32)
  top_BN, ids_BN = jax.lax.top_k(logits_BV, top)
  logprobs_BN = top_BN - jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
  return state, (state.done, ids_BN, logprobs_BN.astype(jnp.float16))


_row_of = jax.jit(lambda array, i: array[i])


def opening(tokenizer, raw=False) -> list[int]:
  """The tokens after which a user's turn begins; if raw, the one with which a text does.

  Raises ValueError for a tokenizer without a chat template unless raw, and for a template in which none begins.
  """
  if raw:
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
      raise ValueError('the tokenizer has no token with which a text begins: give prompts only.')
    return [first]
  if not tokenizer.chat_template:
    raise ValueError('this tokenizer has no chat template in which a user could be given a turn: use raw, for plain '
                     'text.')
  written = tokenizer.apply_chat_template([{'role': 'user', 'content': MARK}], tokenize=False)
  before, mark, _ = written.partition(MARK)
  if not mark or not before:
    raise ValueError('the chat template does not show where a user\'s turn begins: use raw, for plain text.')
  return list(tokenizer(before, add_special_tokens=False)['input_ids'])


def is_degenerate(answer) -> bool:
  """Whether an answer is a loop, or none: too few of its runs of four tokens are distinct."""
  runs = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
  return len(answer) < 2 or len(set(runs)) < DISTINCT * len(runs)


def shards(folder) -> list[pathlib.Path]:
  """The files of a corpus, in order."""
  return sorted(pathlib.Path(folder).glob('shard-*.npz'))


def read(path, hidden_layers=None) -> list[Conversation]:
  """The conversations of one shard.

  hidden_layers: of which layers their hidden states are, of those that were kept; None: they have none.
  Raises ValueError for a damaged file, and where hidden states that are asked for were not kept.
  """
  shard = _load(path, ('index', 'prompt_length', 'length', 'tokens', 'top_ids', 'top_logprobs'))
  hidden = None if hidden_layers is None else _hidden_of(pathlib.Path(path), hidden_layers)
  conversations, start, law = [], 0, 0
  for index, prompt, length in zip(shard['index'], shard['prompt_length'], shard['length']):
    here, laws = slice(start, start + length), slice(law, law + length - prompt)
    conversations.append(Conversation(
        int(index), int(prompt), shard['tokens'][here], shard['top_ids'][laws], shard['top_logprobs'][laws],
        None if hidden is None else hidden[here]))
    start, law = here.stop, laws.stop
  return conversations


def _hidden_of(path, hidden_layers):
  """The columns of a shard's hidden states that belong to some layers, and to the head."""
  settings = _read_settings(path.parent)
  kept = settings.get('hidden_layers')
  if kept is None or not set(hidden_layers) <= set(kept):
    there = 'no hidden states' if kept is None else f'those of layers {kept}'
    raise ValueError(f'{path.parent} has {there}; of layers {[*hidden_layers]} they are to be read: write it anew with '
                     'them.')
  D = settings['embed_dim']
  # A shard without conversations knows no width.
  hidden = _load(path, ('hidden',))['hidden'].reshape(-1, (len(kept) + 1) * D)
  places = [kept.index(i) for i in hidden_layers] + [len(kept)]
  if len(places) == len(kept) + 1:
    return hidden
  return np.concatenate([hidden[:, D * i : D * (i + 1)] for i in places], axis=1)


def _load(path, names):
  """The arrays of these names in a shard."""
  try:
    with np.load(path) as shard:
      return {name: shard[name] for name in names}
  except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(f'{path}: damaged ({error}); delete it, and the same command writes others.') from None
