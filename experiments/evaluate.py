"""Any task of lm-eval under any verification rule, with what speculation did on it.

  python experiments/evaluate.py --tasks=gsm8k,ifeval --rule=cactus --delta=1 --num_draft=10
  python experiments/evaluate.py --tasks=gsm8k_cot_zeroshot --data_dir=DIR --max_questions=20 --use_cache=done

Tasks are those of lm-eval (`lm-eval ls tasks`), multiple choice too, and spec_bench, which scores nothing. With
--data_dir their data is read from files of that folder (gsm8k_train.jsonl, gsm8k_test.jsonl, ifeval.jsonl,
spec_bench.jsonl), else from the Hugging Face hub. Prompts are turns in the chat template unless --raw is given. Texts
are sampled as the flags say (temperature 0.6, top-p 0.95, top-k 20, at most 4,096 tokens), whatever a task asks for,
and scored without what stands in <think> blocks; likelihoods, as of multiple choice, are the verifier's own, so that
no rule has a part in them.

With --use_cache every answer is on disk once it is finished, and the same command again goes on from there (but for
tasks that say do_sample: lm-eval takes none of theirs from disk). What lm-eval makes of the answers, and each of them,
goes to --output. Needs pip install -e .[eval].
"""

import json
import os
import sqlite3
import sys

from absl import flags
from lib import flags as common
from lib import pod, tasks

import cactus_jax as cj
from cactus_jax import files, metrics

_TASKS = flags.DEFINE_list('tasks', ['ifeval'], 'Tasks of lm-eval, or spec_bench.', allow_override=True)
_DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with the data of the tasks.', allow_override=True)
_LIMIT = flags.DEFINE_integer('max_questions', None, 'Questions of each task, the first ones; by default all.', 1,
                              allow_override=True)
_NUM_FEWSHOT = flags.DEFINE_integer('num_fewshot', None, 'Examples before each question; by default as the task says. '
                                    'A task that says 0 keeps to that.', 0, allow_override=True)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 8, 'Prompts decoded together.', 1, allow_override=True)
_USE_CACHE = flags.DEFINE_string('use_cache', None, 'Beginning of the name of a file of finished answers; the settings '
                                 'have a part in its name.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for results and answers.', allow_override=True)


RESAMPLES = 1000  # for the standard errors of metrics that are no means


def check_paths():
  """Raises ValueError for files that could not be written in the end."""
  if _OUTPUT.value and os.path.exists(_OUTPUT.value):
    raise ValueError(f'--output={_OUTPUT.value} is there already: choose another.')
  for name, path in (('output', _OUTPUT.value), ('use_cache', _USE_CACHE.value)):
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
      raise ValueError(f'--{name}={path}: {folder} is no folder that can be written to.')


def cache_path() -> str | None:
  """Where finished answers are: answers of other settings are not these, and lm-eval tells prompts apart only."""
  return _USE_CACHE.value and f'{_USE_CACHE.value}_{pod.digest(common.settings())}'


def evaluate(lm, found, raw) -> dict:
  """lm-eval's results."""
  import lm_eval
  from lm_eval.tasks import TaskManager

  os.environ['DISABLE_MULTIPROC'] = '1'  # or it resamples for standard errors in forks, which may hang beside JAX
  nothing_to_look_up = TaskManager(include_defaults=False)  # the whole index takes ten seconds
  return lm_eval.simple_evaluate(
      model=lm, tasks=found, limit=_LIMIT.value, use_cache=cache_path(), apply_chat_template=not raw,
      batch_size=_BATCH_SIZE.value, bootstrap_iters=RESAMPLES, task_manager=nothing_to_look_up)


def shown(results) -> str:
  """lm-eval's tables."""
  from lm_eval.utils import make_table

  columns = ['results'] + ['groups'] * ('groups' in results)
  return '\n'.join(make_table(results, column) for column in columns)


