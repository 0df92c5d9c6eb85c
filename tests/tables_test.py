"""Tables of answers: figures against hand-computed ones, the bootstrap against known laws, and what is refused.

Statistical tests have fixed seeds; their docstrings say how far off chance alone could bring them.
"""

import csv
import io
import itertools
import json
import math

import numpy as np
import pytest
from lib import answers as answers_lib
from lib import tables


def answer(doc=0, arm='exact', num_draft=2, seed=0, **values):
  """A row as experiments/sweep.py writes it."""
  drafts = [0] * (0 if arm == 'plain' else num_draft)
  return {
      'task': 'gsm8k', 'doc': doc, 'arm': arm, 'num_draft': len(drafts), 'seed': seed, 'score': 1.0, 'metrics': {},
      'finish_reason': 'eos', 'new_tokens': 10, 'decoded': 10, 'verifier_calls': 5, 'accepted_at': drafts,
      'tested_at': drafts, 'kl': None, 'decided': None, 'max_kl': None, 'seconds': 1.0, 'text': '',
  } | values


def summarize(rows, **run):
  return tables.summarize(rows[0]['task'], rows, **run)


def by_arm(rows):
  return {row['arm']: row for row in summarize(rows)['arms']}


def value(found):
  return found['value']


ROUNDS = [
    answer(0, 'plain', score=0.0, new_tokens=6, decoded=6, verifier_calls=6, seconds=3.0),
    answer(1, 'plain', score=1.0, new_tokens=10, decoded=10, verifier_calls=10, seconds=5.0),
    answer(0, score=1.0, new_tokens=3, decoded=3, verifier_calls=1, accepted_at=[1, 1], tested_at=[1, 1], seconds=1.0,
           kl=0.0, metrics={'strict': 1.0, 'loose': 1.0}),
    answer(1, score=0.0, new_tokens=12, decoded=12, verifier_calls=9, accepted_at=[3, 0], tested_at=[9, 3], seconds=4.0,
           kl=0.0, finish_reason='length', metrics={'strict': 0.0, 'loose': 0.5}),
    answer(0, 'cactus delta=1', score=0.5, new_tokens=3, decoded=3, verifier_calls=1, accepted_at=[1, 1],
           tested_at=[1, 1], seconds=1.0, kl=0.3, finish_reason='stop'),
    answer(1, 'cactus delta=1', score=1.0, new_tokens=9, decoded=13, verifier_calls=4, accepted_at=[4, 2],
           tested_at=[4, 4], seconds=2.0, kl=1.2),
]


def test_figures_by_hand():
  """The mean of the ratios of answers would be AL 1.17 and 1.75, acceptance 62 % and 88 %, 0.096 nats."""
  found = by_arm(ROUNDS)
  exact, cactus, plain = found['exact'], found['cactus delta=1'], found['plain']
  assert value(exact['accepted_len']) == pytest.approx(5 / 10)
  assert value(exact['acceptance_rate']) == pytest.approx(5 / 14)
  assert value(exact['rejected_per_token']) == pytest.approx((2 - 0.5) / (0.5 + 1))
  assert value(exact['kl_per_token']) == 0
  assert exact['rejected_change'] is None and exact['score_vs_arm'] is None, 'it is what the others are compared with'
  assert value(cactus['accepted_len']) == pytest.approx(8 / 5)
  assert value(cactus['acceptance_rate']) == pytest.approx(8 / 10)
  assert value(cactus['rejected_change']) == pytest.approx((2 - 1.6) / (1.6 + 1) / 1 - 1)
  assert value(cactus['kl_per_token']) == pytest.approx(1.5 / 16), 'over what was decoded, past stop strings too'
  assert cactus['calls_per_solved'] == pytest.approx(5 / 1.5) and exact['calls_per_solved'] == 10
  assert cactus['answer_length'] == 6 and exact['answer_length'] == 7.5
  assert (exact['finish_rate'], cactus['finish_rate']) == (0.5, 1.0)
  assert exact['tokens_per_second'] == 3 and cactus['tokens_per_second'] == 4 and plain['tokens_per_second'] == 2
  assert value(cactus['speed_up']) == pytest.approx(2) and value(exact['speed_up']) == pytest.approx(1.5)
  assert plain['speed_up'] is None
  assert value(cactus['score']) == 0.75 and value(cactus['score_vs_arm']) == pytest.approx(0.25)
  assert value(cactus['score_vs_reference']) == pytest.approx(0.25) and value(exact['score_vs_reference']) == 0
  assert exact['metrics'] == {'loose': 0.75, 'strict': 0.5}
  assert cactus['sums']['accepted_at'] == [5, 3] and cactus['sums']['tested_at'] == [5, 5]
  assert all(plain[name] is None for name in ('accepted_len', 'acceptance_rate', 'rejected_per_token', 'kl_per_token'))


def test_standard_errors_of_a_score():
  """Binomial for one seed, and for several that of the mean of their means."""
  one_seed = [answer(doc, score=float(doc > 0)) for doc in range(4)]
  found = by_arm(one_seed)['exact']['score']
  assert found == {'value': 0.75, 'error_over_seeds': None, 'error_over_documents': pytest.approx(
      math.sqrt(0.75 * 0.25 / 3))}
  assert tables.standard_error(found) == (found['error_over_documents'], 'documents')
  found = by_arm(one_seed + [answer(doc, seed=1, score=float(doc > 1)) for doc in range(4)])['exact']['score']
  assert found['value'] == 0.625
  assert tables.standard_error(found) == (pytest.approx(np.std([0.75, 0.5], ddof=1) / math.sqrt(2)), 'seeds')
  assert found['error_over_documents'] == pytest.approx(np.std([0, 0.5, 1, 1], ddof=1) / 2)


