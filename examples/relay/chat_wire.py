"""vLLM's chat completion format: reading requests, writing answers and stream frames. No I/O."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field

from relay.sampler import Reply
from relay.task import END_OF_TURN, Message, decode, reply_text

MODEL_NAME: Final = "relay"
DONE: Final = b"data: [DONE]\n\n"

_DEFAULT_MAX_TOKENS: Final = 3


class _Lenient(BaseModel):
    # Clients send fields that this engine has no use for; a server that refuses them is no drop-in.
    model_config = ConfigDict(frozen=True, extra="ignore")


class TextPart(_Lenient):
    text: str


class ChatMessage(_Lenient):
    role: str
    content: str | tuple[TextPart, ...] | None = None

    def plain(self) -> Message:
        parts = (TextPart(text=self.content),) if isinstance(self.content, str) else self.content or ()
        return Message(self.role, "".join(part.text for part in parts))


class StreamOptions(_Lenient):
    include_usage: bool = False


class ChatRequest(_Lenient):
    """None means: not said, so the default holds."""

    model: str = MODEL_NAME
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=512)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=512)
    temperature: float | None = Field(default=None, ge=0, le=2)
    n: int | None = Field(default=None, ge=1, le=64)
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None

    @property
    def reply_limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or _DEFAULT_MAX_TOKENS


@dataclass(frozen=True)
class Answer:
    """Everything that an answer to one request says, streamed or not."""

    request: ChatRequest
    prompt_ids: Sequence[int]
    replies: Sequence[Reply]
    weight_version: int

    def body(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._choice(index, reply) for index, reply in enumerate(self.replies)]
        return {
            **_head("chat.completion"),
            "choices": choices,
            "usage": self._usage(),
            "prompt_logprobs": None,
            **self._origin(),
        }

    def frames(self) -> Iterator[bytes]:
        """The answer as server-sent events: a role, then one token each, for every choice in turn."""
        head = _head("chat.completion.chunk")
        chunks = (chunk for index, reply in enumerate(self.replies) for chunk in self._chunks(index, reply))
        for position, chunk in enumerate(chunks):
            yield _frame({**head, "choices": [chunk], **(self._origin() if position == 0 else {})})
        if self.request.stream_options and self.request.stream_options.include_usage:
            yield _frame({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _origin(self) -> dict[str, Any]:
        """Said once: the prompt as ids, and the version that sampled, in SGLang's place, as vLLM has none for it."""
        prompt = {"prompt_token_ids": list(self.prompt_ids)} if self.request.return_token_ids else {}
        return {**prompt, "metadata": {"weight_version": str(self.weight_version)}}

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_ids), sum(len(reply.token_ids) for reply in self.replies)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message = {"role": "assistant", "content": reply_text(reply.token_ids), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply.token_ids, reply.log_probs),
            "finish_reason": reply.finish_reason,
            "stop_reason": None,
            **self._ids(reply.token_ids),
        }

    def _chunks(self, index: int, reply: Reply) -> Iterator[dict[str, Any]]:
        opening = {"role": "assistant", "content": ""}
        yield {"index": index, "delta": opening, "logprobs": None, "finish_reason": None}
        last = max(len(reply.token_ids) - 1, 0)
        for position in range(last + 1):
            token, log_prob = reply.token_ids[position : position + 1], reply.log_probs[position : position + 1]
            yield {
                "index": index,
                "delta": {"content": reply_text(token)},
                "logprobs": self._logprobs(token, log_prob),
                "finish_reason": reply.finish_reason if position == last else None,
                **self._ids(token),
            }

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self.request.return_token_ids else {}

    def _logprobs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"content": [_logprob(*pair) for pair in zip(token_ids, log_probs, strict=True)]}


def _logprob(token_id: int, log_prob: float) -> dict[str, Any]:
    token = decode([token_id]).replace(END_OF_TURN, "")
    return {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL_NAME}


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def models_body() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rollmill"}]}
