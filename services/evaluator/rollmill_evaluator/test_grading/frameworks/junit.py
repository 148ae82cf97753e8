"""The XML report that many frameworks write (JUnit's)."""

from __future__ import annotations

from xml.parsers import expat

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, worst_statuses

BAD = {"failure": Status.FAILED, "error": Status.FAILED, "skipped": Status.SKIPPED}


def read(_text: str, report: bytes | None) -> Results:
    """Names as ``file::classname::name``, without the parts that a report leaves out. No report, or a broken one, has
    no results.
    """
    reader = _Reader()
    try:
        reader.parse(report or b"")
    except (expat.ExpatError, _RefusedError):
        return {}
    return worst_statuses(reader.found)


class _RefusedError(Exception):
    """Entities of its own: a report needs none, a bomb does."""


class _Reader:
    def __init__(self) -> None:
        self.found: list[tuple[str, Status]] = []
        self._name, self._status = "", Status.PASSED

    def parse(self, report: bytes) -> None:
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.EntityDeclHandler = _refuse
        parser.Parse(report, True)  # noqa: FBT003  # expat takes no keywords

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "testcase":
            parts = (attributes.get(key, "") for key in ("file", "classname", "name"))
            self._name, self._status = "::".join(filter(None, parts)), Status.PASSED
        elif tag in BAD and self._status is not Status.FAILED:
            self._status = BAD[tag]

    def _end(self, tag: str) -> None:
        if tag == "testcase":
            self.found.append((self._name, self._status))


def _refuse(*_: object) -> None:
    raise _RefusedError
