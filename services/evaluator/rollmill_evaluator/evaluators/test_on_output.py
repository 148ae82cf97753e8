"""The evaluator ``test_on_output``."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmill.models import EvalResult, Trajectory, Verdict
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass, ResourceRequest
from rollmill.strategies.sandbox import WORK, Ending, Job, JobOutcome, Step
from rollmill_evaluator.test_grading import workspace
from rollmill_evaluator.test_grading.config import TestOnOutputConfig
from rollmill_evaluator.test_grading.scoring import OUTPUT_CHARACTERS, Score, premature_end, session_failure

LISTED_TESTS = 50
"""Names of tests that are kept in an evaluation."""


class TestOnOutputEvaluator(BaseTrajectoryEvaluator):
    """Runs tests on a session's submission in a sandbox and compares their results with the expected ones.

    Constructed with the fields of `TestOnOutputConfig`; raises ValueError for an invalid config.
    """

    version = "1"
    resource_class = ResourceClass.SANDBOX

    def __init__(self, **config: Any) -> None:
        self._config = TestOnOutputConfig.validate_strictly(config)

    def requested_resources(self) -> list[ResourceRequest]:
        return self._config.resources.requested

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        config = self._config
        answer = config.answer.text(trajectory)
        if answer is None:
            return session_failure(Verdict.EMPTY_PATCH, config.rewards, {})
        job = self._job(answer, context)
        sandbox = context.sandbox if config.image is None else context.containers
        outcome = await sandbox.run(job)
        ended_early = premature_end(job, outcome, config.rewards)
        return await asyncio.to_thread(self._graded, outcome) if ended_early is None else ended_early

    def _job(self, answer: str, context: EvaluationContext) -> Job:
        config = self._config
        source = workspace.resolve_source(context.sources, config.source)
        return Job(
            steps=tuple(self._steps(workspace.source_kind(source))),
            files={workspace.ANSWER: (answer if answer.endswith("\n") else f"{answer}\n").encode()},
            mounts={workspace.SOURCE: source},
            environment=config.environment,
            collect=() if config.report is None else (f"{WORK}/{config.report}",),
            image=config.image,
            limits=config.resources.limits,
        )

    def _steps(self, kind: workspace.SourceKind) -> list[Step]:
        config = self._config
        apply = workspace.apply_patch(config.exclude, config.fuzz)
        if config.answer.write_to is not None:
            apply = workspace.write_answer(config.answer.write_to)
        return [
            workspace.unpack(kind, config.commit, config.strip),
            workspace.save_protected(config.protected),
            apply,
            workspace.restore_protected(config.protected),
            config.test_step,
        ]

    def _graded(self, outcome: JobOutcome) -> EvalResult:
        config = self._config
        last = outcome.step("test")
        exit_code = last.exit_code if last is not None and outcome.ending is Ending.EXITED else None
        report = next(iter(outcome.files.values()), None)
        results = config.result_parser.read(outcome.output.text, report)
        score = config.scoring.score(results, exit_code, config.result_parser)
        return EvalResult(
            outcome_reward=score.value,
            verdict=Verdict.GRADED,
            components=score.components,
            metadata=_metadata(score, outcome, exit_code, len(results)),
        )


def _metadata(score: Score, outcome: JobOutcome, exit_code: int | None, tests: int) -> dict[str, Any]:
    return {
        "tests": tests,
        "missing": list(score.missing[:LISTED_TESTS]),
        "failing": list(score.failing[:LISTED_TESTS]),
        "exit_code": exit_code,
        "ending": outcome.ending.value,
        "seconds": round(outcome.seconds, 3),
        "output": outcome.output.text[-OUTPUT_CHARACTERS:],
        "output_dropped": outcome.output.dropped,
    }