def test_seeds_of_unequal_size_are_compared_on_documents_that_all_have():
  rows = [answer(doc, score=float(doc > 1)) for doc in range(4)] + [answer(doc, seed=1) for doc in range(2)]
  found = by_arm(rows)['exact']['score']
  assert found['value'] == pytest.approx((0.5 + 0.5 + 1 + 1) / 4), 'a document counts once, whatever its seeds'
  assert found['error_over_seeds'] == pytest.approx(np.std([0, 1], ddof=1) / math.sqrt(2))


# The bootstrap.


def rows_of(scores_AD, arms=('exact', 'cactus delta=1'), seed=0, **columns):
  """A row for each arm and document; columns: name -> values [arm, document]."""
  return [answer(doc, arm, seed=seed, score=float(scores_AD[i, doc]),
                 **{name: values[i, doc].item() for name, values in columns.items()})
          for i, arm in enumerate(arms) for doc in range(scores_AD.shape[1])]


def correlated_scores(rng, docs):
  """Scores of two arms that a document is hard or easy for alike: f64[2, docs]."""
  hard = rng.normal(size=docs)
  return np.clip(0.5 + 0.2 * hard + 0.05 * rng.normal(size=(2, docs)), 0, 1)


def test_difference_has_the_error_that_is_known():
  """Of a mean of D paired differences, s / sqrt(D), and a normal law.

  By chance the standard error of 10,000 resamples is off by 0.7 %, an end of the interval by 3 % of it, p by 0.005.
  """
  scores = correlated_scores(np.random.default_rng(1), docs=400)
  scores[1] -= 0.004
  differences = scores[1] - scores[0]
  error = differences.std() / math.sqrt(400)
  found = by_arm(rows_of(scores))['cactus delta=1']['score_vs_arm']
  assert found['value'] == pytest.approx(differences.mean())
  assert found['standard_error'] == pytest.approx(error, rel=0.03)
  np.testing.assert_allclose(found['interval'], differences.mean() + np.array([-1.96, 1.96]) * error, atol=0.12 * error)
  assert found['p'] == pytest.approx(math.erfc(abs(differences.mean()) / error / math.sqrt(2)), abs=0.02)
  assert 0.05 < found['p'] < 0.6, 'neither end of the scale'
  unpaired = math.sqrt(scores.var(axis=1).sum() / 400)
  assert error < 0.4 * unpaired, 'pairing matters here'


@pytest.mark.parametrize('tenths', [(2, 4, -3), (3, 2, 1, -3)])
def test_p_is_of_all_ways_to_draw(tenths):
  """Of the 27 or 256 ways to draw documents with replacement; those that cancel count on both sides. Chance: 0.01."""
  sums = np.array([sum(drawn) for drawn in itertools.product(tenths, repeat=len(tenths))])
  assert (sums == 0).any() == (len(tenths) == 4)
  scores = np.stack([np.full(len(tenths), 0.5), 0.5 + np.array(tenths) / 10])
  found = by_arm(rows_of(scores))['cactus delta=1']['score_vs_arm']
  assert found['p'] == pytest.approx(2 * min((sums <= 0).mean(), (sums >= 0).mean()), abs=0.03)


def test_pairs_are_resampled_together():
  """A rule that takes half the time on every document is twice as fast in every resample, however these differ."""
  rng = np.random.default_rng(2)
  tokens, pace, scores = rng.integers(1, 500, size=50), rng.lognormal(size=50), rng.random(50)
  rows = rows_of(np.stack([scores, scores]), new_tokens=np.stack([tokens, tokens]),
                 seconds=tokens * pace / np.array([[10.0], [20.0]]))
  found = by_arm(rows)['cactus delta=1']
  assert found['speed_up'] == {'value': pytest.approx(2), 'interval': [pytest.approx(2), pytest.approx(2)]}
  assert found['score_vs_arm']['interval'] == [0, 0]
  assert (found['score_vs_arm']['p'], found['score_vs_arm']['standard_error']) == (1, 0)


def test_seeds_are_not_documents():
  """Four seeds that answer alike tell no more than one."""
  scores = correlated_scores(np.random.default_rng(3), docs=60)
  one = by_arm(rows_of(scores))['cactus delta=1']
  four = by_arm([row for seed in range(4) for row in rows_of(scores, seed=seed)])['cactus delta=1']
  for name in ('value', 'standard_error', 'interval', 'p', 'documents'):
    assert four['score_vs_arm'][name] == pytest.approx(one['score_vs_arm'][name], abs=1e-9)
  assert (one['score_vs_arm']['answers'], four['score_vs_arm']['answers']) == (60, 240)
  assert four['accepted_len'] == one['accepted_len']


