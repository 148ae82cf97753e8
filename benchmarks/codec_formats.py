"""One captured call with 8192 prompt and 1024 sampled tokens: MessagePack with packed arrays beside JSON with lists.

Both formats pass through the same model and the same `rollmill.codec`, so both pay for validation; the last row is
JSON without any model, the least that a program in Python pays for lists of numbers.
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
REPEATS, CALLS = 7, 20


def measure() -> dict[str, Any]:
    """Size and median time of one encode and one decode; spread is the slowest over the fastest repeat."""
    record = _record()
    packed, text = encode(record, MSGPACK), encode(record, JSON)
    plain = orjson.loads(text)
    return {
        "record": {"prompt_tokens": PROMPT, "sampled_tokens": SAMPLED},
        "msgpack_packed": {
            "bytes": len(packed),
            **_timed("encode", lambda: encode(record, MSGPACK)),
            **_timed("decode", lambda: decode(CompletionRecord, packed)),
        },
        "json_lists": {
            "bytes": len(text),
            **_timed("encode", lambda: encode(record, JSON)),
            **_timed("decode", lambda: decode(CompletionRecord, text)),
        },
        "json_lists_without_model": {
            "bytes": len(text),
            **_timed("encode", lambda: orjson.dumps(plain)),
            **_timed("decode", lambda: orjson.loads(text)),
        },
    }


def _record() -> CompletionRecord:
    random = np.random.default_rng(0)
    choice = SampledChoice(
        token_ids=random.integers(0, 150_000, SAMPLED, dtype=np.int32),
        logprobs=-random.exponential(1.0, SAMPLED).astype(np.float32),
    )
    prompt = random.integers(0, 150_000, PROMPT, dtype=np.int32)
    return CompletionRecord(session_id="s", completion_id="c", prompt_ids=prompt, choices=(choice,))


def _timed(name: str, call: Callable[[], object]) -> dict[str, float]:
    call()
    times = sorted(_microseconds(call) for _ in range(REPEATS))
    return {f"{name}_us": round(statistics.median(times), 1), f"{name}_spread": round(times[-1] / times[0], 2)}


def _microseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6
