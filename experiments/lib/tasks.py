"""Tasks of lm-eval for programs that write the answers themselves: prompts to answer, and what the answers score.

Prompts, few-shot examples, extraction and scoring are lm-eval's own code, and so are the prompts' random numbers: a
question reads as in a run of `lm_eval`, and its answer scores the same. lm-eval is imported by the first call.
"""

import collections
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import logging
import numbers
import os
import pathlib
import random
import re
import warnings

import jinja2
import numpy as np

from lib import record

FEWSHOT_SEED = 1234  # lm-eval's own, so that the examples are those of its tables
THOUGHTS = re.compile(r'<think>.*?(?:</think>\s*|\Z)', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Question:
  """One question of a task."""

  doc: int  # its number among the documents of the task
  prompt: str  # to be taken as it is (raw=True): the chat template is in it
  stop: tuple[str, ...]  # strings that end an answer


class Task:
  """A task whose answers are generated: its questions, and what an answer scores.

  Attributes:
    name: lm-eval's.
    questions: list[Question].
    metrics: names of what `score` gives, with the filter that extracts the answer where it has a name:
      'exact_match,strict-match'.
    metric: the first of them; None if the task scores nothing.
  """

  def __init__(self, task, tokenizer, raw=False):
    """Args: task, lm-eval's, with its requests built; tokenizer, that which is to read the prompts; raw, whether they
    are plain text."""
    self._task, self._requests = task, {request.doc_id: request for request in task.instances}
    self.name = task.config.task
    if other := {request.request_type for request in task.instances} - {'generate_until'}:
      raise ValueError(f'task {self.name} asks for more than a text ({", ".join(sorted(other))}); here answers are '
                       'written.')
    self.questions = [
        Question(doc, without_bos(prompt, tokenizer), stop_strings(wanted.get('until'), tokenizer, raw))
        for doc, (prompt, wanted) in ((doc, request.args) for doc, request in self._requests.items())]
    self.metrics = tuple(self.score(self.questions[0].doc, ''))
    self.metric = next(iter(self.metrics), None)

  def score(self, doc, text) -> dict[str, float]:
    """{metric: score} of a text as the answer to question `doc`, without what it thinks aloud.

    A metric of several values, as the instructions of an IFEval prompt have, gives their mean: the mean of these over
    prompts weighs prompts alike, where lm-eval weighs instructions. What is no number of one answer (BLEU) is left out.
    """
    request = self._requests[doc]
    request = dataclasses.replace(request, resps=[without_thoughts(text, request.args[0])], filtered_resps={})
    scores = {}
    for pipeline in self._task._filters:
      pipeline.apply([request])
      for metric, value in self._task.process_results(request.doc, [request.filtered_resps[pipeline.name]]).items():
        values = value if isinstance(value, list) else [value]
        if values and all(isinstance(v, numbers.Real) or isinstance(v, np.bool_) for v in values):
          scores[metric if pipeline.name == 'none' else f'{metric},{pipeline.name}'] = float(np.mean(values))
    return scores


def load(names, *, data_dir=None, tokenizer, num_fewshot=None, limit=None, raw=False, seed=FEWSHOT_SEED) -> list[Task]:
  """The tasks of these names; those of a tag or group are taken one by one.

  Args:
    names: lm-eval's, or 'spec_bench', which scores nothing.
    data_dir: folder with the data of the tasks (see `LOCAL`); None: the Hugging Face hub.
    num_fewshot: examples before each question; None: as the task says. One that says 0 keeps to that, as in lm-eval.
    limit: questions of each task, the first ones; None: all.
    raw: whether prompts are plain text instead of turns in the tokenizer's chat template.
    seed: of the choice of examples.

  Raises: ValueError for a name that is unknown or asks for no text, data that is missing or wrong, what must be
    installed.
  """
  found = find(names, data_dir=data_dir, num_fewshot=num_fewshot, text_only=True)
  return [_prepared(task, tokenizer, limit, raw, seed) for item in found for task in _leaves(item)]


def find(names, *, data_dir=None, num_fewshot=None, text_only=False) -> list:
  """The tasks and groups of these names as lm-eval's own objects, with their data.

  Args: as for `load`, and text_only, whether tasks whose answers are not generated (multiple choice, perplexity) are
    refused.
  Raises: as `load`.
  """
  _import_lm_eval()
  names = list(dict.fromkeys(names))
  if not names:
    raise ValueError('--tasks is empty: no task is named.')
  manager = _manager(name for name in names if name != SPEC_BENCH['task'])
  specs = [_spec(name, manager, data_dir, text_only) for name in names]
  found = []
  for name, spec in zip(names, specs):
    with _as_lm_eval(), _explained(name):
      loaded = manager.load(spec)
    group = loaded['groups'].get(name)
    found += [group] if group is not None else loaded['tasks'].values()
  leaves = [leaf for item in found for leaf in _leaves(item)]
  for name, count in collections.Counter(task.config.task for task in leaves).items():
    if count > 1:
      raise ValueError(f'task {name} is named {count} times, by itself and as a part of another: drop one.')
  for task in leaves:
    if 'ifeval' in task.config.task:
      _prepare_ifeval()
    if getattr(task, 'UNSAFE_CODE', False):
      raise ValueError(f'task {task.config.task} runs the code that a model writes: that is not done here.')
    if getattr(task, 'MULTIMODAL', False):
      raise ValueError(f'task {task.config.task} asks about more than text.')
    if text_only:
      _check_generates(task.config.task, task.OUTPUT_TYPE, manager)
      if task.config.repeats > 1:
        raise ValueError(f'task {task.config.task} votes over {task.config.repeats} answers a question; here each '
                         'question has one.')
    _set_examples(task, num_fewshot)
  return found


def _set_examples(task, num_fewshot):
  """Has a task show so many examples, as lm-eval's evaluator does. Raises ValueError where it has not as many."""
  usual = task.config.num_fewshot
  count = usual if num_fewshot is None or usual == 0 else num_fewshot
  task.set_config('num_fewshot', count or 0)
  if count and hasattr(task, 'sampler'):
    # One may be the question itself.
    most = len(task.sampler.df) - (task.fewshot_cfg.split == task.config.test_split)
    if count > most:
      raise ValueError(f'task {task.config.task} has {most} examples, not {count}: give --num_fewshot={most} or '
                       'fewer.')


def _prepared(task, tokenizer, limit, raw, seed) -> Task:
  """The task with its prompts written, as lm-eval's evaluator has them written."""
  task.set_fewshot_seed(seed)
  with _as_lm_eval(), _explained(task.config.task):
    task.build_all_requests(limit=limit, apply_chat_template=not raw, fewshot_as_multiturn=True,
                            chat_template=None if raw else chat_template(tokenizer))
    return Task(task, tokenizer, raw)


# Texts.


def chat_template(tokenizer):
  """A function (messages, add_generation_prompt=True) -> prompt, as lm-eval calls one.

  A system message that the template does not take is left out, as by lm-eval, with a warning.
  Raises: ValueError for a tokenizer without a template.
  """
  if not tokenizer.chat_template:
    raise ValueError('this tokenizer has no chat template: give --raw to take prompts as plain text.')

  def apply(messages, add_generation_prompt=True):
    write = lambda turns: tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt)
    try:
      return write(messages)
    except jinja2.TemplateError as error:
      turns = [turn for turn in messages if turn['role'] != 'system']
      if len(turns) == len(messages):
        raise ValueError(f'a prompt does not fit the chat template: {error}') from None
      warnings.warn('the chat template takes no system message: that of the task is left out.', stacklevel=2)
      return write(turns)

  return apply


