"""GGUF files: the same model as its safetensors, or as transformers reads it, and errors for bad files."""

import dataclasses
import re

import gguf as ggml
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax.models import gguf, hf, rope
from cactus_jax.models.transformer import Transformer
from tests import checkpoints

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 17)))
call = jax.jit(lambda model, *arguments: model(*arguments))


def logits_of(params, config):
  model = Transformer(params, config)
  positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1])[None], TOKENS.shape)
  return np.asarray(call(model, TOKENS, positions, model.init_cache(*TOKENS.shape))[0])


def raises(*texts):
  return pytest.raises(ValueError, match='.*'.join(map(re.escape, texts)))


# Tiny models, against the same weights in safetensors.

Q8_0 = ggml.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize('change', [
    {}, {'tie_word_embeddings': True}, {'num_key_value_heads': 4}, {'num_key_value_heads': 1}])
def test_equals_safetensors(tmp_path, change):
  config = checkpoints.CONFIG | change
  theirs = hf.load(checkpoints.write_folder(tmp_path / 'hf', config), dtype='float32')
  ours = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', config), dtype='float32')
  jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])
  assert abs(ours[1].norm_eps - theirs[1].norm_eps) < 1e-9  # a float32 in the file
  assert dataclasses.replace(ours[1], norm_eps=theirs[1].norm_eps) == theirs[1]
  assert np.abs(logits_of(*theirs)).max() > 2
  np.testing.assert_allclose(logits_of(*ours), logits_of(*theirs), atol=1e-5, rtol=0)


def family_config(name):
  """The tiny config of a family that llama.cpp can express: its query scale is that of the head."""
  config = dict(checkpoints.FAMILIES[name])
  if config['model_type'].startswith('gemma'):
    config['query_pre_attn_scalar'] = config['head_dim']
  return config


# Left out: windows of Mistral and Qwen, no caps of Gemma 2, and YaRN with other sharpening, which GGUF cannot say.
FAMILIES = [name for name, config in checkpoints.FAMILIES.items()
            if not (config['model_type'] == 'mistral' and config['sliding_window'] or config.get('use_sliding_window')
                    or name in ('gemma2_mha_no_caps', 'llama_yarn_tied_mha'))]


@pytest.mark.parametrize('name', FAMILIES)
def test_families_equal_safetensors(tmp_path, name):
  config = family_config(name)
  theirs = hf.load(checkpoints.write_folder(tmp_path / 'hf', config), dtype='float32')
  ours = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', config), dtype='float32')
  same = dict(norm_eps=theirs[1].norm_eps, family='mistral') if 'mistral' in name else dict(norm_eps=theirs[1].norm_eps)
  assert dataclasses.replace(ours[1], **same) == theirs[1]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7, rtol=0), ours[0], theirs[0])
  assert np.abs(logits_of(*theirs)).max() > 1.5
  np.testing.assert_allclose(logits_of(*ours), logits_of(*theirs), atol=1e-5, rtol=0)


