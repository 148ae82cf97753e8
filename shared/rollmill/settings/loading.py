"""Makes settings, and answers every mistake of a person in one line that names the variable."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from rollmill.errors import ConfigurationError
from rollmill.settings.names import SECTIONS
from rollmill.settings.sources import PREFIX, ProgramSettings, config_file, file_content

S = TypeVar("S", bound=ProgramSettings)

OTHER_NAMES = frozenset(
    {
        *("CONFIG", "SESSION_ID", "TASK_ID", "KEYS_FILE", "VERSION", "EXTRAS"),
        *("ALL_SABOTAGES", "FUZZ_EXAMPLES", "FUZZ_SEED", "GRADING_SECONDS", "HYPOTHESIS_PROFILE"),
    }
)
"""Variables that are no setting of a program: of agents, of compose and images, and of the project's own tests."""
SERVICE_LINK = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?", re.ASCII)
"""What Kubernetes adds to the environment for every Service of the namespace."""
SECRET = re.compile(r"password|secret|key", re.IGNORECASE)
EXPORTED = ("strategy_modules", "tokenizer_folders")
"""Lists that strategies look up in the environment, wherever they were set."""
OPTIONS = ("bootstrap_servers", "prefix")
"""Settings that the command line has an option for."""
SHOWN = 80
"""Characters of a value that is shown."""


def load(kind: type[S], **given: Any) -> S:
    """The settings of a program; ``given`` wins over the environment, and that over the file.

    Raises ConfigurationError, with one line for all mistakes: a value that is refused, and a name that no setting has.
    """
    refuse_unknown_names(os.environ)
    try:
        made = kind(**given)
    except (ValidationError, SettingsError) as error:
        raise ConfigurationError("; ".join(_mistakes(error, kind, given))) from None
    for name in EXPORTED:
        if getattr(made, name, ""):
            os.environ[f"{PREFIX}{name.upper()}"] = getattr(made, name)
    return made


def mistakes_of(kind: type[ProgramSettings]) -> list[str]:
    """One line for each mistake in the settings of a program."""
    try:
        refuse_unknown_names(os.environ)
        kind()
    except (ValidationError, SettingsError) as error:
        return list(_mistakes(error, kind, {}))
    except ConfigurationError as error:
        return [str(error)]
    return []


def refuse_unknown_names(environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for the first ``ROLLMILL_*`` variable, or name in the file, that is no setting."""
    known = {name for names in SECTIONS.values() for name in names}
    for variable in environment:
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and not (
            name.lower() in known or name in OTHER_NAMES or SERVICE_LINK.fullmatch(name)
        ):
            variables = (f"{PREFIX}{item.upper()}" for item in known)
            raise ConfigurationError(
                f"{variable} is no setting{_near(variable, variables)}; `rollmill config show` lists them"
            )
    for name, value in file_content().items():
        if name in SECTIONS and isinstance(value, dict):
            _refuse_unknown_in_file(value, SECTIONS[name], f"[{name}] ")
        else:
            _refuse_unknown_in_file((name,), {*known, *filter(None, SECTIONS)}, "")


def _refuse_unknown_in_file(names: Iterable[str], known: Iterable[str], section: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{config_file()}: {section}{name} is no setting{_near(name, known)}")


def _near(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _mistakes(
    error: ValidationError | SettingsError, kind: type[ProgramSettings], given: Mapping[str, Any]
) -> Iterator[str]:
    if isinstance(error, SettingsError):
        yield _unreadable(error)
        return
    for item in error.errors(include_url=False, include_context=False):
        message = item["msg"].removeprefix("Value error, ")
        message = _with_variables(message[:1].lower() + message[1:], kind)
        if not item["loc"]:
            yield message
            continue
        name, *inner = map(str, item["loc"])
        value = "" if inner else _value(name, item["input"])  # what is inside of a structure may be a secret
        yield f"{_named('.'.join((name, *inner)), name, given)}{value}: {message}"


def _named(path: str, name: str, given: Mapping[str, Any]) -> str:
    """What a person wrote: the option, the variable, or the name in the file. ``path``: ``name`` and what is inside."""
    if name in given:
        return f"--{path.replace('_', '-')}" if name in OPTIONS else path
    variable = f"{PREFIX}{name.upper()}"
    if variable in os.environ or config_file() is None:
        return f"{variable}{path.removeprefix(name)}"
    return f"{config_file()}: {path}"


def _value(name: str, value: object) -> str:
    plain = isinstance(value, str | int | float) and not SECRET.search(name)
    return f"={str(value)[:SHOWN]}" if plain else ""


def _with_variables(message: str, kind: type[ProgramSettings]) -> str:
    """Names of settings in a message about several of them, as variables."""
    return re.sub(
        r"\b[a-z]+(?:_[a-z0-9]+)+\b",
        lambda m: f"{PREFIX}{m[0].upper()}" if m[0] in kind.model_fields else m[0],
        message,
    )


def _unreadable(error: SettingsError) -> str:
    found = re.search(r'field "(\w+)"', str(error))
    name = found[1] if found else ""
    detail = f": {error.__cause__}" if error.__cause__ is not None and not SECRET.search(name) else ""
    return f"{PREFIX}{name.upper()} has to be JSON{detail}"
