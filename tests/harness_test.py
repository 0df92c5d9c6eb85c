"""Our decoder as a model of lm-eval: its texts, likelihoods that an independent sum gives, and the cache."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import datasets
import jax
import lm_eval.evaluator
import lm_eval.tasks
import numpy as np
import pytest
from lib import harness
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM

import cactus_jax as cj
from cactus_jax.models import transformer
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.transformer import Transformer
from tests import checkpoints, fakes, pod_test
from tests.tasks_test import bos_tokenizer

pytestmark = pytest.mark.usefixtures('quick_programs')
CONFIG = ModelConfig(
    family='llama', vocab_size=267, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    mlp_dim=48, max_length=128, norm_eps=1e-5, rope_theta=1000.0, tie_embeddings=False)
PAIRS = [('one', ' more'), ('in the', ' end'), ('x' * 15, 'y'), ('a' * 40, ' of some length, and then more'),
         ('', 'nothing before'), ('x' * 30, 'y' * 98), ('trailing space ', 'b')]
PROMPTS = ['one more', 'in the ', 'abcabcab', 'in the ', '12 times']


@pytest.fixture(scope='module')
def target():
  """A random verifier that says much the same as its first layer, sharp enough for texts to differ."""
  params = transformer.random_params(jax.random.key(3), CONFIG)
  return Transformer(params.replace(head=params.head * 3), CONFIG)


@pytest.fixture(scope='module')
def tokenizer():
  return fakes.byte_tokenizer()


def model(target, tokenizer, **options):
  options = dict(draft=target.early_exit(1), rule=cj.Exact(), num_draft=3, max_new_tokens=16, batch_size=2) | options
  return harness.SpeculativeLM(target=target, tokenizer=tokenizer, **options)


def asked(prompts, until=(), **wanted):
  return [Instance('generate_until', {}, (prompt, {'until': list(until), 'do_sample': False, **wanted}), 0, ('t', i, 1))
          for i, prompt in enumerate(prompts)]


def scored(pairs):
  return [Instance('loglikelihood', {}, pair, 0, ('t', i, 1)) for i, pair in enumerate(pairs)]


@pytest.fixture
def recorded(monkeypatch):
  """The options of each call of generate_each, which answers 'A1' to the first prompt of a call, 'A2', ..."""
  calls = []

  def generate_each(prompts, **options):
    calls.append({'prompts': prompts, **options})
    for i in reversed(range(len(prompts))):
      yield i, types.SimpleNamespace(texts=[f'A{i + 1}'], stats=i)

  monkeypatch.setattr(cj, 'generate_each', generate_each)
  return calls


# Texts.


def test_a_question_that_is_asked_again_has_a_seed_of_its_own(target, tokenizer):
  sampling = cj.SamplingParams(temperature=1.0, top_k=40)
  lm = model(target, tokenizer, sampling=sampling, seed=5)
  requests = asked(PROMPTS)
  requests[3].doc_id = requests[1].doc_id
  answers = lm.generate_until(requests)
  expected = dict(cj.generate_each(
      PROMPTS, target=target, draft=target.early_exit(1), tokenizer=tokenizer, num_draft=3, max_new_tokens=16, raw=True,
      sampling=sampling, seed=[5, 5, 5, 6, 5], batch_size=2))
  assert answers == [expected[i].texts[0] for i in range(5)]
  assert PROMPTS[1] == PROMPTS[3] and answers[1] != answers[3]
  assert len(lm.parts) == 5 and sum(part.new_tokens for part in lm.parts) > 40
  answers = lm.generate_until(asked(PROMPTS))
  assert answers[1] == answers[3], 'two documents that have the same prompt'


@pytest.mark.filterwarnings('ignore:1 of 4 prompts leave less room')
def test_each_request_has_its_own_limits(target, tokenizer, recorded):
  requests = asked(['a', 'b'], ['Q:', '\n\n', '<|end|>'], max_gen_toks=7) + asked(['c'], ['x']) + asked(
      ['d'], ['Q:'], max_gen_toks=7)
  lm = model(target, tokenizer, max_new_tokens=None, seed=3)
  assert lm.generate_until(requests) == ['A1', 'A2', 'A1', 'A3']
  first, second = recorded
  assert (first['prompts'], first['stop'], first['max_new_tokens']) == (['a', 'b', 'd'], ('Q:',), 7)
  assert (second['prompts'], second['stop'], second['max_new_tokens']) == (['c'], ('x',), 256)
  assert all(call['raw'] and call['batch_size'] == 2 and set(call['seed']) == {3} for call in recorded)
  assert lm.parts == [2, 1, 0, 0]
  recorded.clear()
  model(target, tokenizer, stop=['stop'], max_new_tokens=9).generate_until(requests)
  assert [(call['stop'], call['max_new_tokens'], len(call['prompts'])) for call in recorded] == [(('stop',), 9, 4)]


def test_a_stop_string_ends_an_answer(target, tokenizer):
  (whole,) = model(target, tokenizer).generate_until(asked(['one more']))
  stop = whole[4:6]
  assert stop not in whole[:4] and stop.strip()
  assert model(target, tokenizer).generate_until(asked(['one more'], [stop, whole[-2:]])) == [whole[:4]]


def test_thoughts_are_left_out(target, tokenizer, monkeypatch):
  texts = ['<think>a</think> b', 'c</think>\nd']
  monkeypatch.setattr(cj, 'generate_each', lambda prompts, **_: (
      (i, types.SimpleNamespace(texts=[text], stats=None)) for i, text in enumerate(texts)))
  assert model(target, tokenizer).generate_until(asked(['x', 'y<think>\n'])) == ['b', 'd']


def test_a_prompt_begins_once(target, recorded):
  tokenizer = bos_tokenizer()
  lm = model(target, tokenizer)
  prompt = lm.apply_chat_template([{'role': 'user', 'content': 'x'}])
  assert prompt.startswith('<|user|><|user|>x')
  lm.generate_until(asked([prompt]))
  ids = tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], add_generation_prompt=True, return_dict=False)
  assert cj.encode(recorded[0]['prompts'], tokenizer, raw=True) == [ids] == [lm.tok_encode(prompt)]
  assert lm.tok_encode('x') == [tokenizer.bos_token_id, *lm.tok_encode('x', add_special_tokens=False)]


def test_prompts_that_do_not_fit(target, tokenizer, recorded):
  lm = model(target, tokenizer, max_new_tokens=30)
  with pytest.raises(ValueError, match='document 1 of task t: its prompt has 128 tokens, the model a context of 128'):
    lm.generate_until(asked(['a', 'x' * 128]))
  assert not recorded
  with pytest.warns(UserWarning, match='1 of 3 prompts leave less room in the context of 128 tokens than'):
    lm.generate_until(asked(['a', 'x' * 98, 'x' * 99]))
  narrow = target.early_exit(1)
  narrow = narrow.replace(config=dataclasses.replace(narrow.config, max_length=20))
  with pytest.raises(ValueError, match='the model a context of 20'):
    model(target, tokenizer, draft=narrow).generate_until(asked(['x' * 20]))


# Likelihoods.


def teacher_forced(target, context, continuation):
  """The same by one pass over the row as it is, and whether each token is the likeliest."""
  row = [*context, *continuation]
  logits_TV = fakes.logits(target, np.array([row], np.int32))[0].astype(np.float64)
  logprobs_TV = logits_TV - np.log(np.exp(logits_TV - logits_TV.max(-1, keepdims=True)).sum(-1, keepdims=True))
  logprobs_TV -= logits_TV.max(-1, keepdims=True)
  places = range(len(context) - 1, len(row) - 1)
  total = sum(logprobs_TV[t, row[t + 1]] for t in places)
  return total, all(logits_TV[t].argmax() == row[t + 1] for t in places)


def greedy(target, context, count):
  row = list(context)
  for _ in range(count):
    row.append(int(fakes.logits(target, np.array([row + [0] * (9 - len(row))], np.int32))[0, len(row) - 1].argmax()))
  return row[len(context):]


def test_likelihoods_are_those_of_one_row_at_a_time(target, tokenizer):
  """Of several lengths, so that there are several buckets and a last batch that is not full."""
  found = model(target, tokenizer, batch_size=3).loglikelihood(scored(PAIRS))
  for (context, continuation), (total, is_greedy) in zip(PAIRS, found):
    moved = len(context) - len(context.rstrip())
    before = tokenizer(context.rstrip())['input_ids'] if context else [tokenizer.eos_token_id]
    after = tokenizer(context.rstrip() + context[len(context) - moved :] + continuation)['input_ids']
    after = after[len(before) if context else 0:]
    expected, expected_greedy = teacher_forced(target, before, after)
    assert total == pytest.approx(expected, abs=2e-4), (context, continuation)
    assert is_greedy is expected_greedy is False
  assert len({round(total, 3) for total, _ in found}) == len(PAIRS)


def test_what_is_greedy(target, tokenizer):
  lm = model(target, tokenizer, batch_size=4)
  context = [70, 71, 72]
  best = greedy(target, context, 5)
  other = [*best[:4], (best[4] + 1) % 267], [(best[0] + 1) % 267, *best[1:]]
  found = lm._judge([(context, best), *((context, tokens) for tokens in other), (context, best[:1])])
  assert [is_greedy for _, is_greedy in found] == [True, False, False, True]
  assert found[0][0] == pytest.approx(teacher_forced(target, context, best)[0], abs=1e-4)


def test_a_text_longer_than_the_context_is_judged_in_windows(target, tokenizer):
  """Each token once: the first windowful after the prefix, the rest after as much as there is room for."""
  texts = ['short', 'x' * 128, 'the text goes on and on, ' * 12, '']
  found = model(target, tokenizer, batch_size=3).loglikelihood_rolling(
      [Instance('loglikelihood_rolling', {}, (text,), 0, ('t', i, 1)) for i, text in enumerate(texts)])
  for text, total in zip(texts, found):
    ids, expected = tokenizer(text)['input_ids'] if text else [], 0.0
    for start in range(0, len(ids), 128):
      end = min(start + 128, len(ids))
      window = [tokenizer.eos_token_id, *ids][end - 128 if start else 0 : end + 1]
      expected += teacher_forced(target, window[: len(window) - (end - start)], ids[start:end])[0]
    assert total == pytest.approx(expected, abs=5e-4)
  assert found[3] == 0 and len(tokenizer(texts[2])['input_ids']) > 256


def test_likelihoods_that_cannot_be_had(target, tokenizer):
  lm = model(target, tokenizer)
  with pytest.raises(ValueError, match='document 1 of task t: 100 tokens of context and 30 of continuation, more than'):
    lm.loglikelihood(scored([('a', 'b'), ('x' * 100, 'y' * 30)]))
  assert lm.loglikelihood(scored([('x' * 99, 'y' * 30)]))[0][0] < 0
  with pytest.raises(ValueError, match="document 0 of task t: '' has no token of its own"):
    lm.loglikelihood(scored([('a', '')]))
  tokenizer = fakes.byte_tokenizer()
  tokenizer.eos_token = None
  with pytest.raises(ValueError, match='no token that begins or ends a text'):
    model(target, tokenizer)


def judge_on_meshes(folder):
  """Prints the likelihoods of PAIRS on one device and on three meshes of four."""
  meshes = None, cj.make_mesh(data=4), cj.make_mesh(data=2, model=2), cj.make_mesh(model=4)
  found = [harness.SpeculativeLM(target=cj.load_transformer(folder, mesh=mesh), tokenizer=fakes.byte_tokenizer(),
                                 batch_size=3).loglikelihood(scored(PAIRS)) for mesh in meshes]
  print(json.dumps(found))


@pytest.mark.slow
def test_likelihoods_on_a_mesh(tmp_path):
  """The devices, which must be there before JAX starts, are pretended in a process of its own."""
  checkpoints.write_folder(tmp_path, pod_test.CONFIG, checkpoints.tensors(pod_test.CONFIG, 0))
  code = f'from tests import harness_test; harness_test.judge_on_meshes({str(tmp_path)!r})'
  environment = os.environ | {
      'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '4', 'XLA_FLAGS': '--xla_backend_optimization_level=0',
      'PYTHONPATH': f'{pod_test.ROOT}{os.pathsep}{pod_test.ROOT}/experiments'}
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=pod_test.ROOT,
                        env=environment)
  assert done.returncode == 0, done.stderr
  alone, *others = json.loads(done.stdout.splitlines()[-1])
  for other in others:
    for (total, is_greedy), (expected, expected_greedy) in zip(other, alone, strict=True):
      assert total == pytest.approx(expected, abs=1e-3) and is_greedy == expected_greedy


# With lm-eval.


def test_what_is_finished_is_in_the_cache(target, tokenizer, tmp_path, monkeypatch):
  """An interrupt loses what is under way only, and the next run asks for that alone."""
  generate_each, stopped = cj.generate_each, []

  def interrupted(prompts, **options):
    for count, pair in enumerate(generate_each(prompts, **options)):
      if count == 2:
        raise KeyboardInterrupt
      stopped.append(prompts[pair[0]])
      yield pair

  requests = asked(['one more', 'in the ', 'abcabcab', '12 times'])
  expected = model(target, tokenizer).generate_until(requests)
  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(cj, 'generate_each', interrupted)
    CachingLM(model(target, tokenizer), str(tmp_path / 'cache.db')).generate_until(requests)
  later = model(target, tokenizer)
  cached = CachingLM(later, str(tmp_path / 'cache.db'))
  assert cached.generate_until(requests) == expected
  assert len(stopped) == 2 == len(later.parts)
  pairs = scored([('one', ' more'), ('in', ' the'), ('a', 'b')])
  scores = cached.loglikelihood(pairs)
  monkeypatch.setattr(later, '_judge', lambda *_: pytest.fail('asked again'))
  assert cached.loglikelihood(pairs) == scores


CONFIGS = [
    {'task': 'writes', 'output_type': 'generate_until', 'doc_to_text': '{{text}}',
     'doc_to_target': '{{"aei"[number % 3]}}',
     'generation_kwargs': {'until': ['\n\n', '!'], 'do_sample': False},
     'metric_list': [{'metric': 'exact_match', 'aggregation': 'mean', 'higher_is_better': True}],
     'filter_list': [{'name': 'letter', 'filter': [{'function': 'regex', 'regex_pattern': '([aeiou])'},
                                                   {'function': 'take_first'}]}]},
    {'task': 'chooses', 'output_type': 'multiple_choice', 'doc_to_text': '{{text}}', 'doc_to_target': '{{number % 3}}',
     'doc_to_choice': ['yes', 'the no', 'o'],
     'metric_list': [{'metric': 'acc', 'aggregation': 'mean', 'higher_is_better': True}]},
    {'task': 'reads', 'output_type': 'loglikelihood_rolling', 'doc_to_text': '', 'doc_to_target': '{{text}}',
     'metric_list': [{'metric': 'byte_perplexity', 'aggregation': 'weighted_perplexity', 'higher_is_better': False}]},
]


def test_speculation_scores_as_plain_decoding(target, tokenizer, monkeypatch):
  """Greedily, on a task of each kind of request, the scores of lm-eval and all that it has seen are the same."""
  monkeypatch.setattr(lm_eval.evaluator, 'add_env_info', lambda storage: None)
  rows = [{'text': chr(97 + i), 'number': i} for i in range(16)]
  dataset = datasets.DatasetDict({'test': datasets.Dataset.from_list(rows)})
  shared = {'dataset_path': 'none', 'test_split': 'test', 'num_fewshot': 0, 'custom_dataset': lambda **_: dataset}
  manager = lm_eval.tasks.TaskManager(include_defaults=False)

  def evaluate(**options):
    lm = model(target, tokenizer, sampling=cj.SamplingParams(temperature=0), **options)
    results = lm_eval.simple_evaluate(
        model=lm, tasks=[config | shared for config in CONFIGS], apply_chat_template=True, bootstrap_iters=0,
        torch_random_seed=None, task_manager=manager)
    return results, cj.metrics.merge(lm.parts)

  plain, alone = evaluate(draft=None)
  drafted, stats = evaluate()
  assert plain['results'] == drafted['results']
  assert plain['samples'] == drafted['samples']
  assert 0 < plain['results']['chooses']['acc,none'] < 1 and plain['results']['reads']['byte_perplexity,none'] > 1
  assert 0 < plain['results']['writes']['exact_match,letter'] < 1
  assert alone.tokens_per_call == 1 < stats.tokens_per_call and 0 < stats.acceptance_rate < 1
