"""Dead letters as lines, and one of them in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.cli.moments import iso
from rollmill.cli.tail import abbreviated
from rollmill.codec import Headers, decode, read_manifest
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.ops.dlq import DeadLetter, source_topic

SHOWN_BYTES = 2000
"""Of a payload that cannot be decoded."""
HEAD = ("number", "set aside", "stage", "reason", "source", "key", "bytes", "state")


def as_json(letter: DeadLetter) -> dict[str, Any]:
    """Everything but headers and payload."""
    return {
        "number": str(letter.place),
        "at": letter.at,
        "state": str(letter.state),
        **letter.info.model_dump(mode="json", exclude={"headers", "key"}),
        "key": _text(letter.key),
        "bytes": letter.size,
        "decisions": [decision.model_dump(mode="json") for decision in letter.decisions],
    }


def table(letters: Sequence[DeadLetter]) -> str:
    rows = [HEAD, *(_row(letter) for letter in letters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(letter: DeadLetter) -> tuple[str, ...]:
    info = letter.info
    where = (str(letter.place), iso(letter.at), info.stage, info.reason, letter.source)
    return (*where, _text(letter.key), str(letter.size), str(letter.state))


def in_full(letter: DeadLetter, value: bytes, *, full: bool) -> dict[str, Any]:
    """With headers, the units it carries, and its payload: decoded where that is possible, else as text."""
    manifest = read_manifest(letter.headers)
    units = None if manifest is None else {"units": len(manifest.units), "tokens": manifest.tokens}
    payload = _payload(letter, value)
    return {
        **as_json(letter),
        "headers": _headers(letter.headers),
        "manifest": units,
        "payload": payload if full else abbreviated(payload),
    }


def _headers(headers: Headers) -> dict[str, str]:
    return {name: _text(value) for name, value in headers}


def _payload(letter: DeadLetter, value: bytes) -> dict[str, Any]:
    try:
        found = decode(source_topic(letter).model, value, letter.headers)
    except (PoisonRecordError, InvalidInputError) as error:
        return {"undecodable": str(error), "begins": _text(value[:SHOWN_BYTES])}
    return {"value": found.model_dump(mode="json")}


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
