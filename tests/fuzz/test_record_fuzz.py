"""Readers and stages under records that no program should write: `make fuzz-records`.

Any producer can write any bytes. A reader answers with the record or with PoisonRecordError; a stage with outputs or
with a dead letter, within a second; and whatever was in between, every session ends. The ordinary suite tries the same
few thousand records in every run; ``ROLLMILL_FUZZ_EXAMPLES`` (50,000 by `make fuzz-records`) new ones.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter

import pytest

from rollmill.codec import decode, encode, read_manifest
from rollmill.models import DeadLetterInfo, Manifest, PolicyVersion, TokenRange
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.trainer.layouts.safetensors_reader import read_batch
from tests.fuzz.mutation import Mutator
from tests.fuzz.records import DECODED, TYPES, content_type, fault_of, mutated, seeds
from tests.fuzz.stages import STAGES

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
"""A number beyond float32 is refused by the check that follows the cast."""

FUZZING = os.environ.get("ROLLMILL_HYPOTHESIS_PROFILE") == "fuzz"
EXAMPLES = int(os.environ.get("ROLLMILL_FUZZ_EXAMPLES", "50000"))
READ = EXAMPLES // len(DECODED) if FUZZING else 300
"""Records of each topic that are read."""
RUNS = EXAMPLES // 50 if FUZZING else 120
"""Runs of each stage; one has some twenty records."""
SEED = int(os.environ.get("ROLLMILL_FUZZ_SEED", secrets.randbits(32) if FUZZING else 1))


def mutator_of(name: str) -> Mutator:
    return Mutator(random.Random(f"{SEED}/{name}"))  # noqa: S311  # the same records for the same seed


@pytest.mark.parametrize("topic", DECODED, ids=lambda topic: topic.name)
def test_a_reader_refuses_in_one_way_only(topic: object) -> None:
    (found,) = [each for each in DECODED if each is topic]
    samples, mutator, faults, read = seeds(found), mutator_of(found.name), Counter[str](), 0
    assert samples, f"{found.name} has no example in schemas/examples"
    for sample in samples:
        for form in TYPES:
            assert decode(found.model, encode(sample, form), content_type(form)) == sample
    for _ in range(READ):
        value, headers = mutated(mutator.rng.choice(samples), mutator)
        fault = fault_of(lambda value=value, headers=headers: decode(found.model, value, headers))  # type: ignore[misc]
        faults.update([fault] if fault else [])
        read += 1
    assert read == READ
    assert faults == {}, f"seed {SEED}"


def test_what_a_header_holds_is_read_as_carefully() -> None:
    mutator, faults = mutator_of("headers"), Counter[str]()
    manifest = Manifest(session_id="s", attempt=1, units=(TokenRange("c", 0, 0, 2, PolicyVersion()),))
    info = DeadLetterInfo(reason="r", error="e", stage="s", topic="built", partition=0, offset=0, key="6b")
    for _ in range(READ):
        value, headers = mutated(manifest, mutator)
        other, _ = mutated(info, mutator)
        for work in (
            lambda value=value: read_manifest((("manifest", value),)),
            lambda other=other, headers=headers: decode(DeadLetterInfo, other, headers),
        ):
            fault = fault_of(work)
            faults.update([fault] if fault else [])
    assert faults == {}, f"seed {SEED}"


def test_a_damaged_micro_batch_is_refused() -> None:
    mutator, faults = mutator_of("batches"), Counter[str]()
    (value,) = step_values(0, [[[SampleTrace("s")]]])[0]
    for _ in range(READ):
        damaged = mutator.damage(value)
        fault = fault_of(lambda damaged=damaged: read_batch(damaged))  # type: ignore[misc]  # a lambda with a default
        faults.update([fault] if fault else [])
    assert faults == {}, f"seed {SEED}"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_survives_and_everything_ends(name: str) -> None:
    mutator, faults = mutator_of(name), Counter[str]()
    for _ in range(RUNS):
        faults.update(STAGES[name](mutator))
    assert faults == {}, f"seed {SEED}"
