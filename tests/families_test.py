"""Each family from a checkpoint to text: golden and rounded logits, greedy text of transformers, windows and drafts."""

import functools
import itertools
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from cactus_jax import decode
from cactus_jax.drafts import PromptLookup
from cactus_jax.models import hf
from cactus_jax.models.transformer import Transformer
from cactus_jax.sampling import SamplingParams
from tests import checkpoints, fakes
from tests.checkpoints import FAMILIES

GOLDEN = np.load(pathlib.Path(__file__).parent / 'golden' / 'logits.npz')


def their_model(folder, dtype='float32'):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=getattr(torch, dtype), attn_implementation='eager').eval()


# Logits.


def test_golden_file_holds_every_config():
  assert GOLDEN.files == ['tokens', *FAMILIES]


@pytest.mark.parametrize('name', FAMILIES)
def test_golden_logits(tmp_path, name):
  """Those of transformers, read from a file: this test needs no torch."""
  checkpoints.write_folder(tmp_path, FAMILIES[name])
  model = Transformer(*hf.load(tmp_path, dtype='float32'))
  expected = GOLDEN[name]
  assert np.abs(expected).max() > 2.5
  actual = fakes.logits(model, GOLDEN['tokens'])[:, -expected.shape[1]:]
  np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=0)


@pytest.mark.slow
def test_golden_file_is_what_transformers_gives():
  pytest.importorskip('torch')
  from tests.golden import make

  logits = make.logits(GOLDEN['tokens'])
  for name in FAMILIES:
    np.testing.assert_allclose(logits[name], GOLDEN[name], atol=2e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize('name', ['llama', 'llama_yarn', 'mistral', 'qwen2', 'qwen3', 'gemma2', 'gemma3', 'gemma3_old'])
def test_half_precision(tmp_path, name):
  """bfloat16 errs no more than it does in transformers, against float32 there with the same weights."""
  torch = pytest.importorskip('torch')
  weights = {name: array.astype(ml_dtypes.bfloat16) for name, array in checkpoints.tensors(FAMILIES[name]).items()}
  checkpoints.write_folder(tmp_path, FAMILIES[name], weights)
  tokens_BT = GOLDEN['tokens']

  def theirs(dtype):
    with torch.no_grad():
      return their_model(tmp_path, dtype)(torch.tensor(tokens_BT)).logits.float().numpy()

  exact = theirs('float32')
  ours = np.abs(fakes.logits(Transformer(*hf.load(tmp_path, dtype='bfloat16')), tokens_BT) - exact)
  their = np.abs(theirs('bfloat16') - exact)
  assert 0.002 < ours.mean() < 1.1 * their.mean()
  assert ours.mean() < 0.03 and ours.max() < 0.2  # of logits with a standard deviation of 1.5


# Greedy text.

PROMPTS = [[5, 17, 80], [9, 9, 33, 2, 71, 60, 14, 25, 90, 3, 47], [64]]
NEW = 64
# Two layers, one with a window and one without where there can be both, and the seed of weights that leave no tie.
SMALL = {'num_hidden_layers': 2, 'tie_word_embeddings': False, 'eos_token_id': None}
GREEDY = {
    'llama': (FAMILIES['llama'] | SMALL, 2),
    'llama3': (FAMILIES['llama3'] | SMALL, 4),
    'llama_yarn': (FAMILIES['llama_yarn'] | SMALL, 1),
    'mistral': (FAMILIES['mistral'] | SMALL, 1),
    'qwen2': (FAMILIES['qwen2_mha_windows'] | SMALL, 1),
    'qwen3': (FAMILIES['qwen3'] | SMALL, 2),
    'gemma2': (FAMILIES['gemma2'] | SMALL, 3),
    'gemma3': (FAMILIES['gemma3_old'] | SMALL | {'sliding_window_pattern': 2}, 3),
}
DRAFTS = {
    'none': lambda model, other: None,
    'lookup': lambda model, other: PromptLookup(2),
    'early_exit': lambda model, other: model.early_exit(1),
    'model': lambda model, other: other,
}


FAST = [('gemma3', 'early_exit'), ('mistral', 'lookup'), ('qwen2', 'model')]  # each of the others compiles as long


def load(folder, config, seed):
  checkpoints.write_folder(folder, config, checkpoints.tensors(config, seed))
  return Transformer(*hf.load(folder, dtype='float32'))


def write(model, draft, num_draft, temperature=0.0):
  """The finished state after PROMPTS."""
  config = decode.DecodeConfig(num_draft=num_draft, max_length=80, vocab_size=checkpoints.CONFIG['vocab_size'])
  sampling = SamplingParams(temperature=temperature)
  state = fakes.run(model, draft, prompts=PROMPTS, max_new=NEW, config=config, sampling=sampling)
  np.testing.assert_array_equal(state.finish, decode.Finish.LENGTH)
  return state


@pytest.fixture(scope='module')
def their_text(tmp_path_factory):
  """Of a name in GREEDY: the folder of a random model, and what transformers writes with it after PROMPTS."""

  @functools.cache
  def of(name):
    torch = pytest.importorskip('torch')
    config, seed = GREEDY[name]
    folder = checkpoints.write_folder(tmp_path_factory.mktemp(name), config, checkpoints.tensors(config, seed))
    generate = functools.partial(
        their_model(folder).generate, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=[],
        output_logits=True, return_dict_in_generate=True)
    answers = [generate(torch.tensor([prompt])) for prompt in PROMPTS]
    best_two = np.sort(torch.cat([logits for answer in answers for logits in answer.logits]).numpy())[:, -2:]
    assert np.diff(best_two).min() > 1e-3  # or rounding could tip a token: take another seed
    return folder, [answer.sequences[0].tolist() for answer in answers]

  return of


@pytest.mark.parametrize('name, draft', [
    pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.slow) for pair in itertools.product(GREEDY, DRAFTS)])
