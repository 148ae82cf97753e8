"""GRPO on a batch stream: read a step, update the policy, hand its weights to the engines, announce, acknowledge.

Run it inside a trainer that has a model and engines: ``train`` is the whole loop. The objective is PPO's clipped
surrogate with group advantages (Shao et al. 2024), an upper bound of its own (DAPO, Yu et al. 2025) and no KL term.
"""

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from rollmill.models import PolicyVersion
from rollmill.trainer import MicroBatch, MiniBatch, PaddedMicroBatch, PolicyPublisher, Step

CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
MAX_GRADIENT_NORM: Final = 1.0

LogProbs = Callable[[Tensor, Tensor], Tensor]
"""Packed ids [T] and cu_seqlens [N + 1] to the log-prob of each token given those before it in its trace, [T]."""


class Stream(Protocol):
    """A `BatchStream`, or something that puts several of them together."""

    def steps(
        self, version: Callable[[], PolicyVersion], *, until: Callable[[], bool], timeout: float | None
    ) -> Iterator[Step]: ...


def packed(micro_batch: MicroBatch, log_probs: LogProbs) -> tuple[MicroBatch, Tensor]:
    """The tensors to compute with, and the log-prob of each of their tokens."""
    return micro_batch, log_probs(micro_batch.input_ids, micro_batch.cu_seqlens)


Layout = Callable[[MicroBatch, LogProbs], tuple[MicroBatch | PaddedMicroBatch, Tensor]]


def train(
    stream: Stream,
    publisher: PolicyPublisher,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    log_probs: LogProbs,
    hand_over: Callable[[int], None],
    after_step: Callable[[Step, float], None] = lambda _step, _loss: None,
    until: Callable[[], bool] = lambda: False,
    timeout: float | None = None,
    layout: Layout = packed,
) -> None:
    """Train until ``until()``. ``hand_over(version)`` returns once every engine has loaded the model's weights."""
    for step in stream.steps(lambda: publisher.version, until=until, timeout=timeout):
        optimizer.zero_grad()
        loss = sum(accumulate(step, *layout(micro_batch, log_probs)) for micro_batch in step)
        clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        version = publisher.version.version + 1
        hand_over(version)
        publisher.update(version)
        step.ack()
        after_step(step, loss)


def accumulate(step: Step | MiniBatch, batch: MicroBatch | PaddedMicroBatch, current: Tensor) -> float:
    """Add a micro-batch's gradient; its share of the step's loss."""
    loss = -(surrogate(batch, current) * batch.loss_weight).sum() / step.denominator
    torch.autograd.backward(loss)
    return float(loss.detach())


def surrogate(batch: MicroBatch | PaddedMicroBatch, current: Tensor) -> Tensor:
    """min(r A, clip(r) A) per token, r = exp(current - behaviour log-prob); whatever is not trained has r = 1."""
    ratio = (current - batch.behavior_log_probs).where(batch.loss_mask, 0.0).exp()
    bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return torch.minimum(ratio * batch.advantages, bounded * batch.advantages)
