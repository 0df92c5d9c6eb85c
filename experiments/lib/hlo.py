"""What a compiled TPU program moves and computes, counted from its optimised HLO.

XLA's own `cost_analysis()['bytes accessed']` counts a weight twice that is copied to VMEM before it is used. Here each
instruction counts what it reads from and writes to HBM: operands and results in memory space 0, an asynchronous copy or
slice once, a slice or an update in place by its own size, the body of a loop as often as it runs.
"""

import collections
import dataclasses
import functools
import math
import re

DTYPE_BITS = {'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 's32': 32, 'u32': 32, 's64': 64,
              'u64': 64, 'bf16': 16, 'f16': 16, 'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128, 'token': 0, 'opaque': 0,
              'f8e4m3fn': 8, 'f8e5m2': 8}
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
               'collective-broadcast', 'ragged-all-to-all')
# Opcodes that move nothing by themselves.
FREE = frozenset("""
parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id add-dependency domain
opt-barrier optimization-barrier get-dimension-size copy-done slice-done async-done async-update all-reduce-done
all-gather-done collective-permute-done send-done recv-done
""".split())
HBM, VMEM, HOST = 0, 1, 5
# A branch with this name scope is taken only where the usual one does not suffice.
FALLBACK = 'fallback'

_SHAPE = re.compile(r'([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?')
_INSTRUCTION = re.compile(r'^\s*(ROOT\s+)?%([\w.\-]+) = ')
_CALLED = re.compile(r'(?:calls|to_apply|body|condition|branch_computations|called_computations)='
                     r'(?:\{([^{}]*)\}|%([\w.\-]+))')


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array of an instruction's type."""

  dtype: str
  dims: tuple[int, ...]
  space: int  # memory space: 0 HBM, 1 VMEM
  bytes: int  # with the padding of its tiles


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of HLO."""

  name: str
  shapes: tuple[Shape, ...]
  opcode: str
  operands: tuple[str, ...]
  called: tuple[str, ...]
  attributes: str
  is_root: bool
  index: int  # of a parameter; the value of a whole constant

  @property
  def cycles(self):
    """The compiler's estimate, or 0."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found[1]) if found else 0

  @property
  def op_name(self):
    """Where in the program it comes from."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ''


@dataclasses.dataclass(frozen=True)
class Cost:
  """What runs in one pass through a computation."""

  hbm_bytes: float = 0.0  # read and written
  cycles: float = 0.0  # the compiler's estimates
  collectives: tuple[tuple[str, float, float], ...] = ()  # (kind, how many, bytes of the results)

  def times(self, n):
    return Cost(self.hbm_bytes * n, self.cycles * n, tuple((k, c * n, b * n) for k, c, b in self.collectives))

  def __add__(self, other):
    total = collections.OrderedDict()
    for kind, count, size in self.collectives + other.collectives:
      have = total.get(kind, (0, 0))
      total[kind] = (have[0] + count, have[1] + size)
    return Cost(self.hbm_bytes + other.hbm_bytes, self.cycles + other.cycles,
                tuple((kind, *value) for kind, value in total.items()))

  @property
  def num_collectives(self):
    return sum(count for _, count, _ in self.collectives)

  @property
  def collective_bytes(self):
    return sum(size for _, _, size in self.collectives)


def parse_shapes(text) -> tuple[Shape, ...]:
  """All arrays of a type, tuples flattened: 'bf16[8,128]{1,0:T(8,128)(2,1)S(1)}' or '(f32[2]{0}, s32[])'."""
  shapes = []
  for dtype, dims, layout in _SHAPE.findall(re.sub(r'/\*.*?\*/', '', text)):
    if dtype not in DTYPE_BITS:
      raise ValueError(f'unknown element type {dtype!r} in the HLO: add it to DTYPE_BITS.')
    dims = tuple(int(d.lstrip('<=')) for d in dims.split(',') if d)
    space = re.search(r'S\((\d+)\)', layout)
    shapes.append(Shape(dtype, dims, int(space[1]) if space else HBM, _padded_bytes(dtype, dims, layout)))
  return tuple(shapes)


def _padded_bytes(dtype, dims, layout):
  order, _, rest = layout.partition(':')
  tile = re.match(r'T\(([\d,]+)\)', rest)
  sizes = [dims[int(i)] for i in order.split(',') if i]  # minor first
  if tile:
    for place, width in enumerate(reversed([int(t) for t in tile[1].split(',')])):
      if place < len(sizes):
        sizes[place] = -(-sizes[place] // width) * width
  return math.prod(sizes) * DTYPE_BITS[dtype] // 8 if sizes else DTYPE_BITS[dtype] // 8


class Module:
  """The computations of an HLO module as text gives them."""

  def __init__(self, text):
    self.computations, self.entry, current = {}, None, None
    for line in text.splitlines():
      if line.endswith('{') and not line.startswith(' ') and '->' in line:
        name = re.match(r'(ENTRY\s+)?%?([\w.\-]+)', line)
        current = self.computations.setdefault(name[2], {})
        self.entry = name[2] if name[1] else self.entry
      elif line.startswith('}'):
        current = None
      elif current is not None and (found := _INSTRUCTION.match(line)):
        instruction = _instruction(found, line[found.end():])
        current[instruction.name] = instruction
    if self.entry is None:
      raise ValueError('this text has no ENTRY computation: need the HLO of a compiled program, compiled.as_text().')

  def instructions(self, computation=None):
    """(instruction, computation, how often) of everything that runs, loops of known length multiplied out."""
    yield from self._walk(self.entry if computation is None else computation, 1.0)

  def _walk(self, name, times):
    for instruction in self.computations[name].values():
      yield instruction, name, times
      if instruction.opcode in ('while', 'call', 'conditional', 'async-start'):
        for called in instruction.called:
          yield from self._walk(called, times * self.trip_count(instruction, name))

  def trip_count(self, instruction, computation) -> int:
    """How often the body of a `while` runs, if it counts up to a constant; else 1."""
    if instruction.opcode != 'while':
      return 1
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
    if found:
      return int(found[1])
    condition = self.computations[re.search(r'condition=%([\w.\-]+)', instruction.attributes)[1]]
    root = next(i for i in condition.values() if i.is_root)
    if root.opcode != 'compare' or 'direction=LT' not in root.attributes:
      return 1
    counter, bound = (condition[name] for name in root.operands)
    if counter.opcode != 'get-tuple-element' or bound.opcode != 'constant':
      return 1
    place = int(re.search(r'index=(\d+)', counter.attributes)[1])
    initial = self.computations[computation][instruction.operands[0]]
    start = self.computations[computation].get(initial.operands[place]) if initial.opcode == 'tuple' else None
    return bound.index - (start.index if start is not None and start.opcode == 'constant' else 0)

  def loops(self):
    """The `while` instructions of the whole program, each with the name of its body."""
    return [(i, body_of(i)) for c in self.computations.values() for i in c.values() if i.opcode == 'while']

  @functools.cache
  def cost(self, computation=None) -> Cost:
    """What one pass through a computation costs; a loop of unknown length runs once, of branches the dearest runs."""
    name = self.entry if computation is None else computation
    total = Cost()
    for instruction in self.computations[name].values():
      total += self._cost_of(instruction, name)
    return total

  def _cost_of(self, i, computation):
    if i.opcode in ('while', 'call', 'async-start'):
      return functools.reduce(Cost.__add__, map(self.cost, i.called), Cost()).times(self.trip_count(i, computation))
    if i.opcode == 'conditional':
      usual = [name for name in i.called if not self._is_fallback(name)] or i.called
      return max(map(self.cost, usual), key=lambda cost: (cost.cycles, cost.hbm_bytes))
    kind = i.opcode.removesuffix('-start')
    collectives = ()
    if kind in COLLECTIVES:
      collectives = ((kind, 1.0, float(max((s.bytes for s in i.shapes), default=0))),)
    return Cost(float(self.hbm_bytes(i, computation)), float(i.cycles), collectives)

  @functools.cache
  def _is_fallback(self, computation):
    return any(f'/{FALLBACK}/' in i.op_name for i in self.computations[computation].values())

  def hbm_bytes(self, i, computation):
    """Bytes that one instruction reads from and writes to HBM."""
    if i.opcode in FREE:
      return 0
    scope = self.computations[computation]
    of = lambda name: scope[name].shapes if name in scope else ()
    in_hbm = lambda shapes: sum(s.bytes for s in shapes if s.space == HBM)
    if i.opcode in ('copy-start', 'slice-start'):
      # The type is (destination, source, context) of a copy, ((source), destination, context) of a slice.
      moved = i.shapes[0 if i.opcode == 'copy-start' else -2]
      source = of(i.operands[0])[0]
      return moved.bytes * ((source.space == HBM) + (moved.space == HBM))
    if i.opcode == 'dynamic-update-slice':
      update = of(i.operands[1])
      written = update[0].bytes if update and i.shapes[0].space == HBM else 0
      return written + in_hbm(update)
    if i.opcode in ('dynamic-slice', 'slice', 'gather'):
      read = i.shapes[0].bytes if in_hbm(of(i.operands[0])) else 0
      return read + in_hbm(i.shapes)
    if i.opcode == 'scatter':
      updates = of(i.operands[2])
      return in_hbm(updates) + (updates[0].bytes if in_hbm(i.shapes) else 0)
    if i.opcode == 'fusion':
      return self._fusion_bytes(i, of)
    results = i.shapes[: len(i.shapes) // 2] if i.opcode.endswith('-start') else i.shapes
    return sum(in_hbm(of(name)) for name in dict.fromkeys(i.operands)) + in_hbm(results)

  def _fusion_bytes(self, i, of):
    inside = self.computations[i.called[0]]
    parameters = {x.index: x for x in inside.values() if x.opcode == 'parameter'}
    root = next(x for x in inside.values() if x.is_root)
    total = 0
    for place, name in enumerate(i.operands):
      if any(s.space == HBM for s in of(name)) and place in parameters:
        total += self._read_of(parameters[place].name, inside, sum(s.bytes for s in of(name) if s.space == HBM))
    for place, shape in enumerate(i.shapes):
      if shape.space == HBM:
        maker = root if root.opcode != 'tuple' else inside[root.operands[place]]
        total += min(self._written_by(maker, inside), shape.bytes)
    return total

  def _read_of(self, name, inside, whole):
    """Bytes of a fusion's operand that are read: all, unless only slices of it are looked at."""
    size = 0
    for user in (x for x in inside.values() if name in x.operands):
      if user.opcode == 'bitcast' and not user.is_root:
        size += self._read_of(user.name, inside, whole)
      elif user.opcode in ('dynamic-slice', 'slice', 'gather') and user.operands[0] == name:
        size += sum(s.bytes for s in user.shapes)
      elif user.opcode in ('dynamic-update-slice', 'scatter') and user.operands[0] == name:
        pass  # updated in place
      elif user.opcode == 'fusion' and self._passes_on(user):
        size += self._read_of(user.name, inside, whole)
      elif user.opcode == 'fusion':
        nested = self.computations[user.called[0]]
        for place in (k for k, operand in enumerate(user.operands) if operand == name):
          parameter = next(x for x in nested.values() if x.opcode == 'parameter' and x.index == place)
          size += self._read_of(parameter.name, nested, whole)
      else:
        return whole
    return min(size, whole)

  def _passes_on(self, i):
    """Whether a nested fusion is nothing but another view of its operand."""
    return all(x.opcode in ('parameter', 'bitcast') for x in self.computations[i.called[0]].values())

  def _written_by(self, maker, inside):
    """Bytes that the root of a fusion writes: its result, or the updated part of what it updates in place."""
    while maker.opcode == 'bitcast':
      maker = inside[maker.operands[0]]
    if maker.opcode in ('dynamic-update-slice', 'scatter'):
      return sum(s.bytes for s in inside[maker.operands[1 if maker.opcode == 'dynamic-update-slice' else 2]].shapes)
    if maker.opcode == 'fusion':
      nested = self.computations[maker.called[0]]
      return self._written_by(next(x for x in nested.values() if x.is_root), nested)
    return sum(s.bytes for s in maker.shapes)

  def host_transfers(self, computation=None):
    """Names of the instructions that wait for the host."""
    return [i.name for i, *_ in self.instructions(computation)
            if i.opcode in ('infeed', 'outfeed') or 'is_host_transfer=true' in i.attributes
            or (i.opcode == 'custom-call' and 'callback' in i.attributes)
            or any(s.space == HOST for s in i.shapes)]

  def large_copies(self, computation=None, at_least=1 << 20):
    """(name, bytes, where from) of copies and transposes within HBM: an array that is laid out anew."""
    found = []
    for i, where, _ in self.instructions(computation):
      relayout = i.opcode in ('copy', 'transpose', 'copy-start') or (i.opcode == 'fusion' and self._only_moves(i))
      if relayout and i.shapes[0].space == HBM and i.shapes[0].bytes >= at_least:
        found.append((i.name, i.shapes[0].bytes, i.op_name))
    return found

  def _only_moves(self, i):
    moves = {'parameter', 'copy', 'transpose', 'bitcast', 'reshape', 'fusion', 'tuple', 'get-tuple-element'}
    inside = self.computations[i.called[0]].values()
    return any(x.opcode in ('copy', 'transpose') for x in inside) and all(
        x.opcode in moves and (x.opcode != 'fusion' or self._only_moves(x)) for x in inside)


