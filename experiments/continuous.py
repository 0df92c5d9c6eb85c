"""What it gains to give a row whose answer is finished the next prompt, beside batches that wait for their longest.

  python experiments/continuous.py --data=ifeval.jsonl --num_prompts=64
  python experiments/continuous.py --data=ifeval.jsonl --num_prompts=64 --rule=cactus --delta=1 --num_draft=3

The same prompts are answered by `generate_text`, batch after batch in the order of the file, and by `generate_each`;
both without a draft, and with it where --draft is not none. Ways take turns, after one that compiles. Seconds are of
the clock, from the first prompt to the last answer; the last column has how many answers are those of the batches: all,
but for what rounding may tip.
"""

from absl import flags
from lib import flags as common
from lib import record, timing
from tqdm.auto import tqdm

import cactus_jax as cj

_DATA = flags.DEFINE_string('data', None, 'JSONL of prompts.', allow_override=True)
_FIELD = flags.DEFINE_string('prompt_field', 'prompt', 'Where a line has its prompt.', allow_override=True)
_COUNT = flags.DEFINE_integer('num_prompts', 64, 'Prompts, the first ones.', 1, allow_override=True)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Prompts decoded together.', 1, allow_override=True)
_REPEATS = flags.DEFINE_integer('repeats', 1, 'Turns of each way.', 1, allow_override=True)


def read_prompts() -> list[str]:
  """The first prompts of the file."""
  if not _DATA.value:
    raise ValueError('--data is missing: name a JSONL file of prompts.')

  def check(row):
    if not isinstance(row.get(_FIELD.value), str):
      raise ValueError(f'{_FIELD.value} is {row.get(_FIELD.value)!r:.60}: need a string; name the right field with '
                       '--prompt_field.')

  rows = record.read_rows(_DATA.value, check=check)[: _COUNT.value]
  if not rows:
    raise ValueError(f'{_DATA.value} holds no prompts.')
  return [row[_FIELD.value] for row in rows]


class Way:
  """One way to answer the prompts, and what its loop took."""

  def __init__(self, prompts, options, in_place):
    self._prompts, self._options, self._in_place = prompts, options, in_place

  def __call__(self, _):
    size = _BATCH_SIZE.value
    if self._in_place:
      answers = dict(cj.generate_each(self._prompts, **self._options, batch_size=size))
      self.answers = [answers[i].tokens[0] for i in range(len(answers))]
      calls = sum(answer.stats.verifier_calls for answer in answers.values())
    else:
      batches = [cj.generate_text(self._prompts[start : start + size], **self._options)
                 for start in tqdm(range(0, len(self._prompts), size), leave=False)]
      self.answers = [tokens for batch in batches for tokens in batch.tokens]
      calls = sum(batch.stats.verifier_calls for batch in batches)
    self.count, self.calls = sum(map(len, self.answers)), calls


def main():
  """Prints tokens a second of each way."""
  common.refuse(['stop', 'ledger', 'block_verification', 'stop_entropy'], 'two ways of batching are compared')
  prompts, num_draft, sampling, rule = read_prompts(), common.num_draft(), common.sampling(), common.rule()
  tokenizer = cj.load_tokenizer(common.verifier_source())
  target = common.verifier()
  draft, draft_tokenizer = common.draft(target, tokenizer=tokenizer)
  options = dict(target=target, tokenizer=tokenizer, sampling=sampling, rule=rule, num_draft=num_draft,
                 max_new_tokens=common.text_options()['max_new_tokens'],
                 raw=common.text_options()['raw'], seed=common.text_options()['seed'])
  print(f'{common.describe()}; {len(prompts)} prompts, batches of {_BATCH_SIZE.value}; {common.machine()}', flush=True)
  ways = {}
  for name, drafting in (('plain', None), ('draft', draft))[: 1 if draft is None else 2]:
    own = options | dict(draft=drafting, draft_tokenizer=draft_tokenizer if drafting is not None else None)
    own |= {} if drafting is not None else dict(rule=cj.Exact(), num_draft=1)
    ways |= {f'{name}, {how}': Way(prompts, own, how == 'in place') for how in ('batches', 'in place')}
  seconds = timing.measure(ways, _REPEATS.value)
  for name, way in ways.items():
    batches = name.replace('in place', 'batches')
    rate, usual = way.count / seconds[name], ways[batches].count / seconds[batches]
    same = sum(map(list.__eq__, way.answers, ways[batches].answers))
    print(f'  {name:18s}{rate:8.1f} tokens/s  {rate / usual:6.2f} times batches   ({way.count} tokens, '
          f'{way.count / len(prompts):.0f} an answer, {way.calls} calls of the verifier; {same} answers the same)')


if __name__ == '__main__':
  common.run(main)
