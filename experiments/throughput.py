"""Tokens per second of plain and speculative decoding, beside transformers on the same weights, in one run.

  python experiments/throughput.py                      # batch 1 and 8, medians of 5 repeats, 10 minutes on 2 CPU cores
  python experiments/throughput.py --batch_sizes=1 --repeats=3 --arms=plain,lookup

Every arm gets the same prompts, sampling and number of new tokens, and is timed from prompt to last token by the same
clock; arms take turns, so that a machine whose speed drifts drifts for all of them. Below the table stands where the
time goes: the bandwidth of this machine, measured in the same run, and what it allows; the bare forward pass; what the
loop adds to it; and what making and using the laws costs. transformers (extra: torch) is left out where not installed.
"""

import functools
import importlib.util
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from lib import flags as common
from lib import record, timing

import cactus_jax as cj
from cactus_jax import sampling, text, verify
from cactus_jax.records import per_row

_BATCH_SIZES = flags.DEFINE_list('batch_sizes', ['1', '8'], 'Batch sizes to measure.')
_NEW_TOKENS = flags.DEFINE_integer('new_tokens', 64, 'New tokens a row; end-of-sequence tokens are ignored.')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'Repeats of each arm.')
_ARMS = flags.DEFINE_list(
    'arms', ['transformers', 'transformers_lookup', 'plain', 'lookup', 'early_exit:8'], 'What to compare.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to append the figures to.')

PROMPTS = [
    'Why is the sky blue?',
    'Write a short poem about the sea.',
    'List five fruits and a colour for each.',
    'Explain to a child how a bicycle stays upright.',
    'Translate into French: The weather is beautiful today.',
    'What is the difference between a virus and a bacterium?',
    'Give me a recipe for pancakes.',
    'Summarise in one sentence: The honeybee colony lives in a hive. The queen lays up to two thousand eggs a day. The '
    'workers gather nectar, build the comb and guard the entrance.',
]


class Ours:
  """Decoding of a fixed number of tokens by this library, counting its rounds."""

  def __init__(self, target, draft, batches):
    self._models, self._rule, self._sampling = (target, draft), common.rule(), common.sampling()
    self._batches = batches
    self._width = text.bucket(max(len(row) for rows in batches for row in rows))
    self._config = cj.DecodeConfig(num_draft=common.num_draft(), vocab_size=target.config.vocab_size,
                                   max_length=text.bucket(self._width + _NEW_TOKENS.value))
    self.calls = 0

  def __call__(self, turn):
    rows = self._batches[turn]
    length = np.array([len(row) for row in rows])
    prompt = np.array([row + [0] * (self._width - len(row)) for row in rows], np.int32)
    state = cj.prefill(*self._models, prompt, length, cj.row_keys(turn, rows), length + _NEW_TOKENS.value, self._config)
    state = jax.block_until_ready(cj.generate(*self._models, self._rule, self._sampling, state, self._config))
    if turn:
      self.calls += int(state.round.sum())


def theirs(source, tokenizer, batches, lookup):
  """The same by transformers' `generate`, plain or assisted by prompt lookup."""
  import torch

  model, params, pad = _torch_model(source), common.sampling(), tokenizer.pad_token_id
  options = dict(do_sample=True, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
                 min_new_tokens=_NEW_TOKENS.value, max_new_tokens=_NEW_TOKENS.value, pad_token_id=pad)
  if lookup:
    options['prompt_lookup_num_tokens'] = common.num_draft()

  def run(turn):
    rows = batches[turn]
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(turn)
    with torch.inference_mode():
      out = model.generate(ids, attention_mask=mask, **options)
    assert out.shape[1] == longest + _NEW_TOKENS.value, 'an arm that writes another number of tokens is no comparison'

  return run


@functools.cache
def _torch_model(source):
  import torch
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  gguf = {'gguf_file': os.path.basename(source)} if source.endswith('.gguf') else {}
  folder = os.path.dirname(source) if gguf else source
  return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf).eval()


def pieces(target, batch, config, repeats):
  """Seconds of what a round is made of, and of reading memory, which bounds it.

  Returns: read, of a gigabyte; forward_1 and forward_K+1, the bare forward pass; plain, a round of plain decoding;
    laws, making the laws of K+1 positions and using them to accept and draw.
  """
  K, V = config.num_draft, config.vocab_size
  data = jnp.ones((2**28,), jnp.float32)  # a gigabyte: no cache holds it
  read = jax.jit(jnp.sum)

  @jax.jit
  def laws(logits_BTV, params, rule, drafted, keys):
    return verify.verify(rule, drafted, sampling.to_probs(logits_BTV, params), keys)

  logits = 3 * jax.random.normal(jax.random.key(0), (batch, K + 1, V))
  tokens = jnp.argmax(logits[:, :K], axis=-1).astype(jnp.int32)
  drafted = cj.Draft(tokens=tokens, probs=jax.nn.one_hot(tokens, V), num_drafted=jnp.full(batch, K))
  params, rule = (per_row(record, batch) for record in (common.sampling(), common.rule()))
  keys = jax.random.split(jax.random.key(1), batch)
  seconds = timing.measure({
      'read': lambda _: read(data).block_until_ready(),
      'forward_1': timing.forward(target, batch, 1, config.capacity),
      'forward_K+1': timing.forward(target, batch, K + 1, config.capacity),
      'plain': timing.plain(target, batch, config, common.sampling()),
      'laws': lambda _: jax.block_until_ready(laws(logits, params, rule, drafted, keys)),
  }, repeats)
  steps = dict.fromkeys(('forward_1', 'forward_K+1', 'plain'), timing.STEPS)
  return {name: s / steps.get(name, 1) for name, s in seconds.items()}


