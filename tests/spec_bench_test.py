"""The program of experiments/spec_bench.py: what it measures on a tiny verifier and its student, what it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import spec_bench
from lib import flags as common
from lib import record

import cactus_jax as cj
from cactus_jax import decode
from cactus_jax.models import student as student_lib
from cactus_jax.models import transformer
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.transformer import Transformer
from tests import fakes

pytestmark = pytest.mark.usefixtures('quick_programs')
CONFIG = ModelConfig(
    family='llama', vocab_size=267, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    mlp_dim=48, max_length=256, norm_eps=1e-5, rope_theta=1000.0, tie_embeddings=True)
DATA = [{'category': 'math', 'turns': ['one', 'more']}, {'category': 'math', 'turns': ['two']},
        {'category': 'qa', 'turns': ['three']}, {'category': 'math', 'turns': ['four']},
        {'category': 'qa', 'turns': ['x' * 100]}]


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """A verifier, and the folder of a student of it."""
  target = Transformer(transformer.random_params(jax.random.key(0), CONFIG), dataclasses.replace(CONFIG))
  folder = tmp_path_factory.mktemp('draft') / 'student'
  student = student_lib.new_student(target, [1], np.arange(0, 267, 2), hidden_layers=(0,))
  student_lib.save(folder, student, fakes.byte_tokenizer())
  return target, folder


@pytest.fixture
def bench(pair, run_program, monkeypatch, tmp_path):
  """bench(*arguments): exit code, standard output and standard error of a run on DATA."""
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: pair[0])
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer())
  monkeypatch.setattr(cj, 'default_model_path', lambda: tmp_path / 'fake.gguf')
  data = tmp_path / 'data.jsonl'
  data.write_text(''.join(json.dumps(row) + '\n' for row in DATA))
  common.set_defaults(max_new_tokens=16, rule='cactus', delta=1.0)
  yield lambda *arguments: run_program(
      spec_bench.main, 'spec_bench.py', f'--data={data}', f'--draft={pair[1]}', '--longest_prompt=40', *arguments)
  common.set_defaults(max_new_tokens=256, rule='exact', delta=None)


def test_tables_and_rows(bench, tmp_path, pair):
  code, out, err = bench('--arms=exact:2,rule:2,exact:auto', f'--output={tmp_path / "rows.jsonl"}')
  assert code == 0, err
  rows = record.read_rows(tmp_path / 'rows.jsonl')
  assert [(row['category'], row['arm']) for row in rows] == [
      (category, arm) for category in ('math', 'qa', 'all') for arm in ('plain', 'exact:2', 'rule:2', 'exact:auto')]
  for row in rows:
    assert row['rule'] == 'Cactus(delta=1.0)' and 0 < row['acceptance'] < 1
    if row['arm'] == 'plain':
      assert (row['accepted_len'], row['tokens_per_call'], row['times_plain']) == (0, 1, 1)
    else:
      assert 0 <= row['accepted_len'] <= (8 if row['arm'] == 'exact:auto' else 2) and row['times_plain'] > 0
  by = {(row['category'], row['arm']): row for row in rows}
  assert by['all', 'plain']['tokens'] == by['math', 'plain']['tokens'] + by['qa', 'plain']['tokens']
  line = next(line for line in out.splitlines() if line.startswith('  qa'))
  assert f'{by["qa", "exact:2"]["accepted_len"]:.2f}' in line and f'{by["qa", "plain"]["acceptance"]:.3f}' in line
  # Two prompts of three in the one category, one in the other, of which the second is too long.
  target, folder = pair
  draft = cj.load_draft(folder, target, fakes.byte_tokenizer())
  sampling = cj.SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
  sums = np.zeros(2)
  for prompt in ('one', 'two'):
    drafted, laws = cj.record_rounds([prompt], target=target, draft=draft, tokenizer=fakes.byte_tokenizer(),
                                     sampling=sampling, num_draft=2, max_new_tokens=16)
    sums += np.minimum(drafted.probs[:, 0], laws[:, 0]).sum(), len(laws)
  assert by['math', 'plain']['acceptance'] == pytest.approx(sums[0] / sums[1], rel=1e-5)


@pytest.mark.parametrize('arguments, words', [
    (['--arms=exact'], "'exact' is neither exact:K nor rule:K"),
    (['--arms=exact:0'], 'a number above 0'),
    (['--arms=rule:autos'], "or 'auto'"),
    (['--arms=cactus:3'], 'neither'),
    (['--data='], '--data is missing'),
    (['--turns_field=text'], 'text is None'),
    (['--longest_prompt=3'], 'holds no prompts of at most --longest_prompt=3 tokens'),
    (['--num_draft=3'], '--num_draft means nothing here'),
    (['--draft=none'], '--draft=none'),
])
def test_refuses(bench, arguments, words):
  code, _, err = bench(*arguments)
  assert code == 2 and words in err and err.count('\n') == 1


def test_a_draft_is_named_by_its_folder(pair, bench, run_program, tmp_path):
  """And 'distilled' is that of the package, if it has one."""
  target, folder = pair
  draft, tokenizer = common.draft_named(str(folder), target)
  assert isinstance(draft, student_lib.Student) and tokenizer is None
  with pytest.raises(ValueError, match='load_draft'):
    cj.models.load.load_transformer(folder)
  state = fakes.start(target, draft, prompts=[[1, 2, 3]], max_new=4,
                      config=decode.DecodeConfig(num_draft=2, max_length=32, vocab_size=267))
  assert state.draft_cache.hidden is not None
