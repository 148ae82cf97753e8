from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmill.trainer.flux import (
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryBuffer,
    TrajectoryStatus,
    VersionSegment,
)

VERSIONS = st.builds(PolicyVersion, st.integers(0, 9), st.floats(0, 1e9), st.integers(0, 99), epoch=st.integers(0, 2))
FLOATS = st.floats(-4, 4, width=32)


@st.composite
def trajectories(draw: st.DrawFn, name: str = "t") -> Trajectory:
    prompt = draw(st.lists(st.integers(0, 99), max_size=4))
    response = draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
    total = len(prompt) + len(response)
    lengths = st.sampled_from([len(response), total])
    return Trajectory(
        id=name,
        group_id=draw(st.none() | st.text(max_size=3)),
        prompt_tokens=prompt,
        response_tokens=response,
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)),
        behavior_log_probs=draw(lengths.flatmap(lambda n: st.lists(FLOATS, min_size=n, max_size=n))),
        reward=draw(FLOATS),
        version=draw(VERSIONS),
        version_segments=[VersionSegment(len(prompt), total, draw(VERSIONS))],
        status=draw(st.sampled_from([TrajectoryStatus.COMPLETED, TrajectoryStatus.TRUNCATED])),
        metadata=draw(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
    )


@given(trajectories())
def test_nothing_is_lost_in_a_dict(one: Trajectory) -> None:
    again = Trajectory.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again == one
    assert again.to_dict() == one.to_dict()


@given(st.lists(trajectories(), min_size=1, max_size=5))
def test_a_row_holds_what_its_trajectory_holds_and_padding_nothing(batch: list[Trajectory]) -> None:
    arrays = TrajectoryBatch(batch).to_arrays(pad_token_id=-7)
    for row, one in enumerate(batch):
        length, prompt = one.total_length, one.prompt_length
        assert arrays["input_ids"][row, :length].tolist() == one.tokens
        assert (arrays["input_ids"][row, length:] == -7).all()
        assert arrays["attention_mask"][row].sum() == length
        assert arrays["loss_mask"][row, :length].astype(int).tolist() == one.loss_mask
        assert not arrays["loss_mask"][row, length:].any()
        behind = length - len(one.behavior_log_probs)
        assert behind in (0, prompt)
        found = arrays["behavior_log_probs"][row]
        assert np.array_equal(found[behind:length], np.array(one.behavior_log_probs, np.float32))
        assert not found[length:].any()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 45), st.integers(), st.randoms())
def test_every_stratum_gets_its_share_in_any_order(versions: list[int], n: int, seed: int, random: object) -> None:
    everything = [
        Trajectory(
            id=f"{number}", response_tokens=[1], version=PolicyVersion(version), status=TrajectoryStatus.COMPLETED
        )
        for number, version in enumerate(versions)
    ]
    buffer, shuffled = TrajectoryBuffer(max_staleness=6), TrajectoryBuffer(max_staleness=6)
    buffer.add_batch(everything)
    other_order = list(everything)
    random.shuffle(other_order)  # type: ignore[attr-defined]  # hypothesis hands out a random.Random
    shuffled.add_batch(other_order)
    sample = buffer.sample(n, PolicyVersion(6), seed=seed)
    assert [each.id for each in sample] == [each.id for each in shuffled.sample(n, PolicyVersion(6), seed=seed)]
    drawn = min(n, len(versions))
    assert len({each.id for each in sample}) == len(sample) == drawn
    counts = Counter(each.version.version_id for each in sample)
    for version, members in Counter(versions).items():
        share = drawn * members / len(versions)
        assert math.floor(share) <= counts[version] <= math.ceil(share)
