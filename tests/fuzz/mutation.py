"""Mutations of JSON-like values and of bytes: small changes of something valid, which get deep into a reader.

A mutated value keeps most of its structure. Fields get another type, another size or another name, go missing or come
twice; lists grow, and values nest. Bytes are changed, cut, doubled and mixed with fragments that readers stumble over.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

STRINGS: tuple[str, ...] = (
    *("", " ", "\x00", "a\n", "../../etc/passwd", "s1/closed", "/done", "é" * 40, "\u202e\ufeff", "😀", "x" * 5_000),
    *("NaN", "-1", "1e999", "null", "true", "{}", "[]", "%s%n", "${x}", "'; --", "\x1b[31m", "A" * 256, "A" * 257),
    *("2026-01-01T00:00:00Z", "data:,", "data:image/png;base64,AA==", "https://127.0.0.1/", "file:///etc/passwd"),
    *("agent", "policy", "external", "json:X", "rollmill.errors:X", "COMPLETED", "wait", "assistant", "tool", "system"),
)
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 255, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1e-320, 3.5e38, 1e308, float("inf"), float("-inf"), float("nan"), True, False),
)
FRAGMENTS: tuple[bytes, ...] = (
    *(b"\x00", b"\xff", b"\xc0", b"\xc1", b"\x81\x90\x01", b"\x81\x80\x01", b"\x90", b"\x80", b"\xd6\xff\0\0\0\0"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc4\x02ab", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xa2\xff\xfe"),
    *(b"{", b"}", b"[", b"]", b'"', b"\\ud800", b"NaN", b"1e999", b",,", b'{"a":', b"[" * 1_500, b"\x91" * 1_500),
)


class Mutator:
    """Random changes from one source of chance: the same seed gives the same values."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._changes: tuple[Callable[[Any], Any], ...] = (
            lambda _: self.value(),
            lambda _: self.value(),
            self._retyped,
            self._resized,
            self._nested,
            self._renamed,
            self._without_one,
            self._with_one_more,
        )

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def mutate(self, value: Any) -> Any:
        """A copy of ``value`` with one to four changes, at any depth."""
        changed = [copy.deepcopy(value)]
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 4))):
            container, key = self.rng.choice(list(_places(changed)))
            container[key] = self.rng.choice(self._changes)(container[key])
        return changed[0]

    def value(self, depth: int = 3) -> Any:
        """Any value; containers are ``depth`` deep at most."""
        kind = self.rng.randrange(7 if depth else 4)
        if kind == 0:
            return None
        if kind == 1:
            return self.rng.choice(NUMBERS)
        if kind <= 3:
            return self.rng.choice(STRINGS)
        if kind <= 5:
            return [self.value(depth - 1) for _ in range(self.rng.randrange(4))]
        return {self.rng.choice(STRINGS): self.value(depth - 1) for _ in range(self.rng.randrange(4))}

    def damage(self, raw: bytes) -> bytes:
        """The bytes with one to three changes."""
        for _ in range(self.rng.randint(1, 3)):
            start = self.rng.randint(0, len(raw))
            stop = min(len(raw), start + self.rng.choice((0, 1, 1, 2, 8, 64)))
            inserted = self.rng.choice((self.rng.randbytes(1), self.rng.choice(FRAGMENTS), raw[start:stop] * 2, b""))
            raw = raw[:start] + inserted + raw[stop:]
        return raw if self.chance(0.9) else raw[: self.rng.randint(0, len(raw))]

    def _retyped(self, value: Any) -> Any:
        """The same content as another type."""
        forms: tuple[Any, ...] = ([value], {"value": value}, _text(value), [value, value], {}, [], None, bool(value))
        return self.rng.choice(forms)

    def _resized(self, value: Any) -> Any:
        if isinstance(value, (str, bytes, list)):
            return value * self.rng.choice((0, 2, 100))
        if isinstance(value, (int, float)):
            return self.rng.choice((-value, value + 1, value * 10**9, value / 7))
        return self.value()

    def _nested(self, value: Any) -> Any:
        """``value`` in many layers: readers that descend by recursion have to stop."""
        as_list = self.chance(0.5)
        for _ in range(self.rng.choice((5, 60, 200))):
            value = [value] if as_list else {"a": value}
        return value

    def _renamed(self, value: Any) -> Any:
        if not isinstance(value, dict) or not value:
            return self.value()
        name = self.rng.choice(list(value))
        return {(self._other_name(key) if key == name else key): item for key, item in value.items()}

    def _other_name(self, name: Any) -> str:
        return self.rng.choice((f"{name}s", str(name)[:-1], str(name).upper(), self.rng.choice(STRINGS)))

    def _without_one(self, value: Any) -> Any:
        if isinstance(value, dict) and value:
            gone = self.rng.choice(list(value))
            return {key: item for key, item in value.items() if key != gone}
        return value[:-1] if isinstance(value, (list, str, bytes)) else None

    def _with_one_more(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {**value, self.rng.choice(STRINGS): self.value()}
        return [*value, self.value()] if isinstance(value, list) else self.value()


def dump_json(value: Any) -> bytes:
    """JSON of what no careful writer would write: NaN, integers of any size, lone surrogates."""
    return json.dumps(value, default=_text).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)[:2_000]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key below ``value``."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])
