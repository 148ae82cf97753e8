"""The outcome of a job, from how its process ended and what its script reported. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollmill.errors import InfrastructureError
from rollmill.strategies.sandbox import SANDBOX_FAILED, Ending, Job, JobOutcome, StepResult
from rollmill_evaluator.sandbox.process import ProcessResult

ENGINE_FAILED = 125
"""Exit code of the Docker client where the engine failed, and not the program in the container."""
NUMBER_DIGITS = 12
"""At most, of a number in a report; a line with a longer one is no report."""


def outcome_of(job: Job, nonce: str, process: ProcessResult, *, exhausted: bool = False) -> JobOutcome:
    """The outcome of ``job``. Raises InfrastructureError where its script never began, or was ended from outside."""
    reports = read_reports(job, nonce, process.reports)
    if not reports.began:
        output = reports.before.decode(errors="replace").strip()[-1000:]
        raise InfrastructureError(
            SANDBOX_FAILED, f"the sandbox did not come up ({process.ending}): {output or 'no output'}"
        )
    ending = process.ending
    if ending is Ending.EXITED and (process.exit_code < 0 or process.exit_code == ENGINE_FAILED):
        raise InfrastructureError(SANDBOX_FAILED, f"the sandbox was ended from outside (code {process.exit_code})")
    if ending is Ending.EXITED and not reports.ended:
        ending = Ending.EXHAUSTED if exhausted else Ending.DIED
    return JobOutcome(ending, process.seconds, tuple(reports.steps), process.output, reports.files)


@dataclass
class Reports:
    """What the script reported."""

    before: bytes = b""
    """Output before its first report: error messages of the sandbox itself."""
    began: bool = False
    ended: bool = False
    steps: list[StepResult] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def read_reports(job: Job, nonce: str, data: bytes) -> Reports:
    """The reports in ``data``; anything else in it is ignored."""
    reports = Reports()
    marker = f"{nonce} ready\n".encode()
    reports.before, found, rest = data.partition(marker)
    reports.began = bool(found)
    for kind, numbers, payload in _lines(nonce, rest):
        _take(reports, job, kind, numbers, payload)
    return reports


def _lines(nonce: str, data: bytes) -> Iterator[tuple[str, list[int], bytes]]:
    at = 0
    while (start := data.find(f"{nonce} ".encode(), at)) >= 0:
        stop = data.find(b"\n", start)
        if stop < 0:
            return
        kind, numbers = _parsed(data[start + len(nonce) + 1 : stop])
        size = numbers[-1] if numbers else 0
        yield kind, numbers, data[stop + 1 : stop + 1 + size]
        at = stop + 1 + size


def _parsed(line: bytes) -> tuple[str, list[int]]:
    kind, *numbers = line.decode(errors="replace").split() or [""]
    if all(number.isascii() and number.isdigit() and len(number) <= NUMBER_DIGITS for number in numbers):
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
