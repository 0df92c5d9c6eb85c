"""Verification of a block against a plain loop over one row, and against its enumerated law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import sampling
from cactus_jax.rules import Cactus, Exact
from cactus_jax.sampling import Draft, Role, per_row
from cactus_jax.verify import verify
from tests import laws

K, V, ROWS = 4, 7, 512
judge = jax.jit(verify)


@jax.jit
def uniforms_of(keys):
  return sampling.uniforms(keys, Role.ACCEPT, K), sampling.uniforms(keys, Role.EMIT, 1)[:, 0]


def random_block(seed):
  """A draft with tokens drawn from its laws and any number of proposals, and the verifier's laws."""
  rng = np.random.default_rng(seed)
  p, q = (x.reshape(ROWS, K + 1, V) for x in laws.law_pairs(rng, V, ROWS * (K + 1)))
  order = rng.permutation(ROWS * (K + 1))
  p, q = (x.reshape(-1, V)[order].reshape(x.shape) for x in (p, q))
  close = rng.random((ROWS, K + 1, 1)) < 0.7  # so that a good part of the rows goes far
  p = np.where(close, q, p)[:, :K]
  cumulative = np.cumsum(p, axis=-1) / np.sum(p, axis=-1, keepdims=True)
  tokens = np.minimum(np.sum(cumulative <= rng.random((ROWS, K, 1)), axis=-1), V - 1)
  num_drafted = np.where(rng.random(ROWS) < 0.5, K, rng.integers(0, K + 1, ROWS))
  return Draft(tokens=tokens.astype(np.int32), probs=p, num_drafted=num_drafted.astype(np.int32)), q


def judge_row(reference, draft, target_probs, accept_uniforms, emit_uniform):
  """num_accepted and the cumulative law of the next token, by the book."""
  for i in range(draft.num_drafted):
    x = draft.tokens[i]
    accept, recovery = reference(draft.probs[i].astype(np.float64), target_probs[i].astype(np.float64))
    if not accept_uniforms[i] < accept[x]:
      return i, recovery[x]
  return draft.num_drafted, target_probs[draft.num_drafted].astype(np.float64)


def token_at(law, uniform):
  """The tokens that inversion may give, allowing for rounding at the edge of two."""
  cumulative = np.cumsum(law) / np.sum(law)
  return {int(np.argmax(cumulative > min(uniform + error, 1 - 1e-9))) for error in (-1e-6, 0, 1e-6)}


@pytest.mark.parametrize('delta', [None, 0.05, 1.0], ids=str)
def test_verdict_is_that_of_a_plain_loop(delta):
  """Same uniforms, same outcome: longest accepted prefix, recovery at the first rejection, else the bonus."""
  draft, target_probs = random_block(0)
  rule, reference = (
    (Exact(), laws.exact_reference) if delta is None else (Cactus(delta), laws.cactus_reference(delta))
  )
  keys = jax.random.split(jax.random.key(0), ROWS)
  verdict = jax.tree.map(np.asarray, judge(per_row(rule, ROWS), draft, target_probs, keys))
  accept_uniforms, emit_uniforms = (np.asarray(x, np.float64) for x in uniforms_of(keys))
  ends = []
  for row in range(ROWS):
    one = jax.tree.map(lambda leaf: leaf[row], draft)
    num_accepted, law = judge_row(reference, one, target_probs[row], accept_uniforms[row], emit_uniforms[row])
    assert verdict.num_accepted[row] == num_accepted, row
    assert verdict.next_token[row] in token_at(law, emit_uniforms[row]), row
    ends.append((int(num_accepted), int(one.num_drafted)))
  assert {(n, K) for n in range(K + 1)} <= set(ends)  # a rejection at every position, and none
  assert {(0, 0), (1, 1), (0, 2), (3, 3)} <= set(ends)  # fewer proposals, kept or not


def test_each_row_has_its_own_delta():
  draft, target_probs = random_block(1)
  keys = jax.random.split(jax.random.key(1), ROWS)
  deltas = np.where(np.arange(ROWS) % 2, 0.0, 1.0).astype(np.float32)
  mixed = judge(per_row(Cactus(deltas), ROWS), draft, target_probs, keys)
  for delta in (0.0, 1.0):
    rows, alike = deltas == delta, judge(per_row(Cactus(delta), ROWS), draft, target_probs, keys)
    np.testing.assert_array_equal(mixed.num_accepted[rows], alike.num_accepted[rows])
    np.testing.assert_array_equal(mixed.next_token[rows], alike.next_token[rows])


def test_without_proposals_the_next_token_is_the_verifiers():
  """No slots at all, or no proposals in them: the same draw."""
  draft, target_probs = random_block(2)
  keys = jax.random.split(jax.random.key(2), ROWS)
  rule = per_row(Cactus(0.5), ROWS)
  empty = Draft(
    tokens=jnp.zeros((ROWS, 0), jnp.int32),
    probs=jnp.zeros((ROWS, 0, V)),
    num_drafted=jnp.zeros(ROWS, jnp.int32),
  )
  plain = judge(rule, empty, target_probs[:, :1], keys)
  unused = judge(rule, draft.replace(num_drafted=np.zeros(ROWS, np.int32)), target_probs, keys)
  for verdict in (plain, unused):
    np.testing.assert_array_equal(verdict.num_accepted, 0)
  np.testing.assert_array_equal(plain.next_token, unused.next_token)
  uniform = np.asarray(uniforms_of(keys)[1], np.float64)
  assert all(
    int(token) in token_at(law, u) for token, law, u in zip(plain.next_token, target_probs[:, 0], uniform)
  )


