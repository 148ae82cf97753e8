"""What the commands of ``rollmill config`` print: values with their origin, and mistakes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from rollmill.errors import InvalidInputError
from rollmill.models import dump_json
from rollmill.settings import ClientSettings, KafkaSettings, ProgramSettings, load
from rollmill.settings.loading import mistakes_of
from rollmill.settings.programs import program_settings
from rollmill.settings.sources import PREFIX, config_file, file_values


class FoundSetting(NamedTuple):
    """One setting of one program."""

    program: str
    name: str
    value: Any
    """Plain; a secret is masked."""
    origin: str
    """environment, the file's name, or default."""


def programs() -> Mapping[str, type[ProgramSettings]]:
    """All programs that are installed here; the client always is."""
    return {**program_settings(), "client": ClientSettings}


def found(program: str | None) -> list[FoundSetting]:
    """Of one program, or of all. Raises InvalidInputError for an unknown one, ConfigurationError for a mistake."""
    known = programs()
    if program is not None and program not in known:
        raise InvalidInputError(f"there is no program {program!r}: known are {', '.join(known)}")
    return [
        FoundSetting(name, f"{PREFIX}{field.upper()}", to_jsonable_python(value), _origin(kind, field))
        for name, kind in known.items()
        if program in (None, name)
        for field, value in load(kind).model_dump().items()
    ]


def as_table(settings: list[FoundSetting]) -> str:
    """One line per setting; what several programs share with one value is shown once."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for item in settings:
        value = item.value if isinstance(item.value, str) else dump_json(item.value).decode()
        lines.setdefault((item.name, value, item.origin), []).append(item.program)
    width = max(len(name) for name, _, _ in lines)
    everywhere = len({item.program for item in settings})
    return "\n".join(
        f"{name:<{width}}  {value}  ({origin}{_of(owners, everywhere)})"
        for (name, value, origin), owners in lines.items()
    )


def _of(owners: list[str], everywhere: int) -> str:
    return "" if len(owners) >= everywhere - 1 else f"; {', '.join(owners)}"


def _origin(kind: type[ProgramSettings], field: str) -> str:
    if f"{PREFIX}{field.upper()}" in os.environ:
        return "environment"
    return str(config_file()) if field in file_values(kind.section) else "default"


def mistakes() -> list[str]:
    """Each mistake once, as a program would report it at its start."""
    kinds: list[type[ProgramSettings]] = [KafkaSettings, *programs().values()]
    return list(dict.fromkeys(line for kind in kinds for line in mistakes_of(kind)))
