"""A trainer without a model: it writes down every token that it trains, and its checkpoint cuts that book to size.

    python -m chaos.trainer DIRECTORY

What the book says after the last start is the lineage of the loaded checkpoint, and nothing else.
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

from chaos.clock import CLOCK_FILE, PutClock
from rollmill.errors import EXIT_CRASHED, EXIT_FENCED, FencedError, RollmillError
from rollmill.models import PolicyVersion
from rollmill.settings import KafkaSettings
from rollmill.trainer import BatchStream, NoBatch, PackedArrays, PolicyPublisher, Step

EVERY = 3
"""Steps between checkpoints."""
WAIT = 1.0
BOOK, SEEN, CHECKPOINT, DRAIN = "book.jsonl", "seen.jsonl", "checkpoint.json", "drain"


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
                for step in self.stream.steps(lambda: self.version, timeout=WAIT):
                    self._train(step)
            except NoBatch:
                self._end()

    def _load(self) -> None:
        """Weights, position and book, always of one moment; a restart is a new epoch (rule R1)."""
        checkpoint, book = self.directory / CHECKPOINT, self.directory / BOOK
        book.touch()
        if not checkpoint.exists():
            self._save()
        kept = orjson.loads(checkpoint.read_bytes())
        os.truncate(book, kept["book"])
        self.trained = kept["trained"]
        self.stream.load_state_dict(kept["stream"])
        began = (self.directory / SEEN).exists()
        self.version = self.publisher.resume(self.trained) if began else self.publisher.announce(0)
        append(self.directory / SEEN, {"loaded": self.trained})

    def _save(self) -> None:
        new = self.directory / "checkpoint.new"
        book = (self.directory / BOOK).stat().st_size
        new.write_bytes(orjson.dumps({"trained": self.trained, "book": book, "stream": self.stream.state_dict()}))
        new.replace(self.directory / CHECKPOINT)

    def _train(self, step: Step) -> None:
        line = entry(step)
        append(self.directory / BOOK, line)
        append(self.directory / SEEN, {key: line[key] for key in ("step", "batch_id", "digest")})
        self.trained += 1
        self.version = self.publisher.update(PolicyVersion(self.version.epoch, self.trained))
        step.ack()
        if self.trained % EVERY == 0:
            self._save()

    def _end(self) -> None:
        if (self.directory / DRAIN).exists() and not self.ended:
            self.stream.end_of_stream()
            self.ended = True


def append(file: Path, line: dict[str, Any]) -> None:
    with file.open("ab") as book:
        book.write(orjson.dumps(line) + b"\n")


def entry(step: Step) -> dict[str, Any]:
    """Everything of a step that is trained."""
    traces = [trace for packed in step.arrays for trace in _traces(step, packed)]
    return {"step": step.number, "batch_id": step.batch_id, "digest": digest(step), "traces": traces}


def _traces(step: Step, packed: PackedArrays) -> Iterator[dict[str, Any]]:
    edges = packed.cu_seqlens.tolist()
    for place, row in enumerate(packed.trace_index.tolist()):
        inside = slice(edges[place], edges[place + 1])
        if row < 0 or not packed.loss_mask[inside].any():
            continue
        head = step.header.table[row]
        yield {
            "session_id": head.session_id,
            "units": [[unit.completion_id, unit.choice, unit.start, unit.stop] for unit in head.units],
            "ids": packed.input_ids[inside].tolist(),
            "mask": packed.loss_mask[inside].astype(int).tolist(),
            "log_probs": packed.behavior_log_probs[inside].tolist(),
            "reward": float(packed.rewards[place]),
        }


def digest(step: Step) -> str:
    """Of every array as it is handed over."""
    found = hashlib.sha256(step.batch_id.encode())
    for packed in step.arrays:
        for name, value in sorted(vars(packed).items()):
            found.update(name.encode() + (value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()))
    return found.hexdigest()


def main(directory: Path) -> int:
    clock = PutClock(directory.parent / CLOCK_FILE)
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
        # What failed outside is known by the checkpoint alone: start again from there.
        print(repr(error), file=sys.stderr)
        return EXIT_CRASHED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
