"""The shell script that runs a job's steps inside a sandbox, and the reading of what it reports.

Standard output carries the output of the last step and nothing else. Standard error carries reports, one line each,
some followed by as many bytes as the line says; each line begins with a word that is drawn anew for every job. The
steps do not have that stream. A job can still forge a report, as it can forge the output of its own tests; it gains
nothing else by it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollmill.strategies.sandbox import Job, StepResult
from rollmill_evaluator.sandbox.process import Bounds

SCRIPT = "/.job"
"""Where a sandbox has the script: a file, since one argument of a command holds at most 128 KiB."""
REPORT_BYTES = 4000
"""Of what a step before the last one printed."""

DIGITS = 12
"""Of a number in a report; more is no report."""

HEAD = """\
exec 3>&2 2>&1
say() { printf '%s %s\\n' WORD "$*" >&3; }
say ready
"""
QUIET = """\
( COMMAND ) </dev/null >/tmp/.step 2>&1 3>&-; code=$?
tail -c LIMIT /tmp/.step >/tmp/.report; rm -f /tmp/.step
say "step NUMBER $code $(($(wc -c </tmp/.report)))"; cat /tmp/.report >&3; rm -f /tmp/.report
[ "$code" = 0 ] || { say "end 0"; exit 0; }
"""
LAST = """\
say "last 0"
( COMMAND ) </dev/null 3>&-; code=$?
say "step NUMBER $code 0"
"""
COLLECT = """\
if [ -f PATH ] && head -c LIMIT PATH >/tmp/.collected; then
  say "file NUMBER $(($(wc -c </tmp/.collected)))"; cat /tmp/.collected >&3
fi
"""
TAIL = 'say "end 0"\nexit 0\n'


def script(job: Job, word: str) -> str:
    """The POSIX shell text that runs ``job``; its reports begin with ``word``."""
    parts = [HEAD.replace("WORD", word)]
    last = len(job.steps) - 1
    for number, step in enumerate(job.steps):
        text = LAST if number == last else QUIET.replace("LIMIT", str(REPORT_BYTES))
        parts.append(text.replace("NUMBER", str(number)).replace("COMMAND", shlex.join(step.argv)))
    for number, path in enumerate(job.collect):
        text = COLLECT.replace("LIMIT", str(job.limits.collect_bytes)).replace("NUMBER", str(number))
        parts.append(text.replace("PATH", shlex.quote(path)))
    return "".join([*parts, TAIL])


def last_began(word: str) -> bytes:
    """The report by which a job's last step begins."""
    return f"{word} last 0\n".encode()


def report_limit(job: Job) -> int:
    """Bytes that honest reports of ``job`` can come to."""
    return (len(job.steps) + 4) * (REPORT_BYTES + 200) + len(job.collect) * (job.limits.collect_bytes + 200)


def bounds_of(job: Job, word: str) -> Bounds:
    limits = job.limits
    return Bounds(limits.prepare_seconds, limits.seconds, last_began(word), limits.output_bytes, report_limit(job))


@dataclass
class Reports:
    """What the script said."""

    before: bytes = b""
    """What came before its first word: complaints of the sandbox itself."""
    began: bool = False
    ended: bool = False
    steps: list[StepResult] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def read_reports(job: Job, word: str, data: bytes) -> Reports:
    """The reports in ``data``; whatever is none of them is passed over."""
    reports = Reports()
    marker = f"{word} ready\n".encode()
    reports.before, found, rest = data.partition(marker)
    reports.began = bool(found)
    for kind, numbers, payload in _lines(word, rest):
        _take(reports, job, kind, numbers, payload)
    return reports


def _lines(word: str, data: bytes) -> Iterator[tuple[str, list[int], bytes]]:
    at = 0
    while (start := data.find(f"{word} ".encode(), at)) >= 0:
        stop = data.find(b"\n", start)
        if stop < 0:
            return
        kind, numbers = _parsed(data[start + len(word) + 1 : stop])
        size = numbers[-1] if numbers else 0
        yield kind, numbers, data[stop + 1 : stop + 1 + size]
        at = stop + 1 + size


def _parsed(line: bytes) -> tuple[str, list[int]]:
    kind, *numbers = line.decode(errors="replace").split() or [""]
    if all(number.isascii() and number.isdigit() and len(number) <= DIGITS for number in numbers):
        return kind, [int(number) for number in numbers]
    return "", []


def _take(reports: Reports, job: Job, kind: str, numbers: list[int], payload: bytes) -> None:
    match kind, numbers:
        case "step", [number, code, _] if number == len(reports.steps) < len(job.steps):
            reports.steps.append(StepResult(job.steps[number].name, code, payload.decode(errors="replace")))
        case "file", [number, size] if number < len(job.collect) and len(payload) == size:
            reports.files[job.collect[number]] = payload
        case "end", _:
            reports.ended = True
