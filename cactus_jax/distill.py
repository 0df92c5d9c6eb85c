"""Distillation: a student learns the verifier's laws on the verifier's own texts.

  corpus -> `batches` -> `train_step`, again and again (`fit`), with an exact acceptance on held-out texts now and then

The probability that a drafted token is accepted is sum_x min(p(x), q(x)) = 1 - TV(p, q) (Leviathan et al., 2023), so
the total variation is the loss that acceptance asks for; KL pulls harder at the start (Zhou et al., DistillSpec, 2024).
Both are between the laws of the sampling settings the draft is for. A student that reads hidden states is trained on
its own ones too (Li et al., EAGLE-3, 2025; Zhang et al., HASS, 2024): pass n has, of the token before, that of pass
n - 1, whose keys and values it also sees. For the second drafted token of a round that is what decoding does; for later
ones it comes close: of theirs the last n - 1 tokens only are read so.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cactus_jax.models import weights as weights_lib
from cactus_jax.models.student import Student
from cactus_jax.records import differences
from cactus_jax.sampling import SamplingParams, is_greedy, to_probs

LENGTH_STEP = 64  # texts are padded to multiples of it: so many programs
LOSSES = ('forward_kl', 'reverse_kl', 'tv')
TINY = 1e-9


@dataclasses.dataclass(frozen=True)
class DistillConfig:
  """How a student is trained. Raises ValueError for what cannot be."""

  loss: tuple[tuple[str, float], ...] = (('forward_kl', 0.1), ('tv', 1.0))  # weights of the losses
  passes: int = 2  # of a student that reads hidden states: the first on the verifier's, each other on those before it
  pass_decay: float = 0.7  # the weight of a pass to that of the one before
  temperature: float = 0.6  # of the laws that are compared, with the filters below
  top_k: int = 20
  top_p: float = 0.95
  filter_draft: bool = False  # whether the draft's law is filtered too, as it will be: a fifth slower
  steps: int = 2000
  batch_tokens: int = 2048  # of a batch, padding included
  accumulate: int = 1  # batches whose gradients make one step
  learning_rate: float = 1.5e-3
  warmup: int = 50  # steps
  weight_decay: float = 0.01
  clip: float = 1.0  # largest norm of a gradient
  seed: int = 0

  def __post_init__(self):
    unknown = [name for name, _ in self.loss if name not in LOSSES]
    if unknown or not self.loss or any(not 0 < weight < math.inf for _, weight in self.loss):
      raise ValueError(f'loss={self.loss}: need names of {", ".join(LOSSES)}, each with a weight above 0.')
    for name in ('passes', 'steps', 'batch_tokens', 'accumulate'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: need at least 1.')
    for name in ('learning_rate', 'clip', 'pass_decay'):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(f'{name}={getattr(self, name)}: need a number above 0.')
    for name in ('warmup', 'weight_decay', 'seed'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f'{name}={getattr(self, name)}: need at least 0.')
    if is_greedy(self.sampling.temperature):
      raise ValueError(f'temperature={self.temperature}: a greedy law has no slope to learn from; train at a '
                       'temperature above 0, which serves greedy texts too.')
    if self.top_k < 1:
      raise ValueError(f'top_k={self.top_k}: laws are compared on the tokens that it keeps, so it is at least 1.')

  @property
  def sampling(self):
    """The settings of the laws that are compared."""
    return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@flax.struct.dataclass
class Batch:
  """Texts of one padded length with the verifier's laws; row b has laws after the positions where `answered` is 1."""

  tokens: jax.Array  # i32[B, T]
  answered: jax.Array  # f32[B, T]: 1 where the next token is the verifier's
  top_ids: jax.Array  # i32[B, T, N], of the law of the next token
  top_logprobs: jax.Array  # f16[B, T, N]
  hidden: jax.Array | None  # f16[B, T, (1+N)*D]


@flax.struct.dataclass
class TrainState:
  """What training changes."""

  step: jax.Array  # i32[], batches so far
  weights: dict  # those of the student that are trained, see `trainable`
  optimizer: optax.OptState


