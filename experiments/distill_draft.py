"""A draft for any verifier, distilled from texts that the verifier writes itself.

  python experiments/distill_draft.py --output=draft                     # for the default model
  python experiments/distill_draft.py --output=draft --verifier=MODEL --prompts_file=prompts.jsonl
  python experiments/generate.py --draft=draft/export --prompt='Why is the sky blue?'

Three stages, all resumed by the same command after a kill, with what is whole on disk kept:
  data    draft/corpus/   the verifier writes conversations (its own prompts, and those of a file), with its laws
  train   draft/train/    a few layers between the verifier's embedding and head learn these laws; curve.png, log.jsonl
  export  draft/export/   what --draft= loads; as --transformers also asks for, draft/transformers/, which they load
--stages=data alone makes or lengthens the corpus; several runs of it, each with its own --seed and --corpus, can share
out the work, and --stages=train,export --corpus=a,b,c reads them all.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import time

import numpy as np
from absl import flags
from lib import flags as common
from lib import malloc, record
from tqdm.auto import tqdm

import cactus_jax as cj
from cactus_jax import corpus, distill, files, text
from cactus_jax.models import hf
from cactus_jax.models import student as student_lib

STAGES = ('data', 'train', 'export')
_OUTPUT = flags.DEFINE_string('output', None, 'Folder of the run.', allow_override=True)
_STAGES = flags.DEFINE_list('stages', list(STAGES), f'What to do, of {", ".join(STAGES)}.')
_CORPUS = flags.DEFINE_list('corpus', None, 'Folders of texts; by default OUTPUT/corpus.')
_TOKENS = flags.DEFINE_integer('tokens', 1_000_000, 'Answered tokens that the corpus has to have.', 1,
                               allow_override=True)
_PROMPTS = flags.DEFINE_string('prompts_file', None, 'JSONL of prompts to be answered beside those that the verifier '
                               'thinks of.', allow_override=True)
_FIELD = flags.DEFINE_string('prompt_field', 'prompt', 'Where a line has its prompt.', allow_override=True)
_BATCH = flags.DEFINE_integer('parallel', 64, 'Conversations that are written at once.', 1)
_TEMPERATURES = flags.DEFINE_list('temperatures', ['0.6', '0.6', '0.6', '1.0'], 'Of the answers, in turn.')
_MAX_PROMPT = flags.DEFINE_integer('max_prompt', 144, 'Most tokens of a prompt, template included.', 1)
_OPENINGS = flags.DEFINE_boolean('openings', True, 'Every other turn that the verifier writes for the user begins as '
                                 'people do, with one of corpus.OPENINGS.')
_GIVEN = flags.DEFINE_integer('given_every', 2, 'Of so many conversations one answers a prompt of --prompts_file, as '
                              'long as there are some.', 1)
_START = flags.DEFINE_string('start', None, 'An exported draft of the same verifier to go on from; its shape and its '
                             'head are those of the result.')
_LAYERS = flags.DEFINE_list('layers', None, 'Which layers of the verifier the draft starts from; by default its last, '
                            'or without --reads_hidden its first two.')
_READS_HIDDEN = flags.DEFINE_boolean('reads_hidden', True, 'Whether the draft reads the verifier\'s hidden '
                                     'states, which texts are kept with, 2 bytes a number.')
_HIDDEN_LAYERS = flags.DEFINE_list('hidden_layers', None, 'With --reads_hidden: layers of the verifier whose '
                                   'input is read beside what its head is given; by default those at a third and two '
                                   'thirds.')
_COPY = flags.DEFINE_integer('copy', 4, 'The last tokens that are compared to lift the token that followed them '
                             'before, where all tokens of the text can be proposed; 0: none is copied.', 0)
_WINDOW = flags.DEFINE_integer('window', None, 'Positions that a token of the draft sees; by default all.', 1)
_HEAD = flags.DEFINE_integer('head_size', 8192, 'Rows of the draft\'s head, for the tokens the verifier writes most.',
                             1)
_LOSS = flags.DEFINE_list('loss', ['forward_kl:0.1', 'tv:1'], f'Losses and weights, of {", ".join(distill.LOSSES)}.')
# What the fields of DistillConfig are called on the command line, and what they do.
TRAINING = {
    'passes': 'Passes over a text, each on the hidden states of the one before, with --reads_hidden.',
    'pass_decay': 'The weight of a pass to that of the one before.',
    'filter_draft': 'Train the draft\'s law as it is after the filters.',
    'steps': 'Steps of the optimiser.', 'batch_tokens': 'Tokens a batch, padding included.',
    'accumulate': 'Batches whose gradients make one step.', 'learning_rate': 'The largest.',
    'warmup': 'Steps until the learning rate is reached.', 'weight_decay': 'Of AdamW.',
    'clip': 'The largest norm of a gradient.',
}
_TRAINING = {}
for name, help_text in TRAINING.items():
  default = {field.name: field.default for field in dataclasses.fields(distill.DistillConfig)}[name]
  define = {bool: flags.DEFINE_boolean, int: flags.DEFINE_integer, float: flags.DEFINE_float}[type(default)]
  _TRAINING[name] = define(name, default, help_text)
_EVERY = flags.DEFINE_integer('evaluate_every', 200, 'Steps between evaluations, each of which makes a checkpoint.', 1)
_HELD_OUT = flags.DEFINE_integer('held_out', 64, 'Conversations that are kept from training, to evaluate on.', 1)
_TRANSFORMERS = flags.DEFINE_boolean('transformers', False, 'Export for transformers too: a draft with a whole head '
                                     'that neither reads hidden states nor copies.')


def folders() -> tuple[pathlib.Path, list[pathlib.Path]]:
  """That of the run, and those of its texts."""
  if not _OUTPUT.value:
    raise ValueError('--output is missing: name a folder for the run.')
  unknown = [stage for stage in _STAGES.value if stage not in STAGES]
  if unknown or not _STAGES.value:
    raise ValueError(f'--stages={",".join(_STAGES.value)}: need some of {", ".join(STAGES)}.')
  output = pathlib.Path(_OUTPUT.value).expanduser()
  there = next(path for path in (output, *output.parents) if path.exists())
  if not there.is_dir() or not os.access(there, os.W_OK):
    raise ValueError(f'--output={output}: {there} is no folder that can be written to.')
  texts = [pathlib.Path(folder).expanduser() for folder in _CORPUS.value or [output / 'corpus']]
  if 'data' in _STAGES.value and len(texts) > 1:
    raise ValueError(f'--corpus={",".join(_CORPUS.value)}: the data stage writes to one folder; run it for each, then '
                     '--stages=train,export with all.')
  return output, texts


def corpus_settings(hidden_layers=None) -> corpus.Settings:
  """What the corpus is made with."""
  try:
    temperatures = tuple(map(float, _TEMPERATURES.value))
  except ValueError:
    raise ValueError(f'--temperatures={",".join(_TEMPERATURES.value)}: need numbers.') from None
  sampling, options = common.sampling(), common.text_options()
  return corpus.Settings(
      temperatures=temperatures, top_k=sampling.top_k, top_p=sampling.top_p,
      hidden_layers=hidden_layers, given_every=_GIVEN.value,
      openings=corpus.OPENINGS if _OPENINGS.value and not options['raw'] else (),
      max_prompt=_MAX_PROMPT.value, max_answer=options['max_new_tokens'], seed=options['seed'], raw=options['raw'])


def training() -> distill.DistillConfig:
  """How the draft is trained."""
  mix = []
  for term in _LOSS.value:
    name, _, weight = term.partition(':')
    try:
      mix.append((name, float(weight or 1)))
    except ValueError:
      raise ValueError(f'--loss={",".join(_LOSS.value)}: need NAME:WEIGHT, as in tv:1.') from None
  sampling = common.sampling()
  return distill.DistillConfig(
      loss=tuple(mix), temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
      seed=common.text_options()['seed'], **{name: flag.value for name, flag in _TRAINING.items()})


def layers_of(flag) -> tuple[int, ...] | None:
  """The verifier's layers that a flag names, if it is there."""
  try:
    return None if flag.value is None else tuple(int(layer) for layer in flag.value)
  except ValueError:
    raise ValueError(f'--{flag.name}={",".join(flag.value)}: need numbers of layers.') from None


