"""One run of the demo, from nothing to a report."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Final
from uuid import uuid4

from relay.display import Display
from relay.loop import Loop, Played
from relay.model import from_bytes, to_bytes, use_one_thread, warm_start
from relay.options import Options
from relay.oracle import mismatches
from relay.pipeline import kafka_at, running_pipeline
from relay.report import Report, last_mean
from rollmill.runtime.supervisor import DRAIN_ORDER, Supervisor
from rollmill.settings import KafkaSettings

_SHOWN: Final = 5


async def run(options: Options, directory: Path, display: Display) -> Report:
    """Run the loop with its files under ``directory``. Raises FatalError and TimeoutError where it cannot go on."""
    began = time.monotonic()
    use_one_thread()
    warming = asyncio.create_task(asyncio.to_thread(warm_start, options.seed))
    async with kafka_at(options.bootstrap_servers, directory, display.say) as bootstrap_servers:
        settings = _settings(options, bootstrap_servers)
        weights = to_bytes((await warming).state_dict())
        file = directory / "warm.safetensors"
        file.write_bytes(weights)
        engine = {"weights": str(file), "seed": str(options.seed), "sabotage": options.sabotage.value}
        async with running_pipeline(settings, directory, engine, display.say) as pipeline:
            async with asyncio.timeout(options.seconds):
                played = await Loop(options, settings, pipeline, from_bytes(weights), display).play()
            restarts = 0 if pipeline.supervisor is None else _restarts(pipeline.supervisor)
    return make_report(options, played, display, restarts, time.monotonic() - began)


def _settings(options: Options, bootstrap_servers: str) -> KafkaSettings:
    """A prefix of its own, so that a cluster may be used again."""
    return KafkaSettings(
        bootstrap_servers=bootstrap_servers,
        prefix=f"relay-{uuid4().hex[:8]}.",
        partitions=options.partitions,
        batch_partitions=options.ranks,
        run="relay",
    )


def _restarts(supervisor: Supervisor) -> int:
    return sum(supervisor.starts(name) - 1 for name in DRAIN_ORDER)


def make_report(options: Options, played: Played, display: Display, restarts: int, seconds: float) -> Report:
    total, lessons, record = played.balance.total, played.lessons, played.record
    kinds = _mismatches(played, display)
    rewards = lessons.rewards
    return Report(
        reward_first=rewards[0] if rewards else None,
        reward_last=last_mean(rewards),
        steps=len(rewards),
        policy_version=lessons.version,
        sessions=len(record),
        calls=record.calls,
        calls_per_second=record.calls / played.agents_seconds,
        seconds=played.seconds,
        seconds_in_all=seconds,
        tokens_read=record.tokens,
        tokens_captured=total.captured,
        tokens_trained=total.trained,
        tokens_excluded=dict(sorted(total.excluded.items())),
        tokens_dead_lettered=total.dead_lettered.total(),
        tokens_pending=total.pending,
        tokens_lost=total.lost,
        tokens_doubled=total.doubled,
        tokens_uncaptured=total.uncaptured,
        stale_trajectories=played.stale,
        agent_errors=len(record.errors),
        restarts=restarts,
        logprob_gap_max=lessons.gap.largest,
        logprob_gap_tokens=lessons.gap.tokens,
        oracle_mismatches=kinds.total(),
        oracle_mismatches_by_kind=dict(sorted(kinds.items())),
        layout=options.layout.value,
        ranks=options.ranks,
        seed=options.seed,
        sabotage=options.sabotage.value,
    )


def _mismatches(played: Played, display: Display) -> Counter[str]:
    """What the oracle finds, by kind; the first ones are told."""
    found = mismatches(played.lessons.steps, played.record)
    unknown = played.lessons.gap.unknown
    for line in [*map(str, found), *unknown][:_SHOWN]:
        display.say(f"oracle: {line}")
    return Counter({"label": len(unknown)} if unknown else {}) + Counter(mismatch.what for mismatch in found)