def trainable(student: Student) -> dict:
  """The weights that are trained, in float32, and as copies."""
  return jax.tree.map(lambda x: jnp.array(x, jnp.float32), _own(student))


def _own(student):
  """All weights but the verifier's embedding and head."""
  params = student.body.params
  return {'layers': params.layers, 'final_norm': params.final_norm} | {
      name: getattr(student, name) for name in ('fuse', 'copy') if getattr(student, name) is not None}


def with_weights(student: Student, weights) -> Student:
  """The student with trained weights, in its own dtypes."""
  weights = jax.tree.map(lambda new, own: new.astype(own.dtype), weights, _own(student))
  params = student.body.params.replace(layers=weights.pop('layers'), final_norm=weights.pop('final_norm'))
  return student.replace(body=student.body.replace(params=params), **weights)


def target_law(batch, columns_BV, config):
  """The verifier's law after temperature and filters, on its likeliest tokens: (columns i32[B, T, N], f32).

  columns_BV: of all tokens, as by `Student.columns`. The filters see the whole law, but for the mass beyond the N
  tokens, which no top_k <= N keeps. (Log-probabilities are stored as float16, within 1e-3 or so.)
  """
  law = to_probs(batch.top_logprobs.astype(jnp.float32), _per_text(config, batch))
  return jnp.take_along_axis(columns_BV[:, None], batch.top_ids, axis=-1), law


def _per_text(config, batch):
  return jax.tree.map(lambda x: jnp.full(batch.tokens.shape[0], x, jnp.float32), config.sampling)


def draft_law(logits_BTC, columns_BTN, batch, config, filtered):
  """The draft's law at the columns that are named, f32[B, T, N]; at one that there is not it is 0."""
  count = logits_BTC.shape[-1]
  scaled_BTC, kept_BTC = logits_BTC / config.temperature, None
  if filtered:
    kept_BTC = to_probs(jax.lax.stop_gradient(logits_BTC), _per_text(config, batch)) > 0
    scaled_BTC = jnp.where(kept_BTC, scaled_BTC, -jnp.inf)
  log_mass_BT1 = jax.nn.logsumexp(scaled_BTC, axis=-1, keepdims=True, where=kept_BTC)
  at_BTN = jnp.take_along_axis(scaled_BTC, jnp.minimum(columns_BTN, count - 1), axis=-1)
  return jnp.where(columns_BTN < count, jnp.exp(at_BTN - log_mass_BT1), 0)


def losses(p_BTN, q_BTN):
  """{name: f32[B, T]}, nats but for tv, of draft and verifier laws at the tokens that the latter keeps.

  What p has elsewhere is one token more. TINY bounds what probability costs where there should be none.
  """
  log = lambda x: jnp.log(jnp.maximum(x, TINY))
  rest_BT = jnp.maximum(1 - jnp.sum(jnp.where(q_BTN > 0, p_BTN, 0), axis=-1), 0)
  forward_BTN = q_BTN * (log(q_BTN) - log(p_BTN))
  reverse_BTN = jnp.where(q_BTN > 0, p_BTN * (log(p_BTN) - log(q_BTN)), 0)
  return {'forward_kl': jnp.sum(forward_BTN, axis=-1),
          'reverse_kl': jnp.sum(reverse_BTN, axis=-1) + rest_BT * (log(rest_BT) - math.log(TINY)),
          'tv': 1 - jnp.sum(jnp.minimum(p_BTN, q_BTN), axis=-1)}


