"""The flags that programs share, and their only reader: a program gets models, rules and settings, never FLAGS."""

import dataclasses
import os
import re
import signal
import sys
import traceback
import warnings

import jax
from absl import app, flags, logging

import cactus_jax as cj
from cactus_jax import schedule, sharding
from cactus_jax.divergence import DIVERGENCES
from cactus_jax.models import student
from lib import pod

flags.DEFINE_string('verifier', None, 'Folder, hub id or .gguf file; by default the packaged SmolLM2-135M-Instruct.')
flags.DEFINE_string('draft', None, 'Draft: a folder, hub id or .gguf file, "lookup", "early_exit:N", "none", or '
                    '"distilled", that of the default verifier; by default that, if it is installed, else "lookup".')
flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'], 'Of weights; by default float32 on a CPU, else bfloat16.')
flags.DEFINE_enum('quantize', None, ['int8'], 'Hold the matrices of the verifier as 8-bit integers.')
flags.DEFINE_enum('draft_quantize', None, ['int8'], 'The same of a draft that is a model of its own.')
flags.DEFINE_enum('kv_dtype', None, ['int8'], 'Cache keys and values, of verifier and draft, as 8-bit integers.')
RULES = cj.RULES | {'budget': cj.Budget}
flags.DEFINE_enum('rule', 'exact', sorted(RULES), 'Verification rule; only "exact" leaves the law unchanged.')
# What the rules are made with: the name of each field, and the rules that have it.
RULE_FIELDS = {}
for rule_name, rule_class in RULES.items():
  for rule_field in dataclasses.fields(rule_class):
    RULE_FIELDS.setdefault(rule_field.name, []).append(rule_name)
for field_name, owners in RULE_FIELDS.items():
  text = f'The {field_name} of --rule={"|".join(owners)}; see {RULES[owners[0]].__name__}.'
  if field_name == 'published':
    flags.DEFINE_boolean(field_name, None, text)
  elif field_name == 'divergence':
    flags.DEFINE_enum(field_name, None, list(DIVERGENCES), text)
  else:
    flags.DEFINE_float(field_name, None, text)
flags.DEFINE_boolean('static', False, 'Verify towards the law that the rule emits: the same text law, for any rule.')
flags.DEFINE_boolean('block_verification', False, 'Judge drafts as a whole; Cactus and TopK need --static with it.')
flags.DEFINE_boolean('ledger', False, 'Account for what the rule spends, in nats.')


class _NumDraft(flags.ArgumentParser):
  """A whole number, or 'auto'."""

  syntactic_help = "a whole number, or 'auto'"

  def parse(self, argument):
    try:
      return 'auto' if argument == 'auto' else int(argument)
    except ValueError:
      raise ValueError(f'need {self.syntactic_help}') from None


flags.DEFINE(_NumDraft(), 'num_draft', 4, 'Tokens drafted a round; "auto": as many as decode fastest.')
flags.DEFINE_float('stop_entropy', None, 'Nats: a draft model ends its draft before a law of larger entropy.')
flags.DEFINE_float('temperature', 0.6, 'Sampling temperature; 0 is greedy.')
flags.DEFINE_integer('top_k', 20, 'Sample among the k likeliest tokens; 0: among all.')
flags.DEFINE_float('top_p', 0.95, 'Sample among the likeliest tokens that hold this mass; 1: among all.')
flags.DEFINE_float('min_p', 0.0, 'Sample among tokens with at least this share of the top probability; 0: among all.')
flags.DEFINE_integer('max_new_tokens', 256, 'At most so many tokens an answer.')
flags.DEFINE_multi_string('stop', [], 'A string that ends an answer; may be repeated.')
flags.DEFINE_integer('seed', 0, 'Seed of all draws.')
flags.DEFINE_boolean('raw', False, 'Take prompts as plain text instead of as a turn in the chat template.')
flags.DEFINE_integer('mesh_data', None, 'Groups of devices that share out the prompts; by default what is left.', 1)
flags.DEFINE_integer('mesh_fsdp', None, 'Devices that share out prompts and hold a part of each weight.', 1)
flags.DEFINE_integer('mesh_model', None, 'Devices that share the work on each prompt; by default what is left.', 1)
flags.DEFINE_integer('draft_devices', None, 'Devices of the model axis that share a draft model: all, or fewer, each '
                     'such group drafting for itself.', 1)
