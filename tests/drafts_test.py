"""Prompt lookup against a search written out in Python."""

import jax
import numpy as np
import pytest

from cactus_jax.drafts import PromptLookup

VOCAB, SLOTS, WIDTH = 3, 4, 24
propose = jax.jit(lambda source, tokens, length: source.propose(tokens, length, SLOTS, VOCAB))


def look_up(text, ngram, num_draft):
  """What follows the latest earlier occurrence of the longest suffix of at most ngram tokens, or None."""
  for size in range(min(ngram, len(text) - 1), 0, -1):
    for end in range(len(text) - 1, size - 1, -1):  # text[end - size:end] ends before the last token
      if text[end - size : end] == text[-size:]:
        text = list(text)
        for _ in range(num_draft):
          text.append(text[end])
          end += 1
        return text[-num_draft:]
  return None


@pytest.mark.parametrize('ngram', [1, 2, 3, 5])
def test_proposals_are_those_of_a_plain_search(ngram):
  """Random texts of every length, with garbage behind them."""
  rng = np.random.default_rng(ngram)
  tokens = rng.integers(0, VOCAB, (500, WIDTH)).astype(np.int32)
  length = (np.arange(500) % WIDTH + 1).astype(np.int32)
  draft = jax.tree.map(np.asarray, propose(PromptLookup(ngram), tokens, length))
  expected = [look_up(row[:n].tolist(), ngram, SLOTS) for row, n in zip(tokens, length)]
  missing = np.array([drafted is None for drafted in expected])
  assert 10 < missing.sum() < 400
  np.testing.assert_array_equal(draft.num_drafted, np.where(missing, 0, SLOTS))
  for row in np.flatnonzero(~missing):
    assert draft.tokens[row].tolist() == expected[row], row


def test_the_law_is_certain_of_the_proposal():
  tokens = np.int32([[1, 2, 0, 1, 2, 9, 9, 9]])
  draft = propose(PromptLookup(2), tokens, np.int32([5]))
  assert draft.tokens.tolist() == [[0, 1, 2, 0]]
  np.testing.assert_array_equal(draft.probs, np.eye(VOCAB, dtype=np.float32)[[[0, 1, 2, 0]]])


@pytest.mark.parametrize(
  'text, expected',
  [
    ([1, 1], [1, 1, 1, 1]),  # continued with its own period
    ([2, 0, 2, 0], [2, 0, 2, 0]),
    ([0, 1, 2, 0, 2, 2, 0], [2, 2, 0, 2]),  # two tokens beat the later one
    ([0, 1, 0, 2, 0], [2, 0, 2, 0]),  # of one token, the latest
  ],
  ids=str,
)
def test_by_hand(text, expected):
  tokens = np.full((1, WIDTH), 1, np.int32)
  tokens[0, : len(text)] = text
  draft = propose(PromptLookup(2), tokens, np.int32([len(text)]))
  assert draft.num_drafted.tolist() == [SLOTS]
  assert draft.tokens.tolist() == [expected]


@pytest.mark.parametrize('text', [[0], [0, 1], [0, 1, 2]], ids=str)
def test_nothing_is_proposed_without_an_earlier_occurrence(text):
  """What lies behind the text is no occurrence."""
  tokens = np.full((1, WIDTH), text[-1], np.int32)
  tokens[0, : len(text)] = text
  draft = propose(PromptLookup(3), tokens, np.int32([len(text)]))
  assert draft.num_drafted.tolist() == [0]
  assert np.all((np.asarray(draft.tokens) >= 0) & (np.asarray(draft.tokens) < VOCAB))


@pytest.mark.parametrize('ngram', [0, -1, 2.0, '3'], ids=repr)
def test_an_ngram_of_no_tokens_is_refused(ngram):
  with pytest.raises(
    ValueError, match=r'ngram=.*: prompt lookup matches the last 1 or more tokens; 3 is a good start\.'
  ):
    PromptLookup(ngram)
