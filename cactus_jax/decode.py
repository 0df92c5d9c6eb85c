"""Speculative decoding: draft, score, verify, commit, and the one loop around them.

  round:  propose -> score -> verify -> commit          (`decode_step`, one round of every row)
  text:   prefill -> while any row is live: decode_step  (`generate`, the only `lax.while_loop`)

Everything is a pure function of arrays. A model is whatever implements `LanguageModel`; the transformer is one, a
Markov chain in the tests another. Without a draft the same code is plain autoregressive decoding.
"""

import dataclasses
import enum
import functools
import numbers
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from cactus_jax import ledger as ledger_lib
from cactus_jax import sampling as sampling_lib
from cactus_jax.drafts import DraftSource
from cactus_jax.ledger import Budget, Ledger
from cactus_jax.records import per_row
from cactus_jax.sampling import Draft, Role, at_tokens, to_probs, uniforms
from cactus_jax.verify import Verdict, check_block_rule, check_rule, verify, verify_block

# Prompts are read in pieces of this many tokens, which bounds the attention scores held at once.
PREFILL_CHUNK = 512


class LanguageModel(Protocol):
  """A model with a positional cache, as a pytree.

  The cache must be overwritable: writing positions p..p+T-1 again replaces what stood there, and a token at position
  p depends on positions <= p only. (So a recurrent state, which cannot be rolled back, is no such cache.)
  """

  def __call__(self, tokens_BT, positions_BT, cache) -> tuple[jax.Array, Any]:
    """Logits [B, T, V] of the token after each of these, and the cache with these in it."""

  def init_cache(self, batch, length) -> Any:
    """A cache for `length` positions of `batch` rows."""

  # A draft model may also have `score_one(tokens_BT, positions_BT, cache, index_B)`: the same pass, with the logits of
  # one of the T tokens in each row only, [B, 1, V].


class HiddenReader(LanguageModel, Protocol):
  """A draft model that also reads what the verifier made of the text: its hidden states, from its cache.

  The verifier's `init_cache` must take hidden_layers.
  """

  # Of the verifier, rising: what they are given is read beside what its head is. A model without it, or with None,
  # reads none.
  hidden_layers: tuple[int, ...] | None

  def observe(self, cache, target_cache) -> Any:
    """The draft's cache with the hidden states in the verifier's, valid where that is."""


