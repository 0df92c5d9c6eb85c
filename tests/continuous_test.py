"""The program of experiments/continuous.py: the same answers both ways, and what it refuses."""

import json
import re

import continuous
import pytest
from lib import flags as common

import cactus_jax as cj
from tests import talker

pytestmark = pytest.mark.usefixtures('quick_programs')


@pytest.fixture
def run(run_program, monkeypatch, tmp_path):
  """run(*arguments): exit code, standard output and standard error, of seven prompts in batches of two."""
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: talker.talker())
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: talker.TOKENIZER)
  monkeypatch.setattr(cj, 'default_model_path', lambda: tmp_path / 'fake.gguf')
  data = tmp_path / 'data.jsonl'
  data.write_text(''.join(json.dumps({'prompt': 'abc' * n}) + '\n' for n in range(1, 9)))
  common.set_defaults(max_new_tokens=16)
  yield lambda *arguments: run_program(
      continuous.main, 'continuous.py', f'--data={data}', '--draft=early_exit:1', '--num_prompts=7', '--batch_size=2',
      '--repeats=1', *arguments)
  common.set_defaults(max_new_tokens=256)


def test_both_ways_write_the_same(run):
  code, out, err = run('--rule=cactus', '--delta=1', '--num_draft=2')
  assert code == 0, err
  line = r'^  (plain|draft), (batches|in place) +([\d.]+) tokens/s +([\d.]+) times batches +\((.*)\)$'
  lines = re.findall(line, out, re.MULTILINE)
  assert [line[:2] for line in lines] == [
      ('plain', 'batches'), ('plain', 'in place'), ('draft', 'batches'), ('draft', 'in place')]
  for fixed, in_place in (lines[:2], lines[2:]):
    assert fixed[4] == in_place[4] and fixed[4].endswith('; 7 answers the same'), 'tokens and calls of the verifier'
    assert fixed[3] == '1.00' and float(in_place[2]) > 0
  assert lines[0][4] != lines[2][4]


@pytest.mark.parametrize('arguments, words', [
    (['--data='], '--data is missing'),
    (['--prompt_field=text'], 'text is None: need a string'),
    (['--ledger'], '--ledger means nothing here'),
    (['--num_draft=auto'], 'this program needs a number'),
])
def test_refuses(run, arguments, words):
  code, _, err = run(*arguments)
  assert code == 2 and words in err and err.count('\n') == 1
