"""Text from a prompt, with what speculation did to it.

  python experiments/generate.py --prompt='Why is the sky blue?' --rule=cactus --delta=1
  python experiments/generate.py --prompts_file=prompts.jsonl --output=answers.jsonl --batch_size=8
  echo 'Why is the sky blue?' | python experiments/generate.py --draft=early_exit:8

One prompt is streamed. A file of prompts shows a progress bar, and every answer is on disk before the next batch
starts: the same command again goes on where it stopped. A table follows: tokens per verifier call, acceptance, seconds.
With --show_accepted a terminal shows a streamed answer by colours: tokens that were drafted and kept in blue, those in
place of a rejected one in orange and underlined, those after a draft that was kept whole in green and bold.
The default model needs 1 GB of memory and writes 20 to 70 tokens a second on two CPU cores.

All devices are used: --mesh_data=2 --mesh_model=4 has four share each answer, and two such groups share the prompts.
On hosts of one TPU pod, GKE or SLURM job start the same command on each with --distributed; elsewhere with
--coordinator=HOST:PORT --num_processes=2 --process_id=0 (or 1). The first process prints and writes the output.
"""

import math
import os
import sys
import warnings

from absl import flags
from lib import flags as common
from lib import pod, record
from tqdm.auto import tqdm

import cactus_jax as cj
from cactus_jax import display, metrics, records, sharding, text
from cactus_jax.models import rope
from cactus_jax.models.config import FAMILIES

_PROMPT = flags.DEFINE_string('prompt', None, 'The prompt. Without it and --prompts_file, standard input is read.')
_PROMPTS_FILE = flags.DEFINE_string('prompts_file', None, 'JSONL file with one prompt a line.')
_PROMPT_FIELD = flags.DEFINE_string(
    'prompt_field', 'prompt', 'Where a line has its prompt: a string, strings (the first is taken) or messages.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to append answers to; what it already holds is kept.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Prompts decoded together.', lower_bound=1)
_SHOW_ACCEPTED = flags.DEFINE_boolean(
    'show_accepted', False, 'Colour a streamed answer by where its tokens come from, and count them. (No colours where '
    'standard output is no terminal, or with NO_COLOR set.)')
_LIST_MODELS = flags.DEFINE_boolean('list_models', False, 'Print which models can be loaded, and from what; then end.')
_COMPARE = flags.DEFINE_boolean('compare_plain', True, 'Time plain decoding too, to tell whether speculation pays.')

# Plain decoding is timed on so many tokens a row: about a second on the default model.
PLAIN_TOKENS = 24


def read_prompts() -> list:
  """The prompts of the flags or of standard input."""
  if _PROMPT.value is not None and _PROMPTS_FILE.value is not None:
    raise ValueError('--prompt and --prompts_file are both given: choose one.')
  if _SHOW_ACCEPTED.value and _PROMPTS_FILE.value is not None:
    raise ValueError('--show_accepted is for one prompt, whose answer is streamed; with --prompts_file drop it.')
  if _PROMPTS_FILE.value is not None:
    rows = record.read_rows(_PROMPTS_FILE.value, check=prompt_of)
    if not rows:
      raise ValueError(f'{_PROMPTS_FILE.value} holds no prompts.')
    return [prompt_of(row) for row in rows]
  if _PROMPT.value is not None:
    return [_PROMPT.value]
  return [pod.on_first(read_stdin)]


def read_stdin():
  """The prompt that is typed or piped in."""
  if sys.stdin.isatty():
    print('Type a prompt, then ctrl-D:', file=sys.stderr)
  return sys.stdin.read().strip()


def prompt_of(row):
  """The prompt of one line of the file. Raises ValueError if there is none."""
  field = _PROMPT_FIELD.value
  if field not in row:
    raise ValueError(f'no field {field!r} (it has {", ".join(row)}); name the right one with --prompt_field.')
  value = row[field]
  if isinstance(value, list) and value and isinstance(value[0], str):
    value = value[0]
  if not value or not (isinstance(value, str) or text.is_conversation(value)):
    raise ValueError(f'{field} is {value!r}: need a non-empty string, a list of strings, or a list of messages with '
                     'role and content.')
  return value


def answer(index, prompt, done, row, settings):
  """What is stored of row `row` of a batch of completions."""
  return {
      'index': index,
      'prompt': prompt,
      'text': done.texts[row],
      'finish_reason': done.finish_reasons[row],
      'tokens': done.tokens[row],
      'from_draft': done.from_draft[row],
      'logprobs': [round(x, 5) for x in done.logprobs[row]],
      'lossless': done.lossless,
      'settings': settings,
  } | ({} if done.emitted_logprobs is None else {'kl': done.kl[row] if math.isfinite(done.kl[row]) else None} | {
      # null where the verifier gives a token no probability: JSON has no infinity
      name: [round(x, 5) if math.isfinite(x) else None for x in getattr(done, name)[row]]
      for name in ('emitted_logprobs', 'verifier_logprobs')
  })


