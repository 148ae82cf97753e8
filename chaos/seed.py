"""One seed from start to verdict."""

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

from chaos.agents import Load
from chaos.evidence import Evidence, gather
from chaos.faults import Injector
from chaos.homecoming import all_home
from chaos.oracle import Findings, judge
from chaos.recompute import recompute
from chaos.recovery import Progress
from chaos.schedule import Fault
from chaos.stack import Stack
from chaos.trainer import DRAIN
from rollmill.ops.ledger import Balance, balances

WARM_SECONDS = 3.0
SETTLE_SECONDS = 120.0
DRAIN_SECONDS = 200.0


@dataclass
class Verdict:
    """All that is known of one seed."""

    seed: int
    faults: Counter[str]
    findings: Findings = field(default_factory=Findings)
    balance: Balance | None = None
    """None: it came not so far."""
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
        """Tokens are lost or doubled, and not only late."""
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
    """The value that 95 of 100 do not exceed."""
    ranked = sorted(values)
    return ranked[ceil(0.95 * len(ranked)) - 1] if ranked else 0.0


async def run_seed(stack: Stack, seed: int, faults: Sequence[Fault], pause: float) -> Verdict:
    """Load, faults one after the other, drain, and the comparison."""
    began = time.monotonic()
    verdict = Verdict(seed, Counter(fault.kind.value for fault in faults))
    load = Load(stack.capture_url, f"s{seed}", pause)
    working = asyncio.create_task(load.run())
    alarm = asyncio.create_task(stack.supervisor.fatal_exit())
    try:
        await _storm(stack, faults, verdict)
        load.stop()
        await asyncio.wait_for(working, DRAIN_SECONDS)
        await all_home(stack, load.seen.keys())
        (stack.trainer_directory / DRAIN).touch()
        verdict.balance = await _settled(stack)
        if verdict.balance.balanced and verdict.balance.total.pending:
            verdict.violations.append(f"{verdict.balance.total.pending} tokens are still under way: not settled")
        await _compare(stack, load, verdict)
        if alarm.done():
            verdict.violations.append(alarm.result())
    except TimeoutError:
        verdict.violations.append("the load never came to its end")
    finally:
        for task in (working, alarm):
            task.cancel()
        await asyncio.gather(working, alarm, return_exceptions=True)
    verdict.violations += load.complaints
    verdict.seconds = time.monotonic() - began
    return verdict


async def _settled(stack: Stack) -> Balance:
    """The balance once nothing is pending, or as soon as it does not balance; else as it is after a while."""
    until = time.monotonic() + SETTLE_SECONDS
    async for balance in balances(stack.settings):
        if not (balance.total.pending and balance.balanced) or time.monotonic() > until:
            return balance
    raise RuntimeError("looking at the ledger has no end of its own")


async def _storm(stack: Stack, faults: Sequence[Fault], verdict: Verdict) -> None:
    injector = Injector(stack)
    async with httpx.AsyncClient() as http:
        progress = Progress(stack, http)
        await asyncio.sleep(WARM_SECONDS)
        for fault in faults:
            await asyncio.sleep(fault.after)
            stack.chronicle.write(f"fault: {fault}")
            names = await injector.inject(fault)
            times = await asyncio.gather(*(progress.recovered(name) for name in names))
            _note(verdict, fault, dict(zip(names, times, strict=True)))
            if verdict.violations:
                break
    verdict.violations += injector.violations
    verdict.unreached = injector.unreached


def _note(verdict: Verdict, fault: Fault, times: Mapping[str, float | None]) -> None:
    for name, seconds in times.items():
        if seconds is None:
            verdict.violations.append(f"{fault}: {name} does not recover")
        else:
            verdict.recovery.setdefault(name, []).append(seconds)


async def _compare(stack: Stack, load: Load, verdict: Verdict) -> None:
    evidence: Evidence = await gather(stack)
    verdict.findings = judge(load.seen, evidence)
    verdict.dead_letters = evidence.dead_letters
    verdict.batches, differing = await recompute(stack)
    verdict.violations += differing
