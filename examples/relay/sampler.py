"""Samples replies for a batch of prompts; knows neither HTTP nor versions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from relay.model import RelayModel
from relay.task import END_OF_TURN_ID

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Draw:
    """One reply that is wanted. A temperature of 0 takes the likeliest token."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    rng: random.Random = field(compare=False)


@dataclass(frozen=True)
class Reply:
    """What was sampled; a reply that stopped has the end-of-turn token and its log-prob at its end.

    Log-probs belong to the distribution that was sampled from, temperature included.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason


def generator(*parts: object) -> random.Random:
    """A source of randomness that follows from its parts alone, such as a seed and an index."""
    return random.Random("/".join(map(str, parts)))


@torch.inference_mode()
def sample(model: RelayModel, draws: Sequence[Draw]) -> list[Reply]:
    """One reply per draw, in order; prompts are padded and all rows advance together."""
    state = _prefill(model, draws)
    steps: list[tuple[list[int], list[float]]] = []
    unfinished = [True] * len(draws)
    for step in range(max(draw.max_tokens for draw in draws)):
        unfinished = [going and step < draw.max_tokens for going, draw in zip(unfinished, draws, strict=True)]
        if not any(unfinished):
            break
        chosen, log_probs = _choose(model.logits(state), draws)
        ids = chosen.tolist()
        steps.append((ids, log_probs.tolist()))
        unfinished = [going and token != END_OF_TURN_ID for going, token in zip(unfinished, ids, strict=True)]
        state = model.hidden(chosen.unsqueeze(1), state)[:, 0]
    return [_reply(steps, row, draw.max_tokens) for row, draw in enumerate(draws)]


def _prefill(model: RelayModel, draws: Sequence[Draw]) -> Tensor:
    """The state after each prompt, float32 [B, H]."""
    prompts = [torch.tensor(draw.prompt_ids) for draw in draws]
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    return model.hidden(pad_sequence(prompts, batch_first=True))[torch.arange(len(prompts)), last]


def _choose(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Logits [B, V] give the chosen ids, int64 [B], and their log-probs, float32 [B]."""
    temperature = torch.tensor([draw.temperature for draw in draws])
    greedy = temperature == 0
    scaled = log_softmax(logits / temperature.masked_fill(greedy, 1.0).unsqueeze(1), dim=-1)
    chosen = torch.where(greedy, scaled.argmax(dim=-1), _inverse_cdf(scaled, draws))
    return chosen, scaled.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _inverse_cdf(log_probs: Tensor, draws: Sequence[Draw]) -> Tensor:
    # One uniform number per row from the row's own generator: a seeded call does not depend on its neighbours.
    # Divided by its end, the sum ends with exactly 1, so a token of probability 0 is never chosen.
    uniform = torch.tensor([[draw.rng.random()] for draw in draws], dtype=torch.float64)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    return torch.searchsorted(cumulative / cumulative[:, -1:], uniform, right=True).squeeze(1)


def _reply(steps: Sequence[tuple[list[int], list[float]]], row: int, max_tokens: int) -> Reply:
    ids = [chosen[row] for chosen, _ in steps[:max_tokens]]
    stopped = END_OF_TURN_ID in ids
    length = ids.index(END_OF_TURN_ID) + 1 if stopped else len(ids)
    log_probs = tuple(values[row] for _, values in steps[:length])
    return Reply(tuple(ids[:length]), log_probs, "stop" if stopped else "length")
