"""The learning recipe: GRPO's clipped objective on packed tokens.

L = -1/N sum_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r_t = exp(log p(t) - behaviour log p(t)): PPO's clipped
surrogate with GRPO's group advantages (Shao et al. 2024), an upper bound of its own (DAPO, Yu et al. 2025), no KL term,
and the mean over all trained tokens of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from relay.model import RelayModel

CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
LEARNING_RATE: Final = 5e-3
MAX_GRADIENT_NORM: Final = 1.0


@dataclass(frozen=True)
class PackedTokens:
    """Sequences laid end to end. Value i of each [L] tensor belongs to token i.

    input_ids: integer [L]. cu_seqlens: integer [B + 1], from 0 to L, sequence b is cu_seqlens[b]:cu_seqlens[b + 1].
    loss_mask: [L], 1 where a token is trained; a sequence's first token never is.
    behavior_log_probs: float32 [L], as sampled. advantages: float32 [L].
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class StepMetrics:
    """Means are over the trained tokens of the step; log_prob_gap_max is before the update, in nats."""

    tokens: int
    loss: float
    ratio_mean: float
    clip_fraction: float
    log_prob_gap_max: float
    gradient_norm: float


def make_optimizer(model: RelayModel) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def packed_log_probs(model: RelayModel, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Log-prob of each packed token given the tokens before it in its own sequence, float32 [L]."""
    lengths = cu_seqlens.diff().tolist()
    rows = pad_sequence(list(torch.split(input_ids.long(), lengths)), batch_first=True)
    padded = model.log_probs(rows)
    inside = torch.arange(rows.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    return padded[inside]


def grpo_step(
    model: RelayModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[PackedTokens],
    denominator: float | None = None,
) -> StepMetrics:
    """One optimizer step over the micro-batches of a step.

    `denominator` is the number of trained tokens of the step over all ranks; None means that these micro-batches are
    the whole step. Any split into micro-batches gives the same gradient.
    """
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    optimizer.zero_grad()
    parts = [_accumulate(model, batch, max(denominator or tokens, 1.0)) for batch in batches]
    norm = clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    sums = torch.stack([part[:3] for part in parts]).sum(dim=0) if parts else torch.zeros(3)
    loss, ratio, clipped = sums.tolist()
    gap = max((float(part[3]) for part in parts), default=0.0)
    return StepMetrics(tokens, loss, ratio / max(tokens, 1), clipped / max(tokens, 1), gap, float(norm))


def _accumulate(model: RelayModel, batch: PackedTokens, denominator: float) -> Tensor:
    """Adds a micro-batch's gradient; returns its loss, sum of ratios, clipped tokens and largest log-prob gap."""
    mask = batch.loss_mask.bool()
    difference = packed_log_probs(model, batch.input_ids, batch.cu_seqlens)[mask] - batch.behavior_log_probs[mask]
    ratio, advantage = difference.exp(), batch.advantages[mask]
    plain, bounded = ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
    loss = -torch.minimum(plain, bounded).sum() / denominator
    torch.autograd.backward(loss)
    with torch.no_grad():
        gap = difference.abs().max() if mask.any() else torch.zeros(())
        return torch.stack([loss.detach(), ratio.sum(), (bounded < plain).sum().float(), gap])
