"""Properties of the batcher: no token lost or doubled, equal ranks, one gradient, no order of arrival."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.models import Cut, PolicyAnnouncement, PolicyVersion, StalenessBasis, TokenDisposition, Trace, Trajectory
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import BATCHES, CUTS, OUTCOMES, POLICIES, TRAJECTORIES
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, Credit, GroupRules, Learning, LossWeighting, Size, StepOrder
from rollmill_batcher.groups.staleness import Staleness, StalenessAction
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue, waiting_groups
from rollmill_batcher.steps.advantages import Grpo
from rollmill_batcher.steps.packing import plan_layout

Task = MemoryTask[StateValue]
LIMIT = Staleness(2)


def config_of(
    *,
    world_size: int = 1,
    tokens: int = 64,
    weighting: LossWeighting = LossWeighting.TOKEN_MEAN,
    seed: int = 0,
    staleness: Staleness = LIMIT,
    order: StepOrder = StepOrder.FIFO,
    credit: Credit = Credit.ROLLOUT,
) -> BatcherConfig:
    return BatcherConfig(
        run="run",
        policy="policy",
        learning=Learning("grpo", Grpo(), weighting, credit=credit),
        groups=GroupRules(deadline_seconds=60.0),
        staleness=staleness,
        order=order,
        groups_per_step=2,
        world_size=world_size,
        micro_batch=Size(tokens, 2**20),
        seed=seed,
    )


def run(chosen: BatcherConfig, members: Sequence[Trajectory], version: int = 3) -> Task:
    task = MemoryTask(BatcherStage(chosen))
    for number, member in enumerate(members):
        task.feed(TRAJECTORIES, member, partition=number % 4)
    task.feed(POLICIES, PolicyAnnouncement(version=PolicyVersion(0, version), at=1.0))
    task.punctuate(1000.0)
    return task


def batches(task: Task) -> list[PackedBatch]:
    return [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]


def outputs(task: Task) -> list[object]:
    """Everything that went out, but for the input positions, which say how records arrived."""
    cuts = [emit.value.replace(positions={}) for emit in task.of(CUTS) if isinstance(emit.value, Cut)]
    dispositions = sorted(
        emit.value.outcome_id for emit in task.of(OUTCOMES) if isinstance(emit.value, TokenDisposition)
    )
    return [*(emit.value for emit in task.of(BATCHES)), *cuts, *dispositions]


versions = st.integers(0, 3).map(lambda version: PolicyVersion(0, version))
replies = st.builds(
    Reply,
    ids=st.lists(st.integers(3, 60), min_size=1, max_size=6).map(tuple),
    version=versions,
    then=st.lists(st.integers(3, 60), max_size=3).map(tuple),
)
rewards = st.one_of(st.none(), st.integers(-4, 4).map(float))


@st.composite
def groups(draw: st.DrawFn) -> list[Trajectory]:
    """Members of up to three groups of three; some groups are not complete."""
    members = []
    for group in range(draw(st.integers(1, 3))):
        for number in range(draw(st.integers(1, 3))):
            name = f"s{group}-{number}"
            conversation = draw(st.lists(st.lists(replies, min_size=1, max_size=2), min_size=1, max_size=2))
            traces = [sample_trace(name, turns, index=index) for index, turns in enumerate(conversation)]
            members.append(sample_trajectory(name, draw(rewards), group=f"g{group}", size=3, traces=traces))
    return members


choices = st.fixed_dictionaries(
    {
        "staleness": st.builds(
            Staleness,
            limit=st.integers(0, 3),
            action=st.sampled_from(StalenessAction),
            basis=st.sampled_from(StalenessBasis),
        ),
        "order": st.sampled_from(StepOrder),
        "credit": st.sampled_from(Credit),
    }
)


def sampled(members: Sequence[Trajectory]) -> int:
    return sum(unit.tokens for member in members for unit in member.manifest.units)


# B082
@settings(max_examples=60, deadline=None)
@given(members=groups(), world_size=st.integers(1, 3), tokens=st.integers(20, 64), chosen=choices)
def test_every_token_is_trained_excluded_or_waits(
    members: list[Trajectory], world_size: int, tokens: int, chosen: dict[str, Any]
) -> None:
    task = run(config_of(world_size=world_size, tokens=tokens, **chosen), members)
    found = batches(task)
    trained = sum(int(batch.loss_mask.sum()) for batch in found)
    dispositions = [emit.value for emit in task.of(OUTCOMES) if isinstance(emit.value, TokenDisposition)]
    waiting = [member for group in waiting_groups(task.state) for member in group.members]
    assert trained + sum(each.tokens for each in dispositions) + sampled(waiting) == sampled(members)
    assert trained == sum(unit.tokens for row in (found[0].header.table if found else ()) for unit in row.units)
    assert found == [] or trained == found[0].header.denominators.tokens


@settings(max_examples=40, deadline=None)
@given(members=groups(), data=st.data(), chosen=choices)
def test_the_order_of_arrival_changes_nothing(
    members: list[Trajectory], data: st.DataObject, chosen: dict[str, Any]
) -> None:
    shuffled = data.draw(st.permutations(members))
    made = config_of(world_size=2, **chosen)
    assert outputs(run(made, members)) == outputs(run(made, shuffled))


@settings(max_examples=40, deadline=None)
@given(members=groups(), data=st.data())
def test_live_and_restored_state_are_equal_whatever_the_interleaving(
    members: list[Trajectory], data: st.DataObject
) -> None:
    revised = [member.replace(revision=1) for member in data.draw(st.lists(st.sampled_from(members), max_size=3))]
    task = run(config_of(), data.draw(st.permutations([*members, *revised])))
    assert dict(task.restored().items()) == dict(task.state.items())


@settings(max_examples=40, deadline=None)
@given(members=groups(), world_size=st.integers(1, 4), tokens=st.integers(24, 64))
def test_batches_hold_the_traces_unchanged(members: list[Trajectory], world_size: int, tokens: int) -> None:
    task = run(config_of(world_size=world_size, tokens=tokens), members)
    found = batches(task)
    assert len({(batch.header.rank, batch.header.micro_batch) for batch in found}) == len(found)
    assert all(len(batch.input_ids) <= tokens for batch in found)
    if found:
        count = found[0].header.micro_batches
        assert len(found) == count * world_size
    traces = {(m.session_id, index): trace for m in members for index, trace in enumerate(m.traces)}
    for batch in found:
        for row, (start, stop) in zip(batch.trace_index.tolist(), pairwise(batch.cu_seqlens.tolist()), strict=True):
            if row >= 0:
                entry = batch.header.table[row]
                _is_there(batch, slice(start, stop), traces[entry.session_id, entry.trace])


def _is_there(batch: PackedBatch, place: slice, trace: Trace) -> None:
    context = len(trace.prompt_ids)
    assert trace.response_logprobs is not None
    assert batch.input_ids[place].tolist() == [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    assert batch.loss_mask[place].tolist() == [0] * context + trace.loss_mask.tolist()
    assert batch.behavior_log_probs[place].tolist() == [0.0] * context + trace.response_logprobs.tolist()


def gradient(task: Task) -> npt.NDArray[np.float64]:
    """A stand-in for the gradient of the step: sum of weight, advantage and a feature of the token, normalised."""
    total = np.zeros(64)
    found = batches(task)
    for batch in found:
        scale = np.repeat(batch.loss_weights.astype(np.float64) * batch.advantages, np.diff(batch.cu_seqlens))
        np.add.at(total, batch.input_ids, scale * batch.loss_mask)
    return total / found[0].header.denominators.weighted_tokens if found else total


full_groups = st.lists(
    st.tuples(st.integers(-4, 4).map(float), st.lists(st.integers(3, 60), min_size=2, max_size=8)),
    min_size=6,
    max_size=6,
)


def trajectories(contents: Sequence[tuple[float, list[int]]], *, halves: bool) -> list[Trajectory]:
    """Two groups of three. ``halves``: each rollout's tokens in two traces instead of one."""
    members = []
    for number, (reward, ids) in enumerate(contents):
        name = f"s{number}"
        parts = [ids[:1], ids[1:]] if halves else [ids]
        traces = [sample_trace(name, (Reply(tuple(part)),), index=index) for index, part in enumerate(parts)]
        members.append(sample_trajectory(name, reward, group=f"g{number % 2}", size=3, traces=traces))
    return members


