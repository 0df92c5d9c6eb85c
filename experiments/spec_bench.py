"""What a draft gains on prompts of many kinds, by category: acceptance, accepted length, speed against plain decoding.

  python experiments/spec_bench.py --data=spec_bench.jsonl                       # 2 prompts of each category
  python experiments/spec_bench.py --data=spec_bench.jsonl --per_category=5 --rule=clamp --tau=0.6 --output=rows.jsonl

The file is Spec-Bench's (Xia et al., 2024), one JSON object a line with `category` and `turns`, of which the first is
answered; or any JSONL with --turns_field and --category_field. An arm is a rule and how many tokens are drafted:
exact:3, rule:3 for the rule of --rule (cactus, with delta 1), or exact:auto, as many as decode fastest. Arms take turns
on each prompt, after a turn that compiles if none of that shape has, and are timed from prompt to last token; speeds
are sums over prompts. (What exact:auto compiles on the way is left out of its time.)
Acceptance is the mean of sum min(p, q) at the first drafted token of each round of the exact rule: from the laws, so
without luck of the draw.
"""

import os
import time

import jax
import numpy as np
from absl import flags
from lib import flags as common
from lib import record
from tqdm.auto import tqdm

import cactus_jax as cj
from cactus_jax import text

_DATA = flags.DEFINE_string('data', None, 'JSONL of prompts.')
_PROMPT_FIELD = flags.DEFINE_string('turns_field', 'turns', 'Where a line has its prompt: a string, or strings, of '
                                    'which the first is taken.')
_CATEGORY_FIELD = flags.DEFINE_string('category_field', 'category', 'Where a line has its category; one without has '
                                      'that of the file.')
_PER_CATEGORY = flags.DEFINE_integer('per_category', 2, 'Prompts of each category.', 1)
_MAX_PROMPT = flags.DEFINE_integer('longest_prompt', 512, 'Longer prompts are passed over, tokens.')
_ARMS = flags.DEFINE_list(
    'arms', ['exact:2', 'exact:3', 'exact:5', 'exact:auto', 'rule:3', 'rule:5', 'rule:auto'], 'What to compare.',
    allow_override=True)
_ACCEPTANCE_ROUNDS = flags.DEFINE_boolean('acceptance', True, 'Measure the exact acceptance too.')
_REPEATS = flags.DEFINE_integer('repeats', 1, 'Turns of each arm on each prompt.', 1, allow_override=True)
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to append a row for each category and arm to.',
                              allow_override=True)


def arms() -> dict:
  """{name: (rule, K)}, plain decoding first, with K = 0."""
  found, rules = {'plain': (cj.Exact(), 0)}, {'exact': cj.Exact(), 'rule': common.rule()}
  for name in _ARMS.value:
    rule, _, num = name.partition(':')
    is_number = num.isdigit() and int(num) > 0
    if rule not in rules or not (is_number or num == 'auto'):
      raise ValueError(f'--arms={",".join(_ARMS.value)}: {name!r} is neither exact:K nor rule:K with K '
                       "a number above 0, or 'auto'.")
    found[name] = (rules[rule], int(num) if is_number else num)
  return found


def read_prompts(tokenizer) -> dict:
  """{category: [(prompt, its length in tokens)]}."""
  if not _DATA.value:
    raise ValueError('--data is missing: name a JSONL file of prompts.')

  def prompt_of(row):
    value = row.get(_PROMPT_FIELD.value)
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, str) or not value:
      raise ValueError(f'{_PROMPT_FIELD.value} is {value!r:.60}: need a string, or strings; name the right field with '
                       '--turns_field.')
    return value

  found = {}
  for row in record.read_rows(_DATA.value, check=prompt_of):
    kept = found.setdefault(row.get(_CATEGORY_FIELD.value, os.path.basename(_DATA.value)), [])
    if len(kept) < _PER_CATEGORY.value:
      prompt = prompt_of(row)
      length = len(text.encode([prompt], tokenizer, common.text_options()['raw'])[0])
      if length <= _MAX_PROMPT.value:
        kept.append((prompt, length))
  found = {category: prompts for category, prompts in found.items() if prompts}
  if not found:
    raise ValueError(f'{_DATA.value} holds no prompts of at most --longest_prompt={_MAX_PROMPT.value} tokens.')
  return found


def exact_acceptance(prompt, num_draft, options) -> tuple[float, int]:
  """The sum over rounds of sum min(p, q) at the first drafted token, and the number of rounds that have one."""
  drafted, target_probs = cj.record_rounds([prompt], num_draft=num_draft, **options)
  there = drafted.num_drafted > 0
  return float(np.minimum(drafted.probs[there, 0], target_probs[there, 0]).sum()), int(there.sum())


