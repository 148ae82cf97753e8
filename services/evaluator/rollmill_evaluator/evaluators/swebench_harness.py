"""The evaluator ``swebench_harness``."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmill.errors import InfrastructureError
from rollmill.models import EvalResult, Trajectory, Verdict
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass, ResourceRequest
from rollmill.strategies.sandbox import SANDBOX_FAILED, Job, JobOutcome, Step
from rollmill_evaluator.test_grading import swebench_instances, swebench_package, workspace
from rollmill_evaluator.test_grading.scoring import OUTPUT_CHARACTERS, premature_end, session_failure
from rollmill_evaluator.test_grading.swebench_instances import SwebenchHarnessConfig

EVAL_SCRIPT = "/job/eval.sh"
TESTBED = "/testbed"


class SwebenchHarnessEvaluator(BaseTrajectoryEvaluator):
    """Grades a patch for a SWE-bench instance, by the scripts, log parsers and grading of the package ``swebench``.

    Constructed with the fields of `SwebenchHarnessConfig`; raises ValueError for an invalid config. Needs the
    extra ``rollmill[swebench]``. Nothing is downloaded: instances are given, and images must be on the engine already.
    """

    version = "1"
    resource_class = ResourceClass.SANDBOX

    def __init__(self, **config: Any) -> None:
        self._config = SwebenchHarnessConfig.validate_strictly(config)

    def requested_resources(self) -> list[ResourceRequest]:
        return self._config.resources.requested

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        config = self._config
        patch = config.answer.text(trajectory)
        if patch is None:
            return session_failure(Verdict.EMPTY_PATCH, config.rewards, {})
        instance = await asyncio.to_thread(self._instance, context)
        spec = await asyncio.to_thread(swebench_package.test_spec, instance)
        job = self._job(patch, instance, spec.eval_script, context)
        outcome = await (context.containers if config.runtime == "container" else context.sandbox).run(job)
        ended_early = premature_end(job, outcome, config.rewards)
        return await self._graded(spec, patch, outcome) if ended_early is None else ended_early

    def _instance(self, context: EvaluationContext) -> dict[str, Any]:
        config = self._config
        if config.instances is not None and config.instance_id is not None:
            return swebench_instances.find_instance(context.sources, config.instances, config.instance_id)
        return config.instance or {}

    def _job(self, patch: str, instance: dict[str, Any], eval_script: str, context: EvaluationContext) -> Job:
        config = self._config
        local = config.source is not None
        clone = [workspace.clone(str(instance.get("base_commit", "HEAD")))] if local else []
        return Job(
            steps=(
                *clone,
                workspace.apply_patch(config.exclude, config.fuzz, TESTBED),
                Step("test", ("/bin/bash", EVAL_SCRIPT)),
            ),
            files={
                workspace.ANSWER: (patch if patch.endswith("\n") else f"{patch}\n").encode(),
                EVAL_SCRIPT: eval_script.encode(),
            },
            mounts={workspace.SOURCE: workspace.resolve_source(context.sources, config.source)}
            if config.source
            else {},
            environment=config.environment,
            image=None if local else str(instance["image"]),
            limits=config.resources.limits,
        )

    async def _graded(self, spec: swebench_package.TestSpec, patch: str, outcome: JobOutcome) -> EvalResult:
        log = outcome.output.text
        if swebench_package.START not in log:
            raise InfrastructureError(
                SANDBOX_FAILED, f"the eval script never started its tests: {log[-OUTPUT_CHARACTERS:]}"
            )
        report = await asyncio.to_thread(swebench_package.report, spec, patch, log)
        return EvalResult(
            outcome_reward=1.0 if report["resolved"] else 0.0,
            verdict=Verdict.GRADED,
            components=swebench_package.shares(report),
            metadata={
                "report": {name: value for name, value in report.items() if name != "tests_status"},
                "swebench": swebench_package.version(),
                "ending": outcome.ending.value,
                "seconds": round(outcome.seconds, 3),
                "output": log[-OUTPUT_CHARACTERS:],
                "output_dropped": outcome.output.dropped,
            },
        )
