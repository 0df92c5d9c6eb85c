"""Programs compiled for TPU slices that are not there: what they read and send, what they are said to take, refusals.

libtpu has to be named before jax starts, so what needs it runs in processes of its own: aot_program.py, the script.
"""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from lib import aot, chips, hlo, pairs

from cactus_jax import sharding
from cactus_jax.models import cache, transformer
from cactus_jax.models.config import from_hf_config

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / 'scripts' / 'aot_compile.py'
TIMEOUT = 600


def run(*command, **env):
  """Runs Python without what this process knows of TPUs."""
  inherited = {name: value for name, value in os.environ.items() if not name.startswith(('TPU_', 'JAX_'))}
  return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True,
                        timeout=TIMEOUT, env=inherited | env)


@pytest.fixture(scope='module')
def libtpu():
  """The environment that tells jax where libtpu is; skips where it is not installed."""
  path = os.environ.get('CACTUS_LIBTPU')
  if path:
    return {'TPU_LIBRARY_PATH': path}
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('libtpu is not installed: scripts/test.sh installs it and names it in CACTUS_LIBTPU')
  return {}


def ask(libtpu, *questions):
  done = run('-m', 'tests.aot_program', *questions, PYTHONPATH=str(ROOT / 'experiments'), **libtpu)
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stderr == '', 'libtpu finds nothing to complain of'
  return json.loads(done.stdout)


# What compiled programs read, write and send.


@pytest.fixture(scope='module')
def simple(libtpu):
  return ask(libtpu, 'simple')['simple']


@pytest.mark.slow
def test_simple_programs_cost_what_they_must(simple):
  for name, found in simple.items():
    # Indices and counters are some bytes more.
    assert found['wanted'] <= found['bytes'] <= 1.01 * found['wanted'] + 1024, name
    reduced = [['all-reduce', 1.0, float(found['reduced'])]] if found['reduced'] else []
    assert found['collectives'] == reduced, name


@pytest.fixture(scope='module')
def rows(libtpu):
  """Plain steps and verifications of one row on 4 chips and of eight rows on 8."""
  return ask(libtpu, 'one row', 'eight rows')


STEPS = pytest.mark.parametrize('step', ['plain', 'verify'])
BATCHES = pytest.mark.parametrize('batch', ['one row', 'eight rows'])


@pytest.mark.slow
@STEPS
@BATCHES
def test_every_line_is_read(rows, batch, step):
  found = rows[batch][step]['reading']
  assert found['lines'] == found['instructions'] > 1000
  assert found['blocks'] == found['computations']
  assert found['dangling'] == []


@pytest.mark.slow
@STEPS
@BATCHES
def test_a_round_reads_little_more_than_weights_and_cache(rows, batch, step):
  found = rows[batch][step]
  assert found['least_hbm_mb'] < found['hbm_mb'] < 1.05 * found['least_hbm_mb']
  assert found['fits'] and found['peak_gb'] < 1.1 * found['arguments_gb']
  assert found['laws']['hbm_mb'] < 0.01 * found['hbm_mb']


@pytest.mark.slow
@STEPS
@BATCHES
def test_a_round_waits_for_nobody_and_moves_no_weight(rows, batch, step):
  assert rows[batch][step]['host_transfers'] == []
  assert rows[batch][step]['laid_out_anew'] == []


@pytest.mark.slow
@STEPS
@BATCHES
def test_a_forward_pass_adds_up_twice_a_layer(rows, batch, step):
  """After attention and after the mlp of both layers, and once for the embedding, whose rows are on several chips."""
  assert rows[batch][step]['in forward'].get('all-reduce') == 2 * 2 + 1


@pytest.mark.slow
@STEPS
def test_the_logits_of_one_row_are_brought_together_once(rows, step):
  collectives = {kind: count for kind, (count, _) in rows['one row'][step]['collectives'].items()}
  assert collectives == {'all-reduce': 5, 'all-gather': 1}


