"""Draft sources that are no second model. Each proposes from the tokens at hand and says by which law."""

import abc

import jax
import jax.numpy as jnp

from cactus_jax.records import record_class, static
from cactus_jax.sampling import Draft


class DraftSource(abc.ABC):
  """Proposes tokens from those already there, on device; it has no weights and no cache."""

  @abc.abstractmethod
  def propose(self, tokens, length, num_draft, vocab_size) -> Draft:
    """A draft of up to num_draft tokens to follow tokens[b, :length[b]].

    Args: tokens i32[B, S], garbage from length on; length i32[B]; num_draft, vocab_size static.
    """


@record_class
class PromptLookup(DraftSource):
  """Copies what followed the latest earlier occurrence of the last few tokens.

  The longest match of at most `ngram` tokens wins, then the latest; without any, nothing is proposed. A match so late
  that its continuation runs into the present is continued with its own period. The proposal is certain, so its law is
  one-hot: under speculative sampling it is kept with the verifier's probability, and the text stays exact.

  Source: prompt lookup decoding (Saxena, 2023); Draft & Verify without a model.
  """

  ngram: int = static(3)

  def __post_init__(self):
    if not isinstance(self.ngram, int) or self.ngram < 1:
      raise ValueError(f'ngram={self.ngram!r}: prompt lookup matches the last 1 or more tokens; 3 is a good start.')

  def propose(self, tokens, length, num_draft, vocab_size):
    """See `DraftSource`; num_drafted is num_draft where an earlier occurrence exists, else 0."""
    drafted, found = jax.vmap(self._continue_row, (0, 0, None))(tokens, length, num_draft)
    return Draft(
        tokens=drafted,
        probs=jax.nn.one_hot(drafted, vocab_size, dtype=jnp.float32),
        num_drafted=jnp.where(found, num_draft, 0).astype(jnp.int32),
    )

  def _continue_row(self, tokens, length, num_draft):
    slots = jnp.arange(tokens.shape[0])
    matching = slots < length - 1
    score = jnp.zeros_like(slots)
    for back in range(self.ngram):  # whether the `back + 1` tokens that end at each slot are those that end the text
      shifted = jnp.roll(tokens, back)
      matching &= (slots >= back) & (shifted == tokens[jnp.maximum(length - 1 - back, 0)])
      score += matching
    end = jnp.argmax(score * tokens.shape[0] + slots * (score > 0))
    period = jnp.maximum(length - 1 - end, 1)
    copied = tokens[end + 1 + jnp.arange(num_draft) % period]
    return copied, score[end] > 0
