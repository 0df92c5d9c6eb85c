"""The program of experiments/evaluate.py: tables and files on a tiny model, what it keeps, what it refuses."""

import json
import os
import pathlib
import subprocess
import sys

import datasets
import evaluate
import jax
import lm_eval.evaluator
import lm_eval.tasks
import pytest
from absl.testing import flagsaver
from lib import flags as common
from lib import pod, tasks

import cactus_jax as cj
from cactus_jax.models import transformer
from cactus_jax.models.transformer import Transformer
from tests import checkpoints, fakes, harness_test, pod_test, tasks_test

pytestmark = pytest.mark.usefixtures('quick_programs')
TASK = 'gsm8k_cot_zeroshot'
# One shape and rule for nearly all runs, so that they share programs.
USUAL = ('--draft=early_exit:1', '--max_new_tokens=12', '--num_draft=3', '--temperature=1', '--batch_size=2',
         '--rule=cactus', '--delta=1', '--ledger')


@pytest.fixture(scope='module')
def target():
  params = transformer.random_params(jax.random.key(3), harness_test.CONFIG)
  return Transformer(params, harness_test.CONFIG)


@pytest.fixture
def cli(target, run_program, monkeypatch, tmp_path):
  """cli(*arguments, data=True): exit code, standard output and standard error of a run with made-up data."""
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'datasets'))
  monkeypatch.setattr(lm_eval.evaluator, 'add_env_info', lambda storage: None)
  monkeypatch.setattr(lm_eval.evaluator, 'set_torch_seed', lambda seed: None)
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **_: target)
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer())
  monkeypatch.setattr(cj, 'default_model_path', lambda: tmp_path / 'fake.gguf')
  monkeypatch.chdir(tmp_path)
  folder = tasks_test.write_data(tmp_path)
  usual = lambda data: (*USUAL, *([f'--data_dir={folder}'] if data else []))
  return lambda *arguments, data=True: run_program(
      evaluate.main, 'evaluate.py', *usual(data), *arguments, meshes=True)


def test_tables_and_file(cli, tmp_path):
  code, out, err = cli(f'--tasks={TASK},spec_bench', '--output=r.json', '--max_questions=4')
  assert code == 0, err
  assert out.startswith('verifier fake.gguf; draft early_exit:1, 3 tokens a round; rule Cactus(delta=1.0)\n')
  assert f'|{TASK}|' in out and '|strict-match' in out and 'exact_match' in out
  words = {line[2:30].strip(): line[30:] for line in out.splitlines() if line.startswith('  ')}
  assert words['answers written'].startswith('6   (')  # four, and both of the other
  found = json.loads((tmp_path / 'r.json').read_text())
  assert found['results'][TASK]['exact_match,strict-match'] == 0 and found['settings']['rule'] == 'Cactus(delta=1.0)'
  assert {task: len(rows) for task, rows in found['samples'].items()} == {TASK: 8, 'spec_bench': 2}  # two filters
  (prompt, wanted), = found['samples'][TASK][0]['arguments']
  assert prompt == "<|user|>Q: What is 0 and 0?\nA: Let's think step by step.<|end|><|assistant|>"
  told = found['speculation']
  assert words['tokens per verifier call'] == f'{told["tokens_per_call"]:.2f}   ({told["verifier_calls"]} calls)'
  assert words['accepted per call (AL)'] == f'{told["accepted_len"]:.2f}' and 0 < told['acceptance_rate'] < 1
  assert words['KL per token'].startswith(f'{told["kl_per_token"]:.5f} nats') and told['kl_per_token'] > 0
  code, _, err = cli(f'--tasks={TASK}', '--output=r.json')
  assert code == 2 and err == 'error: --output=r.json is there already: choose another.\n'


@pytest.fixture
def asked(monkeypatch):
  """The prompts of a run that ends before they are answered."""
  found = []

  def generate_each(prompts, **_):
    found.extend(prompts)
    raise KeyboardInterrupt

  monkeypatch.setattr(cj, 'generate_each', generate_each)
  return found


def test_prompts_are_turns_or_plain_text(cli, asked):
  for raw in ([], ['--raw']):
    assert cli(f'--tasks={TASK}', '--max_questions=1', *raw)[0] == 130
  text = "Q: What is 0 and 0?\nA: Let's think step by step."
  assert asked == [f'<|user|>{text}<|end|><|assistant|>', text]


def test_what_is_cached_is_not_written_again(cli, monkeypatch):
  """An interrupt says what is safe; other settings have a cache of their own."""
  generate_each = cj.generate_each

  def interrupted(prompts, **options):
    for count, pair in enumerate(generate_each(prompts, **options)):
      if count == 2:
        raise KeyboardInterrupt
      yield pair

  with monkeypatch.context() as patched:
    patched.setattr(cj, 'generate_each', interrupted)
    code, _, err = cli(f'--tasks={TASK}', '--use_cache=done')
    assert code == 130 and '\n2 requests were answered; the answers are safe in done_' in err
    assert err.endswith('interrupted\n')
    name = err.split('safe in ')[1].split()[0]
    assert os.path.exists(name)
    code, _, err = cli(f'--tasks={TASK}')
    assert code == 130 and '\n2 requests were answered; the answers are lost; --use_cache=NAME would keep' in err
  code, out, _ = cli(f'--tasks={TASK}', '--use_cache=done')
  assert code == 0 and 'answers written             4   (' in out
  code, out, _ = cli(f'--tasks={TASK}', '--use_cache=done')
  assert code == 0 and 'No text was written in this run: scored were cached answers' in out
  code, out, _ = cli(f'--tasks={TASK}', '--use_cache=done', '--seed=1')
  assert code == 0 and 'answers written             6   (' in out


