"""Every rule against its formula, by enumeration over small vocabularies.

Notation as in the paper: p is the draft's law, q the verifier's, h a relaxed law, x the drafted token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import divergence
from cactus_jax.records import check_number, per_row
from cactus_jax.rules import Cactus, CactusExact, Clamp, Exact, Lenience, Mentored
from tests import fakes, laws

VOCABS = (2, 3, 7)
PAIRS = 200  # of each vocabulary; float32 laws, so a rounding away from sums of 1

PAIR = fakes.random_markov(0, fakes.VOCAB), fakes.random_markov(1, fakes.VOCAB)

each_rule = pytest.mark.parametrize('case', laws.RULES, ids=lambda case: case.name)


@functools.lru_cache
def pairs(vocab):
  return laws.law_pairs(np.random.default_rng(vocab), vocab, PAIRS)


@jax.jit
def outcomes_of(rule, p, q):
  """accept f32[N, V], recovery f32[N, V, V] of every drafted token, and output_law f32[N, V]."""

  def of_pair(p, q):
    tokens = jnp.arange(p.shape[0])
    accept = jax.vmap(lambda x: rule.accept_prob(p, q, x))(tokens)
    return accept, jax.vmap(lambda x: rule.recovery(p, q, x))(tokens), rule.output_law(p, q)

  return jax.vmap(of_pair)(p, q)


@functools.cache
def outcomes(case, vocab):
  """Laws and outcomes in float64, and the reference's accept and recovery."""
  p, q = pairs(vocab)
  rule = jax.tree.map(jnp.float32, case.rule)  # one program for every delta
  accept, recovery, output = (np.asarray(x, np.float64) for x in outcomes_of(rule, p, q))
  # A subnormal number is 0 to a processor that flushes it, and then some rules give its token nothing.
  p, q = (np.where(law < np.finfo(np.float32).tiny, 0, law).astype(np.float64) for law in (p, q))
  expected = [case.reference(*pair) for pair in zip(p, q)]
  return p, q, accept, recovery, output, *(np.stack(x) for x in zip(*expected))


@pytest.fixture(params=VOCABS, ids=lambda vocab: f'V{vocab}')
def vocab(request):
  return request.param


@each_rule
def test_accept_and_recovery_follow_the_formula(case, vocab):
  """P(draft x, keep it) and P(draft x, replace it by y): a recovery that rounding decides is rare."""
  p, _, accept, recovery, _, expected_accept, expected_recovery = outcomes(case, vocab)
  np.testing.assert_allclose(p * accept, p * expected_accept, atol=2e-6)
  np.testing.assert_allclose(
    (p * (1 - accept))[..., None] * recovery,
    (p * (1 - expected_accept))[..., None] * expected_recovery,
    atol=2e-6,
  )
  usual = p > 1e-30 if isinstance(case.rule, (Exact, Cactus, CactusExact)) else p > 0.1
  np.testing.assert_allclose(accept[usual], expected_accept[usual], rtol=1e-5, atol=1e-5)


@each_rule
def test_output_law_is_that_of_the_enumeration(case, vocab):
  p, _, accept, recovery, output, expected_accept, expected_recovery = outcomes(case, vocab)
  for row, law in enumerate(output):
    np.testing.assert_allclose(
      law, laws.emitted_law(p[row], expected_accept[row], expected_recovery[row]), atol=1e-5
    )
    np.testing.assert_allclose(law, laws.emitted_law(p[row], accept[row], recovery[row]), atol=1e-5)
  np.testing.assert_allclose(output.sum(axis=-1), 1.0, atol=1e-5)
  assert np.all(output >= 0)


@each_rule
def test_lossless_says_whether_the_law_is_the_verifiers(case, vocab):
  p, q, accept, recovery, *_ = outcomes(case, vocab)
  enumerated = np.stack([laws.emitted_law(*row) for row in zip(p, accept, recovery)])
  distance = np.abs(enumerated - q).max()
  if case.rule.lossless or case.exact:
    assert distance < 1e-5
  else:
    assert distance > 0.01


@each_rule
def test_accept_prob_is_a_probability_and_zero_where_the_verifier_has_none(case, vocab):
  p, q, accept, *_ = outcomes(case, vocab)
  assert np.all((accept >= 0) & (accept <= 1))  # and no NaN
  assert np.any((q == 0) & (p > 0)) and np.any((q == 0) & (p == 0))
  assert case.inside == np.all(accept[(q == 0) & (p > 0)] == 0)


@each_rule
def test_recovery_is_always_a_law_off_the_rejected_token(case, vocab):
  """Even if no residual is left; within the verifier's support; on x only if that holds nothing else."""
  _, q, accept, recovery, *_ = outcomes(case, vocab)
  assert np.all(recovery >= 0)
  np.testing.assert_allclose(recovery.sum(axis=-1), 1.0, atol=1e-6)
  support = np.where(q < np.finfo(np.float32).tiny, 0, q)  # what is subnormal may be flushed to zero, or not
  outside = np.broadcast_to((q == 0)[:, None], recovery.shape)
  assert not case.inside or np.all(recovery[outside] == 0)
  others = support[:, None] * (1 - np.eye(vocab))
  on_itself = np.diagonal(recovery, axis1=1, axis2=2)
  again = on_itself[(others.sum(axis=-1) > 0) & (accept < 1)]
  assert not case.replaces or np.all(again == 0)
  assert np.any(others.sum(axis=-1) == 0)