def test_intervals_cover_the_truth():
  """Of 95 % intervals from 600 samples of 60 documents, and of p below 0.05 where nothing differs.

  The standard error of each share is 0.9 %, and percentile intervals of so few documents are known to cover 94 %.
  """
  rng, pairs = np.random.default_rng(4), []
  for _ in range(600):
    tokens = rng.lognormal(4, 0.5, size=60).round() + rng.integers(1, 20, size=(2, 60))
    pace = rng.lognormal(0, 0.5, size=60) * rng.lognormal(0, 0.2, size=(2, 60))
    seconds = tokens * pace / np.array([[10.0], [15.0]])
    cells = np.zeros((2, 1, 60, len(answers_lib.SUMS)))
    for name, values in (('answers', 1), ('score', correlated_scores(rng, 60)), ('new_tokens', tokens),
                         ('seconds', seconds)):
      cells[:, 0, :, answers_lib.SUMS.index(name)] = values
    arms = [answers_lib.Arm('', 2, own, [], [], {}, {}) for own in cells]
    pairs.append({name: column for name, column in tables.pair(arms[1], arms[0]).items()
                  if 'calls' not in name and 'accepted' not in name})
  score_covered = ratio_covered = called_different = 0
  for start in range(0, 600, 100):
    for found in tables.resampled(pairs[start : start + 100]):
      low, high = tables.estimate(found['new_tokens'] / found['seconds'] / (
          found['other_new_tokens'] / found['other_seconds']))['interval']
      ratio_covered += low < 1.5 < high
      difference = tables.score_difference(found)
      score_covered += difference['interval'][0] < 0 < difference['interval'][1]
      called_different += difference['p'] < 0.05
  assert 0.91 < score_covered / 600 < 0.97
  assert 0.91 < ratio_covered / 600 < 0.97
  assert 0.03 < called_different / 600 < 0.09


