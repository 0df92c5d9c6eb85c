"""Training of a draft: losses against brute force, and runs that go on after a kill as if there had been none."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cactus_jax as cj
from cactus_jax import corpus, distill
from cactus_jax.distill import DistillConfig
from cactus_jax.models import student as student_lib
from tests import talker
from tests.talker import CONFIG

TOP = 24
HEAD = np.arange(3, CONFIG.vocab_size, 2)
USUAL = DistillConfig(passes=2, steps=6, batch_tokens=64, learning_rate=3e-3, warmup=2, temperature=0.8, top_k=20)


@pytest.fixture(scope='module', autouse=True)
def quick_programs():
  """Small paddings, and programs that are made in half the time and run as slowly as they like."""
  jax.config.update('jax_disable_most_optimizations', True)
  step, distill.LENGTH_STEP = distill.LENGTH_STEP, 16
  yield
  distill.LENGTH_STEP = step
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='module')
def target():
  return talker.talker()


@pytest.fixture(scope='module')
def as_made(target):
  """Its weights, copied before anything is trained. (Programs of other settings would round them otherwise.)"""
  return jax.tree.map(np.array, target.params)


@pytest.fixture(scope='module')
def readers(target, as_made):
  """{whether it reads hidden states: student}, none of which is good at anything."""
  students = {}
  for reads_hidden in (False, True):
    student = student_lib.new_student(target, [0], HEAD, hidden_layers=(1,) if reads_hidden else None,
                                      copy=2 if reads_hidden else 0)
    other = talker.talker(seed=5).params.layers[:1]
    params = student.body.params.replace(layers=other)
    copy = jnp.array([2.0, 4.0]) if reads_hidden else None
    students[reads_hidden] = student.replace(body=student.body.replace(params=params), copy=copy)
  return students


@pytest.fixture(scope='module', params=[False, True], ids=['plain', 'reads_hidden'])
def student(request, readers):
  return readers[request.param]


@jax.jit
def read_all(target, tokens_BT):
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  logits_BTV, cache = target(tokens_BT, positions_BT, target.init_cache(*tokens_BT.shape, hidden_layers=(1,)))
  top_BTN, ids_BTN = jax.lax.top_k(jax.nn.log_softmax(logits_BTV), TOP)
  return logits_BTV, cache.hidden, top_BTN, ids_BTN


@pytest.fixture(scope='module')
def texts(target):
  """Conversations of 9 to 32 tokens with the verifier's laws, and its logits in full."""
  random = np.random.default_rng(0)
  tokens_BT = random.integers(30, 90, (12, 32)).astype(np.int32)
  logits_BTV, hidden_BTD, top_BTN, ids_BTN = map(np.asarray, read_all(target, tokens_BT))
  conversations = []
  for i, length in enumerate([9, 16, 12, 16, 31, 20, 32, 17, 28, 10, 22, 32]):
    prompt = 2 + i % 4
    laws = slice(prompt - 1, length - 1)
    hidden = hidden_BTD[i, :length].astype(np.float16)
    hidden[-1] = 0
    conversations.append(corpus.Conversation(
        i, prompt, tokens_BT[i, :length], ids_BTN[i, laws], top_BTN[i, laws].astype(np.float16), hidden))
  return conversations, logits_BTV


# Laws and losses.


def small_laws(filtered, rows=9, seed=0):
  """A batch over 12 tokens whose laws are known in full: (batch, logits of verifier and draft, row_of, config)."""
  random = np.random.default_rng(seed)
  verifier_BTV = 2 * random.normal(size=(2, 5, 12)).astype(np.float32)
  draft_BTR = 2 * random.normal(size=(2, 5, rows)).astype(np.float32)
  logprobs = np.asarray(jax.nn.log_softmax(verifier_BTV))
  ids = np.argsort(-logprobs, axis=-1)[..., :7]
  batch = distill.Batch(tokens=jnp.zeros((2, 5), jnp.int32), answered=jnp.ones((2, 5)), top_ids=jnp.asarray(ids),
                        top_logprobs=jnp.asarray(np.take_along_axis(logprobs, ids, -1)), hidden=None)
  head = np.sort(random.permutation(12)[:rows])
  row_of = jnp.asarray(student_lib.row_of(head, 12))
  config = dataclasses.replace(USUAL, temperature=0.7, top_k=5, top_p=0.9, filter_draft=filtered)
  return batch, verifier_BTV, draft_BTR, head, row_of, config