def body_of(loop) -> str:
  return re.search(r'body=%([\w.\-]+)', loop.attributes)[1]


def _instruction(found, rest):
  """From the text after 'name = '."""
  depth = 0
  for end, letter in enumerate(rest):  # the type ends at the first space outside brackets
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ' ' and depth == 0:
      break
  kind, rest = rest[:end], rest[end + 1:]
  opcode = re.match(r'[\w\-]+', rest)[0]
  depth, begin = 0, len(opcode)
  for end in range(begin, len(rest)):
    depth += (rest[end] in '([{') - (rest[end] in ')]}')
    if depth == 0:
      break
  inner, attributes = rest[begin + 1: end], rest[end + 1:]
  called = []
  if opcode in ('fusion', 'while', 'call', 'conditional', 'async-start'):
    for several, one in _CALLED.findall(attributes):
      called += [name.strip().lstrip('%') for name in several.split(',')] if several else [one]
  if opcode == 'conditional':
    called += re.findall(r'(?:true|false)_computation=%([\w.\-]+)', attributes)
  return Instruction(
      name=found[2], shapes=parse_shapes(kind), opcode=opcode,
      operands=tuple(re.findall(r'%([\w.\-]+)', inner)) if opcode != 'constant' else (),
      called=tuple(called), attributes=attributes, is_root=bool(found[1]),
      index=int(inner) if opcode in ('parameter', 'constant') and re.fullmatch(r'-?\d+', inner) else 0)