def test_a_token_the_verifier_cannot_emit_is_never_kept():
  """Nor is it what replaces a rejected one, over 20,000 rows of laws with disjoint or smaller supports."""
  rows, rng = 20_000, np.random.default_rng(0)
  q = rng.dirichlet(np.ones(V), (rows, K + 1)) * (rng.random((rows, K + 1, V)) < 0.5)
  q[..., 0] += 1e-3
  q = (q / q.sum(axis=-1, keepdims=True)).astype(np.float32)
  tokens = rng.integers(0, V, (rows, K)).astype(np.int32)
  draft = Draft(
    tokens=tokens, probs=np.full((rows, K, V), 1 / V, np.float32), num_drafted=np.full(rows, K, np.int32)
  )
  verdict = judge(per_row(Cactus(100.0), rows), draft, q, jax.random.split(jax.random.key(0), rows))
  num_accepted, next_token = np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)
  kept = np.arange(K)[None] < num_accepted[:, None]
  of_draft = np.take_along_axis(q[:, :K], tokens[..., None], axis=-1)[..., 0]
  assert np.all(of_draft[kept] > 0) and np.sum(of_draft == 0) > 1000
  assert np.all(q[np.arange(rows), num_accepted, next_token] > 0)
  assert len(set(num_accepted)) == K + 1


@pytest.mark.parametrize('rule', [Exact(), Cactus(100.0)], ids=['exact', 'cactus'])
def test_the_edges_of_the_uniforms(rule, monkeypatch):
  """u = 0 keeps no token of probability 0, and the largest u keeps one that is always kept."""
  p = np.tile(np.float32([0.5, 0.5, 0]), (2, K, 1))
  q = np.tile(np.float32([0.5, 0.5, 0]), (2, K + 1, 1))
  q[0] = [0, 0.5, 0.5]  # row 0 drafts what the verifier cannot emit, row 1 what both say equally
  draft = Draft(tokens=jnp.zeros((2, K), jnp.int32), probs=p, num_drafted=jnp.full(2, K))
  for uniform, accepted in ((0.0, [0, K]), (1 - 2.0**-24, [0, K])):
    monkeypatch.setattr(
      sampling, 'uniforms', lambda keys, role, slots: jnp.full((keys.shape[0], slots), uniform)
    )
    verdict = jax.jit(lambda *args: verify(*args))(
      per_row(rule, 2), draft, q, jax.random.split(jax.random.key(0), 2)
    )
    assert verdict.num_accepted.tolist() == accepted
    assert verdict.next_token.tolist() == [2, int(uniform > 0)]


BLOCK_ROWS = 60_000


@jax.jit
def random_blocks(rule, p, q, keys):
  """The tokens drafted and the verdict where every row has the same laws p f32[K, V] and q f32[K + 1, V]."""
  each_row = lambda x: jnp.broadcast_to(x[None], (BLOCK_ROWS, *x.shape))
  uniform = sampling.uniforms(keys, Role.DRAFT, p.shape[0])
  tokens = jnp.stack([sampling.sample(each_row(law), uniform[:, i]) for i, law in enumerate(p)], axis=1)
  draft = Draft(tokens=tokens, probs=each_row(p), num_drafted=jnp.full(BLOCK_ROWS, p.shape[0]))
  return tokens, verify(rule, draft, each_row(q), keys)


@pytest.mark.parametrize('delta', [0.0, 0.05], ids=str)
def test_law_of_a_block(delta):
  """60,000 blocks of up to 3 tokens against the enumerated law of their 39 outcomes: chi-square, |z| < 5."""
  p, q = (
    np.float32([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]),
    np.float32([[0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]),
  )
  keys = jax.random.split(jax.random.key(0), BLOCK_ROWS)
  tokens, verdict = jax.tree.map(np.asarray, random_blocks(per_row(Cactus(delta), BLOCK_ROWS), p, q, keys))
  counts = np.zeros((3, 3, 3, 3))  # num_accepted, then the tokens, those not emitted as 0
  block = np.where(np.arange(3) < verdict.num_accepted[:, None], np.pad(tokens, ((0, 0), (0, 1))), 0)
  block[np.arange(BLOCK_ROWS), verdict.num_accepted] = verdict.next_token
  np.add.at(counts, (verdict.num_accepted, *block.T), 1)

  law = np.zeros_like(counts)
  accept, recovery = zip(
    *(laws.cactus_reference(delta)(p[i].astype(float), q[i].astype(float)) for i in range(2))
  )
  kept = [p[i] * accept[i] for i in range(2)]
  replaced = [(p[i] * (1 - accept[i])) @ recovery[i] for i in range(2)]
  law[0, :, 0, 0] = replaced[0]
  law[1, :, :, 0] = kept[0][:, None] * replaced[1][None]
  law[2] = kept[0][:, None, None] * kept[1][None, :, None] * q[2][None, None]
  assert abs(law.sum() - 1) < 1e-6
  assert abs(laws.chi_square_z(counts.reshape(1, -1), law.reshape(1, -1))) < 5
  assert np.all(np.bincount(verdict.num_accepted) > 2000)
