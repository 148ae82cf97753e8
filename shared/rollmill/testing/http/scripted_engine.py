"""A small engine with vLLM's API: a tokenizer, a chat template, a parser of reasoning and tool calls, and a script in
place of a model. For a `canned_server`; deterministic, so that the same conversation always has the same ids.

Tokens are the bytes of the text, and one id for each special token. The template renders earlier replies with their
reasoning and the texts of their tool calls: a prompt extends the one before it only where the client sends the history
back byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill.testing.http.canned_server import CannedRequest, CannedResponse

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_SPECIAL_IDS = {token.encode(): 256 + place for place, token in enumerate(SPECIAL)}
_SPLIT = re.compile(b"(" + b"|".join(re.escape(token) for token in _SPECIAL_IDS) + b")")
_CALL = re.compile(r'<tool_call>\{"name": "(\w+)", "arguments": (.*?)\}</tool_call>', re.DOTALL)
END = _SPECIAL_IDS[b"<|im_end|>"]
TOKENS_PER_CHUNK = 3
OK, BAD_REQUEST, NOT_FOUND = 200, 400, 404


def encode(text: str) -> list[int]:
    """Text to ids; each special token has one id."""
    pieces = _SPLIT.split(text.encode())
    return [token for piece in pieces for token in ([_SPECIAL_IDS[piece]] if piece in _SPECIAL_IDS else piece)]


def decode(ids: Sequence[int]) -> str:
    """Ids to text; incomplete UTF-8 sequences become replacement characters."""
    special = {number: token for token, number in _SPECIAL_IDS.items()}
    return b"".join(special[token] if token in special else bytes([token]) for token in ids).decode("utf-8", "replace")


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    """The chat template."""
    head = f"<|im_start|>tools\n{json.dumps(tools, sort_keys=True)}<|im_end|>\n" if tools else ""
    return head + "".join(map(_turn, messages)) + "<|im_start|>assistant\n"


def _turn(message: dict[str, Any]) -> str:
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    calls = "".join(
        f'<tool_call>{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}</tool_call>'
        for call in message.get("tool_calls") or ()
    )
    thought = f"<think>{thoughts}</think>" if thoughts else ""
    return f"<|im_start|>{message['role']}\n{thought}{_text(message.get('content'))}{calls}<|im_end|>\n"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or f"[{part['type']}]" for part in content)
    return content or ""


@dataclass(frozen=True)
class Parsed:
    """A sampled text, parsed."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments."""


def parse(text: str) -> Parsed:
    text = text.removesuffix("<|im_end|>")
    thought = re.match(r"<think>(.*?)</think>", text, re.DOTALL)
    rest = text[thought.end() :] if thought else text
    return Parsed(thought[1] if thought else "", _CALL.sub("", rest), tuple(_CALL.findall(rest)))


def logprob(position: int, token: int) -> float:
    """A made-up log-prob that float32 holds exactly and that differs from position to position."""
    return -(1 + (7 * token + position) % 31) / 32


@dataclass(frozen=True)
class ScriptedEngine:
    """Its `answer` is the function for a `canned_server`.

    ``replies``: texts, by the number of assistant turns in the history. ``stream_ids`` False: token ids only in
    responses that are not streamed, as SGLang does.
    """

    replies: tuple[str, ...]
    owner: str = "vllm"
    stream_ids: bool = True

    def answer(self, request: CannedRequest) -> CannedResponse:
        if request.path.endswith("/models"):
            return CannedResponse.json(
                {"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": self.owner}]}
            )
        if request.path == "/tokenize":
            prompt = encode(render(request.body["messages"], request.body.get("tools") or ()))
            return CannedResponse.json({"count": len(prompt), "max_model_len": 32768, "tokens": prompt})
        if request.path != "/v1/chat/completions":
            return CannedResponse.json({"error": {"message": f"no route {request.path}", "code": NOT_FOUND}}, NOT_FOUND)
        return self._chat(request.body)

    def _chat(self, body: dict[str, Any]) -> CannedResponse:
        turns = sum(message["role"] == "assistant" for message in body["messages"])
        if turns >= len(self.replies):
            return CannedResponse.json({"error": {"message": "the script is over", "code": BAD_REQUEST}}, BAD_REQUEST)
        reply = _Reply(body, encode(render(body["messages"], body.get("tools") or ())), self.replies[turns], turns)
        if not body.get("stream"):
            return CannedResponse.json(reply.whole())
        frames = (b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in reply.chunks(ids=self.stream_ids))
        return CannedResponse((*frames, b"data: [DONE]\n\n"), content_type="text/event-stream")


