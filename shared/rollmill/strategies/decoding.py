"""A configured tokenizer: token ids to text, to distinguish a re-tokenised copy of a reply from another reply.

Nothing is ever tokenised with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

Decode = Callable[[list[int]], str]


def decoder(source: str) -> Decode:
    """``source``: the path of a tokenizer file (tokenizers JSON), or ``module:callable`` that decodes a list of ids.

    Raises ValueError for a file that is not there, and for a callable that cannot be imported. A file is read when the
    first text is needed, and needs the extra ``rollmill[tokenizer]``: only then does a bad one raise ValueError.
    """
    module, colon, name = source.partition(":")
    if Path(source).is_file():
        return lambda ids: str(_tokenizer(source).decode(ids, skip_special_tokens=False))
    if not colon:
        raise ValueError(f"tokenizer {source!r} is no file; give the path of a tokenizer.json, or module:callable")
    return _imported(module, name)


def _imported(module: str, name: str) -> Decode:
    try:
        found: Any = getattr(import_module(module), name)
    except Exception as error:  # importing foreign code can raise anything
        raise ValueError(f"tokenizer {module}:{name} cannot be imported: {error!r}") from error
    if not callable(found):
        raise ValueError(f"tokenizer {module}:{name} is no callable")
    return lambda ids: str(found(ids))


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