flags.DEFINE_boolean('distributed', False, 'One of several processes; TPU pods, GKE and SLURM know the others.')
flags.DEFINE_string('coordinator', None, 'host:port of process 0, where no cluster tells it; means --distributed.')
flags.DEFINE_integer('num_processes', None, 'How many processes there are, with --coordinator.', 1)
flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.', 0)
flags.DEFINE_integer('start_timeout', 600, 'Seconds to wait for the other processes at the start.', 1)
flags.DEFINE_integer('heartbeat_timeout', 100, 'Seconds of silence after which a process counts as lost: all end.', 1)

FLAGS = flags.FLAGS
SHARED = [flag.name for flag in FLAGS.get_flags_for_module(__name__)]
MESH_FLAGS = ('mesh_data', 'mesh_fsdp', 'mesh_model', 'draft_devices', 'distributed', 'coordinator', 'num_processes',
              'process_id', 'start_timeout', 'heartbeat_timeout')
MODEL_FLAGS = ('dtype', 'quantize', 'draft_quantize', 'kv_dtype')
# Flags in which the processes of a run may differ.
OWN_FLAGS = ('process_id', 'coordinator')
_interrupts = []
DEFAULT_CACHE = os.path.join(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'cactus_jax', 'jax')
COSTS = os.path.join(os.path.dirname(DEFAULT_CACHE), 'costs')  # what passes were measured to cost, for --num_draft=auto


def set_defaults(**values):
  """Gives shared flags other defaults in a program, before it runs."""
  for name, value in values.items():
    FLAGS.set_default(name, value)


def refuse(names, reason):
  """Raises ValueError for a flag that was given and means nothing to a program."""
  for name in names:
    if FLAGS[name].present:
      raise ValueError(f'--{name} means nothing here: {reason}.')


def run(main, meshes=False, arguments=()):
  """Runs main(): what the user has to mend is printed as one line, exit code 2; ctrl-C exits with 130.

  Of several processes all exit with 2 together. Where one is lost, the others exit with another code, or by SIGABRT.

  Args:
    meshes: whether the program can use several devices and be several processes.
    arguments: names of what the command line gives main() beside flags.
  """

  def give_up(error):
    print(f'error: {error}', file=sys.stderr)
    if pod.is_several():
      pod.leave_together(2)
    sys.exit(2)

  def parse(argv):
    try:
      return FLAGS(argv)
    except flags.Error as error:
      give_up(error)

  def guarded(argv):
    if len(argv) - 1 > len(arguments):
      give_up(f'unexpected argument {argv[1 + len(arguments)]!r}; options are written --name=value.')
    if len(argv) - 1 < len(arguments):
      give_up(f'{arguments[len(argv) - 1]} is missing; needed are {" ".join(arguments)}.')
    logging.set_verbosity(logging.WARNING)
    warnings.showwarning = _note_once()
    signal.signal(signal.SIGINT, _interrupt)
    if not jax.config.jax_compilation_cache_dir:
      jax.config.update('jax_compilation_cache_dir', DEFAULT_CACHE)
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    try:
      if not meshes:
        refuse(MESH_FLAGS, 'this program runs on one device')
      _join_processes()
      main(*argv[1:])
    except ValueError as error:
      give_up(error)
    except KeyboardInterrupt:
      print('\ninterrupted', file=sys.stderr)
      if main.__module__ == '__main__':
        # Python would take down what XLA's threads, in the middle of a loop, still use.
        pod.leave(130)
      sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      if pod.is_several():
        pod.leave(1)
      sys.exit(1)
    except Exception:
      if not pod.is_several():
        raise
      traceback.print_exc()
      pod.leave(1)  # a usual end would wait for the others, who wait for us

  app.run(guarded, flags_parser=parse)


def _join_processes():
  """Starts the part of this process in a run of several, if it is one, and sees that they are alike."""
  by_hand = {name: getattr(FLAGS, name) for name in ('coordinator', 'num_processes', 'process_id')}
  missing = [f'--{name}' for name, value in by_hand.items() if value is None]
  if 0 < len(missing) < 3:
    raise ValueError(f'{" and ".join(missing)} missing: --coordinator, --num_processes and --process_id belong '
                     'together.')
  if missing and not FLAGS.distributed:
    return
  if not missing and by_hand['process_id'] >= by_hand['num_processes']:
    raise ValueError(f'--process_id={by_hand["process_id"]}: need a number below --num_processes='
                     f'{by_hand["num_processes"]}.')
  pod.start(**by_hand, start_timeout=FLAGS.start_timeout, heartbeat_timeout=FLAGS.heartbeat_timeout)
  ours = {f'--{name}': value for name, value in FLAGS.flag_values_dict().items() if name not in OWN_FLAGS}
  pod.check_agreement(ours | pod.installation())
  pod.check_agreement(pod.devices())