def compare(batch, target, tokenizer, source):
  """One table: every arm at one batch size."""
  prompts = cj.encode(PROMPTS, tokenizer, raw=False)
  batches = [[prompts[(turn * batch + i) % len(prompts)] for i in range(batch)] for turn in range(_REPEATS.value + 1)]
  arms = {}
  for name in _ARMS.value:
    if name.startswith('transformers'):
      if any(common.held().values()):
        print(f'{name}: left out, it holds its weights in float32')
        continue
      if importlib.util.find_spec('torch') is None:
        print(f'{name}: left out, torch is not installed (pip install -e .[torch])')
        continue
      if name.endswith('lookup') and batch > 1:
        print(f'{name}: left out, it decodes one row at a time only')
        continue
      arms[name] = theirs(source, tokenizer, batches, name.endswith('lookup'))
    else:
      draft, _ = common.draft_named('none' if name == 'plain' else name, target)
      arms[name] = Ours(target, draft, batches)
  seconds = timing.measure(arms, _REPEATS.value)
  base = seconds.get('transformers')
  figures = []
  print(f'\nbatch {batch}, {_NEW_TOKENS.value} new tokens a row, medians of {_REPEATS.value} turns')
  print(f'  {"arm":22s}{"tokens/s":>10s}{"ms a token":>12s}{"x transformers":>16s}{"tokens a call":>15s}')
  for name, duration in seconds.items():
    calls = getattr(arms[name], 'calls', None)
    figure = {
        'batch': batch,
        'arm': name,
        'tokens_per_second': batch * _NEW_TOKENS.value / duration,
        'times_transformers': base and base / duration,
        'tokens_per_call': calls and _REPEATS.value * batch * _NEW_TOKENS.value / calls,
    }
    figures.append(figure)
    shown = [f'{x:.2f}' if x else '-' for x in (figure['times_transformers'], figure['tokens_per_call'])]
    print(f'  {name:22s}{figure["tokens_per_second"]:10.1f}{1e3 * duration / _NEW_TOKENS.value:12.1f}'
          f'{shown[0]:>16s}{shown[1]:>15s}', flush=True)
  return figures


def explain(batch, target, repeats):
  """Prints where the time of a round goes, against what the machine allows; returns the figures."""
  config = cj.DecodeConfig(num_draft=common.num_draft(), vocab_size=target.config.vocab_size,
                           max_length=text.bucket(64 + _NEW_TOKENS.value))
  width = config.num_draft + 1
  seconds = pieces(target, batch, config, repeats)
  weights = sum(x.nbytes for x in jax.tree.leaves(target.params))
  bound = seconds['read'] * weights / 2**30
  verify_seconds = seconds['forward_K+1']
  percent = lambda part, whole: f'{100 * part / whole:.0f}%'
  lines = [
      (f'reading {weights / 1e9:.2f} GB of weights', bound, f'at {2**30 / seconds["read"] / 1e9:.1f} GB/s: the bound'),
      ('bare forward, 1 token', seconds['forward_1'], f'{percent(bound, seconds["forward_1"])} of the bound'),
      (f'bare forward, {width} tokens', verify_seconds, f'{verify_seconds / seconds["forward_1"]:.2f} times one'),
      ('round of plain decoding', seconds['plain'], f'{percent(bound, seconds["plain"])} of the bound, '
       f'{percent(seconds["plain"] - seconds["forward_1"], seconds["forward_1"])} over the bare forward'),
      (f'laws of {width} positions', seconds['laws'], f'{percent(seconds["laws"], verify_seconds)} of that forward'),
  ]
  print()
  for what, duration, remark in lines:
    print(f'  {what:28s}{1e3 * duration:8.2f} ms   {remark}', flush=True)
  return {'batch': batch, 'bound_ms': 1e3 * bound, **{f'{name}_ms': 1e3 * s for name, s in seconds.items()}}


def main():
  """Prints the tables, and appends their figures to --output."""
  common.refuse(['stop', 'max_new_tokens', 'raw', 'seed'], 'every arm answers the same prompts with as many tokens')
  common.refuse(['ledger', 'block_verification', 'stop_entropy'], 'arms are verified token by token, of whole drafts')
  if isinstance(common.rule(), cj.Budget):
    raise ValueError('--rule=budget means nothing here: arms are compared at fixed numbers.')
  rows = record.Rows(_OUTPUT.value) if _OUTPUT.value else None
  source = common.verifier_source()
  target, tokenizer = common.verifier(), cj.load_tokenizer(source)
  machine = common.machine()
  print(f'{common.describe()}; {machine}', flush=True)
  for batch in map(int, _BATCH_SIZES.value):
    figures = compare(batch, target, tokenizer, source)
    figures.append(explain(batch, target, 2 * _REPEATS.value))
    for figure in figures if rows else ():
      rows.append({'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__, **common.held(), **figure})


if __name__ == '__main__':
  common.run(main)