class Finish(enum.IntEnum):
  """Why a row ended; RUNNING while it has not."""

  RUNNING = 0
  EOS = 1  # an end-of-sequence token, which is part of the text
  LENGTH = 2  # as many new tokens as were asked for
  CACHE_FULL = 3  # no room for more
  STOP = 4  # a stop string, seen by the host
  NAN = 5  # a model returned no usable logits


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """What is fixed when the loop is compiled."""

  num_draft: int  # K, drafted tokens a round, >= 1; without a draft it only sizes the buffers
  max_length: int  # prompt and output together, tokens
  vocab_size: int  # tokens that may be emitted; logits beyond them pad the embedding, and laws are 0 there
  eos_ids: tuple[int, ...] = ()
  pad_id: int = 0
  ledger: bool = False  # whether to account for what the rule spends
  block_verification: bool = False  # whether prefixes are judged as a whole; for rules with a fixed target
  # Nats: a draft model stops before its first token whose law has a larger entropy; None: never. (A greedy law has 0.)
  stop_entropy: float | None = None
  # What the verifier's cache keeps of its hidden states without a draft that reads them; see `HiddenReader`.
  hidden_layers: tuple[int, ...] | None = None

  def __post_init__(self):
    if self.num_draft < 1:
      raise ValueError(f'num_draft={self.num_draft}: speculative decoding needs at least 1 drafted token a round; '
                       'use draft=None for plain decoding.')
    for name in ('max_length', 'vocab_size'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: need at least 1.')
    limit = self.stop_entropy
    if limit is not None and not (isinstance(limit, numbers.Real) and limit >= 0):
      raise ValueError(f'stop_entropy={limit!r}: need a number of nats >= 0, or None.')
    for token in (*self.eos_ids, self.pad_id):
      if not 0 <= token < self.vocab_size:
        raise ValueError(f'eos_ids={self.eos_ids}, pad_id={self.pad_id}: token {token} is outside the vocabulary '
                         f'0..{self.vocab_size - 1}.')

  @property
  def capacity(self):
    """S, slots a row: a round that starts one token before max_length still writes K + 1 tokens."""
    return self.max_length + self.num_draft + 1


@flax.struct.dataclass
class DecodeStats:
  """Counters per row and drafted position, of tokens that ended in the text; the end of a text cuts a round short."""

  accepted: jax.Array  # i32[B, K] rounds in which the token drafted at position i was kept
  tested: jax.Array  # i32[B, K] rounds in which position i was put to the test: drafted, and all before it kept


@flax.struct.dataclass
class DecodeState:
  """The carry of the loop; donated.

  Invariant: tokens[b, :length[b]] is final. The target's cache is valid for positions < length - 1, the draft's for
  positions < length - 2 (of a `HiddenReader` < length - 1 - K). Whatever lies beyond is overwritten before it can be
  attended to, so moving `length` is the whole of commit and rollback.

  The K here is that of `prefill`, which sized the buffers: rounds may draft fewer, and not all the same.
  """

  tokens: jax.Array  # i32[B, S]
  length: jax.Array  # i32[B] tokens in the row, prompt included, >= 1
  limit: jax.Array  # i32[B] the length at which the row has all the tokens it was asked for
  done: jax.Array  # bool[B]
  finish: jax.Array  # i32[B], a `Finish`
  keys: jax.Array  # key[B]
  round: jax.Array  # i32[B] rounds this row has been through: verifier calls
  target_cache: Any
  draft_cache: Any
  from_draft: jax.Array  # bool[B, S] whether a drafted token was kept there
  is_bonus: jax.Array  # bool[B, S] whether the verifier drew it after all of a round's draft was kept
  logprobs: jax.Array  # f32[B, S] log-probability of each new token, nats, by the verifier's unfiltered law at T = 1
  ledger: Ledger | None
  stats: DecodeStats


@flax.struct.dataclass
class StepInfo:
  """What a round saw, for tests and traces; the loop drops it."""

  draft: Draft
  target_probs: jax.Array  # f32[B, K+1, V]
  target_logits: jax.Array  # f32[B, K+1, V]
  verdict: Verdict


def prefill(target, draft, prompt_BP, length, keys, limit, config) -> DecodeState:
  """The state after both models have read the prompts.

  Args:
    target: LanguageModel. draft: LanguageModel, `DraftSource` or None.
    prompt_BP: i32[B, P], right-padded with any token, P <= config.capacity.
    length: i32[B] in 1..P, tokens of each prompt.
    keys: key[B], the source of all randomness of each row.
    limit: i32[B], length at which a row stops: prompt plus new tokens.
  """
  if prompt_BP.shape[1] > config.capacity:
    raise ValueError(f'prompts are padded to {prompt_BP.shape[1]} tokens, the buffers hold {config.capacity}: raise '
                     'max_length or pad less.')
  known = not isinstance(length, jax.core.Tracer) and getattr(length, 'is_fully_addressable', True)
  if known and not np.all((np.asarray(length) >= 1) & (np.asarray(length) <= prompt_BP.shape[1])):
    raise ValueError(f'length={length}: each prompt needs at least 1 token and has at most {prompt_BP.shape[1]}.')
  as_int = lambda x: jnp.asarray(x, jnp.int32)
  prompt_BP = as_int(prompt_BP)
  layout = prefill_layout(prompt_BP.sharding, config) if _is_split(prompt_BP) else None
  return _program(_prefill, layout)(target, draft, prompt_BP, as_int(length), keys, as_int(limit), config)


def replace_rows(state, rows, fresh) -> DecodeState:
  """The state with other texts in some of its rows, as when those have ended: continuous batching.

  Args:
    state: donated. rows: i32[N], which; one that is no row is left out.
    fresh: the state of N rows, from `prefill` with the same models and a config of the same size.
  """
  return _program(_replace_rows, _layout(state), donate_argnames='state', static_argnames=())(state, rows, fresh)


def _replace_rows(state, rows, fresh):
  return jax.tree.map(lambda old, new: old.at[rows].set(new, mode='drop'), state, fresh)


def prefill_layout(rows, config) -> DecodeState:
  """How the first state is split over devices: rows as the prompts are, caches where their models put them."""
  parts = {field.name: rows for field in dataclasses.fields(DecodeState)}
  return DecodeState(**parts | {
      'target_cache': None, 'draft_cache': None, 'ledger': rows if config.ledger else None})


def _is_split(array):
  """Whether an array is spread over devices. (Under an outer jit that is the outer program's affair.)"""
  where = getattr(array, 'sharding', None)
  return where is not None and len(where.device_set) > 1


def _program(function, layout=None, **jit_options):
  """function compiled so that the state it returns is split over devices as `layout`, a tree of shardings, says."""
  shardings, tree = jax.tree.flatten(layout)
  return _jitted(function, tuple(shardings), tree, **jit_options)


@functools.cache
def _jitted(function, shardings, tree, static_argnames='config', **jit_options):
  if shardings:
    jit_options['out_shardings'] = jax.tree.unflatten(tree, shardings)
  return jax.jit(function, static_argnames=static_argnames, **jit_options)


def _layout(state):
  """How a state is split over devices; None on one device, where there is nothing to keep."""
  return jax.tree.map(lambda leaf: leaf.sharding, state) if _is_split(state.tokens) else None


def _prefill(target, draft, prompt_BP, length, keys, limit, config):
  B, P = prompt_BP.shape
  S, K = config.capacity, _num_draft(draft, config)
  full = (length >= jnp.minimum(limit, config.max_length))
  hidden_layers = draft.hidden_layers if _reads_hidden(draft) else config.hidden_layers
  empty = target.init_cache(B, S) if hidden_layers is None else target.init_cache(B, S, hidden_layers=hidden_layers)
  target_cache = _read(target, prompt_BP, empty)
  draft_cache = None
  if _is_model(draft):
    see = functools.partial(_see, draft, target_cache=target_cache)
    draft_cache = _read(draft, prompt_BP, draft.init_cache(B, S), see)
  return DecodeState(
      tokens=jnp.pad(prompt_BP, ((0, 0), (0, S - P)), constant_values=config.pad_id),
      length=length,
      limit=limit,
      done=full,
      finish=jnp.where(
          full, jnp.where(length >= limit, Finish.LENGTH, Finish.CACHE_FULL), Finish.RUNNING).astype(jnp.int32),
      keys=keys,
      round=jnp.zeros(B, jnp.int32),
      target_cache=target_cache,
      draft_cache=draft_cache,
      from_draft=jnp.zeros((B, S), bool),
      is_bonus=jnp.zeros((B, S), bool),
      logprobs=jnp.zeros((B, S), jnp.float32),
      ledger=ledger_lib.empty(B, S) if config.ledger else None,
      stats=DecodeStats(accepted=jnp.zeros((B, K), jnp.int32), tested=jnp.zeros((B, K), jnp.int32)),
  )


def _read(model, prompt_BP, cache, see=lambda cache: cache):
  """The model's cache after the prompt. Padding is read too: what it writes is garbage beyond the row's length."""
  B, P = prompt_BP.shape
  pieces, cut = P // PREFILL_CHUNK, P - P % PREFILL_CHUNK

  def read(cache, start, tokens_BT):
    positions_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return model(tokens_BT, positions_BT, see(cache))[1]  # unused logits are never computed

  if pieces:
    starts, tokens = jnp.arange(0, cut, PREFILL_CHUNK), prompt_BP[:, :cut].reshape(B, pieces, -1).swapaxes(0, 1)
    cache, _ = jax.lax.scan(lambda cache, piece: (read(cache, *piece), None), cache, (starts, tokens))
  return read(cache, cut, prompt_BP[:, cut:]) if cut < P else cache


def _see(draft, cache, target_cache):
  """The cache of a draft before it reads text that the verifier has read."""
  return draft.observe(cache, target_cache) if _reads_hidden(draft) else cache


def _reads_hidden(draft):
  return getattr(draft, 'hidden_layers', None) is not None


def _is_model(draft):
  return draft is not None and not isinstance(draft, DraftSource)


def _num_draft(draft, config):
  return 0 if draft is None else config.num_draft


def propose(draft, sampling, state, keys, config, back=None):
  """Up to K tokens for each row with their laws, and the draft's cache.

  A draft model first re-reads the last two tokens of the text: after a round in which everything was kept it has not
  seen the last drafted one, and reading two always is cheaper than telling the cases apart. One that reads hidden
  states re-reads all that a round may have added, for which it had none.

  With stop_entropy the draft of a row ends before the first token whose law has a larger entropy. That law depends on
  the tokens before it only, never on the one drawn there, so what is kept has the law that it would have in a round of
  any length. Once all rows have ended, no further step is computed.

  back: how many tokens a draft that reads hidden states re-reads, as many as the round before may have added; None: as
    the largest may have.
  """
  if draft is None:
    B = state.length.shape[0]
    none = Draft(tokens=jnp.zeros((B, 0), jnp.int32), probs=jnp.zeros((B, 0, config.vocab_size)),
                 num_drafted=jnp.zeros(B, jnp.int32))
    return none, None
  if isinstance(draft, DraftSource):
    return draft.propose(state.tokens, state.length, config.num_draft, config.vocab_size), None

  uniforms_BK = uniforms(keys, Role.DRAFT, config.num_draft)
  logits_B1V, cache = _re_read(draft, state, (back or _most_added(state)) if _reads_hidden(draft) else 2)

  def draw(logits_B1V, uniform_B):
    probs_BV = to_probs(_masked(logits_B1V, config), sampling)[:, 0]
    return sampling_lib.sample(probs_BV, uniform_B), probs_BV

  def goes_on(probs_BV):
    if config.stop_entropy is None:
      return jnp.ones_like(state.done)
    # A law of NaN ends a draft too, and commit finds it there.
    return ~state.done & (jnp.sum(jax.scipy.special.entr(probs_BV), axis=-1) <= config.stop_entropy)

  def next_slot(carry, slot_uniform):
    token_B, going_B, cache = carry
    slot, uniform_B = slot_uniform
    logits_B1V, cache = draft(token_B[:, None], (state.length + slot)[:, None], cache)
    token_B, probs_BV = draw(logits_B1V, uniform_B)
    going_B &= goes_on(probs_BV)
    return (token_B, going_B, cache), (token_B, probs_BV, going_B)

  def padding(carry, _):
    token_B, going_B, _ = carry
    return carry, (token_B, jax.nn.one_hot(token_B, first_BV.shape[1], dtype=first_BV.dtype), going_B)

  def next_if_any(carry, slot_uniform):
    return jax.lax.cond(jnp.any(carry[1]), next_slot, padding, carry, slot_uniform)

  first_B, first_BV = draw(logits_B1V, uniforms_BK[:, 0])
  going_B = goes_on(first_BV)
  slots = jnp.arange(config.num_draft - 1)
  (_, _, cache), (tokens_KB, probs_KBV, going_KB) = jax.lax.scan(
      next_slot if config.stop_entropy is None else next_if_any, (first_B, going_B, cache), (slots, uniforms_BK.T[1:]))
  return Draft(
      tokens=jnp.concatenate([first_B[:, None], tokens_KB.T], axis=1),
      probs=jnp.concatenate([first_BV[:, None], probs_KBV.swapaxes(0, 1)], axis=1),
      num_drafted=going_B.astype(jnp.int32) + jnp.sum(going_KB, axis=0, dtype=jnp.int32),
  ), cache


def _most_added(state):
  """Tokens that a round can have added, whatever it drafted: one more than the K of the buffers."""
  return state.stats.accepted.shape[1] + 1


def _re_read(draft, state, count):
  """The draft's logits after the text, [B, 1, V], and its cache with the last tokens read again."""
  # A text shorter than that is read from its start; what follows its end is overwritten.
  first_B1 = jnp.maximum(state.length[:, None] - count, 0)
  last_BT = first_B1 + jnp.arange(count)[None]
  cache = _see(draft, state.draft_cache, state.target_cache)
  return _score_one(
      draft, jnp.take_along_axis(state.tokens, last_BT, axis=1), last_BT, cache, state.length - 1 - first_B1[:, 0])


def _score_one(model, tokens_BT, positions_BT, cache, index_B):
  """The model's logits after one of the tokens of each row, [B, 1, V], and its cache with all of them."""
  if hasattr(model, 'score_one'):  # the head is most of what a small draft costs, and XLA would compute it for all
    return model.score_one(tokens_BT, positions_BT, cache, index_B)
  logits_BTV, cache = model(tokens_BT, positions_BT, cache)
  return jnp.take_along_axis(logits_BTV, index_B[:, None, None], axis=1), cache


def _masked(logits_BTV, config):
  """The logits, -inf for what pads the embedding. (To cut it off would move all that is split over devices.)"""
  V = logits_BTV.shape[-1]
  if V < config.vocab_size:
    raise ValueError(f'a model gives {V} logits, config.vocab_size is {config.vocab_size}: draft and verifier must '
                     'know every token that may be emitted.')
  return logits_BTV if V == config.vocab_size else jnp.where(
      jnp.arange(V)[None, None] < config.vocab_size, logits_BTV, -jnp.inf)


def _as_wide(draft, width):
  """The draft with laws over `width` ids: those that differ pad the embedding of a model, and have no probability."""
  V = draft.probs.shape[-1]
  if V == width:
    return draft
  return draft.replace(probs=jnp.pad(draft.probs[..., :width], ((0, 0), (0, 0), (0, max(width - V, 0)))))


def score(target, sampling, state, draft, config):
  """One pass of the verifier over the last token and the draft.

  Returns: target_probs f32[B, K+1, V], the logits they come from, and the target's cache.
  """
  last_B1 = state.length[:, None] - 1
  tokens_BT = jnp.concatenate([jnp.take_along_axis(state.tokens, last_B1, axis=1), draft.tokens], axis=1)
  positions_BT = last_B1 + jnp.arange(tokens_BT.shape[1])[None]
  logits_BTV, cache = target(tokens_BT, positions_BT, state.target_cache)
  logits_BTV = _masked(logits_BTV, config)
  return to_probs(logits_BTV, sampling), logits_BTV, cache


def commit(state, draft, verdict, target_probs, logits_BTV, keep_books, config):
  """The state with this round's tokens, cut at the end of a text and at a row's limit; ended rows stay as they are.

  keep_books: makes the ledger after this round from that before it and `ledger.record`'s last three arguments.
  """
  B, T = target_probs.shape[:2]
  K, S = T - 1, state.tokens.shape[1]
  slot_1T = jnp.arange(T)[None]
  accepted_B1 = verdict.num_accepted[:, None]
  drafted_BT = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
  block_BT = jnp.where(slot_1T == accepted_B1, verdict.next_token[:, None], drafted_BT)

  is_eos_BT = functools.reduce(jnp.logical_or, [block_BT == eos for eos in config.eos_ids], jnp.zeros((B, T), bool))
  upto_eos_B = jnp.where(jnp.any(is_eos_BT, axis=1), jnp.argmax(is_eos_BT, axis=1) + 1, T + 1)
  room_B = jnp.minimum(state.limit, config.max_length) - state.length
  # A law of NaN is NaN throughout, so one column tells. It counts if verification got to it; then the round commits
  # nothing and ends its row.
  nan_BT = jnp.isnan(target_probs[..., 0]) | jnp.pad(jnp.isnan(draft.probs[..., 0]), ((0, 0), (0, 1)))
  broken_B = jnp.any(nan_BT & (slot_1T <= accepted_B1), axis=1) | ~verdict.is_law
  live_B = ~state.done & ~broken_B
  count_B = jnp.where(live_B, jnp.minimum(jnp.minimum(verdict.num_accepted + 1, upto_eos_B), room_B), 0)
  length_B = state.length + count_B

  kept_BT = slot_1T < count_B[:, None]
  from_draft_BT = kept_BT & (slot_1T < accepted_B1)
  is_bonus_BT = kept_BT & (slot_1T == accepted_B1) & (accepted_B1 == draft.num_drafted[:, None])
  where_BT = jnp.where(kept_BT, state.length[:, None] + slot_1T, S)
  put = lambda into_BS, what_BT: into_BS.at[jnp.arange(B)[:, None], where_BT].set(what_BT, mode='drop')
  logits_BT = at_tokens(logits_BTV, block_BT).astype(jnp.float32)
  logprobs_BT = logits_BT - jax.nn.logsumexp(logits_BTV.astype(jnp.float32), axis=-1)

  finish_B = jnp.select(
      [state.done, broken_B, count_B >= upto_eos_B, length_B >= state.limit, length_B >= config.max_length],
      [state.finish, Finish.NAN, Finish.EOS, Finish.LENGTH, Finish.CACHE_FULL],
      Finish.RUNNING,
  ).astype(jnp.int32)
  tested_BT = kept_BT & (slot_1T <= accepted_B1) & (slot_1T < draft.num_drafted[:, None])
  # Of a round of fewer tokens than the buffers are made for, the last columns count nothing.
  counted = lambda flags_BT: jnp.pad(flags_BT[:, :K], ((0, 0), (0, state.stats.accepted.shape[1] - K)))
  return state.replace(
      tokens=put(state.tokens, block_BT),
      length=length_B,
      done=finish_B != Finish.RUNNING,
      finish=finish_B,
      round=state.round + live_B,
      from_draft=put(state.from_draft, from_draft_BT),
      is_bonus=put(state.is_bonus, is_bonus_BT),
      logprobs=put(state.logprobs, logprobs_BT),
      ledger=keep_books(state.ledger, block_BT, kept_BT, where_BT) if state.ledger is not None else None,
      stats=DecodeStats(
          accepted=state.stats.accepted + counted(from_draft_BT),
          tested=state.stats.tested + counted(tested_BT),
      ),
  )


def decode_step(target, draft, rule, sampling, state, config) -> tuple[DecodeState, StepInfo]:
  """One round of every row: propose, score, verify, commit.

  Args: target LanguageModel; draft LanguageModel, `DraftSource` or None; rule `VerificationRule` or `Budget`, with
    numbers, one value per row, or one per row and drafted position [B, K] as leaves; sampling `SamplingParams`, with
    numbers or one value per row; state from `prefill`, by a config of as many drafted tokens or more.
  Returns: the new state, and what the round saw.
  """
  rule, sampling = settled(rule, sampling, state.length.shape[0], draft, config)
  layout = _layout(state)
  return _program(_decode_step, layout and (layout, None))(target, draft, rule, sampling, state, config)


def settled(rule, sampling, batch, draft, config):
  """Rule and sampling with strongly typed leaves. Raises ValueError for a rule that this decoder cannot serve."""
  if isinstance(rule, Budget):
    if not config.ledger:
      raise ValueError('a Budget steers by what it has spent: set ledger=True in DecodeConfig.')
    return per_row(rule, batch), per_row(sampling, batch)
  check_rule(rule)
  if config.block_verification:
    check_block_rule(rule)
  return per_row(rule, batch, slots=_num_draft(draft, config)), per_row(sampling, batch)


def _decode_step(target, draft, rule, sampling, state, config, back=None):
  keys = sampling_lib.round_keys(state.keys, state.round)
  with jax.named_scope('draft'):
    drafted, draft_cache = propose(draft, sampling, state, keys, config, back)
  with jax.named_scope('score'):
    target_probs, logits_BTV, target_cache = score(target, sampling, state, drafted, config)
  drafted = _as_wide(drafted, target_probs.shape[-1])
  judged_probs = _judged(rule, target_probs, logits_BTV)
  rule, charges = ledger_lib.plan(rule, state.ledger, drafted, target_probs, judged_probs, state.limit - state.length)
  judge = verify_block if config.block_verification else verify
  verdict = judge(rule, drafted, judged_probs, keys, bonus_probs=target_probs)
  keep_books = lambda ledger, *round: ledger_lib.record(
      ledger, rule, charges, drafted, target_probs, judged_probs, *round)
  state = commit(state, drafted, verdict, target_probs, logits_BTV, keep_books, config)
  state = state.replace(target_cache=target_cache, draft_cache=draft_cache)
  return state, StepInfo(draft=drafted, target_probs=target_probs, target_logits=logits_BTV, verdict=verdict)


def _judged(rule, target_probs, logits_BTV):
  """The laws that the rule judges by: the verifier's, or those of the rule's own temperature and filters."""
  params = getattr(rule, 'judged_by', None)
  return target_probs if params is None else to_probs(logits_BTV, per_row(params, logits_BTV.shape[0]))


def generate(target, draft, rule, sampling, state, config, max_rounds=None, min_live=1) -> DecodeState:
  """Rounds until fewer than min_live rows are left that have not ended, or max_rounds of them.

  Both bounds are traced numbers: the same compiled loop gives the whole text, a few rounds at a time for a host that
  streams, shows progress or looks for stop strings, or those until there is room for another text. `state` is donated:
  use the one that is returned. Where the round before drafted more than config.num_draft tokens, `catch_up` first.
  """
  rule, sampling = settled(rule, sampling, state.length.shape[0], draft, config)
  rounds = np.iinfo(np.int32).max if max_rounds is None else max_rounds
  bounds = [bound if isinstance(bound, jax.Array) else np.int32(bound) for bound in (rounds, min_live)]
  return _loop(state)(target, draft, rule, sampling, state, *bounds, config)


def catch_up(draft, state) -> DecodeState:
  """The state for a `generate` of fewer drafted tokens than the round before had; `state` is donated.

  A draft that reads hidden states re-reads, in each round, what one of as many tokens may have added. What a larger
  round has added it reads here. (Without, it keeps what it made of those tokens by itself, and is worse by a trifle.)
  Other drafts have nothing to catch up with.
  """
  if not _reads_hidden(draft):
    return state
  return _program(_catch_up, _layout(state), donate_argnames='state', static_argnames=())(draft, state)


def _catch_up(draft, state):
  return state.replace(draft_cache=_re_read(draft, state, _most_added(state))[1])


def _loop(state):
  """The compiled loop for states that are split over devices as this one."""
  return _program(_generate, _layout(state), donate_argnames='state')


def _generate(target, draft, rule, sampling, state, max_rounds, min_live, config):

  def unfinished(carry):
    state, rounds = carry
    return (jnp.sum(~state.done) >= jnp.maximum(min_live, 1)) & (rounds < max_rounds)

  def one_round(carry):
    state, rounds = carry
    state, _ = _decode_step(target, draft, rule, sampling, state, config, config.num_draft + 1)
    return state, rounds + 1

  state, _ = jax.lax.while_loop(unfinished, one_round, (state, jnp.int32(0)))
  return state
