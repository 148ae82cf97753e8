"""One trace with Flux's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rollmill.errors import InvalidInputError
from rollmill.trainer.flux.versions import NO_FORKS, AnyVersion, PolicyVersion, VersionSegment, gap


class AlignmentError(InvalidInputError, ValueError):
    """Values that belong to no token, or tokens that are neither known as prompt nor as response."""


class TrajectoryStatus(Enum):
    PENDING = "pending"
    GENERATING = "generating"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Trajectory:
    """A prompt and a response with what training needs, T tokens in all. Mutable, as trainers fill it step by step.

    Lengths and ``tokens`` that are not given are computed from the token lists. A per-token list is empty, or has one
    value for each of the T tokens, or one for each response token; `check` and everything that computes refuse others.
    """

    id: str = ""
    group_id: str | None = None
    prompt: str = ""
    prompt_tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    response: str = ""
    response_tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    tokens: list[int] = field(default_factory=list)
    """[T], prompt then response."""
    attention_mask: list[int] = field(default_factory=list)
    """1 = a token; empty: all are."""
    loss_mask: list[int] = field(default_factory=list)
    """1 = trained; empty: the whole response."""
    log_probs: list[float] = field(default_factory=list)
    """Under the trainer's policy."""
    behavior_log_probs: list[float] = field(default_factory=list)
    """Under the policy that sampled the token."""
    reward: float = 0.0
    token_rewards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    version: PolicyVersion = field(default_factory=PolicyVersion)
    """The oldest version of its trained tokens."""
    version_segments: list[VersionSegment] = field(default_factory=list)
    """Over [T], in order; context tokens are in none."""
    status: TrajectoryStatus = TrajectoryStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generation_time_ms: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_length = self.prompt_length or len(self.prompt_tokens)
        self.response_length = self.response_length or len(self.response_tokens)
        if not self.tokens:
            self.tokens = [*self.prompt_tokens, *self.response_tokens]

    @property
    def total_length(self) -> int:
        """Prompt and response tokens."""
        return len(self.tokens) or self.prompt_length + self.response_length

    @property
    def has_version_boundaries(self) -> bool:
        """More than one policy version sampled it."""
        return len({segment.version for segment in self.version_segments}) > 1

    @property
    def is_complete(self) -> bool:
        return self.status is TrajectoryStatus.COMPLETED

    def get_version_gap(self, current_version: AnyVersion, forks: Mapping[int, int] = NO_FORKS) -> int:
        """Staleness for a trainer at ``current_version``; negative where the trajectory is newer.

        ``forks``: the version from which each later epoch went on.
        """
        return gap(self.version, current_version, forks)

    def column(self, name: str, dtype: type[np.generic] = np.float32) -> npt.NDArray[Any]:
        """A per-token list as [T], value *i* belongs to token *i*.

        A list over the response alone is put behind the prompt, which gets zeros. Raises AlignmentError for any other
        length.
        """
        values = np.asarray(getattr(self, name), dtype=dtype)
        if len(values) == self.total_length:
            return values
        if len(values) != self.total_length - self.prompt_length:
            raise AlignmentError(
                f"trajectory {self.id!r}: {name} has {len(values)} values for {self.total_length} tokens "
                f"({self.prompt_length} of the prompt)"
            )
        return np.concatenate([np.zeros(self.prompt_length, dtype), values])

    def trained(self) -> npt.NDArray[np.bool_]:
        """[T], true where a token is trained: the loss mask, else the response."""
        if self.loss_mask:
            mask: npt.NDArray[np.bool_] = self.column("loss_mask", np.bool_)
            return mask
        if self.prompt_length + self.response_length != self.total_length:
            raise AlignmentError(
                f"trajectory {self.id!r} has {self.total_length} tokens, prompt_length {self.prompt_length}, "
                f"response_length {self.response_length} and no loss_mask: which tokens are trained is unknown"
            )
        return np.arange(self.total_length) >= self.prompt_length

    def check(self) -> None:
        """Raises AlignmentError where fields contradict each other."""
        self._check_tokens()
        for name in PER_TOKEN:
            if getattr(self, name):
                self.column(name)
        if any(segment.end > self.total_length for segment in self.version_segments):
            raise AlignmentError(f"trajectory {self.id!r}: a version segment ends behind the last token")

    def _check_tokens(self) -> None:
        parts = [*self.prompt_tokens, *self.response_tokens]
        for tokens, length in ((self.prompt_tokens, self.prompt_length), (self.response_tokens, self.response_length)):
            if tokens and len(tokens) != length:
                raise AlignmentError(f"trajectory {self.id!r}: {len(tokens)} tokens with a length of {length}")
        if self.prompt_tokens and self.response_tokens and parts != self.tokens:
            raise AlignmentError(f"trajectory {self.id!r}: tokens are not prompt_tokens and response_tokens")

    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain values: JSON where ``metadata`` is. `from_dict` gives the same trajectory back."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = {name: list(value) for name, value in plain.items() if isinstance(value, list)}
        return {
            **plain,
            **lists,
            "version": self.version.to_dict(),
            "version_segments": [segment.to_dict() for segment in self.version_segments],
            "status": self.status.value,
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises TypeError for a key that is no field. Keys that are missing have their defaults."""
        given = dict(data)
        if "version" in given:
            given["version"] = PolicyVersion(**given["version"])
        if "status" in given:
            given["status"] = TrajectoryStatus(given["status"])
        segments = given.get("version_segments", ())
        given["version_segments"] = [VersionSegment.from_dict(segment) for segment in segments]
        copies = {name: list(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **copies})


PER_TOKEN = (
    "attention_mask",
    "loss_mask",
    "log_probs",
    "behavior_log_probs",
    "token_rewards",
    "values",
    "advantages",
    "returns",
)
"""Names of the per-token lists."""
