"""Divergences between laws, and the programme of the paper solved for one token. Pure mathematics, batch-free.

Notation as in the paper: q is the verifier's law, h a relaxed law, q_x the probability of one token, delta the limit
on the divergence of h from q in nats. (Letters stop here and in rules.py; elsewhere: draft_probs, target_probs.)
"""

import jax.numpy as jnp


def kl(h, q):
  """KL(h || q) in nats, f32[]; infinite if h has mass where q has none. h, q: f32[V], laws."""
  ratio = jnp.where(h > 0, h, 1.0) / jnp.where(q > 0, q, 1.0)
  return jnp.sum(jnp.where(h > 0, jnp.where(q > 0, h * jnp.log(ratio), jnp.inf), 0.0))


def relaxed_prob(q_x, delta):
  """The most probability that a law within delta of q may give to one token.

  gamma = min(1, q_x + sqrt(2 delta q_x (1 - q_x))) is the paper's closed form: KL to second order around q_x, and
  exactly the root for Pearson's chi-square with limit 2 delta. The law that gives x this much and scales the other
  tokens down in proportion then satisfies KL(h || q) <= ln(1 + 2 delta) at every q_x.

  Args:
    q_x: f32[], probability of the token; a value that rounding has pushed beyond [0, 1] is clipped.
    delta: f32[] >= 0, nats.
  Returns: f32[] in [q_x, 1]; 0 if q_x is 0.
  Source: Hao and Mou (2026), arXiv 2604.04987, Corollary 5.
  """
  q_x = jnp.clip(q_x, 0.0, 1.0)
  return jnp.minimum(q_x + jnp.sqrt(2.0 * delta * q_x * (1.0 - q_x)), 1.0)