def test_accepted_length_has_the_error_of_a_ratio():
  """By the delta method: s of (accepted - AL calls) over mean calls and sqrt(D). Chance: 3 % for an end."""
  rng = np.random.default_rng(5)
  calls = rng.integers(1, 60, size=(1, 300))
  accepted = rng.binomial(2 * calls, rng.beta(5, 3, size=(1, 300)))
  at = np.stack([accepted - accepted // 2, accepted // 2], axis=-1)
  rows = [answer(doc, verifier_calls=int(calls[0, doc]), accepted_at=at[0, doc].tolist(),
                 tested_at=[int(calls[0, doc])] * 2) for doc in range(300)]
  found = by_arm(rows)['exact']['accepted_len']
  length = accepted.sum() / calls.sum()
  error = (accepted - length * calls).std() / calls.mean() / math.sqrt(300)
  assert found['value'] == pytest.approx(length)
  np.testing.assert_allclose(found['interval'], length + np.array([-1.96, 1.96]) * error, atol=0.15 * error)


# At equal nats.


def on_a_front(spent, kept, docs=40, rng=8, left_out=()):
  """Answers of arms of m = 2 with ten calls a document on average, spending and keeping so much in each, up to a factor
  that is the document's own."""
  factors = np.random.default_rng(rng).integers(1, 20, size=docs)
  return [answer(doc, arm, verifier_calls=int(factor), decoded=int(10 * factor), kl=float(spent[arm] * 10 * factor),
                 accepted_at=[int(kept[arm] * factor), 0], tested_at=[int(factor)] * 2)
          for arm in spent for doc, factor in enumerate(factors) if (arm, doc) not in left_out]


SPENT = {'exact': 0.0, 'clamp tau=1': 0.3, 'clamp tau=2': 0.1, 'cactus delta=1': 0.15, 'cactus delta=0.1': 0.05,
         'typical': 0.31, 'static tau=1': 0.3, 'static tau=0': 0.0}
KEPT = {'exact': 1, 'clamp tau=1': 8, 'clamp tau=2': 4, 'cactus delta=1': 3, 'cactus delta=0.1': 3, 'typical': 2,
        'static tau=1': 7, 'static tau=0': 2}


def test_others_beside_the_front_at_equal_nats():
  """Between its arms and SpS. Nothing but the length varies between documents, so intervals have no width."""
  rows = on_a_front(SPENT, KEPT)
  others = [row | {'num_draft': 3, 'accepted_at': [0, 0, 0], 'tested_at': [0, 0, 0]} for row in rows]  # another m
  found = {row['arm']: row for row in summarize([*others, *rows])['arms'] if row['num_draft'] == 2}
  for arm, more in {'cactus delta=1': 5 - 3, 'cactus delta=0.1': 2.5 - 3, 'static tau=1': 8 - 7,
                    'static tau=0': 1 - 2}.items():
    assert found[arm]['front_above'] == {'value': pytest.approx(more), 'interval': [pytest.approx(more)] * 2}, arm
  assert found['typical']['front_above'] is None, 'it spends more than any arm of the front'
  assert found['exact']['front_above'] is found['clamp tau=1']['front_above'] is None
  header, rows = tables.shown(summarize(rows))
  cells = {row[1]: row[header.index('clamp, equal KL')] for row in rows}
  assert cells['cactus delta=1'] == '+2.00 [+2.00, +2.00]' and cells['typical'] == '-'


def test_arms_of_the_front_that_lack_answers_are_left_out():
  """Of a sweep that is under way: the curve is coarser until they have them, and no fewer documents are compared."""
  rows = on_a_front(SPENT | {'clamp tau=3': 0.2}, KEPT | {'clamp tau=3': 100}, left_out=[('clamp tau=3', 3)])
  assert value(by_arm(rows)['cactus delta=1']['front_above']) == pytest.approx(5 - 3)
  for row in rows:
    if row['arm'] == 'clamp tau=2' and row['doc'] == 5:
      row['kl'] = math.nan
  assert value(by_arm(rows)['cactus delta=1']['front_above']) == pytest.approx(1 + 7 * 0.15 / 0.3 - 3)
  rows = on_a_front(SPENT, KEPT, left_out=[('clamp tau=1', 3)])
  assert by_arm(rows)['cactus delta=1']['front_above'] is None, 'no arm spends more'
  rows = on_a_front(SPENT, KEPT, left_out=[('cactus delta=1', doc) for doc in range(30)])
  for row in rows:
    if row['doc'] < 30 and row['arm'].startswith('clamp'):
      row['accepted_at'] = [0, 0]  # on documents that the row lacks
    elif row['doc'] < 35 and row['arm'] == 'cactus delta=1':
      row |= {'accepted_at': [0, 0], 'kl': None}  # and where it has no ledger
  assert value(by_arm(rows)['cactus delta=1']['front_above']) == pytest.approx(5 - 3)


def test_no_front_where_there_is_none():
  without = {arm: spent for arm, spent in SPENT.items() if not arm.startswith('clamp')}
  rows = on_a_front(without, KEPT)
  assert {row['front_above'] for row in by_arm(rows).values()} == {None}
  assert 'clamp, equal KL' not in tables.markdown(summarize(rows))
  no_ledger = [row | {'kl': None} for row in on_a_front(SPENT, KEPT)]
  assert {row['front_above'] for row in by_arm(no_ledger).values()} == {None}


def test_equal_nats_have_the_error_that_is_known():
  """Of a cell between two points, by the delta method. Chance: 3 % for an end."""
  rng, docs = np.random.default_rng(9), 300
  calls = rng.integers(5, 60, size=docs)
  sums = {}
  for i, (spent, kept) in enumerate([(0, 0.2), (0.2, 0.5), (0.1, 0.3)]):
    of = ('low_', 'high_', '')[i]
    sums |= {f'{of}calls': calls.astype(float), f'{of}accepted': rng.binomial(calls, kept).astype(float),
             f'{of}kl': spent * calls * rng.gamma(4, 0.25, size=docs), f'{of}kl_tokens': calls.astype(float)}
  rate = lambda name: sums[name].sum() / calls.sum()
  (x0, x1, x), (y0, y1, y) = ([rate(f'{of}{name}') for of in ('low_', 'high_', '')] for name in ('kl', 'accepted'))
  slope, at = (y1 - y0) / (x1 - x0), (x - x0) / (x1 - x0)
  gain = y0 + slope * (x - x0) - y
  residual = lambda of, name: sums[of + name] - rate(of + name) * calls
  spread = ((1 - at) * residual('low_', 'accepted') + at * residual('high_', 'accepted') - residual('', 'accepted')
            + slope * (residual('', 'kl') - (1 - at) * residual('low_', 'kl') - at * residual('high_', 'kl')))
  error = spread.std() / calls.mean() / math.sqrt(docs)
  (resampled,) = tables.resampled([sums])
  found = tables.above(resampled)
  assert found['value'] == pytest.approx(gain)
  np.testing.assert_allclose(found['interval'], gain + np.array([-1.96, 1.96]) * error, atol=0.15 * error)


# Grids that are not whole, and rows that lack something.


def shuffled(rows, seed):
  return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]


def made_up(docs=40, seeds=2, drafts=(2, 3), task='gsm8k', rng=6):
  """A grid of answers of five arms."""
  rng, rows = np.random.default_rng(rng), []
  for arm in ('plain', 'exact', 'cactus delta=0.5', 'cactus delta=1', 'typical'):
    for num_draft in (0,) if arm == 'plain' else drafts:
      for seed in range(seeds):
        for doc in range(docs):
          calls = int(rng.integers(3, 30))
          kept = np.sort(rng.integers(0, calls + 1, size=num_draft))[::-1].tolist()
          rows.append(answer(
              doc, arm, num_draft, seed, task=task, score=float(rng.integers(2)), metrics={'other': rng.random()},
              new_tokens=calls + sum(kept), decoded=calls + sum(kept) + 1, verifier_calls=calls, accepted_at=kept,
              tested_at=[calls, *kept][:num_draft], kl=float(rng.exponential()) if num_draft else None,
              seconds=float(rng.exponential()), finish_reason=str(rng.choice(['eos', 'length']))))
  return rows


def test_the_order_of_rows_changes_nothing():
  rows = made_up()
  found = summarize(rows)
  for seed in range(2):
    again = summarize(shuffled(rows, seed))
    assert again == found
    assert [write(again) for write in tables.WRITERS.values()] == [write(found) for write in tables.WRITERS.values()]


def test_arms_come_in_order():
  rows = [answer(arm=arm, num_draft=m) for m in (10, 2) for arm in (
      'typical', 'cactus delta=10', 'cactus delta=0.5', 'exact', 'cactus delta=2', 'clamp tau=0.1')]
  assert [(row['num_draft'], row['arm']) for row in summarize([*rows, answer(arm='plain')])['arms']] == [
      (0, 'plain')] + [(m, arm) for m in (2, 10) for arm in (
          'exact', 'cactus delta=0.5', 'cactus delta=2', 'cactus delta=10', 'clamp tau=0.1', 'typical')]


def test_comparisons_are_of_what_both_arms_have():
  """The arm lacks document 0 of both seeds, and seed 1 of document 1."""
  score = {(doc, seed): (doc + 2 * seed) % 3 / 2 for doc in range(4) for seed in range(2)}
  whole = [answer(doc, seed=seed, score=score[doc, seed], seconds=1.0 + doc) for doc, seed in score]
  part = [answer(doc, 'typical', seed=seed, score=0.25, seconds=1.0) for doc, seed in score
          if doc > 1 or (doc, seed) == (1, 0)]
  found = summarize(whole + part)
  row = found['arms'][1]
  assert (row['answers'], row['documents'], row['seeds']) == (5, 3, 2)
  compared = row['score_vs_arm']
  assert (compared['documents'], compared['answers']) == (3, 5)
  theirs = [score[1, 0], (score[2, 0] + score[2, 1]) / 2, (score[3, 0] + score[3, 1]) / 2]
  assert compared['value'] == pytest.approx(0.25 - np.mean(theirs))
  assert value(row['speed_up']) == pytest.approx((2 + 3 + 3 + 4 + 4) / 5)
  assert any(note.startswith('Incomplete: typical m=2 (5 of 8).') for note in found['notes'])
  assert not any('Incomplete' in note for note in summarize(whole)['notes'])


@pytest.mark.parametrize('against, header, of', [
    ('exact', 'vs SpS', 'exact of the same m'), ('typical', 'vs typical', 'typical of the same m'),
    ('plain', 'vs plain', 'plain on the same documents')])
def test_scores_are_compared_with_any_arm(against, header, of):
  """Of the same m, or with plain; what is rejected is still compared with SpS, and times with plain."""
  rows = made_up(docs=20)
  found, usual = summarize(rows, against=against), summarize(rows)
  arms = {(row['arm'], row['num_draft']): row for row in found['arms']}
  scores = {(row['arm'], row['num_draft'], row['doc'], row['seed']): row['score'] for row in rows}
  assert {m for _, m in arms} == {0, 2, 3}
  for (arm, m), row in arms.items():
    other = against, 0 if against == 'plain' else m
    if other == (arm, m) or other not in arms:
      assert row['score_vs_arm'] is None
      continue
    differences = [score - scores[*other, doc, seed]
                   for (name, n, doc, seed), score in scores.items() if (name, n) == (arm, m)]
    assert value(row['score_vs_arm']) == pytest.approx(np.mean(differences))
  for row, other in zip(found['arms'], usual['arms']):
    for name in ('rejected_change', 'speed_up'):
      assert (row[name] and value(row[name])) == (other[name] and pytest.approx(value(other[name])))
  assert header in tables.shown(found)[0] and any(note.startswith(f'{header}: difference from {of}')
                                                  for note in found['notes'])


def test_arms_that_cannot_be_compared_are_named():
  """Nothing of the same m, or no document that both have; and where no score differs, that this is no finding."""
  rows = [answer(doc, arm, m, score=float(arm == 'top_k' and doc == 0)) for doc in range(2)
          for arm, m in (('plain', 0), ('exact', 2), ('typical', 2), ('typical', 3), ('top_k', 2))]
  lacking = lambda found: [note for note in found['notes'] if note.startswith('Scores not compared')]
  say_nothing = lambda found: any('these scores say nothing' in note for note in found['notes'])
  found = summarize(rows)
  assert lacking(found) == ['Scores not compared, since exact has no answer to the same documents at the same m: '
                            'typical m=3.'] and not say_nothing(found)
  apart = summarize([row for row in rows if row['doc'] == (row['arm'] == 'typical')], against='typical')
  assert lacking(apart)[0].endswith(': exact m=2, top_k m=2.') and 'vs typical' not in tables.shown(apart)[0]
  assert not any('difference from' in note for note in apart['notes'])
  assert any(note.startswith('[95 % intervals] are from') for note in apart['notes'])
  assert not lacking(summarize(rows, against='plain'))
  assert say_nothing(summarize([row | {'score': 0.5} for row in rows]))


def test_what_is_not_there_is_left_out():
  """No scores, no ledger, no plain, no SpS of this m, nothing shared: no column, and never a wrong number."""
  rows = [answer(doc, arm, score=None) for doc in range(3) for arm in ('exact', 'typical')]
  found = summarize(rows)
  header, _ = tables.shown(found)
  assert 'AL' in header and not {'score %', 'vs SpS', 'p', 'calls/solved', 'KL/token'} & set(header)
  assert found['reference'] == 'exact' and 'since there is no plain' in ' '.join(found['notes'])
  assert [row['speed_up'] and row['speed_up']['value'] for row in found['arms']] == [None, 1]
  rows = [answer(arm='typical', num_draft=3), answer(arm='exact', num_draft=2), answer(1, 'plain')]
  for row in summarize(rows)['arms']:
    assert row['score_vs_arm'] is row['speed_up'] is row['rejected_change'] is None


def test_notes_are_of_columns_that_are_there():
  rows = [answer(doc, arm) for doc in range(2) for arm in ('exact', 'typical')]
  starts = lambda found: {note.split(':')[0] for note in found['notes']}
  shown, alone = summarize(rows), summarize(rows[1::2])
  for column, words in (('Rej %', 'Rej'), ('speed-up', 'Speed-up')):
    assert column in tables.shown(shown)[0] and words in starts(shown)
    assert column not in tables.shown(alone)[0] and words not in starts(alone)


def test_nothing_solved_nothing_timed_and_one_document():
  found = by_arm([answer(arm=arm, score=0.0, seconds=0.0) for arm in ('plain', 'exact', 'typical')])['typical']
  assert found['calls_per_solved'] is None and found['tokens_per_second'] is None and found['speed_up'] is None
  assert found['accepted_len'] == {'value': 0, 'interval': None}, 'one document is not resampled'
  assert found['score_vs_arm'] == {'value': 0, 'interval': None, 'standard_error': None, 'p': None, 'documents': 1,
                                   'answers': 1}
  assert tables.markdown(summarize([answer(score=0.0)])).startswith('## gsm8k')


def test_ledgers_of_some_answers():
  """KL per token is over the answers that have one; an infinite one stays infinite, and is no number's neighbour."""
  rows = [answer(doc, kl=kl, decoded=20) for doc, kl in enumerate((1.0, None, math.nan, 2.0))]
  found = summarize(rows)
  assert value(found['arms'][0]['kl_per_token']) == pytest.approx(3 / 40)
  assert any('exact m=2 (50 %)' in note for note in found['notes'])
  infinite = by_arm([answer(doc, kl=math.inf if doc else 1.0) for doc in range(3)])['exact']
  assert infinite['kl_per_token'] == {'value': math.inf, 'interval': None}
  assert infinite['accepted_len']['interval'] == [0, 0]


def test_some_answers_without_a_score_are_refused():
  with pytest.raises(ValueError, match='gsm8k: 1 of 2 answers have no score'):
    summarize([answer(), answer(1, score=None)])


def test_answers_that_broke_off_are_named():
  notes = summarize([answer(), answer(1, finish_reason='nan'), answer(2, finish_reason='length')])['notes']
  assert [note for note in notes if 'nan' in note] == [
      'Answers that neither finished nor reached their length: exact m=2 (1 nan).']


def test_many_rows():
  """20,000 rows: every figure against its plain formula, and the shuffled rows against them."""
  rng, docs, seeds = np.random.default_rng(7), 500, 4
  arms = [('plain', 0)] + [(arm, m) for m in (4, 8, 16) for arm in ('exact', 'cactus delta=1', 'clamp tau=0.6')]
  rows = []
  for arm, m in arms:
    for seed in range(seeds):
      calls = rng.integers(5, 50, size=docs)
      kept = -np.sort(-rng.integers(0, calls[:, None] + 1, size=(docs, m)), axis=1)
      scores, seconds = rng.random(docs), rng.exponential(size=docs)
      rows += [answer(doc, arm, m, seed, score=scores[doc], verifier_calls=int(calls[doc]), seconds=seconds[doc],
                      accepted_at=kept[doc].tolist(), tested_at=[int(calls[doc]), *kept[doc].tolist()][:m],
                      new_tokens=int(calls[doc] + kept[doc].sum()), kl=scores[doc]) for doc in range(docs)]
  assert len(rows) == 20_000
  found = {(row['arm'], row['num_draft']): row for row in summarize(shuffled(rows, 0))['arms']}
  total = lambda own, name: sum(sum(row[name]) if isinstance(row[name], list) else row[name] for row in own)
  for arm, m in arms:
    own, row = [row for row in rows if (row['arm'], row['num_draft']) == (arm, m)], found[arm, m]
    assert row['answers'] == 2000 and value(row['score']) == pytest.approx(total(own, 'score') / 2000)
    assert row['tokens_per_second'] == pytest.approx(total(own, 'new_tokens') / total(own, 'seconds'))
    if m:
      assert value(row['accepted_len']) == pytest.approx(total(own, 'accepted_at') / total(own, 'verifier_calls'))
      assert value(row['acceptance_rate']) == pytest.approx(total(own, 'accepted_at') / total(own, 'tested_at'))
      assert value(row['kl_per_token']) == pytest.approx(total(own, 'kl') / total(own, 'decoded'))
      assert value(row['speed_up']) == pytest.approx(row['tokens_per_second'] / found['plain', 0]['tokens_per_second'])
      low, high = row['accepted_len']['interval']
      assert low < value(row['accepted_len']) < high
    if m and arm != 'exact':
      sps = found['exact', m]
      assert value(row['score_vs_arm']) == pytest.approx(value(row['score']) - value(sps['score']))
      assert value(row['rejected_change']) == pytest.approx(
          value(row['rejected_per_token']) / value(sps['rejected_per_token']) - 1)


# What is shown.


def test_the_table_that_is_printed():
  run = {'settings': {'verifier': 'big', 'dtype': None, 'temperature': 0, 'tasks': {'gsm8k': {'metric': 'strict'}}},
         'device': 'cpu', 'git': 'abc'}
  found = summarize(ROUNDS, run=run)
  text = tables.markdown(found)
  header, rows = tables.shown(found)
  lines = text.splitlines()
  assert lines[:2] == ['## gsm8k', ''] and [cell.strip() for cell in lines[2].strip('| ').split('|')] == header
  cells = dict(zip(header, rows[2]))
  assert len(cells) == len(header) and cells | {
      'm': '2', 'arm': 'cactus delta=1', 'answers': '2', 'score %': '75.0 ± 25.0', 'AL': '1.60', 'Rej %': '-85',
      'accepted %': '80.0', 'KL/token': '0.0938', 'calls/solved': '3.3', 'length': '6', 'finished %': '100.0',
      'tokens/s': '4.0'} == cells
  assert cells['vs SpS'] == '+25.0 [-50.0, +100.0]' and cells['speed-up'].startswith('2.00 [')
  assert dict(zip(header, rows[0]))['AL'] == '-'
  assert '* 2 documents, 1 seed; verifier big, temperature 0; cpu; abc.' in lines
  assert '* Score: strict, ± one standard error over documents.' in lines
  assert '* Intervals and p of fewer than 30 documents promise too much.' in lines


def test_the_notes_say_what_errors_are_over():
  rows = [answer(doc, seed=seed) for doc in range(2) for seed in range(2)]
  assert 'over seeds.' in summarize(rows)['notes'][1]
  note = summarize([*rows, answer(arm='typical'), answer(1, 'typical')])['notes'][1]
  assert note.endswith('over seeds (exact m=2) or documents (typical m=2).')


@pytest.mark.parametrize('p, shown', [(0.0002, '<0.001'), (0.0012, '0.001'), (0.6, '0.600'), (1.0, '1.000')])
def test_p_as_it_is_shown(p, shown):
  assert tables.COLUMNS['p']({'score_vs_arm': {'p': p}}) == shown


def test_latex_is_escaped():
  text = tables.latex(summarize([answer(doc, arm) for doc in range(2) for arm in (
      'exact', 'token_v3 alpha=0.2', r'odd & 100% #1 ~^\ {x} $<a>$')] + [answer(doc, 'plain') for doc in range(2)]))
  assert r'token\_v3 alpha=0.2' in text
  assert (r'odd \& 100\% \#1 \textasciitilde{}\textasciicircum{}\textbackslash{} \{x\} \$$<$a$>$\$') in text
  body = [line for line in text.splitlines() if not line.startswith('%')]
  assert body[0] == r'\begin{tabular}{rl' + 'r' * (body[2].count(' & ') - 1) + '}'
  assert [line for line in body if line.endswith('rule')] == [r'\toprule', r'\midrule', r'\midrule', r'\bottomrule']
  assert {line.count(' & ') for line in body if line.endswith(r'\\')} == {body[2].count(' & ')}
  assert tables._latex_text('-0.5 [-1.0, +0.2]') == '$-$0.5 [$-$1.0, +0.2]'
  assert tables._latex_text('- / 3.70 / -36') == '-- / 3.70 / $-$36' and tables._latex_text('1e-05 a-1') == '1e-05 a-1'


def test_csv_and_json_hold_all_digits():
  found = summarize(made_up(), against='plain')
  assert json.loads(tables.json_text(found)) == found
  rows = list(csv.DictReader(io.StringIO(tables.csv_text(found))))
  assert {row['against'] for row in rows} == {'plain'}
  assert [row['arm'] for row in rows] == [row['arm'] for row in found['arms']]
  assert not {'score', 'score_vs_arm', 'accepted_len', 'paper'} & rows[0].keys(), 'only what has a value is a column'
  for flat, row in zip(rows, found['arms']):
    assert float(flat['score_value']) == row['score']['value']
    if row['score_vs_arm']:
      assert [float(flat[f'score_vs_arm_interval_{end}']) for end in ('low', 'high')] == row['score_vs_arm']['interval']
    else:
      assert flat['score_vs_arm_interval_low'] == flat['score_vs_arm_p'] == ''
    accepted_at = [int(flat[f'sums_accepted_at_{i}']) for i in range(row['num_draft'])]
    assert accepted_at == row['sums']['accepted_at']


@pytest.mark.parametrize('task, arm, shown', [
    ('gsm8k_cot', 'plain', '91.71 / - / -'),
    ('gsm8k', 'exact', '91.89 / 5.11 / 0'),
    ('gpqa_diamond_zeroshot', 'typical', '40.40 / 6.41 / -46'),
    ('gpqa', 'cactus delta=0.75', '45.46 / 6.46 / -46'),
    ('gsm8k', 'cactus delta=1.0', '92.87 / 7.00 / -34'),
    ('gsm8k', 'cactus delta=0.5', None),
    ('gsm8k', 'cactus_exact delta=1', None),
    ('mmlu', 'exact', None),
])
def test_what_the_paper_has(task, arm, shown):
  header, rows = tables.shown(summarize([answer(doc, arm, task=task) for doc in range(2)]))
  cells = dict(zip(header, rows[0]))
  assert cells.get('paper, 14B, m = 20: score / AL / Rej') == shown


# Reading.


def write_run(folder, rows, tail='', **changed):
  folder.mkdir(exist_ok=True)
  settings = {'verifier': 'big', 'draft': 'small', 'temperature': 0.6, 'tasks': {'gsm8k': {'metric': 'strict'}}}
  run = {'settings': settings | changed, 'device': 'cpu', 'git': 'abc'}
  (folder / 'run.json').write_text(json.dumps(run))
  (folder / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows) + tail)
  return str(folder)


