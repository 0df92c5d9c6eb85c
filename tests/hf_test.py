"""Hugging Face checkpoints: the same logits as transformers, and an error for every kind of bad file."""

import copy
import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from cactus_jax.models import hf, rope, transformer
from cactus_jax.models.transformer import Transformer
from tests import checkpoints, fakes
from tests.checkpoints import FAMILIES

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 17))


def logits_of(source, **options):
  return fakes.logits(Transformer(*hf.load(source, **options)), TOKENS)


def raises(*texts):
  return pytest.raises(ValueError, match='.*'.join(map(re.escape, texts)))


# Parity with transformers, on checkpoints that transformers wrote.

SHAPES = {
    'gqa': {},
    'tied': {'tie_word_embeddings': True},
    'mha': {'num_key_value_heads': 4},
    'mqa': {'num_key_value_heads': 1},
    'wide_heads': {'head_dim': 32},
    'tied_narrow_heads': {'head_dim': 8, 'tie_word_embeddings': True},
}


@pytest.fixture(scope='module', params=SHAPES)
def theirs(request):
  """A random Llama of transformers, and its logits."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  config = checkpoints.CONFIG | SHAPES[request.param]
  config.pop('model_type')
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
  with torch.no_grad():
    for weight in model.parameters():
      weight.copy_(1 + 0.2 * torch.randn(weight.shape) if weight.ndim == 1 else torch.randn(weight.shape) / 6)
  return model


def their_logits(model):
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    return model(torch.tensor(TOKENS)).logits.float().numpy()


def test_logits_of_transformers(theirs, tmp_path):
  theirs.save_pretrained(tmp_path)
  expected = their_logits(theirs)
  assert np.abs(expected).max() > 2
  np.testing.assert_allclose(logits_of(tmp_path), expected, atol=2e-4, rtol=0)


def test_logits_of_shards(theirs, tmp_path):
  theirs.save_pretrained(tmp_path, max_shard_size='60KB')
  assert len(list(tmp_path.glob('model-*.safetensors'))) > 2
  np.testing.assert_allclose(logits_of(tmp_path), their_logits(theirs), atol=2e-4, rtol=0)


def test_logits_of_bfloat16_file(theirs, tmp_path):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  copy.deepcopy(theirs).to(torch.bfloat16).save_pretrained(tmp_path)
  with safetensors.safe_open(tmp_path / 'model.safetensors', 'numpy') as file:
    assert {file.get_slice(name).get_dtype() for name in file.keys()} == {'BF16'}
  rounded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
  np.testing.assert_allclose(logits_of(tmp_path), their_logits(rounded), atol=2e-4, rtol=0)


# Parity of the other families.


@pytest.fixture(scope='module')
def family(tmp_path_factory):
  """Of a name in FAMILIES: the folder of a random model that transformers wrote, and its logits."""
  return functools.cache(lambda name: random_family(tmp_path_factory.mktemp(name), FAMILIES[name]))


def random_family(folder, config):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  with torch.no_grad():
    for name, weight in model.named_parameters():
      centre = 1.0 if 'norm' in name and 'gemma' not in config.model_type else 0.0
      weight.copy_(torch.randn(weight.shape) / 6 if weight.ndim == 2 else centre + 0.5 * torch.randn(weight.shape))
  model.save_pretrained(folder)
  return folder, their_logits(model)


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_of_families(family, name):
  folder, expected = family(name)
  assert np.abs(expected).max() > 1.5
  np.testing.assert_allclose(logits_of(folder), expected, atol=2e-4, rtol=0)


def test_no_window_is_read_as_none(family):
  folder, _ = family('mistral_no_window')
  assert hf.load(folder)[1].windows == ()


@pytest.mark.parametrize('name', [
    'llama3', 'llama_yarn', 'mistral', 'qwen2', 'qwen2_mha_windows', 'qwen3', 'gemma2', 'gemma3', 'gemma3_old'])
def test_cached_families(family, name):
  """A prefix, then token by token in a larger cache: the logits of transformers, which had all at once."""
  folder, expected = family(name)
  model = Transformer(*hf.load(folder))
  call = jax.jit(lambda model, *arguments: model(*arguments))
  cache, parts = model.init_cache(TOKENS.shape[0], 23), []
  for start, end in itertools.pairwise([0, *range(8, TOKENS.shape[1] + 1)]):
    positions = jnp.broadcast_to(jnp.arange(start, end)[None], (TOKENS.shape[0], end - start))
    logits, cache = call(model, jnp.asarray(TOKENS[:, start:end]), positions, cache)
    parts.append(logits)
  np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize('name, switch', [
    ('llama3', {'rope_scaling': None}),
    ('llama_linear', {'rope_scaling': None}),
    ('llama_yarn', {'rope_scaling': rope.Yarn(4.0, 32.0, 3.0, attention_factor=1.0)}),
    ('llama_yarn', {'rope_scaling': rope.Yarn(4.0, 32.0, 3.0, beta_slow=2.0)}),
    ('llama_yarn', {'rope_scaling': rope.Yarn(4.0, 32.0)}),
    ('llama_yarn_tied_mha', {'rope_scaling': rope.Yarn(4.0, 32.0, 3.0, 0.9, mscale=3.0, mscale_all_dim=0.5)}),
    ('qwen2_yarn', {'rope_scaling': rope.Linear(4.0)}),
    ('qwen2_mha_windows', {'windows': ()}),
    ('gemma3_mha_yarn', {'rope_scaling': None}),
    ('gemma3_old', {'rope_scaling': None}),
    ('gemma3_old', {'local_rope_theta': None}),
    ('mistral', {'windows': ()}),
    ('mistral', {'windows': (6, 6, 6)}),
    ('qwen2', {'qkv_bias': False}),
    ('qwen3', {'qk_norm': False}),
    ('gemma2', {'norm_offset': 0.0}),
    ('gemma2', {'post_norms': False}),
    ('gemma2', {'activation': 'silu'}),
    ('gemma2', {'embed_scale': None}),
    ('gemma2', {'query_scale': None}),
    ('gemma2', {'attn_softcap': None}),
    ('gemma2', {'logit_softcap': None}),
    ('gemma2', {'windows': (5, 5, 5)}),
    ('gemma2', {'windows': (None, 5, None)}),
    ('gemma3', {'local_rope_theta': None}),
])
def test_every_switch_matters(family, name, switch):
  """Parity says something of a switch only if turning it moves logits by far more than the tolerance."""
  folder, expected = family(name)
  params, config = hf.load(folder)
  assert all(getattr(config, field) != value for field, value in switch.items())
  turned = fakes.logits(Transformer(params, dataclasses.replace(config, **switch)), TOKENS)
  assert np.abs(turned - expected).max() > 0.02


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_embedding_scale_is_rounded_as_the_weights_are(tmp_path, dtype):
  """The root of 96 is 9.8125 in bfloat16, 0.15 % more than in float32."""
  random_family(tmp_path, FAMILIES['gemma2'] | {'hidden_size': 96})
  params, config = hf.load(tmp_path, dtype=dtype)
  captured = []
  original = transformer.layers.rms_norm
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(transformer.layers, 'rms_norm', lambda x, *a, **k: captured.append(x) or original(x, *a, **k))
    model = Transformer(params, config)
    model(jnp.asarray(TOKENS), jnp.broadcast_to(jnp.arange(17)[None], (2, 17)), model.init_cache(2, 17))
  scale = np.asarray(96**0.5, ml_dtypes.bfloat16 if dtype == 'bfloat16' else np.float32)
  np.testing.assert_array_equal(captured[0], np.asarray(params.embed)[TOKENS] * scale)


# Layout and dtype.


def test_matches_the_abstract_tree(tmp_path):
  params, config = hf.load(checkpoints.write_folder(tmp_path))
  specs = transformer.abstract(config)
  assert jax.tree.map(lambda array: array.shape, params) == jax.tree.map(lambda spec: spec.shape, specs)


def test_qkv_is_grouped_by_key_head(tmp_path):
  weights = checkpoints.tensors()
  params, _ = hf.load(checkpoints.write_folder(tmp_path, weights=weights))
  q, k, v = (weights[f'model.layers.1.self_attn.{part}_proj.weight'] for part in 'qkv')
  # Four query heads of 16 over two key heads: rows of q 0-31 go with the first, 32-63 with the second.
  expected = np.concatenate([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]).T
  np.testing.assert_array_equal(params.layers[1].qkv, expected)


def test_bias_is_grouped_as_its_matrix_is(tmp_path):
  weights = checkpoints.tensors()
  parts = [f'model.layers.{i}.self_attn.{part}_proj' for i in range(3) for part in 'qkv']
  more = {f'{part}.bias': weights[f'{part}.weight'][:, 3].copy() for part in parts}
  config = checkpoints.CONFIG | {'model_type': 'qwen2'}
  params, _ = hf.load(checkpoints.write_folder(tmp_path, config, weights | more))
  np.testing.assert_array_equal(params.layers[1].qkv_bias, params.layers[1].qkv[3])


def test_dtype(tmp_path):
  folder = checkpoints.write_folder(tmp_path)
  dtypes = lambda **options: {array.dtype for array in jax.tree.leaves(hf.load(folder, **options)[0])}
  assert dtypes(dtype='bfloat16') == {jnp.dtype(jnp.bfloat16)}
  assert dtypes(dtype=jnp.float32) == {jnp.dtype(jnp.float32)}
  assert dtypes() == {jnp.dtype(jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16)}
  with raises('dtype=int8: weights are kept as floats'):
    hf.load(folder, dtype=jnp.int8)


def test_shards_equal_the_whole(tmp_path):
  whole = logits_of(checkpoints.write_folder(tmp_path / 'whole'))
  np.testing.assert_array_equal(logits_of(checkpoints.write_folder(tmp_path / 'parts', shards=3)), whole)


def test_eos_ids_of_both_files(tmp_path):
  checkpoints.write_folder(tmp_path)
  assert hf.load(tmp_path)[1].eos_ids == (2,)
  (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': [5, 2]}))
  assert hf.load(tmp_path)[1].eos_ids == (2, 5)
  (tmp_path / 'generation_config.json').write_text('{}')
  assert hf.load(tmp_path)[1].eos_ids == (2,)


def test_ignores_buffers_and_a_repeated_head(tmp_path):
  config = checkpoints.CONFIG | {'tie_word_embeddings': True}
  weights = checkpoints.tensors(config)
  expected = logits_of(checkpoints.write_folder(tmp_path / 'plain', config, weights))
  more = {'lm_head.weight': weights['model.embed_tokens.weight'],
          'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(8, np.float32)}
  folder = checkpoints.write_folder(tmp_path / 'more', config, weights | more)
  np.testing.assert_array_equal(logits_of(folder), expected)


# What must be refused.

UP, NORM, HEAD = 'model.layers.1.mlp.up_proj.weight', 'model.norm.weight', 'lm_head.weight'


def without(*names):
  return {name: array for name, array in checkpoints.tensors().items() if name not in names}


@pytest.mark.parametrize('shards', [1, 2])
@pytest.mark.parametrize('weights, texts', [
    (without(UP, NORM), [f'weights missing: {UP}, {NORM}; check that the config belongs to these weights.']),
    (without(HEAD), [f'missing: {HEAD};', 'set tie_word_embeddings if the embedding is the head']),
    (without() | {'model.layers.0.self_attn.q_norm.weight': np.ones(16, np.float32)},
     ['weights unknown: model.layers.0.self_attn.q_norm.weight;']),
    (without() | {UP: np.ones((64, 96), np.float32), NORM: np.ones(65, np.float32)},
     ['of the wrong shape: '
      f'{UP} (64, 96) where (96, 64) is needed, {NORM} (65,) where (64,) is needed;']),
    (without(UP) | {'up': np.ones(3, np.float32)}, [f'missing: {UP}; unknown: up;']),
])
def test_refuses_weights(tmp_path, weights, texts, shards):
  checkpoints.write_folder(tmp_path, weights=weights, shards=shards)
  with raises(str(tmp_path), *texts):
    hf.load(tmp_path)


def test_many_missing_weights_are_cut_short(tmp_path):
  config = checkpoints.CONFIG | {'num_hidden_layers': 5}
  with raises('missing: model.layers.3.input_layernorm.weight, ', ' and 10 more;'):
    hf.load(checkpoints.write_folder(tmp_path, config, checkpoints.tensors()))


def test_refuses_a_head_that_the_config_ties(tmp_path):
  tied = checkpoints.CONFIG | {'tie_word_embeddings': True}
  checkpoints.write_folder(tmp_path, tied, checkpoints.tensors())
  with raises('lm_head.weight differs from model.embed_tokens.weight, but the config ties them'):
    hf.load(tmp_path)


def test_refuses_a_tied_head_of_another_shape(tmp_path):
  config = checkpoints.CONFIG | {'tie_word_embeddings': True}
  checkpoints.write_folder(tmp_path, config, checkpoints.tensors() | {HEAD: np.ones((95, 64), np.float32)})
  with raises('weights unknown: lm_head.weight;'):
    hf.load(tmp_path)


def test_refuses_two_shards_with_the_same_weight(tmp_path):
  checkpoints.write_folder(tmp_path, shards=2)
  second = tmp_path / 'model-00002-of-00002.safetensors'
  held = safetensors.numpy.load_file(second)
  repeated = 'model.embed_tokens.weight'
  assert repeated not in held
  safetensors.numpy.save_file(held | {repeated: checkpoints.tensors()[repeated]}, second)
  with raises(f'two files hold {repeated}; keep the shards of one checkpoint.'):
    hf.load(tmp_path)


def test_refuses_integers(tmp_path):
  checkpoints.write_folder(tmp_path, weights=without() | {UP: np.ones((96, 64), np.int8)})
  with raises(f'{UP} (I8): weights must be one of F64, F32, F16, BF16'):
    hf.load(tmp_path)


def test_names_a_shard_that_is_not_there(tmp_path):
  checkpoints.write_folder(tmp_path, shards=3)
  (tmp_path / 'model-00002-of-00003.safetensors').unlink()
  with raises('lacks model-00002-of-00003.safetensors, which model.safetensors.index.json lists; download'):
    hf.load(tmp_path)


@pytest.mark.parametrize('keep', [0, 7, 100, -1])
@pytest.mark.parametrize('shards, name', [(1, 'model.safetensors'), (2, 'model-00002-of-00002.safetensors')])
def test_names_a_truncated_file(tmp_path, shards, name, keep):
  path = checkpoints.write_folder(tmp_path, shards=shards) / name
  path.write_bytes(path.read_bytes()[:keep])
  with raises(f'{path}: damaged or no safetensors file'):
    hf.load(tmp_path)


@pytest.mark.parametrize('name', ['config.json', 'generation_config.json', 'model.safetensors.index.json'])
def test_names_a_damaged_json(tmp_path, name):
  checkpoints.write_folder(tmp_path, shards=2)
  (tmp_path / name).write_text('{"model_type": "lla')
  with raises(f'{tmp_path / name}: not readable as JSON'):
    hf.load(tmp_path)


def test_needs_config(tmp_path):
  checkpoints.write_folder(tmp_path)
  (tmp_path / 'config.json').unlink()
  with raises(f'{tmp_path}/config.json: no such file'):
    hf.load(tmp_path)


def test_refuses_pickles(tmp_path):
  checkpoints.write_folder(tmp_path)
  (tmp_path / 'model.safetensors').unlink()
  with raises('has no model.safetensors, nor the index of shards; download it.'):
    hf.load(tmp_path)
  (tmp_path / 'pytorch_model.bin').write_bytes(b'')
  with raises('convert pytorch_model.bin, which can run code when read, to safetensors.'):
    hf.load(tmp_path)


# The hub.


def test_reads_a_hub_id(tmp_path, monkeypatch):
  checkpoints.write_folder(tmp_path)
  asked = []
  fetch = lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(tmp_path)
  monkeypatch.setattr('huggingface_hub.snapshot_download', fetch)
  assert hf.load('some/model')[1].vocab_size == 96
  [(name, patterns)] = asked
  assert name == 'some/model'
  assert 'model*.safetensors' in patterns and not any('bin' in pattern for pattern in patterns)


def test_unreachable_hub(monkeypatch):
  def fail(*_, **__):
    raise ConnectionError('no route')

  monkeypatch.setattr('huggingface_hub.snapshot_download', fail)
  with raises('some/model: neither a folder here', 'ConnectionError: no route', 'pass a local folder'):
    hf.load('some/model')


def test_rounds_to_nearest(tmp_path):
  weights = checkpoints.tensors()
  params, _ = hf.load(checkpoints.write_folder(tmp_path, weights=weights), dtype='bfloat16')
  expected = weights['model.embed_tokens.weight'].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(np.asarray(params.embed), expected)


# Writing.


def saved_again(folder, source, **options):
  """What `save` makes of a checkpoint, and the model that was saved."""
  model = Transformer(*hf.load(source, **options))
  hf.save(folder, model)
  return folder, model


@pytest.mark.parametrize('name', FAMILIES)
def test_transformers_reads_what_is_written(family, name, tmp_path):
  transformers = pytest.importorskip('transformers')
  folder, expected = family(name)
  again, model = saved_again(tmp_path / 'again', folder)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(again, attn_implementation='eager').eval()
  assert theirs.generation_config.eos_token_id == [2]
  np.testing.assert_allclose(their_logits(theirs), expected, atol=2e-4, rtol=0)
  np.testing.assert_allclose(their_logits(theirs), fakes.logits(model, TOKENS), atol=2e-4, rtol=0)
  assert hf.load(again)[1] == model.config


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_writes_weights_as_they_are(tmp_path, dtype):
  weights = {name: array.astype(jnp.dtype(dtype)) for name, array in checkpoints.tensors().items()}
  folder, _ = saved_again(tmp_path / 'again', checkpoints.write_folder(tmp_path / 'hf', weights=weights), dtype=dtype)
  assert json.loads((folder / 'config.json').read_text())['dtype'] == dtype
  with safetensors.safe_open(folder / 'model.safetensors', 'numpy') as file:
    assert file.metadata() == {'format': 'pt'} and {*file.keys()} == {*weights}
    for name, array in weights.items():
      assert file.get_tensor(name).dtype == array.dtype
      np.testing.assert_array_equal(file.get_tensor(name), array, name)


def test_writes_shards(tmp_path):
  """No shard over the limit but one with a single weight; the index lists every tensor."""
  model = Transformer(*hf.load(checkpoints.write_folder(tmp_path / 'hf')))
  hf.save(tmp_path / 'again', model, max_shard=30_000)
  index = json.loads((tmp_path / 'again' / 'model.safetensors.index.json').read_text())
  sizes, held = [], {}
  for path in sorted((tmp_path / 'again').glob('model-*.safetensors')):
    tensors = safetensors.numpy.load_file(path)
    sizes.append(sum(array.nbytes for array in tensors.values()))
    assert sizes[-1] <= 30_000 or {name.split('.')[-2] for name in tensors} == {'q_proj', 'k_proj', 'v_proj'}
    assert all(index['weight_map'][name] == path.name for name in tensors)
    held |= tensors
  assert len(sizes) > 10 and max(sizes) > 30_000
  assert held.keys() == index['weight_map'].keys() == checkpoints.tensors().keys()
  assert index['metadata']['total_size'] == sum(sizes)
  np.testing.assert_array_equal(logits_of(tmp_path / 'again'), fakes.logits(model, TOKENS))


def test_writes_the_tokenizer_and_ends(tmp_path):
  checkpoints.write_folder(tmp_path / 'hf')
  model = Transformer(*hf.load(tmp_path / 'hf'))
  model = model.replace(config=dataclasses.replace(model.config, eos_ids=(2, 5)))
  hf.save(tmp_path / 'again', model, fakes.byte_tokenizer())
  assert hf.load_tokenizer(tmp_path / 'again')('a b').input_ids == fakes.byte_tokenizer()('a b').input_ids
  assert json.loads((tmp_path / 'again' / 'generation_config.json').read_text()) == {'eos_token_id': [2, 5]}
  assert hf.load(tmp_path / 'again')[1].eos_ids == (2, 5)


def test_does_not_write_over_anything_nor_by_halves(tmp_path, monkeypatch):
  folder = checkpoints.write_folder(tmp_path / 'hf')
  model = Transformer(*hf.load(folder))
  before = {path: path.read_bytes() for path in folder.iterdir()}
  with raises(f'{folder}: is there already; name a new folder, or remove it.'):
    hf.save(folder, model)
  assert {path: path.read_bytes() for path in folder.iterdir()} == before
  with raises('qkv_bias=True: the config.json of a llama cannot say it.'):
    hf.save(tmp_path / 'again', model.replace(config=dataclasses.replace(model.config, qkv_bias=True)))

  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(safetensors.numpy, 'save_file', full)
  with raises(f'{tmp_path}/again: could not be written ([Errno 28] No space left on device); is the disk full?'):
    hf.save(tmp_path / 'again', model)
  assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('options', [{}, {'quantize': 'int8'}], ids=str)
def test_refuses_numbers_that_are_none(tmp_path, value, options):
  weights = checkpoints.tensors()
  weights[UP][3, 5] = value
  folder = checkpoints.write_folder(tmp_path, weights=weights)
  with raises(f'{folder}: {UP} has values that are infinite or no numbers; get the file again.'):
    hf.load(folder, **options)


@pytest.mark.parametrize('text, expected', [
    ('[]', 'holds [] where an object is needed'), ('null', 'holds None where an object is needed'),
    ('[' * 100_000, 'not readable as JSON')])
def test_refuses_json_of_another_kind(tmp_path, text, expected):
  checkpoints.write_folder(tmp_path)
  (tmp_path / 'config.json').write_text(text)
  with raises(f'{tmp_path}/config.json: {expected}'):
    hf.load(tmp_path)


@pytest.mark.parametrize('index', ['{}', '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_refuses_an_index_without_a_map(tmp_path, index):
  checkpoints.write_folder(tmp_path, shards=2)
  (tmp_path / 'model.safetensors.index.json').write_text(index)
  with raises('index.json: lacks the map from weights to files, weight_map; download it again.'):
    hf.load(tmp_path)


def test_says_what_cannot_be_saved(tmp_path):
  checkpoints.write_folder(tmp_path / 'hf')
  model = Transformer(*hf.load(tmp_path / 'hf'))
  with raises("tokenizer='abc': need a transformers tokenizer, as from load_tokenizer, or None."):
    hf.save(tmp_path / 'again', model, 'abc')
  with raises('3: need the path of a new folder.'):
    hf.save(3, model)
  (tmp_path / 'file').write_text('')
  with raises(f'{tmp_path}/file/again: no folder can be made there ('):
    hf.save(tmp_path / 'file' / 'again', model)
