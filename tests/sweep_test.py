"""The program of experiments/sweep.py on a tiny verifier: its grid, its rows, and that nothing finished is lost."""

import dataclasses
import fcntl
import json
import shutil

import jax
import lm_eval.tasks  # noqa: F401  (takes seconds, which are no test's)
import pytest
import sweep
from lib import answers, record, tasks
from lib import flags as common

import cactus_jax as cj
from tests import fakes, talker

pytestmark = pytest.mark.usefixtures('quick_programs')
GSM8K = [{'question': f'What is {n} and {n}?', 'answer': f'It is {2 * n}.\n#### {2 * n}'} for n in range(4)]
SPEC_BENCH = [{'question_id': n, 'category': 'writing', 'turns': ['abc' * n, 'Again.']} for n in range(1, 7)]
WHOLE = []  # for tests that compare with what is decoded but once
GRID = ('--grid=plain; exact; cactus delta=0.1,1', '--num_drafts=2,3', '--tasks=spec_bench,gsm8k')


@pytest.fixture(scope='module')
def verifier():
  target = talker.talker()
  return target.replace(config=dataclasses.replace(target.config, max_length=256))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data')
  for name, rows in (('gsm8k_test', GSM8K), ('gsm8k_train', GSM8K), ('spec_bench', SPEC_BENCH)):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return folder


@pytest.fixture
def run(verifier, data, run_program, monkeypatch, tmp_path):
  """run(*arguments): exit code, standard output and standard error of a sweep into tmp_path / 'out'."""
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: verifier)
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer())
  monkeypatch.setattr(cj, 'default_model_path', lambda: tmp_path / 'fake.gguf')
  common.set_defaults(max_new_tokens=12, ledger=True)
  yield lambda *arguments: run_program(
      sweep.main, 'sweep.py', f'--output={tmp_path / "out"}', f'--data_dir={data}', '--draft=early_exit:1',
      '--batch_size=2', '--num_fewshot=1', *arguments)
  common.set_defaults(max_new_tokens=256, ledger=False)


def rows_of(tmp_path):
  return record.read_rows(tmp_path / 'out' / 'rows.jsonl', check=answers.check_answer)


def key(row):
  return row['task'], row['doc'], row['arm'], row['num_draft'], row['seed']


def told(rows):
  """What rows say, in any order, but for their times and what rounding may tip."""
  left_out = ('seconds', 'kl', 'max_kl')
  return sorted(({name: value for name, value in row.items() if name not in left_out} for row in rows), key=key)


@pytest.fixture
def whole(run, tmp_path):
  """The rows of the grid, decoded without interruption."""
  if not WHOLE:
    test_rows_are_those_of_the_grid(run, tmp_path)
    shutil.rmtree(tmp_path / 'out')
  return WHOLE


def test_rows_are_those_of_the_grid(run, tmp_path):
  code, out, err = run(*GRID, '--seeds=0,7')
  assert code == 0, err
  rows = rows_of(tmp_path)
  arms = [('plain', 0)] + [(arm, k) for arm in ('exact', 'cactus delta=0.1', 'cactus delta=1') for k in (2, 3)]
  assert sorted(map(key, rows)) == sorted(
      (task, doc, *arm, seed) for task, count in (('spec_bench', 6), ('gsm8k', 4)) for doc in range(count)
      for arm in arms for seed in (0, 7))
  assert len(rows) == 140 and '140 answers, of which 0 are there; 7 arms' in out and '140/140' in err
  for row in rows:
    assert (row['score'] is None) == (row['task'] == 'spec_bench')
    assert row['seconds'] > 0 and row['verifier_calls'] > 0
    if row['arm'] == 'plain':
      assert row['verifier_calls'] == row['decoded'] and row['kl'] == 0
    elif row['arm'] == 'exact':
      assert row['kl'] == 0 and row['decided'] > 0
  assert sum(row['kl'] for row in rows if row['arm'] == 'cactus delta=1') > 0
  texts = lambda **of: [row['text'] for row in told(rows) if all(row[name] == value for name, value in of.items())]
  assert texts(seed=0) != texts(seed=7)
  assert texts(arm='cactus delta=0.1') != texts(arm='cactus delta=1')
  held = json.loads((tmp_path / 'out' / 'run.json').read_text())
  assert held['settings']['tasks']['gsm8k']['metric'].startswith('exact_match')
  assert held['settings']['temperature'] == 0.6 and 'rule' not in held['settings'] and len(held['starts']) == 1
  assert held['starts'][0]['flags']['seeds'] == ['0', '7']
  WHOLE[:] = told(rows)


