"""What programs read, write and send, against counts by hand of small programs written out here.

The programs look as the TPU compiler writes them: arrays without a memory space are in HBM, S(1) is VMEM.
"""

import pytest
from lib import hlo

BF16, F32 = 2, 4


def module(*lines, computations='', parameters=''):
  """A module whose entry has these lines; the last one is its root."""
  body = '\n'.join(f'  {line}' for line in lines[:-1])
  return hlo.Module(f'HloModule m, is_scheduled=true\n\n{computations}\n'
                    f'ENTRY %main ({parameters}) -> f32[] {{\n{body}\n  ROOT {lines[-1]}\n}}\n')


def traffic(*lines, computations=''):
  return module(*lines, computations=computations).cost().hbm_bytes


W = '%w = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(0)'
X = '%x = f32[256,128]{1,0:T(8,128)} parameter(1)'
W_BYTES, X_BYTES = 1024 * 512 * BF16, 256 * 128 * F32


# Types.


@pytest.mark.parametrize('text, size', [
    ('f32[8,128]{1,0:T(8,128)}', 8 * 128 * F32),
    ('f32[8,128]{1,0}', 8 * 128 * F32),
    ('f32[8,128]', 8 * 128 * F32),
    ('f32[1,128]{1,0:T(8,128)}', 8 * 128 * F32),
    ('f32[1,128]{1,0:T(1,128)}', 128 * F32),
    ('f32[9,100]{1,0:T(8,128)}', 16 * 128 * F32),
    ('f32[9,100]{0,1:T(8,128)}', 104 * 128 * F32),
    ('bf16[3,5,7]{2,1,0:T(8,128)(2,1)}', 3 * 8 * 128 * BF16),
    ('bf16[3,5,7]{0,2,1:T(8,128)(2,1)}', 5 * 8 * 128 * BF16),
    ('bf16[5120]{0:T(1024)(128)(2,1)}', 5120 * BF16),
    ('bf16[1000]{0:T(1024)(128)(2,1)}', 1024 * BF16),
    ('pred[1,1,2048]{2,1,0:T(4,128)(4,1)S(1)}', 4 * 2048),
    ('s4[8,128]{1,0:T(8,128)E(4)}', 8 * 128 // 2),
    ('s4[3]', 2),
    ('s32[]{:T(128)}', 4),
    ('s32[]', 4),
    ('f32[0,128]{1,0:T(8,128)}', 0),
    ('f32[<=16,128]{1,0:T(8,128)}', 16 * 128 * F32),
    ('token[]', 0),
])
def test_sizes_count_the_padding_of_tiles(text, size):
  [shape] = hlo.parse_shapes(text)
  assert shape.bytes == size


def test_a_type_is_read_whole():
  shapes = hlo.parse_shapes(
      '(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, (f32[4]{0}, s32[]{:S(6)}), /*index=5*/u32[]{:S(2)}, f32[7])')
  assert [(s.dtype, s.dims, s.space) for s in shapes] == [
      ('bf16', (2, 3), hlo.VMEM), ('f32', (4,), hlo.HBM), ('s32', (), 6), ('u32', (), hlo.SYNC),
      ('f32', (7,), hlo.HBM)]


def test_an_unknown_element_type_is_refused():
  with pytest.raises(ValueError, match="unknown element type 'q7'"):
    hlo.parse_shapes('q7[8]{0}')


def test_a_text_without_an_entry_is_refused():
  for text in ('', 'HloModule m\n', '%f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n',
               'module @jit_f { func.func @main() { return } }'):
    with pytest.raises(ValueError, match='no ENTRY computation'):
      hlo.Module(text)


def test_instructions_are_read():
  m = module(
      '%c = s32[]{:T(128)} constant(-7)',
      '%t = (f32[2]{0}, (s32[], pred[]{:T(512)})) parameter(3), sharding={replicated}',
      '%f = f32[2]{0:T(128)} custom-call(%t, /*index=1*/%c), custom_call_target="A", metadata={op_name="jit(f)/a(b)/c" '
      'stack_frame_id=3}, backend_config={"estimated_cycles":"42","x":[{"y":"(}"}]}')
  c, t, f = m.computations['main'].values()
  assert (c.opcode, c.index, c.operands, c.is_root) == ('constant', -7, (), False)
  assert (t.opcode, t.index, len(t.shapes)) == ('parameter', 3, 3)
  assert (f.opcode, f.operands, f.op_name, f.cycles, f.target, f.is_root) == (
      'custom-call', ('t', 'c'), 'jit(f)/a(b)/c', 42, 'A', True)


# Single instructions.


@pytest.mark.parametrize('space, expected', [('', 3 * X_BYTES), ('S(1)', 2 * X_BYTES)])
def test_operands_and_results_in_hbm_count(space, expected):
  assert traffic(X, '%y = f32[256,128]{1,0:T(8,128)} parameter(2)',
                 f'%z = f32[256,128]{{1,0:T(8,128){space}}} add(%x, %y)') == expected


def test_an_operand_that_is_used_twice_is_read_once():
  assert traffic(X, '%z = f32[256,128]{1,0:T(8,128)} multiply(%x, %x)') == 2 * X_BYTES


def test_views_and_parameters_are_free():
  assert traffic(X, '%b = f32[32768]{0:T(1024)} bitcast(%x)', '%t = (f32[32768]{0:T(1024)}) tuple(%b)',
                 '%g = f32[32768]{0:T(1024)} get-tuple-element(%t), index=0') == 0


def test_custom_calls_that_name_memory_are_free():
  assert traffic('%a = f32[256,128]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"',
                 '%z = f32[512,128]{1,0:T(8,128)} custom-call(%a, %a), custom_call_target="ConcatBitcast"') == 0
  assert traffic(X, '%z = f32[256,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="Kernel"') == 2 * X_BYTES




@pytest.mark.parametrize('source, destination, times', [
    ('', 'S(1)', 1), ('S(1)', '', 1), ('', '', 2), ('S(1)', 'S(1)', 0)])
def test_an_asynchronous_copy_counts_once(source, destination, times):
  layout = '{1,0:T(8,128)%s}'
  here, there = layout % source, layout % destination
  lines = [
      f'%x = f32[256,128]{here} parameter(0)',
      f'%s = (f32[256,128]{there}, f32[256,128]{here}, u32[]{{:S(2)}}) copy-start(%x)',
      f'%d = f32[256,128]{there} copy-done(%s)',
  ]
  assert traffic(*lines) == times * X_BYTES


def test_an_asynchronous_slice_counts_its_own_size_once():
  start = ('%s = ((bf16[1024,512]{1,0:T(8,128)(2,1)}), bf16[256,512]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) '
           'slice-start(%w), slice={[0:256], [0:512]}')
  assert traffic(W, start, '%d = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} slice-done(%s)') == 256 * 512 * BF16


def test_a_slice_reads_its_own_size():
  index = '%i = s32[]{:T(128)} constant(3)'
  for op in ('dynamic-slice(%w, %i, %i), dynamic_slice_sizes={8,512}', 'slice(%w), slice={[0:8], [0:512]}',
             'gather(%w, %i), offset_dims={1}'):
    assert traffic(W, index, f'%z = bf16[8,512]{{1,0:T(8,128)(2,1)}} {op}') == 2 * 8 * 512 * BF16, op
    assert traffic(W, index, f'%z = bf16[8,512]{{1,0:T(8,128)(2,1)S(1)}} {op}') == 8 * 512 * BF16, op


def test_an_update_in_place_counts_the_update():
  lines = (W, '%u = bf16[16,512]{1,0:T(8,128)(2,1)} parameter(1)', '%i = s32[]{:T(128)} constant(3)')
  into = '%z = bf16[1024,512]{1,0:T(8,128)(2,1)} '
  assert traffic(*lines, into + 'dynamic-update-slice(%w, %u, %i, %i)') == 2 * 16 * 512 * BF16
  assert traffic(*lines, into + 'scatter(%w, %i, %u), to_apply=%f') == 2 * 16 * 512 * BF16


def test_an_update_of_what_is_in_vmem_reads_the_update_only():
  lines = ('%w = bf16[1024,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)',
           '%u = bf16[16,512]{1,0:T(8,128)(2,1)} parameter(1)', '%i = s32[]{:T(128)} constant(3)')
  into = '%z = bf16[1024,512]{1,0:T(8,128)(2,1)S(1)} '
  assert traffic(*lines, into + 'dynamic-update-slice(%w, %u, %i, %i)') == 16 * 512 * BF16


# Fusions.


def computation(name, *lines):
  body = '\n'.join(f'  {line}' for line in lines[:-1])
  return f'%{name} (p: f32[]) -> f32[] {{\n{body}\n  ROOT {lines[-1]}\n}}\n\n'


PW = '%pw = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(0)'
PI = '%pi = s32[]{:T(128)} parameter(1)'
INDEX = '%i = s32[]{:T(128)S(6)} parameter(1)'
ROWS = 'bf16[8,512]{1,0:T(8,128)(2,1)}'
FUSED = 'fusion(%w, %i), kind=kLoop, calls=%f'
BITCAST = computation('b', PW, '%v = bf16[512,1024]{0,1:T(8,128)(2,1)} bitcast(%pw)')


def test_a_fusion_reads_its_operands_and_writes_its_result():
  inside = computation('f', PW, PI, '%n = bf16[1024,512]{1,0:T(8,128)(2,1)} negate(%pw)')
  assert traffic(W, INDEX, f'%z = bf16[1024,512]{{1,0:T(8,128)(2,1)}} {FUSED}', computations=inside) == 2 * W_BYTES
  assert traffic(W, INDEX, f'%z = bf16[1024,512]{{1,0:T(8,128)(2,1)S(1)}} {FUSED}', computations=inside) == W_BYTES


def test_what_happens_inside_a_fusion_costs_nothing():
  inside = computation('f', PW, PI, '%n = bf16[1024,512]{1,0:T(8,128)(2,1)} negate(%pw)',
                       '%a = bf16[1024,512]{1,0:T(8,128)(2,1)} add(%n, %pw)', f'%z = {ROWS} reduce(%a, %pi)')
  assert traffic(W, INDEX, f'%z = {ROWS} {FUSED}', computations=inside) == W_BYTES + 8 * 512 * BF16


@pytest.mark.parametrize('view', ['', 'bitcast', 'fusion'])
def test_a_fusion_that_looks_at_a_slice_reads_the_slice(view):
  seen, source = {
      '': ([], '%pw'),
      'bitcast': (['%v = bf16[512,1024]{0,1:T(8,128)(2,1)} bitcast(%pw)'], '%v'),
      'fusion': (['%v = bf16[512,1024]{0,1:T(8,128)(2,1)} fusion(%pw), kind=kLoop, calls=%b'], '%v'),
  }[view]
  inside = BITCAST + computation(
      'f', PW, PI, *seen, f'%d = {ROWS} dynamic-slice({source}, %pi, %pi), dynamic_slice_sizes={{8,512}}',
      f'%n = {ROWS} negate(%d)')
  assert traffic(W, INDEX, f'%z = {ROWS} {FUSED}', computations=inside) == 2 * 8 * 512 * BF16


def test_a_slice_in_a_nested_fusion_reads_the_slice():
  nested = computation('g', PW, PI, f'%d = {ROWS} dynamic-slice(%pw, %pi, %pi), dynamic_slice_sizes={{8,512}}')
  inside = nested + computation('f', PW, PI, f'%d = {ROWS} fusion(%pw, %pi), kind=kLoop, calls=%g',
                                f'%n = {ROWS} negate(%d)')
  assert traffic(W, INDEX, f'%z = {ROWS} {FUSED}', computations=inside) == 2 * 8 * 512 * BF16


def test_two_slices_are_read_one_after_the_other_but_no_more_than_everything():
  half = 'bf16[768,512]{1,0:T(8,128)(2,1)}'
  piece = lambda name, shape: f'%{name} = {shape} dynamic-slice(%pw, %pi, %pi), dynamic_slice_sizes={{}}'
  inside = computation('f', PW, PI, piece('d', ROWS), piece('e', ROWS), f'%n = {ROWS} add(%d, %e)')
  assert traffic(W, INDEX, f'%z = {ROWS} {FUSED}', computations=inside) == 3 * 8 * 512 * BF16
  inside = computation('f', PW, PI, piece('d', half), piece('e', half), f'%n = {ROWS} dot(%d, %e)')
  assert traffic(W, INDEX, f'%z = {ROWS} {FUSED}', computations=inside) == W_BYTES + 8 * 512 * BF16


def test_a_fusion_that_uses_all_beside_a_slice_reads_all():
  inside = computation('f', PW, PI, f'%d = {ROWS} dynamic-slice(%pw, %pi, %pi), dynamic_slice_sizes={{8,512}}',
                       f'%z = {ROWS} dot(%d, %pw)')
  assert traffic(W, INDEX, f'%z = {ROWS} {FUSED}', computations=inside) == W_BYTES + 8 * 512 * BF16


def test_the_index_of_a_gather_is_read_whole():
  inside = computation('f', '%pt = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(0)',
                       '%pk = s32[2048]{0:T(1024)} parameter(1)', f'%z = {ROWS} gather(%pt, %pk), offset_dims={{1}}')
  assert traffic(W, '%k = s32[2048]{0:T(1024)} parameter(1)',
                 f'%z = {ROWS} fusion(%w, %k), kind=kCustom, calls=%f', computations=inside) == (
                     2 * 8 * 512 * BF16 + 2048 * 4)


@pytest.mark.parametrize('update', [
    'dynamic-update-slice(%pw, %n, %pi, %pi)', 'scatter(%pw, %pi, %n), to_apply=%add'])
@pytest.mark.parametrize('view', [False, True])
def test_a_fusion_that_updates_in_place_counts_the_update(update, view):
  seen = ['%v = bf16[1024,512]{1,0:T(8,128)(2,1)} bitcast(%pw)'] if view else []
  update = update.replace('%pw', '%v') if view else update
  inside = computation('f', PW, PI, f'%pu = {ROWS} parameter(2)', *seen, f'%n = {ROWS} negate(%pu)',
                       f'%d = bf16[1024,512]{{1,0:T(8,128)(2,1)}} {update}',
                       '%r = bf16[1024,512]{1,0:T(8,128)(2,1)} bitcast(%d)')
  assert traffic(W, INDEX, f'%u = {ROWS} parameter(2)',
                 '%z = bf16[1024,512]{1,0:T(8,128)(2,1)} fusion(%w, %i, %u), kind=kLoop, calls=%f',
                 computations=inside) == 2 * 8 * 512 * BF16


def test_an_update_by_a_nested_fusion_counts_the_update():
  whole = 'bf16[1024,512]{1,0:T(8,128)(2,1)}'
  nested = computation('g', PW, PI, f'%pu = {ROWS} parameter(2)',
                       f'%d = {whole} dynamic-update-slice(%pw, %pu, %pi, %pi)')
  inside = nested + computation('f', PW, PI, f'%pu = {ROWS} parameter(2)',
                                f'%d = {whole} fusion(%pw, %pi, %pu), kind=kLoop, calls=%g')
  assert traffic(W, INDEX, f'%u = {ROWS} parameter(2)', f'%z = {whole} fusion(%w, %i, %u), kind=kLoop, calls=%f',
                 computations=inside) == 2 * 8 * 512 * BF16


def test_each_result_of_a_fusion_is_written():
  inside = computation('f', PW, PI, '%n = bf16[1024,512]{1,0:T(8,128)(2,1)} negate(%pw)',
                       f'%r = {ROWS} reduce(%n, %pi)',
                       '%t = (bf16[1024,512]{1,0:T(8,128)(2,1)S(1)}, bf16[8,512]{1,0:T(8,128)(2,1)}) tuple(%n, %r)')
  assert traffic(W, INDEX, f'%z = (bf16[1024,512]{{1,0:T(8,128)(2,1)S(1)}}, {ROWS}) {FUSED}', computations=inside) == (
      W_BYTES + 8 * 512 * BF16)


# Loops and branches.


def loop(condition, body, start=0, name='l', trips=''):
  """(computations, lines) of a loop whose body negates w."""
  state = '(s32[]{:T(128)}, bf16[1024,512]{1,0:T(8,128)(2,1)})'
  computations = computation(
      f'{name}_body', f'%p = {state} parameter(0)', '%k = s32[]{:T(128)} get-tuple-element(%p), index=0',
      '%v = bf16[1024,512]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1', *body,
      f'%t = {state} tuple(%next, %m)') + computation(
      f'{name}_condition', f'%p = {state} parameter(0)', '%k = s32[]{:T(128)} get-tuple-element(%p), index=0',
      *condition)
  lines = (W, f'%start = s32[]{{:T(128)}} constant({start})', '%begin = s32[]{:T(128)} copy(%start)',
           f'%t = {state} tuple(%begin, %w)',
           f'%z = {state} while(%t), condition=%{name}_condition, body=%{name}_body{trips}')
  return computations, lines


BOUND = ('%n = s32[]{:T(128)} constant(10)', '%lt = pred[]{:T(512)} compare(%k, %n), direction=LT')
ONE_MORE = ('%one = s32[]{:T(128)} constant(1)', '%next = s32[]{:T(128)} add(%k, %one)')
NEGATE = ('%m = bf16[1024,512]{1,0:T(8,128)(2,1)} negate(%v)',)


def weights_read(computations, lines):
  """How many times a loop reads and writes w; counters in HBM are a few bytes."""
  return round(traffic(*lines, computations=computations) / (2 * W_BYTES), 2)


@pytest.mark.parametrize('start, times', [(0, 10), (3, 7), (10, 0), (12, 0)])
def test_a_loop_counts_up_to_its_bound(start, times):
  assert weights_read(*loop(BOUND, ONE_MORE + NEGATE, start)) == times


def test_a_loop_may_take_larger_steps():
  assert weights_read(*loop(BOUND, (ONE_MORE[0].replace('(1)', '(4)'), ONE_MORE[1], *NEGATE))) == 3


def test_a_loop_of_known_length_says_so():
  trips = ', backend_config={"known_trip_count":{"n":"6"}}'
  assert weights_read(*loop(BOUND, ONE_MORE + NEGATE, trips=trips)) == 6


@pytest.mark.parametrize('condition', [
    (*BOUND[:1], '%lt = pred[]{:T(512)} compare(%k, %n), direction=NE'),
    ('%n = s32[]{:T(128)} get-tuple-element(%p), index=0', BOUND[1]),
    (*BOUND, '%a = pred[]{:T(512)} and(%lt, %lt)'),
], ids=['not equal', 'no constant', 'and'])
def test_a_loop_of_unknown_length_counts_once(condition):
  assert weights_read(*loop(condition, ONE_MORE + NEGATE)) == 1


def test_a_start_that_is_not_known_is_taken_for_0():
  computations, lines = loop(BOUND, ONE_MORE + NEGATE)
  lines = [line.replace('constant(0)', 'parameter(1)') for line in lines]
  assert weights_read(computations, lines) == 10


def test_nested_loops_multiply():
  inner, lines = loop(BOUND, ONE_MORE + NEGATE, name='inner')
  state = '(s32[]{:T(128)}, bf16[1024,512]{1,0:T(8,128)(2,1)})'
  body = ('%zero = s32[]{:T(128)} constant(6)', f'%s = {state} tuple(%zero, %v)',
          f'%in = {state} while(%s), condition=%inner_condition, body=%inner_body',
          '%m = bf16[1024,512]{1,0:T(8,128)(2,1)} get-tuple-element(%in), index=1', *ONE_MORE)
  outer, lines = loop(BOUND, body, 2)
  assert weights_read(inner + outer, lines) == 8 * 4


def test_the_main_loop_is_the_dearest():
  small, lines = loop(BOUND, ONE_MORE + ('%m = bf16[1024,512]{1,0:T(8,128)(2,1)} copy(%v)',), 9, name='small')
  large, _ = loop(BOUND, ONE_MORE + NEGATE + ('%o = bf16[1024,512]{1,0:T(8,128)(2,1)} copy(%m)',), name='large')
  state = '(s32[]{:T(128)}, bf16[1024,512]{1,0:T(8,128)(2,1)})'
  m = module(*lines, f'%y = {state} while(%t), condition=%large_condition, body=%large_body',
             computations=small + large)
  assert m.main_loop() == ('large_body', 'large_condition')
  assert round(m.cost(m.main_loop()).hbm_bytes / (4 * W_BYTES), 2) == 1, 'one round, not all of them'


def test_a_round_includes_the_question_whether_to_go_on():
  ask = ('%any = pred[]{:T(512)} all-reduce(%k), to_apply=%or',)
  computations, lines = loop(ask, ONE_MORE + NEGATE)
  m = module(*lines, computations=computations)
  assert [kind for kind, *_ in m.cost(m.main_loop()).collectives] == ['all-reduce']


def test_a_program_without_a_loop_has_no_main_loop():
  with pytest.raises(ValueError, match='has no loop'):
    module(X, '%z = f32[256,128]{1,0:T(8,128)} negate(%x)').main_loop()


def branch(name, instructions, cycles=0, scope='usual'):
  note = f', metadata={{op_name="jit(f)/{scope}/neg"}}, backend_config={{"estimated_cycles":"{cycles}"}}'
  lines = [f'%n{k} = bf16[1024,512]{{1,0:T(8,128)(2,1)}} negate(%pw){note}' for k in range(instructions)]
  return computation(name, PW, *lines, '%t = (s32[]{:T(128)}) tuple(%pw)')


def conditional(*branches, names=('a', 'b', 'c')):
  names = ', '.join(f'%{name}' for name in names[: len(branches)])
  return module(W, '%p = s32[]{:T(128)S(6)} parameter(1)',
                f'%z = (s32[]{{:T(128)}}) conditional(%p, %w, %w), branch_computations={{{names}}}',
                computations=''.join(branches))


def test_the_dearest_branch_runs():
  m = conditional(branch('a', 1, cycles=10), branch('b', 3, cycles=10), branch('c', 2, cycles=10))
  assert m.cost().hbm_bytes == 3 * 2 * W_BYTES
  m = conditional(branch('a', 2, cycles=10), branch('b', 1, cycles=100))
  assert m.cost() == hlo.Cost(2.0 * W_BYTES, 100.0), 'by the time that the compiler expects'


def test_a_fallback_does_not_run_where_there_is_another_branch():
  m = conditional(branch('a', 1, cycles=10), branch('b', 5, cycles=100, scope='fallback'))
  assert m.cost() == hlo.Cost(2.0 * W_BYTES, 10.0)
  m = conditional(branch('a', 1, cycles=10, scope='fallback'), branch('b', 2, cycles=10, scope='fallback'))
  assert m.cost().hbm_bytes == 2 * 2 * W_BYTES
  assert len([i for i, *_ in m.instructions(all_branches=True) if i.opcode == 'negate']) == 3


def test_branches_of_a_predicate_are_found():
  m = module(W, '%p = pred[]{:T(512)S(6)} parameter(1)',
             '%z = (s32[]{:T(128)}) conditional(%p, %w, %w), true_computation=%a, false_computation=%b',
             computations=branch('a', 1) + branch('b', 2))
  assert m.cost().hbm_bytes == 2 * 2 * W_BYTES


def test_called_and_asynchronous_computations_run():
  inside = computation('f', PW, '%n = bf16[1024,512]{1,0:T(8,128)(2,1)} negate(%pw)')
  assert traffic(W, '%z = bf16[1024,512]{1,0:T(8,128)(2,1)} call(%w), to_apply=%f', computations=inside) == 2 * W_BYTES
  start = ('%s = ((bf16[1024,512]{1,0:T(8,128)(2,1)}), bf16[1024,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) '
           'async-start(%w), calls=%f')
  assert traffic(W, start, '%z = bf16[1024,512]{1,0:T(8,128)(2,1)} async-done(%s), calls=%f',
                 computations=inside) == 2 * W_BYTES


# Collectives.


def test_collectives_count_as_often_as_they_run():
  body = ONE_MORE + ('%r = bf16[8,512]{1,0:T(8,128)(2,1)} all-reduce(%v), to_apply=%add', *NEGATE)
  computations, lines = loop(BOUND, body)
  cost = module(*lines, '%g = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%w), dimensions={0}',
                computations=computations).cost()
  assert cost.collectives == (('all-reduce', 10.0, 10.0 * 8 * 512 * BF16), ('all-gather', 1.0, W_BYTES))
  assert cost.num_collectives == 11


@pytest.mark.parametrize('start, size, moved', [
    ('%s = bf16[1024,512]{1,0:T(8,128)(2,1)} all-reduce-start(%w), to_apply=%add', W_BYTES, 2 * W_BYTES),
    ('%s = (bf16[1024,512]{1,0:T(8,128)(2,1)}, bf16[4096,512]{1,0:T(8,128)(2,1)}) all-gather-start(%w), dimensions={0}',
     4 * W_BYTES, 5 * W_BYTES),
    ('%s = (bf16[1024,512]{1,0:T(8,128)(2,1)}, bf16[1024,512]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) '
     'collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}', W_BYTES, W_BYTES),
    ('%s = (bf16[1024,512]{1,0:T(8,128)(2,1)}, bf16[8,512]{1,0:T(8,128)(2,1)}) all-reduce(%w, %w), to_apply=%add',
     W_BYTES + 8 * 512 * BF16, 2 * W_BYTES + 8 * 512 * BF16),
], ids=['all-reduce', 'all-gather', 'permute', 'several at once'])
def test_what_a_collective_makes_is_counted_once(start, size, moved):
  done = '%d = bf16[1024,512]{1,0:T(8,128)(2,1)} all-reduce-done(%s)'
  cost = module(W, start, done).cost()
  [(_, count, sent)] = cost.collectives
  assert (count, sent, cost.hbm_bytes) == (1, size, moved)


def test_a_reduce_scatter_is_a_fusion_of_an_all_reduce():
  inside = computation('all-reduce-scatter', PW, '%i = u32[] partition-id()',
                       '%r = bf16[1024,512]{1,0:T(8,128)(2,1)} all-reduce(%pw), to_apply=%add',
                       '%d = bf16[256,512]{1,0:T(8,128)(2,1)} dynamic-slice(%r, %i), dynamic_slice_sizes={256,512}')
  cost = module(W, '%z = bf16[256,512]{1,0:T(8,128)(2,1)} fusion(%w), kind=kCustom, calls=%all-reduce-scatter',
                computations=inside).cost()
  assert cost == hlo.Cost(1.25 * W_BYTES, 0.0, (('reduce-scatter', 1.0, W_BYTES / 4),))


def test_a_collective_that_runs_beside_other_work_counts_once():
  part, all_of, flag = 'bf16[1024,512]{1,0:T(8,128)(2,1)}', 'bf16[4096,512]{1,0:T(8,128)(2,1)}', 'u32[]{:S(2)}'
  gather = f'%g = {all_of} all-gather(%a), channel_id=9, dimensions={{0}}'
  given = (f'%a = {part} parameter(0)', f'%b = {all_of} parameter(1)', f'%c = {flag} parameter(2)')
  computations = computation(
      'start', given[0], gather,
      f'%s = ({part}, {all_of}, {flag}) custom-call(%g), custom_call_target="AsyncCollectiveStart"') + computation(
      'beside', *given, f'%pv = {part} parameter(3)', f'%n = {part} negate(%pv)', gather,
      f'%t = ({part}, {part}, {all_of}, {all_of}, {flag}) tuple(%n, %a, %b, %g, %c)') + computation(
      'done', *given, gather, f'%d = {all_of} custom-call(%a, %b, %g, %c), custom_call_target="AsyncCollectiveDone"')
  cost = module(
      W, f'%v = {part} parameter(1)',
      f'%s = ({part}, {all_of}, {flag}) fusion(%w), kind=kCustom, output_to_operand_aliasing={{{{0}}: (0, {{}})}}, '
      'calls=%start',
      f'%a = {part} get-tuple-element(%s), index=0', f'%b = {all_of} get-tuple-element(%s), index=1',
      f'%c = {flag} get-tuple-element(%s), index=2',
      f'%f = ({part}, {part}, {all_of}, {all_of}, {flag}) fusion(%a, %b, %c, %v), kind=kOutput, '
      'output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {}), {4}: (2, {})}, calls=%beside',
      f'%d = {all_of} fusion(%a, %b, %c), kind=kCustom, output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%done',
      computations=computations).cost()
  assert cost.collectives == (('all-gather', 1.0, 4 * W_BYTES),)
  assert cost.hbm_bytes == (1 + 4) * W_BYTES + 2 * W_BYTES, 'what is gathered, and what is negated beside it'


# What a loop should not have.


def test_host_transfers_are_found_in_every_branch_and_loop():
  inside = computation('a', PW, '%o = token[] outfeed(%pw)', '%t = (s32[]{:T(128)}) tuple(%pw)')
  body = ONE_MORE + NEGATE + (
      '%k2 = token[] after-all()',
      '%send = (bf16[1024,512]{1,0}, u32[], token[]) send(%v, %k2), channel_id=1, is_host_transfer=true')
  computations, lines = loop(BOUND, body)
  m = module(*lines, '%y = (s32[]{:T(128)}) conditional(%start, %w, %w), branch_computations={%a, %b}',
             '%call = f32[] custom-call(%w), custom_call_target="xla_ffi_python_cpu_callback"',
             '%away = f32[256,128]{1,0:T(8,128)S(5)} copy(%w)',
             computations=computations + inside + branch('b', 1, cycles=100))
  assert m.host_transfers() == ['send', 'o', 'call', 'away']
  assert m.host_transfers(m.main_loop()) == ['send']
  assert module(X, '%z = f32[256,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="TopK"').host_transfers() == []


LARGE = 'bf16[1024,1024]{1,0:T(8,128)(2,1)}'


@pytest.mark.parametrize('line, found', [
    (f'%z = {LARGE} copy(%y), metadata={{op_name="a/b"}}', True),
    (f'%z = {LARGE} transpose(%y), dimensions={{1,0}}, metadata={{op_name="a/b"}}', True),
    (f'%z = {LARGE} fusion(%y), kind=kLoop, calls=%moves, metadata={{op_name="a/b"}}', True),
    (f'%z = {LARGE} fusion(%y), kind=kLoop, calls=%computes', False),
    (f'%z = ({LARGE}, {LARGE}, u32[]{{:S(2)}}) copy-start(%y), metadata={{op_name="a/b"}}', True),
    ('%z = (bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%y)',
     False),
    ('%z = (bf16[1024,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%v)',
     False),
    ('%z = bf16[512,512]{1,0:T(8,128)(2,1)} copy(%y)', False),
    ('%z = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} copy(%y)', False),
    (f'%z = {LARGE} negate(%y)', False),
], ids=['copy', 'transpose', 'fusion', 'computes', 'asynchronous', 'to VMEM', 'back', 'small', 'into VMEM', 'negate'])
def test_large_copies_within_hbm_are_found(line, found):
  p = f'%p = {LARGE} parameter(0)'
  computations = computation('moves', p, f'%b = {LARGE} bitcast(%p)', f'%z = {LARGE} transpose(%b), dimensions={{1,0}}')
  computations += computation('computes', p, f'%c = {LARGE} copy(%p)', f'%z = {LARGE} negate(%c)')
  m = module(f'%y = {LARGE} parameter(0)', '%v = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)', line,
             computations=computations)
  assert m.large_copies() == ([('z', 1024 * 1024 * BF16, 'a/b')] if found else [])


def test_large_copies_are_found_in_every_branch():
  p = f'%p = {LARGE} parameter(0)'
  branches = ''.join(computation(name, p, f'%c_{name} = {LARGE} copy(%p)', '%t = (s32[]{:T(128)}) tuple(%p)')
                     for name in ('a', 'b'))
  m = module(f'%y = {LARGE} parameter(0)', '%p = s32[]{:T(128)S(6)} parameter(1)',
             '%z = (s32[]{:T(128)}) conditional(%p, %y, %y), branch_computations={%a, %b}', computations=branches)
  assert [name for name, *_ in m.large_copies()] == ['c_a', 'c_b']


# Sums.


def test_costs_add_and_multiply():
  one = hlo.Cost(10.0, 3.0, (('all-reduce', 1.0, 8.0), ('all-gather', 2.0, 5.0)))
  assert one.times(3) == hlo.Cost(30.0, 9.0, (('all-reduce', 3.0, 24.0), ('all-gather', 6.0, 15.0)))
  assert one + hlo.Cost(1.0, 1.0, (('all-gather', 1.0, 1.0),)) == hlo.Cost(
      11.0, 4.0, (('all-reduce', 1.0, 8.0), ('all-gather', 3.0, 6.0)))
  assert one + hlo.Cost() == one


def test_costs_can_be_told_apart():
  note = ', metadata={op_name="jit(f)/%s/neg"}'
  m = module(X, '%a = f32[256,128]{1,0:T(8,128)} negate(%x)' + note % 'forward',
             '%b = f32[256,128]{1,0:T(8,128)} add(%x, %a)' + note % 'laws')
  found = m.costs(None, lambda i: i.op_name.split('/')[1] if i.op_name else '')
  assert {label: cost.hbm_bytes for label, cost in found.items()} == {
      '': 0, 'forward': 2 * X_BYTES, 'laws': 3 * X_BYTES}
  assert sum(found.values(), hlo.Cost()) == m.cost()
