"""New numbers never mean a new program: what is compiled and traced is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax import decode
from cactus_jax.drafts import PromptLookup
from cactus_jax.rules import Cactus, Exact
from cactus_jax.sampling import SamplingParams
from tests import fakes

CONFIG = fakes.usual_config()
B, V = fakes.BATCH, fakes.VOCAB
TARGET = fakes.random_markov(0, V)
COMPILED, TRACED = '/jax/core/compile/backend_compile_duration', '/jax/core/compile/jaxpr_trace_duration'
events = []  # a listener cannot be taken away, so there is one for the whole file


def listen(event, _, **__):
  events.append(event)


jax.monitoring.register_event_duration_secs_listener(listen)


def run(
  *,
  delta=0.5,
  sampling=SamplingParams(),
  seed=0,
  max_new=20,
  length=5,
  max_rounds=None,
  draft=TARGET,
  rule=Cactus,
):
  """A whole text, from prompts of this length padded to 8 tokens."""
  rule = rule() if rule is Exact else rule(delta)
  state = fakes.start(
    TARGET, draft, prompts=[[1] * length] * B, width=8, max_new=max_new, config=CONFIG, seed=seed
  )
  state = decode.generate(TARGET, draft, rule, sampling, state, CONFIG, max_rounds)
  return jax.block_until_ready(state)


def counted(call):
  """How many programs the call compiles, and how many functions it traces."""
  events.clear()
  call()
  return events.count(COMPILED), events.count(TRACED)


@pytest.fixture(scope='module', autouse=True)
def warm():
  run()


def test_the_counter_counts():
  compiled, traced = counted(lambda: jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)))
  assert compiled >= 1 and traced >= 1


ROW_VALUES = np.linspace(0.1, 1, B)


@pytest.mark.parametrize(
  'change',
  [
    dict(delta=0.25),
    dict(delta=0),
    dict(delta=1),
    dict(delta=np.float32(0.3)),
    dict(delta=np.float64(0.3)),
    dict(delta=np.int64(1)),
    dict(sampling=SamplingParams(temperature=0.0)),
    dict(sampling=SamplingParams(temperature=1)),
    dict(sampling=SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01)),
    dict(sampling=SamplingParams(temperature=np.float32(0.6), top_k=np.int64(5), top_p=1)),
    dict(seed=1),
    dict(max_new=3),
    dict(max_new=np.arange(B)),
    dict(length=3),
    dict(length=8),
    dict(max_rounds=2),
    dict(max_rounds=np.int64(3)),
    dict(max_rounds=0),
  ],
  ids=str,
)
def test_a_new_number_compiles_nothing(change):
  run()
  assert counted(lambda: run(**change)) == (0, 0)


@pytest.mark.parametrize('make', [np.float32, np.float64, jnp.float32], ids=lambda f: f.__name__)
def test_numbers_of_one_row_each_use_the_same_loop(make):
  """Arrays may need a conversion of their own, once; never another loop."""
  loops = decode._program(decode._generate, donate_argnames='state')._cache_size()
  rows = make(ROW_VALUES)
  run(delta=rows, sampling=SamplingParams(temperature=rows, top_p=rows))
  run(delta=make(0.3), sampling=SamplingParams(temperature=make(0.7)))
  assert decode._program(decode._generate, donate_argnames='state')._cache_size() == loops
  again = dict(
    delta=make(ROW_VALUES / 2), sampling=SamplingParams(temperature=make(ROW_VALUES / 3), top_p=rows)
  )
  assert counted(lambda: run(**again)) == (0, 0)


def test_going_on_with_a_state_compiles_nothing():
  """The state that comes back is of the types of the one that went in: types, weakness and all."""
  state = run(max_rounds=1, max_new=100)
  go_on = lambda: decode.generate(TARGET, TARGET, Cactus(0.5), SamplingParams(), state, CONFIG, max_rounds=2)
  assert counted(go_on) == (0, 0)
  fresh = fakes.start(TARGET, TARGET, prompts=[[1]] * B, width=8, max_new=9, config=CONFIG)
  typed = lambda tree: [(str(x.dtype), x.shape, getattr(x, 'weak_type', None)) for x in jax.tree.leaves(tree)]
  assert typed(fresh) == typed(run())


def test_another_model_of_the_same_shape_compiles_nothing():
  other = fakes.random_markov(3, V)
  state = fakes.start(other, other, prompts=[[1]] * B, width=8, max_new=9, config=CONFIG)
  go_on = lambda: decode.generate(other, other, Cactus(0.5), SamplingParams(), state, CONFIG)
  assert counted(go_on) == (0, 0)


@pytest.mark.parametrize('draft', [None, PromptLookup()], ids=['none', 'lookup'])
def test_other_drafts_compile_once_too(draft):
  first, second = dict(draft=draft, rule=Exact), dict(seed=2, sampling=SamplingParams(temperature=0.3))
  run(**first)
  assert counted(lambda: run(**first, **second)) == (0, 0)


def test_a_model_is_traced_once_a_call_site():
  """Two prefills, the draft's first and later reads, the verifier's pass: once each for any text."""
  calls = []

  class Counting(fakes.MarkovLM):
    def __call__(self, *args):
      calls.append(args[0].shape)
      return super().__call__(*args)

  jax.tree_util.register_pytree_node(
    Counting, lambda model: ((model.logits_VVV,), None), lambda _, leaves: Counting(*leaves)
  )
  model = Counting(TARGET.logits_VVV)
  for max_new in (5, 50):
    state = fakes.start(model, model, prompts=[[1]] * B, width=8, max_new=max_new, config=CONFIG)
    decode.generate(model, model, Exact(), SamplingParams(), state, CONFIG)
  assert sorted(shape[1] for shape in calls if shape[1] > 1) == [2, 4, 8, 8]
  assert 1 <= sum(shape[1] == 1 for shape in calls) <= 2  # the scan over drafted tokens