def test_an_answer_is_that_of_the_library(run, tmp_path, verifier, data):
  """To the prompt as lm-eval writes it, with its stop strings, scored by it."""
  code, _, err = run('--grid=cactus delta=1', '--num_drafts=3', '--tasks=gsm8k', '--seeds=3')
  assert code == 0, err
  tokenizer = fakes.byte_tokenizer()
  task, = tasks.load(['gsm8k'], data_dir=str(data), tokenizer=tokenizer, num_fewshot=1)
  done = cj.generate_text(
      [question.prompt for question in task.questions], target=verifier, draft=verifier.early_exit(1), raw=True,
      tokenizer=tokenizer, rule=cj.Cactus(1.0), sampling=cj.SamplingParams(0.6, 20, 0.95), num_draft=3, seed=3,
      max_new_tokens=12, stop=task.questions[0].stop, ledger=True)
  for row in rows_of(tmp_path):
    assert row['text'] == done.texts[row['doc']] and row['finish_reason'] == done.finish_reasons[row['doc']]
    assert row['new_tokens'] == len(done.tokens[row['doc']])
    assert row['kl'] == pytest.approx(done.kl[row['doc']], abs=1e-4)
    assert row['metrics'] == task.score(row['doc'], row['text'])


def test_an_interrupted_sweep_goes_on(run, tmp_path, monkeypatch, whole):
  """Stopped twice, by ctrl-C and in the middle of a line: the rows are those of a run without interruption."""
  append, count = sweep.Folder.append, [0]

  def interrupted(folder, row):
    append(folder, row)
    count[0] += 1
    if count[0] == 30:
      raise KeyboardInterrupt

  monkeypatch.setattr(sweep.Folder, 'append', interrupted)
  code, out, err = run(*GRID, '--seeds=0,7')
  assert code == 130 and f'of 140 answers are in {tmp_path / "out"}; the same command goes on' in out
  monkeypatch.setattr(sweep.Folder, 'append', append)
  path = tmp_path / 'out' / 'rows.jsonl'
  assert len(rows_of(tmp_path)) == 30
  path.write_bytes(path.read_bytes()[:-20])
  code, out, err = run(*GRID, '--seeds=0,7')
  assert code == 0, err
  assert '140 answers, of which 29 are there' in out and 'the last line is incomplete and is dropped' in out
  assert told(rows_of(tmp_path)) == whole
  held = json.loads((tmp_path / 'out' / 'run.json').read_text())
  assert len(held['starts']) == 2
  content = path.read_bytes()
  code, out, _ = run(*GRID, '--seeds=0,7')
  assert code == 0 and 'of which 140 are there' in out and path.read_bytes() == content
  assert json.loads((tmp_path / 'out' / 'run.json').read_text()) == held, 'a start that answers nothing is none'


def test_a_sweep_can_be_extended(run, tmp_path, whole):
  for arguments in (('--grid=exact', '--num_drafts=2', '--tasks=spec_bench', '--max_questions=2'),
                    (*GRID, '--seeds=7'), (*GRID, '--seeds=0,7')):
    code, _, err = run(*arguments)
    assert code == 0, err
  assert told(rows_of(tmp_path)) == whole


