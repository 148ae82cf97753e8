"""Capture's application under requests that no client should send: `make fuzz-http`.

Whatever is sent, by whoever: no exception leaves the application, no status is 5xx but for the upstream's sake, no
response takes longer than a second, and what is recorded can be read by its readers. The ordinary suite sends the same
few thousand requests in every run; ``ROLLMILL_FUZZ_EXAMPLES`` (50,000 by `make fuzz-http`) new ones.
"""

from __future__ import annotations

import os
import random
import secrets

from starlette.routing import Route

from rollmill.topics import COMPLETIONS, EVALUATIONS, SESSIONS
from tests.fuzz.capture_rig import ADMIN, TENANTS, WIRE, CaptureRig, Finding, FuzzRequest
from tests.fuzz.http_requests import BODIES, mutated_request, valid_request
from tests.fuzz.mutation import Mutator

FUZZING = os.environ.get("ROLLMILL_HYPOTHESIS_PROFILE") == "fuzz"
REQUESTS = int(os.environ.get("ROLLMILL_FUZZ_EXAMPLES", "50000")) if FUZZING else 2_000
SEED = int(os.environ.get("ROLLMILL_FUZZ_SEED", secrets.randbits(32) if FUZZING else 1))
LIFE = 250
"""Requests to one capture: state gathers, and is then thrown away."""
SHOWN = 20
CONTROL = ("/v1/sessions", "/admin")
UPSTREAM_REPLIES = [path.read_bytes() for path in sorted(WIRE.iterdir())]


async def fresh_rig() -> CaptureRig:
    rig = CaptureRig()
    await rig.open_session()
    return rig


async def test_a_right_request_to_every_route_succeeds() -> None:
    rig = await fresh_rig()
    assert len(rig.routes) > 40
    failed = {}
    for route in rig.routes:
        rig = await fresh_rig()
        request = valid_request(route, ADMIN if route.path.startswith("/admin") else TENANTS["a"])
        status = await rig.status(request)
        if not 200 <= status < 300:
            failed[route.path] = status
    assert failed == {}, "give the route a valid body in tests/fuzz/http_requests.py"
    assert len(BODIES) >= 15


async def test_no_request_breaks_capture() -> None:
    rng = random.Random(SEED)  # noqa: S311  # the same requests for the same seed
    mutator, findings = Mutator(rng), dict[str, Finding]()
    recorded = set()
    for number in range(REQUESTS):
        if number % LIFE == 0:
            rig = await fresh_rig()
        request = mutated_request(_route(rig, rng), rig.keys(), mutator)
        rig.upstream = _upstream_reply(mutator)
        finding = await rig.check(request)
        recorded |= {item.topic for item in rig.event_writer.appended}
        if finding is not None:
            findings.setdefault(finding.fault[:80], finding)
            rig = await fresh_rig()
        if len(findings) >= SHOWN:
            break
    assert not findings, f"seed {SEED}:\n" + "\n".join(map(str, findings.values()))
    assert recorded == {COMPLETIONS, EVALUATIONS, SESSIONS}


def _route(rig: CaptureRig, rng: random.Random) -> Route:
    """Any route: half of the time one of the few that call no model."""
    asked = rng.choice(CONTROL) if rng.random() < 0.5 else ""
    return rng.choice([route for route in rig.routes if route.path.startswith(asked)])


def _upstream_reply(mutator: Mutator) -> tuple[int, bytes] | None:
    """Mostly that of a healthy engine (None); else another API's, a damaged one, or an error."""
    if mutator.chance(0.8):
        return None
    body = mutator.rng.choice(UPSTREAM_REPLIES)
    return mutator.rng.choice((200, 200, 400, 500)), body if mutator.chance(0.5) else mutator.damage(body)


async def test_the_rig_notices_what_is_wrong() -> None:
    async def broken(_scope: object, _receive: object, _send: object) -> None:
        raise KeyError("x")

    rig = await fresh_rig()
    rig.app.router.default = broken
    finding = await rig.check(FuzzRequest("GET", "/unknown"))
    assert finding is not None
    assert finding.fault.startswith("KeyError")
