"""What a decoder looks like: sizes and switches, read from a Hugging Face config.

A family is one function from its `config.json` to `ModelConfig`. It refuses, by name, every attribute that it
neither handles nor knows to be irrelevant: an attribute skipped in silence is a wrong model.
"""

import dataclasses


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
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and (type(value) is not int or value < 1):
        raise ValueError(f'{field.name}={value!r}: must be a whole number of at least 1; check the config.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: '
          'grouped-query attention shares each key head among a whole number of query heads.')
    if self.head_dim % 2:
      raise ValueError(f'head_dim={self.head_dim}: rotary embeddings rotate pairs, so it must be even.')


def from_hf_config(config: dict) -> ModelConfig:
  """Sizes and switches of the model that a `config.json` describes.

  Raises ValueError naming the family, the attributes or the values that the decoder does not implement.
  """
  family = config.get('model_type')
  if family not in FAMILIES:
    raise ValueError(
        f'model_type={family!r}: the supported families are {", ".join(FAMILIES)}; use a checkpoint of one '
        'of them or add a function to FAMILIES in models/config.py.')
  return FAMILIES[family](config)


def eos_ids_of(config: dict) -> tuple[int, ...]:
  """The `eos_token_id` of a config, which may be a number, a list or absent."""
  ids = config.get('eos_token_id')
  ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
  if any(type(i) is not int for i in ids):
    raise ValueError(f'eos_token_id={config["eos_token_id"]!r}: must be a token id, a list of them or null.')
  return tuple(sorted(set(ids)))


def default_head_dim(embed_dim, num_heads) -> int:
  """The head dimension of a config that does not give it."""
  if type(num_heads) is not int or num_heads < 1 or embed_dim % num_heads:
    raise ValueError(
        f'the config has {num_heads!r} heads for an embedding of {embed_dim}: name the head dimension in it.')
  return embed_dim // num_heads


def _llama(config):
  needed = {
      'vocab_size': 'vocab_size',
      'embed_dim': 'hidden_size',
      'num_layers': 'num_hidden_layers',
      'num_heads': 'num_attention_heads',
      'mlp_dim': 'intermediate_size',
      'max_length': 'max_position_embeddings',
      'norm_eps': 'rms_norm_eps',
  }
  rope = {'rope_theta', 'rope_scaling', 'rope_parameters'}
  handled = {*needed.values(), *rope, 'num_key_value_heads', 'head_dim', 'tie_word_embeddings'}
  _refuse_unknown(config, handled, hidden_act='silu', attention_bias=False, mlp_bias=False,
                  rope_interleaved=False, use_sliding_window=False)
  missing = [name for name in needed.values() if config.get(name) is None]
  if missing:
    raise ValueError(f'the config lacks {", ".join(missing)}: a llama needs them; complete config.json.')
  sizes = {ours: config[theirs] for ours, theirs in needed.items()}
  return ModelConfig(
      family='llama',
      num_kv_heads=config.get('num_key_value_heads') or sizes['num_heads'],
      head_dim=config.get('head_dim') or default_head_dim(sizes['embed_dim'], sizes['num_heads']),
      rope_theta=_rope_theta(config),
      tie_embeddings=bool(config.get('tie_word_embeddings')),
      eos_ids=eos_ids_of(config),
      **sizes,
  )


FAMILIES = {'llama': _llama}


def _refuse_unknown(config, handled, **only):
  """Raises for attributes outside `handled`, unless irrelevant, null or at the one value we implement."""
  strange = [
      f'{name}={value!r}' + (f' (only {only[name]!r} is)' if name in only else '')
      for name, value in config.items()
      if name not in handled | _IRRELEVANT and value is not None and only.get(name, ...) != value
  ]
  if strange:
    raise ValueError(
        f'{", ".join(strange)}: not implemented for model_type={config["model_type"]!r}, and skipping it '
        'could give a wrong model; use a checkpoint without it or implement it in models/config.py.')


def _rope_theta(config):
  """The base of plain rotary embeddings; `rope_parameters` (transformers 5) overrules the older two."""
  rope = (config.get('rope_scaling') or {}) | (config.get('rope_parameters') or {})
  theta = rope.pop('rope_theta', config.get('rope_theta') or 10000.0)
  kind = rope.pop('type', 'default')
  kind = rope.pop('rope_type', kind)
  if kind != 'default' or rope:
    raise ValueError(
        f'rope_type={kind!r} with {rope}: only plain rotary embeddings (rope_type "default") are '
        'implemented; use a checkpoint without rope scaling.')
  return float(theta)


# Attributes that say nothing about the forward pass of a trained decoder.
_IRRELEVANT = frozenset("""
_attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder
is_llama_config label2id length_penalty max_length min_length model_type no_repeat_ngram_size
num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_scores
pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
transformers.js_config transformers_version typical_p use_bfloat16 use_cache
""".split())