@each_rule
def test_recovery_is_a_law_where_p_equals_q(case):
  """No residual is left; rounding alone must not choose the token."""
  if not (case.rule.lossless or case.exact):
    pytest.skip('this rule may have something to recover there')
  q = jnp.asarray([0.1, 0.2, 0.3, 0.4], jnp.float32)
  _, recovery, _ = outcomes_of(jax.tree.map(jnp.float32, case.rule), q[None], q[None])
  expected = np.asarray(q) * (1 - np.eye(4))
  np.testing.assert_allclose(recovery[0], expected / expected.sum(axis=-1, keepdims=True), rtol=1e-6)


@each_rule
def test_no_rule_accepts_more_than_its_output_law_allows(case, vocab):
  """A <= sum min(p, h) for every rule; an efficient one attains it."""
  p, _, accept, _, output, *_ = outcomes(case, vocab)
  accepted, limit = np.sum(p * accept, axis=-1), np.sum(np.minimum(p, output), axis=-1)
  assert np.all(accepted <= limit + 1e-5)
  if case.efficient:
    np.testing.assert_allclose(accepted, limit, atol=1e-5)


@each_rule
def test_output_law_lies_between_the_two_laws(case, vocab):
  """Theorem 3: coordinatewise between p and q, hence KL(h || q) <= KL(p || q)."""
  p, q, _, _, output, *_ = outcomes(case, vocab)
  if not case.between:
    pytest.skip('this rule may leave the interval')
  assert np.all(output >= np.minimum(p, q) - 1e-5)
  assert np.all(output <= np.maximum(p, q) + 1e-5)
  for p_row, q_row, h_row in zip(p, q, output):
    if q_row[q_row > 0].min() > 1e-6 and np.all(h_row[q_row == 0] == 0):
      assert laws.kl(h_row, q_row) <= laws.kl(p_row, q_row) + 1e-4


def test_cactus_at_zero_is_exact(vocab):
  p, q = pairs(vocab)
  exact, cactus = outcomes_of(Exact(), p, q), outcomes_of(Cactus(jnp.float32(0)), p, q)
  for one, other in zip(exact[:2], cactus[:2]):
    np.testing.assert_allclose(one, other, atol=1e-6)
  np.testing.assert_allclose(exact[2], cactus[2], atol=1e-5)


def test_cactus_at_zero_emits_the_tokens_of_exact():
  """Same keys, same tokens through the whole loop."""
  run = functools.partial(
    fakes.run, *PAIR, prompts=[[1, 2]] * fakes.BATCH, max_new=100, config=fakes.usual_config()
  )
  exact, cactus = run(rule=Exact()), run(rule=Cactus(0.0))
  assert np.sum(exact.stats.tested) > np.sum(exact.stats.accepted) > 0
  np.testing.assert_array_equal(exact.tokens, cactus.tokens)
  np.testing.assert_array_equal(exact.from_draft, cactus.from_draft)
  assert np.any(run(rule=Cactus(0.1)).tokens != exact.tokens)


def test_a_large_delta_keeps_whatever_the_verifier_can_emit(vocab):
  p, q = pairs(vocab)
  accept, *_ = outcomes_of(Cactus(jnp.float32(1e9)), p, q)
  assert np.all(np.asarray(accept)[q > 1e-6] >= 1 - 1e-6)


def test_acceptance_rises_with_delta(vocab):
  p, q = pairs(vocab)
  accepts = [np.asarray(outcomes_of(Cactus(jnp.float32(delta)), p, q)[0]) for delta in laws.DELTAS]
  for less, more in zip(accepts, accepts[1:]):
    assert np.all(more >= less)
  assert np.any(accepts[-1] > accepts[0] + 0.5)


# gamma to four places in a table of the paper's closed form: rows are q_x, columns are delta.
GAMMA_DELTAS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)
GAMMA = {
  1e-6: (0.0004, 0.0007, 0.0010, 0.0012, 0.0014, 0.0020),
  1e-4: (0.0046, 0.0072, 0.0101, 0.0123, 0.0142, 0.0201),
  0.01: (0.0545, 0.0804, 0.1095, 0.1319, 0.1507, 0.2090),
  0.1: (0.2342, 0.3121, 0.4000, 0.4674, 0.5243, 0.7000),
  0.3: (0.5049, 0.6240, 0.7583, 0.8612, 0.9481, 1),
  0.4: (0.6191, 0.7464, 0.8899, 1, 1, 1),
  0.5: (0.7236, 0.8536, 1, 1, 1, 1),
  0.6: (0.8191, 0.9464, 1, 1, 1, 1),
  0.7: (0.9049, 1, 1, 1, 1, 1),
  0.8: (0.9789, 1, 1, 1, 1, 1),
  0.9: (1, 1, 1, 1, 1, 1),
}