def stream_one(prompt, options) -> cj.Completions:
  """Prints the answer as it is written."""
  stream, show = cj.stream_text(prompt, **options), _SHOW_ACCEPTED.value
  paint = display.ansi if show and has_colours() else display.plain
  for piece in paint(stream.spans()) if show else stream:
    common.stop_if_interrupted()
    print(piece, end='', flush=True)
  print()
  if show:
    print('\n' + ''.join(paint(display.legend(stream.completions.origins[0]))))
  return stream.completions


def has_colours() -> bool:
  """Whether standard output is a terminal that may be written to in colours (https://no-color.org)."""
  return sys.stdout.isatty() and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'


def answer_many(prompts, finished, rows, options, settings, size) -> list[cj.Completions]:
  """Answers batch by batch, storing each in `rows`, if there are such; `finished` are the prompts to be skipped."""
  todo = [(i, prompt) for i, prompt in enumerate(prompts) if i not in finished]
  batches = []
  with tqdm(total=len(todo), unit='prompt', disable=not pod.is_first()) as bar:
    tokens = 0
    for start in range(0, len(todo), size):
      batch = todo[start : start + size]
      if start:  # the last batch may be uneven, which nobody can help
        warnings.filterwarnings('ignore', r'\d+ rows do not split')

      def show(new_tokens, before=tokens):
        common.stop_if_interrupted()
        rate = (before + new_tokens) / max(bar.format_dict['elapsed'], 1e-9)
        bar.set_postfix_str(f'{before + new_tokens} tokens, {rate:.1f} tokens/s')

      done = cj.generate_text([prompt for _, prompt in batch], progress=show, **options)

      def store(batch=batch, done=done):
        for row, (index, prompt) in enumerate(batch):
          if rows:
            rows.append(answer(index, prompt, done, row, settings))
          else:
            bar.write(f'--- {index}\n{done.texts[row]}')

      pod.on_first(store)
      tokens += done.stats.new_tokens
      batches.append(done)
      bar.update(len(batch))
  return batches


def open_output(prompts, settings):
  """The file of answers, if one is wanted. Raises ValueError if it has those of other settings or prompts."""
  if _OUTPUT.value is None:
    return None
  rows = record.Rows(_OUTPUT.value)
  for row in rows.done:
    theirs = row.get('settings')
    if not isinstance(theirs, dict):
      raise ValueError(f'{_OUTPUT.value} holds rows that are no answers: choose another --output.')
    other = records.differences(theirs, settings)
    if other:
      raise ValueError(f'{_OUTPUT.value} holds answers of other settings ({"; ".join(other)}): choose another '
                       '--output.')
    index = row.get('index')
    if index not in range(len(prompts)) or row.get('prompt') != prompts[index]:
      raise ValueError(f'{_OUTPUT.value} holds answers to other prompts (prompt {index} is not the same): choose '
                       'another --output.')
  return rows


def plain_rate(prompts, options) -> float:
  """Tokens a second of plain decoding of the same prompts."""
  if sys.stderr.isatty() and pod.is_first():
    print('(decoding plainly, to compare; --nocompare_plain does not)', file=sys.stderr)
  options = {**options, 'draft': None, 'draft_tokenizer': None, 'rule': cj.Exact(), 'stop': (), 'ledger': False,
             'block_verification': False, 'stop_entropy': None}
  options['max_new_tokens'] = min(PLAIN_TOKENS, options['max_new_tokens'])
  return cj.generate_text(prompts, **options).stats.tokens_per_second


def table(stats, plain) -> str:
  """The figures as aligned lines."""
  times = stats.seconds
  rate = f'{stats.tokens_per_second:.1f}' + (f'   (plain decoding: {plain:.1f})' if plain else '')
  percent = lambda values: ' '.join(f'{100 * v:.0f}%' for v in values) or '-'
  lines = [
      ('new tokens', f'{stats.new_tokens}'),
      ('tokens per verifier call', f'{stats.tokens_per_call:.2f}   ({stats.verifier_calls} calls)'),
      ('accepted per call (AL)', f'{stats.accepted_len:.2f}'),
      ('acceptance rate', f'{100 * stats.acceptance_rate:.0f}%   ({stats.accepted} of {stats.drafted} tested)'),
      ('kept at position 1, 2, ...', percent(stats.position_rate)),
      ('  of those tested there', percent(stats.position_rate_given_tested)),
      ('time to first token', f'{times.first_token:.2f} s'),
      ('decode tokens/s', rate),
      ('compiling, apart', f'{times.compile:.1f} s'),
  ]
  if stats.calls_by_num_draft is not None:
    lines.insert(1, ('drafted tokens a round', chosen(stats.calls_by_num_draft)))
    lines.append(('measuring costs, apart', f'{times.measure:.1f} s'))
  if stats.spent:
    spent = stats.spent
    lines += [
        ('KL per token', f'{stats.kl_per_token:.5f} nats   ({spent.kl:.3f} on the {spent.decided} tokens of the rule)'),
        ('  99% of those at most', f'{spent.kl_99:.3f} nats   (largest {spent.max_kl:.3f})'),
        ('verifier would never emit', f'{spent.flips}'),
    ]
  return '\n'.join(f'  {name:28s}{value}' for name, value in lines)