_to_probs = jax.jit(cj.sampling.to_probs)


def full_laws(logits, config):
  params = jax.tree.map(lambda x: np.full(len(logits), x, np.float32), config.sampling)
  return np.asarray(_to_probs(jnp.asarray(logits), params))


@pytest.mark.parametrize('rows', [9, 12])
@pytest.mark.parametrize('filtered', [False, True])
def test_losses_are_those_of_the_full_laws(filtered, rows):
  batch, verifier_BTV, draft_BTR, head, row_of, config = small_laws(filtered, rows)
  q = full_laws(verifier_BTV, config)
  p = np.zeros_like(q)
  p[..., head] = full_laws(draft_BTR, config) if filtered else np.asarray(jax.nn.softmax(draft_BTR / 0.7))
  found_rows, law = distill.target_law(batch, row_of[None], config)
  scattered = np.zeros_like(q)
  np.put_along_axis(scattered, np.asarray(batch.top_ids), np.asarray(law), -1)
  np.testing.assert_allclose(scattered, q, atol=1e-6)
  ours = distill.draft_law(jnp.asarray(draft_BTR), found_rows, batch, config, filtered)
  np.testing.assert_allclose(ours, np.take_along_axis(p, np.asarray(batch.top_ids), -1), atol=1e-6)

  log = lambda x: np.log(np.maximum(x, distill.TINY))
  rest = np.where(q > 0, 0, p).sum(-1)
  expected = {
      'tv': 0.5 * np.abs(p - q).sum(-1), 'forward_kl': (q * (log(q) - log(p))).sum(-1),
      'reverse_kl': np.where(q > 0, p * (log(p) - log(q)), 0).sum(-1) + rest * (log(rest) - math.log(distill.TINY))}
  found = distill.losses(ours, law)
  assert set(found) == set(distill.LOSSES) == set(expected)
  for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=3e-5, err_msg=name)
  if rows < 12:
    assert (np.asarray(found_rows) == rows).any() and (p[..., np.setdiff1d(np.arange(12), head)] == 0).all()


def test_losses_of_a_draft_without_mistakes():
  law = jnp.asarray([[[0.5, 0.3, 0.2, 0.0]]])
  assert all(abs(float(value[0, 0])) < 1e-6 for value in distill.losses(law, law).values())


def run(function, made={}):
  """A jitted function, made once for all tests."""
  return made.setdefault(function, jax.jit(function, static_argnames='config'))


def value_and_gradient(weights, student, batch, config):
  return jax.value_and_grad(distill.loss, has_aux=True)(weights, student, batch, config)


MIXED = dataclasses.replace(USUAL, loss=(('forward_kl', 0.5), ('reverse_kl', 0.2), ('tv', 1.0)))


def some_batch(texts):
  return distill.make_batch(texts[0][:3], 16, 4)


def test_gradient_is_that_of_finite_differences(student, texts):
  batch, weights = some_batch(texts), distill.trainable(student)
  gradient = run(value_and_gradient)(weights, student, batch, config=MIXED)[1]
  assert jax.tree.structure(gradient) == jax.tree.structure(weights)
  # Along itself, where the slope stands out of the rounding.
  norm = math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
  at = lambda step: jax.tree.map(lambda w, g: w + step / norm * g, weights, gradient)
  value = lambda step: float(run(value_and_gradient)(at(step), student, batch, config=MIXED)[0][0])
  assert (value(2e-3) - value(-2e-3)) / 4e-3 == pytest.approx(norm, rel=0.03)


def test_padding_has_no_weight(student, texts):
  """Whatever stands where no law is: beyond the end of a text, in rows without one, and in the law of a prompt."""
  batch, random = some_batch(texts), np.random.default_rng(1)
  inside = np.zeros((4, 16), bool)
  for b, one in enumerate(texts[0][:3]):
    inside[b, : len(one.tokens)] = True
  noise = lambda array, keep, low, high: np.where(
      keep, array, random.uniform(low, high, array.shape).astype(array.dtype)).astype(array.dtype)
  answered = batch.answered[..., None] > 0
  other = distill.Batch(
      tokens=noise(batch.tokens, inside, 0, 260), answered=batch.answered,
      top_ids=noise(batch.top_ids, answered, 0, 260),
      top_logprobs=noise(batch.top_logprobs, answered, -9, 0), hidden=noise(batch.hidden, inside[..., None], -2, 2))
  weights = distill.trainable(student)
  results = [run(value_and_gradient)(weights, student, one, config=MIXED) for one in (batch, other)]
  for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# Acceptance.


