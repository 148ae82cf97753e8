"""The language model: embedding 128, GRU 128, linear; about 105 thousand parameters. It runs on one CPU thread."""

import random
from collections.abc import Mapping
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.functional import log_softmax, pad

from relay.task import END_OF_TURN, TURNS, VOCABULARY_SIZE, Message, encode, question, render

_WIDTH: Final = 128
_WARM_STEPS: Final = 150
_WARM_SESSIONS: Final = 64
_WARM_LEARNING_RATE: Final = 3e-3
_WARM_RIGHT: Final = 0.1


class WeightsError(ValueError):
    """Bytes that are not the weights of this model."""


class RelayModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, _WIDTH)
        self.gru = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.head = nn.Linear(_WIDTH, VOCABULARY_SIZE)

    def hidden(self, ids: Tensor, state: Tensor | None = None) -> Tensor:
        """int64 ids [B, T] and the state before them [B, H] give the state after each of them, float32 [B, T, H]."""
        states: Tensor = self.gru(self.embedding(ids), None if state is None else state.unsqueeze(0))[0]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """States [..., H] give the logits of the next token, float32 [..., V]."""
        logits: Tensor = self.head(states)
        return logits

    def log_probs(self, ids: Tensor) -> Tensor:
        """int64 ids [B, T] give float32 [B, T]: value i is log p(token i | tokens before i); value 0 is 0.

        Rows may be padded on the right with any id: a value depends only on the tokens up to its own.
        """
        distributions = log_softmax(self.logits(self.hidden(ids[:, :-1])), dim=-1)
        chosen = distributions.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return pad(chosen, (1, 0))


def use_one_thread() -> None:
    """The model is so small that a second thread only costs; call it once at the start of a process."""
    torch.set_num_threads(1)


def to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """The weights as safetensors."""
    return save({name: tensor.detach().contiguous() for name, tensor in state.items()})


def from_bytes(weights: bytes) -> RelayModel:
    """A model with these safetensors weights; raises `WeightsError` where names, shapes or the format differ."""
    model = RelayModel()
    try:
        model.load_state_dict(load(weights))
    except (SafetensorError, RuntimeError) as error:
        raise WeightsError(f"not the weights of the relay model: {error}") from error
    return model


def warm_start(seed: int) -> RelayModel:
    """A model that has learned the form of a reply and next to nothing of the task; the same for the same seed."""
    rng = random.Random(f"warm/{seed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RelayModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=_WARM_LEARNING_RATE)
    for _ in range(_WARM_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(_imitation_loss(model, rng))
        optimizer.step()
    return model


def _imitation_loss(model: RelayModel, rng: random.Random) -> Tensor:
    rows, masks = zip(*(_example(rng) for _ in range(_WARM_SESSIONS)), strict=True)
    mask = torch.tensor(masks, dtype=torch.float32)
    loss: Tensor = -(model.log_probs(torch.tensor(rows)) * mask).sum() / mask.sum()
    return loss


def _example(rng: random.Random) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a well-formed session; all of them have the same length."""
    messages: list[Message] = []
    ids: list[int] = []
    mask: list[int] = []
    for turn in range(TURNS):
        digit = rng.choice("0123456789")
        reply = digit if rng.random() < _WARM_RIGHT else rng.choice("0123456789")
        messages.append(question(turn, digit))
        prompt = render(messages)
        messages.append(Message("assistant", reply))
        sampled = encode(reply + END_OF_TURN)
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(sampled)
        ids = prompt + sampled
    return ids, mask
