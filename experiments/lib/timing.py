"""Timing of what a decoder is made of: arms that take turns, so that a machine whose speed drifts drifts for all."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import cactus_jax as cj

STEPS = 8  # rounds or passes timed together, so that calling a compiled program is not counted as running it


def measure(arms, repeats):
  """Median seconds of each arm; the arms take turns and the first turn, which compiles, is not counted."""
  times = {name: [] for name in arms}
  for turn in range(repeats + 1):
    for name, run in arms.items():
      start = time.perf_counter()
      run(turn)
      if turn:
        times[name].append(time.perf_counter() - start)
  return {name: float(np.median(seconds)) for name, seconds in times.items()}


@functools.partial(jax.jit, donate_argnames='cache')
def _passes(model, tokens, positions, cache):
  one = lambda _, carry: model(tokens, positions, carry[1])
  return jax.lax.fori_loop(0, STEPS, one, (jnp.zeros((*tokens.shape, model.config.vocab_size)), cache))


def forward(model, batch, width, capacity):
  """An arm: `STEPS` bare forward passes over `width` tokens a row."""
  tokens = jnp.ones((batch, width), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
  held = [None, jax.jit(lambda model: model.init_cache(batch, capacity))(model)]

  def run(_):
    held[:] = jax.block_until_ready(_passes(model, tokens, positions, held[1]))

  return run


def plain(model, batch, config, sampling):
  """An arm: `STEPS` rounds of plain decoding after a prompt of 64 tokens."""
  prompt, length = jnp.ones((batch, 64), jnp.int32), jnp.full(batch, 64)
  keys = jax.random.split(jax.random.key(0), batch)
  held = [cj.prefill(model, None, prompt, length, keys, length + config.max_length, config)]

  def run(_):
    state = held[0].replace(length=jnp.full(batch, 64, jnp.int32))
    held[0] = jax.block_until_ready(cj.generate(model, None, cj.Exact(), sampling, state, config, max_rounds=STEPS))

  return run
