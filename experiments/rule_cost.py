"""What one verification costs by each rule, beside the paper's PyTorch formulation on the same laws, in one run.

  python experiments/rule_cost.py                       # 5 minutes on 2 CPU cores, half of them for the slowest arms
  python experiments/rule_cost.py --rules=exact,cactus,clamp --repeats=15
  python experiments/rule_cost.py --batch=2 --num_draft=3 --vocab=512           # seconds, to see that it runs

No model is run: the laws are synthetic, Zipf-like, and made once. A verification is acceptance, recovery and bonus of
all rows. Arms take turns, so that a machine whose speed drifts drifts for all of them. Temporary memory is that of the
compiled program, in arrays of the size of all draft laws, [B, K, V]. With the ledger, what a rule spends is accounted
for too. With filters laws have few tokens: the same rules then run on compact laws over the tokens that p or q can
emit, which are made beforehand. torch (extra: torch) is left out where not installed.
"""

import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from lib import flags as common
from lib import record

import cactus_jax as cj
from cactus_jax import ledger, sampling, verify
from cactus_jax.records import per_row

_BATCH = flags.DEFINE_integer('batch', 8, 'Rows.')
_VOCAB = flags.DEFINE_integer('vocab', 151936, 'Size of the vocabulary; the default is that of Qwen3.')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'Repeats of each arm.', allow_override=True)
_RULES = flags.DEFINE_list('rules', list(cj.RULES), 'What to compare.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to append the figures to.', allow_override=True)

# The numbers of each rule: those of its paper or of engines where there are such, else moderate ones.
NUMBERS = {
    'exact': {},
    'cactus': {'delta': 1.0},
    'cactus_exact': {'delta': 1.0},
    'clamp': {'tau': 1.0},
    'lenience': {'b': 2.0},
    'mentored': {'limit': 0.1},
    'interpolation': {'alpha': 0.5},
    'chow': {'alpha': 0.5},
    'diff': {'alpha': 0.1},
    'opt': {'alpha': 0.1},
    'token_v1': {'alpha': 0.1},
    'token_v2': {'alpha': 0.1},
    'token_v3': {'alpha': 0.5},
    'threshold': {'threshold': 0.1},
    'typical': {},
    'top_k': {'k': 5},
    'logit_margin': {'margin': 1.0},
}
BY_BLOCK = ('exact', 'clamp')
WITH_LEDGER = ('exact', 'cactus', 'clamp')
BLOCK, LEDGER, COMPACT = ', by block', ', ledger', ', compact'  # how an arm differs from its rule by itself
SETTINGS = {
    'T 1, all tokens': cj.SamplingParams(),
    'T 0.6, top-k 20, top-p 0.95': cj.SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
}
WIDTH = 128  # tokens of a compact law: two supports of 64
EXPONENTS, NOISE = (1.0, 2.5), 0.7  # Zipf exponents of the verifier's laws; how far the draft's logits are from its
FAST, SLOW = 0.05, 2.0  # seconds: a turn takes at least FAST; an arm that takes longer than SLOW is run only once


def make_laws(batch, num_draft, vocab, params, seed=0):
  """A draft drawn from its laws, and the verifier's laws: at T = 1 Zipf-like, with 2.4 nats of entropy on average.

  Exponential variables times s are the logits of a Zipf law of exponent s; each position has its own s. The draft's
  logits are the verifier's and noise.
  """
  verifier_key, noise_key, exponent_key, token_key = jax.random.split(jax.random.key(seed), 4)
  params = per_row(params, batch)
  exponent = jax.random.uniform(exponent_key, (batch, num_draft + 1, 1), minval=EXPONENTS[0], maxval=EXPONENTS[1])
  logits_BTV = exponent * jax.random.exponential(verifier_key, (batch, num_draft + 1, vocab))
  noise_BKV = NOISE * jax.random.normal(noise_key, (batch, num_draft, vocab))
  draft_BKV = sampling.to_probs(logits_BTV[:, :num_draft] + noise_BKV, params)
  tokens = sampling.sample(draft_BKV.reshape(-1, vocab), jax.random.uniform(token_key, (batch * num_draft,)))
  draft = cj.Draft(tokens=tokens.reshape(batch, num_draft), probs=draft_BKV, num_drafted=jnp.full(batch, num_draft))
  return draft, sampling.to_probs(logits_BTV, params)