@settings(max_examples=60, deadline=None)
@given(
    contents=full_groups,
    weighting=st.sampled_from(LossWeighting),
    world_size=st.integers(1, 4),
    tokens=st.integers(12, 40),
    seed=st.integers(0, 9),
)
def test_no_split_and_no_placement_changes_the_gradient(
    contents: list[tuple[float, list[int]]], weighting: LossWeighting, world_size: int, tokens: int, seed: int
) -> None:
    plain = run(config_of(weighting=weighting), trajectories(contents, halves=False), version=0)
    other = config_of(weighting=weighting, world_size=world_size, tokens=tokens, seed=seed)
    split = run(other, trajectories(contents, halves=True), version=0)
    np.testing.assert_allclose(gradient(split), gradient(plain), atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_packing_places_every_trace_once_within_the_budget(lengths: list[int], ranks: int, seed: int) -> None:
    sizes = [Size(length, 9 * length) for length in lengths]
    found = plan_layout(sizes, Size(50, 450), ranks, seed)
    assert sorted(index for share in found for members in share for index in members) == list(range(len(lengths)))
    assert {len(share) for share in found} == {len(found[0])}
    assert all(sum(lengths[index] for index in members) <= 50 for share in found for members in share)
    bins = sum(map(len, found))
    assert bins <= ranks * math.ceil((2 * sum(lengths) / 50 + 1) / ranks)
