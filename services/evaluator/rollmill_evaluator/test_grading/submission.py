"""A session's submission: a patch, or the content of one file, taken out of its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from rollmill.models import Trajectory
from rollmill.models.base import Record

FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)")
DIFF_LANGUAGES = frozenset({"diff", "patch"})


class Submission(Record):
    """Where the answer is in a session's output, and whether it is a patch or a file."""

    take: Literal["output", "fenced", "artifact"] = "output"
    """``output``: the text at ``field``. ``fenced``: the last fenced block of that text. ``artifact``: the text of that
    ``name`` under ``artifacts``."""
    field: str = Field(default="patch", min_length=1)
    """Where the text is in the session's output: names joined by dots. Not for an artifact."""
    name: str | None = None
    """Of the artifact."""
    language: str | None = None
    """Of the fenced block; None: ``diff`` or ``patch`` for a patch, any for a file."""
    write_to: str | None = None
    """The file of the work tree that the text becomes; None: the text is a patch."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.take == "artifact") != (self.name is not None):
            raise ValueError("name is for take: artifact, and needed there")
        if self.write_to is not None and (self.write_to.startswith("/") or ".." in self.write_to.split("/")):
            raise ValueError("write_to must be a path inside of the work tree")
        return self

    def text(self, trajectory: Trajectory) -> str | None:
        """The answer; None where the session submitted nothing, or only white space."""
        found = self._select(orjson.loads(trajectory.output or b"null"))
        if self.take == "fenced" and found is not None:
            found = self._last_fenced(found)
        return found if found is not None and found.strip() else None

    def _select(self, output: Any) -> str | None:
        path = ["artifacts", self.name] if self.take == "artifact" else self.field.split(".")
        for key in path:
            output = output.get(key) if isinstance(output, dict) else None
        return output if isinstance(output, str) else None

    def _last_fenced(self, text: str) -> str | None:
        wanted = {self.language} if self.language else DIFF_LANGUAGES if self.write_to is None else None
        blocks = [block for language, block in fenced_blocks(text) if wanted is None or language in wanted]
        return blocks[-1] if blocks else None


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block, by CommonMark's rules; a block that is never closed is left out."""
    fence, language, block = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        if not fence and (opening := FENCE.match(line)):
            fence, language, block = opening["fence"], opening["language"], []
        elif fence and line.startswith(fence) and not line.strip().strip(fence[0]):
            yield language, "".join(block)
            fence = ""
        elif fence:
            block.append(line)
