"""Several runs on one broker, one after the other. However this ends, no process of it remains."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.disk_image import mount_disk_image
from chaos.faults.fault_plan import Fault, FaultKind
from chaos.mutations import Mutation
from chaos.run import RunResult, percentile_95, run_once
from chaos.stack import ClientListeners, running_stack
from rollmill.errors import RollmillError
from rollmill.runtime.kafka.embedded import EmbeddedKafka


@dataclass(frozen=True)
class RunSpec:
    """One run. ``name``: prefix of its topics, and name of its folder."""

    name: str
    seed: int
    faults: tuple[Fault, ...]
    mutation: Mutation | None = None


def available_kinds(directory: Path, wanted: Sequence[FaultKind]) -> list[FaultKind]:
    """The kinds that are possible here; standard error says why one is not. Makes the folder of the broker."""
    data = directory / "kafka"
    data.mkdir(parents=True, exist_ok=True)
    why = mount_disk_image(data) if FaultKind.DISK_FULL in wanted else None
    if why is not None:
        print(f"skipped {FaultKind.DISK_FULL}: {why}", file=sys.stderr)
    return [kind for kind in wanted if why is None or kind is not FaultKind.DISK_FULL]


async def run_all(directory: Path, specs: Iterable[RunSpec], pause: float) -> list[RunResult]:
    """Run all, with a line of JSON on standard error for each. SIGTERM ends everything in order, as Ctrl-C does."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the broker is stopped on purpose
    listeners, results = ClientListeners.free(), []
    async with EmbeddedKafka(directory / "kafka", listeners.config()) as broker:
        for spec in specs:
            results.append(await _run(directory, broker, listeners, spec, pause))
            print(json.dumps(results[-1].as_json()), file=sys.stderr, flush=True)
    return results


async def _run(
    directory: Path, broker: EmbeddedKafka, listeners: ClientListeners, spec: RunSpec, pause: float
) -> RunResult:
    try:
        async with running_stack(directory / spec.name, broker, listeners, f"{spec.name}.", spec.mutation) as stack:
            return await run_once(stack, spec.seed, spec.faults, pause)
    except RollmillError as error:
        return RunResult(spec.seed, Counter(), violations=[repr(error)])


def summary_line(results: Sequence[RunResult]) -> dict[str, Any]:
    """The line for standard output."""
    times = [seconds for result in results for values in result.recovery.values() for seconds in values]
    return {
        "seeds": len(results),
        "faults": sum(result.faults.total() for result in results),
        "sessions": sum(result.findings.sessions for result in results),
        "tokens": sum(result.findings.tokens for result in results),
        "lost": sum(result.findings.lost for result in results),
        "doubled": sum(result.findings.doubled for result in results),
        "ledger_balanced": all(result.ledger_balanced for result in results),
        "recovery_p95_s": round(percentile_95(times), 2),
        "failed": [result.seed for result in results if not result.passed],
    }


def mutation_line(mutation: Mutation, result: RunResult) -> dict[str, Any]:
    """Whether a mutation was detected: by what it did to tokens, and not by a run that failed."""
    found = result.findings
    return {
        "mutation": mutation.value,
        "found": result.damaged,
        "lost": found.lost,
        "doubled": found.doubled,
        "ledger_balanced": result.ledger_balanced,
    }
