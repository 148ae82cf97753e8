"""Several upstreams: a session stays with one, a busy or dead one is left alone, calls wait and are not multiplied."""

from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from rollmill_capture.model_config import Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import LoadBalancer, RouteTable, Target, Upstream, UpstreamError, replica_order

ENGINES = ("http://one", "http://two", "http://three")
SESSIONS = [f"s{number}" for number in range(300)]


def target(*urls: str) -> Target:
    return RouteTable(CaptureSettings(upstream=urls[0], default_route=Route(replicas=urls[1:]))).find(None)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(answers: Callable[[str], int], asked: list[str]) -> Upstream:
    """Engines that answer with the status that ``answers`` gives for their host; 0: they cannot be reached."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        status = answers(request.url.host)
        if not status:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, headers={"retry-after": "7"} if status == 429 else {})

    return Upstream(httpx.AsyncClient(transport=httpx.MockTransport(answer)), load_balancer=LoadBalancer(now=Clock()))


async def call(upstream: Upstream, where: Target, session_id: str) -> int:
    async with upstream.chat(where, b"{}", "c1", session_id=session_id) as response:
        return response.status_code


def test_sessions_are_spread_and_stay_where_they_are_when_another_engine_goes() -> None:
    first = {session: replica_order(ENGINES, session)[0] for session in SESSIONS}
    assert min(Counter(first.values()).values()) > 60
    without = {session: replica_order(ENGINES[:2], session)[0] for session in SESSIONS}
    assert all(without[session] == url for session, url in first.items() if url != ENGINES[2])


async def test_a_session_always_goes_to_the_same_engine() -> None:
    asked: list[str] = []
    upstream = engine(lambda _: 200, asked)
    for _ in range(3):
        for session in SESSIONS[:20]:
            await call(upstream, target(*ENGINES), session)
    assert asked[:20] == asked[20:40] == asked[40:]
    assert len(set(asked)) == 3


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_where_an_engine_is_dead_or_busy_the_next_one_answers_and_it_is_left_alone(status: int) -> None:
    asked: list[str] = []
    upstream = engine(lambda host: status if host == "two" else 200, asked)
    mine = [session for session in SESSIONS if replica_order(ENGINES, session)[0] == "http://two"][:5]
    for session in mine:
        assert await call(upstream, target(*ENGINES), session) == 200
    assert asked.count("two") == 1


async def test_after_its_rest_an_engine_is_asked_again() -> None:
    clock = Clock()
    balancer = LoadBalancer(now=clock)
    session = next(name for name in SESSIONS if replica_order(ENGINES, name)[0] == "http://two")
    balancer.mark_rate_limited("http://two", "7")
    assert await balancer.select(ENGINES, session) != "http://two"
    clock.now += 7
    assert await balancer.select(ENGINES, session) == "http://two"


async def test_where_all_are_dead_the_client_is_told_and_each_was_tried_once() -> None:
    asked: list[str] = []
    upstream = engine(lambda _: 0, asked)
    with pytest.raises(UpstreamError, match="cannot be reached"):
        await call(upstream, target(*ENGINES), "s1")
    assert sorted(asked) == ["one", "three", "two"]


async def test_one_busy_engine_is_told_to_the_client_as_it_is() -> None:
    asked: list[str] = []
    assert await call(engine(lambda _: 429, asked), target("http://one"), "s1") == 429
    assert asked == ["one"]


async def test_calls_wait_for_a_busy_engine_as_long_as_it_asks_but_not_longer_than_allowed() -> None:
    balancer = LoadBalancer(0.02)
    balancer.mark_rate_limited("http://one", "3600")
    assert await balancer.select(["http://one"], "s1") == "http://one"
    assert balancer._of("http://one").until <= balancer._now()


async def test_a_dead_engine_is_tried_at_once_where_there_is_no_other() -> None:
    balancer = LoadBalancer(now=Clock())
    for _ in range(10):
        balancer.mark_down("http://one")
    assert await balancer.select(["http://one"], "s1") == "http://one"
    assert balancer._of("http://one").until == 115.0


def test_rests_grow_and_an_answer_ends_them() -> None:
    clock = Clock()
    balancer = LoadBalancer(now=clock)
    rests = []
    for _ in range(4):
        balancer.mark_rate_limited("http://one", None)
        rests.append(balancer._of("http://one").until - clock.now)
    assert rests == [0.5, 1.0, 2.0, 4.0]
    balancer.mark_rate_limited("http://one", "Sun, 06 Nov 1994 08:49:37 GMT")
    assert balancer._of("http://one").until - clock.now == 1.0
    for odd, rest in (("nan", 1.0), ("inf", 30.0), ("-5", 0.0)):
        balancer.mark_rate_limited("http://one", odd)
        assert balancer._of("http://one").until - clock.now == rest
    balancer.mark_healthy("http://one")
    assert balancer._of("http://one").until == 0.0
