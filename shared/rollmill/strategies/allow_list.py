"""Which modules a name ``module:attribute`` may import, and which files a name may open: those that the operator lists.

Session specs come from clients: importing a module runs it, and opening a file tells whether it is there. The lists are
the settings ``ROLLMILL_STRATEGY_MODULES`` and ``ROLLMILL_TOKENIZER_FOLDERS``. They are read where a name is resolved,
because strategies resolve names themselves (composite evaluators, tokenizers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill.strategies.foreign_code import contained, describe

SETTING = "ROLLMILL_STRATEGY_MODULES"
FOLDERS = "ROLLMILL_TOKENIZER_FOLDERS"

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

_named_by_hand: ContextVar[tuple[str, ...]] = ContextVar("named_by_hand", default=())


@contextmanager
def allowed_by_hand(names: Iterable[object]) -> Iterator[None]:
    """Also allows the modules and files of ``names``, which a person gave at the command line.

    Of strings ``module:attribute`` the module, of other ones the file, of mappings and lists those of their values;
    anything else names none.
    """
    token = _named_by_hand.set((*_named_by_hand.get(), *_allowed_in(names)))
    try:
        yield
    finally:
        _named_by_hand.reset(token)


def imported(kind: str, path: str) -> Any:
    """What ``path`` (``module:attribute``) names; ``kind``: what it should be, for the message.

    Raises InvalidInputError, before anything is imported where the module is not allowed.
    """
    module, _, attribute = path.partition(":")
    if not _is_allowed(module):
        raise InvalidInputError(
            f"{kind} {path!r} is not allowed: module {module!r} is in no package that the setting {SETTING} lists; "
            "the operator has to add it there, or to register the class as an entry point"
        )
    try:
        with contained():
            return getattr(import_module(module), attribute)
    except Exception as error:  # importing foreign code can raise anything
        raise InvalidInputError(f"{kind} {path!r} cannot be imported: {describe(error)}") from error


def require_allowed_file(path: str) -> None:
    """Raises InvalidInputError, whether or not the file exists, where it is in no folder that the operator lists."""
    resolved = Path(path).resolve()
    folders = [Path(folder).resolve() for folder in _listed(FOLDERS)]
    if path not in _named_by_hand.get() and not any(resolved.is_relative_to(folder) for folder in folders):
        raise InvalidInputError(
            f"the file {path!r} is not allowed: it is in no folder that the setting {FOLDERS} lists; the operator has "
            "to add its folder there"
        )


def _is_allowed(module: str) -> bool:
    prefixes = [*_listed(SETTING), *_named_by_hand.get()]
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _listed(setting: str) -> list[str]:
    return [entry for entry in map(str.strip, os.environ.get(setting, "").split(",")) if entry]


def _allowed_in(names: Iterable[object]) -> Iterator[str]:
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if isinstance(name, str):
            module, colon, _ = name.partition(":")
            yield module if colon and _MODULE.fullmatch(module) else name
        elif isinstance(name, dict):
            waiting += name.values()
        elif isinstance(name, list | tuple):
            waiting += name
