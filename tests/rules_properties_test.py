"""The same questions to every rule, over laws and numbers that hypothesis chooses; and the theorems about them.

Notation as in the paper: p is the draft's law, q the verifier's, h a relaxed law, x the drafted token.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

import cactus_jax as cj
from cactus_jax import divergence, rules
from tests import laws

V = 6

# Rule -> a function of one number, its range, and the number at which it is speculative sampling (None: there is none).
FAMILIES = {
  'cactus': (cj.Cactus, 0.0, 20.0, 0.0),
  **{
    f'cactus_exact-{name}': (functools.partial(cj.CactusExact, divergence=name), 0.0, 3.0, 0.0)
    for name in laws.GENERATORS
  },
  'clamp': (cj.Clamp, 0.0, 30.0, 0.0),
  'lenience': (cj.Lenience, 1.0, 50.0, 1.0),
  'lenience-published': (functools.partial(cj.Lenience, published=True), 1.0, 50.0, 1.0),
  'mentored': (cj.Mentored, 0.0, 3.0, 0.0),
  'mentored-kl': (functools.partial(cj.Mentored, divergence='kl'), 0.0, 3.0, 0.0),
  'interpolation': (cj.Interpolation, 0.0, 1.0, 0.0),
  'interpolation-published': (functools.partial(cj.Interpolation, published=True), 0.0, 1.0, 0.0),
  'chow': (cj.Chow, -2.0, 1.0, -2.0),
  'diff': (cj.Diff, -2.0, 1.0, -2.0),
  'opt': (cj.OPT, -5.0, 3.0, -1e6),
  'token_v1': (cj.TokenV1, -2.0, 1.0, -2.0),
  'token_v2': (cj.TokenV2, -2.0, 1.0, -2.0),
  'token_v3': (cj.TokenV3, -2.0, 1.0, -2.0),
  'token_v3-published': (functools.partial(cj.TokenV3, published=True), -2.0, 1.0, -2.0),
  'threshold': (cj.Threshold, 0.0, 1.5, 1.5),
  'typical': (functools.partial(cj.Typical, alpha=0.7), 0.0, 1.0, None),
  'top_k': (lambda k: cj.TopK(jnp.round(1 + k)), 0.0, 8.0, None),
  'top_k-published': (lambda k: cj.TopK(jnp.round(1 + k), published=True), 0.0, 8.0, None),
  'logit_margin': (cj.LogitMargin, 0.0, 10.0, None),
  'static-cactus': (lambda delta: cj.Static(cj.Cactus(delta)), 0.0, 20.0, 0.0),
}  # fmt: skip
LEAVES_SUPPORT = ('interpolation-published', 'top_k-published')
MONOTONE = [name for name in FAMILIES if not name.startswith(('token', 'threshold'))]
# KL of the emitted law from the verifier's need not rise where a rule is no path from q to p.
COSTS_MORE = [name for name in MONOTONE if not name.startswith(('typical', 'top_k', 'logit', 'static'))]
each_family = pytest.mark.parametrize('family', FAMILIES)


def test_every_rule_is_in_the_table():
  asked = {type(make(jnp.float32(low))) for make, low, _, _ in FAMILIES.values()}
  assert asked >= set(cj.RULES.values()) - {cj.Exact}


def test_no_two_rules_are_the_same_to_jit():
  """Equal tree structures would let a cache confuse their programs."""
  made = [make(jnp.float32(low)) for make, low, _, _ in FAMILIES.values()] + [cj.Exact(), cj.Budget(0.1)]
  made += [cj.Static(cj.Clamp(0.1)), cj.Static(cj.Lenience(2.0)), cj.Budget(kl_total=0.1)]
  for one, other in itertools.combinations(made, 2):
    assert jax.tree.structure(one) != jax.tree.structure(other), (one, other)


@st.composite
def law_pairs(draw):
  """(p, q) of V tokens, f32: any shapes of logits, some tokens cut from either, sometimes equal or one-hot."""
  logits = st.lists(st.floats(-12, 12, width=16), min_size=V, max_size=V)
  cut = st.lists(st.booleans(), min_size=V, max_size=V)

  def law(x, removed):
    removed = np.array(removed) & ~(np.arange(V) == int(np.argmax(x)))
    weights = np.where(removed, 0.0, laws.softmax(np.array(x, np.float64)))
    return np.float32(weights / weights.sum())

  q = law(draw(logits), draw(cut))
  kind = draw(st.sampled_from(['any', 'close', 'same', 'one-hot']))
  if kind == 'same':
    return q, q
  if kind == 'one-hot':
    return np.eye(V, dtype=np.float32)[draw(st.integers(0, V - 1))], q
  if kind == 'close':
    noise = np.array(draw(st.lists(st.floats(-1, 1, width=16), min_size=V, max_size=V)))
    p = q * np.exp(noise)
    return np.float32(p / p.sum()), q
  return law(draw(logits), draw(cut)), q


@functools.partial(jax.jit, static_argnames='family')
def answers(family, number, p, q):
  """accept f32[V], recovery f32[V, V] and output_law f32[V] of a family's rule, and the gradients of them all."""
  make = FAMILIES[family][0]
  tokens = jnp.arange(V)

  def of_rule(number, p, q):
    rule = make(number)
    accept = jax.vmap(lambda x: rule.accept_prob(p, q, x))(tokens)
    return accept, jax.vmap(lambda x: rule.recovery(p, q, x))(tokens), rule.output_law(p, q)

  def weighed(number, p, q):
    accept, recovery, output = of_rule(number, p, q)
    weight = jnp.arange(1.0, V + 1)
    return accept @ weight + jnp.sum(recovery @ weight) + output @ weight

  return of_rule(number, p, q), jax.grad(weighed, argnums=(0, 1, 2))(number, p, q)