@dataclass(frozen=True)
class _Reply:
    request: dict[str, Any]
    prompt: list[int]
    text: str
    turn: int

    @property
    def ids(self) -> list[int]:
        return [*encode(self.text), END]

    def whole(self) -> dict[str, Any]:
        parsed = parse(self.text)
        message = {
            "role": "assistant",
            "content": parsed.content or None,
            "reasoning": parsed.reasoning or None,
            "tool_calls": self._calls(parsed),
        }
        choice = {"index": 0, "message": message, "finish_reason": self._finish(), "stop_reason": None}
        return {
            **self._head("chat.completion"),
            "choices": [{**choice, **self._tokens(self.ids, 0)}],
            "usage": self._usage(),
            **({"prompt_token_ids": self.prompt} if self._is_requested("return_token_ids") else {}),
        }

    def chunks(self, *, ids: bool) -> Iterator[dict[str, Any]]:
        """The role, the tokens in threes, the usage. A tool call is sent when it is complete."""
        deltas, sampled = self._deltas(), self.ids
        first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        prompt = {"prompt_token_ids": self.prompt} if ids and self._is_requested("return_token_ids") else {}
        yield {**self._head("chat.completion.chunk"), "choices": [first], **prompt}
        for start in range(0, len(sampled), TOKENS_PER_CHUNK):
            piece = sampled[start : start + TOKENS_PER_CHUNK]
            last = start + TOKENS_PER_CHUNK >= len(sampled)
            # The text is one piece behind the tokens, as with a parser that holds tokens back.
            choice = {"index": 0, "delta": {} if last else next(deltas, {}), "finish_reason": None}
            more = self._tokens(piece, start) if ids else {}
            for rest in deltas if last else ():
                yield {**self._head("chat.completion.chunk"), "choices": [{**choice, "delta": rest}]}
            end = {"finish_reason": self._finish(), "stop_reason": None} if last else {}
            yield {**self._head("chat.completion.chunk"), "choices": [{**choice, **end, **more}]}
        yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _deltas(self) -> Iterator[dict[str, Any]]:
        parsed = parse(self.text)
        for name, text in (("reasoning", parsed.reasoning), ("content", parsed.content)):
            for start in range(0, len(text), 4):
                yield {name: text[start : start + 4]}
        for index, call in enumerate(self._calls(parsed)):
            arguments = call["function"]["arguments"]
            yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
            for piece in (arguments[:5], arguments[5:]):
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}

    def _calls(self, parsed: Parsed) -> list[dict[str, Any]]:
        return [
            {"id": f"call_{self.turn}_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(parsed.calls)
        ]

    def _finish(self) -> str:
        return "tool_calls" if parse(self.text).calls else "stop"

    def _tokens(self, ids: list[int], start: int) -> dict[str, Any]:
        content = [
            {"token": decode([token]), "logprob": logprob(start + place, token), "bytes": [], "top_logprobs": []}
            for place, token in enumerate(ids)
        ]
        requested = {"token_ids": ids} if self._is_requested("return_token_ids") else {}
        return {"logprobs": {"content": content} if self._is_requested("logprobs") else None, **requested}

    def _is_requested(self, field: str) -> bool:
        return self.request.get(field) is True

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-toy", "object": kind, "created": 0, "model": self.request.get("model") or "toy"}
