"""Finding out what an engine can, by its list of models and one sampled token."""

import asyncio
from collections.abc import Callable
from functools import cached_property

import orjson
import pytest

from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.http.scripted_engine import ScriptedEngine
from rollmill_capture.model_config import EngineKind, Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.capabilities import Capability, EngineCapabilities, common_capability
from rollmill_capture.upstream.client import RouteTable, Target, make_client
from rollmill_capture.upstream.formats.upstream_format import CHAT
from rollmill_capture.upstream.probe import Probe

WAIT = 5.0
ONE = ScriptedEngine(("ok",))


async def probed(answer: Callable[[CannedRequest], CannedResponse], *, seconds: float = WAIT) -> Capability:
    """What is known of an engine when the first call asks."""
    async with asyncio.timeout(WAIT), canned_server(answer) as engine:
        settings = CaptureSettings(upstream=engine.url)
        async with make_client(settings) as client:
            (target,) = RouteTable(settings).trained
            engines = EngineCapabilities((target,), wait_seconds=seconds)
            running = asyncio.create_task(Probe(client, engines, Metrics("capture")).run())
            found = await engines.of(target)
            running.cancel()
            await asyncio.wait((running,))
            return found


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        ("vllm", EngineKind.VLLM),
        ("sglang", EngineKind.SGLANG),
        ("llamacpp", EngineKind.LLAMA_CPP),
        ("me", EngineKind.AUTO),
    ],
)
async def test_the_list_of_models_says_who_it_is(owner: str, kind: EngineKind) -> None:
    assert (await probed(ScriptedEngine(("ok",), owner=owner).answer)).kind is kind


async def test_an_engine_that_streams_ids_is_asked_for_streams() -> None:
    assert await probed(ONE.answer) == Capability(EngineKind.VLLM, streams_ids=True, known=True, ids=True)


async def test_an_engine_whose_streams_have_no_ids_is_asked_for_whole_answers() -> None:
    found = await probed(ScriptedEngine(("ok",), owner="other", stream_ids=False).answer)
    assert found == Capability(EngineKind.AUTO, streams_ids=False, known=True, ids=True)


async def test_an_engine_without_ids_is_known_to_have_none() -> None:
    def without(asked: CannedRequest) -> CannedResponse:
        if asked.method == "GET":
            return ONE.answer(asked)
        bare = {**asked.body, "return_token_ids": False}
        return ONE.answer(CannedRequest(asked.method, asked.path, asked.headers, orjson.dumps(bare)))

    found = await probed(without)
    assert (found.ids, found.streams_ids, found.known) == (False, True, True)


async def test_a_question_that_the_engine_refuses_says_nothing() -> None:
    found = await probed(ScriptedEngine(()).answer)
    assert (found.kind, found.ids, found.streams_ids) == (EngineKind.VLLM, None, True)


async def test_an_engine_that_is_not_there_yet_keeps_no_call_waiting() -> None:
    found = await probed(lambda _: CannedResponse.json({"error": "loading"}, 503))
    assert found == Capability()


async def test_an_engine_that_says_nothing_is_waited_for_once() -> None:
    silent = Target(Route(), "http://127.0.0.1:9/v1", None)
    engines = EngineCapabilities((silent,), wait_seconds=0.01)
    async with asyncio.timeout(WAIT):
        assert await engines.of(silent) == Capability()
    assert await asyncio.wait_for(engines.of(silent), 0.01) == Capability()


async def test_what_a_route_says_is_not_probed() -> None:
    target = Target(Route(engine=EngineKind.SGLANG), "http://127.0.0.1:9/v1", None)
    engines = EngineCapabilities((target,))
    assert engines.probed == {}
    assert (await engines.of(target)).kind is EngineKind.SGLANG


NO_IDS = CHAT.parse_body({"choices": [{"message": {}, "finish_reason": "stop"}]}, None)
WITH_IDS = CHAT.parse_body(
    {"choices": [{"message": {}, "finish_reason": "stop", "token_ids": [1]}], "prompt_token_ids": [1]}, None
)


async def test_replies_teach_what_the_probe_could_not_find_out() -> None:
    target, engines = Target(Route(), "http://127.0.0.1:9/v1", None), EngineCapabilities()
    engines.observe(target, CHAT, NO_IDS, streamed=True)
    assert not (await engines.of(target)).streams_ids
    engines.observe(target, CHAT, WITH_IDS, streamed=False)
    assert await engines.of(target) == Capability(streams_ids=False, known=True, ids=True)
    engines.observe(target, CHAT, NO_IDS, streamed=False)
    assert (await engines.of(target)).ids is True


