"""The engine's HTTP side: vLLM's chat route, and the routes by which the trainer hands over weights.

| route | what |
|---|---|
| `POST /v1/chat/completions` | vLLM's format; `metadata.weight_version` is the version that sampled |
| `GET /v1/models`, `GET /health` | as vLLM has them |
| `POST /admin/weights?version=N` | safetensors in the body; swaps the weights between two micro-batches |
| `GET /admin/version?at_least=N&timeout=S` | the version, as soon as it is N or else after S seconds |

Run it with `python -m relay.engine --port 8000`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import orjson
import typer
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from relay.chat_wire import Answer, ChatRequest, error_body, models_body
from relay.microbatch import Engine
from relay.model import WeightsError, from_bytes, use_one_thread, warm_start
from relay.sabotage import Sabotage, spoiled_reply, spoiled_version
from relay.sampler import Draw
from relay.task import UnknownTextError, render

_KEEP_ALIVE_SECONDS: Final = 75
"""Longer than clients keep an idle connection, so that none sends a call into one that is being closed."""


class _WeightsQuery(BaseModel):
    model_config = ConfigDict(frozen=True)

    version: int = Field(ge=0)


class _VersionQuery(BaseModel):
    """Without `at_least` the answer comes at once. Polls are short because the exit waits for them."""

    model_config = ConfigDict(frozen=True)

    at_least: int = Field(default=0, ge=0)
    timeout: float = Field(default=2.0, ge=0, le=5)


@dataclass(frozen=True)
class _Routes:
    engine: Engine
    sabotage: Sabotage

    async def chat(self, request: Request) -> Response:
        answer = await self._answer(ChatRequest.model_validate_json(await request.body()))
        if answer.request.stream:
            return StreamingResponse(_sent(answer), media_type="text/event-stream")
        return _json(answer.body())

    async def _answer(self, chat: ChatRequest) -> Answer:
        prompt = tuple(render([message.plain() for message in chat.messages]))
        temperature = 1.0 if chat.temperature is None else chat.temperature
        rngs = [self.engine.rng(chat.seed, index) for index in range(chat.n or 1)]
        sampled = await self.engine.sample([Draw(prompt, chat.reply_limit, temperature, rng) for rng in rngs])
        replies = [spoiled_reply(reply, self.sabotage) for reply in sampled.replies]
        return Answer(chat, prompt, replies, spoiled_version(sampled.version, self.sabotage))

    async def models(self, _: Request) -> Response:
        return _json(models_body())

    async def health(self, _: Request) -> Response:
        return Response()

    async def weights(self, request: Request) -> Response:
        version = _WeightsQuery.model_validate(dict(request.query_params)).version
        await self.engine.load(await request.body(), version)
        return _json({"version": version})

    async def version(self, request: Request) -> Response:
        query = _VersionQuery.model_validate(dict(request.query_params))
        return _json({"version": await self.engine.wait_for_version(query.at_least, query.timeout)})


def create_app(engine: Engine, sabotage: Sabotage = Sabotage.NONE) -> Starlette:
    """The app enters and leaves `engine` with its lifespan; where no lifespan runs, enter the engine yourself."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    at = _Routes(engine, sabotage)
    routes = [
        Route("/v1/chat/completions", at.chat, methods=["POST"]),
        Route("/v1/models", at.models),
        Route("/health", at.health),
        Route("/admin/weights", at.weights, methods=["POST"]),
        Route("/admin/version", at.version),
    ]
    refusals = dict.fromkeys((ValidationError, UnknownTextError, WeightsError), _refuse)
    return Starlette(routes=routes, exception_handlers=refusals, lifespan=lifespan)


async def _sent(answer: Answer) -> AsyncIterator[bytes]:
    # A plain iterator would take a thread for each frame.
    for frame in answer.frames():
        yield frame


async def _refuse(_: Request, error: Exception) -> Response:
    return _json(error_body(400, str(error)), status=400)


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def main(
    port: Annotated[int, typer.Option()] = 8000,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    seed: Annotated[int, typer.Option(help="of the sampling, and of the warm start where no weights are given")] = 0,
    weights: Annotated[Path | None, typer.Option(help="safetensors file; without it the warm start is run")] = None,
    version: Annotated[int, typer.Option(help="of the weights at the start")] = 0,
    sabotage: Annotated[Sabotage, typer.Option(help="spoils one thing, for tests")] = Sabotage.NONE,
) -> None:
    """Serves the relay model."""
    use_one_thread()
    model = warm_start(seed) if weights is None else from_bytes(weights.read_bytes())
    app = create_app(Engine(model, version=version, seed=seed), sabotage)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )


if __name__ == "__main__":
    typer.run(main)