def ask(family, number, p, q):
  outcome, gradients = answers(family, np.float32(number), p, q)
  return [np.asarray(x, np.float64) for x in outcome], gradients


questions = settings(max_examples=25, deadline=None, derandomize=True)


# Laws so close that float32 sees no divergence at any price, and a token that only the draft has.
CLOSE = (np.float32([3.3501309e-4] * 4 + [0, 0.99865997]),
         np.float32([3.3508404e-4] * 3 + [0, 1.2327054e-4, 0.99887151]))


@each_family
@questions
@given(pair=law_pairs(), share=st.floats(0, 1))
@example(pair=CLOSE, share=0.0)
def test_every_rule_answers_with_laws(family, pair, share):
  p, q = pair
  _, low, high, _ = FAMILIES[family]
  (accept, recovery, output), gradients = ask(family, low + share**3 * (high - low), p, q)
  assert np.all((accept >= 0) & (accept <= 1))
  for law in (*recovery, output):
    assert np.all(law >= 0) and abs(law.sum() - 1) < 1e-5
  np.testing.assert_allclose(output, laws.emitted_law(p.astype(float), accept, recovery), atol=1e-5)
  assert np.sum(p * accept) <= np.sum(np.minimum(p, output)) + 1e-5
  if family not in LEAVES_SUPPORT:
    assert np.all(output[q == 0] == 0) and np.all(recovery[:, q == 0] == 0) and np.all(accept[(q == 0) & (p > 0)] == 0)
  assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@each_family
@questions
@given(pair=law_pairs())
def test_every_rule_with_an_exact_limit_reaches_it(family, pair):
  p, q = pair
  exact_at = FAMILIES[family][3]
  if exact_at is None:
    pytest.skip('this rule has no exact limit')
  (accept, recovery, output), _ = ask(family, exact_at, p, q)
  expected_accept, expected_recovery = laws.exact_reference(p.astype(float), q.astype(float))
  np.testing.assert_allclose(p * accept, p * expected_accept, atol=2e-6)
  weight = (p * (1 - expected_accept))[:, None]
  np.testing.assert_allclose(weight * recovery, weight * expected_recovery, atol=3e-6)
  np.testing.assert_allclose(output, q, atol=1e-5)


