import json
import subprocess
import sys

import numpy as np
import pytest

from rollmill.errors import ConfigurationError, FatalError
from rollmill.models import Disposition, PolicyVersion
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.batches import SampleTrace, Steps, step_values
from rollmill.topics import ACKS, OUTCOMES
from rollmill.trainer.batches.acknowledgement import closing_records, outcomes
from rollmill.trainer.batches.rank_assignment import RankAssignment
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.batches.state import StreamState
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.step_assembly import Expectation, StepAssembler, StepRecords, join_partitions
from rollmill.trainer.layouts.safetensors_reader import read_batch

A = SampleTrace("a", version=PolicyVersion(0, 1))
B = SampleTrace("b", version=PolicyVersion(0, 4), weight=0.5)
C = SampleTrace("c", version=PolicyVersion(0, 4))
RANKS: Steps = [[[A, B], []], [[C], []]]


def assembler(rank: int = 0, world_size: int = 2, *, run: str = "run", next_step: int = 0) -> StepAssembler:
    return StepAssembler(Expectation(run, "policy", rank, world_size), next_step)


def assembled(rank: int = 0) -> StepRecords:
    first, second = step_values(0, RANKS, max_staleness=2)[rank]
    collecting = assembler(rank)
    assert collecting.feed(40, read_batch(first)) is None
    whole = collecting.feed(41, read_batch(second))
    assert whole is not None
    return whole


def step(version: int, rank: int = 0) -> Step:
    records = assembled(rank)
    return Step(records, filter_step(records.header, PolicyVersion(0, version), {}), lambda _: None)


def test_a_step_is_whole_when_its_last_micro_batch_is_there() -> None:
    records = assembled()
    assert len(records.batches) == 2
    assert records.offsets == {0: 42}
    assert records.partitions == 1


@pytest.mark.parametrize(
    ("awaited", "offered", "micro_batch"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["repeated", "gap", "no beginning"]
)
def test_a_missing_or_repeated_record_is_fatal(awaited: int, offered: int, micro_batch: int) -> None:
    value = step_values(offered, RANKS)[0][micro_batch]
    with pytest.raises(FatalError, match=rf"offset 3 holds micro-batch {micro_batch} of step {offered}"):
        assembler(next_step=awaited).feed(3, read_batch(value))


def test_two_batches_are_never_mixed_to_a_step() -> None:
    collecting = assembler()
    collecting.feed(0, read_batch(step_values(0, RANKS)[0][0]))
    with pytest.raises(FatalError, match="position is wrong"):
        collecting.feed(1, read_batch(step_values(0, RANKS, batch_id="another")[0][1]))


# B080: another run's batches in a used topic
def test_batches_of_another_world_size_run_or_policy_are_refused() -> None:
    batch = read_batch(step_values(0, RANKS)[0][0])
    with pytest.raises(ConfigurationError, match="cut for world size 2, this trainer has 1: start it with a number"):
        assembler(world_size=1).feed(0, batch)
    with pytest.raises(ConfigurationError, match="run 'run', this stream reads run 'mine'"):
        assembler(run="mine").feed(0, batch)
    with pytest.raises(ConfigurationError, match="rank 0"):
        assembler(rank=1).feed(0, batch)


def test_a_filler_trains_nothing_and_says_so() -> None:
    trained, filler = step(4)
    assert (trained.filler, filler.filler) == (False, True)
    assert filler.input_ids.tolist() == [1, 2]
    assert not filler.loss_mask.any()
    assert not filler.loss_weight.any()


def test_the_gate_clears_the_stale_trace_and_its_share_of_the_denominator() -> None:
    kept, cleared = step(3), step(4)
    assert kept.denominator == 3 + 1.5 + 3
    assert cleared.denominator == 1.5 + 3
    assert np.flatnonzero(cleared.arrays[0].loss_mask).tolist() == [7, 8, 9]
    assert step(4, rank=1).denominator == cleared.denominator


def test_the_loss_over_all_ranks_has_unit_weight() -> None:
    weights = sum(float(packed.loss_weight.sum()) for rank in (0, 1) for packed in step(4, rank).arrays)
    assert weights / step(4).denominator == 1.0


def test_b085_the_loss_is_a_mean_over_tokens_and_not_over_micro_batches() -> None:
    """Loss sums 6 over 2 tokens and 4 over 8, and a micro-batch without any: 10 / 10."""
    short = SampleTrace("a", reply=(3, 4), log_probs=(-3.0, -3.0))
    long = SampleTrace("b", reply=(5,) * 8, log_probs=(-0.5,) * 8)
    collecting = assembler(world_size=1)
    records = None
    for value in step_values(0, [[[short], [long], []]])[0]:
        records = collecting.feed(0, read_batch(value))
    assert records is not None
    whole = Step(records, filter_step(records.header, PolicyVersion(), {}), lambda _: None)
    losses = [float((-each.behavior_log_probs * each.loss_weight).sum()) / whole.denominator for each in whole.arrays]
    assert losses == [0.6, 0.4, 0.0]


def test_each_rank_writes_the_outcomes_of_its_own_traces() -> None:
    records = assembled()
    verdict = filter_step(records.header, PolicyVersion(0, 4), {})
    stale, trained = outcomes(records.header, verdict, at=1.0)
    assert (stale.session_id, stale.disposition, stale.reason) == ("a", Disposition.EXCLUDED, "stale_at_hand_over")
    assert (trained.session_id, trained.disposition, trained.batch_id) == ("b", Disposition.TRAINED, "batch-0")
    assert (stale.units, trained.units) == (A.units, B.units)
    assert stale.batch_id == "batch-0"
    assert trained.reason is None


def test_outcome_ids_do_not_depend_on_the_time() -> None:
    records = assembled()
    verdict = filter_step(records.header, PolicyVersion(0, 4), {})
    first, second = ([item.outcome_id for item in outcomes(records.header, verdict, at)] for at in (1.0, 2.0))
    assert first == second


def test_closing_a_step_writes_outcomes_and_one_acknowledgement() -> None:
    records = assembled()
    settings = KafkaSettings(prefix="p.", partitions=4)
    written = closing_records(records.header, filter_step(records.header, PolicyVersion(0, 4), {}), 1.0, settings)
    assert [item.topic for item in written] == [
        OUTCOMES.full_name("p."),
        OUTCOMES.full_name("p."),
        ACKS.full_name("p."),
    ]
    assert {item.headers for item in written} == {(("content-type", b"application/json"),)}
    assert written[-1].partition == 0


STATE = StreamState(run="run", epoch=1, next_step=3, offsets={"0": 17}, world_size=2)


def test_a_state_survives_as_plain_json_values() -> None:
    assert STATE.dump() == {
        "run": "run",
        "epoch": 1,
        "next_step": 3,
        "offsets": {"0": 17},
        "world_size": 2,
        "placement": 0,
    }
    assert StreamState.read(STATE.dump()) == STATE
    assert STATE.check(run="run", assignment=RankAssignment.of(0, 2, 2)) == {0: 17}


def test_a_state_of_another_stream_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="partition 0 of 2, rank 1 of 2 reads 1 of 2"):
        STATE.check(run="run", assignment=RankAssignment.of(1, 2, 2))
    with pytest.raises(ConfigurationError, match="rank 0 of 1 reads 0, 1 of 2: give load_state_dict the states of all"):
        STATE.check(run="run", assignment=RankAssignment.of(0, 1, 2))
    with pytest.raises(ConfigurationError, match="run 'run'"):
        STATE.check(run="another", assignment=RankAssignment.of(0, 2, 2))
    with pytest.raises(ConfigurationError, match="no state of a batch stream"):
        StreamState.read({"step": 3})


