"""Prompts in, text out: the host's side of decoding.

The host tokenises once, sizes the buffers, lets the loop run for some rounds at a time and looks at the tokens in
between: that is where streaming, progress and stop strings live. No callback ever enters a compiled program.
"""

import bisect
import dataclasses
import inspect
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import jinja2
import numpy as np

from cactus_jax import decode, metrics, schedule, sharding
from cactus_jax import ledger as ledger_lib
from cactus_jax.decode import DecodeConfig, Finish
from cactus_jax.drafts import DraftSource
from cactus_jax.ledger import Budget
from cactus_jax.rules import Exact, Lenience, Static
from cactus_jax.sampling import Draft, SamplingParams, is_greedy
from cactus_jax.schedule import AutoDraft

# Rounds between two looks of the host when it must look for stop strings or report progress.
ROUNDS_PER_LOOK = 8


@dataclasses.dataclass(frozen=True)
class Completions:
  """The answers to a batch of prompts, row by row, on the host."""

  texts: list[str]
  tokens: list[list[int]]  # new tokens, an end-of-sequence token included
  from_draft: list[list[bool]]  # whether each new token was drafted (else recovered or bonus)
  logprobs: list[list[float]]  # nats, each new token by the verifier's unfiltered law at temperature 1
  # Of each new token: 'accepted' if it was drafted, 'recovered' if drawn where a drafted one was rejected, 'bonus' if
  # the verifier drew it after all of a round's draft was kept, as every token of plain decoding is.
  origins: list[list[str]]
  finish_reasons: list[str]  # 'eos', 'length', 'cache_full', 'stop' or 'nan'; 'running' amid a stream
  stats: metrics.Stats
  kl: list[float] | None = None  # nats that each row spent, by the ledger; None without one
  # With a ledger, ln of the probability of each new token by the law it was drawn from, and by the verifier's at the
  # same temperature and filters: their difference is the log-ratio that importance weights need. Else None.
  emitted_logprobs: list[list[float]] | None = None
  verifier_logprobs: list[list[float]] | None = None

  @property
  def lossless(self) -> bool:
    """Whether the tokens follow the verifier's own law."""
    return self.stats.lossless


