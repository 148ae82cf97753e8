"""What a sandbox's process wrote, read as the outcome of its job. Pure."""

from __future__ import annotations

from rollmill.errors import InfrastructureError
from rollmill.strategies.sandbox import SANDBOX_FAILED, Ending, Job, JobOutcome
from rollmill_evaluator.sandbox.process import Ended
from rollmill_evaluator.sandbox.script import read_reports

ENGINE_FAILED = 125
"""By which the Docker client says that the engine failed, and not what ran in it."""


def outcome_of(job: Job, word: str, ended: Ended, *, exhausted: bool = False) -> JobOutcome:
    """The outcome of ``job``. Raises InfrastructureError where its script never began, or was ended from outside."""
    reports = read_reports(job, word, ended.reports)
    if not reports.began:
        said = reports.before.decode(errors="replace").strip()[-1000:]
        raise InfrastructureError(SANDBOX_FAILED, f"the sandbox did not come up ({ended.ending}): {said or 'no word'}")
    ending = ended.ending
    if ending is Ending.EXITED and (ended.exit_code < 0 or ended.exit_code == ENGINE_FAILED):
        raise InfrastructureError(SANDBOX_FAILED, f"the sandbox was ended from outside (code {ended.exit_code})")
    if ending is Ending.EXITED and not reports.ended:
        ending = Ending.EXHAUSTED if exhausted else Ending.DIED
    return JobOutcome(ending, ended.seconds, tuple(reports.steps), ended.output, reports.files)
