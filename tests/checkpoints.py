"""Tiny random checkpoints, written as Hugging Face folders and as GGUF files without torch."""

import json

import gguf
import jax
import numpy as np
import safetensors.numpy

from cactus_jax.models import transformer, weights

CONFIG = {
    'model_type': 'llama',
    'vocab_size': 96,
    'hidden_size': 64,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'intermediate_size': 96,
    'max_position_embeddings': 128,
    'rms_norm_eps': 1e-5,
    'rope_theta': 5000.0,
    'tie_word_embeddings': False,
    'hidden_act': 'silu',
    'eos_token_id': 2,
}


def config_with(changes):
  """CONFIG with changes, as of another family, without the activation that they replace."""
  config = CONFIG | dict(changes)
  return {name: value for name, value in config.items() if name != 'hidden_act' or 'hidden_activation' not in config}


def tensors(config=CONFIG, seed=0):
  """Weights under their Hugging Face names, [out, in], large enough for logits of several units."""
  rng = np.random.default_rng(seed)
  D, F, V = config['hidden_size'], config['intermediate_size'], config['vocab_size']
  N, G = config['num_attention_heads'], config['num_key_value_heads']
  H = config.get('head_dim') or D // N
  matrix = lambda out, into: (rng.standard_normal((out, into)) * 1.5 * into**-0.5).astype(np.float32)
  norm = lambda: (1 + 0.2 * rng.standard_normal(D)).astype(np.float32)
  result = {'model.embed_tokens.weight': matrix(V, D), 'model.norm.weight': norm()}
  for i in range(config['num_hidden_layers']):
    layer = {
        'input_layernorm': norm(),
        'self_attn.q_proj': matrix(N * H, D),
        'self_attn.k_proj': matrix(G * H, D),
        'self_attn.v_proj': matrix(G * H, D),
        'self_attn.o_proj': matrix(D, N * H),
        'post_attention_layernorm': norm(),
        'mlp.gate_proj': matrix(F, D),
        'mlp.up_proj': matrix(F, D),
        'mlp.down_proj': matrix(D, F),
    }
    result |= {f'model.layers.{i}.{name}.weight': array for name, array in layer.items()}
  if not config['tie_word_embeddings']:
    result['lm_head.weight'] = matrix(V, D)
  return result


def write_folder(folder, config=CONFIG, weights=None, shards=1):
  """A checkpoint folder; with several shards, each holds every shards-th weight."""
  folder.mkdir(exist_ok=True)
  weights = tensors(config) if weights is None else weights
  (folder / 'config.json').write_text(json.dumps(config))
  if shards == 1:
    safetensors.numpy.save_file(weights, folder / 'model.safetensors')
    return folder
  file = lambda i: f'model-{i % shards + 1:05}-of-{shards:05}.safetensors'
  index = {name: file(i) for i, name in enumerate(weights)}
  for path in set(index.values()):
    safetensors.numpy.save_file({n: a for n, a in weights.items() if index[n] == path}, folder / path)
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': index}))
  return folder


# By the table of llama.cpp's converter, written down here a second time.
GGUF_NAMES = {
    'model.embed_tokens': 'token_embd',
    'model.norm': 'output_norm',
    'lm_head': 'output',
    'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output',
    'post_attention_layernorm': 'ffn_norm',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
}


def write_gguf(path, config=CONFIG, weights=None, quantise=gguf.GGMLQuantizationType.F32, extra=(), drop=()):
  """A GGUF file of weights under Hugging Face names, permuted as llama.cpp's converter does.

  Args:
    quantise: the type of the matrices.
    extra: (method of GGUFWriter, arguments) of further metadata.
    drop: tensors, by GGUF name, to leave out.
  """
  writer = gguf.GGUFWriter(path, config.get('architecture', 'llama'))
  writer.add_block_count(config['num_hidden_layers'])
  writer.add_context_length(config['max_position_embeddings'])
  writer.add_embedding_length(config['hidden_size'])
  writer.add_feed_forward_length(config['intermediate_size'])
  writer.add_head_count(config['num_attention_heads'])
  writer.add_head_count_kv(config['num_key_value_heads'])
  writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
  writer.add_rope_freq_base(config['rope_theta'])
  writer.add_vocab_size(config['vocab_size'])
  writer.add_eos_token_id(config['eos_token_id'])
  for method, *arguments in extra:
    getattr(writer, method)(*arguments)
  for name, array in (tensors(config) if weights is None else weights).items():
    stem = name.removesuffix('.weight')
    if stem.startswith('model.layers.'):
      i, part = stem.removeprefix('model.layers.').split('.', 1)
      theirs = f'blk.{i}.{GGUF_NAMES.get(part, part)}.weight'
      heads = {'self_attn.q_proj': 'num_attention_heads', 'self_attn.k_proj': 'num_key_value_heads'}.get(part)
      array = permute(array, config[heads]) if heads else array
    else:
      theirs = f'{GGUF_NAMES.get(stem, stem)}.weight'
    if theirs not in drop:
      kind = quantise if array.ndim == 2 else gguf.GGMLQuantizationType.F32
      writer.add_tensor(theirs, gguf.quantize(array, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def permute(array, num_heads):
  """`permute` of llama.cpp's convert_hf_to_gguf.py: (half, pair) of each head becomes (pair, half)."""
  halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)


def as_int8(model):
  """The model with its matrices rounded to 8 bits."""
  specs, tree = jax.tree_util.tree_flatten_with_path(transformer.abstract(model.config))
  leaves = [weights.quantized(array, spec, None) if weights.is_product(path, spec) else array
            for (path, spec), array in zip(specs, jax.tree.leaves(model.params), strict=True)]
  return model.replace(params=weights.with_int8_head(jax.tree.unflatten(tree, leaves), model.config, None))