def _note_once():
  """Shows warnings as notes: on one process, and each once, whatever its numbers."""
  shown = set()

  def show(message, *_, **__):
    text = re.sub(r'\d+', '', str(message))
    if pod.is_first() and text not in shown:
      shown.add(text)
      print(f'Note: {message}', file=sys.stderr)

  return show


def _interrupt(*_):
  _interrupts.append(True)
  raise KeyboardInterrupt


def stop_if_interrupted():
  """Ends a run whose ctrl-C was lost, as one is that arrives while JAX collects garbage; for long loops."""
  if _interrupts:
    raise KeyboardInterrupt


def rule() -> cj.VerificationRule | cj.Budget:
  """The rule of --rule with its numbers from the flags of the same names."""
  cls = RULES[FLAGS.rule]
  own = {field.name: field.default for field in dataclasses.fields(cls)}
  for name in RULE_FIELDS.keys() - own.keys():
    if FLAGS[name].present:
      raise ValueError(f'--{name} means nothing to --rule={FLAGS.rule}: drop it, or choose the rule it belongs to '
                       f'({", ".join(RULE_FIELDS[name])}).')
  given = {name: getattr(FLAGS, name) for name in own if getattr(FLAGS, name) is not None}
  for name, default in own.items():
    if name not in given and default is dataclasses.MISSING:
      raise ValueError(f'--rule={FLAGS.rule} needs --{name}.')
  if cls is cj.Budget and not given:
    raise ValueError('--rule=budget needs --kl_per_token or --kl_total, in nats.')
  if FLAGS.static and (cls is cj.Budget or issubclass(cls, cj.TargetRule)):
    raise ValueError(f'--static means nothing to --rule={FLAGS.rule}, whose law is fixed already: drop it.')
  if FLAGS.block_verification and not (FLAGS.static or cls is cj.Budget or issubclass(cls, cj.TargetRule)):
    raise ValueError(f'--rule={FLAGS.rule} has no fixed target law, so it cannot be verified by blocks: add --static, '
                     'which aims at the law that it emits.')
  return cj.Static(cls(**given)) if FLAGS.static else cls(**given)


def sampling() -> cj.SamplingParams:
  """The sampling parameters of the flags."""
  return cj.SamplingParams(temperature=FLAGS.temperature, top_k=FLAGS.top_k, top_p=FLAGS.top_p, min_p=FLAGS.min_p)


def verifier_source() -> str:
  """Where the verifier comes from."""
  return FLAGS.verifier or os.fspath(cj.default_model_path())


def verifier(mesh=None) -> cj.Transformer:
  """The verifier of the flags, on a mesh."""
  return _load(verifier_source(), mesh, FLAGS.quantize)


def _load(source, mesh, quantize):
  return cj.load_transformer(source, mesh=mesh, dtype=FLAGS.dtype, quantize=quantize, kv_dtype=FLAGS.kv_dtype)