def test_multiple_choice(cli, monkeypatch):
  """Its likelihoods are the verifier's."""
  rows = [{'text': chr(97 + i), 'number': i} for i in range(6)]
  dataset = datasets.DatasetDict({'test': datasets.Dataset.from_list(rows)})
  config = harness_test.CONFIGS[1] | {'test_split': 'test', 'custom_dataset': lambda **_: dataset}
  found = list(lm_eval.tasks.TaskManager(include_defaults=False).load([config])['tasks'].values())
  monkeypatch.setattr(tasks, 'find', lambda names, **_: found)
  code, out, err = cli('--tasks=chooses')
  assert code == 0, err
  assert '|chooses|' in out and 'No text was written in this run' in out


@pytest.mark.parametrize('arguments, words', [
    (['--tasks='], 'no task is named'),
    (['--tasks=gsm8k_zero_cot'], "task 'gsm8k_zero_cot' is not known to lm-eval. Near it are gsm8k"),
    (['--tasks=arc_easy'], 'the data of arc_easy (allenai/ai2_arc) cannot be read from a folder'),
    ([f'--tasks={TASK}', '--num_draft=auto'], '--num_draft=auto: this program needs a number'),
    ([f'--tasks={TASK}', '--rule=clamp'], '--delta means nothing to --rule=clamp'),
    (['--tasks=gsm8k', '--num_fewshot=9'], 'task gsm8k has 6 examples, not 9'),
    ([f'--tasks={TASK}', '--output=none/r.json'], '/none is no folder that can be written to'),
    ([f'--tasks={TASK}', '--use_cache=none/r'], '--use_cache=none/r: '),
    ([f'--tasks={TASK}', '--max_questions=0'], 'flag --max_questions=0'),
    ([f'--tasks={TASK}', '--data_dir=none'], 'none/gsm8k_train.jsonl is missing'),
])
def test_refuses_before_a_model_is_loaded(cli, monkeypatch, arguments, words):
  few = [tasks_test.FOLDER / 'gsm8k']
  whole = lm_eval.tasks.TaskManager
  monkeypatch.setattr(lm_eval.tasks, 'TaskManager', lambda **options: whole(
      **{'include_path': few, 'include_defaults': False} | options))
  monkeypatch.setattr(cj, 'load_transformer', lambda *_, **__: pytest.fail('a model is loaded'))
  code, _, err = cli(*arguments)
  assert code == 2 and words in err and err.count('\n') == 1


def test_refuses_a_tokenizer_without_a_template(cli, asked, monkeypatch):
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer(chat_template=None))
  with monkeypatch.context() as patched:
    patched.setattr(cj, 'load_transformer', lambda *_, **__: pytest.fail('a model is loaded'))
    code, _, err = cli(f'--tasks={TASK}')
  assert code == 2 and 'this tokenizer has no chat template: give --raw' in err
  assert not asked and cli(f'--tasks={TASK}', '--raw')[0] == 130 and len(asked) == 6


def test_a_cache_is_for_one_process(monkeypatch):
  monkeypatch.setattr(pod, 'is_several', lambda: True)
  with flagsaver.flagsaver(), pytest.raises(ValueError, match='--use_cache is for one process'):
    common.FLAGS(['evaluate.py', f'--tasks={TASK}', '--use_cache=done'])
    evaluate.main()


# As by a user, on devices that the CPU pretends.


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('evaluate')
  checkpoints.write_folder(folder / 'model', pod_test.CONFIG, checkpoints.tensors(pod_test.CONFIG, 0))
  fakes.byte_tokenizer().save_pretrained(folder / 'model')
  tasks_test.write_data(folder)
  return folder


def start(folder, devices, output, *arguments):
  environment = os.environ | {
      'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices), 'XLA_FLAGS': '--xla_backend_optimization_level=0',
      'HF_HUB_OFFLINE': '1', 'HF_DATASETS_CACHE': str(folder / f'datasets-{output}')}
  program = pathlib.Path(evaluate.__file__)
  return subprocess.Popen(
      [sys.executable, program, f'--verifier={folder}/model', '--draft=lookup', f'--data_dir={folder}',
       f'--tasks={TASK},spec_bench', '--rule=cactus', '--delta=1', '--temperature=1', '--num_draft=2',
       '--max_new_tokens=7', '--batch_size=2', f'--output={folder}/{output}.json', *arguments],
      env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers(path):
  found = json.loads(path.read_text())
  return {task: [(row['doc_id'], row['filter'], row['resps']) for row in rows]
          for task, rows in found['samples'].items()}, found['results'], found['speculation']


@pytest.mark.slow
def test_on_a_mesh_and_on_two_processes(folder):
  """The same answers as on one device; the second process prints nothing."""
  one, mesh = start(folder, 1, 'one'), start(folder, 4, 'mesh', '--mesh_data=2')
  for process in (one, mesh):
    code, out, err = pod_test.end(process, 300)
    assert code == 0, err
    assert f'|{TASK}|' in out
  assert '4 devices: data=2 x fsdp=1 x model=2' in out
  address = f'--coordinator=localhost:{pod_test.free_port()}'
  several = [start(folder, 2, 'several', '--mesh_data=2', address, '--num_processes=2', f'--process_id={i}')
             for i in range(2)]
  (code, out, err), (other, nothing, other_err) = [pod_test.end(process, 300) for process in several]
  assert code == other == 0, err + other_err
  assert f'|{TASK}|' in out and nothing == ''
  assert answers(folder / 'one.json') == answers(folder / 'mesh.json') == answers(folder / 'several.json')
