"""What the commands of ``rollmill tasks`` do: show stopped tasks, and decide about the records in their hands."""

from __future__ import annotations

import json

import typer

from rollmill.cli.options import this_user
from rollmill.cli.timestamps import iso
from rollmill.ops.stopped_tasks import StoppedTask, decide, find_stopped, read_stopped
from rollmill.runtime.stream.task_stop import Decision, TaskDecision
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.settings import KafkaSettings

ADVICE = "`rollmill tasks retry NAME` once the cause is corrected; `set-aside` or `skip` pass over the record in hand"


async def print_stopped(settings: KafkaSettings, *, as_json: bool) -> list[StoppedTask]:
    """Print the stopped tasks, one line of JSON each or as text, and return them."""
    stopped = await read_stopped(settings)
    for task in stopped:
        typer.echo(json.dumps(_json(task)) if as_json else _text(task))
    if not as_json:
        typer.echo(ADVICE if stopped else "no task has stopped over its limit of dead letters")
    return stopped


def _json(task: StoppedTask) -> dict[str, object]:
    decision = None if task.decision is None else task.decision.model_dump(mode="json")
    return {"task": task.name, **task.stop.model_dump(mode="json"), "decision": decision}


def _text(task: StoppedTask) -> str:
    stop = task.stop
    lines = [
        f"{task.name} stopped at {iso(stop.at)} with the record {stop.slot}@{stop.offset} (key {stop.key}) in hand",
        f"  {stop.reason}: {stop.error}",
    ]
    if task.decision is not None:
        lines.append(f"  decided by {task.decision.by}: {task.decision.decision}; it goes on when its process runs")
    return "\n".join(lines)


async def decide_about(settings: KafkaSettings, name: str, decision: Decision, by: str | None, why: str) -> None:
    """Decide about the record that the task ``name`` has in hand. Raises InvalidInputError where it has not stopped."""
    task = await find_stopped(settings, name)
    made = TaskDecision(
        slot=task.stop.slot,
        offset=task.stop.offset,
        decision=decision,
        by=by or this_user(),
        why=why,
        at=SystemClock().now(),
    )
    await decide(settings, task, made)
    typer.echo(f"{name}: {decision} of {task.stop.slot}@{task.stop.offset}; it goes on when its process runs")
