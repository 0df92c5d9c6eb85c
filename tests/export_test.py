"""The programs lower for GPUs and TPUs on a machine that has neither."""

import re

import jax
import jax.export
import jax.numpy as jnp
import pytest

import cactus_jax as cj
from cactus_jax import decode
from cactus_jax.models import config, transformer

BATCH, PROMPT = 2, 8
DECODE = decode.DecodeConfig(num_draft=3, max_length=32, vocab_size=64, eos_ids=(0,), ledger=True)
RULES = pytest.mark.parametrize('rule', [cj.Exact(), cj.Cactus(1.0)], ids=['exact', 'cactus'])
PLATFORMS = pytest.mark.parametrize('platform', ['cuda', 'tpu'])


def model(seed, num_layers, dtype=jnp.bfloat16):
  sizes = config.ModelConfig('qwen3', vocab_size=64, embed_dim=32, num_layers=num_layers, num_heads=4, num_kv_heads=2,
                             head_dim=8, mlp_dim=48, max_length=64, norm_eps=1e-6, rope_theta=1e4, tie_embeddings=True,
                             qk_norm=True)
  return cj.Transformer(transformer.random_params(jax.random.key(seed), sizes, dtype), sizes)


def inputs(batch=BATCH):
  """Arguments of prefill but its config."""
  number = jnp.full(batch, PROMPT, jnp.int32)
  prompts = jnp.ones((batch, PROMPT), jnp.int32)
  return model(0, 2), model(1, 1), prompts, number, jax.random.split(jax.random.key(2), batch), number + 16


def arguments(rule, batch=BATCH):
  """Arguments of a round but its config."""
  target, draft, *rest = inputs(batch)
  state = jax.eval_shape(lambda *rest: decode._prefill(target, draft, *rest, DECODE), *rest)
  rule, sampling = decode.settled(rule, cj.SamplingParams(top_k=20, top_p=0.9), batch, draft, DECODE)
  return target, draft, rule, sampling, state


def lowered(platform, program, *given):
  """The exported program, which has nothing in it that only some machines have, or that asks the host."""
  exported = jax.export.export(program, platforms=[platform])(*given, config=DECODE)
  assert exported.platforms == (platform,)
  assert re.findall(r'custom_call @[\w.]+|infeed|outfeed', exported.mlir_module()) == []
  return exported


@PLATFORMS
def test_prefill_lowers(platform):
  lowered(platform, decode._program(decode._prefill), *inputs())


@PLATFORMS
@RULES
@pytest.mark.parametrize('batch', [1, BATCH])
def test_a_round_lowers(platform, rule, batch):
  lowered(platform, decode._program(decode._decode_step), *arguments(rule, batch))


@PLATFORMS
@RULES
@pytest.mark.parametrize('batch', [1, BATCH])
def test_the_loop_lowers(platform, rule, batch):
  given = arguments(rule, batch)
  bounds = jnp.int32(5), jnp.int32(1)
  exported = lowered(platform, decode._program(decode._generate, donate_argnames='state'), *given, *bounds)
  state = jax.tree.leaves(given[-1])
  assert [(x.shape, x.dtype) for x in exported.out_avals] == [(x.shape, x.dtype) for x in state]


@RULES
@pytest.mark.parametrize('draft', [cj.PromptLookup(), None], ids=['lookup', 'plain'])
def test_the_loop_lowers_for_gpus_with_any_draft(rule, draft):
  target, _, _, sampling, _ = arguments(rule)
  state = jax.eval_shape(lambda *rest: decode._prefill(target, draft, *rest, DECODE), *inputs()[2:])
  rule, _ = decode.settled(rule, sampling, BATCH, draft, DECODE)
  lowered('cuda', decode._program(decode._generate), target, draft, rule, sampling, state, jnp.int32(5), jnp.int32(1))


def test_a_program_that_asks_the_host_does_not_lower():
  def program(x, config):
    jax.debug.print('{}', x)
    return x

  with pytest.raises(ValueError, match='cpu is different from the lowering platform cuda'):
    lowered('cuda', jax.jit(program, static_argnames='config'), jnp.float32(1))