def generate_text(
    prompts: Sequence,
    *,
    target,
    tokenizer,
    draft=None,
    rule=Exact(),
    sampling: SamplingParams = SamplingParams(),
    num_draft: int | str | AutoDraft = 4,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    raw: bool = False,
    draft_tokenizer=None,
    ledger: bool = False,
    block_verification: bool = False,
    stop_entropy: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Completions:
  """Answers a batch of prompts.

  Args:
    prompts: strings, or conversations as lists of {'role': ..., 'content': ...}.
    target: the verifier, a `Transformer`.
    tokenizer: its tokenizer (`load_tokenizer`).
    draft: a `Transformer` with the same tokenizer, a `DraftSource` such as `PromptLookup()`, or None: plain decoding.
    rule: a verification rule, or a `Budget` in nats; the default is lossless.
    sampling: how laws are made; numbers, or one value a row.
    num_draft: tokens drafted a round. 'auto', short for AutoDraft(), chooses the number by what passes cost and what is
      kept; which tokens are drawn then depends on that, their law does not.
    max_new_tokens: at most so many a row. A row also ends where the context of either model does ('cache_full').
    stop: strings that end a text; the text is cut before the first of them.
    seed: one for all rows, or one for each. A row's draws depend on its seed and prompt only, not on the batch.
    raw: whether to take strings as they are instead of as a user's turn in the chat template.
    draft_tokenizer: the draft's own tokenizer, to be compared with `tokenizer`.
    ledger: whether to account for what the rule spends, in stats and by token. A `Budget` always does.
    block_verification: whether drafts are judged as a whole, which keeps more of them, for the same law of the text.
      The rule must have a fixed target (all but Cactus, CactusExact and TopK, and those too as Static(rule)).
    stop_entropy: nats; a draft model ends its draft before the first token whose law has a larger entropy, after
      temperature and filters. The law of the text does not change. None: it drafts num_draft tokens.
    progress: called by the host now and then with the number of new tokens so far.

  Raises: ValueError, before anything is compiled, for input that cannot be answered.
  """
  run = _Run(prompts, target=target, tokenizer=tokenizer, draft=draft, rule=rule, sampling=sampling, stop=stop,
             num_draft=num_draft, max_new_tokens=max_new_tokens, seed=seed, raw=raw, draft_tokenizer=draft_tokenizer,
             ledger=ledger, block_verification=block_verification, stop_entropy=stop_entropy)
  looks = bool(run.stop) or progress is not None
  for _ in run.rounds(ROUNDS_PER_LOOK if looks else None):
    if progress is not None:
      progress(run.new_tokens)
  return run.completions()


def record_rounds(prompts, **options) -> tuple[Draft, np.ndarray]:
  """The rounds of decoding these prompts losslessly: what was drafted, by which laws, and what the verifier's were.

  On them every rule can be judged without decoding again (`ledger.expected`, `calibrate`).

  Args: prompts, options as for `generate_text` without rule, ledger, block_verification, stop and progress; a draft is
    needed.
  Returns: `Draft` and target_probs f32[N, K+1, V] of all N rounds, on the host: 8 (K + 1) V bytes a round.
  """
  call = inspect.signature(generate_text).bind(prompts, **options)
  if {'rule', 'ledger', 'block_verification', 'progress', 'stop'} & call.arguments.keys():
    raise ValueError('rounds are recorded with the rule Exact() to the end: rule, ledger, block_verification, progress '
                     'and stop mean nothing here.')
  call.apply_defaults()
  if call.arguments['draft'] is None:
    raise ValueError('draft=None: without a draft there are no rounds to record.')
  if _auto(call.arguments['num_draft']):
    raise ValueError(f'num_draft={call.arguments["num_draft"]!r}: rounds are recorded with one number of drafted '
                     'tokens; give it.')
  call.arguments.pop('progress')
  return _Run(**call.arguments).record()


def calibrate(make_rule, prompts, *, kl_per_token, low=1e-7, high=50.0, **options) -> tuple[float, ledger_lib.Expected]:
  """The number for which make_rule(number) spends kl_per_token on these prompts, and the figures to expect there.

  A delta or tau that suits one temperature, filter or pair of models does not suit another (the delta for the same
  nats can differ by a factor of hundreds), so it is found on a sample: the prompts are decoded once, losslessly, and
  the number is searched for on the recorded laws.

  Args: as for `ledger.calibrate` and `record_rounds`, as in calibrate(Clamp, prompts, kl_per_token=0.01, target=...,
    draft=..., tokenizer=..., sampling=...).
  """
  ledger_lib.check_search(make_rule, kl_per_token, low, high)  # before anything is decoded
  return ledger_lib.calibrate(make_rule, *record_rounds(prompts, **options), kl_per_token, low, high)


def stream_text(prompt, **options) -> 'TextStream':
  """Answers one prompt piece by piece; options as for `generate_text`, without `progress`.

  Iterating gives strings whose concatenation is exactly the final text; afterwards `.completions` holds the rest.
  """
  call = inspect.signature(generate_text).bind([prompt], **options)
  call.apply_defaults()
  if call.arguments.pop('progress') is not None:
    raise ValueError('progress: a stream reports by its pieces; use generate_text for a progress callback.')
  return TextStream(_Run(**call.arguments), call.arguments['tokenizer'])


class TextStream:
  """The pieces of one answer as they are decoded."""

  def __init__(self, run, tokenizer):
    self._run, self._tokenizer = run, tokenizer

  def __iter__(self) -> Iterator[str]:
    sent = 0
    for _ in self._run.rounds(1):
      text = self._run.settled_text()
      if len(text) > sent:
        yield text[sent:]
        sent = len(text)
    text = self.completions.texts[0]
    if len(text) > sent:
      yield text[sent:]

  def spans(self) -> Iterator[tuple[str, str]]:
    """The pieces of the answer cut where its tokens end: see the function `spans`."""
    now = ((piece, self.completions) for piece in self)
    return _spans(self._tokenizer, ((piece, done.tokens[0], done.origins[0]) for piece, done in now))

  @property
  def completions(self) -> Completions:
    """What has been decoded so far, with its figures. Raises ValueError before the first piece."""
    return self._run.completions()


def spans(completions, tokenizer, row=0) -> Iterator[tuple[str, str]]:
  """The text of a row cut where its tokens end: (text, origin of the token), whose texts add up to that of the row.

  A character made by several tokens has the origin of the one that completes it. Each token is one more decoding of the
  text up to there.
  """
  return _spans(tokenizer, [(completions.texts[row], completions.tokens[row], completions.origins[row])])


def _spans(tokenizer, pieces):
  """As `spans`, of a text that grows. Args: pieces, (what is new of the text, all tokens so far, their origins)."""
  text, count = '', 0
  for piece, tokens, origins in pieces:
    start, text = len(text), text + piece
    while start < len(text):
      # Up to a character that is not complete yet, or to the end of the text, which may lie inside the token.
      common = os.path.commonprefix([detokenize(tokenizer, tokens[: count + 1])[start:], text[start:]])
      if common:
        yield common, origins[count]
      start += len(common)
      count += start < len(text)


def check_tokenizers(tokenizer, draft_tokenizer):
  """Raises ValueError, naming the first difference, unless both map the same ids to the same tokens."""
  if tokenizer is draft_tokenizer:
    return
  ours, theirs = len(tokenizer), len(draft_tokenizer)
  pairs = zip(*(t.convert_ids_to_tokens(range(min(ours, theirs))) for t in (tokenizer, draft_tokenizer)))
  for token, (a, b) in enumerate(pairs):
    if a != b:
      raise ValueError(f'draft and verifier have different tokenizers: token {token} is {a!r} for the verifier and '
                       f'{b!r} for the draft. A draft must share its verifier\'s tokenizer.')
  if ours != theirs:
    longer, name = (tokenizer, 'verifier') if ours > theirs else (draft_tokenizer, 'draft')
    extra = longer.convert_ids_to_tokens(min(ours, theirs))
    raise ValueError(f'draft and verifier have different tokenizers: only the {name} has token {min(ours, theirs)}, '
                     f'{extra!r}. A draft must share its verifier\'s tokenizer.')


def encode(prompts, tokenizer, raw) -> list[list[int]]:
  """Token ids of each prompt: a conversation, or a string as a user's turn of one (if raw, as it is)."""
  if isinstance(prompts, str):
    raise ValueError('prompts is one string: pass a list of prompts, [prompt].')
  prompts = list(prompts)
  if not prompts:
    raise ValueError('prompts is empty: pass at least one prompt.')
  if not raw and not tokenizer.chat_template:
    raise ValueError('this tokenizer has no chat template: pass raw=True to take the prompts as plain text.')
  rows = []
  for i, prompt in enumerate(prompts):
    if raw and not isinstance(prompt, str):
      raise ValueError(f'prompt {i} is {type(prompt).__name__}: with raw=True every prompt is a string.')
    try:
      ids = tokenizer(prompt)['input_ids'] if raw else _encode_turns(i, prompt, tokenizer)
    except TypeError as error:
      raise ValueError(f'prompt {i} is no text that can be tokenised ({error}).') from None
    if not prompt or not len(ids):
      raise ValueError(f'prompt {i} is empty: need at least one token to continue from.')
    rows.append(list(ids))
  return rows


def end_tokens(target, tokenizer) -> tuple[int, ...]:
  """The tokens that end a text, by the model's config or its tokenizer, rising."""
  return tuple(sorted({*target.config.eos_ids, tokenizer.eos_token_id} - {None}))


def is_conversation(value) -> bool:
  """Whether it is a list of messages, each with role and content."""
  is_message = lambda turn: isinstance(turn, dict) and {'role', 'content'} <= turn.keys()
  return isinstance(value, (list, tuple)) and all(map(is_message, value))


def _encode_turns(i, prompt, tokenizer):
  turns = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt
  if not is_conversation(turns):
    raise ValueError(f'prompt {i} is {prompt!r}: need a string, or a list of messages with role and content.')
  if not turns:
    return []
  try:
    return tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=False)
  except jinja2.TemplateError as error:
    raise ValueError(f'prompt {i} does not fit the chat template: {error}') from None


