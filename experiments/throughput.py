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
from lib import record

import cactus_jax as cj
from cactus_jax import sampling, text, verify

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
    'Repeat this sentence three times: The quick brown fox jumps over the lazy dog.',
]


def measure(arms, repeats):
  """Median seconds of each arm; the arms take turns and the first turn, which compiles, is not counted."""
  times = {name: [] for name in arms}
  for turn in range(repeats + 1):
    for name, run in arms.items():
      start = time.perf_counter()
      run(turn)
      if turn:
        times[name].append(time.perf_counter() - start)
  return {name: float(np.median(seconds)) for name, seconds in times.items()}


class Ours:
  """Decoding of a fixed number of tokens by this library, counting its rounds."""

  def __init__(self, target, draft, rows):
    self._models, self._rule = (target, draft), common.rule()
    self._sampling = common.sampling()
    longest = max(map(len, rows))
    self._prompt = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
    self._length = np.array([len(row) for row in rows])
    self._rows = rows
    self.config = cj.DecodeConfig(num_draft=common.num_draft(), vocab_size=target.config.vocab_size,
                                  max_length=text.bucket(longest + _NEW_TOKENS.value))
    self.calls, self.accepted = 0, 0

  def __call__(self, seed):
    keys = cj.row_keys(seed, self._rows)
    limit = self._length + _NEW_TOKENS.value
    state = cj.prefill(*self._models, self._prompt, self._length, keys, limit, self.config)
    state = jax.block_until_ready(cj.generate(*self._models, self._rule, self._sampling, state, self.config))
    if seed:
      self.calls += int(state.round.sum())
      self.accepted += int(state.stats.accepted.sum())


def theirs(source, tokenizer, rows, lookup):
  """The same by transformers' `generate`, plain or assisted by prompt lookup."""
  import torch

  model = _torch_model(source)
  longest = max(map(len, rows))
  ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows])
  mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
  params = common.sampling()
  options = dict(do_sample=True, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
                 min_new_tokens=_NEW_TOKENS.value, max_new_tokens=_NEW_TOKENS.value, pad_token_id=tokenizer.pad_token_id)
  if lookup:
    options['prompt_lookup_num_tokens'] = common.num_draft()

  def run(seed):
    torch.manual_seed(seed)
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


def bandwidth(repeats):
  """Bytes per second of reading a large array once: what any decoder of this machine is bound by."""
  data = jnp.ones((64, 1024, 1024), jnp.float32)
  read = jax.jit(jnp.sum)
  return data.nbytes / measure({'read': lambda _: read(data).block_until_ready()}, repeats)['read']


