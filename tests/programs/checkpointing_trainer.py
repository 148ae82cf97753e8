"""A trainer without a model: its weights are the digest of all that it was trained on, so any difference shows.

It says on standard output what it does, one line each, so that a test can kill it at any of them.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from rollmill.models import PolicyVersion
from rollmill.settings import KafkaSettings
from rollmill.trainer import BatchStream, Step

FIRST_WEIGHTS = "0"
EVERY = 5


def main(directory: Path, total: int) -> None:
    with BatchStream(settings=KafkaSettings(), timeout=60) as stream:
        weights, trained = load(directory, stream)
        steps = stream.steps(lambda: PolicyVersion(0, trained), until=lambda: trained == total)
        for step in steps:
            say("got", step.number)
            batch = digest(step)
            weights = hashlib.sha256((weights + batch).encode()).hexdigest()
            trained += 1
            say("trained", step.number, batch, weights)
            step.ack()
            say("acked", step.number)
            if trained % EVERY == 0:
                save(directory, stream, weights, trained)
                say("saved", step.number)


def load(directory: Path, stream: BatchStream) -> tuple[str, int]:
    """Weights and position, always of one moment."""
    path = directory / "checkpoint.json"
    if not path.exists():
        save(directory, stream, FIRST_WEIGHTS, 0)
    found = json.loads(path.read_text())
    stream.load_state_dict(found["stream"])
    say("loaded", found["trained"])
    return found["weights"], found["trained"]


def save(directory: Path, stream: BatchStream, weights: str, trained: int) -> None:
    new = directory / "checkpoint.new"
    new.write_text(json.dumps({"weights": weights, "trained": trained, "stream": stream.state_dict()}))
    new.replace(directory / "checkpoint.json")


def digest(step: Step) -> str:
    """Of every array as it is handed over."""
    found = hashlib.sha256(step.batch_id.encode())
    for packed in step.arrays:
        for name, value in sorted(vars(packed).items()):
            found.update(name.encode() + (value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()))
    return found.hexdigest()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


main(Path(sys.argv[1]), int(sys.argv[2]))