@pytest.mark.slow
@STEPS
def test_the_logits_of_several_rows_are_exchanged_once(rows, step):
  """Each chip then has a law of its own; what they tell each other of what they drew is small."""
  collectives = rows['eight rows'][step]['collectives']
  assert collectives['all-to-all'][0] == 1
  count = sum(count for count, _ in collectives.values())
  assert count <= 5 + 1 + 13
  assert rows['eight rows'][step]['laws']['collectives'] <= 12


# Arithmetic.


def abstract(config, width=1, **groups):
  sizes = {'data': 1, 'fsdp': 1, 'model': width} | groups
  return aot.abstract_model(config, AbstractMesh(tuple(sizes.values()), tuple(sizes)), jnp.bfloat16)


def setting(**changes):
  return aot.Setting(**{'topology': 'v5e:2x2', 'batch': 1, 'num_draft': 3, 'cache_length': 256, 'prompt_length': 32,
                        'vocab_size': 2048} | changes)


SMALL = pairs.CONFIGS['qwen3-0.6b'] | {
    'vocab_size': 2048, 'hidden_size': 256, 'num_hidden_layers': 2, 'num_attention_heads': 8, 'num_key_value_heads': 4,
    'head_dim': 64, 'intermediate_size': 512}
# Of one layer: query, key and value; output; gate, up, down.
MATRICES = 256 * (8 + 2 * 4) * 64 + 8 * 64 * 256 + 3 * 256 * 512
NORMS = 2 * 256 + 2 * 64
HEAD = 2048 * 256
CACHE = 2 * 2 * 4 * 256 * 64  # two layers, keys and values


def slots(model, at):
  """The cache of a model as shapes and shardings."""
  shape = (at.batch, model.config.cache_heads, at.cache_length, model.config.head_dim)
  one = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding.sharding_of(model.mesh, cache.AXES, shape))
  return cache.KVCache(k=(one,) * model.config.num_layers, v=(one,) * model.config.num_layers)


@pytest.mark.parametrize('width', [1, 4])
@pytest.mark.parametrize('tied', [True, False])
def test_least_bytes_by_hand(width, tied):
  model, at = abstract(from_hf_config(SMALL | {'tie_word_embeddings': tied}), width), setting(batch=8)
  weights = 2 * (2 * MATRICES + HEAD) // width + 2 * (2 * NORMS + 256)
  logits = 4 * 8 * 4 * 2048 // width
  assert aot.least_bytes(model, slots(model, at), at, 4) == weights + 2 * 8 * CACHE // width + logits


@pytest.mark.parametrize('width, groups, rows', [
    (1, {}, 8), (4, {}, 8), (4, {'data': 2}, 4), (2, {'data': 2, 'fsdp': 2}, 2)])
def test_operations_by_hand(width, groups, rows):
  at, config = setting(batch=8, **groups), from_hf_config(SMALL)
  attention = 2 * 2 * 8 * 64 * 256  # of one token: two layers, scores and means, 8 heads of 64, 256 slots
  expected = 2 * rows * 3 * (2 * MATRICES + HEAD + attention) / width
  assert aot.flops_of(abstract(config, width, **groups), at, 3) == expected
  prompt = 2 * rows * 3 * (2 * MATRICES + attention) / width
  assert aot.flops_of(abstract(config, width, **groups), at, 3, logits=False) == prompt


@pytest.mark.parametrize('width, groups', [(1, {}), (4, {}), (8, {}), (2, {'data': 2}), (2, {'fsdp': 4})])
def test_what_a_model_takes_is_what_its_arrays_take(width, groups):
  at, config = setting(batch=8, **groups), from_hf_config(SMALL)
  model = abstract(config, width, **groups)
  expected = aot.bytes_on_device((model.params, slots(model, at)))
  assert aot.bytes_of(config, at, model.mesh) == expected
  assert aot.bytes_of(abstract(config, 8).config, at, model.mesh) == expected, 'however its heads were split before'