def row_keys(seed, rows):
  """key[B]: of each row its seed (modulo 2^32) and its prompt, so that one seed gives different prompts other draws."""
  seeds = np.asarray(seed)
  if not np.issubdtype(seeds.dtype, np.integer) or seeds.shape not in ((), (len(rows),)):
    raise ValueError(f'seed={seed!r}: need a whole number, or one for each of the {len(rows)} prompts.')
  seeds = np.broadcast_to(seeds, len(rows)) % 2**32
  prompts = [zlib.crc32(np.asarray(row, np.int32).tobytes()) for row in rows]
  make = jax.vmap(lambda seed, prompt: jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), prompt))
  return make(jnp.asarray(seeds, jnp.uint32), jnp.asarray(prompts, jnp.uint32))


def bucket(length):
  """The smallest of 16, 24, 32, 48, 64, 96, ... that holds `length`: programs are compiled per bucket."""
  size = 16
  while size < length:
    size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
  return size


def detokenize(tokenizer, tokens) -> str:
  """The text of tokens, those that mark its structure left out."""
  return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def first_stop(tokenizer, tokens, stops):
  """(number of tokens up to the one that completes the first stop string, text before it), or None."""
  seen = lambda count: any(stop in detokenize(tokenizer, tokens[:count]) for stop in stops)
  if not seen(len(tokens)):
    return None
  count = bisect.bisect_left(range(len(tokens)), True, key=seen)
  text = detokenize(tokenizer, tokens[:count])
  return count, text[: min(text.find(stop) for stop in stops if stop in text)]


