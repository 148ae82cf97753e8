"""The model behind vLLM's chat route: ``python -m real_llm.server --port 8000``."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import orjson
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from real_llm.model import CONTEXT, NAME, Model, Token, weights_file


@dataclass(frozen=True)
class Server:
    model: Model
    seed: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One call at a time."""

    async def chat(self, request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        call = Call(self.model, body, self.model.prompt(body["messages"]), np.random.default_rng(self.seed))
        if body.get("stream"):
            return StreamingResponse(self._sent(call), media_type="text/event-stream")
        async with self.turn:
            tokens = await asyncio.to_thread(list, call.tokens())
        return _json(call.whole(tokens))

    async def _sent(self, call: "Call") -> AsyncIterator[bytes]:
        yield _frame(call.first())
        async with self.turn:
            tokens, sampled = call.tokens(), list[Token]()
            while (token := await asyncio.to_thread(next, tokens, None)) is not None:
                sampled.append(token)
                yield _frame(call.chunk(sampled))
        yield _frame({**call.head(), "choices": [], "usage": call.usage(len(sampled))})
        yield b"data: [DONE]\n\n"

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [{"id": NAME, "object": "model", "created": 0, "owned_by": "vllm"}]})

    async def health(self, _: Request) -> Response:
        return Response()


@dataclass(frozen=True)
class Call:
    model: Model
    body: dict[str, Any]
    prompt: list[int]
    rng: np.random.Generator
    name: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def tokens(self) -> Iterator[Token]:
        return self.model.sample(self.prompt, self._limit(), float(self.body.get("temperature", 1.0)), self.rng)

    def whole(self, tokens: list[Token]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._shown(tokens)}
        choice = {"index": 0, "message": message, **self._ending(tokens), **self._details(tokens)}
        usage = self.usage(len(tokens))
        return {**self.head("chat.completion"), "choices": [choice], "usage": usage, "prompt_token_ids": self.prompt}

    def first(self) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self.head(), "choices": [choice], "prompt_token_ids": self.prompt}

    def chunk(self, sampled: list[Token]) -> dict[str, Any]:
        """The newest token, with the characters that it completes."""
        text = self._shown(sampled)[len(self._shown(sampled[:-1])) :]
        choice = {"index": 0, "delta": {"content": text} if text else {}, **self._details(sampled[-1:])}
        ended = sampled[-1].number == self.model.end or len(sampled) == self._limit()
        return {**self.head(), "choices": [{**choice, **(self._ending(sampled) if ended else {"finish_reason": None})}]}

    def _limit(self) -> int:
        asked = self.body.get("max_completion_tokens") or self.body.get("max_tokens") or 64
        return min(asked, CONTEXT - len(self.prompt))

    def _shown(self, tokens: list[Token]) -> str:
        """Whole characters, without the end of the turn."""
        numbers = [token.number for token in tokens if token.number != self.model.end]
        return self.model.text(numbers).decode("utf-8", "ignore")

    def _ending(self, tokens: list[Token]) -> dict[str, Any]:
        stopped = bool(tokens) and tokens[-1].number == self.model.end
        return {"finish_reason": "stop" if stopped else "length", "stop_reason": None}

    def _details(self, tokens: list[Token]) -> dict[str, Any]:
        content = [
            {"token": self.model.text([token.number]).decode("utf-8", "replace"), "logprob": token.logprob}
            for token in tokens
        ]
        return {"logprobs": {"content": content}, "token_ids": [token.number for token in tokens]}

    def usage(self, sampled: int) -> dict[str, int]:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def head(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": 0, "model": NAME}


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def main(port: Annotated[int, typer.Option()] = 8000, seed: Annotated[int, typer.Option()] = 0) -> None:
    """Serves the model."""
    server = Server(Model(weights_file()), seed)
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/health", server.health),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    typer.run(main)
