"""Texts in the colours of their tokens: what is shown, without the codes and elements, is the text."""

import html
import re

import numpy as np
import pytest

import cactus_jax as cj
from cactus_jax import display
from tests import fakes

CODE, ELEMENT = re.compile(r'\x1b\[[0-9;]*m'), re.compile(r'<[^>]*>')
ORIGINS = ['accepted', 'recovered', 'bonus']


def test_what_is_shown_is_the_text():
  """Whatever is in it; and every character is shown as of its origin."""
  parts = ['日本', 'the', ' is', '\n', '<b>&amp;', '\ufffd', '"', '  ']
  for seed in range(100):
    rng = np.random.default_rng(seed)
    spans = [(parts[rng.integers(len(parts))], ORIGINS[rng.integers(3)]) for _ in range(rng.integers(9))]
    text = ''.join(display.plain(spans))
    assert CODE.sub('', ''.join(display.ansi(spans))) == text
    page = display.as_html(spans)
    assert html.unescape(ELEMENT.sub('', page)) == text
    for origin, style in display.STYLES.items():
      own = ''.join(part for part, theirs in spans if theirs == origin)
      found = re.findall(f'<{style.tag} class="{origin}">(.*?)</{style.tag}>', page, re.DOTALL)
      assert html.unescape(''.join(found)) == own


def test_escape_codes_and_elements():
  spans = [('The', 'accepted'), (' sky', 'accepted'), (' <is>', 'recovered'), ('\n', None), ('blue', 'bonus')]
  assert list(display.ansi(spans)) == [
    '\x1b[0;38;5;63mThe\x1b[0m',
    '\x1b[0;38;5;63m sky\x1b[0m',
    '\x1b[4;38;5;130m <is>\x1b[0m',
    '\n',
    '\x1b[1;38;5;29mblue\x1b[0m',
  ]
  assert display.as_html(spans) == (
    '<span class="accepted">The sky</span><u class="recovered"> &lt;is&gt;</u>\n<b class="bonus">blue</b>'
  )


def test_the_legend_counts_tokens():
  line = ''.join(display.plain(display.legend(['accepted', 'bonus', 'accepted'])))
  assert line == (
    '2 accepted (drafted and kept)   0 recovered (in place of a rejected one)   1 bonus (after a draft kept whole)'
  )
  assert [origin for _, origin in display.legend([]) if origin] == ORIGINS


def test_completions_are_shown():
  tokenizer = fakes.byte_tokenizer()
  script = tokenizer('hi 日本 the end')['input_ids'] + [tokenizer.eos_token_id]
  config = fakes.FakeConfig(vocab_size=len(tokenizer), eos_ids=(tokenizer.eos_token_id,))
  target, wrong = fakes.scripted([script], config), [*script]
  wrong[4] = (wrong[4] + 1) % 256
  done = cj.generate_text(
    ['hi'], target=target, draft=fakes.scripted([wrong], config), tokenizer=tokenizer, raw=True, num_draft=3,
    sampling=cj.SamplingParams(temperature=0.0),
  )
  assert set(done.origins[0]) == set(ORIGINS)
  shown = cj.show_origins(done, tokenizer)
  assert repr(shown) == done.texts[0] == ' 日本 the end'
  count = f'{done.stats.accepted} accepted'
  for view in (CODE.sub('', str(shown)), ELEMENT.sub('', shown._repr_html_())):
    assert done.texts[0] in view and count in view and count[:1] != '0'
  page = shown._repr_html_()
  for origin in ORIGINS:
    assert f'class="{origin}"' in page and f'.{origin} {{color: #' in page


def luminance(rgb):
  """Relative luminance by WCAG 2.1 of a colour '#rrggbb'."""
  shares = [int(rgb[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
  return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize('style', display.STYLES.values(), ids=display.STYLES)
def test_colours_stand_out_from_black_and_from_white(style):
  light = luminance(style.rgb) + 0.05
  assert min(light / 0.05, 1.05 / light) > 4.4
  # The 216 colours of a terminal from number 16 on, six steps for each of red, green and blue.
  steps, number = [0, 95, 135, 175, 215, 255], style.number - 16
  assert style.rgb == '#' + ''.join(f'{steps[i]:02x}' for i in (number // 36, number // 6 % 6, number % 6))


def test_styles_differ_without_colours():
  for field in ('code', 'tag', 'rgb'):
    assert len({getattr(style, field) for style in display.STYLES.values()}) == 3
