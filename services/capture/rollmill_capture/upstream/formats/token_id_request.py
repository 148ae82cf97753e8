"""What has to be asked of an engine, so that its answer says ids and log-probs. Pure.

| kind | ids in whole chat answers | in chat streams |
|---|---|---|
| `vllm` | yes | yes |
| `sglang` | yes | no: asked without streaming, and the stream is made for the client |
| `llama_cpp` | of the reply; the prompt's beside the call | the same, but not with tools |
| `openai` | no | no: recorded, never trained |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.formats.upstream_format import CHAT, COMPLETIONS, GENERATE, TOKENS, UpstreamFormat

_VLLM = {"return_token_ids": True, "logprobs": True}
_SGLANG = {**_VLLM, "return_prompt_token_ids": True, "return_meta_info": True}
_CHAT: dict[EngineKind, dict[str, Any]] = {
    EngineKind.AUTO: _VLLM,
    EngineKind.VLLM: _VLLM,
    EngineKind.SGLANG: _SGLANG,
    EngineKind.LLAMA_CPP: {"logprobs": True},
    EngineKind.OPENAI: {},
}
_SOFT: dict[str, Any] = {"logprobs": 1}
"""Of completions: a number, and any number of the client's own will do."""


@dataclass(frozen=True)
class Capability:
    """What is known of an engine."""

    kind: EngineKind = EngineKind.AUTO
    streams_ids: bool = True
    """False: its streams have no ids, and its whole answers have."""
    known: bool = False
    """True: configured, or found out by a probe."""
    ids: bool | None = None
    """Whether chat answers say all that training needs; None: nobody has looked."""

    def streams(self, wire: UpstreamFormat, fields: dict[str, Any]) -> bool:
        """Whether a stream for the client is a stream of the engine."""
        if wire is not CHAT:
            return True
        if self.kind is EngineKind.LLAMA_CPP and fields.get("tools"):
            return False
        return self.streams_ids and self.kind is not EngineKind.SGLANG


def ask(kind: EngineKind, wire: UpstreamFormat, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool]:
    """The fields with what capture needs, the names of those that it added, and whether it changed the client's own."""
    if wire is CHAT:
        return _ask_for(fields, _CHAT[kind])
    if wire is GENERATE:
        return _ask_for(fields, {"return_logprob": True})
    if wire is TOKENS:
        sampling = fields.get("sampling_params")
        inner, added, _ = _soft(sampling if isinstance(sampling, dict) else {})
        return {**fields, "sampling_params": inner}, [f"sampling_params.{name}" for name in added], False
    if wire is COMPLETIONS and kind is not EngineKind.OPENAI:
        inner, added, changed = _soft(fields)
        served, more, overruled = _ask_for(inner, {"return_token_ids": True})
        return served, [*added, *more], changed or overruled
    return fields, [], False


def _ask_for(fields: dict[str, Any], wanted: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool]:
    added = [name for name in wanted if name not in fields]
    changed = any(name in fields and fields[name] is not value for name, value in wanted.items())
    return {**fields, **wanted}, added, changed


def _soft(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool]:
    missing = [name for name in _SOFT if type(fields.get(name)) is not int]
    changed = any(name in fields for name in missing)
    return {**fields, **{name: _SOFT[name] for name in missing}}, [n for n in missing if n not in fields], changed
