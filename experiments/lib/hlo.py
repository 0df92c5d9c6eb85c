"""What a compiled TPU program moves and computes, counted from its optimised HLO.

XLA's own `cost_analysis()['bytes accessed']` counts a weight twice that is copied to VMEM before it is used. Here each
instruction counts what it reads from and writes to HBM: operands and results in memory space 0, an asynchronous copy or
slice once, a slice or an update in place by its own size, the body of a loop as often as it runs.
"""

import dataclasses
import math
import re

DTYPE_BITS = {'pred': 8, 's2': 2, 'u2': 2, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 's32': 32,
              'u32': 32, 's64': 64, 'u64': 64, 'bf16': 16, 'f16': 16, 'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128,
              'f4e2m1fn': 4, 'f8e4m3': 8, 'f8e4m3fn': 8, 'f8e5m2': 8, 'token': 0, 'opaque': 0}
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
               'collective-broadcast', 'ragged-all-to-all')
# Opcodes that move nothing by themselves.
FREE = frozenset("""
parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id add-dependency domain
opt-barrier optimization-barrier get-dimension-size copy-done slice-done async-done async-update all-reduce-done
all-gather-done collective-permute-done send-done recv-done
""".split())
# Custom calls that only give a name to memory, or promise something of what is in it.
FREE_CALLS = ('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound')
HBM, VMEM, SYNC, HOST = 0, 1, 2, 5
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
  space: int  # memory space: HBM, VMEM, SYNC (flags that something has happened), HOST or another
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
  def target(self):
    """What a custom call calls, or ''."""
    found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
    return found[1] if found else ''

  @property
  def results(self) -> tuple[Shape, ...]:
    """The arrays that it makes: of an asynchronous start, those that its done returns."""
    if self.opcode == 'copy-start':
      return self.shapes[:1]
    if not self.opcode.endswith('-start') or self.opcode == 'all-reduce-start':
      return self.shapes
    made = self.shapes[len(self.operands):]  # after the operands; flags come last, in a memory of their own
    return tuple(s for s in made if s.space in (HBM, VMEM))

  @property
  def aliased(self) -> frozenset[int]:
    """Places of the results that are the memory of an operand."""
    _, _, aliases = self.attributes.partition('output_to_operand_aliasing=')
    return frozenset(int(place or 0) for place in re.findall(r'\{(\d*)\}: \(\d+, \{[\d, ]*\}\)', aliases))

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
    total = {}
    for kind, count, size in self.collectives + other.collectives:
      have = total.get(kind, (0, 0))
      total[kind] = (have[0] + count, have[1] + size)
    return Cost(self.hbm_bytes + other.hbm_bytes, self.cycles + other.cycles,
                tuple((kind, *value) for kind, value in total.items()))

  @property
  def num_collectives(self):
    return sum(count for _, count, _ in self.collectives)


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
  sizes = [dims[int(i)] for i in order.split(',') if i] or list(reversed(dims))  # minor first
  if tile:
    for place, width in enumerate(reversed([int(t) for t in tile[1].split(',')])):
      if place < len(sizes):
        sizes[place] = -(-sizes[place] // width) * width
  return -(-math.prod(sizes) * DTYPE_BITS[dtype] // 8)


class Module:
  """The computations of an HLO module as text gives them."""

  def __init__(self, text):
    self.computations, self.entry, self._known, current = {}, None, {}, None
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

  def instructions(self, computation=None, all_branches=False):
    """(instruction, its computation, how often) of everything that one pass through a computation runs.

    A loop of unknown length runs once. Of the branches of a conditional the dearest runs, fallbacks left out; with
    all_branches, each.

    Args: computation, a name or several of them; by default the entry.
    """
    if isinstance(computation, tuple):
      for name in computation:
        yield from self.instructions(name, all_branches)
      return
    where = self.entry if computation is None else computation
    for i in self.computations[where].values():
      yield i, where, 1.0
      inner = ()
      if i.opcode in ('while', 'call', 'async-start') or (i.opcode == 'conditional' and all_branches):
        inner = i.called
      elif i.opcode == 'conditional':
        inner = (self._usual_branch(i),)
      times = self.trip_count(i, where)
      for called in inner:
        for found, place, count in self.instructions(called, all_branches):
          yield found, place, count * times

  def _usual_branch(self, conditional):
    usual = [name for name in conditional.called if not self._is_fallback(name)] or conditional.called
    return max(usual, key=lambda name: (self.cost(name).cycles, self.cost(name).hbm_bytes))

  def _is_fallback(self, computation):
    return any(f'/{FALLBACK}/' in i.op_name for i in self.computations[computation].values())

  def trip_count(self, instruction, computation) -> int:
    """How often the body of a `while` runs, if it counts up to a constant; else 1.

    A start that is not known is taken for 0, where most loops start.
    """
    if instruction.opcode != 'while':
      return 1
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
    if found:
      return int(found[1])
    body, condition = _parts_of(instruction)
    condition = self.computations[condition]
    root = _root(condition)
    if root.opcode != 'compare' or 'direction=LT' not in root.attributes:
      return 1
    counter, bound = (condition[name] for name in root.operands)
    if counter.opcode != 'get-tuple-element' or bound.opcode != 'constant':
      return 1
    place = int(re.search(r'index=(\d+)', counter.attributes)[1])
    begin = self._constant_at(self.computations[computation], self.computations[computation][instruction.operands[0]],
                              place)
    return max(0, -(-(bound.index - begin) // self._step(body, place)))

  def _constant_at(self, scope, i, place):
    """The constant at a place of a tuple, which may have been copied; 0 if it is none."""
    i = scope.get(i.operands[place]) if i.opcode == 'tuple' else None
    while i is not None and i.opcode in ('copy', 'bitcast', 'copy-start', 'copy-done'):
      i = scope.get(i.operands[0])
    return i.index if i is not None and i.opcode == 'constant' else 0

  def _step(self, body, place):
    """What the body adds to the counter at a place of its tuple; 1 if that is not to be seen."""
    body = self.computations[body]
    root = _root(body)
    counter = body.get(root.operands[place]) if root.opcode == 'tuple' else None
    steps = [body[name].index for name in counter.operands if name in body and body[name].opcode == 'constant'] if (
        counter is not None and counter.opcode == 'add') else []
    return steps[0] if len(steps) == 1 and steps[0] > 0 else 1

  def main_loop(self) -> tuple[str, str]:
    """Body and condition of the dearest loop of the entry: a round of decoding, in a program that decodes."""
    loops = [i for i in self.computations[self.entry].values() if i.opcode == 'while']
    if not loops:
      raise ValueError('this program has no loop.')
    return max((_parts_of(loop) for loop in loops), key=lambda parts: self.cost(parts).hbm_bytes)

  def cost(self, computation=None) -> Cost:
    """What one pass through a computation, or several, costs."""
    if computation not in self._known:
      self._known[computation] = sum(self.costs(computation, lambda i: None).values(), Cost())
    return self._known[computation]

  def costs(self, computation, label) -> dict:
    """{label(instruction): Cost} of one pass through a computation."""
    found = {}
    for i, where, times in self.instructions(computation):
      key = label(i)
      found[key] = found.get(key, Cost()) + self._cost_of(i, where).times(times)
    return found

  def _cost_of(self, i, computation):
    if i.opcode in ('while', 'call', 'async-start', 'conditional'):
      return Cost()
    return Cost(float(self.hbm_bytes(i, computation)), float(i.cycles), tuple(self._collectives_of(i)))

  def _collectives_of(self, i):
    """(kind, 1, bytes of the results) of each collective that an instruction starts."""
    kind = i.opcode.removesuffix('-start')
    if kind in COLLECTIVES:
      yield kind, 1.0, float(sum(s.bytes for s in i.results))
    if i.opcode != 'fusion':
      return
    if i.called[0].startswith('all-reduce-scatter'):
      yield 'reduce-scatter', 1.0, float(sum(s.bytes for s in i.shapes))
      return
    inside = self.computations[i.called[0]]
    begun_before = self._begun_before(inside)
    for x in inside.values():
      if x.name not in begun_before:
        yield from self._collectives_of(x)

  def _begun_before(self, inside):
    """Names of the collectives in a fusion's computation that another fusion has started.

    A collective that runs beside other work is in three fusions or more: one that starts it, those it runs beside,
    and one that waits for it.
    """
    collectives = {x.name for x in inside.values() if x.opcode in COLLECTIVES}
    if not collectives:
      return collectives
    started = {name for x in inside.values() if x.target == 'AsyncCollectiveStart' for name in x.operands}
    # Those that go on or wait are given the flags by which it tells that it is done.
    asynchronous = started or any(
        s.space == SYNC for x in inside.values() if x.opcode == 'parameter' for s in x.shapes)
    return collectives - started if asynchronous else set()

  def hbm_bytes(self, i, computation):
    """Bytes that one instruction reads from and writes to HBM."""
    if i.opcode in FREE or i.target in FREE_CALLS:
      return 0
    scope = self.computations[computation]
    of = lambda name: scope[name].shapes if name in scope else ()
    in_hbm = lambda shapes: sum(s.bytes for s in shapes if s.space == HBM)
    kind = i.opcode.removesuffix('-start')
    if kind == 'dynamic-update-slice':
      update = of(i.operands[1])
      return in_hbm(update) + (update[0].bytes if update and i.results[0].space == HBM else 0)
    if kind in ('dynamic-slice', 'slice', 'gather'):
      read = i.results[0].bytes if in_hbm(of(i.operands[0])) else 0
      return read + in_hbm(i.results)
    if kind == 'scatter':
      updates = of(i.operands[2])
      return in_hbm(updates) + (updates[0].bytes if updates and in_hbm(i.results) else 0)
    if i.opcode == 'fusion':
      return self._fusion_bytes(i, of)
    return sum(in_hbm(of(name)) for name in dict.fromkeys(i.operands)) + in_hbm(i.results)

  def _fusion_bytes(self, i, of):
    inside = self.computations[i.called[0]]
    parameters = {x.index: x for x in inside.values() if x.opcode == 'parameter'}
    root, aliased = _root(inside), i.aliased
    # These hand on what is in memory already, or has been counted where it was started.
    passive = self._begun_before(inside) | {x.name for x in inside.values() if x.target.startswith('AsyncCollective')}
    if aliased and root.opcode == 'tuple':
      passive.add(root.name)
    total = 0
    for place, name in enumerate(i.operands):
      if any(s.space == HBM for s in of(name)) and place in parameters:
        total += self._read_of(
            parameters[place].name, inside, sum(s.bytes for s in of(name) if s.space == HBM), passive)
    for place, shape in enumerate(i.shapes):
      maker = root if root.opcode != 'tuple' else inside[root.operands[place]]
      handed_on = place in aliased and (maker.opcode == 'parameter' or maker.name in passive)
      if shape.space == HBM and not handed_on:
        total += min(self._written_by(maker, inside), shape.bytes)
    return total

  def _read_of(self, name, inside, whole, passive=frozenset()):
    """Bytes of a fusion's operand that are read: all, unless only slices of it are looked at."""
    size = 0
    for user in (x for x in inside.values() if name in x.operands and x.name not in passive):
      if user.opcode == 'bitcast' and not user.is_root:
        size += self._read_of(user.name, inside, whole, passive)
      elif user.opcode in ('dynamic-slice', 'slice', 'gather') and user.operands[0] == name:
        size += sum(s.bytes for s in user.shapes)
      elif user.opcode in ('dynamic-update-slice', 'scatter') and user.operands[0] == name:
        pass  # updated in place
      elif user.opcode == 'fusion' and not user.is_root and self._passes_on(user):
        size += self._read_of(user.name, inside, whole, passive)
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
      return self._written_by(_root(nested), nested)
    return sum(s.bytes for s in maker.shapes)

  def host_transfers(self, computation=None):
    """Names of the instructions that wait for the host."""
    return [i.name for i, *_ in self.instructions(computation, all_branches=True)
            if i.opcode in ('infeed', 'outfeed') or 'is_host_transfer=true' in i.attributes
            or (i.opcode == 'custom-call' and 'callback' in i.attributes)
            or any(s.space == HOST for s in i.shapes)]

  def large_copies(self, computation=None, at_least=1 << 20, given_only=False):
    """(name, bytes, where from) of copies and transposes within HBM: an array that is laid out anew.

    Args: given_only, whether to tell only of arrays that the computation is given, as a loop is weights and caches.
    """
    found = []
    for i, where, _ in self.instructions(computation, all_branches=True):
      relayout = i.opcode in ('copy', 'transpose', 'copy-start') or (i.opcode == 'fusion' and self._only_moves(i))
      within = i.opcode != 'copy-start' or i.shapes[1].space == HBM  # else it comes back from VMEM
      if relayout and within and i.shapes[0].space == HBM and i.shapes[0].bytes >= at_least:
        if not given_only or self._is_given(i, where):
          found.append((i.name, i.shapes[0].bytes, i.op_name))
    return found

  def _is_given(self, i, computation):
    """Whether an instruction does no more than hand on, element for element, a parameter of its computation."""
    hands_on = {'bitcast', 'copy', 'copy-start', 'copy-done', 'transpose', 'get-tuple-element', 'fusion'}
    while i.opcode in hands_on and len(i.operands) == 1 and i.operands[0] in self.computations[computation]:
      i = self.computations[computation][i.operands[0]]
    return i.opcode == 'parameter'

  def _only_moves(self, i):
    moves = {'parameter', 'copy', 'transpose', 'bitcast', 'reshape', 'fusion', 'tuple', 'get-tuple-element'}
    inside = self.computations[i.called[0]].values()
    return any(x.opcode in ('copy', 'transpose') for x in inside) and all(
        x.opcode in moves and (x.opcode != 'fusion' or self._only_moves(x)) for x in inside)


def _parts_of(loop):
  return tuple(re.search(rf'{part}=%([\w.\-]+)', loop.attributes)[1] for part in ('body', 'condition'))


def _root(computation):
  return next(i for i in computation.values() if i.is_root)


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
