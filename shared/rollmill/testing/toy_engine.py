"""``python -m rollmill.testing.toy_engine``: an engine with vLLM's API and no model, for a first run without a GPU.

It answers every question with one of three digits, by chance; ids and log-probs have vLLM's form. Nothing is learnt
from it: it shows the way of a token from an agent to a trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys

from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.http.scripted_engine import ScriptedEngine

ANSWERS = ("1", "2", "3")


def answer(request: CannedRequest) -> CannedResponse:
    """One turn with an answer by chance."""
    turns = 1 + len(request.body.get("messages", ())) if request.method == "POST" else 1
    return ScriptedEngine(tuple(secrets.choice(ANSWERS) for _ in range(turns))).answer(request)


async def serve(port: int) -> None:
    """Answer on loopback until cancelled."""
    async with canned_server(answer, port) as server:
        sys.stdout.write(f"toy engine: {server.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollmill.testing.toy_engine", description=serve.__doc__)
    parser.add_argument("--port", type=int, default=8000)
    try:
        asyncio.run(serve(parser.parse_args().port))
    except KeyboardInterrupt:
        return
    except OSError as error:
        raise SystemExit(
            f"rollmill: the port cannot be used: {error.strerror}; choose another one with --port"
        ) from None


if __name__ == "__main__":
    main()
