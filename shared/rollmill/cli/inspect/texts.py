"""Token ids as people read them: the ids themselves, or their texts by a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rollmill.errors import InvalidInputError

Pieces = Callable[[Sequence[int]], list[str]]
"""One text per token, without blanks."""

VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
NO_TEXT = "\ufffd"


def ids_only(ids: Sequence[int]) -> list[str]:
    return [str(token) for token in ids]


def pieces_of(source: str) -> Pieces:
    """``source``: a tokenizer file (tokenizers JSON) or ``module:callable`` that decodes a list of ids.

    A token that is no text of its own is shown as its id. Raises InvalidInputError.
    """
    decode = _file(source) if Path(source).is_file() else _imported(source)
    return lambda ids: [_piece(decode, token) for token in ids]


def _piece(decode: Callable[[list[int]], Any], token: int) -> str:
    text = str(decode([token]))
    return f"<{token}>" if not text or NO_TEXT in text else text.translate(VISIBLE)


def _imported(source: str) -> Callable[[list[int]], Any]:
    module, colon, name = source.partition(":")
    if not colon:
        raise InvalidInputError(f"tokenizer {source!r} is no file; give a tokenizer.json, or module:callable")
    try:
        found: Any = getattr(import_module(module), name)
    except Exception as error:  # importing foreign code can raise anything
        raise InvalidInputError(f"tokenizer {source!r} cannot be imported: {error!r}") from error
    if not callable(found):
        raise InvalidInputError(f"tokenizer {source!r} is no callable")
    return found  # type: ignore[no-any-return]  # whatever it returns is written as text


def _file(path: str) -> Callable[[list[int]], Any]:
    try:
        library: Any = import_module("tokenizers")
    except ImportError as error:
        raise InvalidInputError("a tokenizer file is read by: pip install 'rollmill[tokenizer]'") from error
    try:
        tokenizer = library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise InvalidInputError(f"{path} is no tokenizer file: {error}") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