def mesh() -> jax.sharding.Mesh | None:
  """The mesh of all devices, of all processes, that the flags ask for; None for one device.

  Of data and model what is not given takes the devices that are left; if neither is, model takes them.
  """
  count, data, fsdp, model = jax.device_count(), FLAGS.mesh_data, FLAGS.mesh_fsdp or 1, FLAGS.mesh_model
  if data is None:
    data = 1 if model is None else max(count // (fsdp * model), 1)
  if model is None:
    model = max(count // (data * fsdp), 1)
  return None if count == data == fsdp == model == 1 else sharding.make_mesh(data=data, fsdp=fsdp, model=model)


def num_draft() -> int:
  """Tokens drafted a round. Raises ValueError for 'auto': this is for programs that need a number."""
  if FLAGS.num_draft == 'auto':
    raise ValueError('--num_draft=auto: this program needs a number.')
  return FLAGS.num_draft


def draft_mesh(mesh) -> jax.sharding.Mesh | None:
  """The mesh of the draft, if it is a model of its own: that of the verifier, or narrower by --draft_devices."""
  _check_draft(draft_name())
  if FLAGS.draft_devices is None:
    return mesh
  if mesh is None:
    raise ValueError(f'--draft_devices={FLAGS.draft_devices}: there is one device; drop it.')
  try:
    return sharding.narrow(mesh, FLAGS.draft_devices)
  except ValueError as error:
    raise ValueError(f'--draft_devices: {error}') from None


def _check_draft(name):
  """Raises ValueError for flags of draft models where the draft of this name is none."""
  if name.partition(':')[0] in ('none', 'lookup', 'early_exit'):
    for flag in ('draft_devices', 'draft_quantize'):
      if getattr(FLAGS, flag) is not None:
        raise ValueError(f'--{flag} means nothing to --draft={name}, which is no model of its own: drop it.')


def draft_name() -> str:
  """What --draft says, or means where it is not given."""
  packaged = FLAGS.verifier is None and cj.default_draft_path() is not None
  return FLAGS.draft or ('distilled' if packaged else 'lookup')


def draft(target, mesh=None, tokenizer=None):
  """The draft of --draft, on a mesh, and its tokenizer or None where it has none of its own.

  Args: tokenizer, the verifier's, if it is there already.
  """
  return draft_named(draft_name(), target, mesh, tokenizer)


def draft_named(name, target, mesh=None, tokenizer=None):
  """As `draft`, for a name of the same form."""
  _check_draft(name)
  kind, _, layers = name.partition(':')
  if name == 'none':
    return None, None
  if name == 'lookup':
    return cj.PromptLookup(), None
  if kind == 'early_exit':
    if not layers.isdigit():
      raise ValueError(f'--draft={name}: need the number of layers, as in early_exit:8.')
    return target.early_exit(int(layers)), None
  folder = distilled_folder(name)
  if folder is not None:
    if FLAGS.draft_devices is not None:
      raise ValueError(f'--draft_devices: the draft {name} shares its verifier\'s embedding, and its devices: drop it.')
    tokenizer = tokenizer or cj.load_tokenizer(verifier_source())
    return cj.load_draft(folder, target, tokenizer, quantize=FLAGS.draft_quantize), None
  return _load(name, mesh, FLAGS.draft_quantize), cj.load_tokenizer(name)


def distilled_folder(name):
  """Where the distilled draft of that name is; None if it is another kind of draft."""
  if name != 'distilled':
    return name if student.is_student(name) else None
  folder = cj.default_draft_path()
  if folder is None:
    raise ValueError('--draft=distilled: none is installed with this package; make one with '
                     'experiments/distill_draft.py and name its folder.')
  return folder


def describe_verifier() -> str:
  """Which it is, and how it is held."""
  how = ''.join(f', {name} {value}' for name, value in held().items() if value)
  return f'verifier {settings()["verifier"]}{how}'


def describe(mesh=None) -> str:
  """One line that says what is about to run, and on which mesh."""
  tokens = 'as many tokens a round as pay' if FLAGS.num_draft == 'auto' else f'{FLAGS.num_draft} tokens a round'
  drafting = 'no draft' if draft_name() == 'none' else f'draft {draft_name()}, {tokens}'
  by_block = ', verified by blocks' if FLAGS.block_verification else ''
  line = f'{describe_verifier()}; {drafting}; rule {rule()}{by_block}'
  if mesh is None:
    return line
  axes = ' x '.join(f'{name}={size}' for name, size in mesh.shape.items())
  drafters = f', draft on groups of {FLAGS.draft_devices}' if FLAGS.draft_devices else ''
  processes = f' of {jax.process_count()} processes' if jax.process_count() > 1 else ''
  return f'{line}; {mesh.size} devices{processes}: {axes}{drafters}'


def given() -> dict:
  """The flags of the command line, as they were given."""
  return {name: FLAGS[name].value for name in FLAGS if FLAGS[name].present}


def machine() -> str:
  """What the figures of this run were measured on."""
  cores = schedule.cores()
  return f'{jax.devices()[0].device_kind}, {cores} core{"s" * (cores != 1)}, jax {jax.__version__}'


def settings() -> dict:
  """Everything that determines an answer, to be stored with it."""
  names = ['block_verification', 'ledger', 'num_draft', 'stop_entropy', 'temperature', 'top_k', 'top_p', 'min_p',
           'max_new_tokens', 'stop', 'seed', 'raw']
  verifier = FLAGS.verifier or os.path.basename(verifier_source())
  named = {'verifier': verifier, 'draft': draft_name(), 'rule': str(rule())}
  return named | held() | {name: getattr(FLAGS, name) for name in names}


def held() -> dict:
  """How models are held; None is the default."""
  return {name: getattr(FLAGS, name) for name in MODEL_FLAGS}


def text_options() -> dict:
  """The options of `generate_text` that are no models, rules or laws."""
  names = ('max_new_tokens', 'stop', 'seed', 'raw', 'ledger', 'block_verification', 'stop_entropy')
  num_draft = cj.AutoDraft(folder=COSTS) if FLAGS.num_draft == 'auto' else FLAGS.num_draft
  return {'num_draft': num_draft} | {name: getattr(FLAGS, name) for name in names}
