"""Trajectories as padded rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollmill.trainer.flux.trajectory import AlignmentError, Trajectory

if TYPE_CHECKING:
    from torch import Tensor, device

FLOAT_COLUMNS = ("log_probs", "behavior_log_probs", "advantages", "returns")


@dataclass
class TrajectoryBatch:
    """B trajectories of at most L tokens."""

    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return len(self.trajectories)

    @property
    def max_length(self) -> int:
        """L; 0 without trajectories."""
        return max((each.total_length for each in self.trajectories), default=0)

    @property
    def num_tokens(self) -> int:
        return sum(each.total_length for each in self.trajectories)

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.trajectories]

    def to_arrays(self, pad_token_id: int = 0) -> dict[str, npt.NDArray[Any]]:
        """What `to_tensors` returns, as numpy arrays."""
        for each in self.trajectories:
            each.check()
        rows = _Rows([each.total_length for each in self.trajectories])
        columns = {name: rows.fill(self._floats(name), np.float32) for name in FLOAT_COLUMNS}
        return {
            "input_ids": rows.fill(
                [each.column("tokens", np.int64) for each in self.trajectories], np.int64, pad_token_id
            ),
            "attention_mask": rows.fill([_attention(each) for each in self.trajectories], np.int64),
            "loss_mask": rows.fill([each.trained() for each in self.trajectories], np.float32),
            **columns,
            "rewards": np.array(self.rewards, np.float32),
            "versions": np.array([each.version.version_id for each in self.trajectories], np.int64),
        }

    def to_tensors(self, device: device | str = "cpu", pad_token_id: int = 0) -> dict[str, Tensor]:
        """Nine tensors, padded on the right, value *i* of a row at token *i*.

        ``input_ids`` and ``attention_mask`` int64 [B, L]; ``loss_mask``, ``log_probs``, ``behavior_log_probs``,
        ``advantages`` and ``returns`` float32 [B, L], 0.0 at padding; ``rewards`` float32 [B]; ``versions`` int64 [B],
        the version id. A column that no trajectory has is zeros. Raises AlignmentError where a list does not match the
        tokens, where only some trajectories have a column, or where it is unknown which tokens are trained.
        """
        import torch  # noqa: PLC0415  # a reader of trajectories needs no torch

        return {name: torch.from_numpy(array).to(device) for name, array in self.to_arrays(pad_token_id).items()}

    def compute_padding_ratio(self) -> float:
        """Share of padding in the B x L rows; 0.0 for an empty batch."""
        cells = self.batch_size * self.max_length
        return 1 - self.num_tokens / cells if cells else 0.0

    def get_version_stats(self) -> dict[str, float]:
        """``mean_version``, ``min_version``, ``max_version``, ``version_spread`` (max - min) of the version ids."""
        ids = [each.version.version_id for each in self.trajectories] or [0]
        low, high = min(ids), max(ids)
        return {
            "mean_version": sum(ids) / len(ids),
            "min_version": low,
            "max_version": high,
            "version_spread": high - low,
        }

    def _floats(self, name: str) -> list[npt.NDArray[Any]]:
        with_column = [each for each in self.trajectories if getattr(each, name)]
        if with_column and len(with_column) < self.batch_size:
            without = next(each.id for each in self.trajectories if not getattr(each, name))
            raise AlignmentError(
                f"{len(with_column)} of {self.batch_size} trajectories have {name}; {without!r} has not"
            )
        if not with_column:
            return [np.zeros(each.total_length, np.float32) for each in self.trajectories]
        return [each.column(name) for each in with_column]


def _attention(trajectory: Trajectory) -> npt.NDArray[Any]:
    if not trajectory.attention_mask:
        return np.ones(trajectory.total_length, np.int64)
    mask = trajectory.column("attention_mask", np.int64)
    if len(trajectory.attention_mask) != trajectory.total_length:
        mask[: trajectory.prompt_length] = 1
    return mask


class _Rows:
    """Positions of the tokens in [B, L]."""

    def __init__(self, lengths: list[int]) -> None:
        self._inside = np.arange(max(lengths, default=0)) < np.array(lengths, np.int64)[:, None]

    def fill(self, values: list[npt.NDArray[Any]], dtype: type[np.generic], padding: int = 0) -> npt.NDArray[Any]:
        rows = np.full(self._inside.shape, padding, dtype)
        rows[self._inside] = np.concatenate(values) if values else ()
        return rows
