"""A tiny random verifier that takes turns: it writes letters, and ends what it writes now and then."""

import string

import jax
import jax.numpy as jnp

from cactus_jax.models import transformer
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.transformer import Transformer
from tests import fakes

TOKENIZER = fakes.byte_tokenizer()
VOCAB = len(TOKENIZER)  # one less than the embedding has, as many models pad theirs
CONFIG = ModelConfig(
    family='llama', vocab_size=VOCAB + 1, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    mlp_dim=48, max_length=96, norm_eps=1e-5, rope_theta=1000.0, tie_embeddings=False,
    eos_ids=(TOKENIZER.eos_token_id,))


def talker(seed=0, certainty=2.5) -> Transformer:
  """The verifier. One number of its hidden state is the same for all tokens, and lifts letters and the
  end in its law."""
  params = transformer.random_params(jax.random.key(seed), CONFIG)
  letters = jnp.array(TOKENIZER.convert_tokens_to_ids(list(string.ascii_letters)))
  head = (certainty * params.head).at[:, 0].set(-6.0).at[letters, 0].set(0.0)
  head = head.at[TOKENIZER.eos_token_id].set(0.0).at[TOKENIZER.eos_token_id, 0].set(3.4)
  return Transformer(params.replace(embed=params.embed.at[:, 0].set(2.0), head=head), CONFIG)
