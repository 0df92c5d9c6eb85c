"""Models whose law is known, so that what the decoder emits can be compared with it, and helpers to run them."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from cactus_jax import decode
from cactus_jax.rules import Exact
from cactus_jax.sampling import SamplingParams


@flax.struct.dataclass
class MarkovLM:
  """A second-order Markov chain as a LanguageModel: the next token's law depends on the last two tokens.

  Its cache holds the tokens it has read, and the older of the two is taken from there: a decoder that feeds a wrong
  position or does not top up a cache gets a wrong law. The token before the first counts as 0.
  """

  logits_VVV: jax.Array

  def __call__(self, tokens_BT, positions_BT, cache_BS):
    rows = jnp.arange(tokens_BT.shape[0])[:, None]
    cache_BS = cache_BS.at[rows, positions_BT].set(tokens_BT, mode='drop')
    before_BT = jnp.where(positions_BT > 0, cache_BS[rows, jnp.maximum(positions_BT - 1, 0)], 0)
    return self.logits_VVV[before_BT, cache_BS[rows, positions_BT]], cache_BS

  def init_cache(self, batch, length):
    return jnp.full((batch, length), self.logits_VVV.shape[0] - 1, jnp.int32)


# The usual shape of a run; tests that keep to it share one compiled loop.
BATCH, VOCAB, MAX_LENGTH = 24, 12, 210


def usual_config(num_draft=3, eos_ids=()):
  return decode.DecodeConfig(num_draft=num_draft, max_length=MAX_LENGTH, vocab_size=VOCAB, eos_ids=eos_ids)


def random_markov(seed, vocab, scale=1.5):
  """A chain with normal logits; a larger scale makes it more certain."""
  return MarkovLM(jnp.asarray(np.random.default_rng(seed).normal(size=(vocab,) * 3) * scale, jnp.float32))


def near(chain, seed, noise=0.7):
  """A chain like another, as a good draft is."""
  normal = np.random.default_rng(seed).normal(size=chain.logits_VVV.shape)
  return MarkovLM(chain.logits_VVV + jnp.asarray(noise * normal, jnp.float32))


def cycle(vocab, certainty=30.0, step=1):
  """A chain that follows token t with t + step (mod vocab), all but surely."""
  following = (np.arange(vocab) + step) % vocab
  logits_VV = certainty * np.eye(vocab)[following]
  return MarkovLM(jnp.asarray(np.broadcast_to(logits_VV, (vocab,) * 3), jnp.float32))


def padded(chain, extra):
  """The same chain with `extra` more ids, as padded embeddings have; their logits are the largest of all."""
  wide = jnp.pad(chain.logits_VVV, [(0, extra)] * 3)
  return MarkovLM(wide.at[:, :, wide.shape[0] - extra :].set(60.0))


def next_logits(chain, text):
  """The logits of the token after a text."""
  return np.asarray(chain.logits_VVV)[text[-2] if len(text) > 1 else 0, text[-1]]


@flax.struct.dataclass
class Broken:
  """A model whose row b returns `value` for logits from position `since[b]` on."""

  model: MarkovLM
  since: jax.Array  # i32[B]
  value: float = float('nan')

  def __call__(self, tokens_BT, positions_BT, cache):
    logits_BTV, cache = self.model(tokens_BT, positions_BT, cache)
    return jnp.where((positions_BT >= self.since[:, None])[..., None], self.value, logits_BTV), cache

  def init_cache(self, batch, length):
    return self.model.init_cache(batch, length)


def start(target, draft, *, prompts, max_new, config, seed=0, rows=None, width=None, fill=0):
  """The state after prefill. Row i has the key of `rows[i]` (default: its own number); prompts are padded to width."""
  length = np.array([len(prompt) for prompt in prompts], np.int32)
  width = max(length) if width is None else width
  prompt_BP = np.array([list(prompt) + [fill] * (width - len(prompt)) for prompt in prompts], np.int32)
  rows = np.arange(len(prompts)) if rows is None else rows
  keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(rows, jnp.int32))
  limit = length + np.asarray(max_new, np.int32)
  return decode.prefill(target, draft, prompt_BP, length, keys, limit, config)


def run(target, draft, *, rule=Exact(), sampling=SamplingParams(), max_rounds=None, **start_args):
  """The finished state on the host."""
  state = start(target, draft, **start_args)
  return on_host(decode.generate(target, draft, rule, sampling, state, start_args['config'], max_rounds))


_call = jax.jit(lambda model, *arguments: model(*arguments)[0])


def logits(model, tokens_BT):
  """Of whole rows in one pass, f32[B, T, V] on the host."""
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  return np.asarray(_call(model, jnp.asarray(tokens_BT), positions_BT, model.init_cache(*tokens_BT.shape)))


def on_host(state):
  """The state as numpy arrays, without its keys."""
  return jax.tree.map(np.asarray, state.replace(keys=None))


def texts(state):
  """The tokens of each row, prompt included."""
  return [row[:length].tolist() for row, length in zip(state.tokens, state.length)]


@dataclasses.dataclass(frozen=True)
class FakeConfig:
  """What is asked of a model's config before its programs are made."""

  vocab_size: int
  max_length: int = 4096
  eos_ids: tuple[int, ...] = ()


@flax.struct.dataclass
class ScriptedLM:
  """A model that says script_BS[b, p + 1] after position p, whatever it has read.

  A script of -1 gives NaN there. One script serves any number of rows.
  """

  script_BS: jax.Array
  certainty: jax.Array  # f32[], logit of the scripted token; 0 gives a flat law
  config: FakeConfig = flax.struct.field(pytree_node=False)

  def __call__(self, tokens_BT, positions_BT, cache):
    script_BS = jnp.broadcast_to(self.script_BS, (positions_BT.shape[0], self.script_BS.shape[1]))
    following_BT = jnp.take_along_axis(script_BS, positions_BT + 1, axis=1)
    logits_BTV = self.certainty * jax.nn.one_hot(following_BT, self.config.vocab_size)
    return jnp.where(following_BT[..., None] < 0, jnp.nan, logits_BTV), cache

  def init_cache(self, batch, length):
    return jnp.zeros((batch, length), bool)


def scripted(scripts, config, certainty=30.0, width=256):
  """A `ScriptedLM` of rows of token ids, prompts included; after its end a row repeats its last token."""
  script_BS = np.array([list(ids) + [ids[-1]] * (width - len(ids)) for ids in scripts], np.int32)
  return ScriptedLM(jnp.asarray(script_BS), jnp.float32(certainty), config)


MERGES = [('ð', 'Ł'), ('Ġ', 'ðŁ'), ('æ', 'Ĺ'), ('t', 'h'), ('th', 'e'), ('Ġ', 'the'), ('o', 'p')]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    '{% if add_generation_prompt %}<|assistant|>{% endif %}')


def byte_tokenizer(extra=(), chat_template=CHAT_TEMPLATE):
  """A byte-level BPE tokenizer: bytes, a few merges that split characters unevenly, four special tokens.

  Args: extra, special tokens that follow the four.
  """
  import transformers  # takes a second, which the tests without text should not pay

  symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
  model = tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=MERGES)
  core = tokenizers.Tokenizer(model)
  core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  core.decoder = tokenizers.decoders.ByteLevel()
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=core, eos_token='<|end|>',
      additional_special_tokens=['<|user|>', '<|assistant|>', '<|system|>', *extra])
  tokenizer.chat_template = chat_template
  return tokenizer