def test_states_of_all_ranks_serve_another_number_of_ranks() -> None:
    whole = StreamState.of_ranks([STATE, STATE.replace(offsets={"1": 23})])
    assert whole.check(run="run", assignment=RankAssignment.of(0, 1, 2)) == {0: 17, 1: 23}
    assert whole.narrowed(RankAssignment.of(1, 2, 2)).offsets == {"1": 23}
    with pytest.raises(ConfigurationError, match="not of one checkpoint"):
        StreamState.of_ranks([STATE, STATE.replace(next_step=4)])
    with pytest.raises(ConfigurationError, match="placement"):
        StreamState.of_ranks([STATE, STATE.replace(offsets={"1": 23}, placement=1)])


def test_a_rank_reads_its_part_of_the_partitions_where_the_ranks_divide_them() -> None:
    assert [list(RankAssignment.of(rank, 2, 4).partitions) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert list(RankAssignment.of(2, 4, 4).partitions) == [2]
    with pytest.raises(ConfigurationError, match=r"world size 4, this trainer has 3: .* divides 4 \(1, 2, 4\)"):
        RankAssignment.of(0, 3, 4)


def test_the_parts_of_one_step_are_joined_and_never_those_of_two() -> None:
    whole = join_partitions([assembled(0), assembled(1)])
    assert (len(whole.batches), whole.partitions, whole.offsets) == (4, 2, {0: 42, 1: 42})
    assert [header.rank for header in whole.headers] == [0, 1]
    other = StepRecords(
        tuple(read_batch(value) for value in step_values(0, RANKS, batch_id="another", max_staleness=2)[1]), {1: 42}
    )
    with pytest.raises(FatalError, match="not one step"):
        join_partitions([assembled(0), other])


def test_the_sdk_imports_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import rollmill.trainer; print('imported')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "imported\n"


def test_b10_a_step_and_its_micro_batches_are_shown_in_one_line() -> None:
    shown = step(0)
    assert repr(shown).startswith("<Step 0 of run 'run': ")
    assert len(repr(shown)) < 200
    summary = shown.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["step"], summary["micro_batches"]) == (0, len(shown))
    for batch in shown:
        for layout in (batch, batch.padded()):
            assert "input_ids int64[" in repr(layout)
            assert "\n" not in repr(layout)
            assert len(repr(layout)) < 600