# Billions of parameters that the models are published with; embeddings that are heads too count once.
PUBLISHED = {
    'qwen3-0.6b': 0.596, 'qwen3-1.7b': 1.72, 'qwen3-8b': 8.19, 'qwen3-14b': 14.77, 'qwen3-32b': 32.76,
    'gemma2-2b': 2.61, 'gemma2-9b': 9.24, 'llama3.2-1b': 1.236, 'llama3.1-8b': 8.03, 'r1-qwen-1.5b': 1.777,
    'r1-qwen-7b': 7.616}


def test_the_models_have_as_many_parameters_as_published():
  assert PUBLISHED.keys() == pairs.CONFIGS.keys()
  for name, billions in PUBLISHED.items():
    specs = jax.tree.leaves(transformer.abstract(pairs.config_of(name)))
    assert sum(math.prod(spec.shape) for spec in specs) / 1e9 == pytest.approx(billions, rel=4e-3), name


def test_the_pairs_are_pairs():
  for name, (verifier, draft, num_tokens) in pairs.PAIRS.items():
    big, small = pairs.config_of(verifier), pairs.config_of(draft)
    assert big.embed_dim * big.num_layers > 2 * small.embed_dim * small.num_layers, name
    assert 0.99 * big.vocab_size < num_tokens <= min(big.vocab_size, small.vocab_size), name


# Refusals.


@pytest.fixture(scope='module')
def refusals(libtpu):
  return ask(libtpu, 'errors', 'slices', 'sizes')


@pytest.mark.parametrize('case, expected', [
    ('good', None),
    ('one chip', None),
    ('known to nobody', "topology='v9:2x2': need a chip and a slice, as v5e:2x4; the chips known are v5e, v5p, v6e"),
    ('no slice', "topology='v5e': need a chip and a slice"),
    ('odd slice', "topology='v5e:3x3': there is no such slice; those known are 1x1, 2x2, 2x4,"),
    ('no numbers', "topology='v5e:2xtwo': there is no such slice"),
    ('data', 'data=3 x fsdp=1 does not divide the 8 chips of v5e:2x4'),
    ('fsdp', 'data=2 x fsdp=8 does not divide the 8 chips of v5e:2x4'),
    ('batch', 'batch=2 does not split over 4 groups of chips: choose a multiple'),
    ('cache', 'cache_length=35 has no room for prompts of 32 tokens: raise it, or lower prompt_length'),
    ('cache just long enough', None),
    ('no file', 'TPU_LIBRARY_PATH=/nowhere/libtpu.so: there is no such file'),
])
def test_a_setting_that_cannot_be_is_refused(refusals, case, expected):
  message = refusals['errors'][case]
  assert message is None if expected is None else expected in message


def test_without_libtpu_it_is_asked_for(refusals):
  if importlib.util.find_spec('libtpu') is not None:
    pytest.skip('libtpu is installed')
  assert 'libtpu is not installed: run `pip install -e .[tpu]`' in refusals['errors']['no library']


def test_libtpu_knows_every_slice_that_is_recommended(refusals):
  expected = {f'{family}:{name}': chips.chips_of(name) for family, chip in chips.CHIPS.items() for name in chip.slices}
  assert refusals['slices'] == expected


def test_a_pair_that_is_too_large_is_told_the_smallest_slice_that_holds_it(refusals):
  named = []
  for case in refusals['sizes']:
    need, hbm = case['needs'][case['topology']], case['hbm']
    assert need > hbm
    start = (f'the pair needs {need / 1e9:.1f} GB on each chip of {case["topology"]}, {(need - hbm) / 1e9:.1f} GB more '
             f'than its {hbm / 1e9:.0f} GB: ')
    assert case['message'].startswith(start)
    fitting = [name for name, size in case['needs'].items() if size <= (1 - aot.ROOM) * hbm]
    advice = f'the smallest slice that would hold it is {fitting[0]} (' if fitting else 'no slice known holds it ('
    assert case['message'].removeprefix(start).startswith(advice)
    named += fitting[:1]
  assert len(named) >= 5 and len(named) < len(refusals['sizes']), 'cases of both kinds'


