"""Our decoder as a model of lm-eval, so that any of its tasks runs under any verification rule."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from tqdm.auto import tqdm

import cactus_jax as cj
from cactus_jax import sharding, text
from cactus_jax.models import transformer
from lib import pod, tasks


class SpeculativeLM(TemplateLM):
  """A verifier, its draft and a rule, as lm-eval asks a model.

  Texts are sampled by the rule and the law given here, whatever temperature a task names; likelihoods are the
  verifier's own, at temperature 1.

  Attributes:
    parts: `metrics.Stats` of each text that was written.
    finished: how many requests were answered, likelihoods too.
  """

  def __init__(self, *, target, tokenizer, draft=None, seed=0, stop=(), max_new_tokens=None, batch_size=8, raw=False,
               progress=lambda tokens: None, **options):
    """Args: as for `cj.generate_each`, but
      stop, max_new_tokens: where not given, each task's own.
      seed: that of a question asked several times counts up, or all its answers would be one.
      batch_size: also the rows of a pass for likelihoods.
      raw: whether prompts are no turns of a chat, and a line may be all of an answer (see `tasks.stop_strings`).
      progress: called now and then while texts are written.
    """
    super().__init__()
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
      raise ValueError('the tokenizer has no token that begins or ends a text: nothing is there to condition on.')
    self.tokenizer, self.parts, self.finished = tokenizer, [], 0
    self._target, self._draft, self._seed, self._stop = target, draft, seed, stop
    self._max_new_tokens, self._batch_size, self._raw = max_new_tokens, batch_size, raw
    self._progress, self._options = progress, options

  # What lm-eval asks of a tokenizer.

  @property
  def eot_token_id(self):
    return self.tokenizer.eos_token_id

  @property
  def prefix_token_id(self):
    bos = self.tokenizer.bos_token_id
    return self.tokenizer.eos_token_id if bos is None else bos

  @property
  def tokenizer_name(self):
    return self.tokenizer.name_or_path.replace('/', '__')

  @property
  def max_length(self):
    return self._target.config.max_length

  def apply_chat_template(self, chat_history, add_generation_prompt=True):
    return tasks.chat_template(self.tokenizer)(chat_history, add_generation_prompt)

  def tok_encode(self, string, add_special_tokens=None, **_):
    if add_special_tokens is None:
      return list(self.tokenizer(tasks.without_bos(string, self.tokenizer))['input_ids'])
    return list(self.tokenizer(string, add_special_tokens=add_special_tokens)['input_ids'])

  # Texts.

  def generate_until(self, requests, disable_tqdm=False):
    """The answers, without thoughts. Each is in lm-eval's cache, if there is one, as soon as it is finished.

    Raises: ValueError for a prompt that leaves no room for an answer.
    """
    _agree(requests)
    prompts = [tasks.without_bos(request.args[0], self.tokenizer) for request in requests]
    lengths = [len(self.tokenizer(prompt)['input_ids']) for prompt in prompts]
    groups, asked, short = collections.defaultdict(list), collections.Counter(), 0
    context = min(model.config.max_length for model in (self._target, self._draft) if hasattr(model, 'config'))
    for i, request in enumerate(requests):
      if lengths[i] >= context:
        raise ValueError(f'{_name(request)}: its prompt has {lengths[i]} tokens, the model a context of {context}, of '
                         'which at least one must be left for the answer; ask with fewer examples (--num_fewshot).')
      stop, most = self._limits(request.args[1])
      short += lengths[i] + most > context
      question = request.task_name, request.doc_id, prompts[i]
      groups[stop, most].append((i, self._seed + asked[question]))
      asked[question] += 1
    if short:
      warnings.warn(f'{short} of {len(requests)} prompts leave less room in the context of {context} tokens than an '
                    'answer may take: such an answer ends where the context does.', stacklevel=2)
    answers = [None] * len(requests)
    with tqdm(total=len(requests), unit='answer', disable=disable_tqdm or not pod.is_first()) as bar:
      for (stop, most), members in groups.items():
        rows, seeds = zip(*members)
        each = cj.generate_each(
            [prompts[i] for i in rows], target=self._target, tokenizer=self.tokenizer, draft=self._draft, raw=True,
            stop=stop, max_new_tokens=most, seed=seeds, batch_size=self._batch_size, progress=self._progress,
            **self._options)
        for member, done in each:
          i = rows[member]
          answers[i] = tasks.without_thoughts(done.texts[0], prompts[i])
          self.parts.append(done.stats)
          self._keep('generate_until', requests[i], answers[i])
          bar.update()
    return answers

  def _limits(self, wanted) -> tuple[tuple[str, ...], int]:
    """(stop strings, most new tokens) of a request."""
    from lm_eval.models.utils import normalize_gen_kwargs

    wanted = normalize_gen_kwargs(wanted)
    stop = self._stop or tasks.stop_strings(wanted['until'], self.tokenizer, self._raw)
    return tuple(stop), self._max_new_tokens or wanted['max_gen_toks']

  # Likelihoods.

  def loglikelihood(self, requests, disable_tqdm=False):
    """[(ln of the probability of the continuation after the context, whether greedy decoding gives it)].

    Raises: ValueError for a text longer than the context.
    """
    _agree(requests)
    self._asked = requests
    return super().loglikelihood(requests, disable_tqdm=True)

  def _loglikelihood_tokens(self, requests, **_):
    # A context of white space only has lost all of it to the continuation.
    pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
    for request, (context, continuation) in zip(self._asked, pairs):
      if not continuation:
        raise ValueError(f'{_name(request)}: {request.args[1]!r} has no token of its own after its context.')
      if len(context) + len(continuation) - 1 > self.max_length:
        raise ValueError(f'{_name(request)}: {len(context)} tokens of context and {len(continuation)} of continuation, '
                         f'more than the context of the model, {self.max_length}; ask with fewer examples '
                         '(--num_fewshot).')
    return self._judge(pairs, lambda i, found: self._keep('loglikelihood', self._asked[i], found))

  def loglikelihood_rolling(self, requests, disable_tqdm=False):
    """[ln of the probability of the text], in windows of the context as lm-eval cuts them."""
    _agree(requests)
    windows, owners = [], []
    for i, request in enumerate(requests):
      # The prefix begins the text, so no such token does a second time.
      tokens = self.tok_encode(request.args[0], add_special_tokens=False)
      cut = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
      for window in map(utils.make_disjoint_window, cut):
        windows.append(window)
        owners.append(i)
    totals, left = [0.0] * len(requests), collections.Counter(owners)

    def add(window, result):
      i = owners[window]
      totals[i] += result[0]
      left[i] -= 1
      if not left[i]:
        self._keep('loglikelihood_rolling', requests[i], totals[i])

    self._judge(windows, add)
    return totals

  def _judge(self, pairs, found=lambda i, result: None) -> list[tuple[float, bool]]:
    """As `loglikelihood`, of pairs of token ids; each result is also given to found(i, result) once it is there.

    Rows are padded to a few lengths, so that as few programs are made.
    """
    mesh, limit = getattr(self._target, 'mesh', None), self.max_length
    groups = collections.defaultdict(list)
    for i, (context, continuation) in enumerate(pairs):
      width = min(text.bucket(len(context) + len(continuation) - 1), limit)
      groups[width, min(text.bucket(len(continuation)), width)].append(i)
    size = -(-self._batch_size // sharding.row_groups(mesh)) * sharding.row_groups(mesh)
    results = [None] * len(pairs)
    with tqdm(total=len(pairs), unit='text', disable=not pod.is_first()) as bar:
      for (width, most), members in sorted(groups.items(), reverse=True):  # the largest first, lest memory ends late
        for start in range(0, len(members), size):
          rows = members[start : start + size]
          tokens_BT, following_BC = np.zeros((size, width), np.int32), np.zeros((size, most), np.int32)
          first_B = np.zeros(size, np.int32)
          for row, i in enumerate(rows):
            context, continuation = pairs[i]
            tokens_BT[row, : len(context) + len(continuation) - 1] = (context + continuation)[:-1]
            following_BC[row, : len(continuation)] = continuation
            first_B[row] = len(context) - 1
          placed = (tokens_BT, first_B, following_BC)
          placed = placed if mesh is None else sharding.place(placed, sharding.rows(mesh))
          logprobs_BC, likeliest_BC = sharding.fetch(_after(self._target, *placed))
          for row, i in enumerate(rows):
            count = len(pairs[i][1])
            logprob = float(logprobs_BC[row, :count].astype(np.float64).sum())
            results[i] = logprob, bool(likeliest_BC[row, :count].all())
            found(i, results[i])
          self._progress(0)
          bar.update(len(rows))
    return results

  def _keep(self, method, request, result):
    """Has lm-eval's cache, if there is one, write a result to the disk."""
    self.cache_hook.add_partial(method, request.args, result)
    self.finished += 1