def test_a_run_is_read(tmp_path):
  rows = made_up(docs=2)
  folder = write_run(tmp_path / 'a', rows)
  found, run, notes = answers_lib.read_runs([folder])
  assert found == rows and notes == [] and run['settings']['verifier'] == 'big'
  assert (run['device'], run['git']) == ('cpu', 'abc')


def test_a_line_cut_while_it_was_written_is_left_out(tmp_path):
  folder = write_run(tmp_path / 'a', [answer()], tail=json.dumps(answer(1))[:-20])
  found, _, notes = answers_lib.read_runs([folder])
  assert found == [answer()]
  assert notes == [f'{folder}/rows.jsonl: the last line is incomplete and is left out.']
  folder = write_run(tmp_path / 'a', [answer()], tail=json.dumps(answer(1)))
  assert len(answers_lib.read_runs([folder])[0]) == 2, 'only the end of the line is missing'


def test_starts_are_read_where_a_run_has_several(tmp_path):
  folder = write_run(tmp_path / 'a', [answer()])
  starts = [{'device': 'cpu', 'git': 'abc'}, {'device': 'cpu', 'git': 'def'}]
  run = json.loads((tmp_path / 'a' / 'run.json').read_text())
  (tmp_path / 'a' / 'run.json').write_text(json.dumps({'settings': run['settings'], 'starts': starts}))
  _, run, notes = answers_lib.read_runs([folder])
  assert (run['device'], run['git'], notes) == ('cpu', 'abc, def', [])


