"""The flags that programs share, and their only reader: a program gets models, rules and settings, never FLAGS."""

import dataclasses
import os
import signal
import sys

import jax
from absl import app, flags, logging

import cactus_jax as cj
from cactus_jax import rules

flags.DEFINE_string('verifier', None, 'Folder, hub id or .gguf file; by default the packaged SmolLM2-135M-Instruct.')
flags.DEFINE_string('draft', 'lookup', 'Draft: a folder, hub id or .gguf file, "lookup", "early_exit:N" or "none".')
flags.DEFINE_enum('rule', 'exact', sorted(rules.RULES), 'Verification rule; only "exact" leaves the law unchanged.')
RULE_NUMBERS = {field.name: name for name, rule in rules.RULES.items() for field in dataclasses.fields(rule)}
for number, owner in RULE_NUMBERS.items():
  flags.DEFINE_float(number, None, f'The {number} of --rule={owner}; see {rules.RULES[owner].__name__} in rules.py.')
flags.DEFINE_integer('num_draft', 4, 'Tokens drafted a round.')
flags.DEFINE_float('temperature', 0.6, 'Sampling temperature; 0 is greedy.')
flags.DEFINE_integer('top_k', 20, 'Sample among the k likeliest tokens; 0: among all.')
flags.DEFINE_float('top_p', 0.95, 'Sample among the likeliest tokens that hold this mass; 1: among all.')
flags.DEFINE_float('min_p', 0.0, 'Sample among tokens with at least this share of the top probability; 0: among all.')
flags.DEFINE_integer('max_new_tokens', 256, 'At most so many tokens an answer.')
flags.DEFINE_multi_string('stop', [], 'A string that ends an answer; may be repeated.')
flags.DEFINE_integer('seed', 0, 'Seed of all draws.')
flags.DEFINE_boolean('raw', False, 'Take prompts as plain text instead of as a turn in the chat template.')

FLAGS = flags.FLAGS
_interrupts = []
DEFAULT_CACHE = os.path.join(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'cactus_jax', 'jax')


def run(main):
  """Runs main(): what the user has to mend is printed as one line, exit code 2; ctrl-C exits with 130."""

  def refuse(error):
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)

  def parse(argv):
    try:
      return FLAGS(argv)
    except flags.Error as error:
      refuse(error)

  def guarded(argv):
    if len(argv) > 1:
      refuse(f'unexpected argument {argv[1]!r}; options are written --name=value.')
    logging.set_verbosity(logging.WARNING)
    signal.signal(signal.SIGINT, _interrupt)
    if not jax.config.jax_compilation_cache_dir:
      jax.config.update('jax_compilation_cache_dir', DEFAULT_CACHE)
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    try:
      main()
    except ValueError as error:
      refuse(error)
    except KeyboardInterrupt:
      print('\ninterrupted', file=sys.stderr)
      sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(1)

  app.run(guarded, flags_parser=parse)


def _interrupt(*_):
  _interrupts.append(True)
  raise KeyboardInterrupt


def stop_if_interrupted():
  """Ends a run whose ctrl-C was lost, as one is that arrives while JAX collects garbage; for long loops."""
  if _interrupts:
    raise KeyboardInterrupt


def rule() -> cj.VerificationRule:
  """The rule of --rule with its numbers from the flags of the same names."""
  cls = rules.RULES[FLAGS.rule]
  own = {field.name for field in dataclasses.fields(cls)}
  for name in RULE_NUMBERS.keys() - own:
    if FLAGS[name].present:
      raise ValueError(f'--{name} means nothing to --rule={FLAGS.rule}: drop it, or choose the rule it belongs to.')
  for name in own:
    if getattr(FLAGS, name) is None:
      raise ValueError(f'--rule={FLAGS.rule} needs --{name}.')
  return cls(**{name: getattr(FLAGS, name) for name in own})


def sampling() -> cj.SamplingParams:
  """The sampling parameters of the flags."""
  return cj.SamplingParams(temperature=FLAGS.temperature, top_k=FLAGS.top_k, top_p=FLAGS.top_p, min_p=FLAGS.min_p)


def verifier_source() -> str:
  """Where the verifier comes from."""
  return FLAGS.verifier or os.fspath(cj.default_model_path())


def num_draft() -> int:
  """Tokens drafted a round."""
  return FLAGS.num_draft


def draft(target):
  """The draft of --draft, and its tokenizer or None where it has none of its own."""
  return draft_named(FLAGS.draft, target)


def draft_named(name, target):
  """As `draft`, for a name of the same form."""
  kind, _, layers = name.partition(':')
  if name == 'none':
    return None, None
  if name == 'lookup':
    return cj.PromptLookup(), None
  if kind == 'early_exit':
    if not layers.isdigit():
      raise ValueError(f'--draft={name}: need the number of layers, as in early_exit:8.')
    return target.early_exit(int(layers)), None
  return cj.load_transformer(name), cj.load_tokenizer(name)


def describe() -> str:
  """One line that says what is about to run."""
  fields = dataclasses.fields(rules.RULES[FLAGS.rule])
  numbers = ''.join(f', {field.name}={getattr(FLAGS, field.name)}' for field in fields)
  drafting = 'no draft' if FLAGS.draft == 'none' else f'draft {FLAGS.draft}, {FLAGS.num_draft} tokens a round'
  return f'verifier {settings()["verifier"]}; {drafting}; rule {FLAGS.rule}{numbers}'


def settings() -> dict:
  """Everything that determines an answer, to be stored with it."""
  names = ['draft', 'rule', *RULE_NUMBERS, 'num_draft', 'temperature', 'top_k', 'top_p', 'min_p', 'max_new_tokens',
           'stop', 'seed', 'raw']
  verifier = FLAGS.verifier or os.path.basename(verifier_source())
  return {'verifier': verifier} | {name: getattr(FLAGS, name) for name in names}


def text_options() -> dict:
  """The options of `generate_text` that are plain numbers and strings."""
  return {name: getattr(FLAGS, name) for name in ('num_draft', 'max_new_tokens', 'stop', 'seed', 'raw')}
