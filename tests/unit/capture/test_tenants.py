"""Tenants' names, quotas and rights, each by itself; `test_isolation` tries all routes together."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.codec import CONTENT_TYPE, JSON, decode, encode
from rollmill.models import SessionEntry, SessionSpec, SessionState
from rollmill.topics import COMPLETIONS, EVALUATIONS, SESSIONS
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.coordination.tenants import TenantNames, prefix
from rollmill_capture.http.keys import digest_of
from rollmill_capture.settings import CaptureSettings
from tests.unit.capture.test_identity import ALICE, ASK, BOB, CALL, KEYED, KEYS, Rig, bearer

BOTH: dict[str, Any] = {"host": "0.0.0.0", "api_keys": KEYS}
GRADED = {"evaluators": [{"strategy": "external", "name": "human"}]}


def shared(**settings: Any) -> Rig:
    """Capture of two tenants, neither of which has names without a prefix."""
    return Rig(CaptureSettings(**BOTH, **settings))


async def get(rig: Rig, path: str, key: str) -> tuple[int, Any]:
    async with rig.request("GET", path, None, **bearer(key)) as call:
        answer = await call.json()
    return call.status, answer


async def test_f1_a_higher_attempt_of_anothers_session_is_a_session_of_ones_own() -> None:
    rig = shared()
    token = (await rig.open(BOB, session_id="b-2", **GRADED))["api_key"]
    assert (await rig.post(CALL, ASK, **bearer(token)))[0] == 200
    before = await get(rig, "/v1/sessions/b-2", BOB)
    opened = await rig.open(ALICE, session_id="b-2", attempt=2)
    assert (opened["session_id"], opened["attempt"]) == ("b-2", 2)
    status, _ = await rig.post("/v1/sessions/b-2/reward", {"reward": -99, "attempt": 1}, **bearer(ALICE))
    assert status == 202
    assert await get(rig, "/v1/sessions/b-2", BOB) == before
    assert (await rig.post(CALL, ASK, **bearer(token)))[0] == 200
    assert [each.session_id for each in rig.event_writer.of(EVALUATIONS)] == [f"{prefix('alice')}b-2"]
    assert (await rig.post("/v1/sessions/b-2/close", {"reward": 1.0}, **bearer(BOB)))[0] == 200
    assert rig.event_writer.of(COMPLETIONS)[-1].session_id == f"{prefix('bob')}b-2"


@pytest.mark.parametrize("spec", [{}, GRADED, {"attempt": 3}])
async def test_f1_opening_an_id_does_not_tell_whether_another_tenant_has_it(spec: dict[str, Any]) -> None:
    taken, free = shared(), shared()
    await taken.open(BOB, session_id="x", **GRADED)
    answers = [await rig.post("/v1/sessions", {"session_id": "x", **spec}, **bearer(ALICE)) for rig in (taken, free)]
    for _, answer in answers:
        answer.pop("api_key")
        answer.pop("environment")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method_path", ["GET ", "POST /close", "POST /reward"])
@pytest.mark.parametrize("key", [ALICE, "unknown", None])
async def test_f1_a_foreign_session_is_answered_as_one_that_does_not_exist(method_path: str, key: str | None) -> None:
    method, path = method_path.split(" ")
    taken, free = shared(), shared()
    await taken.open(BOB, session_id="x")
    answers = []
    for rig in (taken, free):
        async with rig.request(method, f"/v1/sessions/x{path}", {"reward": 1.0}, **bearer(key)) as call:
            answers.append((await call.json(), call.status))
    assert answers[0] == answers[1]
    assert answers[0][1] == (404 if key == ALICE else 401)


async def test_f1_two_tenants_with_one_group_id_have_two_groups() -> None:
    rig = shared()
    for key in (BOB, ALICE, ALICE):
        await rig.open(key, group_id="g", group_size=2)
    groups = [event.spec.group_id for event in rig.event_writer.of(COMPLETIONS)]
    assert groups == [f"{prefix('bob')}g", f"{prefix('alice')}g", f"{prefix('alice')}g"]
    (opened,) = [(await rig.open(ALICE, session_id="s", group_id="g"))["session_id"]]
    assert (await get(rig, f"/v1/sessions/{opened}", ALICE))[1]["spec"]["group_id"] == "g"
    assert (await rig.open(ALICE, session_id="s", group_id="g"))["session_id"] == "s"


async def test_f1_names_are_recorded_as_sent_without_keys_and_by_the_only_tenant() -> None:
    for settings, key in ((CaptureSettings(), None), (CaptureSettings(api_keys={"alice": KEYS["alice"]}), ALICE)):
        rig = Rig(settings)
        await rig.open(key, session_id="s", group_id="g")
        (entry,) = rig.event_writer.of(SESSIONS)
        assert (entry.session_id, entry.spec.group_id) == ("s", "g")
        raw = rig.event_writer.appended[-1].value
        assert b'"tenant":null' not in raw
        assert raw.count(b'"tenant"') == (key is not None)


async def test_f1_what_release_0_1_0_opened_stays_its_tenants_under_its_name() -> None:
    rig, spec = shared(), SessionSpec(group_id="g", group_size=2, metadata={"tenant": "bob"})
    rig.table.apply(SessionEntry(session_id="s", state=SessionState.OPEN, spec=spec, opened_at=0.0, token=None))
    assert (await get(rig, "/v1/sessions/s", BOB))[0] == 200
    assert (await get(rig, "/v1/sessions/s", ALICE))[0] == 404
    await rig.open(ALICE, session_id="s", group_id="g")
    await rig.open(BOB, session_id="s", group_id="g", group_size=2)
    await rig.open(BOB, session_id="s", group_id="g", attempt=2)
    await rig.open(BOB, session_id="s2", group_id="g")
    entries = rig.event_writer.of(SESSIONS)
    alices, bobs = f"{prefix('alice')}s", f"{prefix('bob')}s2"
    assert [entry.session_id for entry in entries] == [alices, "s", "s", bobs]
    assert [entry.spec.group_id for entry in entries] == [f"{prefix('alice')}g", "g", "g", "g"]


def test_f1_the_tenant_of_an_entry_is_a_field_that_release_0_1_0_never_sees() -> None:
    spec = SessionSpec(metadata={"tenant": "bob"})
    old = SessionEntry(session_id="s", state=SessionState.OPEN, spec=spec, opened_at=0.0)
    assert old.tenant == "bob"
    assert "tenant" not in old.model_dump()
    own = SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0, tenant="bob")
    assert own.model_dump()["tenant"] == "bob"
    for entry in (old, own, own.replace(tenant=None)):
        value = encode(entry, JSON)
        assert decode(SESSIONS.model, value, ((CONTENT_TYPE, JSON.encode()),)) == entry


NAMES = st.from_regex(r"\A(t-[0-9a-f]{16}\.)?[a-c][a-c.]{0,2}\Z")
TENANTS = st.lists(st.sampled_from(["a", "b", "t-x", "", "é"]), min_size=1, max_size=3, unique=True)


@given(TENANTS, st.data())
def test_f1_no_two_tenants_are_given_one_recorded_name(tenants: list[str], data: st.DataObject) -> None:
    names = TenantNames(tenants, data.draw(st.sampled_from([None, *tenants])))
    owners: dict[str, set[str | None]] = {}
    special = st.builds(lambda tenant, name: prefix(tenant) + name, st.sampled_from(tenants), NAMES)
    for _ in range(8):
        tenant, name = data.draw(st.sampled_from(tenants)), data.draw(NAMES | special)
        recorded = names.recorded(tenant, name, lambda found: owners.get(found, set()))
        owners.setdefault(recorded, set()).add(tenant)
        assert owners[recorded] == {tenant}
        assert names.recorded(tenant, name, lambda found: owners.get(found, set())) == recorded


@given(TENANTS, st.data())
def test_f1_replicas_that_know_nothing_of_each_other_give_no_two_tenants_one_name(
    tenants: list[str], data: st.DataObject
) -> None:
    names = TenantNames(tenants, data.draw(st.sampled_from([None, *tenants])))
    special = st.builds(lambda tenant, name: prefix(tenant) + name, st.sampled_from(tenants), NAMES)
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(tenants), NAMES | special), max_size=8))
    recorded = {names.recorded(tenant, name, lambda _: ()): (tenant, name) for tenant, name in chosen}
    assert len(recorded) == len(set(chosen))


async def test_f1_a_name_that_leaves_no_room_for_its_prefix_is_refused_with_advice() -> None:
    rig = shared()
    for body in ({"session_id": "s" * 110}, {"group_id": "g" * 110}):
        status, answer = await rig.post("/v1/sessions", body, **bearer(BOB))
        assert (status, "at most 109" in answer["error"]["message"]) == (422, True)
    assert rig.event_writer.appended == []


async def test_f4_a_sessions_token_makes_calls_and_reads_or_grades_nothing() -> None:
    rig = Rig(CaptureSettings(**KEYED))
    token = (await rig.open(ALICE, session_id="s1", metadata={"expected_answer": "42"}))["api_key"]
    status, answer = await get(rig, "/v1/sessions/s1", token)
    assert (status, "42" in str(answer)) == (401, False)
    for body in ({"reward": 1e6}, {"output": {"answer": "42"}}):
        status, answer = await rig.post("/v1/sessions/s1/close", body, **bearer(token))
        assert (status, "tenant's key" in answer["error"]["message"]) == (403, True)
    assert (await rig.post("/v1/sessions/s1/reward", {"reward": 1.0}, **bearer(token)))[0] == 401
    assert (await rig.post(CALL, ASK, **bearer(token)))[0] == 200
    assert (await get(rig, "/v1/models", token))[0] == 200
    assert (await get(rig, "/v1/sessions/s1", ALICE))[1]["spec"]["metadata"]["expected_answer"] == "42"
    assert (await rig.post("/v1/sessions/s1/close", {"status": "ERROR", "error": "x"}, **bearer(token)))[0] == 200
    assert (await get(rig, "/v1/sessions/s1", ALICE))[1]["spec"] is None


async def test_f4_closing_by_token_can_be_switched_off() -> None:
    rig = Rig(CaptureSettings(**KEYED, token_may_close=False))
    token = (await rig.open(ALICE, session_id="s1"))["api_key"]
    assert (await rig.post("/v1/sessions/s1/close", {}, **bearer(token)))[0] == 403
    assert (await rig.post("/v1/sessions/s1/close", {}, **bearer(ALICE)))[0] == 200


@pytest.mark.parametrize("reward", [3.4e38, -3.4e38, 1.1e6])
@pytest.mark.parametrize("field", ["reward", "trace_rewards", "turn_rewards", "token_rewards"])
async def test_f4_a_reward_out_of_all_proportion_is_refused(reward: float, field: str) -> None:
    rig = Rig(CaptureSettings(**KEYED))
    await rig.open(ALICE, session_id="s1")
    value: Any = {"reward": reward, "trace_rewards": [0.0, reward]}.get(field, [[0.0, reward]])
    status, answer = await rig.post("/v1/sessions/s1/reward", {field: value}, **bearer(ALICE))
    assert (status, "ROLLMILL_MAX_REWARD" in answer["error"]["message"]) == (422, True)
    assert (await rig.post("/v1/sessions/s1/close", {"reward": reward}, **bearer(ALICE)))[0] == 422
    assert rig.event_writer.of(EVALUATIONS) == []
    assert (await rig.post("/v1/sessions/s1/close", {"reward": 1e6}, **bearer(ALICE)))[0] == 200


async def test_f2_an_evaluation_id_with_another_content_is_a_conflict_at_once() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    bodies = [{"evaluation_id": "x", "reward": reward} for reward in (1.0, 1.0, 0.5)]
    statuses = [(await rig.post("/v1/sessions/s1/reward", body))[0] for body in bodies]
    assert statuses == [202, 202, 409]
    assert [each.outcome_reward for each in rig.event_writer.of(EVALUATIONS)] == [1.0, 1.0]


async def test_f2_a_session_takes_as_many_rewards_as_the_merger() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    statuses = [
        (await rig.post("/v1/sessions/s1/reward", {"evaluator": f"e{number}", "reward": 0.5}))[0]
        for number in range(258)
    ]
    assert statuses == [202] * 256 + [409] * 2
    await rig.open(None, session_id="s1", attempt=2)
    assert (await rig.post("/v1/sessions/s1/reward", {"evaluator": "e0", "reward": 0.5}))[0] == 202


@pytest.mark.parametrize(
    ("session", "own"),
    [
        ({"x_api_key": "token", "authorization": "Bearer somebody"}, None),
        ({"authorization": "Bearer token", "x_session_id": "ses_4f2a"}, "ses_4f2a"),
        ({"x_goog_api_key": "token", "x_api_key": "other", "x_session_id": "s2"}, "s2"),
    ],
)
@pytest.mark.parametrize("keyed", [True, False])
async def test_c22_c24_every_key_is_tried_and_a_token_names_its_session(
    session: dict[str, str], own: str | None, *, keyed: bool
) -> None:
    rig = Rig(CaptureSettings(**KEYED)) if keyed else Rig(CaptureSettings())
    key = ALICE if keyed else None
    token = (await rig.open(key, session_id="s1"))["api_key"]
    await rig.open(key, session_id="s2")
    headers = {name: value.replace("token", token) for name, value in session.items()}
    for path in (CALL, "/sessions/s1/v1/chat/completions"):
        status, answer = await rig.post(path, ASK, **headers)
        assert status == 200, answer
    assert {record.session_id for record in rig.records} == {"s1"}
    assert {record.metadata.get("client_session_id") for record in rig.records} == {own}


@pytest.mark.parametrize("settings", [KEYED, BOTH, {}])
@pytest.mark.parametrize("headers", [{"authorization": "Bearer rm-secret"}, {"x_session_id": "rm-secret"}])
async def test_c22_no_key_is_part_of_an_error(settings: dict[str, Any], headers: dict[str, str]) -> None:
    rig = Rig(CaptureSettings(**settings))
    for path in (CALL, "/v1/messages", "/sessions/none/v1/messages", "/v1/sessions/none/close", "/v1/sessions"):
        status, answer = await rig.post(path, {"session_id": 1}, **headers)
        assert status in (401, 404, 422)
        assert "secret" not in str(answer)


@pytest.mark.parametrize(
    "path", ["/sessions/s1//v1/messages", "//v1/messages", "/v1/messages/", "/sessions/s1/v1/v1/chat/completions//"]
)
async def test_c23_empty_segments_of_a_path_are_ignored(path: str) -> None:
    rig = Rig(CaptureSettings())
    token = (await rig.open(None, session_id="s1"))["api_key"]
    body = {**ASK, "max_tokens": 5}
    status, _ = await rig.post(path.replace("/v1/v1/", "/v1/"), body, **bearer(token))
    assert status == 200
    assert (await rig.post("//nothing//here", body))[0] == 404


async def test_f6_quotas_are_each_tenants_own_and_the_answer_names_what_is_exhausted() -> None:
    rig = shared(tenant_open_sessions=2)
    await rig.open(BOB, session_id="b1")
    await rig.open(BOB, session_id="b2")
    status, answer = await rig.post("/v1/sessions", {}, **bearer(BOB))
    assert (status, "2 open sessions" in answer["error"]["message"]) == (429, True)
    await rig.open(BOB, session_id="b2", attempt=2)
    await rig.open(ALICE, session_id="a1")
    assert (await rig.post("/v1/sessions/b1/close", {}, **bearer(BOB)))[0] == 200
    await rig.open(BOB, session_id="b3")


async def test_f6_a_session_past_its_deadline_is_not_open() -> None:
    table = SessionTable()
    table.measure()
    spec = SessionSpec(deadline_seconds=10.0, metadata={"tenant": "bob"})
    table.apply(SessionEntry(session_id="s", state=SessionState.OPEN, spec=spec, opened_at=0.0))
    usage = table.measure()
    assert [usage.open_sessions("bob", now) for now in (5.0, 11.0)] == [1, 0]
    table.forget("s", None)
    assert usage.spec_bytes("bob") == 0


async def test_f6_the_bytes_of_a_tenants_specs_are_bounded() -> None:
    rig = shared(tenant_spec_bytes=4000)
    large = {"metadata": {"x": "y" * 2500}}
    await rig.open(BOB, session_id="b1", **large)
    status, answer = await rig.post("/v1/sessions", large, **bearer(BOB))
    assert (status, "4000 bytes of sessions' specs" in answer["error"]["message"]) == (429, True)
    await rig.open(ALICE, **large)
    assert (await rig.post("/v1/sessions/b1/close", {}, **bearer(BOB)))[0] == 200
    assert (await rig.post("/v1/sessions", large, **bearer(BOB)))[0] == 201  # a closed session's spec is not kept


async def test_f6_calls_in_flight_and_rewards_have_quotas_too() -> None:
    rig = shared(tenant_calls=1, session_rewards=1)
    tokens = [(await rig.open(key, session_id="s"))["api_key"] for key in (ALICE, BOB)]
    rig.engine.clear()
    async with rig.request("POST", CALL, ASK, **bearer(tokens[0])) as first:
        await rig.called.wait()
        status, answer = await rig.post("/v1/messages", {**ASK, "max_tokens": 5}, **bearer(tokens[0]))
        assert (status, "1 calls in flight" in answer["error"]["message"]) == (429, True)
        rig.engine.set()
        assert (await rig.post(CALL, ASK, **bearer(tokens[1])))[0] == 200
        assert (await first.json())["choices"]
    assert (await rig.post(CALL, ASK, **bearer(tokens[0])))[0] == 200
    rewards = [await rig.post("/v1/sessions/s/reward", {"reward": value}, **bearer(BOB)) for value in (1.0, 1.0, 0.5)]
    assert [status for status, _ in rewards] == [202, 202, 429]
    assert "1 rewards" in rewards[-1][1]["error"]["message"]


def test_an_empty_file_of_keys_lets_nobody_in_by_accident(tmp_path: Any) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{}")
    with pytest.raises(Exception, match="names no tenant"):
        Rig(CaptureSettings(host="0.0.0.0", api_keys_file=file))


def test_the_tenant_without_a_prefix_has_to_have_a_key() -> None:
    with pytest.raises(ValueError, match="unprefixed_tenant"):
        CaptureSettings(api_keys={"alice": digest_of(ALICE)}, unprefixed_tenant="carol")


@pytest.mark.parametrize("status", [200, 500])
async def test_the_gauge_of_calls_in_flight_falls_back_to_zero(status: int) -> None:
    rig = Rig(CaptureSettings(**KEYED), status=status)
    token = (await rig.open(ALICE, session_id="s"))["api_key"]
    rig.engine.clear()
    async with rig.request("POST", CALL, ASK, **bearer(token)) as call:
        await rig.called.wait()
        assert b'rollmill_in_flight{component="capture",prefix=""} 1.0' in rig.metrics.exposition()
        rig.engine.set()
        await call.rest()
    assert b'rollmill_in_flight{component="capture",prefix=""} 0.0' in rig.metrics.exposition()
