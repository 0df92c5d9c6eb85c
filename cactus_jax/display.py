"""A text that shows where each of its tokens comes from: in a terminal by escape codes, in a notebook as HTML."""

import collections
import dataclasses
import html
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cactus_jax import text as text_lib

Span = tuple[str, str | None]  # text and the origin of its token, if it has one


class Style(NamedTuple):
  """How the tokens of one origin look."""

  meaning: str
  number: int  # of the colour in a terminal of 256
  rgb: str  # the same colour
  code: int  # escape code beside the colour; 0: none
  tag: str  # HTML element, which shows the same where colours are taken out


# The colours are as light as can be told from black and from white alike, with a contrast of 4.4 or more, and blue,
# orange and bluish green stay apart for the colour-blind; who sees no colours has the lines and the weight.
STYLES = {
    'accepted': Style('drafted and kept', 63, '#5f5fff', 0, 'span'),
    'recovered': Style('in place of a rejected one', 130, '#af5f00', 4, 'u'),
    'bonus': Style('after a draft kept whole', 29, '#00875f', 1, 'b'),
}


def legend(origins) -> Iterator[Span]:
  """One line as spans: how many tokens there are of each origin, and what it means. Args: origins, one a token."""
  counts, gap = collections.Counter(origins), ''
  for origin, style in STYLES.items():
    yield gap, None
    yield f'{counts[origin]} {origin}', origin
    yield f' ({style.meaning})', None
    gap = '   '


def plain(spans: Iterable[Span]) -> Iterator[str]:
  """The text of each span as it is."""
  return (text for text, _ in spans)


def ansi(spans: Iterable[Span]) -> Iterator[str]:
  """The text of each span in its colour, for a terminal; without the escape codes it is the text."""
  for text, origin in spans:
    style = STYLES.get(origin)
    yield f'\x1b[{style.code};38;5;{style.number}m{text}\x1b[0m' if style else text


def as_html(spans: Iterable[Span]) -> str:
  """The spans as HTML elements whose classes are the origins; see `Shown` for the sheet of styles."""
  elements = []
  for origin, group in itertools.groupby(spans, key=lambda span: span[1]):
    text, style = html.escape(''.join(plain(group))), STYLES.get(origin)
    elements.append(f'<{style.tag} class="{origin}">{text}</{style.tag}>' if style else text)
  return ''.join(elements)


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
  """A text in the colours of its tokens, with a legend. A notebook shows it as HTML, print() for a terminal."""

  spans: list[Span]
  origins: list[str]  # of all tokens, some of which may have no text

  def __str__(self):
    return ''.join(ansi([*self.spans, ('\n\n', None), *legend(self.origins)]))

  def __repr__(self):
    return ''.join(plain(self.spans))

  def _repr_html_(self):
    sheet = ' '.join(f'.cactus .{origin} {{color: {style.rgb}}}' for origin, style in STYLES.items())
    return (f'<style>.cactus {{white-space: pre-wrap; font-family: inherit}} {sheet}</style>\n'
            f'<pre class="cactus">{as_html(self.spans)}</pre>\n'
            f'<small class="cactus">{as_html(legend(self.origins))}</small>')


def show_origins(completions, tokenizer, row=0) -> Shown:
  """The text of a row that shows of each token whether it was accepted, recovered or bonus."""
  return Shown(list(text_lib.spans(completions, tokenizer, row)), completions.origins[row])