@jax.jit
def _after(model, tokens_BT, first_B, following_BC):
  """Of tokens that follow position first_B, first_B + 1, ... of each row: f32[B, C] ln of the probability of each, and
  bool[B, C] whether it is the likeliest. What is past the end of a row means nothing.

  Logits are made at these positions only: at all of a row they would fill memory.
  """
  B, T = tokens_BT.shape
  positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  x_BTD = transformer.embed(model.params, model.config, tokens_BT, model.mesh)
  x_BTD, _ = transformer.run_layers(
      model.params, model.config, x_BTD, positions_BT, model.init_cache(B, T), model.mesh)
  index_BC = jnp.minimum(first_B[:, None] + jnp.arange(following_BC.shape[1])[None], T - 1)
  x_BCD = jnp.take_along_axis(x_BTD, index_BC[..., None], axis=1)
  logits_BCV = transformer.logits(model.params, model.config, x_BCD, model.mesh).astype(jnp.float32)
  logprobs_BCV = jax.nn.log_softmax(logits_BCV)
  chosen_BC = jnp.take_along_axis(logprobs_BCV, following_BC[..., None], axis=-1)[..., 0]
  return chosen_BC, logits_BCV.argmax(axis=-1) == following_BC


def _agree(requests):
  """Raises ValueError unless all processes are asked the same."""
  if pod.is_several():
    asked = [list(map(str, request.args)) for request in requests]
    pod.check_agreement({'what is asked': f'{len(asked)} requests ({pod.digest(asked)})'})


def _name(request):
  return f'document {request.doc_id} of task {request.task_name}'