ARCHITECTURES = {'llama3': 'llama', 'qwen2': 'qwen2', 'qwen3': 'qwen3', 'gemma2': 'gemma2', 'gemma3': 'gemma3_text'}


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_families_as_transformers_reads_them(tmp_path, name):
  """Names, order of rows and what norms add, by a second reader; the config is the original one."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  config = family_config(name)
  path = checkpoints.write_gguf(tmp_path / 'tiny.gguf', config)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path, gguf_file=path.name, config=transformers.AutoConfig.for_model(**config), dtype=torch.float32,
      attn_implementation='eager').eval()
  assert model.config.model_type == ARCHITECTURES[name]
  with torch.no_grad():
    expected = model(torch.tensor(np.asarray(TOKENS))).logits.numpy()
  np.testing.assert_allclose(logits_of(*gguf.load(path, dtype='float32')), expected, atol=2e-4, rtol=0)


# Blocks of every type.

WIDE = checkpoints.CONFIG | {
    'hidden_size': 256, 'intermediate_size': 512, 'num_hidden_layers': 1, 'num_key_value_heads': 1}  # blocks of 256


def blocks(kind, shape, rng):
  """Rows of random bytes of that type, but for blocks whose scale makes large or infinite floats of them."""
  size, bytes_ = ggml.GGML_QUANT_SIZES[kind]
  count = shape[0] * shape[1] // size
  drawn = rng.integers(0, 256, (4 * count, bytes_), dtype=np.uint8)
  with np.errstate(all='ignore'):
    floats = ggml.dequantize(drawn, kind)
  sane = drawn[np.abs(floats).max(axis=1) < 8]  # false of what is not a number
  return np.resize(sane, (count, bytes_)).reshape(shape[0], -1)


def rounded(kind, weights, seed=0):
  """The matrices of `weights` as rows of that type, random where gguf cannot write it, and the floats they mean."""
  rng = np.random.default_rng(seed)
  rows = dict(weights)
  for name, array in weights.items():
    if array.ndim == 2:
      try:
        rows[name] = ggml.quantize(array, kind).view(np.uint8)
      except NotImplementedError:
        rows[name] = blocks(kind, array.shape, rng)
  return rows, {name: ggml.dequantize(array, kind) if array.dtype == np.uint8 else array
                for name, array in rows.items()}


KINDS = [ggml.GGMLQuantizationType.F16, *ggml.quants._type_traits]


@pytest.mark.parametrize('kind', KINDS, ids=lambda kind: kind.name)
def test_block_types(tmp_path, kind):
  """A file of such blocks gives the weights of a folder with the floats they mean."""
  rows, floats = rounded(kind, checkpoints.tensors(WIDE))
  theirs = hf.load(checkpoints.write_folder(tmp_path / 'hf', WIDE, floats), dtype='float32')
  ours = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', WIDE, rows, quantise=kind), dtype='float32')
  assert all(np.isfinite(array).all() and np.ptp(array) > 0 for array in jax.tree.leaves(theirs[0]))
  jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])


def test_quantised_logits(tmp_path):
  """8 bits move logits a little, and not much."""
  ours = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', quantise=Q8_0), dtype='float32')
  exact = hf.load(checkpoints.write_folder(tmp_path / 'exact'), dtype='float32')
  assert 1e-3 < np.abs(logits_of(*ours) - logits_of(*exact)).max() < 0.5


@pytest.mark.parametrize('config', [WIDE, WIDE | {'model_type': 'qwen2'}], ids=['permuted', 'plain'])
@pytest.mark.parametrize('kind', [ggml.GGMLQuantizationType.F32, Q8_0, ggml.GGMLQuantizationType.Q4_K],
                         ids=lambda kind: kind.name)
def test_reads_parts(tmp_path, monkeypatch, config, kind):
  """Any rows and columns are those of the whole, and only the rows asked for, in whole heads, are dequantised."""
  rows, floats = rounded(kind, checkpoints.tensors(config))
  path = checkpoints.write_gguf(tmp_path / 'tiny.gguf', config, rows, quantise=kind)
  found = {}
  monkeypatch.setattr(gguf.weights, 'assemble', lambda config, names, stored, read, **_: found.update(read=read))
  gguf.load(path)
  touched, original = [], ggml.dequantize
  monkeypatch.setattr(ggml, 'dequantize', lambda data, kind: touched.append(data.shape[0]) or original(data, kind))
  for theirs, ours in (('model.layers.0.self_attn.q_proj.weight', 'blk.0.attn_q.weight'),
                       ('model.embed_tokens.weight', 'token_embd.weight')):
    for part in np.s_[0:1, 0:256], np.s_[63:65, 0:256], np.s_[5:70, 31:200], np.s_[64:96, 3:4]:
      np.testing.assert_array_equal(found['read'](ours, part), floats[theirs][part])
      unit = 64 if 'attn_q' in ours and config is WIDE else 1
      assert touched.pop() == (-(-part[0].stop // unit) - part[0].start // unit) * unit
  part = np.s_[3:17]
  np.testing.assert_array_equal(found['read']('output_norm.weight', part), floats['model.norm.weight'][part])


# What the metadata say.


def meta_config(tmp_path, *extra, **change):
  """The config of a tiny file with further metadata."""
  return gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', checkpoints.CONFIG | change, extra=extra))[1]


def test_explicit_head_dim(tmp_path):
  extra = [('add_rope_dimension_count', 32)]
  assert meta_config(tmp_path, *extra, head_dim=32).head_dim == 32


YARN = [('add_rope_scaling_type', ggml.RopeScalingType.YARN), ('add_rope_scaling_factor', 4.0),
        ('add_rope_scaling_orig_ctx_len', 32)]


@pytest.mark.parametrize('extra, expected', [
    ([('add_rope_scaling_type', ggml.RopeScalingType.NONE)], None),
    ([('add_rope_scaling_type', ggml.RopeScalingType.LINEAR), ('add_rope_scaling_factor', 8.0)], rope.Linear(8.0)),
    (YARN, rope.Yarn(4.0, 32.0, 32.0, 1.0, 0.1 * np.log(4) + 1)),
    ([*YARN, ('add_rope_scaling_finetuned', True), ('add_rope_scaling_yarn_beta_fast', 16.0),
      ('add_rope_scaling_yarn_beta_slow', 2.0)], rope.Yarn(4.0, 32.0, 16.0, 2.0, 0.1 * np.log(4) + 1)),
])
@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_rope_scaling(tmp_path, family, extra, expected):
  assert meta_config(tmp_path, *extra, model_type=family).rope_scaling == expected


@pytest.mark.parametrize('scaling', [
    rope.Llama3(8.0, 1.0, 4.0, 8192.0), rope.Llama3(32.0, 1.0, 4.0, 8192.0), rope.Llama3(16.0, 1.0, 4.5, 4096.0)])
@pytest.mark.parametrize('head_dim', [64, 128])
def test_llama3_factors(tmp_path, scaling, head_dim):
  """Those of Llama 3.1 and 3.2, and others."""
  change = {'head_dim': head_dim, 'num_hidden_layers': 1,
            'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 500000.0, **dataclasses.asdict(scaling)}}
  assert meta_config(tmp_path, **change).rope_scaling == scaling


@pytest.mark.parametrize('family, layers, scale', [
    ('gemma2', 2, 24), ('gemma2', 46, 16), ('gemma3_text', 46, 24), ('gemma3_text', 62, 16)])
def test_query_scale_of_gemma(tmp_path, family, layers, scale):
  """The 27B sizes, known by their number of layers, scale by width over heads, here 64 / 4."""
  config = GEMMA | {'model_type': family, 'num_hidden_layers': layers}
  assert meta_config(tmp_path, **config).query_scale == scale**-0.5


GEMMA = {'head_dim': 24, 'sliding_window': 5, 'num_hidden_layers': 7}


@pytest.mark.parametrize('change, extra, full', [
    ({'model_type': 'gemma2'}, [], (1, 3, 5)),
    ({'model_type': 'gemma3_text'}, [], (5,)),
    ({'model_type': 'gemma3_text', 'sliding_window': None}, [], range(7)),
    ({'model_type': 'gemma3_text'}, [('add_sliding_window_pattern', 3)], (2, 5)),
    ({'model_type': 'gemma3_text'}, [('add_sliding_window_pattern', 1)], range(7)),
    ({'model_type': 'gemma3_text'}, [('add_sliding_window_pattern', 0)], ()),
    ({'model_type': 'gemma3_text'}, [('add_sliding_window_pattern', [True, False] * 3 + [True])], (1, 3, 5)),
])
def test_windows_of_gemma(tmp_path, change, extra, full):
  config = meta_config(tmp_path, *extra, **GEMMA | change)
  assert config.windows == (() if len(full) == 7 else tuple(None if i in full else 5 for i in range(7)))


def test_what_gemma_files_leave_out(tmp_path):
  """The defaults of llama.cpp, which are those of the models."""
  gemma2 = meta_config(tmp_path, **GEMMA | {'model_type': 'gemma2', 'sliding_window': None})
  assert (gemma2.attn_softcap, gemma2.logit_softcap, gemma2.windows[0]) == (50, 30, 4096)
  gemma3 = meta_config(tmp_path, **GEMMA | {'model_type': 'gemma3_text'})
  assert (gemma3.attn_softcap, gemma3.logit_softcap, gemma3.local_rope_theta) == (None, None, 10000)


def test_linear_scaling_of_gemma3_leaves_layers_with_a_window(tmp_path):
  extra = [('add_rope_scaling_type', ggml.RopeScalingType.LINEAR), ('add_rope_scaling_factor', 8.0)]
  config = meta_config(tmp_path, *extra, **GEMMA | {'model_type': 'gemma3_text'})
  assert (config.rope_theta, config.rope_scaling, config.local_rope_theta) == (5000, rope.Linear(8.0), 10000)


def test_dtype(tmp_path):
  params, _ = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf'), dtype='bfloat16')
  assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_eos_ids(tmp_path):
  tokens = ['a', '<|endoftext|>', 'b', '<|im_end|>', '</s>', '<end_of_turn>']
  kinds = [1, 3, 1, 3, 1, 4]  # </s> is a plain token that only looks like one; the last is the user's
  extra = [('add_token_list', tokens), ('add_token_types', kinds), ('add_eot_token_id', 7)]
  assert gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', extra=extra))[1].eos_ids == (1, 2, 3, 5, 7)


# What must be refused.


@pytest.mark.parametrize('change, texts', [
    ({'config': checkpoints.CONFIG | {'architecture': 'phi3'}},
     ["general.architecture='phi3': the supported architectures are llama, qwen2, qwen3, gemma2, gemma3."]),
    ({'config': checkpoints.CONFIG | {'architecture': 'mamba2'}},
     ["general.architecture='mamba2' keeps a recurrent state, which cannot be rolled back to a position",
      'the supported architectures are llama, qwen2']),
    ({'extra': [('add_rope_scaling_type', ggml.RopeScalingType.LONGROPE), ('add_rope_scaling_factor', 2.0)]},
     ["rope.scaling.type='longrope' with {'factor': 2.0}: only linear with factor, and yarn with factor"]),
    ({'extra': [('add_rope_scaling_factor', 2.0)]}, ["rope.scaling.type='none' with {'factor': 2.0}: only"]),
    ({'extra': [*YARN, ('add_rope_scaling_attn_factors', 1.5)]}, ["'attn_factor': 1.5}: only"]),
    ({'extra': [*YARN[:1], ('add_rope_scaling_factor', 0.5), *YARN[2:]]}, ["'factor': 0.5", ': only']),
    ({'extra': YARN, 'config': checkpoints.FAMILIES['llama3']}, ['beside rope_freqs.weight: only']),
    ({'extra': [('add_expert_count', 8)]}, ['expert_count=8: not implemented']),
    ({'extra': [('add_sliding_window', 16)]}, ['attention.sliding_window=16: not implemented']),
    ({'extra': [('add_rope_dimension_count', 8)]},
     ['rope.dimension_count=8: only the head dimension, 16, is implemented']),
    ({'config': checkpoints.CONFIG | {'num_key_value_heads': [2, 2, 1]}, 'weights': {}},
     ['attention.head_count_kv=[2, 2, 1]: not implemented']),
    ({'weights': checkpoints.tensors() | {'rope_freqs.weight': np.ones(8, np.float32)}},
     ['rope_freqs.weight: not the factors of a Llama 3 with low_freq_factor=1']),
    ({'weights': checkpoints.tensors() | {'rope_freqs.weight': np.float32([1, 1, 1.2, 2, 3.9, 4, 4, 4])}},
     ['rope_freqs.weight: not the factors of a Llama 3 with low_freq_factor=1']),
    ({'weights': checkpoints.tensors() | {'extra.weight': np.ones(8, np.float32)}},
     ['weights unknown: extra.weight;']),
    ({'drop': ('blk.1.ffn_up.weight', 'output_norm.weight')},
     ['weights missing: blk.1.ffn_up.weight, output_norm.weight; check that the config belongs to']),
    ({'drop': ('token_embd.weight',)}, ['lacks token_embd.weight; download it again.']),
    ({'weights': checkpoints.tensors() | {'model.layers.2.mlp.up_proj.weight': np.ones((9, 64), np.float32)}},
     ['of the wrong shape: blk.2.ffn_up.weight (9, 64) where (96, 64) is needed;']),
    ({'weights': checkpoints.tensors() | {'model.embed_tokens.weight': np.ones((95, 64), np.float32)}},
     ['of the wrong shape: token_embd.weight (95, 64) where (96, 64) is needed;']),
])
def test_refuses(tmp_path, change, texts):
  path = checkpoints.write_gguf(tmp_path / 'tiny.gguf', **change)
  with raises(f'{path}: ', *texts):
    gguf.load(path)


def test_refuses_blocks_it_cannot_read(tmp_path):
  kind = ggml.GGMLQuantizationType.Q8_1  # 32 weights in 40 bytes
  weights = {name: np.zeros((array.shape[0], array.shape[1] // 32 * 40), np.uint8) if array.ndim == 2 else array
             for name, array in checkpoints.tensors().items()}
  path = checkpoints.write_gguf(tmp_path / 'tiny.gguf', weights=weights, quantise=kind)
  with raises(f'{path}: ', ' is Q8_1, which cannot be read; use a file with another quantisation, such as Q8_0.'):
    gguf.load(path)


def test_names_missing_metadata(tmp_path):
  writer = ggml.GGUFWriter(tmp_path / 'bare.gguf', 'llama')
  writer.add_block_count(3)
  writer.add_head_count(4)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with raises('bare.gguf: lacks llama.embedding_length, llama.feed_forward_length, llama.context_length'):
    gguf.load(tmp_path / 'bare.gguf')


@pytest.mark.parametrize('endianess', ggml.GGUFEndian)
def test_metadata_as_their_reader_has_them(tmp_path, endianess):
  path = tmp_path / 'tiny.gguf'
  writer = ggml.GGUFWriter(path, 'llama', endianess=endianess)
  for key, array in (('words', ['a', 'bär', '']), ('bytes', b'ab'), ('ints', [1, -2, 3]), ('floats', [0.5, -1e9]),
                     ('bools', [True, False]), ('one', ['x']), ('nested', [[1, 2], [3]])):
    writer.add_array(f'general.{key}', array)
  writer.add_string('general.name', 'tiny')
  writer.add_float32('general.number', 0.25)
  writer.add_tensor('norm', np.arange(7, dtype=np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  ours, theirs = gguf._open(path), ggml.GGUFReader(path)
  assert list(ours.fields) == list(theirs.fields)
  for name, field in theirs.fields.items():
    assert (ours.fields[name].contents(), ours.fields[name].types) == (field.contents(), field.types), name
  assert ours.tensors[0].data_offset == theirs.tensors[0].data_offset
  np.testing.assert_array_equal(ours.tensors[0].data, theirs.tensors[0].data)
  whole, cut = path.read_bytes(), tmp_path / 'cut.gguf'
  for keep in range(24, ours.tensors[0].data_offset + 28):  # then comes what fills up a block
    cut.write_bytes(whole[:keep])
    with raises(f'{cut}: damaged or no GGUF file'):
      gguf._open(cut)


def test_names_a_truncated_file(tmp_path):
  path = checkpoints.write_gguf(tmp_path / 'tiny.gguf')
  whole = path.read_bytes()
  for keep in [*range(0, 3000, 101), len(whole) // 2, len(whole) - 1]:
    path.write_bytes(whole[:keep])
    with raises(f'{path}: damaged or no GGUF file'):
      gguf.load(path)


def test_names_what_is_no_gguf(tmp_path):
  path = tmp_path / 'text.gguf'
  path.write_text('not a model' * 99)
  with raises(f'{path}: damaged or no GGUF file (GGUF magic invalid); download it again.'):
    gguf.load(path)
  with raises(f'{tmp_path}/none.gguf: no such file; pass the path of a GGUF file.'):
    gguf.load(tmp_path / 'none.gguf')


# The default model, against transformers reading the same file.

PROMPTS = (
    'What is the capital of France?',
    'Why is the sky blue?',
    'Write a haiku about autumn.',
    'List three prime numbers.',
    'Translate "good morning" into Spanish.',
    'def fibonacci(n):\n  """Returns the n-th Fibonacci number."""',
    'Explain gravity to a child in two sentences.',
    'What is 17 + 25?',
    'Who wrote Hamlet?',
    '日本の首都はどこですか？',
    'Give me a recipe for pancakes 🥞, please!',
    'Summarise: The quick brown fox jumps over the lazy dog. The dog does not mind.',
)
NEW = 24
ATOL = 1e-3  # logits reach 40, where 30 layers of float32 sums in another order differed by 1e-4


@pytest.fixture(scope='module')
def prompts(default_tokenizer):
  chats = [[{'role': 'user', 'content': prompt}] for prompt in PROMPTS]
  texts = default_tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
  return [default_tokenizer(text).input_ids for text in texts]


@pytest.fixture(scope='module')
def theirs(default_model_path, prompts):
  """transformers: its logits of the first prompt, and its greedy answer to each with the logits behind it."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  model = transformers.AutoModelForCausalLM.from_pretrained(
      default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32).eval()
  longest = max(map(len, prompts))
  ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
  mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
  with torch.no_grad():
    first = model(torch.tensor(prompts[:1])).logits[0].numpy()
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                            pad_token_id=0, eos_token_id=[], output_logits=True, return_dict_in_generate=True)
  return first, answer.sequences[:, longest:].numpy(), torch.stack(answer.logits, 1).numpy()


