"""Flux's public API, name by name: whoever comes from it finds every class, field, property, method and parameter."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

import pytest

from rollmill.trainer.flux import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryBuffer,
    TrajectoryStatus,
)

FIELDS: dict[type[Any], dict[str, Any]] = {
    PolicyVersion: {"version_id": 0, "timestamp": 0.0, "step": 0},
    Trajectory: {
        "id": "",
        "group_id": None,
        "prompt": "",
        "prompt_tokens": [],
        "prompt_length": 0,
        "response": "",
        "response_tokens": [],
        "response_length": 0,
        "tokens": [],
        "attention_mask": [],
        "loss_mask": [],
        "log_probs": [],
        "behavior_log_probs": [],
        "reward": 0.0,
        "token_rewards": [],
        "values": [],
        "advantages": [],
        "returns": [],
        "version": PolicyVersion(),
        "version_segments": [],
        "status": TrajectoryStatus.PENDING,
        "metadata": {},
        "generation_time_ms": 0.0,
    },
    PartialTrajectory: {
        "continuation_prompt": "",
        "start_rollout_id": None,
        "continuation_count": 0,
        "kv_cache_ref": None,
    },
    TrajectoryBuffer: {"max_size": 10000, "max_staleness": 5},
}
PARAMETERS = [
    (Trajectory.get_version_gap, ["current_version"]),
    (Trajectory.to_dict, []),
    (TrajectoryBatch, ["trajectories"]),
    (TrajectoryBatch.to_tensors, ["device", "pad_token_id"]),
    (TrajectoryBatch.compute_padding_ratio, []),
    (TrajectoryBatch.get_version_stats, []),
    (TrajectoryBuffer, ["max_size", "max_staleness"]),
    (TrajectoryBuffer.add, ["trajectory"]),
    (TrajectoryBuffer.add_batch, ["trajectories"]),
    (TrajectoryBuffer.get_available, ["current_version"]),
    (TrajectoryBuffer.sample, ["n", "current_version", "stratified"]),
    (TrajectoryBuffer.remove_stale, ["current_version"]),
    (TrajectoryBuffer.get_stats, []),
    (PartialTrajectory.can_continue, ["max_continuations"]),
    (PartialTrajectory.prepare_continuation, []),
]


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_have_their_names_and_defaults(kind: type[Any]) -> None:
    found = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(kind)
    }
    assert {name: found[name] for name in FIELDS[kind]} == FIELDS[kind]


@pytest.mark.parametrize(("called", "names"), PARAMETERS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_parameters_come_by_name_and_in_their_order(called: Any, names: list[str]) -> None:
    taken = [name for name in inspect.signature(called).parameters if name != "self"]
    assert taken[: len(names)] == names


def test_properties_and_states() -> None:
    for kind, names in (
        (Trajectory, ("total_length", "has_version_boundaries", "is_complete")),
        (TrajectoryBatch, ("batch_size", "max_length", "num_tokens", "rewards")),
    ):
        assert all(isinstance(inspect.getattr_static(kind, name), property) for name in names)
    assert issubclass(PartialTrajectory, Trajectory)
    assert issubclass(TrajectoryStatus, Enum)
    values = {status.name: status.value for status in TrajectoryStatus}
    assert values == {name: name.lower() for name in values}
    assert {"PENDING", "GENERATING", "COMPLETED", "ABORTED", "FAILED"} <= set(values)


def test_the_documented_use_works_as_it_is_written() -> None:
    made = [
        Trajectory(
            id=str(number),
            prompt_tokens=[1],
            response_tokens=[2] * number,
            version=PolicyVersion(version_id=number),
            status=TrajectoryStatus.COMPLETED,
        )
        for number in (1, 2, 3)
    ]
    buffer = TrajectoryBuffer(max_size=10000, max_staleness=1)
    buffer.add(made[0])
    buffer.add_batch(made[1:])
    version = PolicyVersion(version_id=3)
    assert [each.id for each in buffer.get_available(version)] == ["2", "3"]
    assert len(buffer.sample(n=32, current_version=version, stratified=True)) == 2
    assert buffer.remove_stale(version) == 1
    stats = buffer.get_stats()
    assert (stats["size"], stats["mean_staleness"], stats["max_staleness"]) == (2, 0.5, 1)
    batch = TrajectoryBatch(trajectories=made)
    assert batch.compute_padding_ratio() == pytest.approx(3 / 12)
    assert len(batch.to_tensors(device="cpu", pad_token_id=0)) == 9
    assert Trajectory.from_dict(made[0].to_dict()) == made[0]
