"""Evaluators that ask services outside: a reward service, a judge; and several evaluators as one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import orjson
import pytest

from rollmill.codec import encode
from rollmill.errors import InvalidInputError, NotGradedError
from rollmill.models import EvalResult, Evaluation, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.signing import ANSWER_HEADER, HEADER, sign, sign_answer, verify, verify_answer
from rollmill.strategies import (
    BaseTrajectoryEvaluator,
    EvaluationContext,
    ExternalService,
    ResourceClass,
    evaluator_registry,
    validate_session_spec,
)
from rollmill.testing.http.stub_http_server import (
    StubHttpServer,
    StubReply,
    StubRequest,
    StubScript,
    in_turn,
    stub_http_server,
)
from rollmill.testing.samples.trajectories import sample_trace
from rollmill_evaluator.consumer.in_flight import ReceivedRecord
from rollmill_evaluator.delivery.record_handler import RecordHandler, resource_class_of
from rollmill_evaluator.grading import EvaluationLimits, Grader
from rollmill_evaluator.remote.addresses import AddressRule
from rollmill_evaluator.remote.http_request import HttpRequest
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import evaluation_context

LIMITS = EvaluationLimits(seconds=20.0, attempts=3, retry_seconds=0.0, bytes=2**20)
KEY = "a shared key"


def session(*, traces: int = 2, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "session_id": "s1",
        "status": SessionStatus.COMPLETED,
        "spec": SessionSpec(task_id="t1", metadata={"answer": 42}),
        "output": b'{"said":"42"}',
        "traces": tuple(sample_trace("s1", prompt_messages=b'[{"role":"user"}]', index=n) for n in range(traces)),
    }
    return Trajectory(**{**values, **changes})


async def graded(
    strategy: str, config: dict[str, Any], services: dict[str, ExternalService] | None = None, **limits: Any
) -> Evaluation:
    context = EvaluationContext(deadline_seconds=0.0, services=services or {}, networks=("127.0.0.0/8",))
    grader = Grader(evaluator_registry(), EvaluationLimits(**{**vars(LIMITS), **limits}), SystemClock(), context)
    return await grader.grade(session(), "digest", EvaluatorSpec(strategy=strategy, config=config))


def said(**result: Any) -> StubReply:
    return StubReply(body=orjson.dumps(result))


@contextmanager
def service(script: StubScript | StubReply) -> Iterator[StubHttpServer]:
    with stub_http_server(in_turn(script) if isinstance(script, StubReply) else script) as running:
        yield running


# ---- http ------------------------------------------------------------------------------------------------------------


async def test_a_reward_service_gets_the_session_and_its_answer_is_the_grade() -> None:
    answer = said(outcome_reward=0.0, trace_rewards=[1.0, None], components={"style": 0.5}, metadata={"by": "us"})
    with service(answer) as running:
        config = {"url": f"{running.url}/grade", "parameters": {"strict": True}, "include": ["output", "tokens"]}
        evaluation = await graded("http", config)
    (asked,) = running.requests
    told = orjson.loads(asked.body)
    assert (asked.path, asked.headers["x-rollmill-session"]) == ("/grade", "s1:1")
    assert (told["task_id"], told["output"], told["parameters"]) == ("t1", {"said": "42"}, {"strict": True})
    assert [trace["response_ids"] for trace in told["traces"]] == [[5, 6, 7], [5, 6, 7]]
    assert "metadata" not in told
    assert HEADER not in asked.headers
    assert (evaluation.outcome_reward, evaluation.trace_rewards) == (0.0, (1.0, None))
    assert (evaluation.components, evaluation.metadata, evaluation.version) == ({"style": 0.5}, {"by": "us"}, "1")


@pytest.mark.parametrize(
    "failure", [StubReply(500), StubReply(503), StubReply(429, headers={"retry-after": "0"}), StubReply(408)]
)
async def test_what_may_pass_is_tried_again_and_then_named(failure: StubReply) -> None:
    with service(in_turn(failure, failure, said(outcome_reward=1.0))) as running:
        assert (await graded("http", {"url": running.url})).outcome_reward == 1.0
    with service(failure) as running:
        assert (await graded("http", {"url": running.url})).not_graded == "service_unavailable"
        assert len(running.requests) == LIMITS.attempts


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
async def test_a_refusal_is_named_at_once(status: int) -> None:
    with service(StubReply(status, b"no such task")) as running:
        evaluation = await graded("http", {"url": running.url})
        assert len(running.requests) == 1
    assert evaluation.not_graded == "service_refused"
    assert f"HTTP {status}: no such task" in evaluation.metadata["error"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"outcome_reward": NaN}',
        b'{"outcome_reward": 1e999}',
        b'{"outcome_reward": true}',
        b'{"outcome_reward": "1.0"}',
        b'{"outcome_reward": 1.0, "not_graded": "both"}',
        b'{"reward": 1.0}',
        b"1.0",
        b"not json",
        b"",
    ],
)
async def test_an_answer_that_is_no_result_is_no_number(body: bytes) -> None:
    with service(StubReply(body=body)) as running:
        evaluation = await graded("http", {"url": running.url})
        assert len(running.requests) == 1
    assert evaluation.not_graded == "invalid_answer"
    assert not evaluation.has_reward


async def test_a_service_can_say_that_it_cannot_grade() -> None:
    with service(said(not_graded="no_reference")) as running:
        assert (await graded("http", {"url": running.url})).not_graded == "no_reference"


async def test_a_silent_or_absent_service_is_infrastructure() -> None:
    hold = threading.Event()
    with service(StubReply(hold=hold)) as running:
        try:
            silent = await graded("http", {"url": running.url, "timeout_seconds": 0.05}, attempts=2)
        finally:
            hold.set()
        assert len(running.requests) == 2
    gone = await graded("http", {"url": running.url})
    assert (silent.not_graded, gone.not_graded) == ("service_timeout", "service_unreachable")


async def test_the_deadline_ends_all_tries() -> None:
    hold = threading.Event()
    with service(StubReply(hold=hold)) as running:
        try:
            evaluation = await graded("http", {"url": running.url}, seconds=0.1)
        finally:
            hold.set()
    assert evaluation.not_graded in ("evaluator_timeout", "service_timeout")


def signing(asked: StubRequest) -> StubReply:
    body = b'{"outcome_reward": 1.0}'
    return StubReply(body=body, headers={ANSWER_HEADER: sign_answer(KEY, asked.headers[HEADER], body)})


async def test_requests_are_signed_and_answers_checked() -> None:
    with service(signing) as running:
        services = {"rewards": ExternalService(running.url, api_key="k1", signing_key=KEY)}
        config = {"service": "rewards", "signed_answer": True}
        assert (await graded("http", config, services)).outcome_reward == 1.0
        (asked,) = running.requests
        assert asked.headers["authorization"] == "Bearer k1"
        now = SystemClock().now()
        assert verify(KEY, asked.body, asked.headers[HEADER], now)
        assert not verify(KEY, asked.body + b" ", asked.headers[HEADER], now)
        assert not verify("another", asked.body, asked.headers[HEADER], now)
        assert not verify(KEY, asked.body, asked.headers[HEADER], now + 301)
    assert "k1" not in repr(services)
    assert KEY not in repr(services)


@pytest.mark.parametrize("signature", [None, "v1=00", "replayed"])
async def test_an_answer_with_a_wrong_signature_is_no_grade(signature: str | None) -> None:
    body = b'{"outcome_reward": 1.0}'
    made = sign_answer(KEY, sign(KEY, b"another request", 1.0), body) if signature == "replayed" else signature
    headers = {} if made is None else {ANSWER_HEADER: made}
    with service(StubReply(body=body, headers=headers)) as running:
        services = {"rewards": ExternalService(running.url, signing_key=KEY)}
        evaluation = await graded("http", {"service": "rewards", "signed_answer": True}, services)
    assert evaluation.not_graded == "service_signature"


@pytest.mark.parametrize("signature", ["", "t=,v1=", "t=x,v1=00", "v1=00", "t=²,v1=00"])
def test_a_garbled_signature_is_refused(signature: str) -> None:
    assert not verify(KEY, b"body", signature, 0.0)
    assert not verify_answer(KEY, "t=0,v1=0", b"body", signature)


async def test_an_unknown_service_is_named() -> None:
    evaluation = await graded("http", {"service": "elsewhere"}, {"rewards": ExternalService("http://127.0.0.1:1")})
    assert evaluation.not_graded == "unknown_service"
    assert "which has: rewards" in evaluation.metadata["error"]


@pytest.mark.parametrize("strategy", ["http", "llm_judge"])
async def test_where_only_services_may_be_named_a_url_is_not_asked(strategy: str) -> None:
    with service(said(outcome_reward=1.0)) as running:
        config = {"url": running.url} if strategy == "http" else judge(running.url)
        spec = EvaluatorSpec(strategy=strategy, config=config)
        context = evaluation_context(EvaluatorSettings())
        evaluation = await Grader(evaluator_registry(), LIMITS, SystemClock(), context).grade(session(), "d", spec)
    assert evaluation.not_graded == "url_not_allowed"
    assert running.requests == []


@pytest.mark.parametrize("strategy", ["http", "llm_judge"])
async def test_f16_a_url_is_asked_in_networks_that_are_allowed_alone(strategy: str) -> None:
    with service(said(outcome_reward=1.0)) as running:
        config = {"url": running.url} if strategy == "http" else judge(running.url)
        spec = EvaluatorSpec(strategy=strategy, config=config)
        context = evaluation_context(EvaluatorSettings(evaluator_any_url=True))
        evaluation = await Grader(evaluator_registry(), LIMITS, SystemClock(), context).grade(session(), "d", spec)
        assert evaluation.not_graded == "address_not_allowed"
        assert running.requests == []
        allowed = evaluation_context(EvaluatorSettings(evaluator_any_url=True, evaluator_networks=["127.0.0.1/32"]))
        await Grader(evaluator_registry(), LIMITS, SystemClock(), allowed).grade(session(), "d", spec)
        assert running.requests != []


async def test_f16_a_service_that_the_operator_names_may_be_anywhere() -> None:
    with service(said(outcome_reward=1.0)) as running:
        settings = EvaluatorSettings(evaluator_services={"rewards": {"url": running.url}})
        grader = Grader(evaluator_registry(), LIMITS, SystemClock(), evaluation_context(settings))
        spec = EvaluatorSpec(strategy="http", config={"service": "rewards"})
        assert (await grader.grade(session(), "d", spec)).outcome_reward == 1.0


def resolving(*addresses: str) -> AddressRule:
    async def resolve(_: str, __: int) -> list[str]:
        return list(addresses)

    return AddressRule((), resolve)


REFUSED = (
    *("127.0.0.1", "169.254.169.254", "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "fe80::1", "fe80::1%eth0", "fd00::1", "::", "::ffff:127.0.0.1", "::ffff:169.254.169.254"),
    *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "255.255.255.255"),
)


@pytest.mark.parametrize("address", REFUSED)
async def test_f16_a_name_that_leads_inside_is_refused_after_it_was_looked_up(address: str) -> None:
    request = HttpRequest(ExternalService("http://rewards.example"), b"{}", rule=resolving(address))
    with pytest.raises(NotGradedError, match="address_not_allowed"):
        await request.send(5.0)
    both = HttpRequest(ExternalService("http://rewards.example"), b"{}", rule=resolving("1.1.1.1", address))
    with pytest.raises(NotGradedError, match="address_not_allowed"):
        await both.send(5.0)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert AddressRule().allows(address)


async def test_f16_the_address_that_was_checked_is_connected_to() -> None:
    """The name exists for the rule alone, so whoever looked it up again would reach nothing."""

    async def resolve(host: str, _: int) -> list[str]:
        assert host == "rewards.invalid"
        return ["127.0.0.1"]

    with service(said(outcome_reward=1.0)) as running:
        url = running.url.replace("127.0.0.1", "rewards.invalid")
        rule = AddressRule((ip_network("127.0.0.1/32"),), resolve)
        await HttpRequest(ExternalService(url), b"{}", rule=rule).send(5.0)
        assert {name.lower(): value for name, value in running.requests[0].headers.items()}["host"] == url[7:]


# ---- llm_judge -------------------------------------------------------------------------------------------------------


def completion(content: object, **choice: Any) -> StubReply:
    text = content if isinstance(content, str) else orjson.dumps(content).decode()
    message = {"role": "assistant", "content": text}
    return said(choices=[{"message": message, "finish_reason": "stop", **choice}], usage={"total_tokens": 9})


def judge(url: str, **config: Any) -> dict[str, Any]:
    return {"url": f"{url}/v1", "model": "judge-1", "rubric": "Is it 42?", **config}


async def test_a_judge_gets_rubric_and_schema_and_its_score_is_the_grade() -> None:
    with service(completion({"reason": "it is 42", "score": 7})) as running:
        evaluation = await graded("llm_judge", judge(running.url, lowest=1, highest=10))
    (asked,) = running.requests
    sent = orjson.loads(asked.body)
    assert (asked.path, asked.headers["x-rollmill-call"]) == ("/v1/chat/completions", "aux")
    assert "Is it 42?" in sent["messages"][0]["content"]
    assert "from 1 (worst) to 10 (best)" in sent["messages"][0]["content"]
    assert orjson.loads(sent["messages"][1]["content"])["output"] == {"said": "42"}
    schema = sent["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert list(schema["schema"]["properties"]) == ["reason", "score"]
    assert evaluation.outcome_reward == 7.0
    assert (evaluation.metadata["reason"], evaluation.metadata["tries"]) == ("it is 42", 1)
    assert evaluation.metadata["usage"] == {"total_tokens": 9}


async def test_criteria_are_components_and_weigh() -> None:
    with service(completion({"reason": "", "right": 1.0, "short": 0.0})) as running:
        evaluation = await graded("llm_judge", judge(running.url, criteria={"right": 3.0, "short": 1.0}))
    assert (evaluation.outcome_reward, evaluation.components) == (0.75, {"right": 1.0, "short": 0.0})


BAD_ANSWERS = [
    "I think it deserves a 7.",
    {"reason": "", "score": "0.5"},
    {"reason": "", "score": True},
    {"reason": "", "score": None},
    {"reason": "", "score": 1.5},
    {"reason": "", "score": -0.1},
    {"reason": ""},
    '{"reason": "", "score": NaN}',
    "[0.5]",
]


@pytest.mark.parametrize("bad", BAD_ANSWERS)
async def test_an_unreadable_opinion_is_asked_for_again_and_never_guessed(bad: object) -> None:
    good = completion('```json\n{"reason": "", "score": 0.5}\n```')
    with service(in_turn(completion(bad), good)) as running:
        evaluation = await graded("llm_judge", judge(running.url))
    assert (evaluation.outcome_reward, evaluation.metadata["tries"]) == (0.5, 2)
    with service(completion(bad)) as running:
        evaluation = await graded("llm_judge", judge(running.url, attempts=2))
        assert len(running.requests) == 2
    assert evaluation.not_graded == "judge_unreadable"


@pytest.mark.parametrize("answer", [said(), said(choices=[]), said(choices=[{"message": {"content": None}}])])
async def test_an_answer_without_text_is_unreadable(answer: StubReply) -> None:
    with service(answer) as running:
        assert (await graded("llm_judge", judge(running.url, attempts=1))).not_graded == "judge_unreadable"


async def test_a_judge_that_is_down_is_infrastructure_and_one_that_refuses_is_named() -> None:
    with service(StubReply(503)) as running:
        assert (await graded("llm_judge", judge(running.url))).not_graded == "service_unavailable"
    with service(StubReply(404)) as running:
        assert (await graded("llm_judge", judge(running.url))).not_graded == "service_refused"


async def test_a_long_session_loses_its_middle_and_says_so() -> None:
    with service(completion({"reason": "", "score": 1})) as running:
        evaluation = await graded("llm_judge", judge(running.url, max_characters=100))
    work = orjson.loads(running.requests[0].body)["messages"][1]["content"]
    assert f"[{evaluation.metadata['characters_cut']} characters left out]" in work
    assert work.startswith('{"session_id":"s1"')
    assert len(work) < 200


# ---- composite -------------------------------------------------------------------------------------------------------


class Gives(BaseTrajectoryEvaluator):
    """Returns what its config says, or raises."""

    def __init__(self, **result: Any) -> None:
        self._raises = result.pop("raises", None)
        self._result = EvalResult.model_validate(result)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # the base's signature
        if self._raises is not None:
            raise ZeroDivisionError(self._raises)
        return self._result


@pytest.fixture(autouse=True)
def _gives() -> None:
    evaluator_registry().register("gives", Gives)


def part(name: str, weight: float = 1.0, **result: Any) -> dict[str, Any]:
    return {"strategy": "gives", "name": name, "weight": weight, "config": result}


async def composed(*parts: dict[str, Any], **config: Any) -> Evaluation:
    return await graded("composite", {"parts": list(parts), "retry_seconds": 0.0, **config})


async def test_a_composite_is_the_weighted_mean_and_keeps_its_parts() -> None:
    evaluation = await composed(part("tests", 3.0, outcome_reward=1.0), part("style", outcome_reward=0.0))
    assert evaluation.outcome_reward == 0.75
    assert evaluation.components == {"tests": 1.0, "style": 0.0}
    assert evaluation.metadata["parts"]["style"]["weight"] == 1.0


async def test_parts_with_trace_rewards_combine_per_trace() -> None:
    evaluation = await composed(part("a", trace_rewards=[1.0, None], outcome_reward=0.5), part("b", outcome_reward=0.0))
    assert (evaluation.outcome_reward, evaluation.trace_rewards) == (0.25, (0.5, None))


MISSING = [part("b", not_graded="down"), part("b", raises="oops"), part("b")]
REASONS = ["down", "evaluator_error", "no_reward"]


@pytest.mark.parametrize(("missing", "reason"), list(zip(MISSING, REASONS, strict=True)))
async def test_a_part_that_is_not_graded_meets_the_rule(missing: dict[str, Any], reason: str) -> None:
    good = part("a", outcome_reward=0.8)
    failed = await composed(good, missing)
    skipped = await composed(good, missing, not_graded="skip")
    zero = await composed(good, missing, not_graded="zero")
    assert (failed.outcome_reward, failed.not_graded) == (None, reason)
    assert skipped.outcome_reward == 0.8
    assert (zero.outcome_reward, zero.metadata["counted_as_zero"]) == (0.4, ["b"])
    assert skipped.components == {"a": 0.8}
    assert zero.components == {"a": 0.8, "b": 0.0}
    assert (await composed(missing, not_graded="skip")).not_graded == reason


async def test_b094_means_of_parts_are_over_the_rollouts_of_the_whole() -> None:
    right = part("a", outcome_reward=1.0)
    both = [
        await composed(right, part("b", outcome_reward=1.0), not_graded="zero"),
        await composed(right, part("b", not_graded="down"), not_graded="zero"),
    ]
    means = {name: sum((said.components or {})[name] for said in both) / 2 for name in ("a", "b")}
    assert [said.outcome_reward for said in both] == [1.0, 0.5]
    assert means == {"a": 1.0, "b": 0.5}
    assert [said.metadata.get("counted_as_zero", []) for said in both] == [[], ["b"]]


async def test_a_part_of_weight_0_is_kept_and_changes_nothing() -> None:
    evaluation = await composed(part("a", outcome_reward=0.8), part("b", 0.0, not_graded="down"))
    assert evaluation.outcome_reward == 0.8
    assert evaluation.metadata["parts"]["b"]["not_graded"] == "down"


async def test_a_part_that_does_not_fit_is_named() -> None:
    assert (await composed(part("a", trace_rewards=[1.0]))).not_graded == "trace_count_mismatch"
    assert (await composed(part("a", turn_rewards=[[1.0], None]))).not_graded == "part_with_rewards_inside"


async def test_a_part_is_tried_again_by_itself() -> None:
    with service(in_turn(StubReply(503), StubReply(503), said(outcome_reward=1.0))) as running:
        remote = {"strategy": "http", "config": {"url": running.url}}
        evaluation = await composed(part("a", outcome_reward=0.0), remote)
        assert len(running.requests) == 3
    assert evaluation.outcome_reward == 0.5


def test_a_composite_belongs_to_the_heaviest_of_its_parts() -> None:
    light = {"strategy": "session_completed"}
    remote = {"strategy": "http", "config": {"url": "http://127.0.0.1:1"}}
    classes: list[tuple[list[dict[str, Any]], ResourceClass]] = [
        ([light], ResourceClass.LIGHT),
        ([light, remote], ResourceClass.REMOTE),
        ([remote, part("own", outcome_reward=1.0)], ResourceClass.CUSTOM),
    ]
    for parts, expected in classes:
        spec = EvaluatorSpec(strategy="composite", config={"parts": parts})
        assert resource_class_of(evaluator_registry(), spec) is expected


# ---- who answers what ------------------------------------------------------------------------------------------------


async def answered_by(resource_class: ResourceClass | None, *specs: EvaluatorSpec) -> set[str]:
    said: set[str] = set()

    async def publish(_: str, value: bytes) -> None:
        said.add(orjson.loads(value)["evaluator"])

    handler = RecordHandler(
        Grader(evaluator_registry(), LIMITS, SystemClock()),
        publish,
        Metrics("evaluator"),
        partitions=1,
        concurrency=1,
        resource_class=resource_class,
    )
    value = encode(session(spec=SessionSpec(evaluators=specs)))
    await handler.handle(ReceivedRecord(0, 0, value, ()))
    return said


async def test_each_evaluator_is_answered_by_its_class_and_an_external_one_by_nobody() -> None:
    specs = (
        EvaluatorSpec(strategy="session_completed"),
        EvaluatorSpec(strategy="external", name="eve"),
        EvaluatorSpec(strategy="nobody:Knows"),
        EvaluatorSpec(strategy="http", config={"url": "http://127.0.0.1:1"}),
        EvaluatorSpec(strategy="gives", config={"outcome_reward": 1.0}),
        EvaluatorSpec(strategy="test_on_output", config={"wrong": True}),
    )
    answers = {each: await answered_by(each, *specs) for each in ResourceClass}
    assert answers == {
        ResourceClass.LIGHT: {"session_completed", "nobody.Knows", "test_on_output"},
        ResourceClass.REMOTE: {"http"},
        ResourceClass.CUSTOM: {"gives"},
        ResourceClass.SANDBOX: set(),
    }
    assert await answered_by(None, *specs) == set().union(*answers.values())


def test_keys_of_services_come_from_the_settings_and_are_not_shown() -> None:
    settings = EvaluatorSettings.model_validate(
        {"evaluator_services": {"rewards": {"url": "https://r.example", "api_key": "k1", "signing_key": KEY}}}
    )
    assert "k1" not in repr(settings)
    assert KEY not in repr(settings)
    found = evaluation_context(settings).services["rewards"]
    assert (found.url, found.api_key, found.signing_key) == ("https://r.example", "k1", KEY)


# ---- validation when a session opens ---------------------------------------------------------------------------------

HTTP = {"url": "http://127.0.0.1:1"}
JUDGE = {**HTTP, "model": "m", "rubric": "r"}


@pytest.mark.parametrize(
    ("strategy", "config", "complaint"),
    [
        ("http", {}, "give either `service`"),
        ("http", {**HTTP, "service": "both"}, "give either `service`"),
        ("http", {"url": "file:///etc/passwd"}, "url"),
        ("http", {**HTTP, "include": ["everything"]}, "include"),
        ("http", {**HTTP, "retry": 3}, "retry"),
        ("llm_judge", HTTP, "model"),
        ("llm_judge", {**JUDGE, "lowest": 1.0}, "must be below highest"),
        ("llm_judge", {**JUDGE, "criteria": {"a": 0.0}}, "above 0"),
        ("llm_judge", {**JUDGE, "include": ["tokens"]}, "not tokens"),
        ("composite", {"parts": []}, "parts"),
        ("composite", {"parts": [{"strategy": "nobody"}]}, "unknown evaluator 'nobody'"),
        ("composite", {"parts": [{"strategy": "http"}]}, "give either `service`"),
        ("composite", {"parts": [{"strategy": "reported"}, {"strategy": "reported"}]}, "share one name"),
        ("composite", {"parts": [{"strategy": "reported", "weight": 0}]}, "above 0"),
        ("composite", {"parts": [{"strategy": "reported"}], "not_graded": "ignore"}, "not_graded"),
    ],
)
def test_a_bad_config_is_refused_when_the_session_opens(strategy: str, config: Any, complaint: str) -> None:
    spec = SessionSpec(evaluators=(EvaluatorSpec(strategy=strategy, config=config),))
    with pytest.raises(InvalidInputError, match=complaint):
        validate_session_spec(spec)