def greedy(model, prompts, num):
  """Tokens [B, num] and their logits [B, num, V]: right-padded prefill, then single cached steps."""
  lengths = np.array([len(prompt) for prompt in prompts])
  rows, longest = np.arange(len(prompts)), lengths.max()
  tokens = np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
  positions = jnp.broadcast_to(jnp.arange(longest)[None], tokens.shape)
  cache = model.init_cache(len(prompts), longest + num)
  all_logits, cache = call(model, jnp.asarray(tokens), positions, cache)
  logits = [np.asarray(all_logits)[rows, lengths - 1]]
  for step in range(num - 1):
    last = jnp.asarray(logits[-1].argmax(-1)[:, None])
    new, cache = call(model, last, jnp.asarray(lengths[:, None] + step), cache)
    logits.append(np.asarray(new[:, 0]))
  logits_BTV = np.stack(logits, axis=1)
  return logits_BTV.argmax(-1), logits_BTV


@pytest.mark.slow
def test_default_model_logits(default_model, prompts, theirs):
  expected, _, _ = theirs
  tokens = jnp.asarray(prompts[:1])
  positions = jnp.arange(tokens.shape[1])[None]
  logits, _ = call(default_model, tokens, positions, default_model.init_cache(*tokens.shape))
  assert np.abs(expected).max() > 10
  np.testing.assert_allclose(np.asarray(logits)[0, -8:], expected[-8:], atol=ATOL, rtol=0)


@pytest.mark.slow
def test_default_model_greedy_text(default_model, default_tokenizer, prompts, theirs):
  _, their_tokens, their_logits = theirs
  tokens, logits = greedy(default_model, prompts, NEW)
  top = np.sort(their_logits, axis=-1)
  tied = top[..., -1] - top[..., -2] < 2 * ATOL  # either token is right, and the texts part
  clear = np.cumsum(tied, axis=1) == 0
  assert clear.mean() > 0.8
  np.testing.assert_array_equal(tokens[clear], their_tokens[clear])
  np.testing.assert_allclose(logits[clear], their_logits[clear], atol=ATOL, rtol=0)
  assert 'Paris' in default_tokenizer.decode(tokens[0])
  assert len({tuple(row) for row in tokens}) == len(prompts)


def test_default_model_ends_with_the_chat_template(default_model, default_tokenizer):
  ids = default_tokenizer.convert_tokens_to_ids(['<|endoftext|>', '<|im_end|>'])
  assert default_model.config.eos_ids == tuple(ids) == (0, 2)
  assert default_tokenizer.eos_token_id == 2
