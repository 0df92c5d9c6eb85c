"""What a config.json becomes, and everything that must not be skipped in silence."""

import dataclasses
import json
import re

import pytest

from cactus_jax.models import config as config_lib
from cactus_jax.models import rope
from cactus_jax.models.config import FAMILIES, RECURRENT, ModelConfig, to_hf_config
from tests.checkpoints import CONFIG

LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
          'original_max_position_embeddings': 32}
YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}
MISTRAL = CONFIG | {'model_type': 'mistral', 'sliding_window': 8}
QWEN2 = CONFIG | {
    'model_type': 'qwen2', 'use_sliding_window': False, 'sliding_window': 8, 'max_window_layers': 2, 'use_mrope': False}
QWEN3 = CONFIG | {'model_type': 'qwen3', 'head_dim': 16, 'attention_bias': False, 'use_sliding_window': False}
GEMMA = {name: value for name, value in CONFIG.items() if name not in ('tie_word_embeddings', 'hidden_act')} | {
    'head_dim': 32, 'hidden_activation': 'gelu_pytorch_tanh', 'query_pre_attn_scalar': 16, 'sliding_window': 8,
    'attention_bias': False, 'cache_implementation': 'hybrid'}
GEMMA2 = GEMMA | {
    'model_type': 'gemma2', 'hidden_act': 'gelu_pytorch_tanh', 'attn_logit_softcapping': 20.0,
    'final_logit_softcapping': 10.0}
GEMMA3 = GEMMA | {
    'model_type': 'gemma3_text', 'sliding_window_pattern': 3, 'rope_local_base_freq': 100.0, 'rope_scaling': None,
    'attn_logit_softcapping': None, 'final_logit_softcapping': None}
GEMMA_SWITCHES = {
    'tie_embeddings': True, 'head_dim': 32, 'norm_offset': 1.0, 'post_norms': True, 'activation': 'gelu_tanh',
    'embed_scale': 8.0, 'query_scale': 0.25}


def raises(text):
  return pytest.raises(ValueError, match=re.escape(text))


def from_hf_config(config):
  """What a config.json says: in every test here, the same as the config.json that is written from it."""
  read = config_lib.from_hf_config(config)
  assert config_lib.from_hf_config(json.loads(json.dumps(to_hf_config(read, 'float32')))) == read
  return read


def test_reads_sizes():
  assert from_hf_config(CONFIG) == ModelConfig(
      family='llama', vocab_size=96, embed_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
      mlp_dim=96, max_length=128, norm_eps=1e-5, rope_theta=5000.0, tie_embeddings=False, eos_ids=(2,))


def test_is_hashable_and_frozen():
  config = from_hf_config(CONFIG)
  assert hash(config) == hash(from_hf_config(dict(CONFIG)))
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.num_layers = 2


@pytest.mark.parametrize('config, ours', [
    (MISTRAL, {'family': 'mistral', 'windows': (8, 8, 8)}),
    (MISTRAL | {'sliding_window': None}, {'family': 'mistral', 'windows': ()}),
    ({k: v for k, v in MISTRAL.items() if k != 'sliding_window'}, {'family': 'mistral', 'windows': (4096,) * 3}),
    (QWEN2, {'family': 'qwen2', 'qkv_bias': True}),
    (QWEN2 | {'layer_types': ['full_attention'] * 3}, {'family': 'qwen2', 'qkv_bias': True}),
    (QWEN2 | {'use_sliding_window': True}, {'family': 'qwen2', 'qkv_bias': True, 'windows': (None, None, 8)}),
    (QWEN3, {'family': 'qwen3', 'qk_norm': True}),
    (QWEN3 | {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 0,
              'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention']},
     {'family': 'qwen3', 'qk_norm': True, 'windows': (8, None, 8)}),
    (QWEN3 | {'head_dim': 32}, {'family': 'qwen3', 'qk_norm': True, 'head_dim': 32}),
    (GEMMA2, GEMMA_SWITCHES | {
        'family': 'gemma2', 'attn_softcap': 20.0, 'logit_softcap': 10.0, 'windows': (8, None, 8)}),
    (GEMMA | {'model_type': 'gemma2', 'layer_types': ['full_attention', 'sliding_attention', 'full_attention']},
     GEMMA_SWITCHES | {'family': 'gemma2', 'attn_softcap': 50.0, 'logit_softcap': 30.0, 'windows': (None, 8, None)}),
    (GEMMA2 | {'attn_logit_softcapping': None, 'final_logit_softcapping': None, 'tie_word_embeddings': False},
     GEMMA_SWITCHES | {'family': 'gemma2', 'windows': (8, None, 8), 'tie_embeddings': False}),
    (GEMMA3, GEMMA_SWITCHES | {
        'family': 'gemma3_text', 'qk_norm': True, 'local_rope_theta': 100.0, 'windows': (8, 8, None)}),
    (GEMMA3 | {'rope_local_base_freq': None, 'rope_theta': None, 'sliding_window_pattern': None,
               '_sliding_window_pattern': 2, 'final_logit_softcapping': 5.0},
     GEMMA_SWITCHES | {'family': 'gemma3_text', 'qk_norm': True, 'local_rope_theta': 1e4, 'rope_theta': 1e6,
                       'windows': (8, None, 8), 'logit_softcap': 5.0}),
])
def test_reads_families(config, ours):
  expected = dataclasses.replace(from_hf_config(CONFIG), **ours)
  assert from_hf_config(config) == expected
  assert hash(from_hf_config(config)) == hash(expected)