def hidden_layers(target, started) -> tuple[int, ...] | None:
  """The verifier's layers whose input the draft reads beside what the head is given; None: it reads none."""
  if started is not None:
    return started.hidden_layers
  if not _READS_HIDDEN.value:
    return None
  layers, count = layers_of(_HIDDEN_LAYERS), target.config.num_layers
  return tuple(sorted({count // 3, 2 * count // 3})) if layers is None else layers


def new_student(target, head_ids) -> student_lib.Student:
  """The draft of the flags before its first step."""
  layers = layers_of(_LAYERS)
  if layers is None:
    layers = [target.config.num_layers - 1] if _READS_HIDDEN.value else [0, 1]
  return student_lib.new_student(target, layers, head_ids, window=_WINDOW.value, copy=_COPY.value,
                                 hidden_layers=hidden_layers(target, None))


def head_size(target) -> int:
  """Rows of the draft's head."""
  return min(_HEAD.value, target.config.vocab_size)


def check_shape():
  """Raises ValueError for flags of a draft's shape that contradict each other, or a --start that is no draft."""
  if _START.value is not None:
    student_lib.read_about(_START.value)
    common.refuse(['layers', 'window', 'reads_hidden', 'hidden_layers', 'copy', 'head_size'],
                  '--start brings the shape of its draft')
  elif _TRANSFORMERS.value and (_READS_HIDDEN.value or _COPY.value or _WINDOW.value):
    raise ValueError('--transformers: a draft that reads hidden states, copies, or has windows is no model that '
                     'transformers knows: add --noreads_hidden --copy=0, and drop --window.')
  elif not _READS_HIDDEN.value:
    common.refuse(['hidden_layers'], 'the draft reads none')
  if _PROMPTS.value is None:
    common.refuse(['given_every', 'prompt_field'], 'there is no --prompts_file')


def check_export(student):
  """Raises ValueError where --transformers asks for a draft that transformers does not know."""
  if _TRANSFORMERS.value:
    try:
      student_lib.as_transformer(student)
    except ValueError as error:
      raise ValueError(f'--transformers: {error}') from None


def read_prompts():
  """The prompts of the file, if there is one."""
  if _PROMPTS.value is None:
    return []

  def check(row):
    value = row.get(_FIELD.value)
    if not value or not (isinstance(value, str) or text.is_conversation(value)):
      raise ValueError(f'{_FIELD.value} is {value!r:.60}: need a string, or messages with role and content; name the '
                       'right field with --prompt_field.')

  rows = record.read_rows(_PROMPTS.value, check=check)
  if not rows:
    raise ValueError(f'{_PROMPTS.value} holds no prompts.')
  return [row[_FIELD.value] for row in rows]


def write_texts(folder, target, tokenizer, prompts, layers):
  """The first stage; of the hidden states it keeps those of `hidden_layers`."""
  start, settings = time.time(), corpus_settings(layers)
  with tqdm(total=_TOKENS.value, unit='token', unit_scale=True, desc='data') as bar:

    def show(tokens):
      common.stop_if_interrupted()
      bar.update(min(tokens, _TOKENS.value) - bar.n)

    count = corpus.write(folder, target, tokenizer, prompts, num_tokens=_TOKENS.value, settings=settings,
                         batch=_BATCH.value, progress=show)
  print(f'data: {count} tokens in {folder} ({time.time() - start:.0f} s)')


def split(texts, target, tokenizer, layers) -> tuple[list, list]:
  """Conversations to train on and to evaluate on, of the latter the first few of every folder.

  layers: `hidden_layers`.
  """
  train, held_out = [], []
  for folder in texts:
    if not corpus.shards(folder):
      raise ValueError(f'{folder} holds no texts: run --stages=data first.')
    corpus.check_verifier(folder, target, tokenizer)
    with tqdm(corpus.shards(folder), unit='shard', desc='reading', leave=False) as paths:
      found = [one for path in paths for one in corpus.read(path, layers)]
    found.sort(key=lambda one: one.index)
    num = -(-_HELD_OUT.value // len(texts))
    if len(found) <= num:
      raise ValueError(f'{folder} holds {len(found)} conversations, of which --held_out={_HELD_OUT.value} would leave '
                       'none: make more, with --tokens.')
    held_out += found[:num]
    train += found[num:]
  return train, held_out


def untrained(output, target, started, train=None) -> student_lib.Student:
  """The draft before its first step, with the head of the run, which is chosen by the texts once.

  Raises ValueError if it has not been chosen and there are no texts.
  """
  if started is not None:
    return started
  path = output / 'train' / 'head_ids.npy'
  if path.exists():
    head_ids = np.load(path)
  elif train is None:
    raise ValueError(f'{output / "train"} holds no training: run --stages=train first.')
  else:
    head_ids = distill.frequent_tokens(train, head_size(target), target.config.vocab_size)
    with whole(path, 'wb') as file:
      np.save(file, head_ids)
  if len(head_ids) != head_size(target):
    raise ValueError(f'{path} has {len(head_ids)} tokens, --head_size={_HEAD.value}: choose another --output.')
  return new_student(target, head_ids)


@contextlib.contextmanager
def whole(path, mode):
  """`files.new_file`; raises ValueError."""
  try:
    with files.new_file(path, mode) as file:
      yield file
  except OSError as error:
    raise ValueError(f'{path} could not be written ({error}); is the disk full?') from error


def train_draft(output, texts, target, tokenizer, started):
  """The second stage."""
  train, held_out = split(texts, target, tokenizer, hidden_layers(target, started))
  student, config, folder = untrained(output, target, started, train), training(), output / 'train'
  count = sum(len(one.top_ids) for one in train)
  print(f'training on {count} answered tokens of {len(train)} conversations, evaluating on {len(held_out)}')
  start = time.time()
  with tqdm(total=config.steps * config.accumulate, unit='step', desc='train') as bar:

    def show(step, figures):
      common.stop_if_interrupted()
      bar.update(step - bar.n)
      bar.set_postfix_str(' '.join(f'{name} {value:.3f}' for name, value in figures.items()))

    for rows in distill.fit(student, train, held_out, config, folder / 'checkpoints', evaluate_every=_EVERY.value,
                            progress=show):
      bar.update(rows[-1]['step'] - bar.n)
      write_log(folder, rows)
  print(f'train: acceptance on held-out texts {shown(rows)} ({time.time() - start:.0f} s)')


def shown(rows):
  """The last acceptances, for a line of text."""
  return ', '.join(f'{value:.3f}' for value in rows[-1]['held_out'])


def export(output, target, tokenizer, started):
  """The third stage."""
  student, rows = distill.restore(untrained(output, target, started), training(), output / 'train' / 'checkpoints')
  if not rows:
    raise ValueError(f'{output / "train"} holds no checkpoint: run --stages=train first.')
  about = {'step': rows[-1]['step'], 'held_out_acceptance': rows[-1]['held_out'],
           'training': dataclasses.asdict(training())}
  export_once(output / 'export', about, lambda folder: student_lib.save(folder, student, tokenizer, about))
  if _TRANSFORMERS.value:
    model = student_lib.as_transformer(student)
    export_once(output / 'transformers', None, lambda folder: hf.save(folder, model, tokenizer))
  print(f'export: acceptance on held-out texts {shown(rows)}')


def export_once(folder, about, save):
  """Has a folder written that is not there; raises ValueError for one that holds another draft, if it tells."""
  if not folder.exists():
    save(folder)
    print(f'export: {folder}')
  elif about is None or student_lib.read_about(folder) == json.loads(json.dumps(about)):
    print(f'export: {folder} is there already')
  else:
    raise ValueError(f'{folder} holds a draft of another training, or of another step: move it away, or remove it.')


def write_log(folder, rows):
  """The rows of all evaluations, whole or not at all, and their picture."""
  with whole(folder / 'log.jsonl', 'w') as file:
    file.write(''.join(json.dumps(row) + '\n' for row in rows))
  import matplotlib  # takes half a second

  matplotlib.use('agg')
  from matplotlib import pyplot as plt

  steps = [row['step'] for row in rows]
  figure, axes = plt.subplots(figsize=(7, 4), layout='constrained')
  axes.plot(steps, [row['acceptance'] for row in rows], color='0.6', label='training texts')
  for i, marker in zip(range(len(rows[0]['held_out'])), 'os^vD*'):
    axes.plot(steps, [row['held_out'][i] for row in rows], color='black', marker=marker, markersize=4,
              linestyle=['-', '--', ':', '-.'][i % 4], label=f'held-out texts, drafted token {i + 1}')
  axes.set(xlabel='step', ylabel='acceptance, mean of sum min(p, q)')
  axes.grid(alpha=0.3)
  axes.legend()
  with whole(folder / 'curve.png', 'wb') as file:
    figure.savefig(file, dpi=120)
  plt.close(figure)


def main():
  """Goes through the stages of --stages."""
  common.refuse(['draft', 'draft_quantize', 'num_draft', 'rule', *common.RULE_FIELDS, 'static', 'block_verification',
                 'ledger', 'stop', 'stop_entropy', 'min_p', 'kv_dtype'], 'a draft is made, not used')
  malloc.keep_freed()
  output, texts = folders()  # what is wrong is told before anything is loaded
  corpus_settings(), training(), layers_of(_LAYERS), layers_of(_HIDDEN_LAYERS), check_shape()
  if 'train' in _STAGES.value and importlib.util.find_spec('matplotlib') is None:
    raise ValueError('matplotlib is missing, which draws the curve: pip install -e .[plot]')
  prompts = read_prompts()
  tokenizer, target = cj.load_tokenizer(common.verifier_source()), common.verifier()
  started = None if _START.value is None else student_lib.load(_START.value, target, tokenizer)
  if _STAGES.value != ['data']:  # and before the verifier writes for hours
    check_export(started or new_student(target, np.arange(head_size(target))))
  if 'data' in _STAGES.value:
    write_texts(texts[0], target, tokenizer, prompts, hidden_layers(target, started))
  if 'train' in _STAGES.value:
    train_draft(output, texts, target, tokenizer, started)
  if 'export' in _STAGES.value:
    export(output, target, tokenizer, started)


if __name__ == '__main__':
  common.run(main)