# The table.


def test_a_table_tells_what_is_wrong():
  cost = hlo.Cost(2e9, 0.0, (('all-reduce', 4.0, 1e6),))
  modules = {
      'good': 'ENTRY %m (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n',
      'bad': ('ENTRY %m (p: f32[]) -> f32[] {\n  %p = f32[1024,1024]{1,0} parameter(0)\n  %o = token[] outfeed(%p)\n'
              '  ROOT %c = f32[1024,1024]{0,1} copy(%p)\n}\n')}
  at, chip = setting(), chips.CHIPS['v5e']
  made = {name: aot.Program(name, hlo.Module(text), None, cost, 10, 10, int(peak), 1.0)
          for (name, text), peak in zip(modules.items(), (1e9, 17e9))}
  rows = {name: aot.figures(program, 1e9, chip, 4, at, 1.6e9) for name, program in made.items()}
  found = {'programs': rows, 'setting': {'latency': 5e-6, 'num_draft': 3}, 'draft_step_ms': {1: 0.5, 2: 0.75},
           'cost_ratio': 0.25, 'plain_tokens_per_second': 400.0, 'break_even_acceptance': 0.3,
           'predicted': {'0.5': {'speedup': 1.5, 'tokens_per_second': 600.0, 'best_num_draft': 4, 'best_speedup': 1.6}}}
  text = aot.table(found)
  for line in ('bad: waits for the host (o)', 'bad: lays arrays out anew: c', 'bad: needs 17.0 GB of 16',
               'A draft step: 0.50 on 1, 0.75 on 2 chips (ms), so c = 0.25; plain decoding 400 tokens/s, all rows.',
               'K = 3 pays above an acceptance of 0.30.', '         0.5       600      1.50       4      1.60'):
    assert line in text.splitlines(), line
  assert '1.25' in text, '2 GB are 1.25 times the least'
  only = aot.table(found | {'programs': {'good': rows['good']}, 'break_even_acceptance': None})
  assert 'No host transfer and no weight or cache laid out anew in any loop; all of it fits.' in only
  assert 'K = 3 never pays.' in only
  assert len({len(line) for line in only.splitlines()[:3]}) == 1, 'columns line up'


# The script.


def write_config(folder, **changes):
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(SMALL | changes))
  return folder


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
  """Folders with a verifier and a draft, and one with a family that is not supported."""
  folder = tmp_path_factory.mktemp('configs')
  write_config(folder / 'big', tie_word_embeddings=False)
  write_config(folder / 'small', num_hidden_layers=1)
  write_config(folder / 'odd', model_type='mamba')
  (folder / 'other.json').write_text('{}')
  return folder


OWN = ('--verifier_config={0}/big', '--draft_config={0}/small/config.json')


@pytest.mark.parametrize('arguments, expected', [
    ((), 'name a --pair (qwen3-14b+0.6b, '),
    (('--pair=qwen3-14b+0.6b', *OWN), 'are both given: choose one'),
    (('--pair=qwen3-14b+0.6b', '--collective_us=nan'), '--collective_us=nan: need a finite number'),
    (OWN[:1], '--verifier_config and --draft_config belong together.'),
    (('--verifier_config={0}/odd', OWN[1]), "model_type='mamba' has a recurrent state"),
    (('--verifier_config={0}/nowhere/config.json', OWN[1]), '/nowhere/config.json: no such file'),
    (('--verifier_config={0}/other.json', OWN[1]), '/other.json: need a config.json, or the folder that has one.'),
    ((*OWN, '--acceptance=0.5,1.5'), '--acceptance=0.5,1.5: need rates between 0 and 1.'),
    ((*OWN, '--acceptance=high'), '--acceptance=high: need rates between 0 and 1.'),
    ((*OWN, '--rule=budget', '--kl_per_token=0.1'), '--rule=budget: compile the rule whose number it steers'),
    ((*OWN, '--temperature=1'), '--temperature means nothing here: programs are compiled, and nothing is decoded.'),
    ((*OWN, '--json={0}'), 'cannot be written'),
    ((*OWN, '--topology=v4:2x2x1'), "topology='v4:2x2x1': need a chip and a slice"),
    ((*OWN, '--topology=v5e:2x2', '--batch=3', '--data=2'), 'batch=3 does not split over 2 groups'),
    (('--pair=qwen3-32b+1.7b', '--topology=v5e:2x2'), 'the smallest slice that would hold it is v5e:2x4'),
])
def test_the_script_says_what_to_mend(checkpoints, arguments, expected, libtpu):
  done = run(SCRIPT, *(argument.format(checkpoints) for argument in arguments), **libtpu)
  assert done.returncode == 2
  assert expected in done.stderr
  assert 'Traceback' not in done.stderr and len(done.stderr.splitlines()) <= 2