def _settled_length(text, stops):
  """How much of a text later tokens cannot change: without a split character, without what may become a stop string."""
  settled = len(text.rstrip('\ufffd'))
  begins = (n for stop in stops for n in range(1, len(stop)) if text[:settled].endswith(stop[:n]))
  return settled - max(begins, default=0)


def _auto(num_draft) -> AutoDraft | None:
  """How the number of drafted tokens is to be chosen; None if it is given."""
  return AutoDraft() if isinstance(num_draft, str) and num_draft == 'auto' else (
      num_draft if isinstance(num_draft, AutoDraft) else None)


def _check_kinds(target, tokenizer, draft, sampling, num_draft, max_new_tokens):
  """Raises ValueError for an argument that is no such thing, before it fails somewhere inside.

  (Rules are checked by the decoder, `decode.settled`.)
  """
  is_model = lambda model: hasattr(model, 'init_cache') and hasattr(model, 'config')
  is_count = lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool)
  for name, value, valid, need in (
      ('target', target, is_model(target), 'a model, as from load_transformer'),
      ('draft', draft, draft is None or isinstance(draft, DraftSource) or is_model(draft),
       'a model, a DraftSource such as PromptLookup(), or None'),
      ('tokenizer', tokenizer, hasattr(tokenizer, 'apply_chat_template'), 'a tokenizer, as from load_tokenizer'),
      ('sampling', sampling, isinstance(sampling, SamplingParams), 'SamplingParams(...)'),
      ('num_draft', num_draft, is_count(num_draft) or _auto(num_draft), "a whole number, 'auto' or AutoDraft(...)"),
      ('max_new_tokens', max_new_tokens, is_count(max_new_tokens), 'a whole number'),
  ):
    if not valid:
      raise ValueError(f'{name}={value!r:.60}: need {need}.')


