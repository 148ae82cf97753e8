"""The harness's own parts: an oracle that cannot fail proves nothing, and a plan has to come back with its seed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from chaos.checks.observations import CapturedCall, Observations, TrainedTrace
from chaos.checks.oracle import Findings, check
from chaos.child import failpoints_file
from chaos.clock import ShiftedClock, shift
from chaos.faults.fault_plan import Fault, FaultKind, mutation_plan, plan
from chaos.load.scripted_conversation import TURNS, ScriptedConversation, respond
from chaos.load.workload import AgentObservations
from chaos.mutations import Mutation
from chaos.network_proxy import NetworkProxy
from chaos.run import RunResult, percentile_95
from rollmill.models import Disposition, PolicyVersion, TokenDisposition, TokenRange, outcome
from rollmill.ops.ledger import Balance, Totals
from rollmill.runtime.failpoints import Armed
from rollmill.runtime.supervisor import free_port
from rollmill.testing.http.canned_server import CannedRequest

ONE = ScriptedConversation("g0m0", "g0", 0)


def seen(*, answered: int = TURNS, failures: Counter[int] | None = None) -> dict[str, AgentObservations]:
    return {ONE.session_id: AgentObservations(ONE, answered, failures or Counter(), closed=True)}


def captured(turn: int, name: str | None = None) -> CapturedCall:
    return CapturedCall(ONE.session_id, name or f"c{turn}", ONE.prompt(turn), ONE.reply_ids(turn))


def units(turns: int) -> tuple[tuple[str, int, int, int], ...]:
    return tuple((f"c{turn}", 0, 0, len(ONE.reply_ids(turn))) for turn in range(turns))


def trained(turns: int = TURNS) -> TrainedTrace:
    ids = ONE.sequence(turns)
    mask, log_probs = [0] * len(ids), [0.0] * len(ids)
    for turn in range(turns):
        for position, value in zip(ONE.positions(turn), ONE.log_probs(turn), strict=True):
            mask[position], log_probs[position] = 1, value
    return TrainedTrace(ONE.session_id, units(turns), ids, mask, log_probs, ONE.reward)


def evidence(
    *calls: CapturedCall, traces: tuple[TrainedTrace, ...] = (), said: tuple[TokenDisposition, ...] = ()
) -> Observations:
    return Observations(
        captured={call.completion_id: call for call in calls},
        outcomes={item.outcome_id: item for item in said},
        trained=list(traces),
    )


def excluded(turn: int, reason: str) -> TokenDisposition:
    unit = TokenRange(f"c{turn}", 0, 0, len(ONE.reply_ids(turn)), PolicyVersion())
    return outcome(
        Disposition.EXCLUDED, stage="test", session_id=ONE.session_id, attempt=1, units=(unit,), reason=reason
    )


WHOLE = tuple(captured(turn) for turn in range(TURNS))


def test_a_dialogue_is_what_the_engine_says() -> None:
    body = b'{"messages": [{"role": "user", "content": "g0m0"}], "logprobs": true, "return_token_ids": true}'
    answer = respond(CannedRequest("POST", "/v1/chat/completions", {}, body)).pieces[0].decode()
    assert ONE.replies[0] in answer
    assert ONE.sequence(1) == [*ONE.prompt(0), *ONE.reply_ids(0)]
    assert ONE.prompt(1)[: len(ONE.sequence(1))] == ONE.sequence(1)
    assert [ONE.turn_of(ONE.prompt(turn)) for turn in range(TURNS)] == list(range(TURNS))


def test_what_came_out_as_it_went_in_is_clean() -> None:
    findings = check(seen(), evidence(*WHOLE, traces=(trained(),)))
    assert findings.clean
    assert findings.tokens == findings.trained == sum(len(call.reply) for call in WHOLE)


def wrong(found: Findings) -> dict[str, bool]:
    return {name: bool(getattr(found, name)) for name in ("lost", "doubled", "altered", "unexplained")}


@pytest.mark.parametrize(
    ("proof", "fault"),
    [
        (evidence(*WHOLE), "lost"),
        (evidence(*WHOLE[:2], traces=(trained(2),)), "lost"),
        (evidence(*WHOLE, traces=(trained(), trained())), "doubled"),
        (evidence(*WHOLE, traces=(trained(),), said=(excluded(1, "aux"),)), "doubled"),
        (evidence(*WHOLE, traces=(replace(trained(), reward=9.0),)), "altered"),
        (evidence(*WHOLE, traces=(replace(trained(), log_probs=[0.0] * len(trained().ids)),)), "altered"),
        (evidence(*WHOLE, traces=(trained(2),), said=(excluded(2, "stale"),)), "unexplained"),
    ],
)
def test_every_kind_of_damage_is_found(proof: Observations, fault: str) -> None:
    found = check(seen(), proof)
    assert wrong(found)[fault], found
    assert not found.clean


def test_a_call_that_nobody_made_is_found_and_one_that_broke_off_is_allowed() -> None:
    twice = evidence(
        *WHOLE, captured(1, "again"), traces=(replace(trained(), units=units(TURNS)),), said=(excluded_again(),)
    )
    assert wrong(check(seen(), twice))["doubled"]
    assert check(seen(failures=Counter({1: 1})), twice).clean


def excluded_again() -> TokenDisposition:
    unit = TokenRange("again", 0, 0, len(ONE.reply_ids(1)), PolicyVersion())
    return outcome(
        Disposition.EXCLUDED, stage="test", session_id=ONE.session_id, attempt=1, units=(unit,), reason="sibling"
    )


def test_what_a_stage_said_twice_is_found() -> None:
    proof = evidence(*WHOLE, traces=(trained(),))
    proof.built = Counter({ONE.session_id: 2})
    assert check(seen(), proof).doubled == sum(len(call.reply) for call in WHOLE)
    proof = evidence(*WHOLE, traces=(trained(),))
    proof.repeated = [excluded(0, "aux")]
    assert check(seen(), proof).doubled == len(WHOLE[0].reply)


def verdict(total: Totals, findings: Findings) -> RunResult:
    return RunResult(1, Counter(), findings, Balance(total))


def test_what_is_only_late_is_no_damage_and_does_not_pass() -> None:
    late = verdict(Totals(captured=5, pending=5), Findings(lost=5))
    assert not late.damaged
    assert not late.passed
    assert verdict(Totals(captured=5, lost=5), Findings(lost=5)).damaged
    assert verdict(Totals(captured=5, trained=5), Findings(doubled=5)).damaged
    assert verdict(Totals(captured=5, trained=5), Findings()).passed
    assert not RunResult(1, Counter()).passed


def test_steps_that_are_skipped_or_differ_are_found() -> None:
    proof = evidence(*WHOLE, traces=(trained(),))
    proof.steps, proof.digests = [0, 2], {"b0": {"x", "y"}}
    assert len(check(seen(), proof).complaints) == 2


def test_a_plan_comes_back_with_its_seed_and_a_row_of_seeds_brings_all_kinds() -> None:
    kinds = list(FaultKind)
    plans = [plan(seed, 7, kinds) for seed in range(1, 21)]
    assert plans == [plan(seed, 7, kinds) for seed in range(1, 21)]
    assert {fault.kind for fault in chain(*plans)} == set(FaultKind)
    assert all(len(faults) == 7 for faults in plans)
    failpoints = {fault.failpoint for fault in chain(*plans) if fault.failpoint}
    assert len(failpoints) >= 10
    assert len({str(fault) for fault in plans[0]} & {str(fault) for fault in plans[1]}) < 7


def test_a_failpoint_of_a_plan_is_one_that_services_know() -> None:
    for fault in chain(*(plan(seed, 7, list(FaultKind)) for seed in range(50))):
        if fault.kind is FaultKind.FAILPOINT:
            assert Armed.parse(f"{fault.failpoint}=kill@{fault.passes}").name is fault.failpoint


@pytest.mark.parametrize("mutation", list(Mutation))
def test_each_mutation_meets_a_fault_that_needs_what_was_removed(mutation: Mutation) -> None:
    assert all(isinstance(fault, Fault) for fault in mutation_plan(mutation))


def test_clocks_are_put_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    before = ShiftedClock(file).now()
    shift(file, -100.0)
    assert ShiftedClock(file).now() < before - 50
    assert failpoints_file(tmp_path, "builder-0").parent == tmp_path


def test_of_twenty_numbers_the_nineteenth_is_the_95th_percentile() -> None:
    assert percentile_95([float(number) for number in range(1, 21)]) == 19.0
    assert percentile_95([3.0]) == 3.0
    assert percentile_95([]) == 0.0


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def test_a_proxy_passes_delays_swallows_and_cuts() -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, NetworkProxy(free_port(), server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await reader.read(100) == b"one"
        proxy.delay(0.05)
        began = asyncio.get_running_loop().time()
        writer.write(b"two")
        assert await reader.read(100) == b"two"
        assert asyncio.get_running_loop().time() - began >= 0.1
        proxy.mend()
        proxy.swallow()
        writer.write(b"three")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.1)
        proxy.cut()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        proxy.mend()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"four")
        assert await reader.read(100) == b"four"
        writer.close()
