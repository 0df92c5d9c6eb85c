"""cactus_jax: speculative decoding with a divergence budget, in JAX.

Dimension letters, as in logits_BTV:
  B rows   S slots of a buffer   T tokens of this pass   K drafted tokens a round   V vocabulary   D embedding
  N query heads   G key/value heads   R = N / G   H head dimension   F mlp width   P prompt slots
"""