def is_exact_match(rule, sampling) -> bool:
  """Whether every row is greedy and the rule then keeps a draft only if it is the verifier's choice."""
  rule = rule.rule if isinstance(rule, Static) else rule
  # Some published baselines keep drafts that a greedy verifier cannot emit.
  unbound = getattr(rule, 'published', False) and not isinstance(rule, Lenience)
  return bool(np.all(is_greedy(np.asarray(sampling.temperature)))) and not unbound and not hasattr(rule, 'judged_by')


def _warn(draft, rule, sampling):
  """Says what a rule will not do as its name promises."""
  inner = rule.rule if isinstance(rule, Static) else rule
  name = type(inner).__name__
  if isinstance(rule, Budget) and rule.lossless:
    message = 'a Budget of 0 nats is Exact(): the emitted law is the verifier\'s.'
  elif draft is None or getattr(rule, 'lossless', False):
    return
  elif is_exact_match(rule, sampling):
    message = (f'at temperature 0 the verifier\'s law is one-hot, so {name} keeps a token only if it is the '
               'verifier\'s choice: its numbers change nothing. LogitMargin is made for temperature 0.')
  elif hasattr(inner, 'judged_by') and not np.all(is_greedy(np.asarray(sampling.temperature))):
    message = (f'{name} is made for temperature 0: above it, it keeps or emits the verifier\'s likeliest tokens, '
               'whatever the temperature and filters.')
  else:
    return
  warnings.warn(message, stacklevel=5)


def _common_mesh(target, draft):
  """The mesh of the verifier. Raises ValueError for a draft that lives elsewhere."""
  mesh = getattr(target, 'mesh', None)
  if draft is None or isinstance(draft, DraftSource):
    return mesh
  devices = lambda mesh: None if mesh is None else mesh.devices.reshape(-1).tolist()
  theirs = getattr(draft, 'mesh', None)
  if devices(mesh) != devices(theirs):
    raise ValueError('draft and verifier are on different devices: load both with the same mesh, or the draft with '
                     'narrow(mesh, n) of it.')
  if mesh is not None and sharding.row_groups(mesh) != sharding.row_groups(theirs):
    raise ValueError(f'the mesh of the draft splits rows {sharding.row_groups(theirs)} ways, the verifier\'s '
                     f'{sharding.row_groups(mesh)} ways: make it with narrow(mesh, n).')
  return mesh


