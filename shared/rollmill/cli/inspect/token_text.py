"""Token ids for display: the ids themselves, or their texts by a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollmill.errors import InvalidInputError
from rollmill.strategies.allow_list import allowed_by_hand
from rollmill.strategies.decoding import Decode, decoder

Pieces = Callable[[Sequence[int]], list[str]]
"""One text per token, without blanks."""

VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
NO_TEXT = "\ufffd"


def ids_only(ids: Sequence[int]) -> list[str]:
    return [str(token) for token in ids]


def pieces_of(source: str) -> Pieces:
    """``source`` as `rollmill.strategies.decoding.decoder` takes it.

    A person names it at the command line, so any module may be. A token that is no whole text is shown as its id.
    Raises InvalidInputError.
    """
    try:
        with allowed_by_hand([source]):
            decode = decoder(source)
        decode([])  # an unreadable file is reported now, not while drawing
    except ValueError as error:
        raise InvalidInputError(str(error)) from error
    return lambda ids: [_piece(decode, token) for token in ids]


def _piece(decode: Decode, token: int) -> str:
    text = decode([token])
    return f"<{token}>" if not text or NO_TEXT in text else text.translate(VISIBLE)