@pytest.mark.parametrize('config', [CONFIG, MISTRAL, QWEN2, QWEN3, GEMMA2])
@pytest.mark.parametrize('scaling, expected', [
    ({'rope_type': 'linear', 'factor': 2}, rope.Linear(2.0)),
    (LLAMA3, rope.Llama3(8.0, 1.0, 4.0, 32.0)),
    (YARN, rope.Yarn(4.0, 32.0)),
])
def test_reads_rope_scaling_of_old_and_new_configs(config, scaling, expected):
  plain = from_hf_config(config)
  older = {'type' if name == 'rope_type' else name: value for name, value in scaling.items()}
  new = {'rope_theta': 1.0, 'rope_parameters': scaling | {'rope_theta': 5000.0}}
  for given in ({'rope_scaling': scaling}, {'rope_scaling': older}, {'rope_scaling': scaling | older}, new):
    assert from_hf_config(config | given) == dataclasses.replace(plain, rope_scaling=expected)


@pytest.mark.parametrize('given, expected', [
    ({'original_max_position_embeddings': None}, rope.Yarn(4.0, 128.0)),  # the trained context of the model
    ({'attention_factor': 1.5, 'truncate': False, 'beta_fast': 16, 'beta_slow': 2},
     rope.Yarn(4.0, 32.0, 16.0, 2.0, 1.5, False)),
    ({'attention_factor': None, 'truncate': None, 'beta_fast': None, 'beta_slow': None}, rope.Yarn(4.0, 32.0)),
    ({'mscale': 0.5, 'mscale_all_dim': 1}, rope.Yarn(4.0, 32.0, mscale=0.5, mscale_all_dim=1.0)),
])
def test_reads_what_yarn_may_leave_out(given, expected):
  assert from_hf_config(CONFIG | {'rope_parameters': YARN | given}).rope_scaling == expected


def test_reads_both_ropes_of_gemma3():
  ropes = {'full_attention': LLAMA3 | {'rope_theta': 7.0},
           'sliding_attention': {'rope_type': 'default', 'rope_theta': 5.0}}
  changes = {'rope_theta': 7.0, 'local_rope_theta': 5.0, 'rope_scaling': rope.Llama3(8.0, 1.0, 4.0, 32.0)}
  assert from_hf_config(GEMMA3 | {'rope_parameters': ropes}) == dataclasses.replace(from_hf_config(GEMMA3), **changes)
  old = from_hf_config(GEMMA3 | {'rope_scaling': LLAMA3})
  assert (old.rope_scaling, old.local_rope_theta) == (rope.Llama3(8.0, 1.0, 4.0, 32.0), 100.0)
  linear = from_hf_config(GEMMA3 | {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}})
  assert (linear.rope_scaling, linear.local_rope_theta) == (rope.Linear(8.0), 100.0)