class Job:
  """What is asked of the models: prompts as tokens, checked, and what all rows share.

  Raises ValueError for what cannot be answered, before anything is compiled.
  """

  def __init__(self, prompts, *, target, tokenizer, draft, rule, sampling, num_draft, max_new_tokens, stop, seed, raw,
               draft_tokenizer, ledger, block_verification, stop_entropy):
    _check_kinds(target, tokenizer, draft, sampling, num_draft, max_new_tokens)
    self.models, self.tokenizer = (target, draft), tokenizer
    self.auto = None if draft is None else _auto(num_draft)
    num_draft = auto.max_num_draft if (auto := _auto(num_draft)) else num_draft
    self.stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(s, str) and s for s in self.stop):
      raise ValueError(f'stop={stop!r}: need non-empty strings.')
    for special in set(self.stop) & set(tokenizer.all_special_tokens):
      raise ValueError(f'stop={special!r} is a special token, which never shows in a text: those that end one already '
                       'end a row.')
    if max_new_tokens < 1:
      raise ValueError(f'max_new_tokens={max_new_tokens}: need at least 1.')
    if stop_entropy is not None and (draft is None or isinstance(draft, DraftSource)):
      raise ValueError(f'stop_entropy={stop_entropy!r} means nothing to draft={draft!r:.60}: it ends the draft of a '
                       'model, by the laws of that model; drop it.')
    if draft_tokenizer is not None:
      check_tokenizers(tokenizer, draft_tokenizer)

    models = [('verifier', target)] + ([('draft', draft)] if hasattr(draft, 'config') else [])
    self.context = min(model.config.max_length for _, model in models)
    if num_draft > self.context:
      raise ValueError(f'num_draft={num_draft}: a round cannot draft more than the context of {self.context} tokens '
                       'holds.')
    vocab_size = len(tokenizer)
    for name, model in models:
      if model.config.vocab_size < vocab_size:
        raise ValueError(f'the tokenizer has {vocab_size} tokens, the {name} only {model.config.vocab_size}: it is '
                         'not this model\'s tokenizer.')
    self.rows = encode(prompts, tokenizer, raw)
    for i, row in enumerate(self.rows):
      if len(row) >= self.context:
        raise ValueError(f'prompt {i} has {len(row)} tokens; the context of the model is {self.context}, of which at '
                         'least one must be left for the answer: shorten the prompt.')
    self.mesh = _common_mesh(target, draft)
    # No row outgrows the context, so that is as good as any larger number, and never too large for an i32.
    self.max_new_tokens = min(max_new_tokens, self.context)
    self._shared = DecodeConfig(
        num_draft=num_draft,
        max_length=self.context,
        vocab_size=vocab_size,
        eos_ids=end_tokens(target, tokenizer),
        ledger=bool(ledger) or isinstance(rule, Budget),
        block_verification=bool(block_verification),
        stop_entropy=stop_entropy,
    )
    self.lossless = draft is None or bool(getattr(rule, 'lossless', False))
    # The numbers of rule and sampling, and the keys, of each row.
    self.laws = jax.tree.map(np.asarray, decode.settled(rule, sampling, len(self.rows), draft, self._shared))
    self.keys = row_keys(seed, self.rows)
    if self.auto and any(leaf.ndim > 1 for leaf in jax.tree.leaves(self.laws[0])):
      raise ValueError(f'{type(rule).__name__} has numbers for each drafted position, and num_draft is to be chosen: '
                       'give the rule one number for all positions, or num_draft as a number.')
    _warn(draft, rule, sampling)

  def max_length(self, row):
    """Tokens that a row can come to, rounded up to what programs are compiled for."""
    return min(bucket(len(self.rows[row]) + self.max_new_tokens), self.context)

  def config(self, max_length):
    """The settings of programs for rows of so many tokens."""
    return dataclasses.replace(self._shared, max_length=max_length)

  def prefill(self, rows, config, drafting=True) -> decode.DecodeState:
    """The state of the rows of these numbers, one of -1 being an idle row, after the models have read the prompts.

    drafting: whether there will be a draft, if there is one.
    """
    target, draft = self.models
    length = self.prompt_lengths(rows)
    padded = np.zeros((len(rows), min(bucket(length.max()), config.capacity)), np.int32)
    for i, row in enumerate(rows):
      padded[i, : length[i]] = self.rows[max(row, 0)][: length[i]]
    limit = length + np.where(np.array(rows) >= 0, np.int32(self.max_new_tokens), 0)  # an idle row has all it wants
    inputs = self.placed((padded, length, self.of_rows(self.keys, rows), limit))
    return decode.prefill(target, draft if drafting else None, *inputs, config)

  def prompt_lengths(self, rows):
    """i32[B], tokens of the prompts of these rows; 1 for an idle one."""
    return np.array([len(self.rows[row]) if row >= 0 else 1 for row in rows], np.int32)

  def of_rows(self, leaves, rows):
    """What belongs to the rows of these numbers (an idle one is given what the first row has)."""
    return jax.tree.map(lambda leaf: leaf[np.maximum(rows, 0)], leaves)

  def placed(self, tree):
    """Arrays [B, ...] on the devices that hold the rows."""
    return jax.tree.map(jnp.asarray, tree) if self.mesh is None else sharding.place(tree, sharding.rows(self.mesh))


def fetch_rows(state) -> decode.DecodeState:
  """All of a state on the host but what only the models read."""
  return sharding.fetch(state.replace(target_cache=None, draft_cache=None, keys=None))


