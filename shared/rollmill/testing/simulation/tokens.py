"""The toy tokenizer: a few letters with two token forms each, and a token for every pair of them.

``decode`` is many to one: "ab" is (a)(b), (a')(b), (ab)… The canonical form, ``encode``, takes pairs from the left. A
policy may sample any form.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from rollmill.testing.simulation.rng import chance

BOS, SYSTEM, USER, ASSISTANT, TOOL, NEWLINE, CALL, ARGUMENTS, END = range(1, 10)
THINK, UNTHINK, TOOLS, END_OF_CALL = range(10, 14)

LETTERS = "abcdefg "
FIRST, SECOND, PAIRS = 20, 40, 100


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; special tokens are written as ``<9>``."""
    return "".join(_piece(int(token)) for token in ids)


def _piece(token: int) -> str:
    if token >= PAIRS:
        return LETTERS[(token - PAIRS) // 8] + LETTERS[(token - PAIRS) % 8]
    for base in (SECOND, FIRST):
        if token >= base:
            return LETTERS[token - base]
    return f"<{token}>"


def encode(text: str) -> list[int]:
    """The canonical ids of a text: pairs from the left; ``<9>`` in a text becomes the special token 9.

    Anything else (half a special token) has no ids.
    """
    ids: list[int] = []
    for special, letters in re.findall(rf"<(\d+)>|([{LETTERS}]{{1,2}})", text):
        ids.append(int(special) if special else _letters(letters))
    return ids


def _letters(text: str) -> int:
    first = LETTERS.index(text[0])
    return FIRST + first if len(text) == 1 else PAIRS + 8 * first + LETTERS.index(text[1])


def sampled(text: str, rng: random.Random) -> list[int]:
    """Ids of a text that may differ from the canonical ones."""
    ids: list[int] = []
    while text:
        size = min(rng.choice((1, 1, 2)), len(text))
        other = SECOND - FIRST if size == 1 and chance(rng, 0.5) else 0
        ids.append(_letters(text[:size]) + other)
        text = text[size:]
    return ids
