"""Tiny random checkpoints, written as Hugging Face folders and as GGUF files without torch."""

import json

import gguf
import numpy as np
import safetensors.numpy

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

# Tiny configs of every family. Rotary frequencies: of the eight of a head Llama 3's keep three, mix two and divide
# three; YaRN's keep two, mix four and divide two, with either base.
LINEAR = {'rope_type': 'linear', 'rope_theta': 100.0, 'factor': 3.0}
LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 100.0, 'factor': 4.0, 'low_freq_factor': 1.0, 'high_freq_factor': 3.0,
          'original_max_position_embeddings': 32}
YARN = {'rope_type': 'yarn', 'rope_theta': 10.0, 'factor': 4.0, 'beta_fast': 3.0,
        'original_max_position_embeddings': 32}
YARN_FULL = YARN | {'beta_slow': 0.9, 'truncate': False, 'mscale': 3.0, 'mscale_all_dim': 0.5}
TIED, MHA, MQA = {'tie_word_embeddings': True}, {'num_key_value_heads': 4}, {'num_key_value_heads': 1}
MISTRAL = CONFIG | {'model_type': 'mistral', 'sliding_window': 5}
QWEN2 = CONFIG | {'model_type': 'qwen2'}
QWEN3 = CONFIG | {'model_type': 'qwen3', 'head_dim': 24}
QWEN_WINDOWS = {'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': 1}
GEMMA = CONFIG | TIED | {
    'head_dim': 24, 'hidden_act': 'gelu_pytorch_tanh', 'hidden_activation': 'gelu_pytorch_tanh',
    'query_pre_attn_scalar': 40, 'sliding_window': 5}
