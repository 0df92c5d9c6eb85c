"""What the same weights cost and lose when they are held otherwise: in 8 bits, in bfloat16, padded, head untied.

  python experiments/variants.py                        # the default model, some 4 minutes on 2 CPU cores
  python experiments/variants.py --variants=float32,int8 --output=variants.jsonl

First the model of --verifier. Speed: milliseconds of a round of plain decoding, of a bare pass over one token and over
K + 1, in turns, medians. Quality, against float32 on texts that float32 wrote greedily: cosine of the logits, KL of
float32's law at temperature 1 from that of the variant (nats a token, mean and 99 % quantile), how often both have the
same likeliest token, and how many tokens the variant's own greedy text agrees from the start. Then the same quality for
a small random model of every family. Last, the products alone: the matrices of all layers, one after another, as
float32, as 8 bits here, and as 8 bits by qwix (pip install qwix; else left out).
"""

import dataclasses
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
from cactus_jax import text
from cactus_jax.models import layers, rope, transformer, weights
from cactus_jax.models.config import FAMILIES, ModelConfig

_VARIANTS = flags.DEFINE_list('variants', None, 'Which to compare with float32; by default all but bfloat16 on a CPU, '
                              'which has no arithmetic for it worth timing.')
_REPEATS = flags.DEFINE_integer('repeats', 9, 'Turns of each arm.', allow_override=True)
_TOKENS = flags.DEFINE_integer('tokens', 256, 'Length of the greedy texts.', 2)
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to append the figures to.', allow_override=True)

PROMPTS = [
    'Why is the sky blue?',
    'Write a short story about a lighthouse.',
    'Explain to a child how a bicycle stays upright.',
    'List five fruits and a colour for each.',
]
PADDING = 128  # columns: vocabularies are often rounded up to a multiple of it


def padded(model):
  """More columns of the vocabulary, which no token has."""
  longer = lambda table: None if table is None else jnp.pad(table, ((0, PADDING), (0, 0)))
  params = model.params.replace(embed=longer(model.params.embed), head=longer(model.params.head))
  return model.replace(
      params=params, config=dataclasses.replace(model.config, vocab_size=model.config.vocab_size + PADDING))


def untied(model):
  """A copy of the embedding as head."""
  return model.replace(params=model.params.replace(head=jnp.copy(model.params.embed)),
                       config=dataclasses.replace(model.config, tie_embeddings=False))


VARIANTS = {
    'float32': lambda model: model,
    'int8': weights.to_int8,
    'int8 cache': lambda model: model.replace(kv_dtype='int8'),
    'int8 both': lambda model: weights.to_int8(model).replace(kv_dtype='int8'),
    'bfloat16': lambda model: model.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)),
    'padded': padded,
    'untied': untied,
}


ROUNDED = ('int8', 'int8 cache', 'int8 both', 'bfloat16')  # those that are not the same model


def check_names():
  """Names of variants that were asked for, or None. Raises ValueError for one that there is not."""
  names = _VARIANTS.value
  if unknown := [name for name in names or () if name not in VARIANTS]:
    raise ValueError(f'--variants={",".join(names)}: {", ".join(unknown)} is none of {", ".join(VARIANTS)}.')
  return names


def chosen(config):
  """Names of the variants to look at, float32 first. Raises ValueError for one that there cannot be."""
  names = check_names()
  if names is None:
    names = [name for name in VARIANTS if name != 'bfloat16' or jax.default_backend() != 'cpu']
    return [name for name in names if name != 'untied' or config.tie_embeddings]
  if 'untied' in names and not config.tie_embeddings:
    raise ValueError('--variants=untied: the head of this model is not tied to begin with; drop it.')
  return ['float32', *(name for name in names if name != 'float32')]


@jax.jit
def _logits(model, tokens_BT):
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  return model(tokens_BT, positions_BT, model.init_cache(*tokens_BT.shape))[0]


@jax.jit
def _compared(exact_TV, other_TV):
  """Cosine, KL and whether the likeliest token is the same, at each position."""
  other_TV = other_TV[:, : exact_TV.shape[1]]  # without padding
  exact, other = jax.nn.log_softmax(exact_TV), jax.nn.log_softmax(other_TV)
  norm = lambda x_TV: jnp.linalg.norm(x_TV, axis=-1)
  return (jnp.sum(exact_TV * other_TV, axis=-1) / (norm(exact_TV) * norm(other_TV)),
          jnp.sum(jnp.exp(exact) * (exact - other), axis=-1), jnp.argmax(exact, axis=-1) == jnp.argmax(other, axis=-1))


