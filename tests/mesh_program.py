"""Decodes on several meshes and writes what came out; run by mesh_test.py in processes of their own.

  python -m tests.mesh_program OUT MESH[:HALF] ...
  python -m tests.mesh_program OUT MESH[:HALF] ... --processes=2 --process=0 --port=12345

A mesh is DATAxFSDPxMODEL, or "none". HALF, 0 or 1, stands for every other pair of draft and rule.
"""

import argparse
import json
import os

DEVICES = 8


def arguments():
  parser = argparse.ArgumentParser()
  parser.add_argument('out')
  parser.add_argument('meshes', nargs='+')
  parser.add_argument('--text', action='store_true', help='answer prompts too')
  parser.add_argument('--processes', type=int, default=1)
  parser.add_argument('--process', type=int, default=0)
  parser.add_argument('--port', type=int)
  return parser.parse_args()


def models(mesh, quantize=None):
  """Verifier and draft: random weights, the same on any mesh."""
  import dataclasses

  import jax

  from cactus_jax import sharding
  from cactus_jax.models import config, transformer, weights

  # 4 key heads over 8 devices are held twice; 5 ids pad the vocabulary.
  verifier = config.ModelConfig('qwen3', vocab_size=272, embed_dim=32, num_layers=2, num_heads=8, num_kv_heads=4,
                                head_dim=8, mlp_dim=64, max_length=256, norm_eps=1e-6, rope_theta=1e4,
                                tie_embeddings=False, qk_norm=True)
  draft = dataclasses.replace(verifier, num_layers=1, vocab_size=280, tie_embeddings=True)
  made = []
  for seed, (sizes, where) in enumerate(((verifier, mesh), (draft, mesh and sharding.narrow(mesh, 1)))):
    stored = weights_as_stored(transformer.random_params(jax.random.key(seed), sizes), sizes)
    fitted = weights.for_mesh(sizes, where)
    params = weights.assemble(fitted, NAMES, {n: a.shape for n, a in stored.items()},
                              lambda name, index, stored=stored: stored[name][index], source='random',
                              dtype='float32', mesh=where, quantize=quantize)
    made.append(transformer.Transformer(params, fitted, where))
  return made


NAMES = {name: name for name in ('embed', 'final_norm', 'head')} | {
    name: name + '.{}' for name in 'attn_norm q k v o mlp_norm gate up down q_norm k_norm'.split()}


def weights_as_stored(params, config):
  """{name: array} as a file has them: [out, in], query, key and value apart."""
  import numpy as np

  stored = {'embed': params.embed, 'final_norm': params.final_norm}
  if params.head is not None:
    stored['head'] = params.head
  for i, layer in enumerate(params.layers):
    for name in ('attn_norm', 'mlp_norm', 'q_norm', 'k_norm'):
      stored[f'{name}.{i}'] = getattr(layer, name)
    for name in ('o', 'gate', 'up', 'down'):
      stored[f'{name}.{i}'] = getattr(layer, name).T
    grouped = np.asarray(layer.qkv).T.reshape(config.num_kv_heads, -1, config.head_dim, config.embed_dim)
    for name, part in (('q', grouped[:, :-2]), ('k', grouped[:, -2]), ('v', grouped[:, -1])):
      stored[f'{name}.{i}'] = part.reshape(-1, config.embed_dim)
  return {name: np.asarray(array) for name, array in stored.items()}


def distilled(target):
  """A draft that reads hidden states and copies."""
  import jax
  import numpy as np

  from cactus_jax import sharding
  from cactus_jax.models import student

  made = student.new_student(target, [1], np.arange(0, 267, 2), hidden_layers=(0,), copy=2)
  everywhere = lambda x: x if target.mesh is None else sharding.place(
      x, sharding.sharding_of(target.mesh, (None,) * x.ndim, x.shape))
  return made.replace(**{name: everywhere(getattr(made, name)) for name in ('head_ids', 'row_of', 'fuse')},
                      copy=everywhere(jax.numpy.array([2.0, 4.0])))