GEMMA2 = GEMMA | {'model_type': 'gemma2', 'attn_logit_softcapping': 1.5, 'final_logit_softcapping': 3.0}
GEMMA3 = GEMMA | {
    'model_type': 'gemma3_text', 'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
    'rope_parameters': {'full_attention': {'rope_type': 'default', 'rope_theta': 5000.0},
                        'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0}}}
OLD_GEMMA3 = GEMMA | {  # as Gemma 3 of 4B parameters was published, in small
    'model_type': 'gemma3_text', 'num_hidden_layers': 7, 'sliding_window_pattern': 3, 'rope_theta': 100.0,
    'rope_local_base_freq': 10.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}}
FAMILIES = {
    'llama': CONFIG,
    'llama_tied_mha': CONFIG | TIED | MHA,
    'llama_wide_mqa': CONFIG | MQA | {'head_dim': 32},
    'llama3': CONFIG | {'rope_parameters': LLAMA3},
    'llama3_tied_mqa': CONFIG | TIED | MQA | {'rope_parameters': LLAMA3, 'head_dim': 32},
    'llama_linear': CONFIG | {'rope_theta': 100.0, 'rope_scaling': {'type': 'linear', 'factor': 3.0}},
    'llama_yarn': CONFIG | {'rope_parameters': YARN},
    'llama_yarn_tied_mha': CONFIG | TIED | MHA | {'rope_parameters': YARN_FULL},
    'mistral': MISTRAL,
    'mistral_tied_mqa': MISTRAL | TIED | MQA | {'sliding_window': 1},
    'mistral_no_window': MISTRAL | {'sliding_window': None, 'head_dim': 24},
    'mistral_mha_linear': MISTRAL | MHA | {'rope_parameters': LINEAR},
    'mistral_llama3': MISTRAL | {'rope_parameters': LLAMA3},
    'mistral_yarn': MISTRAL | {'rope_parameters': YARN, 'sliding_window': 16},
    'qwen2': QWEN2,
    'qwen2_tied_mqa': QWEN2 | TIED | MQA,
    'qwen2_mha_windows': QWEN2 | MHA | QWEN_WINDOWS,
    'qwen2_wide_linear': QWEN2 | {'head_dim': 24, 'rope_parameters': LINEAR},
    'qwen2_llama3': QWEN2 | {'rope_parameters': LLAMA3},
    'qwen2_yarn': QWEN2 | {'rope_theta': 1000.0, 'rope_scaling': {
        'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 512}},
    'qwen3': QWEN3,
    'qwen3_tied_mqa': QWEN3 | TIED | MQA,
    'qwen3_mha_windows': QWEN3 | MHA | QWEN_WINDOWS | {
        'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention']},
    'qwen3_linear': QWEN3 | {'rope_parameters': LINEAR},
    'qwen3_llama3': QWEN3 | {'rope_parameters': LLAMA3},
    'qwen3_yarn': QWEN3 | {'rope_parameters': YARN},
    'gemma2': GEMMA2,
    'gemma2_untied_mqa': GEMMA2 | MQA | {'tie_word_embeddings': False, 'sliding_window': 16},
    'gemma2_mha_no_caps': GEMMA2 | MHA | {'attn_logit_softcapping': None, 'final_logit_softcapping': None},
    'gemma3': GEMMA3,
    'gemma3_untied_mqa': GEMMA3 | MQA | {'tie_word_embeddings': False, 'final_logit_softcapping': 3.0},
    'gemma3_mha_yarn': GEMMA3 | MHA | {'rope_parameters': GEMMA3['rope_parameters'] | {'full_attention': YARN}},
    'gemma3_old': OLD_GEMMA3,
}


def tensors(config=CONFIG, seed=0):
  """Weights under their Hugging Face names, [out, in], large enough for logits of several units."""
  rng = np.random.RandomState(seed)  # whose numbers no version of numpy changes
  family = config['model_type']
  gemma = family.startswith('gemma')
  D, F, V = config['hidden_size'], config['intermediate_size'], config['vocab_size']
  N, G = config['num_attention_heads'], config['num_key_value_heads']
  H = config.get('head_dim') or D // N
  matrix = lambda out, into: (rng.standard_normal((out, into)) * 1.5 * into**-0.5).astype(np.float32)
  norm = lambda size=D: ((0 if gemma else 1) + 0.2 * rng.standard_normal(size)).astype(np.float32)
  bias = lambda size: (0.5 * rng.standard_normal(size)).astype(np.float32)
  result = {'model.embed_tokens.weight': matrix(V, D), 'model.norm.weight': norm()}
  for i in range(config['num_hidden_layers']):
    layer = {
        'input_layernorm.weight': norm(),
        'self_attn.q_proj.weight': matrix(N * H, D),
        'self_attn.k_proj.weight': matrix(G * H, D),
        'self_attn.v_proj.weight': matrix(G * H, D),
        'self_attn.o_proj.weight': matrix(D, N * H),
        'post_attention_layernorm.weight': norm(),
        'mlp.gate_proj.weight': matrix(F, D),
        'mlp.up_proj.weight': matrix(F, D),
        'mlp.down_proj.weight': matrix(D, F),
    }
    if family == 'qwen2':
      layer |= {f'self_attn.{part}_proj.bias': bias(heads * H) for part, heads in (('q', N), ('k', G), ('v', G))}
    if family in ('qwen3', 'gemma3_text'):
      layer |= {f'self_attn.{part}_norm.weight': norm(H) for part in 'qk'}
    if gemma:
      layer |= {f'{place}_feedforward_layernorm.weight': norm() for place in ('pre', 'post')}
    result |= {f'model.layers.{i}.{name}': array for name, array in layer.items()}
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


# By the tables of llama.cpp's converter, written down here a second time.
GGUF_ARCHITECTURES = {'mistral': 'llama', 'gemma3_text': 'gemma3'}  # others have the name of the family
GGUF_NAMES = {
    'model.embed_tokens': 'token_embd',
    'model.norm': 'output_norm',
    'lm_head': 'output',
    'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm',
    'self_attn.o_proj': 'attn_output',
    'post_attention_layernorm': 'ffn_norm',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
}
GEMMA_GGUF_NAMES = GGUF_NAMES | {
    'post_attention_layernorm': 'post_attention_norm',
    'pre_feedforward_layernorm': 'ffn_norm',
    'post_feedforward_layernorm': 'post_ffw_norm',
}


def write_gguf(path, config=CONFIG, weights=None, quantise=gguf.GGMLQuantizationType.F32, extra=(), drop=()):
  """A GGUF file of weights under Hugging Face names, as llama.cpp's converter makes it of a checkpoint.

  Args:
    quantise: the type of the matrices; one of bytes holds rows of that type already.
    extra: (method of GGUFWriter, arguments) of further metadata.
    drop: tensors, by GGUF name, to leave out.
  """
  family = config['model_type']
  gemma, llama = family.startswith('gemma'), family in ('llama', 'mistral')
  writer = gguf.GGUFWriter(path, config.get('architecture') or GGUF_ARCHITECTURES.get(family, family))
  for method, *arguments in (*gguf_metadata(config), *extra):
    getattr(writer, method)(*arguments)
  names = GEMMA_GGUF_NAMES if gemma else GGUF_NAMES
  stored = dict(tensors(config) if weights is None else weights)
  if (rope := config.get('rope_parameters') or {}).get('rope_type') == 'llama3':
    stored['rope_freqs.weight'] = llama3_factors(config, **rope)
  for name, array in stored.items():
    stem, kind = name.rsplit('.', 1)
    block = ''
    if stem.startswith('model.layers.'):
      i, stem = stem.removeprefix('model.layers.').split('.', 1)
      block = f'blk.{i}.'
    theirs = f'{block}{names.get(stem, stem)}.{kind}'
    heads = {'self_attn.q_proj': 'num_attention_heads', 'self_attn.k_proj': 'num_key_value_heads'}.get(stem)
    array = permute(array, config[heads]) if llama and heads else array
    array = array + 1 if gemma and name.endswith('norm.weight') else array
    if theirs not in drop:
      kind = quantise if array.ndim == 2 else gguf.GGMLQuantizationType.F32
      writer.add_tensor(theirs, array if array.dtype == np.uint8 else gguf.quantize(array, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def gguf_metadata(config):
  """(method of GGUFWriter, value) of what a config says."""
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  full = rope.get('full_attention', rope)
  kind = full.get('rope_type', full.get('type'))
  kind = kind if kind in ('linear', 'yarn') else None
  family, layer_types = config['model_type'], config.get('layer_types')
  values = {
      'block_count': config['num_hidden_layers'],
      'context_length': config['max_position_embeddings'],
      'embedding_length': config['hidden_size'],
      'feed_forward_length': config['intermediate_size'],
      'head_count': config['num_attention_heads'],
      'head_count_kv': config['num_key_value_heads'],
      'key_length': config.get('head_dim'),
      'value_length': config.get('head_dim'),
      'layer_norm_rms_eps': config['rms_norm_eps'],
      'vocab_size': config['vocab_size'] if family in ('llama', 'mistral') else None,
      'eos_token_id': config['eos_token_id'],
      'rope_freq_base': full.get('rope_theta', config['rope_theta']),
      'rope_freq_base_swa': rope.get('sliding_attention', {}).get('rope_theta', config.get('rope_local_base_freq')),
      'rope_scaling_type': kind and gguf.RopeScalingType(kind),
      'rope_scaling_factor': kind and full['factor'],
      'rope_scaling_orig_ctx_len': kind and full.get('original_max_position_embeddings'),
      'rope_scaling_yarn_beta_fast': kind and full.get('beta_fast'),
      'sliding_window': config.get('sliding_window') if family.startswith('gemma') else None,
      'sliding_window_pattern': ([kind == 'sliding_attention' for kind in layer_types] if layer_types else
                                 config.get('sliding_window_pattern')),
      'attn_logit_softcapping': config.get('attn_logit_softcapping'),
      'final_logit_softcapping': config.get('final_logit_softcapping'),
  }
  return [(f'add_{name}', value) for name, value in values.items() if value is not None]


def llama3_factors(config, *, rope_theta, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings,
                   rope_type):
  """f32[H/2], what each frequency is divided by, in terms of wavelengths as the converter has it."""
  H = config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']
  wavelengths = 2 * np.pi * rope_theta ** (np.arange(0, H, 2) / H)
  longest, shortest = (original_max_position_embeddings / bound for bound in (low_freq_factor, high_freq_factor))
  smooth = (original_max_position_embeddings / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
  mixed = 1 / ((1 - smooth) / factor + smooth)
  return np.select([wavelengths < shortest, wavelengths > longest], [1, factor], mixed).astype(np.float32)


def permute(array, num_heads):
  """`permute` of llama.cpp's convert_hf_to_gguf.py: (half, pair) of each head becomes (pair, half)."""
  halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)
