"""Verification of a drafted block: which prefix is kept and which token follows it. All randomness of acceptance."""

import flax.struct
import jax
import jax.numpy as jnp

from cactus_jax import sampling
from cactus_jax.sampling import Role


@flax.struct.dataclass
class Verdict:
  """The outcome of one round for each row."""

  num_accepted: jax.Array  # i32[B] in 0..K: drafted tokens kept
  next_token: jax.Array  # i32[B]: the token after them, a recovery or, when all were kept, a bonus


def verify(rule, draft, target_probs, keys):
  """Token-wise verification: the longest prefix of the draft whose every token is accepted, and the token after it.

  At the first rejection the rule's recovery is drawn; if every proposal was accepted, the verifier's own law at the
  next position (the bonus). Only that one position needs the whole vocabulary; an acceptance test reads two numbers.

  Args:
    rule: `VerificationRule` with leaves [B].
    draft: `Draft` of K tokens.
    target_probs: f32[B, K+1, V], the verifier's law at each drafted position and the one after.
    keys: key[B], this round's key of each row.
  Source: Leviathan et al. (2023), Algorithm 1, for any rule.
  """
  K = draft.tokens.shape[1]
  if K == 0:
    emit_law = target_probs[:, 0]
    num_accepted = jnp.zeros(target_probs.shape[0], jnp.int32)
  else:
    accept_prob = jax.vmap(jax.vmap(type(rule).accept_prob, (None, 0, 0, 0)))(
        rule, draft.probs, target_probs[:, :K], draft.tokens)
    accepted = sampling.uniforms(keys, Role.ACCEPT, K) < accept_prob  # strict: probability 0 is never accepted
    accepted &= jnp.arange(K)[None] < draft.num_drafted[:, None]
    num_accepted = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)

    at = lambda x, i: jnp.take_along_axis(x, i.reshape(i.shape + (1,) * (x.ndim - 1)), axis=1)[:, 0]
    rejected = jnp.minimum(num_accepted, K - 1)
    bonus_law = at(target_probs, num_accepted)
    recovery_law = jax.vmap(type(rule).recovery)(
        rule, at(draft.probs, rejected), at(target_probs, rejected), at(draft.tokens, rejected))
    emit_law = jnp.where((num_accepted == draft.num_drafted)[:, None], bonus_law, recovery_law)
  next_token = sampling.sample(emit_law, sampling.uniforms(keys, Role.EMIT, 1)[:, 0])
  return Verdict(num_accepted=num_accepted, next_token=next_token)
