"""GGUF files: the same model as its safetensors, or as transformers reads it, and errors for bad files."""

import dataclasses
import re

import gguf as ggml
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cactus_jax.models import gguf, hf
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


def test_q8_0(tmp_path):
  """A file of 8-bit blocks gives the logits of weights that were rounded to the same blocks."""
  rounded = {name: ggml.dequantize(ggml.quantize(array, Q8_0), Q8_0) if array.ndim == 2 else array
             for name, array in checkpoints.tensors().items()}
  theirs = hf.load(checkpoints.write_folder(tmp_path / 'hf', weights=rounded), dtype='float32')
  ours = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', quantise=Q8_0), dtype='float32')
  np.testing.assert_allclose(logits_of(*ours), logits_of(*theirs), atol=1e-5, rtol=0)
  exact = hf.load(checkpoints.write_folder(tmp_path / 'exact'), dtype='float32')
  assert 1e-3 < np.abs(logits_of(*ours) - logits_of(*exact)).max() < 0.5


def test_explicit_head_dim(tmp_path):
  config = checkpoints.CONFIG | {'head_dim': 32}
  extra = [('add_key_length', 32), ('add_value_length', 32), ('add_rope_dimension_count', 32)]
  ours = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', config, extra=extra), dtype='float32')
  theirs = hf.load(checkpoints.write_folder(tmp_path / 'hf', config), dtype='float32')
  np.testing.assert_allclose(logits_of(*ours), logits_of(*theirs), atol=1e-5, rtol=0)


def test_dtype(tmp_path):
  params, _ = gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf'), dtype='bfloat16')
  assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_eos_ids(tmp_path):
  tokens = ['a', '<|endoftext|>', 'b', '<|im_end|>', '</s>']
  kinds = [1, 3, 1, 3, 1]  # the last is a plain token that only looks like one
  extra = [('add_token_list', tokens), ('add_token_types', kinds), ('add_eot_token_id', 7)]
  assert gguf.load(checkpoints.write_gguf(tmp_path / 'tiny.gguf', extra=extra))[1].eos_ids == (1, 2, 3, 7)


# What must be refused.


@pytest.mark.parametrize('change, texts', [
    ({'config': checkpoints.CONFIG | {'architecture': 'qwen3'}},
     ["general.architecture='qwen3': the supported families are llama."]),
    ({'extra': [('add_rope_scaling_type', ggml.RopeScalingType.LINEAR), ('add_rope_scaling_factor', 2.0)]},
     ["rope.scaling.type='linear', rope.scaling.factor=2.0: not implemented"]),
    ({'extra': [('add_expert_count', 8)]}, ['expert_count=8: not implemented']),
    ({'extra': [('add_sliding_window', 16)]}, ['attention.sliding_window=16: not implemented']),
    ({'extra': [('add_rope_dimension_count', 8)]},
     ['llama.rope.dimension_count=8: only the head dimension, 16, is implemented']),
    ({'config': checkpoints.CONFIG | {'num_key_value_heads': [2, 2, 1]}, 'weights': {}},
     ['attention.head_count_kv=[2, 2, 1]: not implemented']),
    ({'weights': checkpoints.tensors() | {'rope_freqs.weight': np.ones(8, np.float32)}},
     ['rope_freqs', '(rope scaling)', 'not implemented']),
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


def test_refuses_a_tokenizer_it_does_not_know(tmp_path):
  path = checkpoints.write_gguf(tmp_path / 'tiny.gguf', extra=[('add_tokenizer_model', 'llama')])
  with raises("a tokenizer of {'model': 'llama', 'pre': None", 'load the tokenizer of the original model'):
    gguf.load_tokenizer(path)


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


def test_default_model_logits(default_model, prompts, theirs):
  expected, _, _ = theirs
  tokens = jnp.asarray(prompts[:1])
  positions = jnp.arange(tokens.shape[1])[None]
  logits, _ = call(default_model, tokens, positions, default_model.init_cache(*tokens.shape))
  assert np.abs(expected).max() > 10
  np.testing.assert_allclose(np.asarray(logits)[0, -8:], expected[-8:], atol=ATOL, rtol=0)


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