@jax.jit
def call_student(student, tokens_BT, hidden_BTD):
  """By the path of decoding: logits over all tokens f32[B, T, V], and the cache with its own hidden states."""
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  cache = student.init_cache(*tokens_BT.shape).replace(hidden=hidden_BTD if student.reads_hidden else None)
  return student(tokens_BT, positions_BT, cache)


@jax.jit
def call_student_once(student, token_B1, position_B1, cache):
  return student(token_B1, position_B1, cache)[0]


def test_acceptance_is_the_sum_over_the_whole_vocabulary(student, texts):
  """For the first drafted token from the verifier's hidden states; for the second from what the draft made of them."""
  found = distill.acceptance(distill.trainable(student), student, distill.batches(texts[0], 64), USUAL)
  assert len(found) == (2 if student.reads_hidden else 1)
  tokens_BT, hidden_BTD = np.zeros((12, 32), np.int32), np.zeros((12, 32, 64), np.float32)
  answered_BT = np.zeros((12, 32), bool)
  for b, one in enumerate(texts[0]):
    tokens_BT[b, : len(one.tokens)], hidden_BTD[b, : len(one.tokens)] = one.tokens, one.hidden
    answered_BT[b, one.prompt_length - 1 : len(one.tokens) - 1] = True
  q_BTV = full_laws(texts[1], USUAL)
  first_BTV, cache = call_student(student, tokens_BT, hidden_BTD)
  # Each token anew, after a text that was read, with the draft's own hidden state of the token before.
  seconds = [call_student_once(student, tokens_BT[:, p : p + 1], jnp.full((12, 1), p), cache) for p in range(32)]
  for value, logits_BTV in zip(found, (first_BTV, np.concatenate(seconds, axis=1))):
    kept_BT = np.minimum(full_laws(logits_BTV, USUAL), q_BTV).sum(-1)
    assert value == pytest.approx(kept_BT[answered_BT].mean(), abs=2e-3)


def test_acceptance_of_the_verifier_itself(target, texts):
  """A student with all its layers and all tokens is accepted always, but for the half precision of laws."""
  itself = student_lib.new_student(target, [0, 1], np.arange(CONFIG.vocab_size))
  [value] = distill.acceptance(distill.trainable(itself), itself, distill.batches(texts[0], 64), USUAL)
  assert value == pytest.approx(1, abs=2e-3)


# Batches.


def numbers(batch, texts):
  """Which texts are in a batch."""
  rows = {tuple(one.tokens.tolist()): one.index for one in texts}
  lengths = {len(row) for row in rows}
  found = [rows.get(tuple(row[:end].tolist())) for row in batch.tokens for end in lengths if end <= len(row)]
  return [i for i in found if i is not None]


def test_each_text_is_in_one_batch(texts):
  texts = texts[0]
  orders = []
  for seed in (None, 3, 3, 4):
    made = list(distill.batches(texts, 64, seed))
    assert {batch.tokens.shape for batch in made} == {(4, 16), (2, 32)}
    orders.append([numbers(batch, texts) for batch in made])
    assert sorted(sum(orders[-1], [])) == list(range(12))
    assert sum(batch.answered.sum() for batch in made) == sum(len(one.top_ids) for one in texts)
  assert orders[1] == orders[2] != orders[3] != orders[0]
  assert [numbers(batch, texts) for batch in distill.batches(texts, 64, 3, start=2)] == orders[1][2:]


def test_laws_stand_before_their_tokens(texts):
  one = texts[0][0]
  batch = distill.make_batch([one], 16, 2)
  [positions] = np.nonzero(batch.answered[0])
  assert positions.tolist() == list(range(one.prompt_length - 1, len(one.tokens) - 1))
  np.testing.assert_array_equal(batch.top_ids[0, positions], one.top_ids)
  np.testing.assert_array_equal(batch.top_logprobs[0, positions], one.top_logprobs)
  np.testing.assert_array_equal(batch.hidden[0, : len(one.tokens)], one.hidden)
  assert not batch.answered[1].any()