def test_greedy_text_of_transformers(their_text, tmp_path, name, draft):
  """64 tokens after each of three prompts, twelve windows long where there is one."""
  folder, expected = their_text(name)
  assert all(len(set(text[-NEW:])) > 12 for text in expected)
  model, other = Transformer(*hf.load(folder, dtype='float32')), load(tmp_path, GREEDY[name][0], 9)
  state = write(model, DRAFTS[draft](model, other), num_draft=4)
  assert fakes.texts(state) == expected
  tested, accepted = state.stats.tested.sum(), state.stats.accepted.sum()
  assert draft == 'none' or accepted < tested and (accepted > 0 or draft == 'model')


# Windows in the loop.

WINDOWED = {'mistral_3': (GREEDY['mistral'][0] | {'sliding_window': 3}, 1)} | {
    name: GREEDY[name] for name in ('mistral', 'qwen2', 'gemma2', 'gemma3')}
EACH_K = [pytest.param(name, K, marks=[] if (name, K) in (('mistral_3', 3), ('gemma3', 6)) else pytest.mark.slow)
          for name in WINDOWED for K in range(1, 9)]


@pytest.fixture(scope='module')
def windowed(tmp_path_factory):
  """Of a name in WINDOWED: a random model, one near it, and the greedy text of the first without a draft."""

  @functools.cache
  def of(name):
    config, seed = WINDOWED[name]
    model, other = (load(tmp_path_factory.mktemp(name), config, seed) for seed in (seed, 9))
    near = jax.tree.map(lambda array, noise: array + 0.15 * noise, model.params, other.params)
    return model, model.replace(params=near), fakes.texts(write(model, None, num_draft=1))

  return of


@pytest.mark.parametrize('name, num_draft', EACH_K)
def test_windows_see_the_text_after_rejections_and_nothing_else(windowed, name, num_draft):
  """A draft that is rejected anywhere in a round leaves the text of plain decoding; the model itself never is."""
  model, near, expected = windowed(name)
  state = write(model, near, num_draft)
  assert fakes.texts(state) == expected
  rejected = (state.stats.tested - state.stats.accepted).sum(axis=0)
  assert state.stats.accepted.sum() > 15 and rejected.sum() > 15, (state.stats.accepted.sum(0), rejected)

  state = write(model, model, num_draft, temperature=1.0)
  assert fakes.texts(state) != expected
  np.testing.assert_array_equal(state.stats.accepted, state.stats.tested)
  np.testing.assert_array_equal(state.round, -(-NEW // (num_draft + 1)))