def pieces(target, batch, config, repeats):
  """Seconds of the parts of a round: the forward pass of 1 and of K+1 tokens, and the laws made and used."""
  K = config.num_draft
  step = jax.jit(lambda model, tokens, positions, cache: model(tokens, positions, cache), donate_argnames='cache')

  def forward(width):
    tokens = jnp.ones((batch, width), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
    held = [jax.jit(target.init_cache, static_argnums=(0, 1))(batch, config.capacity)]

    def run(_):
      logits, held[0] = step(target, tokens, positions, held[0])
      logits.block_until_ready()

    return run

  @jax.jit
  def laws(logits_BTV, params, rule, drafted, keys):
    target_probs = sampling.to_probs(logits_BTV, params)
    return verify.verify(rule, drafted, target_probs, keys)

  per_row = lambda record: sampling.per_row(record, batch)
  logits = 3 * jax.random.normal(jax.random.key(0), (batch, K + 1, config.vocab_size))
  tokens = jnp.argmax(logits[:, :K], axis=-1).astype(jnp.int32)
  drafted = cj.Draft(tokens=tokens, probs=jax.nn.one_hot(tokens, config.vocab_size), num_drafted=jnp.full(batch, K))
  arguments = (logits, per_row(common.sampling()), per_row(common.rule()), drafted, jax.random.split(jax.random.key(1), batch))
  return measure({
      'forward_1': forward(1),
      'forward_K+1': forward(K + 1),
      'laws': lambda _: jax.block_until_ready(laws(*arguments)),
  }, repeats)


def compare(batch, target, tokenizer, source):
  """One table: every arm at one batch size."""
  rows = cj.encode([PROMPTS[i % len(PROMPTS)] for i in range(batch)], tokenizer, raw=False)
  arms = {}
  for name in _ARMS.value:
    if name.startswith('transformers'):
      if importlib.util.find_spec('torch') is None:
        print(f'{name}: left out, torch is not installed (pip install -e .[torch])')
        continue
      if name.endswith('lookup') and batch > 1:
        print(f'{name}: left out, it decodes one row at a time only')
        continue
      arms[name] = theirs(source, tokenizer, rows, name.endswith('lookup'))
    else:
      arms[name] = Ours(target, common.draft_named('none' if name == 'plain' else name, target)[0], rows)
  seconds = measure(arms, _REPEATS.value)
  base = seconds.get('transformers')
  figures = []
  print(f'\nbatch {batch}, {_NEW_TOKENS.value} new tokens a row, medians of {_REPEATS.value}')
  print(f'  {"arm":22s}{"tokens/s":>10s}{"ms a token":>12s}{"x transformers":>16s}{"tokens a call":>15s}')
  for name, duration in seconds.items():
    rate = batch * _NEW_TOKENS.value / duration
    arm = arms[name]
    per_call = _REPEATS.value * batch * _NEW_TOKENS.value / arm.calls if isinstance(arm, Ours) else None
    figures.append({'batch': batch, 'arm': name, 'tokens_per_second': rate, 'tokens_per_call': per_call,
                    'times_transformers': base / duration if base else None})
    print(f'  {name:22s}{rate:10.1f}{1e3 * duration / _NEW_TOKENS.value:12.1f}'
          f'{f"{base / duration:.2f}" if base else "-":>16s}{f"{per_call:.2f}" if per_call else "-":>15s}')
  return figures, seconds.get('plain')


def explain(batch, target, plain, repeats):
  """Where the time of a round goes, against what the machine allows."""
  config = cj.DecodeConfig(num_draft=common.num_draft(), vocab_size=target.config.vocab_size,
                           max_length=text.bucket(64 + _NEW_TOKENS.value))
  speed = bandwidth(repeats)
  weights = sum(x.nbytes for x in jax.tree.leaves(target.params))
  parts = pieces(target, batch, config, 4 * repeats)
  bound = weights / speed
  figures = {'batch': batch, 'gb_per_second': speed / 1e9, 'weights_gb': weights / 1e9, 'bound_ms': 1e3 * bound,
             **{f'{name}_ms': 1e3 * s for name, s in parts.items()},
             'laws_share_of_round': parts['laws'] / (parts['forward_K+1'] + parts['laws'])}
  print(f'\n  reading memory: {speed / 1e9:.1f} GB/s; weights: {weights / 1e9:.2f} GB; so a step takes at least '
        f'{1e3 * bound:.1f} ms')
  print(f'  bare forward, 1 token: {1e3 * parts["forward_1"]:.1f} ms, {100 * bound / parts["forward_1"]:.0f}% of the bound')
  print(f'  bare forward, {config.num_draft + 1} tokens: {1e3 * parts["forward_K+1"]:.1f} ms, '
        f'{parts["forward_K+1"] / parts["forward_1"]:.2f} times one')
  print(f'  laws of {config.num_draft + 1} positions, acceptance and a draw: {1e3 * parts["laws"]:.2f} ms, '
        f'{100 * figures["laws_share_of_round"]:.1f}% of a round')
  if plain:
    token = plain / _NEW_TOKENS.value
    figures |= {'plain_ms': 1e3 * token, 'share_of_bound': bound / token, 'loop_overhead': token / parts['forward_1'] - 1}
    print(f'  plain decoding: {1e3 * token:.1f} ms a token with its prompt, {100 * bound / token:.0f}% of the bound; over '
          f'the bare forward: {100 * (token / parts["forward_1"] - 1):+.0f}%')
  return figures


def main():
  """Prints the tables, and appends their figures to --output."""
  rows = record.Rows(_OUTPUT.value) if _OUTPUT.value else None
  source = common.verifier_source()
  target, tokenizer = cj.load_transformer(source), cj.load_tokenizer(source)
  print(f'{common.describe()}; {jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}')
  for batch in map(int, _BATCH_SIZES.value):
    figures, plain = compare(batch, target, tokenizer, source)
    figures.append(explain(batch, target, plain, _REPEATS.value))
    for figure in figures if rows else ():
      rows.append({'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__, **figure})


if __name__ == '__main__':
  common.run(main)