def measure(prompt, chosen, options, is_compiled) -> dict:
  """{arm: [seconds, tokens, verifier calls, accepted]} of one prompt, sums over the turns."""
  sums = {name: np.zeros(4) for name in chosen}
  for turn in range(is_compiled, _REPEATS.value + 1):
    for name, (rule, num_draft) in chosen.items():
      draft = options['draft'] if num_draft else None
      done = cj.generate_text([prompt], **options | {'draft': draft}, rule=rule, num_draft=num_draft or 1, seed=turn)
      if turn:
        stats = done.stats
        sums[name] += (stats.seconds.first_token + stats.seconds.decode, stats.decoded, stats.verifier_calls,
                       stats.accepted)
  return sums


def main():
  """Prints the table, and appends its rows to --output."""
  chosen = arms()
  common.refuse(['num_draft', 'ledger', 'block_verification', 'seed', 'stop', 'stop_entropy'],
                'arms are named by --arms')
  rows = record.Rows(_OUTPUT.value) if _OUTPUT.value else None
  tokenizer = cj.load_tokenizer(common.verifier_source())
  prompts = read_prompts(tokenizer)
  target = common.verifier()
  draft, draft_tokenizer = common.draft(target, tokenizer=tokenizer)
  if draft is None:
    raise ValueError('--draft=none: there is nothing to measure.')
  new_tokens = common.text_options()['max_new_tokens']
  settings = {name: value for name, value in common.settings().items() if name not in ('draft', 'num_draft', 'seed')}
  options = dict(target=target, tokenizer=tokenizer, draft=draft, draft_tokenizer=draft_tokenizer,
                 sampling=common.sampling(), max_new_tokens=new_tokens, raw=common.text_options()['raw'])
  machine = common.machine()
  print(f'{common.describe_verifier()}; draft {common.draft_name()}; {", ".join(chosen)}, of which rule is '
        f'{common.rule()}; {machine}', flush=True)
  longest = max(num for _, num in chosen.values() if num != 'auto') or 1
  names = [*prompts, 'all']
  sums = {category: {name: np.zeros(4) for name in chosen} for category in names}
  acceptance, compiled = {category: np.zeros(2) for category in names}, None
  todo = sorted((((text.bucket(length), text.bucket(length + new_tokens)), category, prompt)
                 for category in prompts for prompt, length in prompts[category]), key=lambda one: one[0])
  for shape, category, prompt in tqdm(todo, unit='prompt'):
    common.stop_if_interrupted()
    if shape != compiled:
      jax.clear_caches()  # a process can hold some hundred programs, and here each shape has dozens
    measured = measure(prompt, chosen, options, shape == compiled)
    accepted = exact_acceptance(prompt, longest, options) if _ACCEPTANCE_ROUNDS.value else np.zeros(2)
    compiled = shape
    for where in (category, 'all'):
      acceptance[where] += accepted
      sums[where] = {name: sums[where][name] + measured[name] for name in chosen}
  figures = [row for category in names for row in table(category, sums[category], acceptance[category])]
  print(shown(figures, chosen))
  for figure in figures if rows else ():
    rows.append({'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__, 'machine': machine,
                 'draft': os.path.basename(os.path.normpath(common.draft_name())), **settings, **figure})


def table(category, sums, acceptance) -> list[dict]:
  """A row for each arm."""
  rate = lambda name: sums[name][1] / sums[name][0]
  return [{
      'category': category, 'arm': name, 'acceptance': acceptance[0] / acceptance[1] if acceptance[1] else None,
      'accepted_len': accepted / calls, 'tokens_per_call': tokens / calls, 'tokens_per_second': rate(name),
      'times_plain': rate(name) / rate('plain'), 'tokens': int(tokens),
  } for name, (_, tokens, calls, accepted) in sums.items()]


def shown(figures, chosen) -> str:
  """The figures as a table of categories and arms: AL, and times plain decoding."""
  names = [name for name in chosen if name != 'plain']
  lines = ['', f'  {"category":18s}{"acceptance":>11s}{"plain tok/s":>12s}' + ''.join(f'{name:>16s}' for name in names)]
  for category in dict.fromkeys(figure['category'] for figure in figures):
    here = {figure['arm']: figure for figure in figures if figure['category'] == category}
    plain = here['plain']
    accepted = '-' if plain['acceptance'] is None else f'{plain["acceptance"]:.3f}'
    cells = ''.join(f'{here[name]["accepted_len"]:8.2f}{here[name]["times_plain"]:7.2f}x' for name in names)
    lines.append(f'  {category:18s}{accepted:>11s}{plain["tokens_per_second"]:12.1f}{cells}')
  return '\n'.join([*lines, '  (accepted tokens a round, and tokens a second against plain decoding)'])


if __name__ == '__main__':
  common.set_defaults(max_new_tokens=128, rule='cactus', delta=1.0)
  common.run(main)
