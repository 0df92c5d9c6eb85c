"""What a decoder looks like: sizes and switches, read from a Hugging Face config.

A family is one function from its `config.json` to `ModelConfig`. It refuses, by name, every attribute that it
neither handles nor knows to be irrelevant: an attribute skipped in silence is a wrong model.
"""

import dataclasses
import math

from cactus_jax.models import rope


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
  # What sets families apart; the defaults are those of a Llama.
  rope_scaling: rope.Scaling | None = None
  local_rope_theta: float | None = None  # of layers with a window, unscaled; None: as in the others
  qkv_bias: bool = False
  qk_norm: bool = False  # an RMS norm of each query and key head
  norm_offset: float = 0.0  # what is added to the stored weight of every norm
  post_norms: bool = False  # also a norm after attention and one after the mlp
  activation: str = 'silu'  # of the mlp's gate; a name in layers.ACTIVATIONS
  embed_scale: float | None = None
  query_scale: float | None = None  # None: head_dim^-1/2
  attn_softcap: float | None = None
  logit_softcap: float | None = None
  windows: tuple[int | None, ...] = ()  # a layer: positions a query sees, or None for all; empty: all None
  kv_copies: int = 1  # how often each stored key head is held, so that more devices can share the heads; see `split`

  def __post_init__(self):
    if not any(window is not None for window in self.windows):
      object.__setattr__(self, 'windows', ())  # as a model without any is written
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
    if self.windows and len(self.windows) != self.num_layers:
      raise ValueError(f'windows={self.windows}: one is needed for each of the {self.num_layers} layers, or none.')
    if any(window is not None and (type(window) is not int or window < 1) for window in self.windows):
      raise ValueError(f'windows={self.windows}: each must be None or a whole number of at least 1; check the config.')

  @property
  def cache_heads(self):
    """G: key heads as they are held, copies counted."""
    return self.num_kv_heads * self.kv_copies

  def split(self, ways: int) -> 'ModelConfig':
    """The same model with enough copies of its key heads to give each of `ways` devices whole heads.

    Where that cannot be (`ways` and the number of key heads do not divide each other, or the query heads do not share
    out), without copies: every device then attends with all heads, and caches them all.
    """
    fits = ways % self.num_kv_heads == 0 and self.num_heads % ways == 0
    return dataclasses.replace(self, kv_copies=max(ways // self.num_kv_heads, 1) if fits else 1)


def from_hf_config(config: dict) -> ModelConfig:
  """Sizes and switches of the model that a `config.json` describes.

  Raises ValueError naming the family, the attributes or the values that the decoder does not implement.
  """
  family = config.get('model_type')
  for name, kind in _TYPES.items():
    if not isinstance(config.get(name), kind | None):
      raise ValueError(f'{name}={config[name]!r}: must be {_TYPE_NAMES[kind]}; check the config.')
  if type(layers := config.get('num_hidden_layers')) is int and layers > MAX_LAYERS:
    raise ValueError(f'num_hidden_layers={layers}: more than {MAX_LAYERS}; check the config.')
  if family in FAMILIES:
    return FAMILIES[family](config)
  supported = f'the supported families are {", ".join(FAMILIES)}'
  if family in RECURRENT:
    raise ValueError(
        f'model_type={family!r} has a recurrent state, which cannot be rolled back to a position after a drafted token '
        f'is rejected, so speculative decoding needs another architecture; {supported}.')
  if text := config.get('text_config'):
    raise ValueError(
        f'model_type={family!r} is a text model (model_type={text.get("model_type")!r}) among other parts; use a '
        f'checkpoint that holds the text model alone; {supported}.')
  raise ValueError(
      f'model_type={family!r}: {supported}; use a checkpoint of one of them or add a function to FAMILIES in '
      'models/config.py.')


def to_hf_config(config: ModelConfig, dtype: str) -> dict:
  """The `config.json` of a model whose weights are in `dtype`: what `from_hf_config` reads as `config`.

  Raises ValueError for sizes and switches that no model of its family has.
  """
  rotary = {'rope_type': 'default'} if config.rope_scaling is None else rope.to_dict(config.rope_scaling)
  rotary['rope_theta'] = config.rope_theta
  if (length := 'original_max_position_embeddings') in rotary:
    rotary[length] = int(rotary[length])  # transformers wants whole tokens
  gemma = config.family.startswith('gemma')
  given = {
      'model_type': config.family,
      'architectures': [_ARCHITECTURES.get(config.family)],
      'dtype': dtype,
      **{theirs: getattr(config, ours) for ours, theirs in _NEEDED.items()},
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'tie_word_embeddings': config.tie_embeddings,
      'hidden_activation' if gemma else 'hidden_act': 'gelu_pytorch_tanh' if gemma else 'silu',
      'rope_parameters': rotary,
      'bos_token_id': None,  # null, or transformers would take its own
      'eos_token_id': list(config.eos_ids) or None,
      'pad_token_id': None,
  }
  window = next((window for window in config.windows if window is not None), None)
  windows = config.windows or (None,) * config.num_layers
  kinds = ['full_attention' if window is None else 'sliding_attention' for window in windows]
  if gemma:
    given |= {
        'query_pre_attn_scalar': config.query_scale and round(config.query_scale**-2),
        'final_logit_softcapping': config.logit_softcap,
        'sliding_window': window or config.max_length,
        'layer_types': kinds,
    }
  elif config.family == 'mistral':
    given['sliding_window'] = window
  elif config.windows and config.family.startswith('qwen'):
    given |= {'use_sliding_window': True, 'sliding_window': window, 'max_window_layers': 0, 'layer_types': kinds}
  if config.family == 'gemma2':
    given['attn_logit_softcapping'] = config.attn_softcap
  elif config.family == 'gemma3_text':
    local = {'rope_type': 'default', 'rope_theta': config.local_rope_theta}
    given['rope_parameters'] = {'full_attention': rotary, 'sliding_attention': local}
  read = from_hf_config(given)
  lost = [f'{field.name}={getattr(config, field.name)!r}' for field in dataclasses.fields(config)
          if getattr(config, field.name) != getattr(read, field.name)]
  if lost:
    raise ValueError(f'{", ".join(lost)}: the config.json of a {config.family} cannot say it.')
  return given


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
  """Llama 2 to 3.3, DeepSeek-R1-Distill-Llama, SmolLM2."""
  _check(config, hidden_act='silu', use_sliding_window=False)
  return _plain(config)


def _mistral(config):
  """Mistral 7B, Nemo, Small (text only)."""
  _check(config, needs=['num_key_value_heads'], handles=['sliding_window'], hidden_act='silu')
  plain = _plain(config)
  window = config.get('sliding_window', 4096)
  return dataclasses.replace(plain, windows=() if window is None else (window,) * plain.num_layers)


def _qwen2(config):
  """Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen."""
  _check_qwen(config, ['num_key_value_heads'], use_mrope=False)
  return dataclasses.replace(_qwen(config), qkv_bias=True)


def _qwen3(config):
  """Qwen3 (dense)."""
  _check_qwen(config, ['num_key_value_heads', 'head_dim'])
  return dataclasses.replace(_qwen(config), qk_norm=True)


def _check_qwen(config, needs, **only):
  windows = ['sliding_window', 'max_window_layers']  # which say nothing unless use_sliding_window is true
  used, layers = config.get('use_sliding_window'), config.get('num_hidden_layers')
  _check(
      config,
      needs=[*needs, *windows] if used else needs,
      handles=['use_sliding_window', *windows, *(['layer_types'] if used else [])],
      hidden_act='silu',
      layer_types=['full_attention'] * (layers if type(layers) is int else 0),
      **only,
  )


def _qwen(config):
  """What the families of Qwen share; with windows the layers from max_window_layers on have them."""
  plain = _plain(config)
  if not config.get('use_sliding_window'):
    return plain
  first = config['max_window_layers']
  if type(first) is not int:
    raise ValueError(f'max_window_layers={first!r}: must be the number of a layer; check the config.')
  windows = _windows(config, [i >= first for i in range(plain.num_layers)])
  return dataclasses.replace(plain, windows=windows)


def _gemma2(config):
  """Gemma 2."""
  _check_gemma(config, 'attn_logit_softcapping')
  return dataclasses.replace(
      _gemma(config, pattern=2),
      attn_softcap=_positive(config, 'attn_logit_softcapping', 50.0),
      logit_softcap=_positive(config, 'final_logit_softcapping', 30.0),
  )


def _gemma3_text(config):
  """Gemma 3 (text only)."""
  _check_gemma(config, 'rope_local_base_freq', 'sliding_window_pattern', '_sliding_window_pattern')
  pattern = config.get('sliding_window_pattern') or config.get('_sliding_window_pattern') or 6
  rope = config.get('rope_parameters') or {}
  if not rope.keys() <= {'full_attention', 'sliding_attention'}:
    raise ValueError(
        f'rope_parameters={rope}: gemma3_text has one set for full_attention and one for sliding_attention; check '
        'the config.')
  full = config | {'rope_theta': config.get('rope_theta') or 1e6, 'rope_parameters': rope.get('full_attention')}
  local_theta, scaling = _rope(config | {
      'rope_theta': config.get('rope_local_base_freq') or 1e4, 'rope_scaling': None,
      'rope_parameters': rope.get('sliding_attention')})
  if scaling is not None:
    raise ValueError(f'sliding_attention with {scaling}: only plain rotary embeddings are implemented for it.')
  return dataclasses.replace(
      _gemma(full, pattern),
      qk_norm=True,
      local_rope_theta=local_theta,
      logit_softcap=_positive(config, 'final_logit_softcapping'),
  )


def _check_gemma(config, *handles):
  _check(
      config,
      needs=['num_key_value_heads', 'head_dim', 'query_pre_attn_scalar', 'sliding_window'],
      handles=['layer_types', 'final_logit_softcapping', *handles],
      hidden_act='gelu_pytorch_tanh',
      hidden_activation='gelu_pytorch_tanh',
      use_bidirectional_attention=False,
  )


def _gemma(config, pattern):
  """What the families of Gemma share; every `pattern`-th layer sees all, unless `layer_types` says otherwise."""
  plain = _plain(config, tied=True)
  return dataclasses.replace(
      plain,
      norm_offset=1.0,
      post_norms=True,
      activation='gelu_tanh',
      embed_scale=plain.embed_dim**0.5,
      query_scale=_positive(config, 'query_pre_attn_scalar') ** -0.5,
      windows=_windows(config, [(i + 1) % pattern != 0 for i in range(plain.num_layers)]),
  )


def _windows(config, slides):
  """The window of each layer, or None; `layer_types` overrules `slides`, whether a layer has the window."""
  full, sliding = 'full_attention', 'sliding_attention'
  kinds = config.get('layer_types') or [sliding if slide else full for slide in slides]
  if strange := sorted({*kinds} - {full, sliding}):
    raise ValueError(f'layer_types with {", ".join(strange)}: only {full} and {sliding} are implemented.')
  return tuple(config['sliding_window'] if kind == sliding else None for kind in kinds)


# model_type -> what reads its config; its docstring names the models.
FAMILIES = {
    'llama': _llama,
    'mistral': _mistral,
    'qwen2': _qwen2,
    'qwen3': _qwen3,
    'gemma2': _gemma2,
    'gemma3_text': _gemma3_text,
}

# What transformers calls the model of a family.
_ARCHITECTURES = {
    'llama': 'LlamaForCausalLM',
    'mistral': 'MistralForCausalLM',
    'qwen2': 'Qwen2ForCausalLM',
    'qwen3': 'Qwen3ForCausalLM',
    'gemma2': 'Gemma2ForCausalLM',
    'gemma3_text': 'Gemma3ForCausalLM',
}

# Names in transformers of decoders that, in all or some layers, carry a state from token to token, and of models around
# them.
RECURRENT = frozenset("""
bailing_hybrid bamba falcon_h1 falcon_mamba glm5_next glm5_next_text granitemoehybrid jamba kimi_linear lara_mini lfm2
lfm2_moe lfm2_vl lfm3 lfm3_vl mamba mamba2 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax nemotron_h nemotron_h_omni
olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv
xlstm zamba zamba2 zaya
""".split())

# Field of ModelConfig -> the attribute that every family needs.
_NEEDED = {
    'vocab_size': 'vocab_size',
    'embed_dim': 'hidden_size',
    'num_layers': 'num_hidden_layers',
    'num_heads': 'num_attention_heads',
    'mlp_dim': 'intermediate_size',
    'max_length': 'max_position_embeddings',
    'norm_eps': 'rms_norm_eps',
}
_TYPES = {
    'model_type': str, 'rope_scaling': dict, 'rope_parameters': dict, 'layer_types': list, 'tie_word_embeddings': bool,
    'sliding_window_pattern': int, '_sliding_window_pattern': int, 'hidden_size': int}
MAX_LAYERS = 10_000  # beyond any model; a damaged number would keep the reader busy for hours
_TYPE_NAMES = {str: 'a name', dict: 'an object or null', list: 'a list', bool: 'true or false', int: 'a whole number'}
_HANDLED = {
    *_NEEDED.values(), 'num_key_value_heads', 'head_dim', 'tie_word_embeddings', 'rope_theta', 'rope_scaling',
    'rope_parameters',
}


def _check(config, needs=(), handles=(), **only):
  """Raises for attributes that are neither handled, irrelevant nor null, and for needed ones that are absent.

  Args:
    needs: attributes that this family needs beside those of all families.
    handles: attributes that it also handles.
    only: attribute -> its one value that is implemented.
  """
  family = config['model_type']
  known = _HANDLED | {*needs, *handles} | _IRRELEVANT
  only = dict.fromkeys(('attention_bias', 'mlp_bias', 'rope_interleaved', 'is_encoder_decoder'), False) | only
  strange = [
      f'{name}={value!r}' + (f' (only {only[name]!r} is)' if name in only else '')
      for name, value in config.items()
      if name not in known and value is not None and only.get(name, ...) != value
  ]
  if strange:
    raise ValueError(
        f'{", ".join(strange)}: not implemented for model_type={family!r}, and skipping it '
        'could give a wrong model; use a checkpoint without it or implement it in models/config.py.')
  missing = [name for name in (*_NEEDED.values(), *needs) if config.get(name) is None]
  if missing:
    raise ValueError(f'the config lacks {", ".join(missing)}: a {family} needs them; complete config.json.')
  for name in ('hidden_size', 'rms_norm_eps', 'rope_theta', 'rope_local_base_freq'):
    _positive(config, name)


def _plain(config, tied=False):
  """The config without what sets its family apart; `tied` is what its family means by no `tie_word_embeddings`."""
  sizes = {ours: config[theirs] for ours, theirs in _NEEDED.items()}
  kv_heads, head_dim = config.get('num_key_value_heads'), config.get('head_dim')
  theta, scaling = _rope(config)
  return ModelConfig(
      family=config['model_type'],
      num_kv_heads=sizes['num_heads'] if kv_heads is None else kv_heads,
      head_dim=default_head_dim(sizes['embed_dim'], sizes['num_heads']) if head_dim is None else head_dim,
      rope_theta=theta,
      tie_embeddings=config.get('tie_word_embeddings', tied),
      eos_ids=eos_ids_of(config),
      rope_scaling=scaling,
      **sizes,
  )


def _rope(config):
  """The base of rotary embeddings and their scaling or None; transformers 5 calls `rope_parameters` what was
  `rope_scaling`, and keeps the base there.
  """
  old, new = config.get('rope_scaling') or {}, config.get('rope_parameters') or {}
  if any(new.get(name, value) != value for name, value in old.items()):
    raise ValueError(f'rope_scaling={old} contradicts rope_parameters={new}: keep the one that the weights belong to.')
  given = {name: value for name, value in (old | new).items() if value is not None}
  theta = _positive(given, 'rope_theta', config.get('rope_theta') or 10000.0)
  given.pop('rope_theta', None)
  kind = given.pop('type', 'default')
  kind = given.pop('rope_type', kind)
  return float(theta), _scaling(kind, given, config)


def _scaling(kind, given, config):
  """The scaling of a kind in `rope.KINDS`, whose fields are the attributes it has, or None for `default`."""
  if kind not in ('default', *rope.KINDS):
    raise ValueError(
        f'rope_type={kind!r} with {given}: only default, {", ".join(rope.KINDS)} are implemented; use a checkpoint '
        'with other rotary embeddings.')
  fields = dataclasses.fields(rope.KINDS[kind]) if kind != 'default' else ()
  names = [field.name for field in fields]
  if strange := [f'{name}={value!r}' for name, value in given.items() if name not in names]:
    raise ValueError(
        f'{", ".join(strange)}: not implemented for rope_type={kind!r}, which has {", ".join(names) or "nothing else"}'
        '; use a checkpoint with other rotary embeddings.')
  if 'original_max_position_embeddings' in names:
    given = {'original_max_position_embeddings': config['max_position_embeddings']} | given
  if missing := [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in given]:
    raise ValueError(f'rope_type={kind!r} with {given}: lacks {", ".join(missing)}; complete config.json.')
  if type(given.get('truncate', True)) is not bool:
    raise ValueError(f'truncate={given["truncate"]!r}: must be true or false; check the config.')
  values = {name: value if name == 'truncate' else float(_positive(given, name)) for name, value in given.items()}
  return rope.KINDS[kind](**values) if fields else None


def _positive(config, name, default=None):
  """The number of that name, or None for null."""
  value = config.get(name, default)
  if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
    raise ValueError(f'{name}={value!r}: must be a number above 0; check the config.')
  return value


# Attributes that say nothing about the forward pass of a trained decoder.
_IRRELEVANT = frozenset("""
_attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
initializer_range is_decoder is_llama_config label2id length_penalty max_length min_length
model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
use_bfloat16 use_cache
""".split())
