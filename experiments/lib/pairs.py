"""The pairs of the paper, as their config.json describe them: what is needed to compile for them without weights."""

from cactus_jax.models.config import ModelConfig, from_hf_config


def _qwen3(hidden, layers, heads, mlp, tied):
  return dict(model_type='qwen3', vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers,
              num_attention_heads=heads, num_key_value_heads=8, head_dim=128, intermediate_size=mlp,
              max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=tied)


def _qwen2(hidden, layers, heads, kv_heads, mlp, vocab):
  return dict(model_type='qwen2', vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
              num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=mlp,
              max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False)


def _gemma2(hidden, layers, heads, kv_heads, mlp):
  return dict(model_type='gemma2', vocab_size=256000, hidden_size=hidden, num_hidden_layers=layers,
              num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=256, intermediate_size=mlp,
              max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096,
              query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
              hidden_activation='gelu_pytorch_tanh')


def _llama3(hidden, layers, heads, head_dim, mlp, factor, tied):
  rope = dict(rope_type='llama3', factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
  return dict(model_type='llama', vocab_size=128256, hidden_size=hidden, num_hidden_layers=layers,
              num_attention_heads=heads, num_key_value_heads=8, head_dim=head_dim, intermediate_size=mlp,
              max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=rope,
              tie_word_embeddings=tied)


CONFIGS = {
    'qwen3-0.6b': _qwen3(1024, 28, 16, 3072, True),
    'qwen3-1.7b': _qwen3(2048, 28, 16, 6144, True),
    'qwen3-8b': _qwen3(4096, 36, 32, 12288, False),
    'qwen3-14b': _qwen3(5120, 40, 40, 17408, False),
    'qwen3-32b': _qwen3(5120, 64, 64, 25600, False),
    'gemma2-2b': _gemma2(2304, 26, 8, 4, 9216),
    'gemma2-9b': _gemma2(3584, 42, 16, 8, 14336),
    'llama3.2-1b': _llama3(2048, 16, 32, 64, 8192, 32.0, True),
    'llama3.1-8b': _llama3(4096, 32, 32, 128, 14336, 8.0, False),
    'r1-qwen-1.5b': _qwen2(1536, 28, 12, 2, 8960, 151936),
    'r1-qwen-7b': _qwen2(3584, 28, 28, 4, 18944, 152064),
}
# Pair -> verifier, draft, tokens that their tokenizer has.
PAIRS = {
    'qwen3-14b+0.6b': ('qwen3-14b', 'qwen3-0.6b', 151669),
    'qwen3-8b+0.6b': ('qwen3-8b', 'qwen3-0.6b', 151669),
    'qwen3-32b+1.7b': ('qwen3-32b', 'qwen3-1.7b', 151669),
    'gemma2-9b+2b': ('gemma2-9b', 'gemma2-2b', 256000),
    'llama3-8b+1b': ('llama3.1-8b', 'llama3.2-1b', 128256),
    'r1-qwen-7b+1.5b': ('r1-qwen-7b', 'r1-qwen-1.5b', 151665),
}


def config_of(name) -> ModelConfig:
  """The config of one model of the table."""
  return from_hf_config(CONFIGS[name])
