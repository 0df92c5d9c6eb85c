"""Verification of a block against a plain loop over one row, and against its enumerated law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import sampling
from cactus_jax.records import per_row, record_class
from cactus_jax.rules import Cactus, Clamp, Exact
from cactus_jax.sampling import Draft, Role
from cactus_jax.verify import verify, verify_block
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


def close_call(reference, draft, target_probs, accept_uniforms):
  """Whether rounding may decide: a uniform next to a probability, or a recovery of what is all but nothing."""
  for i in range(draft.num_drafted):
    p, q, x = draft.probs[i].astype(np.float64), target_probs[i].astype(np.float64), draft.tokens[i]
    accept, recovery = reference(p, q)
    if abs(accept_uniforms[i] - accept[x]) < 1e-5:
      return True
    if accept_uniforms[i] >= accept[x]:
      return np.sum(p * (1 - accept)) < 1e-5
  return False


def token_at(law, uniform):
  """The tokens that inversion may give, allowing for rounding at the edge of two."""
  cumulative = np.cumsum(law) / np.sum(law)
  return {int(np.argmax(cumulative > min(uniform + error, 1 - 1e-9))) for error in (-1e-6, 0, 1e-6)}


JUDGED = (
  'exact', 'cactus-0.1', 'cactus-1', 'clamp-0.2', 'clamp-1', 'lenience-1.3', 'mentored-kl-0.05', 'chow-0.317',
  'interpolation-0.3', 'interpolation-0.3-published', 'typical-0.09-0.3', 'top_k-2', 'top_k-4-published',
)  # fmt: skip


@pytest.mark.parametrize('name', JUDGED)
def test_verdict_is_that_of_a_plain_loop(name):
  """Same uniforms, same outcome: longest accepted prefix, recovery at the first rejection, else the bonus."""
  draft, target_probs = random_block(0)
  [case] = [case for case in laws.RULES if case.name == name]
  rule, reference = case.rule, case.reference
  keys = jax.random.split(jax.random.key(0), ROWS)
  verdict = jax.tree.map(np.asarray, judge(per_row(rule, ROWS), draft, target_probs, keys))
  accept_uniforms, emit_uniforms = (np.asarray(x, np.float64) for x in uniforms_of(keys))
  ends = []
  for row in range(ROWS):
    one = jax.tree.map(lambda leaf: leaf[row], draft)
    if close_call(reference, one, target_probs[row], accept_uniforms[row]):
      continue
    num_accepted, law = judge_row(reference, one, target_probs[row], accept_uniforms[row], emit_uniforms[row])
    assert verdict.num_accepted[row] == num_accepted, row
    assert verdict.next_token[row] in token_at(law, emit_uniforms[row]), row
    ends.append((int(num_accepted), int(one.num_drafted)))
  assert len(ends) > 0.98 * ROWS
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


def test_laws_are_read_only_where_two_numbers_do_not_tell(monkeypatch):
  """Where the bounds decide, `accept_prob` is never asked; where they do not, as often as a row is in doubt."""
  draft, target_probs = random_block(3)
  keys = jax.random.split(jax.random.key(3), ROWS)
  calls = []

  @record_class
  class Counting(Clamp):
    def accept_prob(self, p, q, x):
      jax.debug.callback(lambda _: calls.append(1), x)
      return super().accept_prob(p, q, x)

  for tau, least, most in ((0.0, 0, 0), (0.5, 2, ROWS * K)):
    calls.clear()
    verdict = jax.block_until_ready(judge(per_row(Counting(tau), ROWS), draft, target_probs, keys))
    jax.effects_barrier()
    assert least <= len(calls) <= most
    np.testing.assert_array_equal(
      verdict.num_accepted, judge(per_row(Clamp(tau), ROWS), draft, target_probs, keys).num_accepted)


def test_a_number_for_each_drafted_position():
  """Positions with price 0 are verified as in speculative sampling, on the same uniforms."""
  draft, target_probs = random_block(4)
  keys = jax.random.split(jax.random.key(4), ROWS)
  run = lambda rule: np.asarray(judge(rule, draft, target_probs, keys).num_accepted)
  exact, relaxed = run(per_row(Exact(), ROWS)), run(per_row(Clamp(2.0), ROWS))
  first = run(per_row(Clamp(np.float32([[2.0, 0.0, 0.0, 0.0]])), ROWS, slots=K))
  assert np.all((first == 0) == (relaxed == 0)) and np.any((first == 0) != (exact == 0))
  later = run(per_row(Clamp(np.float32([[0.0, 2.0, 2.0, 2.0]])), ROWS, slots=K))
  assert np.all((later == 0) == (exact == 0)) and np.any(later > exact)


# Blocks of several tokens judged together.


def test_the_toy_of_block_verification():
  """p = (2/3, 1/3), q = (1/3, 2/3), two tokens: 11/9 are kept on average, token by token 10/9."""
  p, q = np.tile(np.float32([2 / 3, 1 / 3]), (2, 1)), np.tile(np.float32([1 / 3, 2 / 3]), (3, 1))
  keys = jax.random.split(jax.random.key(1), BLOCK_ROWS)
  rule = per_row(Exact(), BLOCK_ROWS)
  error = 5 / np.sqrt(BLOCK_ROWS)
  _, verdict = random_blocks(rule, p, q, keys, judge=verify_block)
  assert np.mean(verdict.num_accepted) == pytest.approx(11 / 9, abs=error)
  assert np.mean(random_blocks(rule, p, q, keys)[1].num_accepted) == pytest.approx(10 / 9, abs=error)
  q_VVV, p_VVV = np.tile([1 / 3, 2 / 3], (2, 2, 1)), np.tile([2 / 3, 1 / 3], (2, 2, 1))
  assert laws.block_rounds(q_VVV, p_VVV, lambda p, q: q, 2, (0, 0))[1] == pytest.approx(11 / 9)


def test_block_verification_of_fewer_proposals():
  """Padding is never kept, rows without proposals emit the verifier's token, one proposal is judged as by itself."""
  draft, target_probs = random_block(5)
  keys = jax.random.split(jax.random.key(5), ROWS)
  rule = per_row(Clamp(0.3), ROWS)
  verdict = jax.tree.map(np.asarray, jax.jit(verify_block)(rule, draft, target_probs, keys))
  by_token = jax.tree.map(np.asarray, judge(rule, draft, target_probs, keys))
  assert np.all(verdict.num_accepted <= draft.num_drafted)
  assert np.mean(verdict.num_accepted) > 0.5
  few = draft.num_drafted <= 1
  np.testing.assert_array_equal(verdict.num_accepted[few], by_token.num_accepted[few])
  np.testing.assert_array_equal(verdict.next_token[draft.num_drafted == 0], by_token.next_token[draft.num_drafted == 0])
  law = np.take_along_axis(target_probs, verdict.num_accepted[:, None, None], axis=1)[:, 0]
  assert np.all(law[np.arange(ROWS), verdict.next_token] > 0)


def test_block_verification_is_refused_for_rules_that_look_at_the_token():
  draft, target_probs = random_block(5)
  keys = jax.random.split(jax.random.key(5), ROWS)
  with pytest.raises(ValueError, match=r'Cactus has no fixed target law .* use Static\(Cactus\(...\)\)'):
    verify_block(per_row(Cactus(0.3), ROWS), draft, target_probs, keys)


BLOCK_ROWS = 60_000


@functools.partial(jax.jit, static_argnames='judge')
def random_blocks(rule, p, q, keys, judge=verify):
  """The tokens drafted and the verdict where every row has the same laws p f32[K, V] and q f32[K + 1, V]."""
  each_row = lambda x: jnp.broadcast_to(x[None], (BLOCK_ROWS, *x.shape))
  uniform = sampling.uniforms(keys, Role.DRAFT, p.shape[0])
  tokens = jnp.stack([sampling.sample(each_row(law), uniform[:, i]) for i, law in enumerate(p)], axis=1)
  draft = Draft(tokens=tokens, probs=each_row(p), num_drafted=jnp.full(BLOCK_ROWS, p.shape[0]))
  return tokens, judge(rule, draft, each_row(q), keys)


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