@pytest.mark.parametrize('change, words', [
    ({'score': 1.5}, 'score is 1.5: need a number from 0 to 1, or null'),
    ({'score': 'good'}, "score is 'good'"),
    ({'score': math.nan}, 'score is nan'),
    ({'num_draft': 'auto'}, "num_draft is 'auto': need a whole number from 0"),
    ({'num_draft': 3}, 'accepted_at has 2 positions: need num_draft=3'),
    ({'tested_at': []}, 'tested_at has 0 positions: need num_draft=2'),
    ({'accepted_at': [1, 0.5]}, 'accepted_at is [1, 0.5]: need whole numbers from 0'),
    ({'accepted_at': [1, -1]}, 'accepted_at is [1, -1]'),
    ({'accepted_at': [1, 9]}, 'accepted_at is [1, 9] of tested_at ['),
    ({'kl': -math.inf}, 'kl is -inf: need nats, or null'),
    ({'verifier_calls': -1}, 'verifier_calls is -1'),
    ({'new_tokens': True}, 'new_tokens is True'),
    ({'seconds': math.inf}, 'seconds is inf: need seconds'),
    ({'kl': '1'}, "kl is '1': need nats, or null"),
    ({'arm': ' '}, "arm is ' ': need a name"),
    ({'seed': None}, 'seed is None'),
    ({'metrics': None}, 'metrics is None'),
])
def test_a_row_that_is_wrong_is_named(tmp_path, change, words):
  folder = write_run(tmp_path / 'a', [answer(), answer(1) | change, answer(2)])
  with pytest.raises(ValueError) as error:
    answers_lib.read_runs([folder])
  assert str(error.value).startswith(f'{folder}/rows.jsonl, line 2: {words}')