@pytest.mark.parametrize('change, words', [
    ('--temperature=0.7', 'temperature is 0.6 there and 0.7 here'),
    ('--max_new_tokens=9', 'max_new_tokens is 12 there and 9 here'),
    ('--draft=lookup', "draft is 'early_exit:1' there and 'lookup' here"),
    ('--batch_size=3', 'batch_size is 2 there and 3 here'),
])
def test_other_settings_are_refused(run, tmp_path, change, words):
  short = ('--grid=exact', '--num_drafts=2', '--tasks=gsm8k', '--max_questions=1')
  assert run(*short)[0] == 0
  before = (tmp_path / 'out' / 'run.json').read_bytes()
  code, _, err = run(*short, change)
  assert code == 2 and 'holds answers of other settings' in err and words in err and err.count('\n') == 1
  assert (tmp_path / 'out' / 'run.json').read_bytes() == before and len(rows_of(tmp_path)) == 1


def test_a_start_that_answered_nothing_binds_nobody(run, tmp_path):
  short = ('--grid=exact; cactus delta=1', '--num_drafts=2', '--max_questions=1')
  code, _, err = run(*short, '--tasks=gsm8k', '--block_verification')
  assert code == 2 and 'arm cactus delta=1: Cactus' in err and (tmp_path / 'out' / 'run.json').exists()
  assert run(*short, '--tasks=spec_bench')[0] == 0
  held = json.loads((tmp_path / 'out' / 'run.json').read_text())
  assert not held['settings']['block_verification'] and [*held['settings']['tasks']] == ['spec_bench']


def test_two_runs_do_not_write_to_one_folder(run, tmp_path):
  (tmp_path / 'out').mkdir()
  with open(tmp_path / 'out' / '.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    code, _, err = run(*GRID)
  assert code == 2 and 'is being written by another run' in err
  assert not (tmp_path / 'out' / 'rows.jsonl').exists()


@pytest.mark.parametrize('name, content, words', [
    ('rows.jsonl', '{}\n', 'holds rows without run.json'),
    ('run.json', '{}', 'is no run.json of a sweep'),
    ('run.json', '[1', 'is no run.json of a sweep'),
])
def test_other_folders_are_refused(run, tmp_path, name, content, words):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / name).write_text(content)
  code, _, err = run(*GRID)
  assert code == 2 and words in err and err.count('\n') == 1
  assert (tmp_path / 'out' / name).read_text() == content


def test_other_questions_are_refused(run, tmp_path):
  """Told by their prompts: with another number of examples, or from other data."""
  short = ('--grid=exact', '--num_drafts=2', '--tasks=gsm8k', '--max_questions=2')
  assert run(*short)[0] == 0
  code, _, err = run(*short, '--num_fewshot=2')
  assert code == 2 and 'an answer to question 0 of gsm8k with another prompt' in err and err.count('\n') == 1
  assert len(rows_of(tmp_path)) == 2


@pytest.mark.parametrize('good', [0, 4, 1])
def test_a_full_disk_is_told_and_costs_one_row(run, tmp_path, monkeypatch, good):
  """At the first fsync or the second, which are of run.json, or at that of the third row: the same command goes on."""
  fsync, left = record.os.fsync, [good]

  def full(number):
    left[0] -= 1
    if left[0] < 0:
      raise OSError(28, 'No space left on device')
    fsync(number)

  command = ('--grid=exact', '--num_drafts=2', '--tasks=spec_bench')
  monkeypatch.setattr(record.os, 'fsync', full)
  code, _, err = run(*command)
  assert code == 2 and 'No space left on device' in err and err.splitlines()[-1].startswith('error: ')
  assert ('the rows before this one are safe' in err) == (good > 1)
  monkeypatch.setattr(record.os, 'fsync', fsync)
  code, _, err = run(*command)
  assert code == 0, err
  assert [key(row)[1] for row in told(rows_of(tmp_path))] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize('arguments, words', [
    (['--grid=plain; exact; cactus delta=1', '--block_verification'], 'arm cactus delta=1: Cactus'),
    (['--grid=plain; exact', '--stop_entropy=1', '--draft=lookup'], 'arm exact: stop_entropy'),
])
def test_what_no_arm_could_do_is_told_before_the_first_answer(run, tmp_path, arguments, words):
  code, _, err = run('--num_drafts=2', '--tasks=spec_bench', *arguments)
  assert code == 2 and words in err and err.count('\n') == 1, err
  assert not (tmp_path / 'out' / 'rows.jsonl').read_bytes()


