from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from relay.agents import Transcript, Turn
from relay.gap import KeptWeights, LogProbGap
from relay.learning import packed_log_probs
from relay.model import RelayModel
from relay.oracle import TrainedStep, TrainedTrace, mismatches
from relay.sabotage import shifted
from relay.task import END_OF_TURN_ID, group_id, is_right
from relay.transcripts import AgentsRecord, expected_trace
from rollmill.trainer import PackedArrays

ASKED = ("?1", "=2", "=3")


def transcript(group: int, member: int, replies: Sequence[str], finish: str = "stop") -> Transcript:
    turns = tuple(
        Turn(asked, text, finish, is_right(text, asked[1])) for asked, text in zip(ASKED, replies, strict=True)
    )
    return Transcript(f"s{group}-{member}", group, member, "123", turns)


def the_record() -> AgentsRecord:
    record = AgentsRecord()
    for one in (
        transcript(0, 0, ("1", "2", "3")),
        transcript(0, 1, ("1", "7", "3")),
        transcript(0, 2, ("12", "u", "")),
        transcript(1, 0, ("4", "2", "3")),
        transcript(1, 1, ("100", "200", "300"), finish="length"),
    ):
        record.add(one)
    return record


def honest(record: AgentsRecord, one: Transcript) -> TrainedTrace:
    wanted = expected_trace(one.turns)
    return TrainedTrace(
        session_id=one.session_id,
        group_id=group_id(one.group),
        token_ids=wanted.token_ids,
        mask=wanted.mask,
        prompt_length=wanted.prompt_length,
        reward=one.reward,
        advantages=frozenset({record.advantage(one)}),
        weights=frozenset({1.0}),
    )


def a_step(record: AgentsRecord) -> TrainedStep:
    traces = tuple(honest(record, one) for one in record)
    return TrainedStep(3, float(sum(sum(trace.mask) for trace in traces)), traces)


def spoiled(spoil: Callable[[TrainedTrace], TrainedTrace], at: int = 1) -> tuple[TrainedStep, AgentsRecord]:
    record = the_record()
    step = a_step(record)
    traces = [spoil(trace) if place == at else trace for place, trace in enumerate(step.traces)]
    return replace(step, traces=tuple(traces)), record


def without_end_of_turn(trace: TrainedTrace) -> TrainedTrace:
    """The first end-of-turn token that was sampled is taken for context."""
    place = next(i for i, token in enumerate(trace.token_ids) if token == END_OF_TURN_ID and trace.mask[i])
    return replace(trace, mask=(*trace.mask[:place], 0, *trace.mask[place + 1 :]))


def test_an_honest_step_agrees_with_the_agents_record() -> None:
    record = the_record()
    assert mismatches([a_step(record)], record) == []


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda trace: replace(trace, mask=shifted(trace.mask)), "mask"),
        (without_end_of_turn, "mask"),
        (lambda trace: replace(trace, mask=(1,) * len(trace.mask)), "mask"),
        (lambda trace: replace(trace, token_ids=(*trace.token_ids[:-1], 5)), "ids"),
        (lambda trace: replace(trace, token_ids=trace.token_ids[:-1], mask=trace.mask[:-1]), "ids"),
        (lambda trace: replace(trace, prompt_length=trace.prompt_length + 1), "prompt_length"),
        (lambda trace: replace(trace, reward=1.0 - trace.reward), "reward"),
        (lambda trace: replace(trace, group_id=group_id(1)), "group"),
        (lambda trace: replace(trace, advantages=frozenset({-a for a in trace.advantages})), "advantage"),
        (lambda trace: replace(trace, advantages=trace.advantages | {0.5}), "advantage"),
        (lambda trace: replace(trace, weights=frozenset({0.5})), "weight"),
        (lambda trace: replace(trace, session_id="nobody"), "session"),
    ],
)
def test_every_corruption_is_named(spoil: Callable[[TrainedTrace], TrainedTrace], what: str) -> None:
    step, record = spoiled(spoil)
    found = {mismatch.what for mismatch in mismatches([step], record)}
    assert what in found


def test_a_session_that_is_trained_twice_is_named() -> None:
    record = the_record()
    step = a_step(record)
    found = mismatches([step, replace(step, number=4)], record)
    assert [mismatch.what for mismatch in found] == ["twice"] * len(record)


def test_a_denominator_that_counts_other_tokens_is_named() -> None:
    record = the_record()
    step = a_step(record)
    found = mismatches([replace(step, denominator=step.denominator + 1)], record)
    assert [mismatch.what for mismatch in found] == ["denominator"]