@pytest.mark.slow
def test_the_script_tells_and_records_what_a_pair_costs(checkpoints, tmp_path, libtpu):
  out = tmp_path / 'costs.jsonl'
  common = [SCRIPT, *(argument.format(checkpoints) for argument in OWN), '--num_draft=3', '--cache_length=256',
            '--prompt_length=32', f'--json={out}', '--acceptance=0,0.6,1']
  for arguments in (['--topology=v5e:2x2'], ['--topology=v6e:1x1', '--rule=exact', '--batch=2']):
    done = run(*common, *arguments, **libtpu)
    assert (done.returncode, done.stderr) == (0, '')
  assert '\n  generate: compiled in ' in done.stdout and '\ngenerate  ' in done.stdout and 'best K' in done.stdout

  first, second = (json.loads(line) for line in out.read_text().splitlines())
  assert first.keys() == second.keys() == {
      'pair', 'rule', 'verifier', 'draft', 'setting', 'versions', 'mesh', 'programs', 'draft_on', 'draft_step_ms',
      'cost_ratio', 'plain_tokens_per_second', 'break_even_acceptance', 'predicted'}
  assert (first['rule'], second['rule']) == ('Cactus(delta=1.0)', 'Exact()')
  assert first['setting']['topology'] == 'v5e:2x2' and second['setting']['batch'] == 2
  assert first['versions']['jax'] == jax.__version__
  assert list(first['draft_step_ms']) == ['1', '2', '4'] and list(second['draft_step_ms']) == ['1']
  for row, groups in ((first, (1, 2, 4)), (second, (1,))):
    names = ['plain step', 'verify 4', *(f'draft step on {n}' for n in groups), 'prefill', 'generate']
    assert list(row['programs']) == names
    for name, program in row['programs'].items():
      assert program.keys() == {
          'program', 'arguments_gb', 'temporaries_gb', 'peak_gb', 'hbm_gb', 'fits', 'hbm_mb', 'least_hbm_mb', 'gflops',
          'collectives', 'host_transfers', 'laid_out_anew', 'compiler_megacycles', 'laws', 'estimate_ms',
          'compile_seconds'}
      assert program['fits'] and program['host_transfers'] == [] and program['hbm_mb'] > 0, name
      assert program['estimate_ms']['total'] == pytest.approx(
          max(program['estimate_ms']['hbm'], program['estimate_ms']['compute']) + program['estimate_ms']['collectives'])
    plain = row['programs']['plain step']['estimate_ms']['total'] / 1e3
    assert row['plain_tokens_per_second'] == pytest.approx(row['setting']['batch'] / plain)
    nothing, _, everything = row['predicted'].values()
    assert nothing['speedup'] < 1 < everything['speedup'] <= 4
    assert (nothing['best_num_draft'], nothing['best_speedup'], everything['best_num_draft']) == (0, 1.0, 32)
  assert not second['programs']['generate']['collectives'], 'one chip has nobody to talk to'