def compact(draft, target_probs, width=WIDTH):
  """The same laws over the tokens that either gives any probability, renumbered in their order.

  Rules look at probabilities and at equality of tokens only, so they, and verification, run on these as they are.
  Returns: `Draft`, target_probs f32[B, K+1, width], and the tokens' ids i32[B, K+1, width], -1 where there is none.
  Raises: ValueError if a position needs more than `width` tokens.
  """
  draft, target_BTV = jax.device_get((draft, target_probs))
  B, K = draft.tokens.shape
  ids = np.full((B, K + 1, width), -1, np.int32)
  for b, t in np.ndindex(B, K + 1):
    support = np.flatnonzero((target_BTV[b, t] > 0) | ((draft.probs[b, t] > 0) if t < K else False))
    if len(support) > width:
      raise ValueError(f'a law and its draft\'s have {len(support)} tokens together: compact laws hold {width}.')
    ids[b, t, :len(support)] = support
  of = lambda laws, ids: np.where(ids >= 0, np.take_along_axis(laws, np.maximum(ids, 0), axis=-1), np.float32(0))
  tokens = np.argmax(ids[:, :K] == draft.tokens[..., None], axis=-1).astype(np.int32)
  small = cj.Draft(tokens=tokens, probs=of(draft.probs, ids[:, :K]), num_drafted=draft.num_drafted)
  return *jax.tree.map(jnp.asarray, (small, of(target_BTV, ids))), ids


def plain(rule, draft, target_probs, keys):
  """A verification: num_accepted and next_token, both i32[B]."""
  verdict = verify.verify(rule, draft, target_probs, keys)
  return verdict.num_accepted, verdict.next_token


def by_block(rule, draft, target_probs, keys):
  """The same, a block at a time."""
  verdict = verify.verify_block(rule, draft, target_probs, keys)
  return verdict.num_accepted, verdict.next_token


def with_ledger(rule, draft, target_probs, keys):
  """As `plain`, and then the ledger of a first round in which every token was still asked for."""
  B, K = draft.tokens.shape
  num_accepted, next_token = plain(rule, draft, target_probs, keys)
  slots_BT = jnp.broadcast_to(jnp.arange(K + 1), (B, K + 1))
  block_BT = jnp.where(
      slots_BT == num_accepted[:, None], next_token[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))))
  charges = ledger.charge(rule, draft, target_probs, target_probs)
  spent = ledger.record(ledger.empty(B, K + 1), rule, charges, draft, target_probs, target_probs, block_BT,
                        slots_BT <= num_accepted[:, None], slots_BT)
  return num_accepted, next_token, spent


def torch_relaxed(draft_BKV, target_BKV, tokens_BK, delta):
  """Cactus as the paper's released code has it: the law h of every drafted position is made whole.

  In place where that is possible. Returns: accept_prob f32[B, K] and recovery f32[B, K, V] of all positions.
  """
  import torch

  at = tokens_BK[..., None]
  draft, target = draft_BKV.gather(-1, at), target_BKV.gather(-1, at)
  gamma = (target + (2 * delta * target * (1 - target)).clamp(min=0).sqrt()).clamp(max=1)
  scale = torch.where(target < 1, (1 - gamma) / (1 - target), 1.0)
  law = (target_BKV * scale).scatter_(-1, at, gamma)
  recovery = law.sub_(draft_BKV).clamp_(min=0)
  recovery.div_(recovery.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny))
  return (gamma / draft)[..., 0].clamp(max=1), recovery


