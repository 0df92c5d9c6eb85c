"""The program of experiments/generate.py: run whole with a fake model, and as by a user with the default one.

A run goes through the program's own door: argv in; printed lines, files and an exit code out.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import threading
import warnings

import generate
import jax
import pytest
from absl import app, flags
from absl.testing import flagsaver
from lib import flags as common
from lib import record

import cactus_jax as cj
from cactus_jax import metrics, sharding
from cactus_jax.models import gguf, transformer
from cactus_jax.models.config import FAMILIES, ModelConfig
from tests import fakes

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).parent.parent
ANSWER = 'the 日本 👩‍🚀 is here!'
# One shape for nearly all runs, so that they share programs: raw prompts of two tokens.
SHORT = ('--raw', '--max_new_tokens=40', '--nocompare_plain')


pytestmark = pytest.mark.usefixtures('quick_programs')
app.define_help_flags()  # once, or the flagsaver takes them away again


@pytest.fixture
def loaded(monkeypatch):
  """Puts a fake, which answers prompts of two tokens with ANSWER, in place of models; the names asked for."""
  tokenizer = fakes.byte_tokenizer()
  script = [0, 0] + tokenizer(ANSWER)['input_ids'] + [tokenizer.eos_token_id]
  model = fakes.scripted([script], fakes.FakeConfig(vocab_size=len(tokenizer)), certainty=12.0)
  names = []

  def load(source, mesh=None, **_):
    assert mesh is None, 'there is one device'
    names.append(source)
    return model

  monkeypatch.setattr(cj, 'default_model_path', lambda: pathlib.Path('/models/fake.gguf'))
  monkeypatch.setattr(cj, 'default_draft_path', lambda: None)  # it is the draft of another model
  monkeypatch.setattr(cj, 'load_transformer', load)
  monkeypatch.setattr(
    cj, 'load_tokenizer', lambda source: fakes.byte_tokenizer(['<|x|>'] if 'other' in source else [])
  )
  return names


@pytest.fixture
def cli(loaded, run_program, monkeypatch):
  """cli(*arguments, stdin=''): exit code, standard output and standard error of a run."""

  def run(*arguments, stdin=''):
    monkeypatch.setattr(sys, 'stdin', io.StringIO(stdin))
    return run_program(generate.main, 'generate.py', *arguments, meshes=True)

  return run


@pytest.fixture
def parsed():
  """parsed(*arguments): sets the flags as a command line would, for functions that read them."""
  with flagsaver.flagsaver():
    yield lambda *arguments: FLAGS(['generate.py', *arguments])


def lines(path):
  return record.read_rows(path)


def jsonl(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')
  return str(path)


@pytest.fixture
def prompts_file(tmp_path):
  return jsonl(tmp_path / 'prompts.jsonl', [{'prompt': prompt} for prompt in ('ab', 'cd', 'ef', 'gh', 'ij')])


# One prompt.


def test_one_prompt_is_streamed_with_a_table(cli, loaded):
  code, out, err = cli('--prompt=hi', '--temperature=0', *SHORT)
  assert code == 0 and err == ''
  first, answer, *table = out.splitlines()
  assert first == 'verifier fake.gguf; draft lookup, 4 tokens a round; rule Exact()'
  assert answer == ANSWER
  words = {line.split('  ')[1]: line for line in table if line}
  assert words['new tokens'].split()[-1] == str(len(fakes.byte_tokenizer()(ANSWER)['input_ids']) + 1)
  assert 'acceptance rate' in words and 'time to first token' in words
  assert loaded == ['/models/fake.gguf']


def test_a_prompt_from_standard_input(cli):
  code, out, _ = cli('--temperature=0', *SHORT, stdin='hi\n')
  assert code == 0 and ANSWER in out


def test_models_are_held_as_flags_say(cli, monkeypatch):
  asked, load = [], cj.load_transformer
  monkeypatch.setattr(cj, 'load_transformer', lambda source, **options: asked.append(options) or load(source))
  code, out, _ = cli(
    '--prompt=hi', '--draft=some/model', '--quantize=int8', '--kv_dtype=int8', '--dtype=bfloat16', *SHORT
  )
  assert code == 0
  assert out.startswith('verifier fake.gguf, dtype bfloat16, quantize int8, kv_dtype int8; draft some/model,')
  both = {'mesh': None, 'dtype': 'bfloat16', 'kv_dtype': 'int8'}
  assert asked == [both | {'quantize': 'int8'}, both | {'quantize': None}]
  asked.clear()
  assert cli('--prompt=hi', '--draft=some/model', '--draft_quantize=int8', *SHORT)[0] == 0
  assert [options['quantize'] for options in asked] == [None, 'int8']
  code, _, err = cli('--prompt=hi', '--draft=early_exit:2', '--draft_quantize=int8', *SHORT)
  assert code == 2 and '--draft_quantize means nothing to --draft=early_exit:2, which is no model of its own' in err


def test_lists_the_models(cli, loaded):
  """What is printed names every family and architecture, and is the table of the README."""
  code, out, _ = cli('--list_models')
  assert code == 0 and not loaded
  for name in (*FAMILIES, *gguf.ARCHITECTURES, 'safetensors', 'Orbax', 'bfloat16', 'int8'):
    assert name in out, name
  readme = (pathlib.Path(__file__).parent.parent / 'README.md').read_text(encoding='utf-8')
  cells = lambda line: [cell.strip(' `') for cell in line.strip('|').split('|')]
  rows = [line for line in readme.splitlines() if line.startswith(tuple(f'| `{name}`' for name in FAMILIES))]
  assert [cells(row) for row in rows] == [list(row) for row in generate.models()]


def test_one_answer_is_stored_once(cli, tmp_path):
  output = str(tmp_path / 'out.jsonl')
  command = ('--prompt=hi', '--temperature=0', f'--output={output}', '--stop=here', *SHORT)
  assert cli(*command)[0] == 0
  [row] = lines(output)
  assert row['index'] == 0 and row['prompt'] == 'hi' and row['text'] == ANSWER[: ANSWER.index('here')]
  assert row['finish_reason'] == 'stop' and row['lossless'] is True
  assert len(row['tokens']) == len(row['from_draft']) == len(row['logprobs']) > 10
  assert row['settings'] == {
    'verifier': 'fake.gguf',
    'dtype': None,
    'quantize': None,
    'draft_quantize': None,
    'kv_dtype': None,
    'draft': 'lookup',
    'rule': 'Exact()',
    'block_verification': False,
    'ledger': False,
    'num_draft': 4,
    'stop_entropy': None,
    'temperature': 0.0,
    'top_k': 20,
    'top_p': 0.95,
    'min_p': 0.0,
    'max_new_tokens': 40,
    'stop': ['here'],
    'seed': 0,
    'raw': True,
  }
  code, out, _ = cli(*command)
  assert code == 0 and len(lines(output)) == 1


def test_plain_decoding_is_timed_beside(cli):
  code, out, _ = cli('--prompt=hi', '--temperature=0', '--raw', '--max_new_tokens=40')
  assert code == 0 and '(plain decoding: ' in out
  assert '(plain decoding: ' not in cli('--prompt=hi', '--temperature=0', '--draft=none', *SHORT)[1]


def test_the_number_of_drafted_tokens_is_chosen(cli, tmp_path, monkeypatch):
  """What passes cost is kept beside the compiled programs for the next run."""
  monkeypatch.setattr(common, 'COSTS', str(tmp_path / 'costs'))
  code, out, err = cli('--prompt=hi', '--temperature=0', '--num_draft=auto', *SHORT)
  assert code == 0 and err == ''
  first, answer, *table = out.splitlines()
  assert first == 'verifier fake.gguf; draft lookup, as many tokens a round as pay; rule Exact()'
  assert answer == ANSWER
  [line] = [line for line in table if 'drafted tokens a round' in line]
  assert re.search(r'drafted tokens a round +\d   \(chosen; \d\.\.\d over the text\)$', line)
  [path] = (tmp_path / 'costs').iterdir()
  assert set(json.loads(path.read_text())) == {'verify', 'draft', 'first'}


def test_a_draft_brings_its_tokenizer(cli, loaded):
  code, _, err = cli('--prompt=hi', '--draft=some/other', *SHORT)
  assert loaded == ['/models/fake.gguf', 'some/other']
  assert code == 2 and err.startswith(
    'error: draft and verifier have different tokenizers: only the draft has token 267'
  )


# Where tokens come from.


@pytest.fixture
def terminal(cli, monkeypatch):
  """terminal(*arguments): exit code, and what a terminal gets from a run."""

  def run(*arguments):
    ours, theirs = pty.openpty()
    seen = []

    def read():
      with contextlib.suppress(OSError):  # that is how the other end's closing shows
        while part := os.read(ours, 1 << 16):
          seen.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, open(theirs, 'w', encoding='utf-8') as screen:
      patch.setattr(sys, 'stdout', screen)
      code, *_ = cli(*arguments)
    reader.join()
    os.close(ours)
    return code, b''.join(seen).decode().replace('\r\n', '\n')

  return run


@pytest.fixture
def flawed_draft(loaded, monkeypatch):
  """Makes some/model a draft that is wrong about two tokens of ANSWER."""
  load = cj.load_transformer

  def flawed(source, **options):
    model = load(source, **options)
    return model.replace(script_BS=model.script_BS.at[:, [4, 11]].add(1)) if source == 'some/model' else model

  monkeypatch.setattr(cj, 'load_transformer', flawed)


SHOW = ('--prompt=hi', '--draft=some/model', '--show_accepted', '--temperature=0', *SHORT)
# Of each character of ANSWER the token that completes it: accepted, recovered or bonus.
WHOSE = 'aaaaaab' + 'raaaaab' + 'aaaab'
CODES = {'0;38;5;63': 'a', '4;38;5;130': 'r', '1;38;5;29': 'b'}


def test_a_terminal_shows_where_tokens_come_from(terminal, flawed_draft, monkeypatch, tmp_path):
  monkeypatch.delenv('NO_COLOR', raising=False)
  monkeypatch.setenv('TERM', 'xterm-256color')
  code, out = terminal(*SHOW, f'--output={tmp_path / "out.jsonl"}')
  assert code == 0
  _, answer, _, legend, *table = out.split('\n')
  shown = re.findall('\x1b\\[([0-9;]+)m(.+?)\x1b\\[0m', answer)
  assert re.sub('\x1b\\[[0-9;]*m', '', answer) == ''.join(text for _, text in shown) == ANSWER
  assert ''.join(CODES[code] * len(text) for code, text in shown) == WHOSE
  numbers = {CODES[code]: int(number) for code, number in re.findall('\x1b\\[([0-9;]+)m([0-9]+) ', legend)}
  [row] = lines(tmp_path / 'out.jsonl')
  accepted = sum(row['from_draft'])
  assert numbers == {'a': accepted, 'r': 2, 'b': len(row['tokens']) - accepted - 2}
  assert row['text'] == ANSWER and '\x1b' not in ''.join(table)


@pytest.mark.parametrize('name, value', [('NO_COLOR', '1'), ('TERM', 'dumb')])
def test_a_terminal_is_shown_no_colours_that_it_does_not_want(terminal, flawed_draft, monkeypatch, name, value):
  monkeypatch.setenv(name, value)
  code, out = terminal(*SHOW)
  assert code == 0 and '\x1b' not in out
  assert out.split('\n')[1] == ANSWER


def test_what_is_no_terminal_gets_no_colours(cli, flawed_draft):
  code, out, _ = cli(*SHOW)
  assert code == 0 and '\x1b' not in out
  _, answer, _, legend, *_ = out.split('\n')
  assert answer == ANSWER
  assert legend.startswith('20 accepted (drafted and kept)   2 recovered (')
  assert 'recovered' not in cli(*SHOW, '--noshow_accepted')[1]


# A file of prompts.


def batch_command(prompts_file, output):
  """Flags of a run over a file that takes several batches and whose draws matter."""
  return f'--prompts_file={prompts_file}', f'--output={output}', '--batch_size=2', '--temperature=5', *SHORT


def test_prompts_are_answered_in_batches(cli, prompts_file, tmp_path):
  output = str(tmp_path / 'out.jsonl')
  code, out, _ = cli(*batch_command(prompts_file, output))
  assert code == 0 and 'tokens per verifier call' in out
  rows = lines(output)
  assert [(row['index'], row['prompt']) for row in rows] == list(enumerate(['ab', 'cd', 'ef', 'gh', 'ij']))
  assert len({row['text'] for row in rows}) == 5, 'at this temperature texts should differ'
  whole = str(tmp_path / 'whole.jsonl')
  assert (
    cli(f'--prompts_file={prompts_file}', f'--output={whole}', '--batch_size=1', '--temperature=5', *SHORT)[0]
    == 0
  )
  assert lines(whole) == rows, 'answers do not depend on the batch'


def test_answers_are_shown_where_no_output_is_given(cli, prompts_file):
  code, out, _ = cli(f'--prompts_file={prompts_file}', '--batch_size=2', '--temperature=0', *SHORT)
  assert code == 0
  for index in range(5):
    assert f'--- {index}\n{ANSWER}\n' in out


def test_a_run_goes_on_where_it_was_interrupted(cli, prompts_file, tmp_path):
  output = tmp_path / 'out.jsonl'
  command = batch_command(prompts_file, output)
  assert cli(*command)[0] == 0
  whole = output.read_bytes()

  code, out, _ = cli(*command)
  assert code == 0 and '5 of 5 prompts are answered already in' in out
  assert 'tokens per verifier call' not in out and output.read_bytes() == whole

  ends = [i + 1 for i, byte in enumerate(whole) if byte == ord('\n')]
  output.write_bytes(whole[: (ends[1] + ends[2]) // 2])
  code, out, _ = cli(*command)
  assert code == 0 and 'the last line is incomplete and is dropped' in out
  assert '2 of 5 prompts are answered already' in out and output.read_bytes() == whole


def test_an_interrupt_leaves_what_is_done(cli, prompts_file, tmp_path, monkeypatch):
  output = str(tmp_path / 'out.jsonl')
  calls, answer = [], cj.generate_text

  def interrupted(*args, **options):
    if len(calls) == 2:
      raise KeyboardInterrupt
    calls.append(1)
    return answer(*args, **options)

  monkeypatch.setattr(cj, 'generate_text', interrupted)
  code, _, err = cli(*batch_command(prompts_file, output))
  assert code == 130 and 'interrupted' in err and 'Traceback' not in err
  assert [row['index'] for row in lines(output)] == [0, 1, 2, 3]


def test_an_output_of_other_settings_or_prompts_is_refused(cli, prompts_file, tmp_path):
  output = tmp_path / 'out.jsonl'
  command = batch_command(prompts_file, output)
  assert cli(*command)[0] == 0
  whole = output.read_bytes()
  code, _, err = cli(*command, '--seed=3', '--stop=x')
  assert code == 2
  assert (
    "holds answers of other settings (stop is [] there and ['x'] here; seed is 0 there and 3 here): choose"
    in err
  )
  others = [{'prompt': prompt} for prompt in ('ab', 'XX', 'ef', 'gh', 'ij')]
  for rows, index in ((others, 1), (others[:1], 1)):
    changed = jsonl(tmp_path / 'others.jsonl', rows)
    code, _, err = cli(*command, f'--prompts_file={changed}')
    assert (
      code == 2
      and f'holds answers to other prompts (prompt {index} is not the same): choose another --output' in err
    )
  code, _, err = cli('--prompt=zz', f'--output={output}', '--temperature=5', *SHORT)
  assert code == 2 and 'holds answers to other prompts (prompt 0 is not the same)' in err
  assert output.read_bytes() == whole


# What the user has to mend.


GOOD = '{"prompt": "ab"}\n'
# Name -> content of a prompts file or None, arguments, start of the message; FOLDER is where the file is.
ERRORS = {
  'malformed line': (GOOD + '{"prompt": \n', '', 'FOLDER/prompts, line 2: no JSON object (Expecting value'),
  'line of another kind': (GOOD + '\n[1]\n', '', 'FOLDER/prompts, line 3: need a JSON object, got list'),
  'no such field': (
    '{"text": "a", "id": 1}\n',
    '',
    "FOLDER/prompts, line 1: no field 'prompt' (it has text, id); name the right one with --prompt_field.",
  ),
  'empty prompt in a file': (
    GOOD + '{"prompt": ""}\n',
    '',
    "FOLDER/prompts, line 2: prompt is '': need a non-empty",
  ),
  'a number for a prompt': (
    '{"prompt": 3}\n',
    '',
    'FOLDER/prompts, line 1: prompt is 3: need a non-empty string',
  ),
  'no role': (
    '{"prompt": [{"content": "a"}]}\n',
    '',
    "FOLDER/prompts, line 1: prompt is [{'content': 'a'}]: need",
  ),
  'no prompts': ('\n', '', 'FOLDER/prompts holds no prompts.'),
  'missing file': (None, '--prompts_file=FOLDER/none', 'FOLDER/none cannot be read: '),
  'colours of a file': (GOOD, '--show_accepted', '--show_accepted is for one prompt, whose answer is streamed;'),
  'two sources': (GOOD, '--prompt=hi', '--prompt and --prompts_file are both given: choose one.'),
  'empty prompt': (None, '--prompt= --raw', 'prompt 0 is empty: need at least one token to continue from.'),
  'empty input': (None, '', 'prompt 0 is empty: need at least one token'),
  'unknown rule': (None, '--rule=foo', 'flag --rule=foo: value should be one of <budget|cactus|cactus_exact|'),
  'number of no rule': (None, '--rule=clamp', '--rule=clamp needs --tau.'),
  'budget of nothing': (None, '--rule=budget', '--rule=budget needs --kl_per_token or --kl_total, in nats.'),
  'negative budget': (None, '--rule=budget --kl_total=-1', 'kl_total=-1.0: need a finite number of nats >= 0.'),
  'static budget': (None, '--rule=budget --kl_total=1 --static', '--static means nothing to --rule=budget'),
  'static clamp': (None, '--rule=clamp --tau=1 --static', '--static means nothing to --rule=clamp'),
  'wrong divergence': (None, '--rule=mentored --limit=1 --divergence=x', 'flag --divergence=x: value should be one of'),
  'number of another rule': (None, '--rule=clamp --tau=1 --alpha=0.1', '--alpha means nothing to --rule=clamp'),
  'block of cactus': (
    None,
    '--rule=cactus --delta=1 --block_verification',
    '--rule=cactus has no fixed target law, so it cannot be verified by blocks: add --static',
  ),
  'unknown flag': (None, '--repetition_penalty=2', "Unknown command line flag 'repetition_penalty'"),
  'no number': (None, '--top_k=many', 'flag --top_k=many: '),
  'argument': (None, 'what', "unexpected argument 'what'; options are written --name=value."),
  'no delta': (None, '--rule=cactus', '--rule=cactus needs --delta.'),
  'negative delta': (None, '--rule=cactus --delta=-1', 'delta=-1.0: need a finite number of nats >= 0'),
  'nan delta': (None, '--rule=cactus --delta=nan', 'delta=nan: need a finite number of nats'),
  'infinite delta': (None, '--rule=cactus --delta=inf', 'delta=inf: need a finite number of nats'),
  'delta of no rule': (
    None,
    '--delta=0',
    '--delta means nothing to --rule=exact: drop it, or choose the rule it bel',
  ),
  'delta of another rule': (None, '--rule=exact --delta=1', '--delta means nothing to --rule=exact: drop it'),
  'no drafted tokens': (
    None,
    '--prompt=hi --num_draft=0',
    'num_draft=0: speculative decoding needs at least 1 drafted',
  ),
  'entropy of a lookup': (None, '--prompt=hi --stop_entropy=1', 'stop_entropy=1.0 means nothing to draft=PromptLookup'),
  'negative entropy': (
    None,
    '--prompt=hi --draft=fake --stop_entropy=-1',
    'stop_entropy=-1.0: need a number of nats >= 0, or None.',
  ),
  'a number in words': (None, '--num_draft=fast', "flag --num_draft=fast: need a whole number, or 'auto'"),
  'layers in words': (
    None,
    '--prompt=hi --draft=early_exit:two',
    '--draft=early_exit:two: need the number of layers',
  ),
  'no layers': (
    None,
    '--prompt=hi --draft=early_exit',
    '--draft=early_exit: need the number of layers, as in early_ex',
  ),
  'top_p': (None, '--top_p=0', 'top_p=0.0: need a number in (0, 1]'),
  'temperature': (None, '--temperature=-1', 'temperature=-1.0: need a finite number >= 0 (0 is greedy).'),
  'top_k': (None, '--top_k=-1', 'top_k=-1: need a whole number >= 0'),
  'min_p': (None, '--min_p=2', 'min_p=2.0: need a number in [0, 1]'),
  'no new tokens': (None, '--prompt=hi --max_new_tokens=0', 'max_new_tokens=0: need at least 1.'),
  'empty stop': (None, '--prompt=hi --stop=', "stop=['']: need non-empty strings."),
  'mesh on one device': (
    None,
    '--prompt=hi --mesh_model=2',
    'data=1 x fsdp=1 x model=2 is 2, but there are 1 devices: choose sizes whose product is 1.',
  ),
  'mesh of nothing': (None, '--prompt=hi --mesh_data=0', 'flag --mesh_data=0: '),
  'devices of no draft': (None, '--prompt=hi --draft_devices=1', '--draft_devices means nothing to --draft=lookup'),
  'devices of early exit': (
    None,
    '--prompt=hi --draft=early_exit:1 --draft_devices=1',
    '--draft_devices means nothing to --draft=early_exit:1, which is no model of its own',
  ),
  'draft on one device': (
    None,
    '--prompt=hi --draft=some/model --draft_devices=2',
    '--draft_devices=2: there is one device; drop it.',
  ),
  'half a process': (
    None,
    '--prompt=hi --process_id=0',
    '--coordinator and --num_processes missing: --coordinator, --num_processes and --process_id belong together.',
  ),
  'process too many': (
    None,
    '--prompt=hi --process_id=2 --num_processes=2 --coordinator=localhost:1',
    '--process_id=2: need a number below --num_processes=2.',
  ),
  'no folder': (None, '--prompt=hi --output=FOLDER/no/out', 'FOLDER/no/out cannot be written: '),
}


@pytest.mark.parametrize('case', ERRORS)
def test_what_the_user_has_to_mend_is_one_line(case, cli, tmp_path):
  content, arguments, message = ERRORS[case]
  arguments = arguments.replace('FOLDER', str(tmp_path)).split()
  output = tmp_path / 'out.jsonl'
  if content is not None:
    (tmp_path / 'prompts').write_text(content)
    output.write_text('{"index": 0}\n{"unfinished')
    arguments += [f'--prompts_file={tmp_path}/prompts', f'--output={output}']
  code, out, err = cli(*arguments)
  assert code == 2
  assert err.startswith('error: ' + message.replace('FOLDER', str(tmp_path))), err
  assert err.count('\n') == 1 and 'new tokens' not in out
  if content is not None:
    assert output.read_text() == '{"index": 0}\n{"unfinished', 'what is there is not touched'


def test_early_exit_needs_a_layer_of_the_model():
  sizes = ModelConfig(
    family='llama',
    vocab_size=8,
    embed_dim=4,
    num_layers=3,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=4,
    max_length=8,
    norm_eps=1e-5,
    rope_theta=1e4,
    tie_embeddings=True,
  )
  model = cj.Transformer(transformer.random_params(jax.random.key(0), sizes), sizes)
  draft, tokenizer = common.draft_named('early_exit:2', model)
  assert draft.config.num_layers == 2 and tokenizer is None
  for layers in (0, 3, 99):
    with pytest.raises(ValueError, match=rf'early_exit\({layers}\): the model has 3 layers'):
      common.draft_named(f'early_exit:{layers}', model)
  assert common.draft_named('none', model) == (None, None)
  assert common.draft_named('lookup', model) == (cj.PromptLookup(), None)


# Functions of the program.


def test_prompt_of_a_line(parsed):
  parsed()
  messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b', 'name': 'c'}]
  assert generate.prompt_of({'prompt': 'a', 'other': 1}) == 'a'
  assert generate.prompt_of({'prompt': ['first', 'second']}) == 'first'
  assert generate.prompt_of({'prompt': messages}) == messages
  parsed('--prompt_field=turns')
  assert generate.prompt_of({'turns': 'a', 'prompt': 'b'}) == 'a'


@pytest.mark.parametrize(
  'value', ['', [], [''], None, 3, {}, [3], [{'role': 'user'}], [{'role': 'user', 'content': 'a'}, 'b']]
)
def test_what_is_no_prompt(parsed, value):
  parsed()
  with pytest.raises(
    ValueError, match='prompt is .*: need a non-empty string, a list of strings, or a list of messages'
  ):
    generate.prompt_of({'prompt': value})


def test_rules_take_their_own_numbers(parsed):
  parsed('--rule=cactus', '--delta=0.5')
  assert common.rule() == cj.Cactus(0.5)
  assert (
    'rule Cactus(delta=0.5)' in common.describe()
    and json.loads(json.dumps(common.settings())) == common.settings()
  )


@pytest.mark.parametrize(
  'arguments, rule',
  [
    (['--rule=clamp', '--tau=0.5'], cj.Clamp(0.5)),
    (['--rule=typical'], cj.Typical(0.09, 0.3)),
    (['--rule=typical', '--epsilon=0.2'], cj.Typical(0.2, 0.3)),
    (['--rule=top_k', '--k=3', '--published'], cj.TopK(3.0, published=True)),
    (['--rule=cactus_exact', '--delta=0.1', '--divergence=pearson'], cj.CactusExact(0.1, 'pearson')),
    (['--rule=mentored', '--limit=0.1'], cj.Mentored(0.1)),
    (['--rule=cactus', '--delta=0.1', '--static'], cj.Static(cj.Cactus(0.1))),
    (['--rule=budget', '--kl_per_token=0.01'], cj.Budget(kl_per_token=0.01)),
    (['--rule=budget', '--kl_total=2', '--kl_per_token=0.1'], cj.Budget(kl_per_token=0.1, kl_total=2.0)),
  ],
  ids=lambda x: str(x)[:40],
)
def test_every_rule_can_be_asked_for(parsed, arguments, rule):
  parsed(*arguments)
  assert common.rule() == rule and common.settings()['rule'] == str(rule)


def test_sampling_and_text_options_are_those_of_the_flags(parsed):
  parsed(
    '--temperature=0.1',
    '--top_k=2',
    '--top_p=0.3',
    '--min_p=0.4',
    '--num_draft=5',
    '--seed=6',
    '--stop=a',
    '--stop=b',
  )
  assert common.sampling() == cj.SamplingParams(temperature=0.1, top_k=2, top_p=0.3, min_p=0.4)
  assert common.text_options() == dict(num_draft=5, max_new_tokens=256, stop=['a', 'b'], seed=6, raw=False,
                                       ledger=False, block_verification=False, stop_entropy=None)  # fmt: skip
  parsed('--num_draft=auto')
  assert common.text_options()['num_draft'] == cj.AutoDraft(folder=common.COSTS)
  assert common.settings()['num_draft'] == 'auto'
  with pytest.raises(ValueError, match='--num_draft=auto: this program needs a number'):
    common.num_draft()


@pytest.mark.parametrize(
  'arguments, sizes',
  [
    ([], (1, 1, 8)),
    (['--mesh_data=2'], (2, 1, 4)),
    (['--mesh_model=2'], (4, 1, 2)),
    (['--mesh_fsdp=4'], (1, 4, 2)),
    (['--mesh_fsdp=2', '--mesh_model=4'], (1, 2, 4)),
    (['--mesh_fsdp=2', '--mesh_data=2'], (2, 2, 2)),
    (['--mesh_data=2', '--mesh_model=2'], (2, 1, 2)),  # for make_mesh to refuse
    (['--mesh_data=3'], (3, 1, 2)),
    (['--mesh_model=9'], (1, 1, 9)),
  ],
  ids=str,
)
def test_a_mesh_takes_all_devices(parsed, monkeypatch, arguments, sizes):
  monkeypatch.setattr(jax, 'device_count', lambda: 8)
  monkeypatch.setattr(sharding, 'make_mesh', lambda data, fsdp, model: (data, fsdp, model))
  parsed(*arguments)
  assert common.mesh() == sizes


def test_one_device_needs_no_mesh(parsed):
  for arguments in ([], ['--mesh_data=1', '--mesh_fsdp=1', '--mesh_model=1']):
    parsed(*arguments)
    assert common.mesh() is None


def test_a_mesh_is_described(parsed):
  parsed('--verifier=a/b', '--draft=c/d', '--draft_devices=2')
  mesh = jax.sharding.AbstractMesh((2, 1, 4), ('data', 'fsdp', 'model'))
  line = 'verifier a/b; draft c/d, 4 tokens a round; rule Exact()'
  assert common.describe() == line
  assert common.describe(mesh) == f'{line}; 8 devices: data=2 x fsdp=1 x model=4, draft on groups of 2'


def test_batches_give_every_group_of_devices_a_share(parsed):
  mesh = jax.sharding.AbstractMesh((4, 1, 2), ('data', 'fsdp', 'model'))
  for asked, taken in ((1, 4), (4, 4), (5, 8)):
    parsed(f'--batch_size={asked}')
    assert generate.batch_size(mesh) == taken and generate.batch_size(None) == asked


@pytest.mark.parametrize('argument', ['--mesh_model=2', '--distributed', '--process_id=0', '--draft_devices=1'])
def test_a_program_for_one_device_refuses_meshes(run_program, argument):
  code, _, err = run_program(lambda: pytest.fail('it ran'), 'front.py', argument)
  name = argument.partition('=')[0]
  assert code == 2
  assert err == f'error: {name} means nothing here: this program runs on one device.\n'


def test_a_note_is_shown_once(run_program):
  def main():
    for rows in (3, 5, 3):
      warnings.warn(f'{rows} rows do not split', stacklevel=1)
    warnings.warn('another thing', stacklevel=1)

  with warnings.catch_warnings():
    warnings.simplefilter('always')
    _, _, err = run_program(main, 'front.py')
  assert err == 'Note: 3 rows do not split\nNote: another thing\n'


def stats(**changes):
  seconds = metrics.Seconds(compile=1.0, first_token=0.25, decode=2.0, decoded=10)
  fields = dict(
    new_tokens=11, decoded=12, verifier_calls=8, accepted_at=(3, 1), tested_at=(6, 2), seconds=seconds
  )
  return metrics.Stats(**fields | changes)


def remarks(done, plain=None, draft=cj.PromptLookup(), rule=cj.Exact(), temperature=0.6):
  sampling = cj.SamplingParams(temperature=temperature)
  return generate.remarks(done, plain, dict(draft=draft, rule=rule, sampling=sampling))


def test_remarks():
  assert remarks(stats()) == remarks(stats(), plain=4.0) == []
  [note] = remarks(stats(accepted_at=(0, 0), tested_at=(0, 0)))
  assert note.startswith('The draft proposed nothing')
  assert remarks(stats(accepted_at=(), tested_at=()), draft=None) == []
  [note] = remarks(stats(), plain=6.25)
  assert note.startswith(
    'Speculation was slower here than plain decoding would have been: 5.0 against 6.2 tokens/s, timed on '
  )
  [idle] = remarks(stats(accepted_at=(), tested_at=()), draft=None, rule=cj.Cactus(1.0))
  assert idle.startswith('Without a draft there is nothing to accept or reject')
  [lossy] = remarks(stats(lossless=False), rule=cj.Cactus(1.0))
  assert lossy == "Cactus(delta=1.0) is lossy: these tokens do not follow the verifier's law."


def test_the_table_shows_what_was_spent():
  assert 'KL' not in generate.table(stats(), None)
  histogram = [0] * 110
  histogram[60] = 9
  spent = metrics.Spent(decided=9, kl=0.6, max_kl=0.25, chi2=1.0, flips=2, histogram=tuple(histogram))
  lines = generate.table(stats(spent=spent, lossless=False), None).splitlines()[-3:]
  assert lines[0].split() == 'KL per token 0.05000 nats (0.600 on the 9 tokens of the rule)'.split()
  assert lines[1].split() == '99% of those at most 0.010 nats (largest 0.250)'.split()
  assert lines[2].split() == 'verifier would never emit 2'.split()


def test_an_answer_of_one_round_is_not_called_slow():
  """Nothing was decoded after the first round, so there is no rate to compare."""
  seconds = metrics.Seconds(compile=1.0, first_token=0.25, decode=0.0, decoded=0)
  assert remarks(stats(seconds=seconds), plain=20.0) == []


def test_table():
  rows = dict(line.strip().split('  ', 1) for line in generate.table(stats(), 4.0).splitlines())
  assert {name: value.strip() for name, value in rows.items()} == {
    'new tokens': '11',
    'tokens per verifier call': '1.50   (8 calls)',
    'accepted per call (AL)': '0.50',
    'acceptance rate': '50%   (4 of 8 tested)',
    'kept at position 1, 2, ...': '38% 12%',
    'of those tested there': '50% 50%',
    'time to first token': '0.25 s',
    'decode tokens/s': '5.0   (plain decoding: 4.0)',
    'compiling, apart': '1.0 s',
  }


def test_the_table_says_which_numbers_were_chosen():
  assert 'a round' not in generate.table(stats(), None)
  chosen = stats(calls_by_num_draft=(0, 0, 2, 5, 1, 0), seconds=dataclasses.replace(stats().seconds, measure=3.0))
  text = generate.table(chosen, None)
  assert '\n  drafted tokens a round      3   (chosen; 2..4 over the text)\n' in text
  assert text.splitlines()[-1].split() == 'measuring costs, apart 3.0 s'.split()
  assert remarks(chosen) == []
  [note] = remarks(stats(calls_by_num_draft=(8, 0), accepted_at=(), tested_at=()))
  assert note == 'Plain decoding was found to be faster than this draft, and served 8 of 8 calls.'


def test_table_of_an_empty_and_of_a_plain_run():
  nothing = metrics.Seconds(0.0, 0.0, 0.0, 0)
  text = generate.table(metrics.Stats(0, 0, 0, (0, 0), (0, 0), nothing), None)
  assert '0.00   (0 calls)' in text and '0%   (0 of 0 tested)' in text and 'plain decoding' not in text
  assert 'kept at position 1, 2, ...  -' in generate.table(metrics.Stats(2, 2, 2, (), (), nothing), None)


# As a user would.


def command(*arguments, cwd):
  """The program in a process of its own, far from the repository; it shares this one's compiled programs."""
  environment = os.environ | {
    'JAX_COMPILATION_CACHE_DIR': os.path.abspath(jax.config.jax_compilation_cache_dir)
  }
  return subprocess.run(
    [sys.executable, ROOT / 'experiments' / 'generate.py', *arguments],
    cwd=cwd,
    env=environment,
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_the_program_runs(default_model_path, tmp_path):
  done = command(
    '--prompt=Name three fruits.',
    '--rule=cactus',
    '--delta=1',
    '--temperature=0',
    '--max_new_tokens=12',
    '--nocompare_plain',
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  first, answer, *_ = done.stdout.splitlines()
  assert (
    first == f'verifier {default_model_path.name}; draft distilled, 4 tokens a round; rule Cactus(delta=1.0)'
  )
  assert answer.strip() and 'Traceback' not in done.stderr
  assert 'new tokens                  12' in done.stdout
  assert 'is lossy' not in done.stdout
  assert "Note: at temperature 0 the verifier's law is one-hot, so Cactus keeps" in done.stderr


@pytest.mark.slow
def test_the_program_answers_a_file_and_goes_on(default_model_path, tmp_path):
  prompts = jsonl(
    tmp_path / 'prompts.jsonl', [{'prompt': prompt} for prompt in ('Hi', 'Why is the sky blue?', 'Count')]
  )
  arguments = (
    f'--prompts_file={prompts}',
    '--output=out.jsonl',
    '--batch_size=2',
    '--max_new_tokens=8',
    '--draft=early_exit:10',
  )
  first = command(*arguments, cwd=tmp_path)
  assert first.returncode == 0, first.stderr
  assert 'plain decoding: ' in first.stdout
  whole = (tmp_path / 'out.jsonl').read_bytes()
  assert whole.count(b'\n') == 3
  (tmp_path / 'out.jsonl').write_bytes(whole[:-30])
  second = command(*arguments, cwd=tmp_path)
  assert second.returncode == 0 and '2 of 3 prompts are answered already' in second.stdout
  assert (tmp_path / 'out.jsonl').read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize(
  'argument, message',
  [
    ('--draft=early_exit:99', 'error: early_exit(99): the model has 30 layers'),
    ('--verifier=/no/such/folder', 'error: /no/such/folder: no such file or folder'),
    ('--max_new_tokens=0', 'error: max_new_tokens=0: need at least 1.'),
  ],
)
def test_the_program_says_what_to_mend(default_model_path, tmp_path, argument, message):
  done = command('--prompt=hi', argument, cwd=tmp_path)
  assert done.returncode == 2 and done.stderr.startswith(message) and 'Traceback' not in done.stderr


INTERRUPTED = """
import atexit, os, signal, threading, time
import jax
from lib import flags

def main():
  atexit.register(print, 'the end of Python')
  print('begun')
  endless = jax.jit(lambda: jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) % 7, 0))
  threading.Thread(target=endless, daemon=True).start()
  time.sleep(1)
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(60)

flags.run(main)
"""


def test_an_interrupt_waits_for_no_computation(tmp_path):
  """Nor does it let Python clear away what XLA's threads use, which ended in a segmentation fault at times."""
  (tmp_path / 'program.py').write_text(INTERRUPTED)
  environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'experiments')])}
  done = subprocess.run(
    [sys.executable, tmp_path / 'program.py'], env=environment, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 130 and done.stdout == 'begun\n'
  assert 'interrupted' in done.stderr and 'Traceback' not in done.stderr
