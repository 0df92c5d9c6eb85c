"""Decoding compiled for TPU slices that are not there: the programs, what they cost, and what that would mean."""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import cactus_jax as cj
from cactus_jax import decode, sharding
from cactus_jax.models import cache, transformer
from lib import chips, hlo

GB = 1e9
# A slice is recommended if weights and caches leave this much of its memory to the programs.
ROOM = 0.05


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is compiled for what."""

  topology: str  # 'v5e:2x4'
  batch: int
  num_draft: int
  cache_length: int  # slots
  prompt_length: int
  vocab_size: int  # tokens of the tokenizer
  dtype: str = 'bfloat16'
  data: int = 1
  fsdp: int = 1
  latency: float = chips.COLLECTIVE_LATENCY  # seconds


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program, with figures of one device."""

  name: str
  module: hlo.Module
  body: tuple[str, str] | None  # the loop's body and condition, if the program is a loop: what `cost` is of
  cost: hlo.Cost
  arguments: int  # bytes
  temporaries: int  # bytes
  peak: int  # bytes: arguments, temporaries, and outputs that do not share memory with arguments
  compile_seconds: float

  @property
  def laws(self) -> hlo.Cost:
    """The part that is no forward pass of a model: laws, sampling, acceptance, the tokens."""
    parts = self.module.costs(self.body, lambda i: bool(i.op_name) and '/forward/' not in i.op_name)
    return parts.get(True, hlo.Cost())


def chip_of(topology) -> chips.Chip:
  """The chip of 'v5e:2x4'. Raises ValueError for one whose figures are not known."""
  name = topology.partition(':')[0]
  if name not in chips.CHIPS or ':' not in topology:
    raise ValueError(f'topology={topology!r}: need a chip and a slice, as v5e:2x4; the chips known are '
                     f'{", ".join(chips.CHIPS)} (lib/chips.py).')
  return chips.CHIPS[name]


def devices_of(topology):
  """The pretended devices of a slice. Raises ValueError without libtpu, and for a slice that there is not."""
  chip, library = chip_of(topology), os.environ.get('TPU_LIBRARY_PATH')
  if library and not pathlib.Path(library).is_file():
    raise ValueError(f'TPU_LIBRARY_PATH={library}: there is no such file; it names the libtpu.so to compile with.')
  if not library and importlib.util.find_spec('libtpu') is None:
    raise ValueError('libtpu is not installed: run `pip install -e .[tpu]` (or pip install libtpu); it compiles for '
                     'TPUs on any Linux machine.')
  slice_name = topology.partition(':')[2]
  if slice_name not in chip.slices:  # libtpu would lay out some that nobody can have
    raise ValueError(f'topology={topology!r}: there is no such slice; those known are {", ".join(chip.slices)}.')
  # libtpu takes hosts to have 2x2 chips, and refuses a slice that is less than a host.
  options = {'chips_per_host_bounds': (1, 1, 1)} if slice_name == '1x1' else {}
  try:
    return topologies.get_topology_desc(topology, platform='tpu', **options).devices
  except Exception as error:  # no common base
    raise ValueError(f'libtpu cannot be used for {topology}: {str(error).splitlines()[0]}') from None


def abstract_model(config, mesh, dtype) -> cj.Transformer:
  """A model of shapes and shardings, without weights."""
  config = config.split(mesh.shape['model'])
  leaf = lambda spec: jax.ShapeDtypeStruct(
      spec.shape, dtype, sharding=sharding.sharding_of(mesh, spec.axes, spec.shape))
  return cj.Transformer(jax.tree.map(leaf, transformer.abstract(config)), config, mesh)


