"""The program of experiments/distill_draft.py, whole: a verifier's folder in, the folder of its draft out."""

import json
import shutil

import distill_draft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from lib import malloc, record

import cactus_jax as cj
from cactus_jax import distill
from cactus_jax.models import hf
from cactus_jax.models import student as student_lib
from tests import fakes, talker
from tests.talker import TOKENIZER

TINY = ('--tokens=300', '--parallel=4', '--temperatures=1.0', '--max_prompt=24', '--max_new_tokens=16', '--steps=4',
        '--evaluate_every=2', '--held_out=4', '--batch_tokens=256', '--passes=2', '--warmup=1', '--head_size=99',
        '--noopenings')
WHOLE = ('--noreads_hidden', '--copy=0', '--head_size=268', '--layers=0')


pytestmark = pytest.mark.usefixtures('quick_programs')
app.define_help_flags()  # once, or the flagsaver takes them away again


@pytest.fixture(scope='module')
def verifier(tmp_path_factory):
  folder = tmp_path_factory.mktemp('models') / 'verifier'
  hf.save(folder, talker.talker(), TOKENIZER)
  return folder


@pytest.fixture
def cli(run_program, verifier, monkeypatch):
  """cli(output, *arguments): exit code, standard output and standard error of a run."""
  monkeypatch.setattr(malloc, 'keep_freed', lambda: None)  # it would change this process for good

  def run(output, *arguments):
    return run_program(distill_draft.main, 'distill_draft.py', f'--verifier={verifier}', f'--output={output}', *TINY,
                       *arguments)

  return run


made = {}


@pytest.fixture
def done(cli, tmp_path_factory):
  """The folder of a whole run, made once; not to be changed."""
  if not made:
    folder = tmp_path_factory.mktemp('runs') / 'draft'
    made['run'] = folder, *cli(folder)
  return made['run'][0]


