"""Who may import whom: two branches that never meet below level 4, files that import only from lower levels.

The algorithm (A) can be read and tested without a transformer, and a transformer without the algorithm.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = 'cactus_jax'
RELATIVE = 'by a relative name'

# Module -> branch and level. Decimals order the files within one level. Above level 3 the branches meet ('').
LEVELS = {
  'numerics': ('A', -1),
  'records': ('A', -1),
  'sampling': ('A', 0),
  'divergence': ('A', 0),
  'rules': ('A', 1),
  'verify': ('A', 2),
  'ledger': ('A', 2),
  'drafts': ('A', 2),
  'decode': ('A', 3),
  'sharding': ('M', 0),
  'models.rope': ('M', 0),
  'models.int8': ('M', 0),
  'models.config': ('M', 1),
  'models.layers': ('M', 1),
  'models.cache': ('M', 1),
  'models.transformer': ('M', 2),
  'models.weights': ('M', 3),
  'models.hf': ('M', 3.1),
  'models.gguf': ('M', 3.1),
  'models.student': ('M', 3.2),
  'models.load': ('M', 3.3),
  'checkpoint': ('M', 3.2),
  'models.checkpoint': ('M', 3.2),
  'files': ('', 3.9),
  'metrics': ('', 4),
  'schedule': ('', 4),
  'text': ('', 4.1),
  'batching': ('', 4.2),
  'display': ('', 4.2),
  'corpus': ('', 4.2),
  'distill': ('', 4.3),
  'models': ('M', 9),  # an __init__ without contents: nothing is to be taken from it
  '': ('', 9),  # the public names
}


def imported_modules(source, known):
  """(line, module) of each import, wherever it stands; 'from a import b' is a.b if that is a module."""
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        found.append((node.lineno, RELATIVE))
        continue
      for alias in node.names:
        module = f'{node.module}.{alias.name}'
        found.append((node.lineno, module if in_package(module) in known else node.module))
  return found


def in_package(module):
  """'cactus_jax.models.cache' -> 'models.cache', 'cactus_jax' -> '', None for what is elsewhere."""
  if module == PACKAGE:
    return ''
  return module.removeprefix(PACKAGE + '.') if module.startswith(PACKAGE + '.') else None


def violations(name, source):
  """What is wrong with the imports of one module of the package."""
  if name not in LEVELS:
    return [f'{name}: has no level; add it to LEVELS']
  branch, level = LEVELS[name]
  problems = []
  for line, module in imported_modules(source, LEVELS):
    where = f'{name}:{line}: '
    if module == RELATIVE or module.split('.')[0] in ('torch', 'absl', 'tests', 'experiments'):
      problems.append(where + f'imports {module}')
    imported = in_package(module)
    if imported is None:
      continue
    if imported not in LEVELS:
      problems.append(where + f'imports {module}, which has no level')
      continue
    other, other_level = LEVELS[imported]
    if branch and other and branch != other:
      problems.append(where + f'the branches {branch} and {other} meet: imports {module}')
    elif other_level >= level:
      problems.append(where + f'imports {module} of level {other_level}, and is itself of level {level}')
  return problems


def flag_readers(source):
  """Lines that name FLAGS. (A program may define flags of its own and read those.)"""
  lines = []
  for node in ast.walk(ast.parse(source)):
    named = getattr(node, 'id', None), getattr(node, 'attr', None), getattr(node, 'name', None)
    if not isinstance(node, ast.FunctionDef) and 'FLAGS' in named:
      lines.append(node.lineno)
  return lines


def module_name(path):
  parts = path.relative_to(ROOT / PACKAGE).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


PACKAGE_FILES = sorted((ROOT / PACKAGE).rglob('*.py'))
PROGRAMS = sorted(path for folder in ('experiments', 'scripts') for path in (ROOT / folder).rglob('*.py'))


@pytest.mark.parametrize('path', PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
  assert violations(module_name(path), path.read_text()) == []


def test_the_files_of_the_algorithm_are_there():
  assert {'sampling', 'divergence', 'rules', 'verify', 'drafts', 'decode', 'models.transformer', ''} <= {
    module_name(path) for path in PACKAGE_FILES
  }


@pytest.mark.parametrize('path', PACKAGE_FILES + PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_one_file_reads_flags(path):
  if path != ROOT / 'experiments' / 'lib' / 'flags.py':
    assert flag_readers(path.read_text()) == []


@pytest.mark.parametrize(
  'name, source, problem',
  [
    ('rules', 'from cactus_jax import decode', 'level 3'),
    ('rules', 'from cactus_jax.verify import verify', 'level 2'),
    ('rules', 'import cactus_jax.verify as v', 'level 2'),
    (
      'divergence',
      'from cactus_jax.sampling import check_number',
      'level 0',
    ),  # not from its own level either
    ('verify', 'def f():\n  from cactus_jax.drafts import PromptLookup', 'verify:2'),
    ('decode', 'from cactus_jax.models import transformer', 'the branches A and M meet'),
    (
      'decode',
      'if TYPE_CHECKING:\n  from cactus_jax.models.cache import KVCache',
      'the branches A and M meet',
    ),
    ('models.transformer', 'from cactus_jax import sampling', 'the branches M and A meet'),
    ('models.layers', 'from cactus_jax.models.transformer import Params', 'level 2'),
    ('models.weights', 'from cactus_jax.models import load', 'level 3.3'),
    ('models.cache', 'from cactus_jax import models', 'level 9'),
    ('decode', 'import cactus_jax', 'level 9'),
    ('text', 'from cactus_jax import generate_text', 'level 9'),
    ('metrics', 'from cactus_jax.text import Completions', 'level 4.1'),
    ('sampling', 'from . import rules', 'a relative name'),
    ('text', 'import torch.nn', 'imports torch'),
    ('models.load', 'from absl import flags', 'imports absl'),
    ('models.load', 'from torch import nn', 'imports torch'),
    ('rules', 'from cactus_jax import newcomer', 'level 9'),
    ('rules', 'from cactus_jax.newcomer import x', 'has no level'),
    ('newcomer', '', 'has no level'),
  ],
  ids=lambda x: str(x)[:40],
)
def test_a_planted_violation_is_seen(name, source, problem):
  found = violations(name, source)
  assert len(found) == 1 and problem in found[0], found


@pytest.mark.parametrize(
  'name, source',
  [
    ('rules', 'from cactus_jax import divergence\nfrom cactus_jax.sampling import check_number'),
    ('text', 'from cactus_jax import decode, metrics\nfrom cactus_jax.models.load import load_tokenizer'),
    ('models.load', 'from cactus_jax.models import gguf, hf, weights'),
    ('', 'from cactus_jax.text import generate_text\nimport jax'),
  ],
)
def test_what_is_allowed_passes(name, source):
  assert violations(name, source) == []


@pytest.mark.parametrize(
  'source',
  [
    'from absl.flags import FLAGS',
    'from absl.flags import FLAGS as F',
    'x = FLAGS.seed',
    'x = common.FLAGS.seed',
    'from absl import flags\nx = flags.FLAGS',
  ],
)
def test_a_planted_flag_is_seen(source):
  assert flag_readers(source)
  assert not flag_readers(
    'from absl import flags\n_SEED = flags.DEFINE_integer("seed", 0, "")\nx = _SEED.value'
  )
