"""Makes a file of batch messages, as they lie in the topic ``batches``: `python benchmarks/record_batches.py FILE`.

Traces have long-tailed lengths, and every message is one micro-batch below the topic's limit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.testing.samples.recorded_messages import write_messages

LONGEST = 32_768
MEDIAN = 1_500.0
SPREAD = 1.2
PROMPT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--traces", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=131_072)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = record(options.file, options.traces, options.micro_batch_tokens, options.seed)
    print(f"{options.file}: {count} messages, {options.file.stat().st_size / 2**20:.1f} MiB")


def record(file: Path, traces: int, micro_batch_tokens: int, seed: int) -> int:
    """Writes one step for one rank; how many messages it has."""
    rng = random.Random(seed)
    batches = list(_filled([_trace(number, rng) for number in range(traces)], micro_batch_tokens))
    messages = step_values(0, [batches])[0]
    write_messages(file, messages)
    return len(messages)


def _trace(number: int, rng: random.Random) -> SampleTrace:
    size = min(LONGEST - PROMPT, max(1, int(rng.lognormvariate(0.0, SPREAD) * MEDIAN)))
    return SampleTrace(
        f"s{number}",
        prompt=tuple(rng.choices(range(32_000), k=PROMPT)),
        reply=tuple(rng.choices(range(32_000), k=size)),
        log_probs=tuple(-rng.random() for _ in range(size)),
        advantage=rng.uniform(-1, 1),
        group_id=f"g{number // 8}",
    )


def _filled(traces: list[SampleTrace], budget: int) -> Iterator[list[SampleTrace]]:
    batch: list[SampleTrace] = []
    for trace in traces:
        if batch and sum(each.tokens for each in batch) + trace.tokens > budget:
            yield batch
            batch = []
        batch.append(trace)
    yield batch


if __name__ == "__main__":
    main()
