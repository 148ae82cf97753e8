"""Made-up sessions of a size: agents that talk for some turns, each up to a context of some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollmill.models import CompletionRecord, SampledChoice

END = 7
SAMPLED = 0.4
"""Share of the tokens that are sampled."""

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Size:
    turns: int
    """Of all agents together."""
    tokens: int
    """The last prompt and reply of each agent."""
    agents: int = 1
    """Which take turns, each in a context of its own."""


def records(size: Size, seed: int = 0) -> list[CompletionRecord]:
    """Calls as decoded from MessagePack: packed arrays. Ids are as large as a real vocabulary's."""
    return list(_calls(size, np.random.default_rng(seed)))


def _calls(size: Size, random: np.random.Generator) -> Iterator[CompletionRecord]:
    share = size.tokens * size.agents // size.turns
    sampled = max(2, int(share * SAMPLED))
    prompts: list[Ids] = [np.zeros(0, dtype=np.int32)] * size.agents
    for turn in range(size.turns):
        agent = turn % size.agents
        prompt = np.concatenate([prompts[agent], _ids(random, max(1, share - sampled))])
        reply = np.concatenate([_ids(random, sampled - 1), np.array([END], dtype=np.int32)])
        logprobs = -random.exponential(1.0, sampled).astype(np.float32)
        choice = SampledChoice(token_ids=reply, logprobs=logprobs, finish_reason="stop")
        yield CompletionRecord(
            session_id="s",
            completion_id=f"c{turn:04d}",
            started_at=1.0 + turn,
            ended_at=1.5 + turn,
            prompt_ids=prompt,
            choices=(choice,),
        )
        prompts[agent] = np.concatenate([prompt, reply])


def _ids(random: np.random.Generator, count: int) -> Ids:
    return random.integers(10, 150_000, count, dtype=np.int32)
