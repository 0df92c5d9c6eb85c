"""What a decoder looks like: sizes and switches, read from a Hugging Face config.

A family is one function from its `config.json` to `ModelConfig`. It refuses, by name, every attribute that it
neither handles nor knows to be irrelevant for inference: an attribute that is skipped in silence is a wrong model.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and switches of one decoder; hashable, so it is static under jit."""

  family: str
  vocab_size: int  # V: rows of the embedding, padding included
  embed_dim: int  # D
  num_layers: int
  num_heads: int  # N
  num_kv_heads: int  # G
  head_dim: int  # H
  mlp_dim: int  # F
  max_length: int  # the context the model was trained for, tokens
  norm_eps: float
  rope_theta: float
  tie_embeddings: bool
  eos_ids: tuple[int, ...] = ()

  def __post_init__(self):
    for name in ('vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_dim', 'max_length'):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}={value!r}: a decoder needs a whole number of at least 1; check the config.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: '
          'grouped-query attention shares each key head among a whole number of query heads.')
    if self.head_dim % 2:
      raise ValueError(f'head_dim={self.head_dim}: rotary embeddings rotate pairs, so it must be even.')


# Attributes that say nothing about the forward pass of a trained decoder.
_IRRELEVANT = frozenset("""
_name_or_path architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder is_llama_config
label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
rope_interleaved sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
use_bfloat16 use_cache vocab_size
""".split())
