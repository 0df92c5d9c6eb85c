"""What a config.json becomes, and everything that must not be skipped in silence."""

import dataclasses
import re

import pytest

from cactus_jax.models.config import ModelConfig, from_hf_config
from tests.checkpoints import CONFIG


def raises(text):
  return pytest.raises(ValueError, match=re.escape(text))


def test_reads_sizes():
  assert from_hf_config(CONFIG) == ModelConfig(
      family='llama', vocab_size=96, embed_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
      mlp_dim=96, max_length=128, norm_eps=1e-5, rope_theta=5000.0, tie_embeddings=False, eos_ids=(2,))


def test_is_hashable_and_frozen():
  config = from_hf_config(CONFIG)
  assert hash(config) == hash(from_hf_config(dict(CONFIG)))
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.num_layers = 2


@pytest.mark.parametrize('given, ours', [
    ({'head_dim': 32}, {'head_dim': 32}),
    ({'head_dim': None}, {'head_dim': 16}),
    ({'num_key_value_heads': None}, {'num_kv_heads': 4}),
    ({'num_key_value_heads': 1}, {'num_kv_heads': 1}),
    ({'eos_token_id': [7, 2, 7]}, {'eos_ids': (2, 7)}),
    ({'eos_token_id': None}, {'eos_ids': ()}),
    ({'eos_token_id': 0}, {'eos_ids': (0,)}),
    ({'tie_word_embeddings': True}, {'tie_embeddings': True}),
    ({'rope_theta': None}, {'rope_theta': 10000.0}),
    ({'rope_scaling': None}, {}),
    ({'rope_parameters': {'rope_type': 'default', 'rope_theta': 7.0}}, {'rope_theta': 7.0}),
    ({'rope_scaling': {'type': 'default'}}, {'rope_theta': 5000.0}),
    ({'attention_bias': False, 'mlp_bias': False, 'rope_interleaved': False}, {}),
    ({'sliding_window': None, 'quantization_config': None}, {}),
    ({'torch_dtype': 'bfloat16', 'use_cache': True, 'architectures': ['LlamaForCausalLM']}, {}),
])
def test_accepts(given, ours):
  assert from_hf_config(CONFIG | given) == dataclasses.replace(from_hf_config(CONFIG), **ours)


@pytest.mark.parametrize('given, text', [
    ({'attention_bias': True}, "attention_bias=True (only False is): not implemented for model_type='llama'"),
    ({'mlp_bias': True}, 'mlp_bias=True (only False is)'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' (only 'silu' is)"),
    ({'rope_interleaved': True}, 'rope_interleaved=True (only False is)'),
    ({'sliding_window': 4096}, 'sliding_window=4096: not implemented'),
    ({'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4}: not implemented"),
    ({'logit_scale': 0.5, 'qk_norm': False}, 'logit_scale=0.5, qk_norm=False: not implemented'),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}},
     "rope_type='linear' with {'factor': 2.0}: only plain"),
    ({'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5, 'factor': 8.0}},
     "rope_type='llama3' with"),
    ({'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.5}},
     "'partial_rotary_factor': 0.5"),
    ({'model_type': 'mamba'}, "model_type='mamba': the supported families are llama; use a checkpoint"),
    ({'model_type': None}, 'model_type=None: the supported families are llama'),
    ({'eos_token_id': '</s>'}, "eos_token_id='</s>': must be a token id, a list of them or null."),
    ({'num_attention_heads': 5}, 'the config has 5 heads for an embedding of 64: name the head dimension'),
    ({'num_attention_heads': 0}, 'the config has 0 heads for an embedding of 64'),
    ({'num_key_value_heads': 3}, 'num_heads=4 is not a multiple of num_kv_heads=3'),
    ({'head_dim': 15}, 'head_dim=15: rotary embeddings rotate pairs'),
    ({'vocab_size': '96'}, "vocab_size='96': must be a whole number of at least 1"),
    ({'num_hidden_layers': 0}, 'num_layers=0: must be a whole number of at least 1'),
])
def test_refuses(given, text):
  with raises(text):
    from_hf_config(CONFIG | given)


def test_names_what_is_missing():
  config = {name: value for name, value in CONFIG.items() if name not in ('hidden_size', 'rms_norm_eps')}
  with raises('the config lacks hidden_size, rms_norm_eps: a llama needs them; complete config.json.'):
    from_hf_config(config)


def test_does_not_change_what_it_reads():
  rope = {'rope_type': 'default', 'rope_theta': 7.0}
  from_hf_config(CONFIG | {'rope_parameters': rope})
  assert rope == {'rope_type': 'default', 'rope_theta': 7.0}


def test_reads_what_transformers_writes():
  transformers = pytest.importorskip('transformers')
  written = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_theta=123.0).to_dict()
  assert from_hf_config(written).rope_theta == 123.0
  assert from_hf_config(written).head_dim == 16