def completions(job, held, prompt_length, stopped, seconds, calls_by_num_draft=None) -> Completions:
  """The texts of rows.

  Args: held, from `fetch_rows`; prompt_length int[B]; stopped {row: (number of its tokens up to a stop string, text
    before it)}; the rest as for `metrics.summarize`.
  """
  arrays = {name: getattr(held, name) for name in ('tokens', 'from_draft', 'logprobs')}
  if held.ledger:
    arrays |= {name: getattr(held.ledger, name) for name in ('emitted_logprobs', 'verifier_logprobs')}
  texts, origins, columns = [], [], {name: [] for name in arrays}
  for row, (start, end) in enumerate(zip(prompt_length, held.length)):
    count, text = stopped.get(row, (end - start, None))
    new = slice(start, start + count)
    for name, array in arrays.items():
      columns[name].append(array[row, new].tolist())
    texts.append(detokenize(job.tokenizer, columns['tokens'][-1]) if text is None else text)
    origins.append(['accepted' if drafted else 'bonus' if bonus else 'recovered'
                    for drafted, bonus in zip(held.from_draft[row, new], held.is_bonus[row, new])])
  new_tokens = sum(map(len, columns['tokens']))
  return Completions(
      texts=texts,
      origins=origins,
      finish_reasons=[Finish(finish).name.lower() for finish in held.finish],
      stats=metrics.summarize(held, prompt_length, new_tokens, seconds, job.lossless, calls_by_num_draft),
      kl=held.ledger.kl.tolist() if held.ledger else None,
      **columns,
  )