def losses_by_pass(student, batch, config, filtered):
  """For each pass the losses, {name: f32[B, T]}."""
  columns_BV = student.columns(batch.tokens)
  rows_BGSH = None if student.copy is None else student.rows_of(batch.tokens).swapaxes(1, 2)
  columns_BTN, q_BTN = target_law(batch, columns_BV, config)
  positions_BT = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
  hidden_BTW, past = batch.hidden if student.reads_hidden else None, None
  for _ in range(config.passes if student.reads_hidden else 1):
    own_BTD, past = student.read_text(batch.tokens, hidden_BTW, past)
    logits_BTC = student.column_logits(own_BTD, positions_BT, columns_BV, batch.tokens, rows_BGSH)
    yield losses(draft_law(logits_BTC, columns_BTN, batch, config, filtered), q_BTN)
    hidden_BTW = student.as_read(own_BTD) if student.reads_hidden else None


def loss(weights, student, batch, config):
  """The loss of a batch, a number, and the acceptance of its first pass."""
  student = with_weights(student, weights)
  mean = lambda x_BT: jnp.sum(x_BT * batch.answered) / jnp.maximum(jnp.sum(batch.answered), 1)
  total, scale, accepted = 0.0, 0.0, None
  for i, by_name in enumerate(losses_by_pass(student, batch, config, config.filter_draft)):
    weight = config.pass_decay**i
    total += weight * sum(factor * mean(by_name[name]) for name, factor in config.loss)
    scale += weight
    accepted = 1 - mean(by_name['tv']) if accepted is None else accepted
  return total / scale, accepted


def optimizer(config) -> optax.GradientTransformation:
  """AdamW on a cosine after a linear warm-up, with gradients clipped and, if wanted, accumulated."""
  warmup = min(config.warmup, config.steps - 1)
  schedule = optax.warmup_cosine_decay_schedule(
      0.0, config.learning_rate, warmup, config.steps, end_value=config.learning_rate / 20)
  chain = optax.chain(optax.clip_by_global_norm(config.clip),
                      optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay))
  return chain if config.accumulate == 1 else optax.MultiSteps(chain, config.accumulate)


def init(student, config) -> TrainState:
  """The state before the first step."""
  weights = trainable(student)
  return TrainState(step=jnp.int32(0), weights=weights, optimizer=optimizer(config).init(weights))


@functools.partial(jax.jit, static_argnames='config', donate_argnames='state')
def train_step(state, student, batch, config) -> tuple[TrainState, dict]:
  """One batch: the state after it, and {'loss', 'acceptance', 'gradient'}, the last its norm before clipping."""
  (value, acceptance), gradient = jax.value_and_grad(loss, has_aux=True)(state.weights, student, batch, config)
  updates, inner = optimizer(config).update(gradient, state.optimizer, state.weights)
  state = TrainState(state.step + 1, optax.apply_updates(state.weights, updates), inner)
  return state, {'loss': value, 'acceptance': acceptance, 'gradient': optax.tree.norm(gradient)}


@functools.partial(jax.jit, static_argnames='config')
def _evaluate(weights, student, batch, config):
  student = with_weights(student, weights)
  total = lambda x_BT: jnp.sum(x_BT * batch.answered)
  return jnp.stack([total(1 - by_name['tv']) for by_name in losses_by_pass(student, batch, config, True)]
                   ), jnp.sum(batch.answered)


def acceptance(weights, student, batches, config) -> list[float]:
  """The mean of sum_x min(p, q) over all answered tokens of some batches, exact, for each pass.

  The first two are those of the first and second drafted tokens of a round; those of further passes are near that of
  further tokens, and rather below.
  """
  totals, count = 0.0, 0.0
  for batch in batches:
    more, tokens = jax.device_get(_evaluate(weights, student, batch, config))
    totals, count = totals + more.astype(np.float64), count + float(tokens)
  return (totals / max(count, 1)).tolist()


def make_batch(conversations, length, rows) -> Batch:
  """Conversations, at most `rows` of at most `length` tokens, padded to both."""
  first = conversations[0]
  N = first.top_ids.shape[1]
  tokens, answered = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
  top_ids, top_logprobs = np.zeros((rows, length, N), np.int32), np.zeros((rows, length, N), np.float16)
  hidden = None
  if all(one.hidden is not None for one in conversations):
    hidden = np.zeros((rows, length, first.hidden.shape[1]), np.float16)
  for b, one in enumerate(conversations):
    end, laws = len(one.tokens), slice(one.prompt_length - 1, len(one.tokens) - 1)
    tokens[b, :end], answered[b, laws] = one.tokens, 1
    top_ids[b, laws], top_logprobs[b, laws] = one.top_ids, one.top_logprobs
    if hidden is not None:
      hidden[b, :end] = one.hidden
  return Batch(tokens, answered, top_ids, top_logprobs, hidden)