@pytest.mark.parametrize('family', MONOTONE)
@questions
@given(pair=law_pairs(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_acceptance_moves_one_way_with_the_number(family, pair, shares):
  """And so does what it costs, where the rule leads from the verifier's law towards the draft's."""
  p, q = pair
  _, low, high, _ = FAMILIES[family]
  less, more = (ask(family, low + share**3 * (high - low), p, q)[0] for share in sorted(shares))
  if family == 'typical':
    less, more = more, less
  assert np.sum(p * less[0]) <= np.sum(p * more[0]) + 1e-5
  if family in COSTS_MORE and np.all(more[2][q == 0] == 0):
    assert laws.kl(less[2], q.astype(float)) <= laws.kl(more[2], q.astype(float)) + 2e-5


@each_family
@questions
@given(pair=law_pairs(), share=st.floats(0, 1), tau=st.floats(0.05, 8))
def test_no_rule_beats_the_clamp(family, pair, share, tau):
  """At its price: sum min(p, h) - KL(h || q) / tau is largest for Clamp(tau), at every position and for every rule."""
  p, q = pair
  _, low, high, _ = FAMILIES[family]
  (accept, _, output), _ = ask(family, low + share**3 * (high - low), p, q)
  clamp = ask('clamp', tau, p, q)[0][2]
  worth = lambda accepted, law: accepted - laws.kl(law, q.astype(float)) / tau
  assert worth(np.sum(p * accept), output) <= worth(np.sum(np.minimum(p, clamp)), clamp) + 3e-5


@questions
@given(pair=law_pairs(), tau=st.floats(0, 12))
def test_a_price_bounds_what_a_position_costs(pair, tau):
  """KL(h || q) <= min(tau, tau^2 / 8)."""
  h = ask('clamp', tau, *pair)[0][2]
  assert laws.kl(h, pair[1].astype(float)) <= min(tau, tau**2 / 8) + 1e-5


# The theorems.

TRUE_LAWS = [(p.astype(float), q.astype(float)) for p, q in zip(*laws.law_pairs(np.random.default_rng(3), 5, 120))
             if q.min() > 1e-4][:12]  # fmt: skip


def solve(objective, q, constraint):
  """The law that maximises a concave objective within constraint(h) >= 0, by SLSQP from q and from inside."""
  best = -np.inf, q
  for start in (q, 0.9 * q + 0.1 / len(q)):
    found = optimize.minimize(
      lambda h: -objective(h), start, method='SLSQP', bounds=[(1e-12, 1)] * len(q),
      options=dict(maxiter=800, ftol=1e-14),
      constraints=[dict(type='eq', fun=lambda h: h.sum() - 1), dict(type='ineq', fun=constraint)])
    if abs(found.x.sum() - 1) < 1e-7 and constraint(found.x) > -1e-7:
      best = max(best, (objective(found.x), found.x), key=lambda pair: pair[0])
  return best


@pytest.mark.parametrize('name', [name for name in laws.GENERATORS if name != 'total_variation'])
@pytest.mark.parametrize('delta', [0.02, 0.3])
def test_theorem_2_against_a_convex_solver(name, delta):
  """No law within delta of q gives a token more than gamma."""
  gamma_of = jax.jit(lambda q_x: divergence.exact_relaxed_prob(q_x, delta, name))
  for _, q in TRUE_LAWS[:6]:
    x = int(np.argsort(q)[1])
    best, _ = solve(lambda h: h[x], q, lambda h: delta - laws.f_divergence(h, q, name))
    gamma = float(gamma_of(jnp.float32(q[x])))
    assert gamma == pytest.approx(best, abs=3e-5)


@pytest.mark.parametrize('delta', [0.02, 0.3])
def test_theorem_2_for_total_variation(delta):
  """A linear programme; its optimum is q_x + delta."""
  for _, q in TRUE_LAWS[:6]:
    x, n = int(np.argsort(q)[1]), len(q)
    equal = [[1.0] * n + [0.0] * n]
    shift = np.block([[np.eye(n), -np.eye(n)], [-np.eye(n), -np.eye(n)], [np.zeros((1, n)), np.full((1, n), 0.5)]])
    found = optimize.linprog(-np.eye(2 * n)[x], A_ub=shift, b_ub=[*q, *-q, delta], A_eq=equal, b_eq=[1.0])
    gamma = float(divergence.exact_relaxed_prob(jnp.float32(q[x]), delta, 'total_variation'))
    assert gamma == pytest.approx(found.x[x], abs=1e-6)


@pytest.mark.parametrize('tau', [0.3, 1.5])
def test_the_clamp_is_the_optimum_of_a_convex_solver(tau):
  """The most acceptance at its own KL."""
  law = jax.jit(cj.Clamp(tau).output_law)
  for p, q in TRUE_LAWS:
    h = np.asarray(law(jnp.float32(p), jnp.float32(q)), np.float64)
    limit = laws.kl(h, q)
    best, _ = solve(lambda law: np.minimum(p, law).sum(), q, lambda law: limit - laws.kl(law, q))
    assert np.minimum(p, h).sum() >= best - 1e-5


@functools.cache
def laws_of_cactus():
  """(p, q, the law that Cactus emits), whichever root it takes, for many pairs."""
  p, q = (np.stack(side) for side in zip(*TRUE_LAWS))
  emitted = jax.jit(jax.vmap(lambda rule, p, q: rule.output_law(p, q), (None, 0, 0)))
  roots = cj.Cactus(0.3), cj.CactusExact(0.3, 'kl'), cj.CactusExact(0.1, 'total_variation')
  return [case for rule in roots
          for case in zip(p, q, np.asarray(emitted(rule, jnp.float32(p), jnp.float32(q)), np.float64))]


@pytest.mark.parametrize('name', ['kl', 'total_variation', 'reverse_kl', 'pearson', 'squared_hellinger'])
def test_theorem_3_for_every_divergence(name):
  """D(h || q) <= D(p || q) for the law h that Cactus emits."""
  for p, q, h in laws_of_cactus():
    assert laws.f_divergence(h, q, name) <= laws.f_divergence(p, q, name) + 1e-5


def test_delta_is_no_bound_on_what_cactus_emits():
  """Often the divergence of the emitted law exceeds delta, since every token that may be drafted has its own."""
  exceeded = []
  for p, q in zip(*laws.law_pairs(np.random.default_rng(7), 8, 300)):
    if q.min() > 1e-6:
      h = np.asarray(cj.Cactus(0.01).output_law(p, q), np.float64)
      exceeded.append(laws.kl(h, q.astype(float)) > 0.0101)
  assert len(exceeded) > 40 and np.mean(exceeded) > 0.4


@pytest.mark.parametrize(
  'vocab, delta, escape, nats',
  [(20, 0.1, 0.18, 1.69), (20, 1.0, 0.026, 3.67), (1000, 1.0, 5e-4, 7.59), (32000, 0.25, 6.3e-5, 9.66),
   (151_936, 1.0, 3.3e-6, 12.61)],
)  # fmt: skip
def test_the_worst_case_of_cactus(vocab, delta, escape, nats):
  """A verifier all but sure of one token is overruled by a draft that spreads over the rest: ln(2 delta V) nats."""
  q = np.full(vocab, escape / (vocab - 1), np.float32)
  q[0] = 1 - escape
  p = np.full(vocab, 1 / (vocab - 1), np.float32)
  p[0] = 0
  p, q = jnp.asarray(p), jnp.asarray(q)
  law = jax.jit(lambda rule, p, q: rule.output_law(p, q))
  h = np.asarray(law(cj.Cactus(jnp.float32(delta)), p, q), np.float64)
  assert float(divergence.kl(jnp.float32(h), q)) == pytest.approx(nats, abs=0.06)
  assert np.minimum(p, h).sum() > 0.99 and np.minimum(p, q).sum() == pytest.approx(escape, rel=0.01)
  assert nats < 2 * np.log1p(np.sqrt(2 * delta * vocab))
  clamp = law(cj.Mentored(jnp.float32(delta), 'kl'), p, q)
  assert float(divergence.kl(clamp, q)) == pytest.approx(delta, rel=0.01)
  assert np.minimum(p, clamp).sum() < 0.5


def hard_pairs():
  """Random laws, as they are and each with its own few tokens left, and drafts of one token, likely or not."""
  rng = np.random.default_rng(4)
  for concentration in (0.3, 1.0, 3.0):
    p, q = rng.dirichlet(np.full(24, concentration), 2) + 1e-9
    yield p / p.sum(), q / q.sum()
    p, q = (np.where(law >= np.sort(law)[-8], law, 0) for law in (p, q))
    yield p / p.sum(), q / q.sum()
  for q_x in (0.2, 1e-4, 1e-9):
    one, rest = np.eye(24)[0], np.append(0.0, np.full(23, 1 / 23))
    yield one, q_x * one + (1 - q_x) * rest


@pytest.mark.parametrize('name', laws.GENERATORS)
def test_mentored_spends_its_limit_in_few_passes(name, monkeypatch):
  """All of it, or what p costs where that is less; whole laws are read once a step of either solver."""
  passes, solve = [], rules.rising_root

  def counted(error_and_slope, *bracket, **options):
    def one_pass(x):
      jax.debug.callback(lambda _: passes.append(1), x)
      return error_and_slope(x)
    return solve(one_pass, *bracket, **options)

  monkeypatch.setattr(rules, 'rising_root', counted)
  law = jax.jit(lambda rule, p, q: rule.target(p, q))
  for limit in (1e-7, 0.02, 1.0):
    counts = []
    for p, q in hard_pairs():
      passes.clear()
      h = np.asarray(law(cj.Mentored(jnp.float32(limit), name), jnp.float32(p), jnp.float32(q)), np.float64)
      jax.effects_barrier()
      counts.append(len(passes))
      nats, most = (laws.f_divergence(spent / spent.sum(), q, name) for spent in (h, laws.clamp_law(p, q, 80.0)))
      if limit > 1e-6:
        assert nats == pytest.approx(min(limit, most), rel=1e-3, abs=6e-8)  # float32
      assert nats <= 1.02 * limit
    assert 0 < np.mean(counts) < 60  # 30 halvings would take some 200


@pytest.mark.parametrize('rule, law, number', [
  (cj.Clamp, laws.clamp_law, 0.7),
  (cj.Lenience, laws.lenience_law, 1.4),
  *[(functools.partial(cj.Mentored, divergence=name), functools.partial(laws.mentored_law, name=name), 0.03)
    for name in laws.GENERATORS],
])  # fmt: skip
def test_gradients_are_those_of_the_law(rule, law, number):
  """Of numbers that solve an equation too: the slope of the law in any direction, as differences have it."""
  rng = np.random.default_rng(2)
  slope_of = jax.jit(functools.partial(jax.jvp, lambda number, p, q: rule(number).output_law(p, q)))
  slopes = []
  for p, q in rng.dirichlet(np.full(V, 2.0), (8, 2)):
    weights, step = rng.normal(size=V), 1e-5
    dp, dq = (d - d.mean() for d in rng.normal(size=(2, V)) * np.minimum(p, q).min())
    for along in ((1.0, 0 * p, 0 * q), (0.0, dp, 0 * q), (0.0, 0 * p, dq)):
      at = lambda s: law(p + s * along[1], q + s * along[2], number + s * along[0]) @ weights
      _, slope = slope_of(tuple(map(jnp.float32, (number, p, q))), tuple(map(jnp.float32, along)))
      slopes.append((slope @ weights, (at(step) - at(-step)) / (2 * step)))
  found, expected = np.array(slopes).T
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
  assert np.mean(np.abs(expected) > 1e-3) > 0.5


def test_pearson_is_the_closed_form():
  """CactusExact for Pearson's chi-square with limit 2 delta is Cactus."""
  solved, closed = map(jax.jit, (cj.CactusExact(0.6, 'pearson').output_law, cj.Cactus(0.3).output_law))
  for p, q in TRUE_LAWS:
    p, q = jnp.float32(p), jnp.float32(q)
    np.testing.assert_allclose(solved(p, q), closed(p, q), atol=1e-6)


def test_the_published_top_k_keeps_what_the_verifier_cannot_emit():
  """Where the nucleus holds fewer than k tokens; ours never does, and recovers from q instead of an indicator."""
  p = jnp.array([0.1, 0.1, 0.4, 0.4], jnp.float32)
  q = jnp.array([0.9, 0.1, 0.0, 0.0], jnp.float32)
  assert cj.TopK(3, published=True).accept_prob(p, q, 2) == 1
  assert cj.TopK(3).accept_prob(p, q, 2) == 0
  np.testing.assert_allclose(cj.TopK(3).output_law(p, q), [0.9, 0.1, 0, 0], atol=1e-6)
  q = jnp.array([0.9, 0.04, 0.03, 0.02, 0.01], jnp.float32)
  p = jnp.array([0, 0, 0, 0, 1.0], jnp.float32)
  np.testing.assert_allclose(cj.TopK(4, published=True).recovery(p, q, 4), [0.25] * 4 + [0], atol=1e-6)
  np.testing.assert_allclose(cj.TopK(4).recovery(p, q, 4), q, atol=1e-6)


def test_typical_never_replaces_the_likeliest_token():
  """Even at alpha = 1, where the constant inside its entropy lifts the threshold above a flat law."""
  q = jnp.full(5, 0.2, jnp.float32)
  assert cj.Typical(1.0, 1.0).accept_prob(q, q, 3) == 1


# What is refused.

BAD = [
  (cj.CactusExact, dict(delta=-1), r'delta=-1: need a finite number of nats >= 0'),
  (cj.CactusExact, dict(delta=1, divergence='renyi'), r"divergence='renyi': need one of kl, reverse_kl"),
  (cj.Clamp, dict(tau=-0.1), r'tau=-0.1: need a finite number of nats >= 0'),
  (cj.Clamp, dict(tau=float('nan')), r'tau=nan'),
  (cj.Clamp, dict(tau=[0.1, -1]), r'tau=\[0.1, -1\]'),
  (cj.Lenience, dict(b=0.9), r'b=0.9: need a finite number >= 1'),
  (cj.Mentored, dict(limit=-1), r'limit=-1'),
  (cj.Mentored, dict(limit=1, divergence='x'), r"divergence='x'"),
  (cj.Interpolation, dict(alpha=1.1), r'alpha=1.1: need a number in \[0, 1\]'),
  (cj.Interpolation, dict(alpha=-0.1), r'alpha=-0.1'),
  (cj.Typical, dict(epsilon=2), r'epsilon=2: need a number in \[0, 1\]'),
  (cj.Typical, dict(alpha=-1), r'alpha=-1'),
  (cj.Chow, dict(alpha=float('inf')), r'alpha=inf: need a finite number'),
  (cj.OPT, dict(alpha='1'), r"alpha='1'"),
  (cj.TokenV3, dict(alpha=float('nan')), r'alpha=nan'),
  (cj.Threshold, dict(threshold=-0.1), r'threshold=-0.1: need a probability'),
  (cj.TopK, dict(k=0), r'k=0: need a whole number >= 1'),
  (cj.TopK, dict(k=2.5), r'k=2.5'),
  (cj.LogitMargin, dict(margin=-1), r'margin=-1: need a finite number >= 0'),
  (cj.Cactus, dict(delta=None), r'delta=None: need a finite number of nats'),
  (cj.Cactus, dict(delta=1j), r'delta=1j: need a finite'),
  (cj.Cactus, dict(delta={}), r'delta={}: need a finite'),
  (cj.Interpolation, dict(alpha=0.5, published='x'), r"published='x': need True or False"),
  (cj.Mentored, dict(limit=1, divergence=[]), r'divergence=\[\]: need one of'),
  (cj.Static, dict(rule=cj.Cactus), r'need a rule with its numbers, as in Static\(Cactus\(delta=1.0\)\)'),
  (cj.Static, dict(rule=3), r'Static\(3\): need a rule'),
  (cj.Checked, dict(rule=cj.Budget(0.1)), r'Checked\(Budget\(.*: need a rule'),
  (cj.Budget, dict(kl_total='a'), r"kl_total='a': need a finite"),
  (cj.Budget, dict(), r'Budget\(\) is without a limit'),
  (cj.Budget, dict(kl_per_token=-1), r'kl_per_token=-1: need a finite number of nats'),
  (cj.Budget, dict(kl_total=float('nan')), r'kl_total=nan'),
]


@pytest.mark.parametrize('cls, numbers, message', BAD, ids=lambda x: str(x)[:40])
def test_a_bad_number_is_refused(cls, numbers, message):
  with pytest.raises(ValueError, match=message):
    cls(**numbers)


@pytest.mark.parametrize(
  'p, q, message',
  [
    ([0.5, 0.502], [0.5, 0.5], r"p, the draft's law, .* its sum 1.002: need one law"),
    ([0.5, 0.5], [0.5, 0.4], r"q, the verifier's law, .* its sum 0.9"),
    ([1.5, -0.5], [0.5, 0.5], r'its smallest entry is -0.5'),
    ([0.5, np.nan], [0.5, 0.5], r'its sum nan'),
    ([0.5, 0.5], [0.5, 0.25, 0.25], r'p has shape \(2,\), q has \(3,\)'),
    ([[0.5, 0.5]], [0.5, 0.5], r'has shape \(1, 2\)'),
  ],
  ids=str,
)
def test_a_checked_rule_refuses_what_is_no_law(p, q, message):
  p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
  checked = cj.Checked(cj.Clamp(1.0))
  for call in (checked.accept_prob, checked.recovery, lambda p, q, _: checked.output_law(p, q)):
    with pytest.raises(ValueError, match=message):
      call(p, q, 0)


def test_a_checked_rule_answers_as_the_rule_and_says_where_it_cannot_check():
  p, q = jnp.array([0.5, 0.5004]), jnp.array([0.9, 0.1])  # within 1e-3 of 1
  checked = cj.Checked(cj.Clamp(1.0))
  assert not checked.lossless and checked.accept_prob(p, q, 1) == cj.Clamp(1.0).accept_prob(p, q, 1)
  np.testing.assert_array_equal(checked.output_law(p, q), cj.Clamp(1.0).output_law(p, q))
  np.testing.assert_array_equal(checked.recovery(p, q, 1), cj.Clamp(1.0).recovery(p, q, 1))
  with pytest.raises(ValueError, match='only outside jit'):
    jax.jit(checked.output_law)(p, q)


@cj.record_class
class Careless(cj.TargetRule):
  """A rule whose law does not sum to 1, and that keeps more than everything."""

  number: float

  def target(self, p, q):
    return self.number * q

  def accept_prob(self, p, q, x):
    return 2.0


def test_a_checked_rule_sees_what_its_rule_gets_wrong():
  p, q = jnp.array([0.5, 0.5]), jnp.array([0.9, 0.1])
  checked = cj.Checked(Careless(0.5))
  with pytest.raises(ValueError, match=r'output_law of Careless\(number=0.5\) has shape \(2,\) and sum 0.5'):
    checked.output_law(p, q)
  with pytest.raises(ValueError, match='accept_prob of .* is 2.0 for token 1'):
    checked.accept_prob(p, q, 1)
  np.testing.assert_array_equal(checked.recovery(p, q, 1), [1, 0])


def test_what_jax_rebuilds_is_not_checked_again():
  """So that transformations may put anything in place of the numbers."""
  rule = jax.tree.map(lambda _: -1.0, cj.Clamp(0.5))
  assert rule.tau == -1.0 and isinstance(rule, cj.Clamp)
  assert jax.tree.map(lambda _: None, rules.RULES['lenience'](2.0, published=True)).published is True
