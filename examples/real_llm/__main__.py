"""One session with a real model: ``python -m real_llm [--json]``."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import httpx
import numpy as np
import orjson
import typer
from openai import AsyncOpenAI

from real_llm.model import NAME, Model, weights_file
from rollmill.codec import decode
from rollmill.models import Trace, Trajectory
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import Program, free_port, running_services
from rollmill.settings import KafkaSettings
from rollmill.topics import BUILT

QUESTIONS = (
    "Name a river in Egypt. Answer in one short sentence. 🌊",
    "And one in Brazil?",
    "Which of the two is longer?",
)
REPLY_TOKENS = 48
SECONDS = 300.0
EXAMPLES = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Report:
    """What the run found; ``equal`` is the point of it."""

    equal: bool
    """Every trained run of tokens decodes to a text that the agent saw, and none is missing."""
    turns: int
    traces: int
    trained_tokens: int
    breaks: list[str]
    """Why a trace is not all of the session."""
    seconds_of_session: float
    seconds: float


async def run(directory: Path) -> Report:
    began = time.monotonic()
    async with EmbeddedKafka(directory / "kafka") as kafka:
        settings = KafkaSettings(
            bootstrap_servers=kafka.bootstrap_servers, prefix=f"llm-{uuid4().hex[:8]}.", partitions=2, run="llm"
        )
        async with pipeline(settings, directory) as capture:
            started = time.monotonic()
            session, seen = await lead(capture)
            seconds = time.monotonic() - started
            trajectory = await built(settings, session)
    found = trained_texts(Model(weights_file()), trajectory)
    return Report(
        equal=sorted(found) == sorted(seen),
        turns=len(seen),
        traces=len(trajectory.traces),
        trained_tokens=sum(trace.trained_tokens for trace in trajectory.traces),
        breaks=[str(why) for trace in trajectory.traces if (why := trace.metadata.get("break_reason")) is not None],
        seconds_of_session=round(seconds, 1),
        seconds=round(time.monotonic() - began, 1),
    )


@asynccontextmanager
async def pipeline(settings: KafkaSettings, directory: Path) -> AsyncIterator[str]:
    """The model's server and all services in front of it; gives capture's address."""
    engine_port, capture_port = free_port(), free_port()
    upstream = f"http://127.0.0.1:{engine_port}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [EXAMPLES, os.environ.get("PYTHONPATH")])),
        "ROLLMILL_UPSTREAM": upstream,
        "ROLLMILL_PORT": str(capture_port),
    }
    services = running_services(settings, directory / "logs", environment=environment, report=say)
    async with services as supervisor:
        await supervisor.start(Program("engine", "real_llm.server", arguments=("--port", str(engine_port))))
        await _healthy(upstream)
        yield f"http://127.0.0.1:{capture_port}"


async def _healthy(base_url: str) -> None:
    async with httpx.AsyncClient(base_url=base_url) as http, asyncio.timeout(60):
        while True:
            with suppress(httpx.TransportError):
                (await http.get("/health")).raise_for_status()
                return
            await asyncio.sleep(0.1)


async def lead(capture: str) -> tuple[str, list[str]]:
    """One session of all questions: its id, and the texts that the agent saw, with the ends that they came to."""
    async with httpx.AsyncClient(base_url=capture, timeout=30) as http:
        opened = (await http.post("/v1/sessions", json={"task_id": "rivers"})).raise_for_status().json()
        seen = await talk(opened["base_url"], opened["api_key"])
        closing = {"status": "COMPLETED", "output": {"texts": seen}}
        (await http.post(f"/v1/sessions/{opened['session_id']}/close", json=closing)).raise_for_status()
    return opened["session_id"], seen


async def talk(base_url: str, api_key: str) -> list[str]:
    messages: list[Any] = []
    seen: list[str] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            text, finish = "", None
            async for chunk in await client.chat.completions.create(
                model=NAME, messages=messages, max_tokens=REPLY_TOKENS, temperature=0.7, stream=True
            ):
                for choice in chunk.choices:
                    text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
            say(f"> {question}\n{text}")
            messages.append({"role": "assistant", "content": text})
            seen.append(text + ("<|im_end|>" if finish == "stop" else ""))
    return seen


async def built(settings: KafkaSettings, session: str) -> Trajectory:
    """The session's trajectory as the builder wrote it."""
    name = BUILT.full_name(settings.prefix)
    async with asyncio.timeout(60), KafkaClients(settings).reading(reset="earliest") as consumer:
        consumer.subscribe([name])
        async for record in consumer:
            if record.key == session.encode():
                found: Trajectory = decode(Trajectory, record.value, tuple(record.headers))
                return found
    raise TimeoutError(f"{name} has no trajectory of {session}")


def trained_texts(model: Model, trajectory: Trajectory) -> list[str]:
    """The texts of all runs of trained tokens."""
    return [
        model.text(run.tolist()).decode("utf-8", "ignore") for trace in trajectory.traces for run in trained_runs(trace)
    ]


def trained_runs(trace: Trace) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trace.loss_mask, [0]))))
    return [trace.response_ids[low:high] for low, high in edges.reshape(-1, 2)]


def say(line: str) -> None:
    print(line, file=sys.stderr)


def main(*, json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False) -> None:
    """Lead one session with a real model through capture and builder, and check its tokens."""
    with tempfile.TemporaryDirectory(prefix="rollmill-llm-") as directory:
        report = asyncio.run(asyncio.wait_for(run(Path(directory)), SECONDS))
    print(orjson.dumps(asdict(report)).decode() if json else report)
    raise SystemExit(0 if report.equal else 1)


if __name__ == "__main__":
    typer.run(main)