def batches(conversations, batch_tokens, seed=None, start=0):
  """Batches of all conversations once, those of like length together, in an order of its own for each seed.

  Args: start, how many of them are left out at the start.
  """
  plan = _plan(conversations, batch_tokens, seed)
  return (make_batch(*one) for one in plan[start:])


def _plan(conversations, batch_tokens, seed):
  """(conversations, length, rows) of each batch."""
  by_length = {}
  for one in conversations:
    by_length.setdefault(-(-len(one.tokens) // LENGTH_STEP) * LENGTH_STEP, []).append(one)
  random = np.random.default_rng(seed)
  plan = []
  for length, those in by_length.items():
    if seed is not None:
      random.shuffle(those)
    rows = max(batch_tokens // length, 1)
    plan += [(those[i : i + rows], length, rows) for i in range(0, len(those), rows)]
  if seed is not None:
    random.shuffle(plan)
  return plan


def frequent_tokens(conversations, num, vocab_size) -> np.ndarray:
  """The `num` tokens that the verifier's laws give most probability in its own texts, rising."""
  mass = np.zeros(vocab_size)
  for one in conversations:
    np.add.at(mass, one.top_ids, np.exp(one.top_logprobs.astype(np.float32)))
  return np.sort(np.argsort(-mass, kind='stable')[:num]).astype(np.int32)


def fit(student, train, held_out, config, folder, *, evaluate_every=100, progress=None):
  """Trains a student, yielding figures at each evaluation; goes on from the last checkpoint in the folder.

  Args:
    train, held_out: conversations of a corpus.
    folder: of checkpoints; the last two are kept. `restore` gives the student of the last one.
    evaluate_every: batches between evaluations, each of which makes a checkpoint.
    progress: called with (step, figures of the step).
  Yields: the figures of all evaluations so far, of earlier runs too:
    [{'step', 'loss', 'acceptance', 'held_out': [of each pass]}].
  Raises: ValueError for a folder with checkpoints of another config, for texts that cannot train this student, and when
    the loss or an acceptance is no number any more.
  """
  if evaluate_every < 1:
    raise ValueError(f'evaluate_every={evaluate_every}: need at least 1.')
  check_texts(student, train, held_out, config)
  with _Checkpoints(folder, student, config) as checkpoints:
    state, rows = checkpoints.restore(init(student, config))
    held_out = list(batches(held_out, config.batch_tokens))
    if rows:
      yield rows
    start, steps, seen = int(state.step), config.steps * config.accumulate, []
    for step, batch in zip(range(start, steps), _endless(train, config, start)):
      state, figures = train_step(state, student, batch, config)
      seen.append({name: float(value) for name, value in figures.items()})
      _check_finite([seen[-1]['loss'], seen[-1]['gradient']], 'the loss', step + 1, folder, checkpoints.last)
      if progress is not None:
        progress(step + 1, seen[-1])
      if (step + 1) % evaluate_every == 0 or step + 1 == steps:
        mean = lambda name: float(np.mean([one[name] for one in seen]))
        accepted = acceptance(state.weights, student, held_out, config)
        _check_finite(accepted, 'the acceptance on held-out texts', step + 1, folder, checkpoints.last)
        rows = [*rows, {'step': step + 1, 'loss': mean('loss'), 'acceptance': mean('acceptance'), 'held_out': accepted}]
        seen = []
        checkpoints.save(state, rows)
        yield rows


def restore(student, config, folder) -> tuple[Student, list[dict]]:
  """The student with the weights of the last checkpoint, and its rows; itself and [] if there is none."""
  with _Checkpoints(folder, student, config) as checkpoints:
    state, rows = checkpoints.restore(init(student, config))
    return with_weights(student, state.weights), rows


def _check_finite(numbers, what, step, folder, last):
  if not all(map(math.isfinite, numbers)):
    good = f'the checkpoint of step {last} in {folder} is the last good one' if last else 'there is no checkpoint yet'
    raise ValueError(f'{what} became NaN or infinite at step {step}; {good}: lower the learning rate, or the norm at '
                     'which gradients are clipped.')


def check_texts(student, train, held_out, config):
  """Raises ValueError for texts that cannot train this student."""
  for name, texts in (('train', train), ('held_out', held_out)):
    if not texts:
      raise ValueError(f'{name} is empty: need at least one conversation.')
  texts = [*train, *held_out]
  if student.reads_hidden:
    width = (1 + len(student.hidden_layers)) * student.config.embed_dim
    if any(one.hidden is None or one.hidden.shape[1] != width for one in texts):
      raise ValueError('the corpus lacks hidden states which this student reads: write it anew with them.')
  kept = sorted({one.top_ids.shape[1] for one in texts})
  if len(kept) > 1:
    raise ValueError(f'texts have laws of {" and ".join(map(str, kept))} tokens: train on corpora of like settings.')
  if config.top_k > kept[0]:
    raise ValueError(f'top_k={config.top_k}: the texts have laws of {kept[0]} tokens, so it can be at most that.')


def _endless(train, config, start):
  """The batches of epoch after epoch, from number `start` on."""
  per_epoch = len(_plan(train, config.batch_tokens, None))
  for epoch in itertools.count(start // per_epoch):
    first = start % per_epoch if epoch == start // per_epoch else 0
    yield from batches(train, config.batch_tokens, (config.seed, epoch), first)


class _Checkpoints:
  """The checkpoints of a training run: state and rows, under the number of the step."""

  def __init__(self, folder, student, config):
    import orbax.checkpoint as ocp

    self._ocp, folder = ocp, pathlib.Path(folder).absolute()
    self._about = {'config': dataclasses.asdict(config), 'model': dataclasses.asdict(student.config),
                   'head_size': len(student.head_ids), 'hidden_layers': student.hidden_layers,
                   'copies_from': 'head' if student.copy is None else 'head and text',
                   'start': weights_lib.digest(student.replace(whole_head=None))}
    self._about = json.loads(json.dumps(self._about))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    try:
      self._manager = ocp.CheckpointManager(folder, options=options)
    except OSError as error:
      raise ValueError(f'{folder}: no checkpoints can be written there ({error}).') from None
    self.last = self._manager.latest_step()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._manager.close()

  def restore(self, state):
    """The last state and its rows; the given one and [] if there is none."""
    if self.last is None:
      return state, []
    args = self._ocp.args
    about = self._manager.restore(self.last, args=args.Composite(about=args.JsonRestore()))['about']
    if other := differences(_flat(about), _flat(self._about)):
      raise ValueError(f'{self._manager.directory} has checkpoints of another run ({"; ".join(other)}): choose another '
                       'folder, or the same settings.')
    found = self._manager.restore(self.last, args=args.Composite(state=args.StandardRestore(state)))
    return found['state'], about['rows']

  def save(self, state, rows):
    """Writes both; a kill leaves the checkpoint before."""
    args = self._ocp.args
    try:
      self._manager.save(int(state.step), args=args.Composite(
          state=args.StandardSave(state), about=args.JsonSave(self._about | {'rows': rows})))
    except OSError as error:
      raise ValueError(f'{self._manager.directory}: could not be written ({error}); is the disk full? The checkpoint '
                       f'of step {self.last} is whole.') from error
    self.last = int(state.step)


def _flat(about):
  """The settings in it under one name each."""
  return about | about['config'] | {f'model.{name}': value for name, value in about['model'].items()} | {
      'config': None, 'model': None}
