"""A configured tokenizer: token ids to text, to distinguish a re-tokenised copy of a reply from another reply.

Nothing is ever tokenised with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill.strategies.allow_list import imported, require_allowed_file
from rollmill.strategies.foreign_code import contained

Decode = Callable[[list[int]], str]

CALLABLE = re.compile(r"[\w.]+:[\w.]+")


def decoder(source: str) -> Decode:
    """``source``: the path of a tokenizer file (tokenizers JSON), or ``module:callable`` that decodes a list of ids.

    Raises ValueError for a file that is not there, for a callable that cannot be imported, and for what is not allowed
    (`rollmill.strategies.allow_list`). A file is read when the first text is needed, and needs the extra
    ``rollmill[tokenizer]``: only then does a bad one raise ValueError.
    """
    return _imported(source) if CALLABLE.fullmatch(source) else _file(source)


def _file(source: str) -> Decode:
    try:
        require_allowed_file(source)
    except InvalidInputError as error:
        raise ValueError(str(error)) from error
    if not Path(source).is_file():
        raise ValueError(f"tokenizer {source!r} is no file; give the path of a tokenizer.json, or module:callable")
    return _contained(lambda ids: _tokenizer(source).decode(ids, skip_special_tokens=False))


def _imported(source: str) -> Decode:
    try:
        found = imported("tokenizer", source)
    except InvalidInputError as error:
        raise ValueError(str(error)) from error
    if not callable(found):
        raise ValueError(f"tokenizer {source} is no callable")
    return _contained(found)


def _contained(foreign: Callable[[list[int]], Any]) -> Decode:
    def decode(ids: list[int]) -> str:
        with contained():
            return str(foreign(ids))

    return decode


@lru_cache(maxsize=8)
def _tokenizer(path: str) -> Any:
    try:
        library: Any = import_module("tokenizers")  # an optional extra, needed only where a file is configured
    except ImportError as error:
        raise ValueError("a tokenizer file is read by: pip install 'rollmill[tokenizer]'") from error
    try:
        return library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is no tokenizer file: {error}") from error