def test_a_cut_reply_has_its_end_of_turn_as_context() -> None:
    wanted = expected_trace(transcript(0, 0, ("100", "2", "3"), finish="length").turns)
    place = wanted.mask.index(1) + 3
    assert wanted.token_ids[place] == END_OF_TURN_ID
    assert wanted.mask[place] == 0


def test_advantages_are_over_the_true_group_and_zero_without_spread() -> None:
    record = the_record()
    zero, one, two = list(record)[:3]
    rewards = np.array([1.0, 2 / 3, 0.0])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert [record.advantage(member) for member in (zero, one, two)] == pytest.approx(list(wanted))
    even = AgentsRecord()
    for member in range(3):
        even.add(transcript(5, member, ("1", "2", "9")))
    assert {even.advantage(member) for member in even} == {0.0}


def packed(models: dict[int, RelayModel], labels: Sequence[int]) -> PackedArrays:
    """One trace of a session for each label, sampled by the model of that version."""
    wanted = expected_trace(transcript(0, 0, ("1", "7", "3")).turns)
    ids, mask = np.array(wanted.token_ids * len(labels)), np.array(wanted.mask * len(labels), dtype=np.bool_)
    length, count = len(wanted.token_ids), len(labels)
    edges = np.arange(count + 1, dtype=np.int32) * length
    versions = np.where(mask[:, None], np.repeat([(0, label) for label in labels], length, axis=0), -1)
    rows = [
        packed_log_probs(models[label], torch.tensor(wanted.token_ids), torch.tensor([0, length])).detach().numpy()
        for label in labels
    ]
    zeros = np.zeros(len(ids), dtype=np.float32)
    return PackedArrays(
        input_ids=ids.astype(np.int64),
        position_ids=np.tile(np.arange(length), count),
        cu_seqlens=edges,
        max_seqlen=length,
        loss_mask=mask,
        behavior_log_probs=np.concatenate(rows) * mask,
        advantages=zeros,
        loss_weight=mask.astype(np.float32),
        versions=versions.astype(np.int32),
        temperatures=zeros,
        turn_ids=zeros.astype(np.int32),
        prompt_lengths=np.full(count, wanted.prompt_length, dtype=np.int32),
        rewards=zeros[:count],
        trace_index=np.arange(count, dtype=np.int32),
        group_index=np.zeros(count, dtype=np.int32),
        session_index=np.arange(count, dtype=np.int32),
        returns=zeros,
    )


def models(count: int) -> dict[int, RelayModel]:
    torch.manual_seed(5)
    return {version: RelayModel() for version in range(count)}


def gap_with(known: dict[int, RelayModel], keep: int = 12) -> LogProbGap:
    kept = KeptWeights(keep)
    for version, model in known.items():
        kept.keep(version, model)
    return LogProbGap(kept)


def test_every_token_is_compared_under_the_version_of_its_label() -> None:
    known = models(3)
    batch, gap = packed(known, [0, 2, 1, 2]), gap_with(known)
    gap.compare([batch])
    assert gap.largest < 1e-5
    assert gap.tokens == batch.loss_mask.sum()
    assert gap.unknown == []


def test_weights_are_kept_as_they_were() -> None:
    known = models(1)
    batch, gap = packed(known, [0]), gap_with(known)
    with torch.no_grad():
        known[0].head.bias.add_(torch.arange(22.0))
    gap.compare([batch])
    assert gap.largest < 1e-5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: replace(batch, behavior_log_probs=np.roll(batch.behavior_log_probs, 1)),
        lambda batch: replace(batch, versions=np.where(batch.versions == 1, 0, batch.versions)),
        lambda batch: replace(batch, behavior_log_probs=batch.behavior_log_probs * np.float32(np.nan)),
        lambda batch: replace(batch, loss_mask=np.roll(batch.loss_mask, 1)),
    ],
    ids=["shifted log-probs", "labels off by one", "not a number", "shifted mask"],
)
def test_what_does_not_belong_to_its_label_shows_as_a_gap(spoil: Callable[[PackedArrays], PackedArrays]) -> None:
    known = models(2)
    gap = gap_with(known)
    gap.compare([spoil(packed(known, [1, 1]))])
    assert not gap.largest < 1e-3 or gap.unknown


def test_a_label_of_weights_that_are_not_kept_is_named_and_not_counted() -> None:
    known = models(3)
    batch, gap = packed(known, [0, 2]), gap_with(known, keep=2)
    gap.compare([batch])
    assert gap.unknown == ["6 tokens are labelled 0:0, which is not kept"]
    assert gap.tokens == batch.loss_mask.sum() - 6
