"""Several seeds on one broker, one after the other; whatever ends this, nothing of it goes on."""

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

from chaos.mutations import Mutation
from chaos.schedule import Fault, Kind
from chaos.seed import Verdict, percentile_95, run_seed
from chaos.stack import Doors, running_stack
from chaos.volume import own_volume
from rollmill.errors import RollmillError
from rollmill.runtime.kafka.embedded import EmbeddedKafka


@dataclass(frozen=True)
class Job:
    """One seed. ``name``: of its topics and its folder."""

    name: str
    seed: int
    faults: tuple[Fault, ...]
    mutation: Mutation | None = None


def possible_kinds(directory: Path, wanted: Sequence[Kind]) -> list[Kind]:
    """Those that can be arranged here; why one cannot is said on standard error. Makes the broker's folder."""
    data = directory / "kafka"
    data.mkdir(parents=True, exist_ok=True)
    why = own_volume(data) if Kind.DISK_FULL in wanted else None
    if why is not None:
        print(f"skipped {Kind.DISK_FULL}: {why}", file=sys.stderr)
    return [kind for kind in wanted if why is None or kind is not Kind.DISK_FULL]


async def run_jobs(directory: Path, jobs: Iterable[Job], pause: float) -> list[Verdict]:
    """A line of JSON on standard error for each. SIGTERM ends everything in order, as Ctrl-C does."""
    work = asyncio.current_task()
    if work is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is away is no news here
    doors, verdicts = Doors.free(), []
    async with EmbeddedKafka(directory / "kafka", doors.config()) as broker:
        for job in jobs:
            verdicts.append(await _run(directory, broker, doors, job, pause))
            print(json.dumps(verdicts[-1].as_json()), file=sys.stderr, flush=True)
    return verdicts


async def _run(directory: Path, broker: EmbeddedKafka, doors: Doors, job: Job, pause: float) -> Verdict:
    try:
        async with running_stack(directory / job.name, broker, doors, f"{job.name}.", job.mutation) as stack:
            return await run_seed(stack, job.seed, job.faults, pause)
    except RollmillError as error:
        return Verdict(job.seed, Counter(), violations=[repr(error)])


def summed_up(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The line on standard output."""
    times = [seconds for verdict in verdicts for values in verdict.recovery.values() for seconds in values]
    return {
        "seeds": len(verdicts),
        "faults": sum(verdict.faults.total() for verdict in verdicts),
        "sessions": sum(verdict.findings.sessions for verdict in verdicts),
        "tokens": sum(verdict.findings.tokens for verdict in verdicts),
        "lost": sum(verdict.findings.lost for verdict in verdicts),
        "doubled": sum(verdict.findings.doubled for verdict in verdicts),
        "ledger_balanced": all(verdict.ledger_balanced for verdict in verdicts),
        "recovery_p95_s": round(percentile_95(times), 2),
        "failed": [verdict.seed for verdict in verdicts if not verdict.passed],
    }


def damage(mutation: Mutation, verdict: Verdict) -> dict[str, Any]:
    """Whether a mutation was found out by what it did to tokens, and not by a run that broke down."""
    found = verdict.findings
    return {
        "mutation": mutation.value,
        "found": verdict.damaged,
        "lost": found.lost,
        "doubled": found.doubled,
        "ledger_balanced": verdict.ledger_balanced,
    }