def torch_verify(draft_BKV, target_BTV, tokens_BK, delta, noise_BKV=None):
  """A verification by that formulation: recovered tokens of all positions, of which the first rejection takes one.

  Args: noise_BKV, exponential variables, where those of the recovery are not to be drawn here.
  Returns: num_accepted, next_token, both i64[B].
  """
  import torch

  K = tokens_BK.shape[1]
  accept_BK, recovery_BKV = torch_relaxed(draft_BKV, target_BTV[:, :K], tokens_BK, delta)
  accepted_BK = torch.rand(accept_BK.shape) < accept_BK
  noise_BKV = torch.empty_like(recovery_BKV).exponential_() if noise_BKV is None else noise_BKV
  recovered_BK = recovery_BKV.div_(noise_BKV).argmax(-1)
  bonus_B = (target_BTV[:, K] / torch.empty_like(target_BTV[:, K]).exponential_()).argmax(-1)
  num_accepted = accepted_BK.long().cumprod(1).sum(1)
  return num_accepted, torch.cat([recovered_BK, bonus_B[:, None]], 1).gather(1, num_accepted[:, None])[:, 0]


def torch_arms(laws):
  """Arms of `torch_verify`; none, and a line that says so, where torch is not installed."""
  if importlib.util.find_spec('torch') is None:
    print('torch: left out, it is not installed (pip install -e .[torch])')
    return {}
  import torch

  draft, target_probs = laws
  draft_BKV, target_BTV = torch.from_dlpack(draft.probs), torch.from_dlpack(target_probs)
  tokens_BK = torch.from_dlpack(draft.tokens).long()
  noise_BKV = torch.empty_like(draft_BKV).exponential_()

  def arm(noise_BKV):
    def run(_):
      with torch.inference_mode():
        return torch_verify(draft_BKV, target_BTV, tokens_BK, NUMBERS['cactus']['delta'], noise_BKV)[0].numpy()

    return run

  return {'torch': arm(None), 'torch, noise given': arm(noise_BKV)}


class Program:
  """A compiled verification by one rule, for laws of one shape."""

  def __init__(self, function, rule, laws):
    draft, target_probs = laws
    self._rule = per_row(rule, len(draft.tokens))
    keys = jax.random.split(jax.random.key(0), len(draft.tokens))
    self._compiled = jax.jit(function).lower(self._rule, draft, target_probs, keys).compile()
    self.temporaries = self._compiled.memory_analysis().temp_size_in_bytes / draft.probs.nbytes  # in arrays [B, K, V]

  def arm(self, laws, keys):
    """A function of the turn that runs the program on these laws, with that turn's keys, and returns num_accepted."""

    def run(turn):
      return jax.block_until_ready(self._compiled(self._rule, *laws, keys[turn]))[0]

    return run


def make_rule(name):
  """The rule of that name with its numbers from the table."""
  return cj.RULES[name](**NUMBERS[name])


def compiled(names, laws):
  """{arm: `Program`} of these rules: each by itself, and the few that are also run by block and with the ledger."""
  arms = {name: (plain, name) for name in names}
  arms |= {name + BLOCK: (by_block, name) for name in names if name in BY_BLOCK}
  arms |= {name + LEDGER: (with_ledger, name) for name in names if name in WITH_LEDGER}
  return {arm: Program(function, make_rule(name), laws) for arm, (function, name) in arms.items()}