def figures(stats) -> dict:
  """What is told of speculation."""
  found = {'tokens_per_call': stats.tokens_per_call, 'accepted_len': stats.accepted_len,
           'acceptance_rate': stats.acceptance_rate, 'new_tokens': stats.new_tokens,
           'verifier_calls': stats.verifier_calls}
  return found | ({} if stats.spent is None else {'kl_per_token': stats.kl_per_token, 'kl_99': stats.kl_99})


def summary(parts) -> str:
  """The same in lines."""
  if not parts:
    return 'No text was written in this run: scored were cached answers, or likelihoods, which are the verifier\'s own.'
  stats = metrics.merge(parts)
  lines = [
      ('answers written', f'{len(parts)}   ({stats.new_tokens} tokens)'),
      ('tokens per verifier call', f'{stats.tokens_per_call:.2f}   ({stats.verifier_calls} calls)'),
      ('accepted per call (AL)', f'{stats.accepted_len:.2f}'),
      ('acceptance rate', f'{100 * stats.acceptance_rate:.0f}%   ({stats.accepted} of {stats.drafted} tested)'),
  ]
  if stats.spent:
    lines.append(('KL per token', f'{stats.kl_per_token:.5f} nats   (99% of those of the rule at most '
                  f'{stats.kl_99:.3f})'))
  return '\n'.join(f'  {name:28s}{value}' for name, value in lines)


def store(results, parts):
  """Writes --output."""
  from lm_eval.utils import handle_non_serializable

  whole = results | {'settings': common.settings(), 'speculation': figures(metrics.merge(parts)) if parts else None}
  try:
    with files.new_file(_OUTPUT.value) as file:
      json.dump(whole, file, indent=1, ensure_ascii=False, default=handle_non_serializable)
  except OSError as error:
    raise ValueError(f'--output={_OUTPUT.value} could not be written: {error}; the tables above are all there is, '
                     'unless --use_cache kept the answers.') from error


def main():
  """Evaluates, and prints the tables."""
  rule, sampling, options = common.rule(), common.sampling(), common.text_options()
  options['num_draft'], raw = common.num_draft(), options.pop('raw')
  if _USE_CACHE.value and pod.is_several():
    raise ValueError('--use_cache is for one process: of several each would have answers that others have not.')
  pod.on_first(check_paths)
  mesh = common.mesh()
  draft_mesh = common.draft_mesh(mesh)
  found = pod.together(lambda: tasks.find(_TASKS.value, data_dir=_DATA_DIR.value, num_fewshot=_NUM_FEWSHOT.value))
  from lib import harness  # imports lm-eval, which is known to be there by now

  tokenizer = pod.together(lambda: cj.load_tokenizer(common.verifier_source()))
  if not raw:
    pod.together(lambda: tasks.chat_template(tokenizer))
  print(common.describe(mesh), flush=True)
  target = pod.together(lambda: common.verifier(mesh))
  draft, draft_tokenizer = pod.together(lambda: common.draft(target, draft_mesh, tokenizer))
  lm = harness.SpeculativeLM(
      target=target, tokenizer=tokenizer, draft=draft, draft_tokenizer=draft_tokenizer, rule=rule, sampling=sampling,
      batch_size=_BATCH_SIZE.value, raw=raw, progress=lambda _: common.stop_if_interrupted(), **options)
  try:
    results = evaluate(lm, found, raw)
  except sqlite3.Error as error:
    raise ValueError(f'--use_cache={_USE_CACHE.value} could not be written: {error}; what it has is safe.') from error
  except KeyboardInterrupt:
    where = f'safe in {cache_path()}_rank0.db' if _USE_CACHE.value else 'lost; --use_cache=NAME would keep them'
    print(f'\n{lm.finished} requests were answered; the answers are {where}', file=sys.stderr)
    raise
  print(f'\n{shown(results)}\n{summary(lm.parts)}')
  if _OUTPUT.value:
    pod.on_first(lambda: store(results, lm.parts))


if __name__ == '__main__':
  common.set_defaults(max_new_tokens=4096)
  common.run(main, meshes=True)
