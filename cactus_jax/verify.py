"""Verification of a drafted block: which prefix is kept and which token follows it. All randomness of acceptance."""

import flax.struct
import jax
import jax.numpy as jnp

from cactus_jax import sampling
from cactus_jax.records import per_slot
from cactus_jax.rules import METHODS, Checked, TargetRule, capped_ratio, normalised
from cactus_jax.sampling import Role, at_tokens


@flax.struct.dataclass
class Verdict:
  """The outcome of one round for each row."""

  num_accepted: jax.Array  # i32[B] in 0..K: drafted tokens kept
  next_token: jax.Array  # i32[B]: the token after them, a recovery or, when all were kept, a bonus
  is_law: jax.Array  # bool[B]: whether it was drawn from numbers; NaN laws give no token that may be used


def verify(rule, draft, target_probs, keys, bonus_probs=None):
  """Token-wise verification: the longest prefix of the draft whose every token is accepted, and the token after it.

  At the first rejection the rule's recovery is drawn; if every proposal was accepted, the verifier's own law at the
  next position (the bonus). Whole laws are read only where they must be: for the recovery, and for a token whose
  uniform falls between the rule's `accept_bounds`. No array of the size of all laws is made.

  Args:
    rule: `VerificationRule` with leaves [B], or [B, K]: the rule of each row and drafted position.
    draft: `Draft` of K tokens.
    target_probs: f32[B, K+1, V], the verifier's law at each drafted position and the one after.
    keys: key[B], this round's key of each row.
    bonus_probs: the same, where the law of the bonus is not the one that the rule judges by.
  Source: Leviathan et al. (2023), Algorithm 1, for any rule.
  """
  B, K = draft.tokens.shape
  rule = per_slot(rule, K)
  bonus_probs = target_probs if bonus_probs is None else bonus_probs
  if K == 0:
    num_accepted, emit_law = jnp.zeros(B, jnp.int32), bonus_probs[:, 0]
  else:
    uniform_BK = sampling.uniforms(keys, Role.ACCEPT, K)
    accepted_BK = _accepted(rule, draft, target_probs, uniform_BK)
    num_accepted = jnp.sum(jnp.cumprod(accepted_BK, axis=1), axis=1, dtype=jnp.int32)
    slot_B = jnp.minimum(num_accepted, K - 1)
    recovery_law = jax.vmap(type(rule).recovery)(
        _at(rule, slot_B), _at(draft.probs, slot_B), _at(target_probs, slot_B), _at(draft.tokens, slot_B))
    bonus = num_accepted == draft.num_drafted
    emit_law = jnp.where(bonus[:, None], _at(bonus_probs, num_accepted), recovery_law)
  return _verdict(num_accepted, emit_law, keys)


def _verdict(num_accepted, emit_law, keys):
  next_token = sampling.sample(emit_law, sampling.uniforms(keys, Role.EMIT, 1)[:, 0])
  return Verdict(num_accepted=num_accepted, next_token=next_token, is_law=~jnp.isnan(jnp.sum(emit_law, axis=1)))


def _at(tree, index_B):
  """Leaves [B, ...] at one index of the second axis in each row."""
  pick = lambda x: jnp.take_along_axis(x, index_B.reshape(index_B.shape + (1,) * (x.ndim - 1)), axis=1)[:, 0]
  return jax.tree.map(pick, tree)


def _accepted(rule, draft, target_probs, uniform_BK):
  """bool[B, K]: u < accept_prob, exact up to and including the first rejection of each row."""
  K = draft.tokens.shape[1]
  drafted_BK = jnp.arange(K)[None] < draft.num_drafted[:, None]
  if hasattr(rule, 'accept_bounds'):
    bounds = jax.vmap(jax.vmap(type(rule).accept_bounds))
    low_BK, high_BK = bounds(
        rule, at_tokens(draft.probs, draft.tokens), at_tokens(target_probs[:, :K], draft.tokens))
  else:
    low_BK, high_BK = jnp.zeros_like(uniform_BK), jnp.ones_like(uniform_BK)
  # Strict: probability 0 is never accepted. (A NaN is neither below nor above: such a token is rejected.)
  accepted_BK = (uniform_BK < low_BK) & drafted_BK
  open_BK = ~(uniform_BK < low_BK) & (uniform_BK < high_BK) & drafted_BK

  first = lambda accepted_BK: jnp.argmin(accepted_BK, axis=1)  # 0 where all are accepted, and then it is not open

  def undecided(carry):
    accepted_BK, open_BK = carry
    return jnp.any(_at(open_BK, first(accepted_BK)))

  def decide(carry):
    """Settles, in every row, the first token that is not accepted yet."""
    accepted_BK, open_BK = carry
    slot_B = first(accepted_BK)
    accept_prob = jax.vmap(type(rule).accept_prob)(
        _at(rule, slot_B), _at(draft.probs, slot_B), _at(target_probs, slot_B), _at(draft.tokens, slot_B))
    here_BK = (jnp.arange(K)[None] == slot_B[:, None]) & open_BK
    accepted_BK |= here_BK & (uniform_BK < accept_prob[:, None])
    return accepted_BK, open_BK & ~here_BK

  return jax.lax.while_loop(undecided, decide, (accepted_BK, open_BK))[0]