def without_bos(prompt, tokenizer):
  """The prompt without a leading beginning-of-text token, if its tokenizer puts one before any text."""
  adds = tokenizer.bos_token is not None and list(tokenizer('')['input_ids'][:1]) == [tokenizer.bos_token_id]
  return prompt.removeprefix(tokenizer.bos_token) if adds else prompt


def stop_strings(until, tokenizer, raw=False) -> tuple[str, ...]:
  """The strings of a task that end an answer.

  Those of white space are left out (a chat model would end at its first blank line) unless prompts are raw, and so are
  special tokens, which never show in a text; those that end one do so anyway.
  """
  until = [until] if isinstance(until, str) else until or ()
  return tuple(dict.fromkeys(s for s in until if (raw or s.strip()) and s not in tokenizer.all_special_tokens))


def without_thoughts(text, prompt=''):
  """The text without <think> blocks, of which the prompt may have opened the first and the end of the text may be
  missing."""
  opened = '<think>' if prompt.rstrip().endswith('<think>') else ''
  return THOUGHTS.sub('', opened + text)


# Data.


def _need(row, field, valid, what):
  if not valid(row.get(field)):
    raise ValueError(f'{field} is {row.get(field)!r:.60}: need {what}.')


_is_text = lambda value: isinstance(value, str) and bool(value.strip())
_is_texts = lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _check_gsm8k(row):
  _need(row, 'question', _is_text, 'a text')
  _need(row, 'answer', lambda value: _is_text(value) and '#### ' in value, 'a text that ends in "#### " and a number')