def test_a_question_that_leaves_no_room_is_told(run, tmp_path, verifier, monkeypatch):
  small = verifier.replace(config=dataclasses.replace(verifier.config, max_length=20))
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: small)
  code, _, err = run('--grid=plain', '--tasks=spec_bench')
  assert code == 2 and 'question 5 of spec_bench has ' in err and 'the model a context of 20' in err
  assert not (tmp_path / 'out' / 'rows.jsonl').read_bytes()


def test_a_row_that_is_no_answer_is_told(run, tmp_path):
  assert run('--grid=exact', '--num_drafts=2', '--tasks=spec_bench', '--max_questions=1')[0] == 0
  with open(tmp_path / 'out' / 'rows.jsonl', 'a') as file:
    file.write('{"task": "spec_bench"}\n')
  code, _, err = run(*GRID)
  assert code == 2 and 'rows.jsonl, line 2: doc, arm' in err and err.count('\n') == 1


@pytest.mark.parametrize('arguments, words', [
    (['--grid=cactis delta=1'], "'cactis' is no rule; there are plain, budget, cactus"),
    (['--grid=cactus'], 'needs delta'),
    (['--grid=cactus delta=-1'], "'cactus delta=-1': delta=-1.0: need"),
    (['--grid=cactus delta=a'], "delta='a': need"),
    (['--grid=cactus tau=1'], "cactus has no 'tau', but delta"),
    (['--grid=cactus delta'], "'delta' in 'cactus delta': numbers are written name=value"),
    (['--grid=cactus delta=1,'], 'numbers are written name=value'),
    (['--grid=cactus delta=1 delta=2'], 'numbers are written name=value'),
    (['--grid=cactus delta=1,1.0'], 'an arm is named twice'),
    (['--grid=exact; exact'], 'an arm is named twice'),
    (['--grid=exact a=1'], "exact has no 'a'."),
    (['--grid= ;'], 'need at least one rule'),
    (['--grid=budget'], 'budget'),
    (['--num_drafts=0'], '--num_drafts=0: need different whole numbers of at least 1'),
    (['--num_drafts=2,2'], 'need different whole numbers'),
    (['--num_drafts=auto'], 'need different whole numbers'),
    (['--seeds='], '--seeds'),
    (['--seeds=-1'], 'need different whole numbers of at least 0'),
    (['--rule=cactus', '--delta=1'], 'arms are named by --grid'),
    (['--delta=1'], '--delta means nothing here'),
    (['--num_draft=4'], '--num_draft means nothing here'),
    (['--stop=a'], 'tasks have their own stop strings'),
    (['--draft=none'], '--draft=none: only the arm plain needs no draft'),
    (['--output='], '--output is missing'),
    (['--temperature=-1'], 'temperature'),
])
def test_refuses(run, arguments, words, tmp_path):
  code, _, err = run(*arguments)
  assert code == 2 and words in err and err.count('\n') == 1, err
  assert not (tmp_path / 'out' / 'rows.jsonl').exists()


def test_arms():
  found = sweep.arms('plain; clamp tau=0.5,1; typical epsilon=0.1,0.2 alpha=0.3,0.4; top_k k=2 published=True', [3, 5])
  assert [(arm.name, arm.num_draft) for arm in found[:5]] == [
      ('plain', 0), ('clamp tau=0.5', 3), ('clamp tau=0.5', 5), ('clamp tau=1', 3), ('clamp tau=1', 5)]
  assert len(found) == 1 + 2 * 2 + 4 * 2 + 2
  assert found[-1].rule == cj.TopK(2.0, published=True) and found[-1].name == 'top_k k=2 published=True'
  assert [arm.rule for arm in found[5:13:2]] == [
      cj.Typical(e, a) for e in (0.1, 0.2) for a in (0.3, 0.4)]
  assert jax.tree.leaves(found[1].rule) == [0.5]