async def test_an_engine_without_ids_in_any_form_streams_again() -> None:
    target, engines = Target(Route(), "http://127.0.0.1:9/v1", None), EngineCapabilities()
    engines.observe(target, CHAT, NO_IDS, streamed=True)
    engines.observe(target, CHAT, NO_IDS, streamed=False)
    assert await engines.of(target) == Capability(streams_ids=True, known=True, ids=False)


async def test_every_replica_is_probed_and_a_route_is_asked_for_what_all_of_them_can() -> None:
    weak = ScriptedEngine(("ok",), owner="other", stream_ids=False)
    async with asyncio.timeout(WAIT), canned_server(ONE.answer) as one, canned_server(weak.answer) as two:
        settings = CaptureSettings(upstream=one.url, default_route=Route(replicas=(two.url,)))
        async with make_client(settings) as client:
            (target,) = RouteTable(settings).trained
            engines = EngineCapabilities((target,), wait_seconds=WAIT)
            await Probe(client, engines, Metrics("capture")).run()
            assert await engines.of(target) == Capability(EngineKind.AUTO, streams_ids=False, known=True, ids=True)


async def test_a_replica_that_is_down_at_the_start_is_probed_when_it_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill_capture.upstream.probe.PAUSES", (0.01,))
    up = asyncio.Event()

    def loading(asked: CannedRequest) -> CannedResponse:
        return ScriptedEngine(("ok",), owner="sglang").answer(asked) if up.is_set() else CannedResponse.json({}, 503)

    sglang = ScriptedEngine(("ok",), owner="sglang")
    async with asyncio.timeout(WAIT), canned_server(loading) as one, canned_server(sglang.answer) as two:
        settings = CaptureSettings(upstream=one.url, default_route=Route(replicas=(two.url,)))
        async with make_client(settings) as client:
            (target,) = RouteTable(settings).trained
            engines = EngineCapabilities((target,), wait_seconds=WAIT)
            probing = asyncio.create_task(Probe(client, engines, Metrics("capture")).run())
            # The one that is up says what there is to know, before the other one does.
            assert (await engines.of(target)).kind is EngineKind.SGLANG
            up.set()
            await probing
            assert (await engines.of(target)).ids is True


@pytest.mark.parametrize(("one", "two", "both"), [(True, True, True), (True, False, False), (None, True, None)])
def test_replicas_that_differ_are_as_good_as_the_weakest(*, one: bool | None, two: bool, both: bool | None) -> None:
    found = [Capability(EngineKind.VLLM, known=True, ids=one), Capability(EngineKind.VLLM, known=True, ids=two)]
    assert common_capability(found) == Capability(EngineKind.VLLM, known=True, ids=both)
    assert common_capability(()) == Capability()


class Told(EngineCapabilities):
    """Says when something was learnt."""

    def learn(self, root: str, capability: Capability) -> None:
        super().learn(root, capability)
        self.learnt.set()

    @cached_property
    def learnt(self) -> asyncio.Event:
        return asyncio.Event()


async def test_an_engine_in_the_place_of_another_is_probed_when_its_replies_speak_against_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmill_capture.upstream.probe.AGAIN_SECONDS", 0.0)
    behind = [ScriptedEngine(("ok",), owner="vllm")]

    def answer(asked: CannedRequest) -> CannedResponse:
        return behind[-1].answer(asked)

    async with asyncio.timeout(WAIT), canned_server(answer) as server:
        settings = CaptureSettings(upstream=server.url)
        async with make_client(settings) as client:
            (target,) = RouteTable(settings).trained
            engines = Told((target,), wait_seconds=WAIT)
            watching = asyncio.create_task(Probe(client, engines, Metrics("capture")).watch())
            assert await engines.of(target) == Capability(EngineKind.VLLM, known=True, ids=True)
            behind.append(ScriptedEngine(("ok",), owner="sglang", stream_ids=False))
            engines.learnt.clear()
            for reply in (NO_IDS, NO_IDS, WITH_IDS, NO_IDS, NO_IDS, NO_IDS):
                assert not engines.learnt.is_set()
                engines.observe(target, CHAT, reply, streamed=True)
            await engines.learnt.wait()
            assert await engines.of(target) == Capability(EngineKind.SGLANG, streams_ids=False, known=True, ids=True)
            watching.cancel()
            await asyncio.wait((watching,))


async def test_where_nothing_is_probed_another_engine_is_learnt_from_its_replies() -> None:
    target, engines = Target(Route(), "http://127.0.0.1:9/v1", None), EngineCapabilities()
    engines.observe(target, CHAT, WITH_IDS, streamed=True)
    for _ in range(3):
        engines.observe(target, CHAT, NO_IDS, streamed=True)
    assert (await engines.of(target)).ids is None
    engines.observe(target, CHAT, NO_IDS, streamed=True)
    assert not (await engines.of(target)).streams_ids