def test_epochs_go_on_anywhere(texts):
  """Batch n is the same, whatever the batch a run begins with."""
  texts = texts[0]
  take = lambda start, count: [numbers(batch, texts) for _, batch in zip(
      range(count), distill._endless(texts, USUAL, start))]
  whole = take(0, 20)
  epoch = len(list(distill.batches(texts, 64)))
  assert 1 < epoch < 10 and sorted(sum(whole[:epoch], [])) == sorted(sum(whole[epoch : 2 * epoch], []))
  assert whole[:epoch] != whole[epoch : 2 * epoch]
  for start in (1, epoch, epoch + 1, 2 * epoch + 1):
    assert take(start, 20 - start) == whole[start:]


def test_frequent_tokens(texts):
  mass = np.zeros(CONFIG.vocab_size)
  for one in texts[0]:
    for ids, logprobs in zip(one.top_ids, one.top_logprobs):
      mass[ids] += np.exp(logprobs.astype(np.float64))
  found = distill.frequent_tokens(texts[0], 10, CONFIG.vocab_size)
  assert found.dtype == np.int32 and (np.diff(found) > 0).all()
  assert set(found.tolist()) == set(np.argsort(-mass)[:10].tolist())


# Training.


def fit(student, texts, folder, config=USUAL, **options):
  """The rows of the last evaluation."""
  rows = None
  for rows in distill.fit(student, texts[:8], texts[8:], config, folder, evaluate_every=2, **options):
    pass
  return rows


@pytest.fixture(scope='module')
def uninterrupted(readers, texts, tmp_path_factory):
  """Rows and weights of a whole run of the student that reads hidden states."""
  folder = tmp_path_factory.mktemp('uninterrupted') / 'checkpoints'
  rows = fit(readers[True], texts[0], folder)
  return rows, weights_of(readers[True], folder)


def weights_of(student, folder, config=USUAL):
  return jax.tree.map(np.asarray, distill.trainable(distill.restore(student, config, folder)[0]))


def same(ours, theirs):
  return all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))


def test_what_is_trained_and_what_is_not(readers, target, as_made, uninterrupted):
  student, (rows, weights) = readers[True], uninterrupted
  assert [row['step'] for row in rows] == [2, 4, 6]
  assert all(len(row['held_out']) == 2 and 0 < row['acceptance'] < 1 for row in rows)
  before = jax.tree.map(np.asarray, distill.trainable(student))
  paths = jax.tree_util.tree_leaves_with_path(before)
  for (path, ours), theirs in zip(paths, jax.tree.leaves(weights), strict=True):
    assert not np.array_equal(ours, theirs), path
  trained = distill.with_weights(student, weights)
  assert trained.body.params.embed is student.body.params.embed is target.params.embed
  np.testing.assert_array_equal(trained.body.params.head, np.asarray(target.params.head)[HEAD])
  assert same(target.params, as_made), 'the verifier is as it was'


@pytest.mark.parametrize('reads_hidden', [False, True])
def test_training_raises_acceptance(readers, texts, tmp_path, reads_hidden):
  """On the texts themselves, which a student can learn by heart."""
  student, texts = readers[reads_hidden], texts[0][:4]
  config = dataclasses.replace(USUAL, steps=60, warmup=5, learning_rate=1e-2)
  [before, *_] = distill.acceptance(distill.trainable(student), student, distill.batches(texts, 64), config)
  *_, rows = distill.fit(student, texts, texts, config, tmp_path / 'run', evaluate_every=60)
  assert rows[-1]['held_out'][0] > before + 0.2
  trained, _ = distill.restore(student, config, tmp_path / 'run')
  [after, *_] = distill.acceptance(distill.trainable(trained), trained, distill.batches(texts, 64), config)
  assert after == pytest.approx(rows[-1]['held_out'][0], abs=1e-6)


def test_two_batches_make_one_step(readers, texts):
  """Where both have as many answered tokens; of the two the first changes no weight."""
  student, (first, second) = readers[False], (texts[0][1], texts[0][3])
  assert len(first.tokens) == len(second.tokens)
  first = dataclasses.replace(
      first, prompt_length=5, top_ids=first.top_ids[-11:], top_logprobs=first.top_logprobs[-11:])
  assert len(first.top_ids) == len(second.top_ids) == 11
  config = dataclasses.replace(USUAL, warmup=0)
  twice = dataclasses.replace(config, accumulate=2)
  whole, _ = distill.train_step(
      distill.init(student, config), student, distill.make_batch([first, second], 16, 2), config)
  start = jax.tree.map(np.asarray, distill.trainable(student))
  state, _ = distill.train_step(distill.init(student, twice), student, distill.make_batch([first], 16, 2), twice)
  assert same(start, state.weights)
  state, _ = distill.train_step(state, student, distill.make_batch([second], 16, 2), twice)
  assert int(state.step) == 2
  for begin, ours, theirs in zip(*map(jax.tree.leaves, (start, whole.weights, state.weights)), strict=True):
    assert np.mean(np.abs(ours - theirs)) < 0.01 * np.mean(np.abs(ours - begin))