def _check_ifeval(row):
  from lm_eval.tasks.ifeval import instructions_registry

  _need(row, 'key', lambda value: isinstance(value, int), 'a whole number')
  _need(row, 'prompt', _is_text, 'a text')
  _need(row, 'instruction_id_list', _is_texts, 'a list of names')
  for name in row['instruction_id_list']:
    if name not in instructions_registry.INSTRUCTION_DICT:
      raise ValueError(f'instruction_id_list has {name!r}, which lm-eval does not know.')
  count = len(row['instruction_id_list'])
  fits = lambda value: isinstance(value, list) and len(value) == count and all(isinstance(v, dict) for v in value)
  _need(row, 'kwargs', fits, f'a list of {count} objects, one for each instruction')


def _check_spec_bench(row):
  _need(row, 'turns', _is_texts, 'a list of texts, of which the first is the prompt')


# Data sets that may lie in a folder, by their names on the hub: the file of each split, and what a row must be.
LOCAL = {
    'openai/gsm8k': ({'train': 'gsm8k_train.jsonl', 'test': 'gsm8k_test.jsonl'}, _check_gsm8k),
    'google/IFEval': ({'train': 'ifeval.jsonl'}, _check_ifeval),
    'spec_bench': ({'test': 'spec_bench.jsonl'}, _check_spec_bench),
}
FILES = [file for splits, _ in LOCAL.values() for file in splits.values()]
SPEC_BENCH = {
    'task': 'spec_bench', 'test_split': 'test', 'output_type': 'generate_until', 'doc_to_text': '{{turns[0]}}',
    'doc_to_target': '', 'num_fewshot': 0, 'metric_list': [], 'metadata': {'version': 1.0},
    'generation_kwargs': {'until': [], 'do_sample': False},
}


def _spec(name, manager, data_dir, text_only):
  """What lm-eval is to load for a name: the name, or a config with the files of a folder in place of the hub's."""
  if name == SPEC_BENCH['task']:
    return SPEC_BENCH | _files(name, 'spec_bench', data_dir)
  entry = manager.task_index.get(name)
  if entry is None:
    known = (*manager.all_tasks, SPEC_BENCH['task'])  # so many that to compare them all would take ten seconds
    near = difflib.get_close_matches(name.lower(), [other for other in known if other[0] == name[:1].lower()])
    raise ValueError(f'task {name!r} is not known to lm-eval.' + (f' Near it are {", ".join(near)}.' if near else ''))
  if 'ifeval' in name:
    _prepare_ifeval()
  config = entry.cfg or {}
  is_task = name in manager.all_subtasks and 'class' not in config
  if text_only and is_task:
    _check_generates(name, config.get('output_type', 'generate_until'), manager)
  if data_dir is None:
    return name
  # A config by itself would replace the task's own; as a member of a group it is laid over it.
  return {'group': 'local', 'task': [{'task': name} | _files(name, config.get('dataset_path'), data_dir)]}