def decode_all(mesh, half=None):
  """{case: what came out} for every pair of draft and rule, or every other."""
  import jax
  import numpy as np

  import cactus_jax as cj
  from cactus_jax import decode, sharding

  target, draft = models(mesh)
  rng = np.random.default_rng(0)
  length = np.array([3, 9, 5, 8, 4, 7, 6, 9], np.int32)
  prompts = np.where(np.arange(9) < length[:, None], rng.integers(0, 267, (8, 9)), 0).astype(np.int32)
  prompts[2, :5] = [7, 8, 7, 8, 7]  # something for prompt lookup to find
  sampling = cj.SamplingParams(
      temperature=np.array([1, 0.7, 0, 1, 1, 0.7, 1, 1]), top_k=np.array([0, 20, 0, 5, 0, 20, 0, 0]))
  drafts = {'model': draft, 'distilled': distilled(target), 'early exit': target.early_exit(1),
            'lookup': cj.PromptLookup(), 'none': None}
  found = {}
  for i, (draft_name, drafter) in enumerate(drafts.items()):
    for j, rule in enumerate((cj.Exact(), cj.Cactus(0.5))):
      if half is not None and (i + j) % 2 != half:
        continue
      config = decode.DecodeConfig(num_draft=3, max_length=40, vocab_size=267, eos_ids=tuple(range(5, 267, 12)),
                                   ledger=rule == cj.Exact())
      keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), np.arange(8))
      put = lambda tree: tree if mesh is None else sharding.place(tree, sharding.rows(mesh))
      state = decode.prefill(target, drafter, *put((prompts, length, keys, length + 28)), config)
      settled = put(decode.settled(rule, sampling, 8, drafter, config))
      placed = jax.tree.map(lambda x: x.sharding, state)
      for rounds in (2, None):
        state = decode.generate(target, drafter, *settled, state, config, rounds)
      now = jax.tree.map(lambda x: x.sharding, state)
      moved = [(jax.tree_util.keystr(path), a, b) for (path, a), b in zip(
          jax.tree_util.tree_leaves_with_path(placed), jax.tree.leaves(now)) if a != b]
      assert not moved, moved
      host = sharding.fetch(state.replace(keys=None, target_cache=None, draft_cache=None))
      found[f'{draft_name}, {rule}'] = {
          'tokens': [row[:n].tolist() for row, n in zip(host.tokens, host.length)], 'finish': host.finish.tolist(),
          'rounds': host.round.tolist(), 'accepted': host.stats.accepted.tolist()}
  return found


def logits_in_8_bits(mesh):
  """Of a verifier whose matrices and cache are in 8 bits: after eight tokens, and after two that read the cache."""
  import jax
  import numpy as np

  from cactus_jax import sharding

  model = models(mesh, 'int8')[0].replace(kv_dtype='int8')
  tokens = np.random.default_rng(0).integers(0, 267, (8, 10)).astype(np.int32)
  read = jax.jit(lambda model, tokens, start, cache: model(
      tokens, start + jax.lax.broadcasted_iota(np.int32, tokens.shape, 1), cache))
  empty = jax.jit(lambda model: model.init_cache(8, 16))
  first, cache = read(model, tokens[:, :8], 0, empty(model))
  second, _ = read(model, tokens[:, 8:], 8, cache)
  return [sharding.fetch(logits)[:, -1, :32].tolist() for logits in (first, second)]


def text_options(mesh):
  """Five prompts, which two or four groups of devices cannot share evenly, and a string that cuts one answer."""
  import cactus_jax as cj
  from tests import fakes

  target, draft = models(mesh)
  return ['a', 'bc', 'def', 'a longer prompt', 'z'], dict(
      target=target, draft=draft, tokenizer=fakes.byte_tokenizer(), raw=True, rule=cj.Clamp(0.5), num_draft=3,
      max_new_tokens=20, stop=('r',), seed=3, ledger=True)


def write_each(mesh):
  """The answers two at a time (or one for each group of devices), the next prompt in the place of what has ended."""
  import cactus_jax as cj

  prompts, options = text_options(mesh)
  out = dict(cj.generate_each(prompts, **options, batch_size=2))
  each = [out[i] for i in range(len(prompts))]
  return {'tokens': [one.tokens[0] for one in each], 'finish': [one.finish_reasons[0] for one in each],
          'origins': [one.origins[0] for one in each]}


def write_text(mesh):
  """The answers as one batch."""
  import warnings

  import cactus_jax as cj

  prompts, options = text_options(mesh)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    out = cj.generate_text(prompts, **options)
  stats = out.stats
  return {'tokens': out.tokens, 'texts': out.texts, 'finish': out.finish_reasons, 'lossless': out.lossless,
          'counts': [stats.new_tokens, stats.decoded, stats.verifier_calls, stats.accepted_at, stats.tested_at],
          'rows': [len(out.kl), len(out.logprobs), len(out.emitted_logprobs)],
          'notes': [str(w.message) for w in caught if 'idle' in str(w.message)]}


def main():
  args = arguments()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = (f'--xla_force_host_platform_device_count={DEVICES // args.processes} '
                             '--xla_backend_optimization_level=0')  # programs are many, and short
  import jax

  if args.processes > 1:
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'localhost:{args.port}', args.processes, args.process)
  from cactus_jax import sharding

  assert len(jax.devices()) == DEVICES and jax.process_count() == args.processes
  results = {}
  for name, _, half in (mesh.partition(':') for mesh in args.meshes):
    sizes = dict(zip(('data', 'fsdp', 'model'), map(int, name.split('x')))) if name != 'none' else None
    mesh = sizes and sharding.make_mesh(**sizes)
    results[name] = decode_all(mesh, int(half) if half else None)
    if args.text:
      results[name]['text'] = write_text(mesh)
      results[name]['each'] = write_each(mesh)
      results[name]['int8'] = {'logits': logits_in_8_bits(mesh)}
  with open(args.out, 'w', encoding='utf-8') as file:
    json.dump(results, file)


if __name__ == '__main__':
  main()