@pytest.mark.parametrize('name', list(answers_lib.FIELDS))
def test_a_row_that_lacks_something_is_named(tmp_path, name):
  row = answer(1)
  del row[name]
  folder = write_run(tmp_path / 'a', [answer(), row])
  with pytest.raises(ValueError, match=f'rows.jsonl, line 2: {name} missing: need a row of experiments/sweep.py'):
    answers_lib.read_runs([folder])


def test_an_answer_is_there_once(tmp_path):
  first = write_run(tmp_path / 'a', [answer(), answer(seed=1), answer(arm='typical'), answer(task='b'), answer()])
  words = "line 5: a second answer of task='gsm8k', doc=0, arm='exact', num_draft=2, seed=0: remove one"
  with pytest.raises(ValueError, match=f'a/rows.jsonl, {words}'):
    answers_lib.read_runs([first])
  first, second = write_run(tmp_path / 'a', [answer()]), write_run(tmp_path / 'b', [answer(1), answer()])
  with pytest.raises(ValueError, match='b/rows.jsonl, line 2: a second answer'):
    answers_lib.read_runs([first, second])


def test_runs_are_put_together(tmp_path):
  """They may differ in which tasks they have."""
  first = write_run(tmp_path / 'a', [answer()])
  tasks = {'gsm8k': {'metric': 'strict'}, 'ifeval': {'metric': 'loose'}}
  second = write_run(tmp_path / 'b', [answer(seed=1), answer(task='ifeval')], tasks=tasks)
  found, run, notes = answers_lib.read_runs([first, second])
  assert len(found) == 3 and run['settings']['tasks'].keys() == {'gsm8k', 'ifeval'} and notes == []


