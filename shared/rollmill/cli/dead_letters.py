"""What the commands of ``rollmill dlq`` do: list and show dead letters, replay or drop them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer

from rollmill.cli.options import this_user
from rollmill.cli.tail import abbreviate
from rollmill.cli.timestamps import iso, parse_time
from rollmill.codec import Headers, decode, read_manifest
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.ops.dlq import (
    DeadLetter,
    DeadLetterManager,
    LetterFilter,
    LetterNumber,
    LetterState,
    open_manager,
    read_letters,
    read_value,
    select_letters,
    source_topic,
)
from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.settings import KafkaSettings

SHOWN_BYTES = 2000
"""Of a payload that cannot be decoded."""
COLUMNS = ("number", "set aside", "stage", "reason", "source", "key", "bytes", "state")


@dataclass(frozen=True)
class DecisionOptions:
    """Options of ``replay`` and ``drop``. ``action``: replay or drop. ``every``: all open letters are meant.

    ``admit_old``: stages also take what may have been processed before.
    """

    action: str
    why: str | None
    by: str | None
    dry_run: bool
    every: bool
    admit_old: bool = False


def letter_filter(
    numbers: Iterable[str],
    stage: str | None,
    reason: str | None,
    topic: str | None,
    key: str | None,
    since: str | None,
    state: str | None,
    *,
    now: float,
) -> LetterFilter:
    """From the options. Raises InvalidInputError for a number, time or state that is none."""
    if state is not None and state not in set(LetterState):
        raise InvalidInputError(f"unknown state {state!r}: known are {', '.join(LetterState)} and all")
    parsed = frozenset(map(LetterNumber.parse, numbers)) or None
    begin = None if since is None else parse_time(since, now)
    return LetterFilter(parsed, stage, reason, topic, key, begin, None if state is None else LetterState(state))


async def print_list(settings: KafkaSettings, wanted: LetterFilter, *, as_json: bool) -> None:
    letters = select_letters(await read_letters(settings), wanted)
    if as_json:
        for letter in letters:
            typer.echo(json.dumps(letter_json(letter)))
    else:
        typer.echo(table(letters) if letters else "no dead letters")


async def print_letter(settings: KafkaSettings, text: str, *, full: bool, as_json: bool) -> None:
    number = LetterNumber.parse(text)
    (letter,) = select_letters(await read_letters(settings), LetterFilter(numbers=frozenset({number})))
    content = in_full(letter, await _resolved(settings, await read_value(settings, number)), full=full)
    typer.echo(json.dumps(content) if as_json else json.dumps(content, indent=2, ensure_ascii=False))


async def _resolved(settings: KafkaSettings, value: bytes) -> bytes:
    """The large value that ``value`` refers to, where it can be read; else ``value``."""
    with suppress(PoisonRecordError, StorageUnreachableError):
        return await ClaimCheck.of(settings).resolve(value) or value
    return value


async def decide(settings: KafkaSettings, wanted: LetterFilter, options: DecisionOptions) -> None:
    """Replay or drop what is wanted, one transaction each, and print for each letter what was done."""
    if wanted == LetterFilter(state=LetterState.OPEN) and not options.every:
        raise InvalidInputError(
            f"name the letters to {options.action}: numbers, a filter, or --all for everything that is open"
        )
    if options.dry_run:
        letters = select_letters(await read_letters(settings), wanted)
        typer.echo("\n".join(_line(letter, f"would {options.action}") for letter in letters) or "no dead letters")
        return
    async with open_manager(settings, SystemClock(), options.by or this_user()) as manager:
        letters = select_letters(manager.letters, wanted)
        for letter in letters:
            refusal = await _apply(manager, letter.number, options)
            typer.echo(refusal or _line(letter, "replayed" if options.action == "replay" else "dropped"))
    if not letters:
        typer.echo("no dead letters")


async def _apply(manager: DeadLetterManager, number: LetterNumber, options: DecisionOptions) -> str | None:
    if options.action == "replay":
        return await manager.replay(number, options.why, admit_old=options.admit_old)
    return await manager.drop(number, options.why or "")


def _line(letter: DeadLetter, action: str) -> str:
    return f"{action}: {letter.number} ({letter.info.reason}), from {letter.source}, {letter.size} bytes"


def letter_json(letter: DeadLetter) -> dict[str, Any]:
    """Everything but headers and payload."""
    return {
        "number": str(letter.number),
        "at": letter.at,
        "state": str(letter.state),
        **letter.info.model_dump(mode="json", exclude={"headers", "key"}),
        "key": _text(letter.key),
        "bytes": letter.size,
        "decisions": [decision.model_dump(mode="json") for decision in letter.decisions],
    }


def table(letters: Sequence[DeadLetter]) -> str:
    rows = [COLUMNS, *(_row(letter) for letter in letters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(letter: DeadLetter) -> tuple[str, ...]:
    info = letter.info
    origin = (str(letter.number), iso(letter.at), info.stage, info.reason, letter.source)
    return (*origin, _text(letter.key), str(letter.size), str(letter.state))


def in_full(letter: DeadLetter, value: bytes, *, full: bool) -> dict[str, Any]:
    """With headers, the numbers of its manifest, and its payload: decoded where that is possible, else as text."""
    manifest = read_manifest(letter.headers)
    units = None if manifest is None else {"units": len(manifest.units), "tokens": manifest.tokens}
    payload = _payload(letter, value)
    return {
        **letter_json(letter),
        "headers": _headers(letter.headers),
        "manifest": units,
        "payload": payload if full else abbreviate(payload),
    }


def _headers(headers: Headers) -> dict[str, str | None]:
    return {name: None if value is None else _text(value) for name, value in headers}


def _payload(letter: DeadLetter, value: bytes) -> dict[str, Any]:
    try:
        found = decode(source_topic(letter).model, value, letter.headers)
    except (PoisonRecordError, InvalidInputError) as error:
        return {"undecodable": str(error), "begins": _text(value[:SHOWN_BYTES])}
    return {"value": found.model_dump(mode="json")}


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
