"""One run, from start to result."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

import httpx

from chaos.checks.drain import drain
from chaos.checks.observations import Observations, collect
from chaos.checks.oracle import Findings, check
from chaos.checks.recovery import RecoveryTimer
from chaos.faults.fault_plan import Fault
from chaos.faults.nemesis import Nemesis
from chaos.load.workload import Workload
from chaos.recompute import recompute
from chaos.stack import Stack
from chaos.trainer import DRAIN
from rollmill.ops.ledger import Balance, balances

WARM_SECONDS = 3.0
SETTLE_SECONDS = 120.0
DRAIN_SECONDS = 200.0


@dataclass
class RunResult:
    """All findings of one run."""

    seed: int
    faults: Counter[str]
    findings: Findings = field(default_factory=Findings)
    balance: Balance | None = None
    """None: the run ended before."""
    recovery: dict[str, list[float]] = field(default_factory=dict)
    """Seconds, by client."""
    violations: list[str] = field(default_factory=list)
    dead_letters: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    unreached: int = 0
    seconds: float = 0.0

    @property
    def ledger_balanced(self) -> bool:
        return self.balance is not None and self.balance.balanced and not self.balance.total.pending

    @property
    def damaged(self) -> bool:
        """Whether tokens are lost or doubled, and not only late."""
        if self.balance is None:
            return False
        total, found = self.balance.total, self.findings
        return bool(total.lost or total.doubled or found.doubled or (found.lost and not total.pending))

    @property
    def passed(self) -> bool:
        return self.findings.clean and self.ledger_balanced and not self.violations

    def as_json(self) -> dict[str, Any]:
        found = self.findings
        return {
            "seed": self.seed,
            "passed": self.passed,
            "faults": dict(sorted(self.faults.items())),
            "sessions": found.sessions,
            "tokens": found.tokens,
            "trained": found.trained,
            "lost": found.lost,
            "doubled": found.doubled,
            "altered": found.altered,
            "unexplained": found.unexplained,
            "excluded": dict(sorted(found.excluded.items())),
            "dead_letters": dict(sorted(self.dead_letters.items())),
            "batches_recomputed": self.batches,
            "ledger_balanced": self.ledger_balanced,
            "recovery": {name: summary(values) for name, values in sorted(self.recovery.items())},
            "failpoints_unreached": self.unreached,
            "seconds": round(self.seconds, 1),
            "wrong": [*self.violations, *found.complaints],
            **({} if self.balance is None or self.ledger_balanced else {"ledger": self.balance.total.as_json()}),
        }


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 2), "p95": round(percentile_95(values), 2), "count": len(values)}


def percentile_95(values: Sequence[float]) -> float:
    """The value that 95 % of ``values`` do not exceed."""
    ranked = sorted(values)
    return ranked[ceil(0.95 * len(ranked)) - 1] if ranked else 0.0


async def run_once(stack: Stack, seed: int, faults: Sequence[Fault], pause: float) -> RunResult:
    """Run the load, inject the faults one after the other, drain, and check."""
    began = time.monotonic()
    result = RunResult(seed, Counter(fault.kind.value for fault in faults))
    load = Workload(stack.capture_url, f"s{seed}", pause)
    working = asyncio.create_task(load.run())
    alarm = asyncio.create_task(stack.supervisor.fatal_exit())
    try:
        await _inject_faults(stack, faults, result)
        load.stop()
        await asyncio.wait_for(working, DRAIN_SECONDS)
        await drain(stack, load.agents.keys())
        (stack.trainer_directory / DRAIN).touch()
        result.balance = await _settled(stack)
        if result.balance.balanced and result.balance.total.pending:
            result.violations.append(f"{result.balance.total.pending} tokens are still pending: not settled")
        await _check(stack, load, result)
        if alarm.done():
            result.violations.append(alarm.result())
    except TimeoutError:
        result.violations.append("the load never ended")
    finally:
        for task in (working, alarm):
            task.cancel()
        await asyncio.gather(working, alarm, return_exceptions=True)
    result.violations += load.complaints
    result.seconds = time.monotonic() - began
    return result


async def _settled(stack: Stack) -> Balance:
    """The balance once nothing is pending or it does not balance; after `SETTLE_SECONDS` as it is."""
    until = time.monotonic() + SETTLE_SECONDS
    async for balance in balances(stack.settings):
        if not (balance.total.pending and balance.balanced) or time.monotonic() > until:
            return balance
    raise RuntimeError("the ledger's balances have no end")


async def _inject_faults(stack: Stack, faults: Sequence[Fault], result: RunResult) -> None:
    nemesis = Nemesis(stack)
    async with httpx.AsyncClient() as http:
        timer = RecoveryTimer(stack, http)
        await asyncio.sleep(WARM_SECONDS)
        for fault in faults:
            await asyncio.sleep(fault.after)
            stack.supervisor_log.write(f"fault: {fault}")
            names = await nemesis.inject(fault)
            times = await asyncio.gather(*(timer.seconds_to_recover(name) for name in names))
            _record_recovery(result, fault, dict(zip(names, times, strict=True)))
            if result.violations:
                break
    result.violations += nemesis.violations
    result.unreached = nemesis.unreached


def _record_recovery(result: RunResult, fault: Fault, times: Mapping[str, float | None]) -> None:
    for name, seconds in times.items():
        if seconds is None:
            result.violations.append(f"{fault}: {name} does not recover")
        else:
            result.recovery.setdefault(name, []).append(seconds)


async def _check(stack: Stack, load: Workload, result: RunResult) -> None:
    observations: Observations = await collect(stack)
    result.findings = check(load.agents, observations)
    result.dead_letters = observations.dead_letters
    result.batches, differing = await recompute(stack)
    result.violations += differing
