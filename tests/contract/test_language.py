"""Private words stay out of the library and the services: plain technical English is read by everybody.

A name that is on the wire, or a word that is the thing itself, has a row in `ALLOWED` with its reason.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SEARCHED = ("shared/rollmill", "services")
MOST = 75
"""Uses in all, allowed ones included."""

HINTS = {
    "said": "'was reported', 'was answered', 'states'",
    "told": "'was notified', 'was given', 'receives'",
    "word": "'record', 'evaluation', 'value'",
    "words": "'records', 'texts', 'terms'",
    "stands": "'is in effect', 'is kept', 'is written'",
    "lies": "'is stored', 'is at', 'is between'",
    "nobody": "'no process', 'no user', or a passive",
    "whose": "'of which', 'with a', or two sentences",
    "burial": "'expiry', 'removal'",
    "keeps_house": "'is_leader'",
}
PRIVATE = re.compile(rf"\b({'|'.join(HINTS)})\b", re.ASCII)


class Allowed(NamedTuple):
    uses: int
    reason: str


ALLOWED = {
    ("services/capture/rollmill_capture/http/rewards.py", "said"): Allowed(
        1, "the ids of reported rewards begin with it: a value on the wire"
    ),
    ("services/reward_merger/rollmill_reward_merger/merging.py", "stands"): Allowed(
        1, "a key of the JSON in a trajectory's `evaluation`"
    ),
}


class Use(NamedTuple):
    path: str
    line: int
    word: str


def uses_in(path: str, text: str) -> Iterator[Use]:
    for number, line in enumerate(text.splitlines(), start=1):
        yield from (Use(path, number, word) for word in PRIVATE.findall(line))


def all_uses() -> list[Use]:
    command = ["git", "ls-files", "-z", "--", *SEARCHED]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [name for name in names if name and (ROOT / name).is_file()]
    return [use for name in paths for use in uses_in(name, (ROOT / name).read_text(errors="replace"))]


def complaints(uses: Iterable[Use]) -> list[str]:
    """A line for each use that the table does not allow, and for each allowance that is not used."""
    uses = list(uses)
    counted = Counter((use.path, use.word) for use in uses)
    too_many = {key for key, number in counted.items() if number > (ALLOWED[key].uses if key in ALLOWED else 0)}
    found = [
        f"{use.path}:{use.line}: '{use.word}': write {HINTS[use.word]}; what has to stay needs a row in ALLOWED"
        for use in uses
        if (use.path, use.word) in too_many
    ]
    unused = [key for key, allowed in ALLOWED.items() if counted[key] < allowed.uses]
    return found + [f"{path}: '{word}' is used less often than ALLOWED says" for path, word in unused]


def test_private_words_are_used_only_where_the_table_gives_a_reason() -> None:
    found = complaints(all_uses())
    assert not found, "\n".join(["", *found])


def test_the_table_stays_small_and_gives_reasons() -> None:
    assert sum(allowed.uses for allowed in ALLOWED.values()) <= MOST
    assert all(allowed.reason for allowed in ALLOWED.values())


def test_a_private_word_is_found_with_its_line_and_a_hint() -> None:
    allowed = [Use(path, 1, word) for (path, word), row in ALLOWED.items() for _ in range(row.uses)]
    extra = list(uses_in("services/x.py", 'a = "fine"\nlog("the word was sworded", password=1)  # keeps_house_\n'))
    assert extra == [Use("services/x.py", 2, "word")]
    (line,) = complaints([*allowed, *extra])
    assert line.startswith("services/x.py:2: 'word': write 'record'")
    assert len(complaints(allowed[1:])) == 1
