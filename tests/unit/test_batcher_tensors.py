"""The record of a micro-batch: every tensor at token, as the trainer's reader sees it."""

import numpy as np

from rollmill.models import BatchHeader, Denominators, PolicyVersion, Trace
from rollmill.testing.samples.trajectories import Reply, sample_trace
from rollmill.trainer.layouts import arrays as trainers
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.sizes import record_bytes
from rollmill_batcher.steps.tensors import PackedTrace, encode_batch, filler, pack_tensors

TWO_TURNS = sample_trace(
    "s1",
    (Reply((5, 6), PolicyVersion(0, 3), then=(9,)), Reply((7, 8), PolicyVersion(1, 4))),
    prompt=(1, 2, 3),
    reward=0.5,
)
ONE_TURN = sample_trace("s2", (Reply((5,), PolicyVersion(1, 4)),), prompt=(4,), reward=1.0)


def header(**changes: object) -> BatchHeader:
    values = {
        "run": "r",
        "policy": "p",
        "batch_id": "b",
        "step": 0,
        "rank": 0,
        "world_size": 1,
        "micro_batch": 0,
        "micro_batches": 1,
        "policy_version": PolicyVersion(1, 4),
        "denominators": Denominators(tokens=5, weighted_tokens=5.0, rollouts=2, groups=1),
        **changes,
    }
    return BatchHeader.model_validate(values)


def written(*traces: Trace) -> PackedBatch:
    return read_batch(
        encode_batch(header(table=()), pack_tensors([PackedTrace(trace, -1, 2.0, 0.25) for trace in traces]))
    )


def test_values_lie_at_their_token() -> None:
    batch = written(TWO_TURNS, ONE_TURN)
    assert batch.input_ids.tolist() == [1, 2, 3, 5, 6, 9, 7, 8, 4, 5]
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0, 1]
    expected = [0, 0, 0, -5 / 64, -6 / 64, 0, -7 / 64, -8 / 64, 0, -5 / 64]
    assert batch.behavior_log_probs.tolist() == expected
    assert batch.cu_seqlens.tolist() == [0, 8, 10]
    assert batch.prompt_lengths.tolist() == [3, 1]


def test_runs_cover_the_prompt_too() -> None:
    batch = written(TWO_TURNS, ONE_TURN)
    context = [-1, -1]
    assert batch.versions.tolist() == [[*context, 3], [0, 3, 2], [*context, 1], [1, 4, 2], [*context, 1], [1, 4, 1]]
    assert batch.turn_ids.tolist() == [[-1, 3], [0, 2], [-1, 1], [1, 2], [-1, 1], [0, 1]]


def test_scalars_are_per_trace_and_minimal_types_hold() -> None:
    batch = written(TWO_TURNS, ONE_TURN)
    assert batch.rewards.tolist() == [0.5, 1.0]
    assert batch.advantages.tolist() == [2.0, 2.0]
    assert batch.loss_weights.tolist() == [0.25, 0.25]
    assert batch.token_rewards is None
    names = [array.dtype.name for array in (batch.input_ids, batch.loss_mask, batch.rewards)]
    assert names == ["int32", "uint8", "float32"]


def test_each_turn_keeps_the_temperature_it_was_sampled_at() -> None:
    """Context and turns that do not know theirs have that of the first trained turn: nothing divides by zero."""
    turns = [turn.replace(temperature=value) for turn, value in zip(TWO_TURNS.turns, (0.5, 1.5), strict=True)]
    batch = written(TWO_TURNS.replace(turns=tuple(turns)), ONE_TURN)
    assert batch.temperatures.tolist() == [0.5, 0.5, 0.5, 1.5, 1.0, 1.0]
    at_token = trainers.pack(batch, np.array([True, True])).temperatures
    assert at_token.tolist() == [0.5] * 6 + [1.5] * 2 + [1.0] * 2
    unknown = TWO_TURNS.replace(turns=(turns[0].replace(temperature=None), turns[1]))
    assert written(unknown).temperatures.tolist() == [1.5, 1.5, 1.5, 1.5]
    assert written(ONE_TURN.replace(turns=())).temperatures.tolist() == [0.0]


def test_token_rewards_travel_where_any_trace_has_them() -> None:
    rewarded = ONE_TURN.replace(token_rewards=np.array([0.75], np.float32))
    batch = written(TWO_TURNS, rewarded)
    assert batch.token_rewards is not None
    assert batch.token_rewards.tolist() == [0.0] * 9 + [0.75]


def test_a_log_prob_at_context_is_zero_whatever_the_producer_wrote() -> None:
    sloppy = TWO_TURNS.replace(response_logprobs=np.full(5, -9.0, np.float32))
    assert written(sloppy).behavior_log_probs.tolist() == [0, 0, 0, -9, -9, 0, -9, -9]


def test_an_unlabelled_trace_has_context_versions() -> None:
    assert written(ONE_TURN.replace(versions=())).versions.tolist() == [[-1, -1, 1], [-1, -1, 1]]


def test_a_filler_trains_nothing_and_uses_ids_of_the_step() -> None:
    batch = read_batch(encode_batch(header(filler=True), pack_tensors([filler(TWO_TURNS)])))
    assert batch.header.filler
    assert batch.input_ids.tolist() == TWO_TURNS.prompt_ids.tolist() + TWO_TURNS.response_ids.tolist()
    assert not batch.loss_mask.any()
    assert (batch.trace_index.tolist(), batch.loss_weights.tolist()) == ([-1], [0.0])


def test_equal_content_gives_equal_bytes() -> None:
    packed = [PackedTrace(TWO_TURNS, 0, 1.0, 1.0)]
    first = encode_batch(header(forks={2: 7, 1: 3}), pack_tensors(packed))
    assert first == encode_batch(header(forks={1: 3, 2: 7}), pack_tensors(packed))


def test_the_byte_estimate_is_an_upper_bound() -> None:
    for trace in (TWO_TURNS, ONE_TURN, ONE_TURN.replace(token_rewards=np.array([1.0], np.float32))):
        assert sum(array.nbytes for array in pack_tensors([PackedTrace(trace, 0, 1.0, 1.0)]).values()) <= record_bytes(
            trace
        )
