"""What the configuration says of a model: which engine answers."""

from __future__ import annotations

from enum import StrEnum


class EngineKind(StrEnum):
    """``auto``: found out by a probe; until then, and where the probe finds nothing, asked as vLLM is."""

    AUTO = "auto"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama_cpp"
    OPENAI = "openai"