def chosen(calls) -> str:
  """The number of drafted tokens that most verifier calls had, and the range of all of them."""
  used = [k for k, count in enumerate(calls) if count]
  if not used:
    return '-'
  return f'{max(used, key=lambda k: calls[k])}   (chosen; {used[0]}..{used[-1]} over the text)'


def remarks(stats, plain, options) -> list[str]:
  """What a reader of the table should not overlook."""
  notes = []
  calls = stats.calls_by_num_draft
  if calls and calls[0]:
    notes.append(f'Plain decoding was found to be faster than this draft, and served {calls[0]} of '
                 f'{stats.verifier_calls} calls.')
  elif options['draft'] is not None and not stats.drafted:
    notes.append('The draft proposed nothing: this was plain decoding at the price of speculation.')
  if not options['rule'].lossless and options['draft'] is None:
    notes.append('Without a draft there is nothing to accept or reject: this was plain decoding, whatever the rule.')
    return notes
  if not stats.lossless and not text.is_exact_match(options['rule'], options['sampling']):
    notes.append(f'{options["rule"]} is lossy: these tokens do not follow the verifier\'s law.')
  if plain and 0 < stats.tokens_per_second < plain:
    notes.append(f'Speculation was slower here than plain decoding would have been: {stats.tokens_per_second:.1f} '
                 f'against {plain:.1f} tokens/s, timed on {PLAIN_TOKENS} tokens a row. It pays when more drafts are '
                 'accepted, or with a larger verifier.')
  return notes


def models() -> list[tuple[str, str, str]]:
  """Of each family its name in a config.json, its models, and its architecture in GGUF."""
  architecture = {'gemma3_text': 'gemma3', 'mistral': 'llama'}
  return [(name, read.__doc__.rstrip('.'), architecture.get(name, name)) for name, read in FAMILIES.items()]


def list_models():
  """Prints the families, and the sources and dtypes that go for all of them."""
  rows = [('model_type', 'models', 'in GGUF'), *models()]
  widths = [max(map(len, column)) for column in zip(*rows)]
  for row in rows:
    print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
  print(f"""
Rotary embeddings: plain, {", ".join(rope.KINDS)}.
Sources: a hub id or a folder (safetensors, in one file or many); a .gguf file (all block types that the package gguf
  reads); a folder of save_transformer (Orbax). scripts/convert.py writes the first and the last.
Dtypes: --dtype=float32 (default on a CPU) or bfloat16 (elsewhere); --quantize=int8 and --draft_quantize=int8 for the
  matrices of verifier and draft, --kv_dtype=int8 for their cached keys and values.""")


def batch_size(mesh) -> int:
  """Prompts decoded together: as many as asked for, rounded up so that all groups of devices have as many."""
  groups = sharding.row_groups(mesh)
  return -(-_BATCH_SIZE.value // groups) * groups


def main():
  """Answers the prompts of the flags."""
  if _LIST_MODELS.value:
    list_models()
    return
  rule, sampling = common.rule(), common.sampling()
  prompts, settings = pod.together(lambda: (read_prompts(), common.settings()))
  pod.check_agreement({'the prompts': f'{len(prompts)} ({pod.digest(prompts)})'})
  rows = None

  def open_rows():
    nonlocal rows
    rows = open_output(prompts, settings)
    return [row['index'] for row in rows.done] if rows else []

  finished = set(pod.on_first(open_rows))  # other processes have no file, or not the same
  if finished:
    print(f'{len(finished)} of {len(prompts)} prompts are answered already in {_OUTPUT.value}')
    if len(finished) == len(prompts):
      return
  mesh = common.mesh()
  draft_mesh, size = common.draft_mesh(mesh), batch_size(mesh)
  print(common.describe(mesh), flush=True)
  tokenizer = pod.together(lambda: cj.load_tokenizer(common.verifier_source()))
  target = pod.together(lambda: common.verifier(mesh))
  draft, draft_tokenizer = pod.together(lambda: common.draft(target, draft_mesh, tokenizer))
  options = dict(target=target, draft=draft, rule=rule, sampling=sampling, draft_tokenizer=draft_tokenizer,
                 tokenizer=tokenizer, **common.text_options())

  if len(prompts) == 1 and _PROMPTS_FILE.value is None:
    done = stream_one(prompts[0], options)
    batches = [done]
    if _OUTPUT.value is not None:
      pod.on_first(lambda: rows.append(answer(0, prompts[0], done, 0, settings)))
  else:
    batches = answer_many(prompts, finished, rows, options, settings, size)
  stats = metrics.merge([done.stats for done in batches])
  plain = plain_rate(prompts[:size], options) if _COMPARE.value and draft is not None else None
  print(f'\n{table(stats, plain)}')
  for note in remarks(stats, plain, options):
    print(f'\n  Note: {note}')


if __name__ == '__main__':
  common.run(main, meshes=True)
