"""What was sampled by another tokenizer, template or model is refused before anything trains on it (rule A10)."""

import re

import pytest

from rollmill.errors import ConfigurationError
from rollmill.models import Trajectory
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.testing.samples.trajectories import sample_trace, sample_trajectory
from rollmill.topics import BATCHES, TRAJECTORIES
from rollmill.trainer.batches.step_assembly import Expectation, StepAssembler
from rollmill.trainer.layouts.safetensors_reader import read_batch
from rollmill_batcher.groups.config import BatcherConfig, Learning
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo


def rollout(name: str, reward: float, *fingerprints: str | None) -> Trajectory:
    traces = [
        sample_trace(name, index=index, metadata={"branch": "main"} | ({"fingerprint": digest} if digest else {}))
        for index, digest in enumerate(fingerprints)
    ]
    return sample_trajectory(name, reward, traces=traces)


def offered(expect: str | None, **fingerprints: int) -> None:
    """A step of two traces at a stream that expects ``expect``."""
    (value,) = step_values(0, [[[SampleTrace("a"), SampleTrace("b")]]], fingerprints=fingerprints)[0]
    wanted = None if expect is None else frozenset({expect})
    StepAssembler(Expectation("run", "policy", 0, 1, fingerprints=wanted), 0).feed(0, read_batch(value))


def test_a_header_counts_the_traces_of_each_fingerprint() -> None:
    rules = BatcherConfig(run="run", policy="policy", learning=Learning("dr_grpo", DrGrpo()), groups_per_step=1)
    task: MemoryTask[StateValue] = MemoryTask(BatcherStage(rules))
    for member in (rollout("a", 1.0, "m2", "m1"), rollout("b", 0.0, "m1", None)):
        task.feed(TRAJECTORIES, member)
    task.punctuate(200.0)
    (emit,) = task.of(BATCHES)
    assert isinstance(emit.value, bytes)
    assert read_batch(emit.value).header.fingerprints == {"m1": 2, "m2": 1}


@pytest.mark.parametrize("expect", ["m1", None])
def test_what_is_expected_and_what_is_not_asked_for_passes(expect: str | None) -> None:
    offered(expect, m1=2)


@pytest.mark.parametrize(
    ("came", "said"),
    [
        ({"m1": 1, "m2": 1}, "of its 2 traces 1 of 'm2', expected 'm1'"),
        ({"m1": 1}, "of its 2 traces 1 without a fingerprint, expected 'm1'"),
        ({}, "of its 2 traces 2 without a fingerprint, expected 'm1'; load the model that sampled them"),
    ],
)
def test_a_mismatch_says_what_came_what_was_expected_and_what_to_do(came: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        offered("m1", **came)