@pytest.mark.parametrize('changed, words', [
    ({'verifier': 'other'}, "verifier is 'big' there and 'other' here"),
    ({'draft': None}, "draft is 'small' there and None here"),
    ({'temperature': 1.0}, 'temperature is 0.6 there and 1.0 here'),
    ({'top_k': 20}, 'top_k is None there and 20 here'),
    ({'tasks': {'gsm8k': {'metric': 'lax'}}}, 'task gsm8k is'),
])
def test_runs_of_other_settings_are_refused(tmp_path, changed, words):
  first, second = write_run(tmp_path / 'a', [answer()]), write_run(tmp_path / 'b', [answer(1)], **changed)
  with pytest.raises(ValueError) as error:
    answers_lib.read_runs([first, second])
  assert str(error.value).startswith(f'{first} and {second} have different settings ({words}')
  with pytest.raises(ValueError, match='have different settings'):
    answers_lib.read_runs([second, first])


def test_runs_of_different_machines_are_noted(tmp_path):
  first, second = write_run(tmp_path / 'a', [answer()]), write_run(tmp_path / 'b', [answer(1)])
  run = json.loads((tmp_path / 'b' / 'run.json').read_text())
  (tmp_path / 'b' / 'run.json').write_text(json.dumps(run | {'device': 'gpu'}))
  assert 'different machines (cpu, gpu)' in answers_lib.read_runs([first, second])[2][0]


@pytest.mark.parametrize('content, words', [
    (None, r'cannot be read \(No such file or directory\): need'),
    ('{', r'cannot be read \(Expecting .*\): need'),
    ('[]', 'names no settings with tasks'),
    ('{"settings": {"verifier": "big"}}', 'names no settings with tasks'),
])
def test_a_folder_that_is_no_run_is_refused(tmp_path, content, words):
  folder = write_run(tmp_path / 'a', [answer()])
  (tmp_path / 'a' / 'run.json').unlink()
  if content:
    (tmp_path / 'a' / 'run.json').write_text(content)
  with pytest.raises(ValueError, match=f'a/run.json {words}') as error:
    answers_lib.read_runs([folder])
  assert 'a folder that experiments/sweep.py made' in str(error.value)


def test_a_run_without_answers_is_refused(tmp_path):
  with pytest.raises(ValueError, match='a: no answer is finished yet'):
    answers_lib.read_runs([write_run(tmp_path / 'a', [])])
