"""Which modules a name ``module:attribute`` may import: those that the operator lists.

Session specs come from clients, and importing a module runs it. The list is the setting ``ROLLMILL_STRATEGY_MODULES``.
It is read where a name is resolved, because strategies resolve names themselves (composite evaluators, tokenizers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill.strategies.foreign_code import contained, describe

SETTING = "ROLLMILL_STRATEGY_MODULES"

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

_named_by_hand: ContextVar[tuple[str, ...]] = ContextVar("named_by_hand", default=())


@contextmanager
def allowed_by_hand(names: Iterable[object]) -> Iterator[None]:
    """Also allows the modules of ``names``, which a person gave at the command line.

    Of strings ``module:attribute`` the module, of mappings and lists those of their values; anything else names none.
    """
    token = _named_by_hand.set((*_named_by_hand.get(), *_modules_in(names)))
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


def _is_allowed(module: str) -> bool:
    listed = (entry.strip() for entry in os.environ.get(SETTING, "").split(","))
    prefixes = [*filter(None, listed), *_named_by_hand.get()]
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _modules_in(names: Iterable[object]) -> Iterator[str]:
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if isinstance(name, str):
            module, colon, _ = name.partition(":")
            if colon and _MODULE.fullmatch(module):
                yield module
        elif isinstance(name, dict):
            waiting += name.values()
        elif isinstance(name, list | tuple):
            waiting += name
