"""What the commands of ``rollmill dlq`` do."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import typer

from rollmill.cli.dead_letter_text import as_json as letter_json
from rollmill.cli.dead_letter_text import in_full, table
from rollmill.cli.moments import moment
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.ops.dlq import (
    DeadLetter,
    DeadLetterManager,
    LetterState,
    Place,
    Wanted,
    chosen,
    open_manager,
    read_letters,
    read_value,
)
from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.settings import KafkaSettings


@dataclass(frozen=True)
class Decision:
    """What the command was told. ``what``: replay or drop. ``every``: all open ones are meant."""

    what: str
    why: str | None
    by: str | None
    dry_run: bool
    every: bool


def wanted_of(
    numbers: Iterable[str],
    stage: str | None,
    reason: str | None,
    topic: str | None,
    key: str | None,
    since: str | None,
    state: str | None,
    *,
    now: float,
) -> Wanted:
    """From the options. Raises InvalidInputError for a number, time or state that is none."""
    if state is not None and state not in set(LetterState):
        raise InvalidInputError(f"unknown state {state!r}: known are {', '.join(LetterState)} and all")
    places = frozenset(map(Place.parse, numbers)) or None
    begin = None if since is None else moment(since, now)
    return Wanted(places, stage, reason, topic, key, begin, None if state is None else LetterState(state))


async def listed(settings: KafkaSettings, wanted: Wanted, *, as_json: bool) -> None:
    letters = chosen(await read_letters(settings), wanted)
    if as_json:
        for letter in letters:
            typer.echo(json.dumps(letter_json(letter)))
    else:
        typer.echo(table(letters) if letters else "no dead letters")


async def shown(settings: KafkaSettings, number: str, *, full: bool, as_json: bool) -> None:
    place = Place.parse(number)
    (letter,) = chosen(await read_letters(settings), Wanted(places=frozenset({place})))
    content = in_full(letter, await _content(settings, await read_value(settings, place)), full=full)
    typer.echo(json.dumps(content) if as_json else json.dumps(content, indent=2, ensure_ascii=False))


async def _content(settings: KafkaSettings, value: bytes) -> bytes:
    """What a letter's bytes stand for, where that can be had."""
    with suppress(PoisonRecordError, StorageUnreachableError):
        return await ClaimCheck.of(settings).resolve(value) or value
    return value


async def decided(settings: KafkaSettings, wanted: Wanted, decision: Decision) -> None:
    """Replay or drop what is wanted, one transaction each, and say of each what was done."""
    if wanted == Wanted(state=LetterState.OPEN) and not decision.every:
        raise InvalidInputError(f"say which: numbers, a filter, or --all for everything that is open ({decision.what})")
    if decision.dry_run:
        _say_all(chosen(await read_letters(settings), wanted), f"would {decision.what}")
        return
    async with open_manager(settings, SystemClock(), decision.by or _user()) as desk:
        letters = chosen(desk.letters, wanted)
        for letter in letters:
            nothing = await _apply(desk, letter.place, decision)
            typer.echo(nothing or _line(letter, "replayed" if decision.what == "replay" else "dropped"))
    if not letters:
        typer.echo("no dead letters")


async def _apply(desk: DeadLetterManager, place: Place, decision: Decision) -> str | None:
    if decision.what == "replay":
        return await desk.replay(place, decision.why)
    return await desk.drop(place, decision.why or "")


def _say_all(letters: list[DeadLetter], what: str) -> None:
    typer.echo("\n".join(_line(letter, what) for letter in letters) or "no dead letters")


def _line(letter: DeadLetter, what: str) -> str:
    return f"{what}: {letter.place} ({letter.info.reason}), from {letter.source}, {letter.size} bytes"


def _user() -> str:
    """Of this process; the environment is not asked."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
