"""Models whose law is known: what the decoder emits can be compared with it exactly."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


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


def random_markov(seed, vocab, scale=1.5):
  """A chain with normal logits; a larger scale makes it more certain."""
  return MarkovLM(jnp.asarray(np.random.default_rng(seed).normal(size=(vocab,) * 3) * scale, jnp.float32))