def measure(arms, repeats):
  """{arm: (median seconds a call, mean num_accepted, turns)}; arms take turns, and the first turn is not counted.

  A fast arm is called several times a turn, on the same keys. One that is slow is called once in all, and that counts.
  """
  times, kept = {arm: [] for arm in arms}, {arm: [] for arm in arms}
  for turn in range(repeats + 1):
    for arm, run in arms.items():
      if turn and times[arm] and times[arm][0] > SLOW:
        continue
      calls, spent, start = 0, 0.0, time.perf_counter()
      while not calls or spent < FAST:
        num_accepted, calls, spent = run(turn), calls + 1, time.perf_counter() - start
      if turn or spent > SLOW:
        times[arm].append(spent / calls)
        kept[arm].append(np.mean(num_accepted))
  return {arm: (float(np.median(times[arm])), float(np.mean(kept[arm])), len(times[arm])) for arm in arms}


def disagreement(rule, laws, compact_laws):
  """The largest difference that compact laws make to the acceptance probabilities of the first row."""
  K = laws[0].tokens.shape[1]
  accept = lambda draft, target_probs: jax.vmap(rule.accept_prob)(draft.probs[0], target_probs[0, :K], draft.tokens[0])
  return float(jnp.max(jnp.abs(accept(*laws) - accept(*compact_laws))))


def compare(setting, laws, programs, compact_laws):
  """The figures of every arm in one setting, and the bytes a second at which its laws can be read."""
  draft, target_probs = laws
  keys = [jax.random.split(jax.random.key(turn), len(draft.tokens)) for turn in range(_REPEATS.value + 1)]
  read = jax.jit(lambda draft_BKV, target_BTV: jnp.sum(draft_BKV) + jnp.sum(target_BTV))
  arms = {'read': lambda _: read(draft.probs, target_probs).block_until_ready()}
  arms |= {arm: program.arm(laws, keys) for arm, program in programs.items()} | torch_arms(laws)
  differs = {}
  if compact_laws:
    smaller = compiled(_RULES.value, compact_laws)
    arms |= {arm + COMPACT: program.arm(compact_laws, keys) for arm, program in smaller.items()}
    differs = {name: disagreement(make_rule(name), laws, compact_laws) for name in _RULES.value}
    assert max(differs.values()) < 1e-3, f'on compact laws a rule should accept as it does on whole ones: {differs}'
  measured = measure(arms, _REPEATS.value)
  seconds = {arm: duration for arm, (duration, _, _) in measured.items()}
  over = lambda arm, base: seconds[arm] / seconds[base] if base in seconds else None
  figures = [{
      'setting': setting,
      'arm': arm,
      'numbers': NUMBERS.get(arm.partition(',')[0]),
      'kept': kept,
      'turns': turns,
      'ms': 1e3 * duration,
      'times_exact': over(arm, 'exact'),
      'times_torch': over(arm, 'torch'),
      'times_without_ledger': over(arm, arm.removesuffix(LEDGER)) if arm.endswith(LEDGER) else None,
      'temporaries': programs[arm].temporaries if arm in programs else None,
      'compact_ms': 1e3 * seconds[arm + COMPACT] if arm + COMPACT in seconds else None,
      'times_compact': over(arm, arm + COMPACT),
      'compact_differs': differs.get(arm),
  } for arm, (duration, kept, turns) in measured.items() if arm != 'read' and not arm.endswith(COMPACT)]
  return figures, (draft.probs.nbytes + target_probs.nbytes) / seconds['read']


def table(first, figures, *columns):
  """Prints a line for each figure: its arm, then (heading, field, format) for each column; a dash for None."""
  print(f'\n  {first:24s}' + ''.join(f'{heading:>14s}' for heading, _, _ in columns))
  for figure in figures:
    cells = ('-' if figure[field] is None else format(figure[field], form) for _, field, form in columns)
    print(f'  {figure["arm"]:24s}' + ''.join(f'{cell:>14s}' for cell in cells), flush=True)