def test_relaxed_prob_matches_the_table():
  q_x, delta = jnp.asarray(list(GAMMA), jnp.float32), jnp.asarray(GAMMA_DELTAS, jnp.float32)
  gamma = divergence.relaxed_prob(q_x[:, None], delta[None])
  np.testing.assert_allclose(gamma, np.array(list(GAMMA.values())), atol=6e-5)


def test_the_figure_of_the_paper():
  """q = (.30, .35, .35), p = (.05, .80, .15): acceptance of the second token from 44% to 82% at KL .20."""
  p, q = (jnp.asarray(x, jnp.float32) for x in ((0.05, 0.80, 0.15), (0.30, 0.35, 0.35)))
  h = laws.relaxed_law(np.asarray(q, np.float64), 1, 0.211)
  np.testing.assert_allclose(h, (0.16, 0.66, 0.18), atol=5e-3)
  np.testing.assert_allclose(divergence.kl(jnp.asarray(h, jnp.float32), q), 0.20, atol=5e-3)
  np.testing.assert_allclose(Exact().accept_prob(p, q, 1), 0.44, atol=5e-3)
  np.testing.assert_allclose(Cactus(0.211).accept_prob(p, q, 1), 0.82, atol=6e-3)
  np.testing.assert_allclose(
    Cactus(0.211).recovery(p, q, 1),
    (h - np.asarray(p)).clip(0) * [1, 0, 1] / ((h - np.asarray(p)).clip(0) * [1, 0, 1]).sum(),
    atol=1e-5,
  )


def test_output_law_holds_up_over_a_large_vocabulary():
  """Sums over 20,000 tokens in float32 against the direct sum in float64."""
  rng = np.random.default_rng(0)
  logits = 2.5 * rng.normal(size=20_000)
  q, p = (laws.softmax(logits + noise * rng.normal(size=logits.size)) for noise in (0.3, 0.6))
  p, q = (x.astype(np.float32) for x in (p, q))
  got = np.asarray(
    jax.jit(lambda rule, p, q: rule.output_law(p, q))(Cactus(jnp.float32(0.01)), p, q), np.float64
  )

  p, q = p.astype(np.float64), q.astype(np.float64)
  gamma = np.minimum(1, q + np.sqrt(0.02 * q * (1 - q)))
  expected = np.minimum(p, gamma)
  for x in np.flatnonzero(p > gamma):
    weights = np.maximum((1 - gamma[x]) / (1 - q[x]) * q - p, 0)
    weights[x] = 0
    expected += (p[x] - gamma[x]) * weights / weights.sum()
  assert np.sum(np.maximum(p - gamma, 0)) > 0.01
  assert np.abs(got - expected).sum() < 1e-4
  np.testing.assert_allclose(got, expected, rtol=0.01, atol=1e-8)


@pytest.mark.parametrize('rule', [Clamp(0.5), Lenience(2.0), Mentored(0.1)], ids=repr)
def test_a_law_that_is_none_stays_none(rule):
  """And so ends its row."""
  p, q = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.5, jnp.nan, 0.0])
  assert np.isnan(rule.target(p, q)).any() and np.isnan(rule.output_law(p, q)).any()


@pytest.mark.parametrize(
  'delta', [-0.1, float('nan'), float('inf'), '1', True, [0.1, -1.0], np.array([1.0, np.nan])], ids=str
)
def test_a_delta_that_is_no_number_of_nats_is_refused(delta):
  with pytest.raises(ValueError, match=r'delta=.*need a finite number of nats >= 0 \(0 is exact\)'):
    Cactus(delta)


def test_delta_may_differ_by_row():
  """Rows with their own delta emit what each emits when all have it."""
  run = functools.partial(
    fakes.run, *PAIR, prompts=[[1, 2]] * fakes.BATCH, max_new=100, config=fakes.usual_config()
  )
  deltas = np.where(np.arange(fakes.BATCH) % 2, 1.0, 0.1).astype(np.float32)
  mixed = run(rule=Cactus(deltas))
  for delta in (0.1, 1.0):
    rows = deltas == np.float32(delta)
    np.testing.assert_array_equal(mixed.tokens[rows], run(rule=Cactus(delta)).tokens[rows])
  with pytest.raises(
    ValueError, match=r'Cactus holds a value of shape \(3,\): .* one for each of the 24 rows'
  ):
    run(rule=Cactus(np.ones(3, np.float32)))


def test_rules_survive_what_jax_does_with_records():
  """Tracers and placeholder leaves pass the check of the constructor."""
  rule = per_row(Cactus(0.5), 3)
  assert rule.delta.dtype == jnp.float32 and rule.delta.shape == (3,)
  assert jax.tree.map(lambda _: object(), rule) is not None
  assert jax.jit(lambda rule: rule.delta * 2)(Cactus(0.5)) == 1.0
  assert jax.tree.map(lambda _: None, rule).delta is None
  with pytest.raises(ValueError, match='delta=None: need anything'):
    check_number('delta', None, lambda _: True, 'anything')
