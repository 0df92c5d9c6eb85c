"""scripts/convert.py, from every format to both that it writes."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import gguf
import numpy as np
import pytest
import safetensors.numpy

import cactus_jax as cj
from tests import checkpoints, fakes

SCRIPT = pathlib.Path(__file__).parent.parent / 'scripts' / 'convert.py'
spec = importlib.util.spec_from_file_location('convert', SCRIPT)
spec.loader.exec_module(convert := importlib.util.module_from_spec(spec))


@pytest.fixture
def run(run_program, monkeypatch, tmp_path):
  """run(*arguments): exit code, standard output and standard error, in a folder with sources."""
  monkeypatch.chdir(tmp_path)
  checkpoints.write_folder(tmp_path / 'hf')
  fakes.byte_tokenizer().save_pretrained(tmp_path / 'hf')
  return lambda *arguments: run_program(convert.main, 'convert.py', *arguments, arguments=('SOURCE', 'DESTINATION'))


def tensors_of(folder):
  return safetensors.numpy.load_file(pathlib.Path(folder) / 'model.safetensors')


def test_hugging_face_to_orbax_and_back(run):
  code, out, err = run('hf', 'ckpt', '--to=orbax')
  assert (code, err) == (0, '')
  size = sum(path.stat().st_size for path in pathlib.Path('ckpt').rglob('*') if path.is_file())
  assert out == ('ckpt: llama, 104,896 weights in float32, with its tokenizer; '
                 f'{size / 1e6:.1f} MB as orbax.\n')
  code, out, err = run('ckpt', 'again', '--to=safetensors')
  assert (code, err) == (0, '')
  assert out.startswith('again: llama, 104,896 weights in float32, with its tokenizer; 0.4 MB as safetensors.')
  expected = checkpoints.tensors()
  assert tensors_of('again').keys() == expected.keys()
  for name, array in tensors_of('again').items():
    np.testing.assert_array_equal(array, expected[name], name)
  for folder in ('ckpt', 'again'):
    assert cj.load_tokenizer(folder)('a b').input_ids == fakes.byte_tokenizer()('a b').input_ids


def test_transformers_reads_the_end_of_the_chain(run):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  for arguments in (('hf', 'ckpt', '--to=orbax'), ('ckpt', 'again', '--to=safetensors')):
    assert run(*arguments)[0] == 0
  models = [transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in ('hf', 'again')]
  with torch.no_grad():
    first, second = (model(torch.arange(20)[None]).logits.numpy() for model in models)
  np.testing.assert_array_equal(second, first)
  assert np.abs(first).max() > 2


@pytest.mark.parametrize('quantise', [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_gguf_to_orbax_to_hugging_face(run, quantise):
  checkpoints.write_gguf('model.gguf', quantise=quantise)
  code, out, err = run('model.gguf', 'ckpt', '--to=orbax', '--notokenizer')
  assert (code, err) == (0, '') and 'without a tokenizer' in out
  assert run('ckpt', 'again', '--to=safetensors', '--notokenizer')[0] == 0
  for name, array in tensors_of('again').items():
    expected = checkpoints.tensors()[name]
    np.testing.assert_allclose(array, expected, atol=0 if quantise == gguf.GGMLQuantizationType.F32 else 0.02)


def test_gguf_with_its_tokenizer(run, default_model_path, monkeypatch, tmp_path):
  """The tokenizer of the real file, with weights that are soon converted."""
  checkpoints.write_gguf('model.gguf')
  real = cj.load_tokenizer(default_model_path)
  monkeypatch.setattr(cj, 'load_tokenizer', lambda source: real)
  assert run('model.gguf', 'again', '--to=safetensors', '--dtype=bfloat16')[0] == 0
  monkeypatch.undo()
  assert cj.load_tokenizer(tmp_path / 'again')('In 1999  12').input_ids == real('In 1999  12').input_ids
  assert {array.dtype.name for array in tensors_of(tmp_path / 'again').values()} == {'bfloat16'}


@pytest.mark.parametrize('arguments, text', [
    (['hf', 'new'], 'say what to write: --to=orbax or --to=safetensors.'),
    (['hf', '--to=orbax'], 'DESTINATION is missing; needed are SOURCE DESTINATION.'),
    (['--to=orbax'], 'SOURCE is missing; needed are SOURCE DESTINATION.'),
    (['hf', 'new', 'more', '--to=orbax'], "unexpected argument 'more'; options are written --name=value."),
    (['hf', 'new', '--to=pickle'], 'flag --to=pickle: value should be one of <orbax|safetensors>'),
    (['hf', 'new', '--to=orbax', '--seed=3'], '--seed means nothing here: nothing is decoded.'),
    (['./none', 'new', '--to=orbax'], './none: no such file or folder; pass a hub id, a checkpoint folder or a .gguf'),
    (['bare', 'new', '--to=orbax'], '(--notokenizer converts the weights alone.)'),
    (['empty', 'new', '--to=orbax', '--notokenizer'], 'config.json: no such file'),
])
def test_one_line_for_what_is_wrong(run, tmp_path, arguments, text):
  checkpoints.write_folder(tmp_path / 'bare')
  (tmp_path / 'empty').mkdir()
  code, out, err = run(*arguments)
  assert (code, out) == (2, '') and err.startswith('error: ') and text in err and err.count('\n') == 1
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('to', ['orbax', 'safetensors'])
def test_refuses_what_is_there_before_it_loads(run, monkeypatch, tmp_path, to):
  for name in ('load_tokenizer', 'load_transformer'):
    monkeypatch.setattr(cj, name, lambda *_, **__: pytest.fail('it loaded'))
  (tmp_path / 'there').touch()
  error = 'error: there: is there already; name a new folder, or remove it.\n'
  assert run('hf', 'there', f'--to={to}') == (2, '', error)


def test_as_a_program(tmp_path):
  checkpoints.write_folder(tmp_path / 'hf')
  done = subprocess.run([sys.executable, SCRIPT, 'hf', 'ckpt', '--to=orbax', '--notokenizer'], cwd=tmp_path,
                        capture_output=True, text=True, env=os.environ | {'PYTHONPATH': str(SCRIPT.parent.parent)})
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout.startswith('ckpt: llama, 104,896 weights in float32, without a tokenizer; ')