# Kills.


class Killed(Exception):
  pass


@pytest.mark.parametrize('moment', ['step 1', 'step 3', 'step 4', 'step 5', 'before a checkpoint', 'after a checkpoint',
                                    'in an evaluation'])
def test_a_run_goes_on_as_if_never_killed(readers, texts, tmp_path, monkeypatch, uninterrupted, moment):
  student, texts, folder = readers[True], texts[0], tmp_path / 'run'

  def progress(step, figures):
    assert set(figures) == {'loss', 'acceptance', 'gradient'}
    if moment == f'step {step}':
      raise Killed

  save, count = distill._Checkpoints.save, [0]

  def killed_at_the_second(self, state, rows):
    count[0] += 1
    if count[0] == 2 and moment == 'before a checkpoint':
      raise Killed
    save(self, state, rows)
    if count[0] == 2:
      raise Killed

  def killed(*_):
    raise Killed

  with monkeypatch.context() as patched:
    if 'checkpoint' in moment:
      patched.setattr(distill._Checkpoints, 'save', killed_at_the_second)
    if moment == 'in an evaluation':
      patched.setattr(distill, '_evaluate', killed)
    with pytest.raises(Killed):
      fit(student, texts, folder, progress=progress)
  steps = []
  rows = fit(student, texts, folder, progress=lambda step, _: steps.append(step))
  first = {'step 1': 1, 'in an evaluation': 1, 'after a checkpoint': 5}.get(moment, 3)
  first = 5 if moment == 'step 5' else first
  assert steps == list(range(first, 7))
  assert rows == uninterrupted[0]
  assert same(weights_of(student, folder), uninterrupted[1])


def test_a_run_that_is_done_stays(readers, texts, tmp_path, uninterrupted):
  folder = tmp_path / 'run'
  assert distill.restore(readers[True], USUAL, folder)[1] == []
  for _ in range(2):
    assert fit(readers[True], texts[0], folder) == uninterrupted[0]
  names = sorted(path.name for path in folder.iterdir() if path.name.isdigit())
  assert names == ['4', '6'], 'the last two are kept'
  with pytest.raises(ValueError, match='learning_rate is 0.003 there and 0.1 here'):
    fit(readers[True], texts[0], folder, dataclasses.replace(USUAL, learning_rate=0.1))
  with pytest.raises(ValueError, match='hidden_layers is .1. there and None here'):
    fit(readers[False], texts[0], folder)
  with pytest.raises(ValueError, match='head_size is 133 there and 2 here'):
    distill.restore(student_lib.new_student(talker.talker(), [0], [5, 9], hidden_layers=(1,)), USUAL, folder)


# What stops a run.


def poisoned(texts, number, config, **fields):
  """The texts, of which those of batch `number` are NaN in these fields."""
  batch = list(distill.batches(texts, config.batch_tokens, (config.seed, 0)))[number]
  those = numbers(batch, texts)
  return [dataclasses.replace(one, **{name: getattr(one, name) * np.float16('nan') for name in fields})
          if one.index in those else one for one in texts]


@pytest.mark.parametrize('field', ['hidden', 'top_logprobs'])
def test_nan_stops_at_the_last_good_checkpoint(readers, texts, tmp_path, field, uninterrupted):
  student, texts, folder = readers[True], texts[0], tmp_path / 'run'
  train = poisoned(texts[:8], 2, USUAL, **{field: True})
  with pytest.raises(ValueError, match=r'the loss became NaN or infinite at step 3; the checkpoint of step 2 in '):
    fit(student, [*train, *texts[8:]], folder)
  restored, rows = distill.restore(student, USUAL, folder)
  assert rows == uninterrupted[0][:1]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(distill.trainable(restored)))
  assert fit(student, texts, folder) == uninterrupted[0], 'it goes on from there with texts that are whole'