class _Run:
  """One batch on its way from prompts to text: the state on device, and what the host knows of it."""

  def __init__(self, prompts, **options):
    self._job = job = Job(prompts, **options)
    self._auto, self.stop = job.auto, job.stop
    if self._auto and not self._auto.costs and jax.process_count() > 1:
      raise ValueError('num_draft is to be chosen by costs that each process would measure for itself, and then not '
                       'all choose the same: give a number, or AutoDraft(costs=...).')
    self._count = len(job.rows)
    groups = sharding.row_groups(job.mesh)
    extra = -self._count % groups
    if extra:
      warnings.warn(f'{self._count} rows do not split over {groups} groups of devices: {extra} idle rows are added. A '
                    'multiple uses them all.', stacklevel=3)
    self._rows = [*range(self._count), *[-1] * extra]
    self._prompt_length = job.prompt_lengths(self._rows)
    self.config = job.config(max(map(job.max_length, range(self._count))))
    self._rule, self._sampling = job.placed(job.of_rows(job.laws, self._rows))
    self.state = None  # before the first round

  def rounds(self, max_rounds):
    """Decodes, yielding after the first round and then after every max_rounds of them (None: not before the end).

    It yields more often where the number of drafted tokens is chosen in between.
    """
    self._clock = metrics.CompileClock()
    self._decode = self._measure = 0.0
    if self._auto:
      self._measure = self._timed(self._find_costs)
    self._stopped = {}  # row -> (number of its tokens up to the stop string, text before it)
    self._first_token = self._timed(self._first_round)
    if self._clock.seconds or jax.process_count() > 1:  # (a cache may spare one process what it does not another)
      # Programs were made, at a cost that JAX's own count does not cover in full; it must not pass for reading the
      # prompt. Decoding is a pure function, so doing it again changes nothing but the figure.
      self._first_token = self._timed(self._first_round)
    self._first_tokens = self.new_tokens
    yield
    while not self._done.all():
      self._decode += self._timed(lambda: self._advance(max_rounds))
      yield

  def record(self):
    """The rounds of decoding to the end: see `record_rounds`."""
    state = self._job.prefill(self._rows, self.config)
    rounds = []
    while not np.all(done := sharding.fetch(state.done)):
      state, info = decode.decode_step(*self._job.models, self._rule, self._sampling, state, self.config)
      rounds.append(jax.tree.map(lambda leaf: leaf[~done], sharding.fetch((info.draft, info.target_probs))))
    if not rounds:
      raise ValueError('no round was decoded: nothing is recorded.')
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rounds)

  def _timed(self, work):
    """Seconds that work() takes, those of compiling left out."""
    with self._clock.running():
      start, compiled = time.perf_counter(), self._clock.seconds
      work()
      return time.perf_counter() - start - (self._clock.seconds - compiled)

  def _find_costs(self):
    auto = self._auto
    self._costs = auto.costs or schedule.costs_of(
        *self._job.models, self._sampling, len(self._rows), self.config, auto.folder,
        lambda: self._job.prefill(self._rows, self.config))

  def _first_round(self):
    self.state = None  # lets go of the caches of an earlier reading before there are others
    self._target, self._draft = self._job.models
    if self._auto:
      self._chooser = schedule.Chooser(self._costs, self.config.num_draft, len(self._rows))
      self._number = self._chooser.num_draft  # that whose program decodes
      self._draft = self._draft if self._chooser.num_draft else None
    self.state = self._job.prefill(self._rows, self.config, drafting=self._draft is not None)
    self._advance(1)

  def _advance(self, max_rounds):
    config = self.config
    if self._auto and self._draft is not None:
      config = dataclasses.replace(config, num_draft=self._chooser.num_draft)
      most = self._chooser.rounds_to_choice
      max_rounds = min(max_rounds or most, most)
    if self._auto and self._number != self._chooser.num_draft:
      # Another program. It is made by a call of no rounds, since that is compiling or nothing, and JAX's own count
      # misses a part of it.
      self._clock.count(lambda: self._loop(config, 0))
      if 0 < self._chooser.num_draft < self._number:
        self.state = decode.catch_up(self._draft, self.state)
      self._number = self._chooser.num_draft
    self._loop(config, max_rounds)
    self._tokens, self._length, self._done = sharding.fetch((self.state.tokens, self.state.length, self.state.done))
    if self._auto:
      self._choose()
    if self.stop:
      self._look_for_stops()

  def _loop(self, config, max_rounds):
    self.state = jax.block_until_ready(decode.generate(
        self._target, self._draft, self._rule, self._sampling, self.state, config, max_rounds))

  def _choose(self):
    self._chooser.look(*sharding.fetch((self.state.round, self.state.stats.accepted)), self._done)
    if not self._chooser.num_draft and self._draft is not None:
      # Plain decoding is faster. The draft does not read what is written from here on, so it stays out of this call.
      self._draft, self.state = None, self.state.replace(draft_cache=None)

  def _look_for_stops(self):
    for row in range(self._count):
      if row not in self._stopped:
        found = first_stop(self._job.tokenizer, self._row_tokens(row), self.stop)
        if found:
          self._stopped[row] = found
    if self._stopped:
      stopped = np.isin(np.arange(len(self._rows)), list(self._stopped))
      self._done = self._done | stopped
      finish = np.where(stopped, np.int32(Finish.STOP), sharding.fetch(self.state.finish))
      done, finish = self._job.placed((self._done, finish))
      self.state = self.state.replace(done=done, finish=finish)

  def _row_tokens(self, row):
    return self._tokens[row, self._prompt_length[row] : self._length[row]].tolist()

  @property
  def new_tokens(self):
    """Tokens decoded so far, all rows together."""
    return int((self._length - self._prompt_length).sum())

  def settled_text(self):
    """The first row's text as far as later tokens cannot change it."""
    if 0 in self._stopped:
      return self._stopped[0][1]
    text = detokenize(self._job.tokenizer, self._row_tokens(0))
    return text[: _settled_length(text, self.stop)]

  def completions(self):
    """The answers so far."""
    if self.state is None:
      raise ValueError('nothing is decoded yet: iterate over the stream first.')
    decoded = self.new_tokens - self._first_tokens
    seconds = metrics.Seconds(self._clock.seconds, self._first_token, self._decode, decoded, self._measure)
    answered = jax.tree.map(lambda leaf: leaf[: self._count], fetch_rows(self.state))
    return completions(self._job, answered, self._prompt_length[: self._count], self._stopped, seconds,
                       self._chooser.calls if self._auto else None)
