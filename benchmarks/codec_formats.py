"""One captured call with 8192 prompt and 1024 sampled tokens: MessagePack with packed arrays beside JSON with lists.

Both formats pass through the same model and the same `rollmill.codec`, so both pay for validation; the last row is
JSON without any model, the least that a program in Python pays for lists of numbers. The contenders take turns, so that
what else runs on the machine meets all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from rollmill.codec import JSON, MSGPACK, decode, encode
from rollmill.models import CompletionRecord, SampledChoice

PROMPT, SAMPLED = 8192, 1024
ROUNDS, CALLS = 200, 3

Call = Callable[[], object]


def measure() -> dict[str, Any]:
    """Bytes, and microseconds of one encode and one decode: of the fastest round, and of the median round."""
    record = _record()
    packed, text = encode(record, MSGPACK), encode(record, JSON)
    plain = orjson.loads(text)
    calls: dict[tuple[str, str], Call] = {
        ("msgpack_packed", "encode"): lambda: encode(record, MSGPACK),
        ("msgpack_packed", "decode"): lambda: decode(CompletionRecord, packed),
        ("json_lists", "encode"): lambda: encode(record, JSON),
        ("json_lists", "decode"): lambda: decode(CompletionRecord, text),
        ("json_lists_without_model", "encode"): lambda: orjson.dumps(plain),
        ("json_lists_without_model", "decode"): lambda: orjson.loads(text),
    }
    rows: dict[str, Any] = {
        "msgpack_packed": {"bytes": len(packed)},
        "json_lists": {"bytes": len(text)},
        "json_lists_without_model": {"bytes": len(text)},
    }
    for (row, name), times in _timed(calls).items():
        rows[row] |= {f"{name}_us": round(min(times), 1), f"{name}_median_us": round(statistics.median(times), 1)}
    return {"record": {"prompt_tokens": PROMPT, "sampled_tokens": SAMPLED}, **rows}


def _record() -> CompletionRecord:
    random = np.random.default_rng(0)
    choice = SampledChoice(
        token_ids=random.integers(0, 150_000, SAMPLED, dtype=np.int32),
        logprobs=-random.exponential(1.0, SAMPLED).astype(np.float32),
    )
    prompt = random.integers(0, 150_000, PROMPT, dtype=np.int32)
    return CompletionRecord(session_id="s", completion_id="c", prompt_ids=prompt, choices=(choice,))


def _timed(calls: dict[tuple[str, str], Call]) -> dict[tuple[str, str], list[float]]:
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(_microseconds(call))
    return times


def _microseconds(call: Call) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6