def test_nan_before_any_checkpoint(readers, texts, tmp_path):
  train = poisoned(texts[0][:8], 0, USUAL, top_logprobs=True)
  with pytest.raises(ValueError, match='the loss became NaN or infinite at step 1; there is no checkpoint yet'):
    fit(readers[True], [*train, *texts[0][8:]], tmp_path)
  held_out = [dataclasses.replace(one, hidden=one.hidden * np.float16('nan')) for one in texts[0][8:]]
  with pytest.raises(ValueError, match='the acceptance on held-out texts became NaN .* at step 2; there is no'):
    fit(readers[True], [*texts[0][:8], *held_out], tmp_path)
  assert distill.restore(readers[True], USUAL, tmp_path)[1] == []


def test_texts_that_cannot_train(readers, texts, tmp_path):
  texts = texts[0]
  bare = [*texts[:3], dataclasses.replace(texts[3], hidden=None)]
  narrow = [dataclasses.replace(one, hidden=one.hidden[:, :32]) for one in texts]
  short = dataclasses.replace(texts[0], top_ids=texts[0].top_ids[:, :9], top_logprobs=texts[0].top_logprobs[:, :9])
  for train, held_out, config, message in [
      (bare, texts, USUAL, 'the corpus lacks hidden states which this student reads'),
      (texts, bare, USUAL, 'the corpus lacks hidden states'), (narrow, texts, USUAL, 'the corpus lacks hidden states'),
      ([], texts, USUAL, 'train is empty'), (texts, [], USUAL, 'held_out is empty'),
      ([*texts, short], texts, USUAL, 'laws of 9 and 24 tokens'),
      (texts, texts, dataclasses.replace(USUAL, top_k=25), 'top_k=25: the texts have laws of 24 tokens')]:
    with pytest.raises(ValueError, match=message):
      next(distill.fit(readers[True], train, held_out, config, tmp_path))
  with pytest.raises(ValueError, match='evaluate_every=0'):
    next(distill.fit(readers[True], texts, texts, USUAL, tmp_path, evaluate_every=0))
  batch = distill.make_batch(bare, 16, 4)
  assert batch.hidden is None, 'a student that reads none can train on both'


def test_folders_that_cannot_be_written(readers, texts, tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='file/run: no checkpoints can be written there'):
    fit(readers[True], texts[0], tmp_path / 'file' / 'run')

  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(ocp.CheckpointManager, 'save', full)
  with pytest.raises(ValueError, match='run: could not be written .*No space left.*disk full'):
    fit(readers[True], texts[0], tmp_path / 'run')


@pytest.mark.parametrize('changes, message', [
    ({'loss': (('huber', 1.0),)}, 'need names of forward_kl, reverse_kl, tv'), ({'loss': ()}, 'loss='),
    ({'loss': (('tv', 0.0),)}, 'with a weight above 0'), ({'loss': (('tv', float('nan')),)}, 'with a weight above 0'),
    ({'passes': 0}, 'passes=0: need at least 1'), ({'steps': 0}, 'steps=0'), ({'accumulate': 0}, 'accumulate=0'),
    ({'batch_tokens': 0}, 'batch_tokens=0'), ({'learning_rate': 0.0}, 'learning_rate=0.0: need a number above 0'),
    ({'clip': float('nan')}, 'clip=nan'), ({'warmup': -1}, 'warmup=-1: need at least 0'), ({'seed': -1}, 'seed=-1'),
    ({'weight_decay': float('inf')}, 'weight_decay=inf'), ({'temperature': 0.0}, 'temperature=0.0: a greedy law'),
    ({'temperature': -1.0}, 'temperature=-1.0'), ({'top_k': 0}, 'top_k=0: laws are compared'),
    ({'top_p': 0.0}, 'top_p=0.0: need a number in'), ({'top_k': 2.5}, 'top_k=2.5')])
def test_configs_that_cannot_train(changes, message):
  with pytest.raises(ValueError, match=message):
    DistillConfig(**changes)


@pytest.mark.parametrize('steps, warmup', [(1, 50), (2, 50), (1, 0), (5, 0)])
def test_few_steps_are_steps(steps, warmup):
  """Even where they are fewer than those of the warm-up."""
  config = dataclasses.replace(USUAL, steps=steps, warmup=warmup)
  weights = {'x': jnp.ones(3)}
  state = distill.optimizer(config).init(weights)
  for _ in range(steps):
    updates, state = distill.optimizer(config).update({'x': jnp.ones(3)}, state, weights)
  assert np.abs(updates['x']).max() > 0 and np.isfinite(updates['x']).all()