def files(folder):
  return {path.relative_to(folder): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def logits(model, tokens_BT):
  return fakes.logits(model, tokens_BT)


# Whole runs.


def test_a_draft_is_made(done, verifier):
  _, code, out, err = made['run']
  assert code == 0, err
  assert 'data: ' in out and f'tokens in {done}/corpus' in out and f'export: {done}/export\n' in out
  rows = record.read_rows(done / 'train' / 'log.jsonl')
  assert [row['step'] for row in rows] == [2, 4] and len(rows[0]['held_out']) == 2
  assert (done / 'train' / 'curve.png').read_bytes().startswith(b'\x89PNG')
  assert not [path for path in done.rglob('*partial*')]
  target, tokenizer = cj.load_transformer(verifier), cj.load_tokenizer(verifier)
  draft = student_lib.load(done / 'export', target, tokenizer)
  assert draft.hidden_layers == (0, 1) and draft.config.num_layers == 1 and len(draft.head_ids) == 99
  about = student_lib.read_about(done / 'export')
  assert about['step'] == 4 and about['held_out_acceptance'] == rows[-1]['held_out']
  options = dict(target=target, tokenizer=tokenizer, sampling=cj.SamplingParams(temperature=0), max_new_tokens=12)
  answers = cj.generate_text(['the', 'hi'], draft=draft, **options)
  assert answers.tokens == cj.generate_text(['the', 'hi'], **options).tokens
  assert answers.stats.tested_at[0] > 0


def test_a_second_run_changes_nothing_and_says_so(cli, done):
  before = files(done)
  code, out, err = cli(done)
  assert code == 0 and f'export: {done}/export is there already' in out, err
  count = sum(len(one['tokens']) for one in [dict(np.load(done / 'corpus' / 'shard-00000.npz'))])
  assert 0 < count and f'data: {made["run"][2].split("data: ")[1].split()[0]} tokens' in out
  after = files(done)
  assert after.keys() == before.keys()
  assert [path for path in before if before[path] != after[path] and path.suffix != '.png'] == []


def test_stages_one_by_one_with_a_kill_in_each(cli, done, tmp_path, monkeypatch):
  """Give the same draft and the same log as one run."""
  output = tmp_path / 'draft'
  for number in (1, 3, 4):  # before the first checkpoint, after it, and with training done
    with monkeypatch.context() as patched:
      step = distill.train_step
      count = iter(range(99))

      def killed(*arguments, limit=number):
        if next(count) == limit:
          raise KeyboardInterrupt
        return step(*arguments)

      patched.setattr(distill, 'train_step', killed)
      code, out, err = cli(output, '--stages=data,train')
      assert code == (130 if number < 4 else 0), err
  assert not (output / 'export').exists()
  code, out, err = cli(output, '--stages=export')
  assert code == 0, err
  for path in ('train/log.jsonl', 'train/head_ids.npy', 'export/student.safetensors', 'export/student.json'):
    assert (output / path).read_bytes() == (done / path).read_bytes(), path


def test_export_for_transformers(cli, done, tmp_path, verifier):
  output = tmp_path / 'whole'
  command = (output, '--stages=train,export', f'--corpus={done}/corpus', '--transformers', *WHOLE)
  code, out, err = cli(*command)
  assert code == 0, err
  target, tokenizer = cj.load_transformer(verifier), cj.load_tokenizer(verifier)
  draft, own = student_lib.load(output / 'export', target, tokenizer), cj.load_transformer(output / 'transformers')
  assert own.config.num_layers == 1
  assert cj.load_tokenizer(output / 'transformers').get_vocab() == tokenizer.get_vocab()
  tokens_BT = jnp.arange(40, 60)[None]
  np.testing.assert_allclose(logits(own, tokens_BT), logits(draft, tokens_BT), atol=0.02)  # one in half precision
  shutil.rmtree(output / 'transformers')  # as if killed before
  code, out, err = cli(*command)
  assert code == 0 and 'export is there already' in out and f'export: {output}/transformers\n' in out, err


@pytest.mark.slow
def test_transformers_computes_the_same(cli, done, tmp_path):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  output = tmp_path / 'whole'
  code, _, err = cli(output, '--stages=train,export', f'--corpus={done}/corpus', '--transformers', *WHOLE)
  assert code == 0, err
  theirs = transformers.AutoModelForCausalLM.from_pretrained(output / 'transformers')
  with torch.no_grad():
    expected = theirs(torch.arange(40, 60)[None]).logits.numpy()
  ours = logits(cj.load_transformer(output / 'transformers'), jnp.arange(40, 60)[None])
  np.testing.assert_allclose(ours, expected, atol=1e-3)


def test_prompts_of_a_file_are_answered(cli, tmp_path):
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text(''.join(json.dumps({'q': word}) + '\n' for word in ('the', 'hi')))
  output = tmp_path / 'draft'
  code, _, err = cli(output, '--stages=data', f'--prompts_file={prompts}', '--prompt_field=q', '--tokens=60')
  assert code == 0, err
  shard = np.load(output / 'corpus' / 'shard-00000.npz')
  starts = np.cumsum(shard['length']) - shard['length']
  texts = [TOKENIZER.decode(shard['tokens'][start : start + length])
           for start, length in zip(starts, shard['prompt_length'])]
  assert '<|user|>the<|end|><|assistant|>' in texts or '<|user|>hi<|end|><|assistant|>' in texts


# What the user has to mend.


BAD = {  # before anything is loaded
    '--output=': '--output is missing', '--stages=data,eval': '--stages=data,eval: need some of data, train, export.',
    '--stages=': '--stages=: need some of', '--loss=huber:1': "loss=(('huber', 1.0),): need names of forward_kl",
    '--loss=tv:much': '--loss=tv:much: need NAME:WEIGHT', '--layers=two': '--layers=two: need numbers of layers.',
    '--hidden_layers=two': '--hidden_layers=two: need numbers of layers.',
    '--given_every=3': '--given_every means nothing here: there is no --prompts_file',
    '--corpus=a,b': '--corpus=a,b: the data stage writes to one folder',
    '--temperatures=hot': '--temperatures=hot: need numbers',
    '--steps=0': 'steps=0: need at least 1', '--learning_rate=-1': 'learning_rate=-1.0: need a number above 0',
    '--temperature=0': 'temperature=0.0: a greedy law', '--top_k=0': 'top_k=0: laws are compared on',
    '--top_k=40': 'top_k=40: the laws are kept of 32', '--held_out=0': 'flag --held_out=0: ',
    '--evaluate_every=0': 'flag --evaluate_every=0: ', '--head_size=0': 'flag --head_size=0: ',
    '--draft=lookup': '--draft means nothing here', '--min_p=0.1': '--min_p means nothing here',
    '--rule=cactus': '--rule means nothing here', '--transformers': '--transformers: a draft that reads hidden states',
    '--prompts_file=PROMPTS': 'line 1: prompt is None: need a string',
    '--prompts_file=/no/file': '/no/file cannot be read',
    '--start=/no/draft': '/no/draft/student.json: no description of a distilled draft',
}


@pytest.mark.parametrize('argument', BAD)
def test_flags_are_looked_at_before_anything_is_loaded(cli, tmp_path, monkeypatch, argument):
  for name in ('load_transformer', 'load_tokenizer'):
    monkeypatch.setattr(cj, name, lambda *_, **__: pytest.fail('it loads'))
  (tmp_path / 'prompts').write_text('{"q": "the"}\n')
  code, out, err = cli(tmp_path / 'draft', argument.replace('PROMPTS', str(tmp_path / 'prompts')))
  assert code == 2 and err.startswith('error: ') and err.count('\n') == 1
  assert BAD[argument] in err
  assert not (tmp_path / 'draft').exists()


def test_an_output_that_cannot_be_is_told_before_anything_is_loaded(cli, tmp_path, monkeypatch):
  monkeypatch.setattr(cj, 'load_transformer', lambda *_, **__: pytest.fail('it loads'))
  (tmp_path / 'file').write_text('')
  code, _, err = cli(tmp_path / 'file' / 'draft')
  assert code == 2 and err == (f'error: --output={tmp_path}/file/draft: {tmp_path}/file is no folder that can be '
                               'written to.\n')


@pytest.mark.parametrize('arguments, message', [
    (['--noreads_hidden', '--hidden_layers=1'], '--hidden_layers means nothing here: the draft reads none'),
    (['--hidden_layers=2'], 'hidden_layers=(2,): need rising ones of 0..1'),
    (['--layers=0,2'], 'layers=(0, 2): need at least one of 0..1'), (['--quantize=int8'], '8-bit integers'),
    (['--transformers', '--noreads_hidden', '--copy=0'], '--transformers: the head of this draft has 99 of 268 tokens'),
    (['--max_prompt=90'], 'max_prompt=90 and max_answer=16 are 106 tokens, the context of the verifier is 96'),
    (['--stages=train'], 'holds no texts: run --stages=data first.'),
    (['--stages=export'], 'holds no training: run --stages=train first.'),
    (['--stages=train', '--corpus=DONE/corpus', '--held_out=999'], 'of which --held_out=999 would leave none'),
    (['--stages=train', '--corpus=OTHER'], 'holds a corpus of another verifier (embed_dim is 64 there and 32 here)'),
    (['--stages=train', '--corpus=BARE'], 'BARE has no hidden states; of layers [0, 1] they are to be read'),
])
def test_what_is_wrong_is_told_before_the_verifier_writes(cli, done, tmp_path, arguments, message):
  for name in ('OTHER', 'BARE'):
    shutil.copytree(done / 'corpus', tmp_path / name)
  settings = json.loads((done / 'corpus' / 'corpus.json').read_text())
  (tmp_path / 'OTHER' / 'corpus.json').write_text(json.dumps(settings | {'embed_dim': 64}))
  (tmp_path / 'BARE' / 'corpus.json').write_text(json.dumps(settings | {'hidden_layers': None}))
  for path in (tmp_path / 'BARE').glob('*.npz'):
    shard = dict(np.load(path))
    np.savez(path, **{name: array for name, array in shard.items() if name != 'hidden'})
  places = {'DONE': done, 'OTHER': tmp_path / 'OTHER', 'BARE': tmp_path / 'BARE'}
  for name, place in places.items():
    arguments = [argument.replace(name, str(place)) for argument in arguments]
  code, _, err = cli(tmp_path / 'draft', *arguments)
  *_, last = err.splitlines()
  assert code == 2 and last.startswith('error: ') and message in last
  assert not (tmp_path / 'draft' / 'corpus' / 'corpus.json').exists()


def test_folders_of_another_run_are_left_alone(cli, done, tmp_path):
  output = tmp_path / 'draft'
  shutil.copytree(done, output)
  before = files(output)
  for arguments, message in [
      (['--stages=train', '--learning_rate=0.1'], 'learning_rate is 0.0015 there and 0.1 here'),
      (['--stages=train', '--head_size=50'], 'has 99 tokens, --head_size=50'),
      (['--seed=3'], 'seed is 0 there and 3 here')]:
    code, _, err = cli(output, *arguments)
    assert code == 2 and message in err.splitlines()[-1]
  described = json.loads((output / 'export' / 'student.json').read_text())
  described['about']['step'] = 2
  (output / 'export' / 'student.json').write_text(json.dumps(described))
  code, _, err = cli(output, '--stages=export')
  assert code == 2 and 'export holds a draft of another training, or of another step' in err
  after = files(output)
  assert [str(path) for path in before if before[path] != after.get(path)] == ['export/student.json']


def test_more_texts_can_be_added(cli, done, tmp_path):
  """A second corpus with a seed of its own, and training on both."""
  code, _, err = cli(tmp_path / 'second', '--stages=data', '--seed=1', '--tokens=100')
  assert code == 0, err
  code, out, err = cli(tmp_path / 'draft', '--stages=train', f'--corpus={done}/corpus,{tmp_path}/second/corpus')
  assert code == 0 and 'evaluating on 4' in out, err


def test_training_goes_on_from_a_draft(done, verifier, run_program, tmp_path):
  arguments = [argument for argument in TINY if not argument.startswith('--head_size')]
  run = lambda *more: run_program(
      distill_draft.main, 'distill_draft.py', f'--verifier={verifier}', f'--output={tmp_path / "more"}',
      f'--corpus={done}/corpus', '--stages=train,export', f'--start={done}/export', *arguments, *more)
  code, _, err = run('--learning_rate=1e-9', '--weight_decay=0')
  assert code == 0, err
  rows_of = lambda folder: record.read_rows(folder / 'train' / 'log.jsonl')
  last, first = rows_of(done)[-1], rows_of(tmp_path / 'more')[0]
  np.testing.assert_allclose(first['held_out'], last['held_out'], atol=2e-3)  # from half precision
  target, tokenizer = cj.load_transformer(verifier), cj.load_tokenizer(verifier)
  before, after = (student_lib.load(folder / 'export', target, tokenizer) for folder in (done, tmp_path / 'more'))
  np.testing.assert_array_equal(before.head_ids, after.head_ids)
  code, _, err = run('--layers=0')
  assert code == 2 and '--layers means nothing here: --start brings the shape of its draft' in err


def test_texts_of_a_verifier_with_other_weights_are_refused(cli, done, run_program, tmp_path):
  other = talker.talker()
  scaled = jax.tree.map(lambda x: x * 1.01, other.params)
  hf.save(tmp_path / 'other', other.replace(params=scaled), TOKENIZER)
  code, _, err = cli(tmp_path / 'draft', '--stages=train', f'--corpus={done}/corpus', f'--verifier={tmp_path}/other')
  assert code == 2 and 'holds a corpus of another verifier (weights is' in err
  code, _, err = cli(done, '--stages=train', f'--verifier={tmp_path}/other')
  assert code == 2 and 'holds a corpus of another verifier (weights is' in err