def verify_block(rule, draft, target_probs, keys, bonus_probs=None):
  """Block verification: as `verify`, for the same law of the text, but it judges prefixes and so keeps more tokens.

  A prefix is kept with a probability that depends on all of its ratios t / p together. Rejecting a token no longer ends
  the matter: the longest prefix that passes is kept. Arguments as for `verify`; the rule must be a `TargetRule`, and
  its laws are read at all K positions.

  Raises: ValueError for a rule whose target depends on the drafted token.
  Source: Sun et al. (2024), arXiv 2403.10444, Algorithm 2, towards any fixed target.
  """
  check_block_rule(rule)
  B, K = draft.tokens.shape
  if K == 0:
    return verify(rule, draft, target_probs, keys, bonus_probs)
  rule = per_slot(rule, K)
  bonus_probs = target_probs if bonus_probs is None else bonus_probs
  target_BKV = jax.vmap(jax.vmap(type(rule).target))(rule, draft.probs, target_probs[:, :K])
  target_BK, probs_BK = at_tokens(target_BKV, draft.tokens), at_tokens(draft.probs, draft.tokens)

  def extend(reach_B, cell):
    # The probability that the drafts so far are kept, as far as their ratios say: min(1, reach * t / p).
    reach_B = capped_ratio(reach_B * cell[0], cell[1])
    return reach_B, reach_B

  _, reached = jax.lax.scan(extend, jnp.ones(B), (target_BK.T, probs_BK.T))
  reach_BT = jnp.concatenate([jnp.ones((B, 1)), reached.T], axis=1)  # of prefixes of 0..K tokens
  residual_BK = jnp.sum(jnp.maximum(reach_BT[:, :K, None] * target_BKV - draft.probs, 0.0), axis=-1)
  norm_BK = residual_BK + 1.0 - reach_BT[:, :K]
  passes_BT = jnp.pad(jnp.where(norm_BK > 0, residual_BK / jnp.where(norm_BK > 0, norm_BK, 1.0), 1.0), ((0, 0), (0, 1)))
  length_1T = jnp.arange(K + 1)[None]
  passes_BT = jnp.where(length_1T == draft.num_drafted[:, None], reach_BT, passes_BT)  # the whole draft
  passed_BK = (sampling.uniforms(keys, Role.ACCEPT, K) < passes_BT[:, 1:]) & (
      length_1T[:, 1:] <= draft.num_drafted[:, None])
  num_accepted = jnp.max(jnp.where(passed_BK, length_1T[:, 1:], 0), axis=1).astype(jnp.int32)

  slot_B = jnp.minimum(num_accepted, K - 1)
  target_BV = _at(target_BKV, slot_B)
  residual_BV = _at(reach_BT, slot_B)[:, None] * target_BV - _at(draft.probs, slot_B)
  bonus = num_accepted == draft.num_drafted
  emit_law = jnp.where(bonus[:, None], _at(bonus_probs, num_accepted), jax.vmap(normalised)(residual_BV, target_BV))
  return _verdict(num_accepted, emit_law, keys)


def check_rule(rule):
  """Raises ValueError for what is no rule, or is one that jit would not tell from others."""
  name = type(rule).__name__
  missing = [method for method in METHODS if not hasattr(rule, method)]
  if isinstance(rule, type) or missing:
    raise ValueError(f'rule={rule!r:.60}: need a verification rule, such as Exact() or Cactus(delta=1.0), or a Budget; '
                     f'a rule of your own needs {", ".join(missing) or "its numbers"}.')
  if isinstance(rule, Checked):
    raise ValueError('Checked(rule) reads plain arrays, outside jit: decode with the rule itself.')
  if getattr(rule, '_flax_dataclass', False) or jax.tree_util.all_leaves([rule]):
    raise ValueError(f'{name} is no cactus_jax.record_class: make it one. (Of other classes jit knows no numbers, and '
                     'flax dataclasses it may take for one another.)')


def check_block_rule(rule):
  """Raises ValueError for a rule that cannot be verified a block at a time, naming one of the same law that can."""
  if not isinstance(rule, TargetRule):
    name = type(rule).__name__
    raise ValueError(f'{name} has no fixed target law (what it aims at depends on the drafted token), so it cannot be '
                     f'verified a block at a time: use Static({name}(...)), which emits the same law.')
