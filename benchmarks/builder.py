"""`make bench-builder`: time and memory of the builder for one session, beside the builder that the field runs.

Rows: turns, final context of each agent, agents that take turns. Both builders start from the same calls: packed arrays
as a decoder leaves them; beside that from MessagePack and from JSON, decoding included. Times are processor time, the
least of several runs that alternate between the two; memory is the peak beside the calls. ``speedup_100x32k``: the
field's time over ours at 100 turns, 32k tokens, one agent. What it is made of, for the same row: ``compared_only``
counts of the field's work nothing but the comparing and joining of lists that are there already; ``without_models``
also their making from the arrays. ``growth_100_to_300``: our time per turn at 300 turns over that at 100, at equal
final context; the worse of two contexts.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import orjson

from benchmarks import builder_reference
from benchmarks.builder_reference import ListCall, ListTrace, as_lists
from benchmarks.builder_sessions import Size, records
from benchmarks.provenance import provenance
from rollmill.codec import JSON, MSGPACK, decode, encode
from rollmill.models import CompletionRecord, CompletionSession
from rollmill_builder.merging.closed_session import ClosedSession
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.storage.call_store import CallLog

RESULTS = Path(__file__).parent / "results"
TURNS = (10, 30, 100, 300)
CONTEXTS = (8192, 32768, 131072)
DECODED_UP_TO = 100 * 32768
"""Turns x context up to which decoding is measured, too; lists of more would take minutes."""
SECONDS, LEAST, MOST = 0.5, 3, 15
"""Of repeats for one row."""

Run = Callable[[], object]


def measure(turns: Sequence[int] = TURNS, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    rows = [_row(Size(n, tokens, agents)) for agents in (1, 8) for tokens in contexts for n in turns]
    by_size = {(row["agents"], row["turns"], row["tokens"]): row for row in rows}
    growths = {str(tokens): _growth(by_size, tokens) for tokens in contexts[1:]}
    chosen = by_size[1, 100, 32768]
    return {
        "speedup_100x32k": round(chosen["field_ms"] / chosen["ours_ms"], 1),
        "speedup_100x32k_without_models": round(chosen["field_without_models_ms"] / chosen["ours_ms"], 1),
        "speedup_100x32k_compared_only": round(chosen["field_compared_only_ms"] / chosen["ours_ms"], 1),
        "growth_100_to_300": round(max(growths.values()), 3),
        "growths": {tokens: round(growth, 3) for tokens, growth in growths.items()},
        "rows": rows,
    }


def _growth(rows: dict[tuple[int, int, int], dict[str, Any]], tokens: int) -> float:
    few, many = (float(rows[1, turns, tokens]["ours_ms"]) / turns for turns in (100, 300))
    return many / few


def _row(size: Size) -> dict[str, Any]:
    calls = records(size)
    traces, expected = ours(calls).traces, field(calls)
    if sorted(trace.response_ids.tolist() for trace in traces) != sorted(trace.response_ids for trace in expected):
        raise AssertionError(f"the two builders differ at {size}")
    lists = [_bare(call) for call in as_lists(calls)]
    times = _alternating(
        lambda: ours(calls),
        lambda: field(calls),
        lambda: builder_reference.merge([_bare(call) for call in as_lists(calls)]),
        lambda: builder_reference.merge(lists),
    )
    names = ("ours_ms", "field_ms", "field_without_models_ms", "field_compared_only_ms")
    row: dict[str, Any] = {"agents": size.agents, "turns": size.turns, "tokens": size.tokens}
    row |= dict(zip(names, times, strict=True))
    row |= {"ours_peak_mib": _peak(lambda: ours(calls)), "field_peak_mib": _peak(lambda: field(calls))}
    if size.agents == 1 and size.turns * size.tokens <= DECODED_UP_TO:
        row |= _decoded(calls)
    return row


def _bare(call: ListCall) -> ListTrace:
    """A trace that nothing has validated."""
    return ListTrace.model_construct(
        prompt_ids=call.prompt,
        response_ids=call.reply,
        loss_mask=[1] * len(call.reply),
        response_logprobs=call.logprobs,
        finish_reason=call.finish_reason,
    )


def field(calls: Sequence[CompletionRecord]) -> list[ListTrace]:
    return builder_reference.build(as_lists(calls))


def ours(calls: Sequence[CompletionRecord]) -> Any:
    """Intake of each call, then the close."""
    log = CallLog.of(calls)
    return PrefixMergingBuilder().build_closed(ClosedSession(CompletionSession(session_id="s"), log))


def _decoded(calls: list[CompletionRecord]) -> dict[str, float]:
    plain = [vars(call) for call in as_lists(calls)]
    found: dict[str, float] = {}
    for name, mine, theirs, read in (
        (
            "msgpack",
            [encode(call, MSGPACK) for call in calls],
            [msgpack.packb(call) for call in plain],
            msgpack.unpackb,
        ),
        ("json", [encode(call, JSON) for call in calls], [orjson.dumps(call) for call in plain], orjson.loads),
    ):
        runs = (partial(_ours_from, mine), partial(_field_from, theirs, read))
        found |= dict(zip((f"ours_{name}_ms", f"field_{name}_ms"), _alternating(*runs), strict=True))
    return found


def _ours_from(values: Sequence[bytes]) -> object:
    return ours([decode(CompletionRecord, value) for value in values])


def _field_from(values: Sequence[bytes], read: Callable[[bytes], Any]) -> object:
    return builder_reference.build([ListCall(**read(value)) for value in values])


def _alternating(*runs: Run) -> list[float]:
    """Least time of each, in milliseconds."""
    best = [_seconds(run) for run in runs]
    repeats = min(MOST, max(LEAST, int(SECONDS / sum(best))))
    for _ in range(repeats):
        best = [min(before, _seconds(run)) for before, run in zip(best, runs, strict=True)]
    return [round(seconds * 1e3, 3) for seconds in best]


def _seconds(run: Run) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _peak(run: Run) -> float:
    tracemalloc.start()
    try:
        run()
        return round(tracemalloc.get_traced_memory()[1] / 2**20, 2)
    finally:
        tracemalloc.stop()


def _table(found: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for row in found["rows"] for name in row))
    lines = [" ".join(f"{name:>12}" for name in names)]
    lines += [" ".join(f"{row.get(name, '-'):>{max(12, len(name))}}" for name in names) for row in found["rows"]]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in found.items() if name != "rows")])


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-builder", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    options = parser.parse_args()
    found = measure()
    document = {**provenance(), "note": options.note, "results": found}
    print(_table(found))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "builder.json").write_text(json.dumps(document, indent=2) + "\n")
    if options.json:
        print(json.dumps({**document, **{name: value for name, value in found.items() if name != "rows"}}))


if __name__ == "__main__":
    main()