def greedy(model, prompts, num_tokens, vocab_size):
  """The greedy continuations of prompts, ends of text ignored: lists of tokens, prompts included."""
  length = np.array([len(prompt) for prompt in prompts])
  width = text.bucket(length.max())
  tokens = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts], np.int32)
  config = cj.DecodeConfig(num_draft=1, vocab_size=vocab_size, max_length=text.bucket(width + num_tokens))
  state = cj.prefill(model, None, tokens, length, cj.row_keys(0, prompts), length + num_tokens, config)
  state = cj.generate(model, None, cj.Exact(), cj.SamplingParams(temperature=0.0), state, config)
  return [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), np.asarray(state.length))]


def same_from_start(ours, theirs):
  """How many tokens two texts have in common from the start."""
  return next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))


def quality(models, prompts, num_tokens):
  """{variant: figures} against the first, on texts that it wrote."""
  (_, exact), *_ = models.items()
  vocab_size = exact.config.vocab_size
  texts = greedy(exact, prompts, num_tokens, vocab_size)
  figures = {}
  for name, model in models.items():
    parts = []
    for prompt, tokens in zip(prompts, texts):
      row = jnp.asarray([tokens + [0] * (max(map(len, texts)) - len(tokens))])
      compared = _compared(_logits(exact, row)[0], _logits(model, row)[0])
      parts.append([np.asarray(x)[len(prompt) - 1 : len(tokens) - 1] for x in compared])
    cosine, kl, same = (np.concatenate(part) for part in zip(*parts))
    own = greedy(model, prompts, num_tokens, vocab_size)
    agree = [same_from_start(a[len(p):], b[len(p):]) for p, a, b in zip(prompts, texts, own)]
    figures[name] = {
        'cosine': float(cosine.mean()), 'kl': float(kl.mean()), 'kl_99': float(np.quantile(kl, 0.99)),
        'same_top': float(same.mean()), 'agree': float(np.mean(agree))}
  return figures


def speed(models):
  """{variant: milliseconds} of a round of plain decoding and of bare passes over 1 and K + 1 tokens."""
  K, arms = common.num_draft(), {}
  for name, model in models.items():
    config = cj.DecodeConfig(num_draft=K, vocab_size=model.config.vocab_size, max_length=256)
    arms[name, 'plain'] = timing.plain(model, 1, config, common.sampling())
    arms[name, 'one'] = timing.forward(model, 1, 1, config.capacity)
    arms[name, 'block'] = timing.forward(model, 1, K + 1, config.capacity)
  seconds = timing.measure(arms, _REPEATS.value)
  return {name: {f'{arm}_ms': 1e3 * seconds[name, arm] / timing.STEPS for arm in ('plain', 'one', 'block')}
          for name in models}


SMALL = ModelConfig(
    family='llama', vocab_size=2048, embed_dim=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=768,
    max_length=1024, norm_eps=1e-6, rope_theta=1e4, tie_embeddings=False)
_GEMMA = dict(norm_offset=1.0, post_norms=True, activation='gelu_tanh', embed_scale=16.0, query_scale=64**-0.5,
              tie_embeddings=True)
# What makes SMALL a model of each family.
SWITCHES = {
    'llama': dict(rope_scaling=rope.Llama3(8.0, 1.0, 4.0, 256.0)),
    'mistral': dict(windows=(64,) * 4),
    'qwen2': dict(qkv_bias=True),
    'qwen3': dict(qk_norm=True),
    'gemma2': _GEMMA | dict(windows=(64, None) * 2, attn_softcap=50.0, logit_softcap=30.0),
    'gemma3_text': _GEMMA | dict(windows=(64, 64, 64, None), qk_norm=True, local_rope_theta=1e3),
}


def of_family(family):
  """A small random model with the switches of a family."""
  config = dataclasses.replace(SMALL, family=family, **SWITCHES[family])
  return cj.Transformer(transformer.random_params(jax.random.key(0), config), config)


def products(model):
  """{(arm, tokens): milliseconds} of the products with the matrices of all layers, in the order of a pass."""
  rounded = weights.to_int8(model).params.layers
  names = ('qkv', 'o', 'gate', 'up', 'down')
  matrices = lambda layers_: [[getattr(layer, name) for name in names] for layer in layers_]
  arms = {'float32': (layers.matmul, matrices(model.params.layers)), 'int8': (layers.matmul, matrices(rounded))}
  if importlib.util.find_spec('qwix') is None:
    print('\nqwix: left out, it is not installed (pip install qwix)')
  else:
    import qwix

    theirs = [[qwix.quantize(matrix, jnp.int8, channelwise_axes=(1,)) for matrix in layer]
              for layer in matrices(model.params.layers)]
    dot = lambda x_BTD, matrix: qwix.dot_general(
        qwix.quantize(x_BTD, jnp.int8, channelwise_axes=(0, 1)), matrix, (((2,), (0,)), ((), ())))
    arms['qwix'] = (dot, theirs)

  def arm(product, held, width):
    def chain(x_BTD, held):
      for qkv, o, gate, up, down in held:
        heads = product(x_BTD, qkv)[..., : model.config.num_heads * model.config.head_dim]
        x_BTD += product(heads, o)
        x_BTD += product(product(x_BTD, gate) * product(x_BTD, up), down)
        x_BTD /= 1 + jnp.max(jnp.abs(x_BTD))  # or they grow out of all bounds
      return x_BTD

    run, x_BTD = jax.jit(chain), jax.random.normal(jax.random.key(0), (1, width, model.config.embed_dim))
    return lambda _: run(x_BTD, held).block_until_ready()

  widths = (1, common.num_draft() + 1)
  timed = timing.measure({(name, width): arm(*how, width) for name, how in arms.items() for width in widths},
                         _REPEATS.value)
  return {key: 1e3 * seconds for key, seconds in timed.items()}


