"""A trainer without a model: it writes every token that it trains into a journal, which a restart truncates to its
checkpoint.

    python -m chaos.trainer DIRECTORY

So the journal always has the lineage of the loaded checkpoint and what was trained since, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from chaos.clock import CLOCK_FILE, ShiftedClock
from rollmill.errors import EXIT_CRASHED, EXIT_FENCED, FencedError, RollmillError
from rollmill.models import PolicyVersion
from rollmill.settings import KafkaSettings
from rollmill.trainer import BatchStream, NoBatch, PackedArrays, PolicyPublisher, Step

CHECKPOINT_STEPS = 3
"""Steps between checkpoints."""
WAIT_SECONDS = 1.0
JOURNAL, HANDED_OVER, CHECKPOINT, DRAIN = "journal.jsonl", "handed_over.jsonl", "checkpoint.json", "drain"


@dataclass
class Trainer:
    directory: Path
    stream: BatchStream
    publisher: PolicyPublisher
    trained: int = 0
    version: PolicyVersion = field(default_factory=PolicyVersion)
    ended: bool = False

    def run(self) -> None:
        self._load()
        while True:
            try:
                for step in self.stream.steps(lambda: self.version, timeout=WAIT_SECONDS):
                    self._train(step)
            except NoBatch:
                self._end_if_asked()

    def _load(self) -> None:
        """Load weights, position and journal of one moment; a restart is a new epoch (rule R1)."""
        checkpoint, journal = self.directory / CHECKPOINT, self.directory / JOURNAL
        journal.touch()
        if not checkpoint.exists():
            self._save()
        saved = orjson.loads(checkpoint.read_bytes())
        os.truncate(journal, saved["journal_bytes"])
        self.trained = saved["trained"]
        self.stream.load_state_dict(saved["stream"])
        restarted = (self.directory / HANDED_OVER).exists()
        self.version = self.publisher.resume(self.trained) if restarted else self.publisher.announce(0)
        append(self.directory / HANDED_OVER, {"loaded": self.trained})

    def _save(self) -> None:
        new = self.directory / "checkpoint.new"
        journal_bytes = (self.directory / JOURNAL).stat().st_size
        new.write_bytes(
            orjson.dumps({"trained": self.trained, "journal_bytes": journal_bytes, "stream": self.stream.state_dict()})
        )
        new.replace(self.directory / CHECKPOINT)

    def _train(self, step: Step) -> None:
        line = entry(step)
        append(self.directory / JOURNAL, line)
        append(self.directory / HANDED_OVER, {key: line[key] for key in ("step", "batch_id", "digest")})
        self.trained += 1
        self.version = self.publisher.update(PolicyVersion(self.version.epoch, self.trained))
        step.ack()
        if self.trained % CHECKPOINT_STEPS == 0:
            self._save()

    def _end_if_asked(self) -> None:
        if (self.directory / DRAIN).exists() and not self.ended:
            self.stream.end_of_stream()
            self.ended = True


def append(file: Path, line: dict[str, Any]) -> None:
    with file.open("ab") as journal:
        journal.write(orjson.dumps(line) + b"\n")


def entry(step: Step) -> dict[str, Any]:
    """The journal's line of a step: everything that is trained."""
    traces = [trace for packed in step.arrays for trace in _traces(step, packed)]
    return {"step": step.number, "batch_id": step.batch_id, "digest": digest(step), "traces": traces}


def _traces(step: Step, packed: PackedArrays) -> Iterator[dict[str, Any]]:
    edges = packed.cu_seqlens.tolist()
    for place, row in enumerate(packed.trace_index.tolist()):
        tokens = slice(edges[place], edges[place + 1])
        if row < 0 or not packed.loss_mask[tokens].any():
            continue
        trace = step.header.table[row]
        yield {
            "session_id": trace.session_id,
            "units": [[unit.completion_id, unit.choice, unit.start, unit.stop] for unit in trace.units],
            "ids": packed.input_ids[tokens].tolist(),
            "mask": packed.loss_mask[tokens].astype(int).tolist(),
            "log_probs": packed.behavior_log_probs[tokens].tolist(),
            "reward": float(packed.rewards[place]),
        }


def digest(step: Step) -> str:
    """A hash of every array of the step, as it is handed over."""
    hasher = hashlib.sha256(step.batch_id.encode())
    for packed in step.arrays:
        for name, value in sorted(vars(packed).items()):
            hasher.update(name.encode() + (value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()))
    return hasher.hexdigest()


def main(directory: Path) -> int:
    clock = ShiftedClock(directory.parent / CLOCK_FILE)
    settings = KafkaSettings()
    try:
        with (
            BatchStream(settings=settings, clock=clock) as stream,
            PolicyPublisher(settings=settings, clock=clock) as publisher,
        ):
            Trainer(directory, stream, publisher).run()
    except FencedError as error:
        print(error, file=sys.stderr)
        return EXIT_FENCED
    except RollmillError as error:
        # The broker or storage failed: only the checkpoint is certain, so restart from it.
        print(repr(error), file=sys.stderr)
        return EXIT_CRASHED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