def _files(name, dataset, data_dir) -> dict:
  """The part of a task's config that says where its data is. Raises ValueError for a file that is missing or wrong."""
  if dataset not in LOCAL:
    raise ValueError(f'--data_dir={data_dir}: the data of {name} ({dataset or "several tasks"}) cannot be read from a '
                     f'folder, only that of {", ".join(LOCAL)}; drop the task, or --data_dir.')
  if data_dir is None:
    raise ValueError(f'task {name} is on no hub: give --data_dir, a folder with its files ({", ".join(FILES)}).')
  splits, check = LOCAL[dataset]
  paths = {split: os.path.join(data_dir, file) for split, file in splits.items()}
  for path in paths.values():
    if not os.path.isfile(path):
      raise ValueError(f'{path} is missing: the data of task {name} is looked for there.')
    if not record.read_rows(path, check=check):
      raise ValueError(f'{path} is empty.')
  return {'dataset_path': 'json', 'dataset_name': None, 'dataset_kwargs': {'data_files': paths}}


# lm-eval.


def _import_lm_eval():
  try:
    import datasets
    import lm_eval.tasks  # noqa: F401
  except ImportError as error:
    raise ValueError(f'lm-eval is not installed ({error}): pip install -e .[eval]') from None
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  datasets.disable_progress_bars()


def _manager(names):
  """lm-eval's index of its tasks.

  Reading all 14,000 takes ten seconds, so the folders that bear the first words of the names are tried before.
  """
  from lm_eval import tasks

  names, root = list(names), pathlib.Path(tasks.__file__).parent
  folders = sorted({root / name.split('_')[0] for name in names})
  if all(folder.is_dir() for folder in folders):
    manager = tasks.TaskManager(include_defaults=False, include_path=folders)
    if all(name in manager.all_subtasks for name in names):
      return manager
  return tasks.TaskManager()


def _check_generates(name, output_type, manager):
  """Raises ValueError for a task whose answers are not generated, naming those beside it whose are."""
  if output_type == 'generate_until':
    return
  beside = [other for other in manager.all_subtasks if other.split('_')[0] == name.split('_')[0]
            and manager.task_index[other].cfg.get('output_type') == 'generate_until']
  near = difflib.get_close_matches(name, beside, n=4, cutoff=0)
  raise ValueError(f'task {name} ({output_type}) asks for no text, and here answers are written.'
                   + (f' Tasks beside it that do: {", ".join(near)}.' if near else ''))


def _leaves(item):
  """The tasks of a group, or of a task: itself."""
  return item.get_all_tasks() if hasattr(item, 'get_all_tasks') else [item]


def _prepare_ifeval():
  """Sees to what IFEval's checks need, before lm-eval would look for it on the network.

  Raises: ValueError that says what to install.
  """
  try:
    import langdetect
    import nltk
  except ImportError as error:
    raise ValueError(f'IFEval cannot be scored ({error}): pip install -e .[eval]') from None
  langdetect.DetectorFactory.seed = 0  # or a text may be English now and Dutch then
  spec = importlib.util.find_spec('llama_index')  # carries the data and can be had where the network has only packages
  for folder in (spec and spec.submodule_search_locations) or ():
    path = os.path.join(folder, 'core', '_static', 'nltk_cache')
    if path not in nltk.data.path:
      nltk.data.path.append(path)
  try:
    nltk.data.find('tokenizers/punkt_tab/english/')
  except LookupError:
    raise ValueError(
        'IFEval cannot be scored without punkt_tab, data of NLTK: python -m nltk.downloader punkt_tab; or pip install '
        '--no-deps llama-index-core, which carries it (elsewhere: NLTK_DATA=<its _static/nltk_cache>).') from None


@contextlib.contextmanager
def _as_lm_eval():
  """Without its progress bars, and with the random numbers that its evaluator starts from (GPQA shuffles choices)."""
  from lm_eval import defaults

  states = random.getstate(), np.random.get_state()
  random.seed(defaults.DEFAULT_RANDOM_SEED)
  np.random.seed(defaults.DEFAULT_OTHER_SEED)
  try:
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
      yield
  finally:
    random.setstate(states[0])
    np.random.set_state(states[1])
  for warning in caught:  # they would have gone where the bars did
    warnings.warn(warning.message, stacklevel=3)


@contextlib.contextmanager
def _explained(name):
  """Turns what goes wrong with data and packages of a task into a ValueError."""
  try:
    yield
  except ImportError as error:
    raise ValueError(f'task {name} needs a package that is missing: {error}') from None
  except OSError as error:
    raise ValueError(f'the data of task {name} cannot be had: {error}. Where there is no network, --data_dir names a '
                     f'folder with files ({", ".join(FILES)}).') from None