def report(figures, bandwidth, laws):
  """Prints the tables of one setting, and what the bandwidth allows."""
  turns, ms, temporaries = ('turns', 'turns', 'd'), ('ms', 'ms', '.2f'), ('temporaries', 'temporaries', '.2f')
  with_ledger = [figure for figure in figures if figure['arm'].endswith(LEDGER)]
  table('rule', [figure for figure in figures if figure not in with_ledger], ('kept', 'kept', '.2f'), turns, ms,
        ('x exact', 'times_exact', '.2f'), ('x torch', 'times_torch', '.4f'), temporaries)
  if with_ledger:
    table('with the ledger', with_ledger, turns, ms, ('x without', 'times_without_ledger', '.1f'), temporaries)
  on_compact = [figure for figure in figures if figure['compact_ms'] is not None]
  if on_compact:
    table('on compact laws', on_compact, ('ms', 'compact_ms', '.3f'), ('x faster', 'times_compact', '.1f'),
          ('differs by', 'compact_differs', '.0e'))
  print()
  of_arm = {figure['arm']: figure['ms'] for figure in figures}
  B, K, V = laws[0].probs.shape
  for what, num_laws, arms in (('two laws a row, for a verification', 2 * B, ('exact', 'cactus')),
                               ('two laws a position, for the ledger', 2 * B * K, ('exact' + LEDGER,))):
    bound = 1e3 * num_laws * V * 4 / bandwidth
    reached = ', '.join(f'{arm}: {of_arm[arm] / bound:.1f} times that' for arm in arms if arm in of_arm)
    print(f'  reading {what}: {bound:.2f} ms at {bandwidth / 1e9:.1f} GB/s; {reached or "-"}', flush=True)


def check_flags():
  """Raises ValueError for a flag that cannot be used."""
  common.refuse(['rule', *common.RULE_FIELDS, 'static', 'block_verification', 'ledger', 'stop_entropy'],
                'all rules are measured')
  common.refuse(['verifier', 'draft', 'max_new_tokens', 'stop', 'seed', 'raw', *common.MODEL_FLAGS], 'no model is run')
  common.refuse(['temperature', 'top_k', 'top_p', 'min_p'], 'the two settings are fixed')
  least = {'batch': (_BATCH.value, 1), 'num_draft': (common.num_draft(), 1), 'vocab': (_VOCAB.value, 2),
           'repeats': (_REPEATS.value, 1)}
  for name, (value, need) in least.items():
    if value < need:
      raise ValueError(f'--{name}={value}: need at least {need}.')
  unknown = [name for name in _RULES.value if name not in cj.RULES]
  if unknown or not _RULES.value:
    raise ValueError(f'--rules={",".join(_RULES.value)}: need one or more of {", ".join(cj.RULES)}.')


def main():
  """Prints the tables, and appends their figures to --output."""
  check_flags()
  rows = record.Rows(_OUTPUT.value) if _OUTPUT.value else None
  shape = _BATCH.value, common.num_draft(), _VOCAB.value
  machine = common.machine()
  print(f'B={shape[0]} rows, K={shape[1]} drafted tokens, V={shape[2]}; medians of {_REPEATS.value} turns (one call of '
        f'arms that take over {SLOW:.0f} s); {machine}', flush=True)
  make = jax.jit(make_laws, static_argnums=(0, 1, 2))
  programs = None
  for setting, params in SETTINGS.items():
    laws = jax.block_until_ready(make(*shape, params))
    overlap = jnp.mean(jnp.sum(jnp.minimum(laws[0].probs, laws[1][:, :-1]), axis=-1))
    print(f'\n{setting}: speculative sampling keeps {100 * overlap:.0f}% of the tokens that it tests', flush=True)
    programs = programs or compiled(_RULES.value, laws)
    compact_laws = compact(*laws)[:2] if params.top_k else None
    figures, bandwidth = compare(setting, laws, programs, compact_laws)
    report(figures, bandwidth, laws)
    for figure in figures if rows else ():
      rows.append({'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__, 'batch': shape[0], 'num_draft': shape[1],
                   'vocab': shape[2], 'bandwidth': bandwidth, **figure})


if __name__ == '__main__':
  common.set_defaults(num_draft=20)
  common.run(main)