def show(rows, columns):
  """Prints a table: columns are (title, format of a value)."""
  lines = [[title for title, _ in columns], *([form(row) for _, form in columns] for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines)]
  for line in lines:
    print('  ' + '  '.join(cell.rjust(width) if i else cell.ljust(width)
                           for i, (cell, width) in enumerate(zip(line, widths))), flush=True)


QUALITY = [
    ('cosine', lambda row: f'{row["cosine"]:.5f}'), ('KL', lambda row: f'{row["kl"]:.5f}'),
    ('99 %', lambda row: f'{row["kl_99"]:.4f}'), ('same top', lambda row: f'{100 * row["same_top"]:.1f}%'),
    ('greedy agrees', lambda row: f'{row["agree"]:.0f} tokens'),
]


def main():
  """Prints the tables, and appends their figures to --output."""
  common.refuse(['draft', 'rule', *common.RULE_FIELDS, 'static', 'block_verification', 'ledger', 'stop_entropy'],
                'nothing is drafted')
  common.refuse(['stop', 'max_new_tokens', 'raw', 'seed'], 'texts are greedy, and as long as --tokens')
  common.refuse(common.MODEL_FLAGS, 'all are compared')
  check_names()
  for name, value in (('num_draft', common.num_draft()), ('repeats', _REPEATS.value)):
    if value < 1:
      raise ValueError(f'--{name}={value}: need at least 1.')
  store = record.Rows(_OUTPUT.value) if _OUTPUT.value else None
  source = common.verifier_source()
  plain, tokenizer = cj.load_transformer(source, dtype='float32'), cj.load_tokenizer(source)
  if plain.quantize:
    raise ValueError(f'{source} holds 8-bit integers: compare variants of the floats that they were rounded from.')
  models = {name: VARIANTS[name](plain) for name in chosen(plain.config)}
  prompts = cj.encode(PROMPTS, tokenizer, raw=False)
  source = os.path.basename(source)
  megabytes = {name: sum(x.nbytes for x in jax.tree.leaves(model.params)) / 1e6 for name, model in models.items()}
  found = {name: {'model': source, 'variant': name, 'megabytes': megabytes[name]} for name in models}
  print(f'{source}, medians of {_REPEATS.value} turns, K = {common.num_draft()}; quality on '
        f'{len(prompts)} texts of {_TOKENS.value} tokens', flush=True)
  for figures in (speed(models), quality(models, prompts, _TOKENS.value)):
    for name, row in figures.items():
      found[name] |= row
  base = found['float32']
  show(found.values(), [
      ('variant', lambda row: row['variant']), ('MB', lambda row: f'{row["megabytes"]:.0f}'),
      ('plain ms', lambda row: f'{row["plain_ms"]:.2f}'),
      ('speed', lambda row: f'{base["plain_ms"] / row["plain_ms"]:.2f}x'),
      ('one ms', lambda row: f'{row["one_ms"]:.2f}'), ('K+1 ms', lambda row: f'{row["block_ms"]:.2f}'),
      ('K+1 / one', lambda row: f'{row["block_ms"] / row["one_ms"]:.2f}'), *QUALITY])

  small = []
  names = [name for name in ROUNDED if name in models or _VARIANTS.value is None]
  for family in FAMILIES if names else ():
    model = of_family(family)
    ids = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 32)).tolist()
    held = {'float32': model} | {name: VARIANTS[name](model) for name in names}
    figures = quality(held, ids, min(_TOKENS.value, 128))
    small += [{'model': f'random {family}', 'variant': name} | figures[name] for name in names]
  if small:
    print('\nsmall random models of every family')
    show(small, [('model', lambda row: row['model']), ('variant', lambda row: row['variant']), *QUALITY])

  timed = [{'model': source, 'variant': name, 'tokens': width, 'products_ms': ms}
           for (name, width), ms in products(plain).items()]
  print('\nproducts with the matrices of all layers')
  show(timed, [('arm', lambda row: row['variant']), ('tokens', lambda row: f'{row["tokens"]}'),
               ('ms', lambda row: f'{row["products_ms"]:.2f}')])
  for row in (*found.values(), *small, *timed) if store else ():
    store.append({'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__, **row})


if __name__ == '__main__':
  common.run(main)
