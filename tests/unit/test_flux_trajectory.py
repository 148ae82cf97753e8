"""The Flux view of a trace; every fault that was seen in Flux has a test by value."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import models
from rollmill.errors import InvalidInputError
from rollmill.models import SessionStatus, Trace, TraceTurn, VersionRun
from rollmill.trainer.flux import (
    AlignmentError,
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    VersionSegment,
    view_of,
    views_of,
)

KEYS = {
    "input_ids",
    "attention_mask",
    "loss_mask",
    "log_probs",
    "behavior_log_probs",
    "rewards",
    "advantages",
    "returns",
    "versions",
}


def trajectory(name: str = "a", prompt: int = 2, response: int = 3, /, **fields: Any) -> Trajectory:
    version = fields.pop("version", 4)
    values: dict[str, Any] = {
        "id": name,
        "prompt_tokens": list(range(10, 10 + prompt)),
        "response_tokens": list(range(20, 20 + response)),
        "version": PolicyVersion.of(version),
        "status": TrajectoryStatus.COMPLETED,
    }
    return Trajectory(**{**values, **fields})


def test_a_version_is_the_pipelines_with_other_names() -> None:
    version = PolicyVersion(7, timestamp=12.5, step=700, epoch=2)
    assert version.policy == models.PolicyVersion(2, 7)
    assert PolicyVersion.of(models.PolicyVersion(2, 7)) == version
    assert hash(PolicyVersion.of((2, 7))) == hash(version)
    assert (PolicyVersion().version_id, PolicyVersion().timestamp, PolicyVersion().step) == (0, 0.0, 0)


def test_versions_are_totally_ordered_epoch_first() -> None:
    assert PolicyVersion(9) <= PolicyVersion(9)
    assert PolicyVersion(9) < PolicyVersion(3, epoch=1)
    assert PolicyVersion(9) != PolicyVersion(9, epoch=1)
    assert max(PolicyVersion(1), PolicyVersion(5), PolicyVersion(3)).version_id == 5


def test_the_gap_is_the_pipelines_staleness() -> None:
    old = trajectory(version=5)
    assert old.get_version_gap(PolicyVersion(8)) == old.get_version_gap(8) == 3
    assert old.get_version_gap(4) == -1
    assert old.get_version_gap(models.PolicyVersion(1, 4), {1: 3}) == models.staleness(
        models.PolicyVersion(0, 5), models.PolicyVersion(1, 4), {1: 3}
    )


def test_lengths_and_tokens_follow_from_the_parts() -> None:
    made = trajectory()
    assert (made.prompt_length, made.response_length, made.total_length) == (2, 3, 5)
    assert made.tokens == [10, 11, 20, 21, 22]
    assert made.is_complete
    assert not trajectory(status=TrajectoryStatus.TRUNCATED).is_complete
    assert Trajectory(prompt_length=3, response_length=4).total_length == 7


def test_boundaries_are_between_versions_not_between_segments() -> None:
    four, five = PolicyVersion(4), PolicyVersion(5)
    assert not trajectory(
        version_segments=[VersionSegment(2, 3, four), VersionSegment(3, 5, four)]
    ).has_version_boundaries
    assert trajectory(version_segments=[VersionSegment(2, 3, four), VersionSegment(3, 5, five)]).has_version_boundaries
    assert VersionSegment(2, 5, four).length == 3
    with pytest.raises(ValueError, match="at least one token"):
        VersionSegment(3, 3, four)


def test_a_trajectory_survives_a_dict_whole() -> None:
    whole = trajectory(
        group_id="g",
        prompt="p",
        response="r",
        attention_mask=[1] * 5,
        loss_mask=[0, 0, 1, 1, 0],
        log_probs=[0.5] * 5,
        behavior_log_probs=[-1.0] * 3,
        reward=0.25,
        token_rewards=[0, 0, 0, 0, 1.0],
        values=[0.125] * 5,
        advantages=[2.0] * 5,
        returns=[3.0] * 5,
        version=PolicyVersion(4, 1.5, 40, epoch=1),
        version_segments=[VersionSegment(2, 5, PolicyVersion(4, epoch=1))],
        status=TrajectoryStatus.TRUNCATED,
        metadata={"nested": {"list": [1, 2]}},
        generation_time_ms=17.5,
    )
    data = json.loads(json.dumps(whole.to_dict()))
    again = Trajectory.from_dict(data)
    assert again == whole
    assert again.status is TrajectoryStatus.TRUNCATED
    assert (again.version.timestamp, again.version.step) == (1.5, 40)
    assert set(data) == set(vars(whole))
    with pytest.raises(TypeError):
        Trajectory.from_dict({**data, "unheard_of": 1})
    assert Trajectory.from_dict({}) == Trajectory()


def test_a_dict_shares_no_list_with_its_trajectory() -> None:
    made = trajectory()
    made.to_dict()["tokens"].append(99)
    data = made.to_dict()
    again = Trajectory.from_dict(data)
    again.tokens.append(1)
    assert made.tokens == data["tokens"] == [10, 11, 20, 21, 22]


def test_nine_tensors_right_padded_and_at_token() -> None:
    short = trajectory("a", 1, 2, version=3, reward=0.5, behavior_log_probs=[0, -1, -2], advantages=[1, 1, 1])
    long = trajectory("b", 2, 3, version=5, reward=1.0, behavior_log_probs=[0, 0, -3, -4, -5], advantages=[2] * 5)
    tensors = TrajectoryBatch([short, long]).to_tensors(pad_token_id=9)
    assert set(tensors) == KEYS
    assert tensors["input_ids"].tolist() == [[10, 20, 21, 9, 9], [10, 11, 20, 21, 22]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert tensors["loss_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert tensors["behavior_log_probs"].tolist() == [[0, -1, -2, 0, 0], [0, 0, -3, -4, -5]]
    assert tensors["log_probs"].tolist() == [[0.0] * 5] * 2
    assert tensors["rewards"].tolist() == [0.5, 1.0]
    assert tensors["versions"].tolist() == [3, 5]
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert {name for name, dtype in dtypes.items() if dtype is torch.int64} == {
        "input_ids",
        "attention_mask",
        "versions",
    }
    assert {dtype for name, dtype in dtypes.items() if name not in ("input_ids", "attention_mask", "versions")} == {
        torch.float32
    }
    assert TrajectoryBatch([short]).to_tensors(device="meta")["input_ids"].device.type == "meta"


def test_response_only_lists_lie_behind_the_prompt() -> None:
    tensors = TrajectoryBatch([trajectory(behavior_log_probs=[-1, -2, -3], advantages=[4, 5, 6])]).to_tensors()
    assert tensors["behavior_log_probs"].tolist() == [[0, 0, -1, -2, -3]]
    assert tensors["advantages"].tolist() == [[0, 0, 4, 5, 6]]
    assert (tensors["advantages"] * tensors["loss_mask"]).sum() == 15


def test_the_trajectorys_own_attention_mask_is_used() -> None:
    assert TrajectoryBatch([trajectory(attention_mask=[0, 1, 1, 1, 1])]).to_tensors()["attention_mask"].tolist() == [
        [0, 1, 1, 1, 1]
    ]
    assert TrajectoryBatch([trajectory(attention_mask=[1, 0, 1])]).to_tensors()["attention_mask"].tolist() == [
        [1, 1, 1, 0, 1]
    ]


@pytest.mark.parametrize("name", ["loss_mask", "behavior_log_probs", "advantages", "token_rewards", "attention_mask"])
@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_a_list_that_fits_no_tokens_is_refused_by_name(name: str, length: int) -> None:
    # six values for five tokens would fit into the row of the longer neighbour and mark its padding
    odd, long = trajectory(**{name: [1] * length}), trajectory("b", 3, 4)
    with pytest.raises(AlignmentError, match=f"'a': {name} has {length} values for 5 tokens"):
        TrajectoryBatch([odd, long]).to_tensors()


def test_the_prompt_is_never_trained_by_default() -> None:
    unknown = Trajectory(id="u", tokens=[1, 2, 3])
    with pytest.raises(AlignmentError, match="which tokens are trained is unknown"):
        TrajectoryBatch([unknown]).to_tensors()
    unknown.loss_mask = [0, 0, 1]
    assert TrajectoryBatch([unknown]).to_tensors()["loss_mask"].tolist() == [[0, 0, 1]]
    nothing_sampled = Trajectory(prompt_tokens=[1, 2])
    assert TrajectoryBatch([nothing_sampled]).to_tensors()["loss_mask"].tolist() == [[0, 0]]


def test_a_column_that_only_some_have_is_refused() -> None:
    with pytest.raises(AlignmentError, match="1 of 2 trajectories have advantages; 'b' has not"):
        TrajectoryBatch([trajectory(advantages=[1] * 5), trajectory("b")]).to_tensors()


@pytest.mark.parametrize(
    "fields",
    [{"tokens": [1, 2, 3, 4, 5]}, {"prompt_length": 3}, {"version_segments": [VersionSegment(2, 6, PolicyVersion())]}],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(AlignmentError):
        trajectory(**fields).check()


def test_an_empty_batch_has_all_nine_tensors() -> None:
    empty = TrajectoryBatch()
    assert set(empty.to_tensors()) == KEYS
    assert empty.to_tensors()["input_ids"].shape == (0, 0)
    assert (empty.batch_size, empty.max_length, empty.num_tokens, empty.compute_padding_ratio()) == (0, 0, 0, 0.0)


def test_figures_of_a_batch() -> None:
    batch = TrajectoryBatch([trajectory("a", 1, 2, version=3), trajectory("b", 2, 3, version=7)])
    assert (batch.batch_size, batch.max_length, batch.num_tokens, batch.rewards) == (2, 5, 8, [0.0, 0.0])
    assert batch.compute_padding_ratio() == pytest.approx(0.2)
    assert batch.get_version_stats() == {"mean_version": 5, "min_version": 3, "max_version": 7, "version_spread": 4}


def partial(**fields: Any) -> PartialTrajectory:
    values = vars(trajectory(status=TrajectoryStatus.ABORTED, behavior_log_probs=[-1.0, -2.0, -3.0]))
    return PartialTrajectory(**{**values, "prompt": "ab", "response": "c", **fields})


def test_a_partial_may_be_continued_a_few_times() -> None:
    assert partial().can_continue()
    assert not partial(continuation_count=3).can_continue()
    assert partial(continuation_count=3).can_continue(max_continuations=4)
    assert not partial(status=TrajectoryStatus.COMPLETED).can_continue()
    cut = partial(start_rollout_id="r1", kv_cache_ref={"block": 3})
    assert cut.prepare_continuation() == cut.continuation_prompt == "abc"
    assert cut.continuation_tokens() == cut.tokens
    assert PartialTrajectory.from_dict(cut.to_dict()) == cut


def test_a_continuation_keeps_prefix_log_probs_and_versions() -> None:
    done = partial(loss_mask=[0, 0, 1, 1, 1], advantages=[1.0] * 5).continued([30, 31], [-4, -5], PolicyVersion(6))
    assert done.tokens == [10, 11, 20, 21, 22, 30, 31]
    assert done.behavior_log_probs == [0, 0, -1, -2, -3, -4, -5]
    assert done.loss_mask == [0, 0, 1, 1, 1, 1, 1]
    assert done.version_segments == [VersionSegment(2, 5, PolicyVersion(4)), VersionSegment(5, 7, PolicyVersion(6))]
    assert done.version == PolicyVersion(4)
    assert done.has_version_boundaries
    assert (done.continuation_count, done.status) == (1, TrajectoryStatus.COMPLETED)
    assert done.advantages == []
    done.check()
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        partial().continued([30, 31], [-4], PolicyVersion(6))


def rollout(reward: float | None = 1.0, status: SessionStatus = SessionStatus.COMPLETED) -> models.Trajectory:
    trace = Trace(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([3, 4, 5, 6], np.int32),
        loss_mask=np.array([1, 0, 1, 1], np.uint8),
        response_logprobs=np.array([-1, 0, -2, -3], np.float32),
        versions=(
            VersionRun(models.PolicyVersion(0, 3), 1),
            VersionRun(None, 1),
            VersionRun(models.PolicyVersion(1, 4), 2),
        ),
        turns=(TraceTurn(completion_id="c1", start=0, stop=1), TraceTurn(completion_id="c2", start=2, stop=4)),
        reward=reward,
        metadata={"branch": 0},
    )
    return models.Trajectory(session_id="s", status=status, traces=(trace,))


def test_the_version_is_that_of_what_was_sampled() -> None:
    """Aborted before its first token, it is as old as its continuation; one that adds nothing makes it no newer."""
    waiting = PartialTrajectory(prompt_tokens=[1], version=PolicyVersion(2), status=TrajectoryStatus.ABORTED)
    begun = waiting.continued([5], [-0.5], PolicyVersion(4), status=TrajectoryStatus.ABORTED)
    assert (begun.version.version_id, begun.version_segments) == (4, [VersionSegment(1, 2, PolicyVersion(4))])
    assert begun.continued([], [], PolicyVersion(3)).version.version_id == 4
    assert waiting.continued([], [], PolicyVersion(3)).version.version_id == 2
    assert begun.continued([6], [-0.5], PolicyVersion(7)).version.version_id == 4


def test_a_trace_of_the_pipeline_has_a_view() -> None:
    (seen,) = views_of(rollout())
    assert (seen.id, seen.group_id, seen.reward, seen.status) == ("s:1:0", "s", 1.0, TrajectoryStatus.COMPLETED)
    assert seen.tokens == [1, 2, 3, 4, 5, 6]
    assert seen.loss_mask == [0, 0, 1, 0, 1, 1]
    assert seen.behavior_log_probs == [0, 0, -1, 0, -2, -3]
    assert seen.version == PolicyVersion(3)
    assert seen.version_segments == [
        VersionSegment(2, 3, PolicyVersion(3)),
        VersionSegment(4, 6, PolicyVersion(4, epoch=1)),
    ]
    assert seen.has_version_boundaries
    seen.check()


def test_an_ungraded_trace_is_not_zero() -> None:
    assert views_of(rollout(reward=None)) == []
    with pytest.raises(InvalidInputError, match="not graded"):
        view_of(rollout(reward=None))


def test_the_import_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import rollmill.trainer.flux; print('imported')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "imported\n"