@pytest.mark.parametrize('config, text', [
    (MISTRAL | {'num_key_value_heads': None}, 'the config lacks num_key_value_heads: a mistral needs them;'),
    (MISTRAL | {'sliding_window': 0}, 'windows=(0, 0, 0): each must be None or a whole number of at least 1'),
    (MISTRAL | {'sliding_window': 8.0}, 'windows=(8.0, 8.0, 8.0): each must be'),
    (MISTRAL | {'num_hidden_layers': '3'}, "num_layers='3': must be a whole number"),
    (MISTRAL | {'hidden_act': 'gelu'}, "hidden_act='gelu' (only 'silu' is): not implemented for model_type='mistral'"),
    (MISTRAL | {'layer_types': ['full_attention'] * 3}, "layer_types=['full_attention', 'full_attention', "),
    (MISTRAL | {'attention_bias': True}, 'attention_bias=True (only False is)'),
    (QWEN2 | {'num_key_value_heads': None}, 'the config lacks num_key_value_heads: a qwen2 needs them;'),
    (QWEN2 | {'use_sliding_window': True, 'sliding_window': None, 'max_window_layers': None},
     'the config lacks sliding_window, max_window_layers: a qwen2 needs them;'),
    (QWEN2 | {'use_sliding_window': True, 'max_window_layers': '2'}, "max_window_layers='2': must be the number of a"),
    (QWEN2 | {'use_sliding_window': True, 'layer_types': ['linear_attention']}, 'layer_types with linear_attention:'),
    (QWEN2 | {'use_mrope': True}, 'use_mrope=True (only False is)'),
    (QWEN2 | {'hidden_act': 'relu'}, "hidden_act='relu' (only 'silu' is)"),
    (QWEN2 | {'layer_types': ['full_attention', 'sliding_attention']},
     "layer_types=['full_attention', 'sliding_attention'] (only ['full_attention', 'full_attention', "),
    (QWEN2 | {'rope_scaling': {'type': 'mrope', 'mrope_section': [2, 3, 3]}},
     "rope_type='mrope' with {'mrope_section': [2, 3, 3]}: only default, linear, llama3, yarn are implemented;"),
    (QWEN3 | {'head_dim': None}, 'the config lacks head_dim: a qwen3 needs them;'),
    (QWEN3 | {'attention_bias': True}, "attention_bias=True (only False is): not implemented for model_type='qwen3'"),
    (QWEN3 | {'use_sliding_window': True}, 'the config lacks sliding_window, max_window_layers: a qwen3 needs them;'),
    (QWEN3 | {'use_mrope': False}, 'use_mrope=False: not implemented'),
    (GEMMA2 | {'head_dim': None, 'sliding_window': None, 'query_pre_attn_scalar': None},
     'the config lacks head_dim, query_pre_attn_scalar, sliding_window: a gemma2 needs them;'),
    (GEMMA2 | {'hidden_activation': 'gelu'}, "hidden_activation='gelu' (only 'gelu_pytorch_tanh' is)"),
    (GEMMA2 | {'hidden_act': 'silu'}, "hidden_act='silu' (only 'gelu_pytorch_tanh' is)"),
    (GEMMA2 | {'attention_bias': True}, 'attention_bias=True (only False is)'),
    (GEMMA2 | {'use_bidirectional_attention': True}, 'use_bidirectional_attention=True (only False is)'),
    (GEMMA2 | {'attn_logit_softcapping': 0.0}, 'attn_logit_softcapping=0.0: must be a number above 0'),
    (GEMMA2 | {'final_logit_softcapping': '30'}, "final_logit_softcapping='30': must be a number above 0"),
    (GEMMA2 | {'query_pre_attn_scalar': -1}, 'query_pre_attn_scalar=-1: must be a number above 0'),
    (GEMMA2 | {'layer_types': ['full_attention', 'chunked_attention', 'linear_attention']},
     'layer_types with chunked_attention, linear_attention: only full_attention and sliding_attention are'),
    (GEMMA2 | {'layer_types': ['full_attention', 'sliding_attention']},
     'windows=(None, 8): one is needed for each of the 3 layers, or none.'),
    (GEMMA2 | {'sliding_window_pattern': 2}, 'sliding_window_pattern=2: not implemented'),
    (GEMMA3 | {'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping=50.0: not implemented'),
    (GEMMA3 | {'rope_scaling': {'rope_type': 'dynamic', 'factor': 8.0}}, "rope_type='dynamic' with {'factor': 8.0}"),
    (GEMMA3 | {'rope_parameters': {'rope_type': 'default', 'rope_theta': 7.0}},
     "'rope_theta': 7.0}: gemma3_text has one set for full_attention and one for sliding_attention;"),
    (GEMMA3 | {'rope_parameters': {'sliding_attention': LLAMA3}}, 'sliding_attention with Llama3(factor=8.0'),
    (GEMMA3 | {'rope_parameters': {'sliding_attention': {'rope_type': 'ntk'}}}, "rope_type='ntk' with {}: only"),
])
def test_families_refuse(config, text):
  with raises(text):
    from_hf_config(config)


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
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
     "rope_type='dynamic' with {'factor': 2.0}: only default, linear, llama3, yarn are implemented; use a checkpoint"),
    ({'rope_scaling': {'rope_type': 'longrope', 'short_factor': [1.0], 'long_factor': [2.0]}},
     "rope_type='longrope' with {'short_factor': [1.0], 'long_factor': [2.0]}: only"),
    ({'rope_scaling': {'rope_type': 'ntk', 'factor': 2.0}}, "rope_type='ntk' with {'factor': 2.0}: only"),
    ({'rope_scaling': {'factor': 2.0}}, "factor=2.0: not implemented for rope_type='default', which has nothing else;"),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0, 'finetuned': True, 'low': None}},
     "finetuned=True: not implemented for rope_type='linear', which has factor; use a checkpoint with other rotary"),
    ({'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5, 'factor': 8.0}},
     "'factor': 8.0}: lacks low_freq_factor, high_freq_factor; complete config.json."),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': None}}, ': lacks factor; complete config.json.'),
    ({'rope_scaling': YARN | {'truncate': 'no'}}, "truncate='no': must be true or false; check the config."),
    ({'rope_scaling': YARN | {'attention_factor': 0.0}}, 'attention_factor=0.0: must be a number above 0'),
    ({'rope_scaling': YARN | {'beta_fast': 1, 'beta_slow': 2}}, 'beta_slow must not be above beta_fast; check the'),
    ({'rope_scaling': LLAMA3, 'rope_parameters': LLAMA3 | {'factor': 4.0}}, "'factor': 8.0, 'low_freq_factor': 1.0"),
    ({'rope_scaling': {'type': 'linear', 'factor': 8.0}, 'rope_parameters': {'rope_type': 'linear', 'factor': 4.0}},
     "rope_scaling={'type': 'linear', 'factor': 8.0} contradicts rope_parameters={'rope_type': 'linear', 'factor': "),
    ({'rope_scaling': LLAMA3 | {'attention_factor': 1.0}}, "attention_factor=1.0: not implemented for rope_type='lla"),
    ({'rope_scaling': LLAMA3 | {'factor': '8'}}, "factor='8': must be a number above 0; check the config."),
    ({'rope_scaling': LLAMA3 | {'low_freq_factor': 0}}, 'low_freq_factor=0: must be a number above 0'),
    ({'rope_scaling': LLAMA3 | {'high_freq_factor': 1.0}}, 'low_freq_factor must be below high_freq_factor'),
    ({'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.5}},
     "partial_rotary_factor=0.5: not implemented for rope_type='default'"),
    ({'model_type': 'phi3'},
     "model_type='phi3': the supported families are llama, mistral, qwen2, qwen3, gemma2, gemma3_text; use a"),
    ({'model_type': 'gemma3', 'text_config': GEMMA3},
     "model_type='gemma3' is a text model (model_type='gemma3_text') among other parts; use a checkpoint that holds "
     'the text model alone; the supported families are llama,'),
    ({'model_type': None}, 'model_type=None: the supported families are llama,'),
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


@pytest.mark.parametrize('changes, text', [
    ({'rope_scaling': 'linear'}, "rope_scaling='linear': must be an object or null; check the config."),
    ({'rope_parameters': [1]}, 'rope_parameters=[1]: must be an object or null; check the config.'),
    ({'layer_types': 'full'}, "layer_types='full': must be a list; check the config."),
    ({'tie_word_embeddings': 'x'}, "tie_word_embeddings='x': must be true or false; check the config."),
    ({'hidden_size': '64'}, "hidden_size='64': must be a whole number; check the config."),
    ({'rms_norm_eps': -1}, 'rms_norm_eps=-1: must be a number above 0; check the config.'),
    ({'rms_norm_eps': float('nan')}, 'rms_norm_eps=nan: must be a number above 0; check the config.'),
    ({'rope_theta': 0}, 'rope_theta=0: must be a number above 0; check the config.'),
    ({'rope_theta': float('inf')}, 'rope_theta=inf: must be a number above 0; check the config.'),
    ({'rope_theta': [1.0]}, 'rope_theta=[1.0]: must be a number above 0; check the config.'),
    ({'num_key_value_heads': 0}, 'num_kv_heads=0: must be a whole number of at least 1; check the config.'),
    ({'num_hidden_layers': 10**9}, 'num_hidden_layers=1000000000: more than 10000; check the config.'),
    ({'is_encoder_decoder': True}, 'is_encoder_decoder=True (only False is)'),
    ({'layer_types': ['full_attention']}, "layer_types=['full_attention'] (only ['full_attention', "),
    ({'head_dim': 0}, 'head_dim=0: must be a whole number of at least 1; check the config.'),
    ({'model_type': ['llama']}, "model_type=['llama']: must be a name; check the config."),
    ({'rope_parameters': {'rope_type': ['linear'], 'factor': 2.0}}, "rope_type=['linear'] with {'factor': 2.0}: only"),
])
def test_refuses_values_of_another_kind(changes, text):
  with raises(text):
    from_hf_config(QWEN3 | changes)


def test_no_window_at_all_is_no_windows():
  """So what is written of such a model is read again as the same."""
  config = from_hf_config(QWEN2 | {'use_sliding_window': True, 'max_window_layers': 3})
  assert config == from_hf_config(QWEN2) and config.windows == ()
  assert from_hf_config(GEMMA2 | {'layer_types': ['full_attention'] * 3}).windows == ()


@pytest.mark.parametrize('family', sorted(RECURRENT))
def test_refuses_a_state_that_cannot_be_rolled_back(family):
  with raises(f'model_type={family!r} has a recurrent state, which cannot be rolled back to a position after a '
              'drafted token is rejected, so speculative decoding needs another architecture; the supported families'):
    from_hf_config(CONFIG | {'model_type': family, 'text_config': GEMMA3})


def test_recurrent_models_have_the_names_that_transformers_gives():
  assert RECURRENT > {'mamba', 'mamba2', 'jamba', 'recurrent_gemma', 'rwkv', 'lfm2', 'minimax', 'qwen3_next', 'xlstm'}
  transformers = pytest.importorskip('transformers', minversion='5.24.0')
  assert RECURRENT <= {*transformers.CONFIG_MAPPING} and not RECURRENT & {*FAMILIES}


@pytest.mark.parametrize('config', [CONFIG, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3], ids=lambda c: c['model_type'])
def test_every_family_names_what_it_does_not_know(config):
  with raises(f'partial_rotary_factor=0.5, num_experts=8: not implemented for model_type={config["model_type"]!r},'):
    from_hf_config(config | {'partial_rotary_factor': 0.5, 'num_experts': 8})


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


@pytest.mark.parametrize('family', FAMILIES)
def test_reads_what_transformers_writes_of_each_family(family):
  transformers = pytest.importorskip('transformers')
  written = transformers.AutoConfig.for_model(family, num_hidden_layers=12)
  config = from_hf_config(written.to_dict())
  assert (config.family, config.num_layers, config.vocab_size) == (family, 12, written.vocab_size)
  assert config.tie_embeddings == written.tie_word_embeddings
  assert config.rope_theta == (1e6 if family == 'gemma3_text' else 1e4)
  kinds = getattr(written, 'layer_types', None)
  if family.startswith('gemma'):
    assert [window is None for window in config.windows] == [kind == 'full_attention' for kind in kinds]


def test_writes_a_config():
  scaled = dataclasses.replace(from_hf_config(CONFIG), rope_scaling=rope.Llama3(8.0, 1.0, 4.0, 32.0), eos_ids=())
  expected = CONFIG | {
      'architectures': ['LlamaForCausalLM'], 'dtype': 'bfloat16', 'head_dim': 16, 'bos_token_id': None,
      'eos_token_id': None, 'pad_token_id': None, 'rope_parameters': LLAMA3 | {'rope_theta': 5000.0}}
  del expected['rope_theta']
  written = to_hf_config(scaled, 'bfloat16')
  assert written == expected
  assert type(written['rope_parameters']['original_max_position_embeddings']) is int  # or transformers complains


@pytest.mark.parametrize('config, changes, text', [
    (CONFIG, {'qkv_bias': True}, 'qkv_bias=True: the config.json of a llama cannot say it.'),
    (CONFIG, {'windows': (None, 8, None), 'activation': 'gelu_tanh'},
     "activation='gelu_tanh', windows=(None, 8, None): the config.json of a llama cannot say it."),
    (CONFIG, {'kv_copies': 2}, 'kv_copies=2: the config.json of a llama cannot say it.'),
    (CONFIG, {'rope_scaling': rope.Llama3(8.0, 1.0, 4.0, 32.5)}, 'original_max_position_embeddings=32.5): the config'),
    (MISTRAL, {'windows': (8, 4, 8)}, 'windows=(8, 4, 8): the config.json of a mistral cannot say it.'),
    (GEMMA2, {'query_scale': 0.3, 'embed_scale': None}, 'embed_scale=None, query_scale=0.3: the config.json of a'),
    (GEMMA2, {'query_scale': None}, 'the config lacks query_pre_attn_scalar: a gemma2 needs them;'),
    (CONFIG, {'family': 'phi3'}, "model_type='phi3': the supported families are llama,"),
])
def test_refuses_to_write_what_a_family_does_not_have(config, changes, text):
  with raises(text):
    to_hf_config(dataclasses.replace(from_hf_config(config), **changes), 'float32')