def bytes_on_device(tree) -> int:
  """What the arrays of a tree take on one device."""
  return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_of(config, setting, mesh) -> int:
  """What weights and cache of a model take on one device of a mesh, which may be an abstract one."""
  config = config.split(mesh.shape['model'])
  arrays = [(spec.axes, spec.shape) for spec in jax.tree.leaves(transformer.abstract(config))]
  slots = (setting.batch, config.cache_heads, setting.cache_length, config.head_dim)
  arrays += [(cache.AXES, slots)] * (2 * config.num_layers)
  sizes = (sharding.sharding_of(mesh, axes, shape).shard_shape(shape) for axes, shape in arrays)
  return sum(int(np.prod(size)) for size in sizes) * jnp.dtype(setting.dtype).itemsize


class Compiler:
  """Compiles the programs of one setting."""

  def __init__(self, setting, report=lambda line: None):
    self.setting, self._report = setting, report
    self.chip = chip_of(setting.topology)
    devices = devices_of(setting.topology)
    groups = setting.data * setting.fsdp
    if len(devices) % groups:
      raise ValueError(f'data={setting.data} x fsdp={setting.fsdp} does not divide the {len(devices)} chips of '
                       f'{setting.topology}.')
    if setting.batch % groups:
      raise ValueError(f'batch={setting.batch} does not split over {groups} groups of chips: choose a multiple.')
    self.mesh = sharding.make_mesh(setting.data, len(devices) // groups, setting.fsdp, devices)
    if setting.cache_length <= setting.num_draft + setting.prompt_length:
      raise ValueError(f'cache_length={setting.cache_length} has no room for prompts of {setting.prompt_length} '
                       'tokens: raise it, or lower prompt_length.')
    self._config = decode.DecodeConfig(
        num_draft=setting.num_draft, max_length=setting.cache_length - setting.num_draft - 1,
        vocab_size=setting.vocab_size, eos_ids=(0,))

  def model(self, config, group=None) -> cj.Transformer:
    """The model on the mesh, or shared by groups of so many chips only."""
    mesh = self.mesh if group is None else sharding.narrow(self.mesh, group)
    return abstract_model(config, mesh, jnp.dtype(self.setting.dtype))

  def _inputs(self, target, draft):
    B, rows = self.setting.batch, sharding.rows(self.mesh)
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    number = of((B,), jnp.int32)
    return (target, draft, of((B, self.setting.prompt_length), jnp.int32), number, of(keys.shape, keys.dtype), number)

  def state(self, target, draft) -> cj.DecodeState:
    """The state of decoding, as shapes and shardings."""
    state = jax.eval_shape(lambda *inputs: decode._prefill(*inputs, self._config), *self._inputs(target, draft))
    rows = sharding.rows(self.mesh)
    placed = lambda tree, where: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), tree)
    caches = {}
    for name, model in (('target_cache', target), ('draft_cache', draft)):
      where = lambda x, model=model: sharding.sharding_of(model.mesh, cache.AXES, x.shape)
      caches[name] = placed(getattr(state, name), where)
    return placed(state.replace(target_cache=None, draft_cache=None), lambda _: rows).replace(**caches)

  def loop(self, name, target, draft, rule=cj.Exact()) -> Program:
    """The loop of `generate`; its cost is that of one round."""
    self.check_fits(name, target, *([draft] if isinstance(draft, cj.Transformer) else []))
    state = self.state(target, draft)
    numbers = lambda record: jax.tree.map(lambda _: jax.ShapeDtypeStruct(
        (self.setting.batch,), jnp.float32, sharding=sharding.rows(self.mesh)), record)
    bound = jax.ShapeDtypeStruct((), jnp.int32)
    lower = lambda: decode._loop(state).lower(
        target, draft, numbers(rule), numbers(cj.SamplingParams()), state, bound, bound, self._config)
    return self._compile(name, lower, loop=True)

  def prefill(self, target, draft) -> Program:
    """Reading the prompts."""
    program = decode._program(decode._prefill, decode.prefill_layout(sharding.rows(self.mesh), self._config))
    return self._compile('prefill', lambda: program.lower(*self._inputs(target, draft), self._config), loop=False)

  def check_fits(self, name, *models):
    """Raises ValueError if one chip cannot hold weights and caches of models, with the smallest slice that could."""
    setting, hbm = self.setting, self.chip.hbm_bytes
    need = sum(bytes_of(model.config, setting, model.mesh) for model in models)
    if need <= hbm:
      return
    family, advice = setting.topology.partition(':')[0], 'no slice known holds it'
    for name_of_slice in self.chip.slices:
      width, rest = divmod(chips.chips_of(name_of_slice), setting.data * setting.fsdp)
      if not rest and width and self._need_on(models, width) <= (1 - ROOM) * hbm:
        advice = f'the smallest slice that would hold it is {family}:{name_of_slice}'
        break
    raise ValueError(
        f'{name} needs {need / GB:.1f} GB on each chip of {setting.topology}, {(need - hbm) / GB:.1f} GB more than its '
        f'{hbm / GB:.0f} GB: {advice} (or choose a smaller batch or cache_length, or other groups).')

  def _need_on(self, models, width):
    """What they would take on a chip if `width` of them shared a model; a draft stays with as many as it has."""
    total = 0
    for model in models:
      shared = model.mesh.shape['model'] if model.mesh.shape.get('replica', 1) > 1 else width
      if width % shared:
        return math.inf
      sizes = {'data': self.setting.data, 'fsdp': self.setting.fsdp, 'replica': width // shared, 'model': shared}
      mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
      total += bytes_of(model.config, self.setting, mesh)
    return total

  def _compile(self, name, lower, loop):
    start = time.perf_counter()
    try:
      compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      raise ValueError(f'{name} does not fit a chip of {self.setting.topology}: '
                       f'{" ".join(str(error).split())[:300]}') from None
    spent = time.perf_counter() - start
    module, memory = hlo.Module(compiled.as_text()), compiled.memory_analysis()
    body = module.main_loop() if loop else None
    peak = (memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
            - memory.alias_size_in_bytes)
    self._report(f'{name}: compiled in {spent:.0f} s')
    return Program(name, module, body, module.cost(body), memory.argument_size_in_bytes, memory.temp_size_in_bytes,
                   peak, spent)


def flops_of(model, setting, tokens, logits=True) -> float:
  """Floating point operations of one chip in a forward pass over so many tokens a row, its whole cache attended to.

  logits: whether they are computed, as they are not while a prompt is read.
  """
  config = model.config
  specs = transformer.abstract(config)
  matrices = sum(int(np.prod(s.shape)) for s in jax.tree.leaves(specs.layers) if len(s.shape) == 2)
  head = config.vocab_size * config.embed_dim if logits else 0
  width = model.mesh.shape['model']
  attention = 2 * config.num_layers * config.num_heads * config.head_dim * setting.cache_length
  attention *= width if config.cache_heads % width else 1  # not shared out
  rows = sharding.batch_per_device(model.mesh, setting.batch)
  return 2 * rows * tokens * (matrices + head + attention) / width


def least_bytes(model, state_cache, setting, tokens) -> int:
  """Bytes that a pass reads at least: weights (but an embedding that is no head), cache, a share of the logits."""
  params = model.params
  if params.head is not None:
    params = params.replace(embed=None)
  laws = 4 * setting.batch * tokens * model.config.vocab_size // model.mesh.size
  return bytes_on_device((params, state_cache)) + laws


def figures(program, flops, chip, devices, setting, least=None) -> dict:
  """What a program costs one chip, as a row of JSON."""
  estimate = chips.seconds(program.cost, flops, chip, devices, setting.latency)
  laws = program.laws
  return {
      'program': program.name,
      'arguments_gb': program.arguments / GB, 'temporaries_gb': program.temporaries / GB, 'peak_gb': program.peak / GB,
      'hbm_gb': chip.hbm_bytes / GB, 'fits': program.peak <= chip.hbm_bytes,
      'hbm_mb': program.cost.hbm_bytes / 1e6, 'least_hbm_mb': least and least / 1e6, 'gflops': flops / 1e9,
      'collectives': {kind: [count, size] for kind, count, size in program.cost.collectives},
      'host_transfers': program.module.host_transfers(program.body),
      'laid_out_anew': [name for name, *_ in program.module.large_copies(program.body, given_only=True)],
      'compiler_megacycles': program.cost.cycles / 1e6,
      'laws': {'hbm_mb': laws.hbm_bytes / 1e6, 'megacycles': laws.cycles / 1e6, 'collectives': laws.num_collectives,
               'estimate_ms': 1e3 * chips.seconds(laws, 0.0, chip, devices, setting.latency).total},
      'estimate_ms': {'total': 1e3 * estimate.total, 'hbm': 1e3 * estimate.hbm, 'compute': 1e3 * estimate.compute,
                      'collectives': 1e3 * estimate.collectives},
      'compile_seconds': program.compile_seconds,
  }


def compile_pair(verifier, draft, rule, setting, acceptances, report=lambda line: None, whole=True) -> dict:
  """Everything there is to say of a pair (two `ModelConfig`) on a slice.

  Compiled are a plain step, a verification of K + 1 tokens, a step of the draft on one chip and on all and, if `whole`,
  also of the draft on 2, 4, ... chips, prefill, and the whole loop with the draft that the estimate finds quickest.
  """
  work = Compiler(setting, report)
  target, width = work.model(verifier), work.mesh.shape['model']
  rows = {}
  work.check_fits('the pair', target, work.model(draft))

  def add(program, flops, devices=width, least=None):
    rows[program.name] = figures(program, flops, work.chip, devices, setting, least)
    return rows[program.name]['estimate_ms']['total'] / 1e3

  cache_of = lambda model: work.state(model, None).target_cache
  K, target_cache = setting.num_draft, cache_of(target)
  plain = add(work.loop('plain step', target, None), flops_of(target, setting, 1),
              least=least_bytes(target, target_cache, setting, 1))
  verify = add(work.loop(f'verify {K + 1}', target, cj.PromptLookup(), rule), flops_of(target, setting, K + 1),
               least=least_bytes(target, target_cache, setting, K + 1))
  drafts = {}
  for group in (g for g in range(1, width + 1) if width % g == 0 and (whole or g in (1, width))):
    model = work.model(draft, group)
    name = f'draft step on {group}'
    try:
      work.check_fits(f'the pair with the draft on {group}', target, model)
      drafts[group] = add(work.loop(name, model, None), flops_of(model, setting, 1), group,
                          least_bytes(model, cache_of(model), setting, 1))
    except ValueError as error:  # too large for so few chips, which is an answer too
      report(str(error))
  if not drafts:
    raise ValueError('the draft fits no group of chips: see above.')
  group = min(drafts, key=drafts.get)
  drafter = work.model(draft, group)
  if whole:
    add(work.prefill(target, drafter), sum(
        flops_of(model, setting, setting.prompt_length, logits=False) for model in (target, drafter)))
    least = (rows[f'verify {K + 1}']['least_hbm_mb'] + K * rows[f'draft step on {group}']['least_hbm_mb']) * 1e6
    add(work.loop('generate', target, drafter, rule), flops_of(target, setting, K + 1)
        + (K + 1) * flops_of(drafter, setting, 1), least=least)
  predicted = {}
  for a in acceptances:
    best, gain = chips.best_num_draft(a, K, plain, verify, drafts[group])
    predicted[str(a)] = {
        'speedup': chips.speedup(a, K, plain, verify, drafts[group]),
        'tokens_per_second': setting.batch * chips.tokens_per_round(a, K) / (verify + K * drafts[group]),
        'best_num_draft': best, 'best_speedup': gain}
  return {
      'setting': dataclasses.asdict(setting), 'versions': versions(), 'mesh': dict(work.mesh.shape), 'programs': rows,
      'draft_on': group, 'draft_step_ms': {g: 1e3 * t for g, t in drafts.items()},
      'cost_ratio': drafts[group] / plain, 'plain_tokens_per_second': setting.batch / plain,
      'break_even_acceptance': chips.break_even(K, plain, verify, drafts[group]), 'predicted': predicted}


def versions() -> dict:
  """Of what compiled."""
  found = {name: importlib.metadata.version(name) for name in ('jax', 'jaxlib')}
  try:
    return found | {'libtpu': importlib.metadata.version('libtpu')}
  except importlib.metadata.PackageNotFoundError:  # named by TPU_LIBRARY_PATH
    return found


def table(found) -> str:
  """The figures of `compile_pair` as text."""
  lines = [f'{"":18s}{"HBM a chip, GB":>21s}{"HBM traffic, MB":>18s}{"times":>7s}{"GFLOP":>8s}{"collectives":>13s}'
           f'{"laws":>7s}{"estimate":>11s}{"compiled":>10s}',
           f'{"":18s}{"args   temps    peak":>21s}{"":18s}{"least":>7s}{"":8s}{"number, MB":>13s}{"":7s}{"ms":>11s}'
           f'{"s":>10s}']
  for name, row in found['programs'].items():
    number = sum(n for n, _ in row['collectives'].values())
    size = sum(b for _, b in row['collectives'].values()) / 1e6
    times = f'{row["hbm_mb"] / row["least_hbm_mb"]:.2f}' if row['least_hbm_mb'] else ''
    share = f'{100 * row["laws"]["estimate_ms"] / row["estimate_ms"]["total"]:.1f}%'
    lines.append(
        f'{name:18s}{row["arguments_gb"]:7.2f}{row["temporaries_gb"]:7.2f}{row["peak_gb"]:7.2f}{row["hbm_mb"]:18.0f}'
        f'{times:>7s}{row["gflops"]:8.1f}{number:7.0f} {size:5.1f}{share:>7s}{row["estimate_ms"]["total"]:11.2f}'
        f'{row["compile_seconds"]:10.0f}')
  problems = [f'{name}: {what}' for name, row in found['programs'].items() for what in _problems(row)]
  steps = ', '.join(f'{t:.2f} on {g}' for g, t in found['draft_step_ms'].items())
  lines += [
      '', *(problems or ['No host transfer and no weight or cache laid out anew in any loop; all of it fits.']),
      f'Estimates: the longer of HBM and compute at published peaks, plus {found["setting"]["latency"] * 1e6:g} us and '
      'the wire for each collective.',
      f'A draft step: {steps} chips (ms), so c = {found["cost_ratio"]:.2f}; plain decoding '
      f'{found["plain_tokens_per_second"]:.0f} tokens/s, all rows.',
  ]
  even, K = found['break_even_acceptance'], found['setting']['num_draft']
  lines.append(f'K = {K} pays above an acceptance of {even:.2f}.' if even is not None else f'K = {K} never pays.')
  lines.append(f'{"acceptance":>12s}{"tokens/s":>10s}{"speed-up":>10s}{"best K":>8s}{"speed-up":>10s}')
  for a, p in found['predicted'].items():
    lines.append(f'{a:>12s}{p["tokens_per_second"]:10.0f}{p["speedup"]:10.2f}{p["best_num_draft"]:8d}'
                 f'{p["best_speedup"]:10.2f}')
  return '\n'.join(lines)


def _problems(row):
  if row['host_transfers']:
    yield f'waits for the host ({", ".join(row["host_transfers"])})'
  if row['laid_out_anew']:
    yield f'lays arrays out anew: {", ".join(row["laid_out_anew"][:6])}'
  if not row['fits']:
    yield f'needs {row["peak_gb"]:.1f} GB of {row["hbm_gb"]:.0f}'
