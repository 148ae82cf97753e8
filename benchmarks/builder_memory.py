"""`make bench-builder-memory`: what an open session costs a builder process, all in.

Sessions are opened and called through the stage and the engine's own state, with restorable updates, all of them open
at once and their calls interleaved, as a fleet of agents does it. Each number of sessions has a process of its own; its
resident memory is measured. The slope between the smallest and the largest number is the cost of one session; 100,000
of them have to fit into 12 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from rollmill.codec import encode
from rollmill.models import CompletionRecord, SampledChoice, SessionOpened, SessionSpec
from rollmill.runtime.stream.processor import InputRecord
from rollmill.runtime.stream.state import TaskState, origin_of
from rollmill.strategies import builder_registry
from rollmill.topics import COMPLETIONS
from rollmill_builder.stage import BuilderStage, BuilderState

RESULTS = Path(__file__).parent / "results"
SCALES = (2000, 4000, 8000)
TURNS, TOKENS, SAMPLED, TEXT = 20, 8192, 0.4, 4
"""Per session: turns, tokens of the last prompt and reply, share of them that is sampled, bytes of text per token."""
AIM = 12 * 2**30 / 100_000

TASK = BuilderStage(registry=builder_registry(), partitions=1, late_window=3600.0)


class Fleet:
    """Sessions that a task holds open."""

    def __init__(self, count: int) -> None:
        self._random = np.random.default_rng(0)
        self._local = TASK.task_local()
        self._state = TaskState[BuilderState].of(TASK, self._local)
        self._offset = 0
        self._count = count

    def run(self) -> float:
        """Resident bytes per session, once each has had all its turns, beyond what the process had before."""
        before = _resident()
        for number in range(self._count):
            name = f"session-{number:012d}"
            self._feed(SessionOpened(session_id=name, spec=SessionSpec(group_id=f"group-{number // 8}"), at=1.0))
        for turn in range(TURNS):
            for number in range(self._count):
                self._feed(self._call(number, turn))
        return (_resident() - before) / self._count

    def _feed(self, event: SessionOpened | CompletionRecord) -> None:
        record = InputRecord(COMPLETIONS, 0, self._offset, event.session_id.encode(), encode(event))
        self._offset += 1
        self._state.stage(TASK.process(self._state, record, self._local), origin_of(0, 0, record.offset))
        self._state.commit()
        self._local.committed(self._state)

    def _call(self, number: int, turn: int) -> CompletionRecord:
        """A turn of a session; its tokens and text differ from other sessions', and are the same in each call."""
        random = np.random.default_rng((number, 7))
        share, sampled = TOKENS // TURNS, int(TOKENS // TURNS * SAMPLED)
        ids = random.integers(10, 150_000, TOKENS, dtype=np.int32)
        prompt, reply = ids[: (turn + 1) * share - sampled], ids[(turn + 1) * share - sampled : (turn + 1) * share]
        return CompletionRecord(
            session_id=f"session-{number:012d}",
            completion_id=f"msg_{number:012x}{turn:04x}",
            started_at=2.0 + turn,
            ended_at=2.5 + turn,
            model="policy",
            usage_completion_tokens=sampled,
            fingerprint="0123456789abcdef",
            prompt_ids=prompt,
            choices=(_choice(reply, random, self._text(number, turn, "reply", sampled)),),
            request={"model": "policy", "messages": self._messages(number, turn, share, sampled)},
        )

    def _messages(self, number: int, turn: int, share: int, sampled: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for earlier in range(turn + 1):
            text = self._text(number, earlier, "user", share - sampled)
            messages.append({"role": "user", "content": text})
            if earlier < turn:
                messages.append({"role": "assistant", "content": self._text(number, earlier, "reply", sampled)})
        return messages

    @staticmethod
    def _text(number: int, turn: int, kind: str, tokens: int) -> str:
        name = f"{number} {turn} {kind} "
        return (name * (tokens * TEXT // len(name) + 1))[: tokens * TEXT]


def _choice(reply: Any, random: np.random.Generator, text: str) -> SampledChoice:
    return SampledChoice(
        token_ids=reply,
        logprobs=-random.exponential(1.0, len(reply)).astype(np.float32),
        finish_reason="stop",
        message={"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None},
    )


def _resident() -> int:
    fields = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(field.split()[1]) * 1024 for field in fields if field.startswith("VmRSS"))


def _of_a_process(count: int) -> float:
    """Resident bytes of ``count`` sessions together."""
    command = [sys.executable, "-m", "benchmarks.builder_memory", "--fleet", str(count)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # ourselves
    return float(found.stdout) * count


def measure() -> dict[str, Any]:
    totals = {count: _of_a_process(count) for count in SCALES}
    slope = (totals[SCALES[-1]] - totals[SCALES[0]]) / (SCALES[-1] - SCALES[0])
    return {
        "session": {"turns": TURNS, "tokens": TOKENS, "sampled": SAMPLED, "text_bytes_per_token": TEXT},
        "mib_by_sessions": {str(count): round(total / 2**20, 1) for count, total in totals.items()},
        "kib_per_session": round(slope / 1024, 2),
        "aim_kib_per_session": round(AIM / 1024, 2),
        "gib_for_100k_sessions": round(slope * 100_000 / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-builder-memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--fleet", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fleet:
        print(Fleet(options.fleet).run())
        return
    found = measure()
    document = {**provenance(), "note": options.note, "results": found}
    print(json.dumps(found, indent=2))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "builder_memory.json").write_text(json.dumps(document, indent=2) + "\n")
    if options.json:
        print(json.dumps({**document, **found}))


if __name__ == "__main__":
    main()
