"""Generations that were cut off and are continued later, under the policy that is loaded then (APRIL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rollmill.trainer.flux.trajectory import Trajectory, TrajectoryStatus
from rollmill.trainer.flux.versions import PolicyVersion, VersionSegment


@dataclass
class PartialTrajectory(Trajectory):
    """An aborted generation. What was sampled keeps its log-probs and its versions when it is continued."""

    continuation_prompt: str = ""
    start_rollout_id: str | None = None
    """Rollout that began it."""
    continuation_count: int = 0
    kv_cache_ref: Any = None

    def can_continue(self, max_continuations: int = 3) -> bool:
        return self.status is TrajectoryStatus.ABORTED and self.continuation_count < max_continuations

    def prepare_continuation(self) -> str:
        """Text to send where an engine takes no token ids; also kept in ``continuation_prompt``.

        Text is tokenised again, maybe with another result: prefer `continuation_tokens`.
        """
        self.continuation_prompt = self.prompt + self.response
        return self.continuation_prompt

    def continuation_tokens(self) -> list[int]:
        """Ids of everything so far, to be sent as the prompt."""
        return list(self.tokens)

    def continued(
        self,
        response_tokens: Sequence[int],
        behavior_log_probs: Sequence[float],
        version: PolicyVersion,
        *,
        response: str = "",
        status: TrajectoryStatus = TrajectoryStatus.COMPLETED,
    ) -> Self:
        """The trajectory with the tokens of another generation: one value of ``behavior_log_probs`` for each of its
        tokens.
        """
        if len(behavior_log_probs) != len(response_tokens):
            raise ValueError(f"{len(behavior_log_probs)} log-probs for {len(response_tokens)} tokens")
        return replace(
            self,
            response=self.response + response,
            response_tokens=[*self.response_tokens, *response_tokens],
            response_length=self.response_length + len(response_tokens),
            tokens=[*self.tokens, *response_tokens],
            behavior_log_probs=[*self.column("behavior_log_probs").tolist(), *behavior_log_probs],
            **self._dropped(len(response_tokens)),
            version=self._oldest(version) if response_tokens else self.version,
            version_segments=[*self._segments(), *self._added(len(response_tokens), version)],
            status=status,
            continuation_count=self.continuation_count + 1,
            continuation_prompt="",
            kv_cache_ref=None,
        )

    def _oldest(self, added: PolicyVersion) -> PolicyVersion:
        """The oldest version of all sampled tokens; before the first token, ``added``."""
        return min(self.version, added) if self.response_length else added

    def _dropped(self, added: int) -> dict[str, Any]:
        """Masks are extended by ones; what was computed for the shorter sequence is dropped."""
        masks = {
            name: [*self.column(name).astype(int).tolist(), *[1] * added]
            for name in ("attention_mask", "loss_mask")
            if getattr(self, name)
        }
        return {**masks, **{name: [] for name in ("log_probs", "token_rewards", "values", "advantages", "returns")}}

    def _segments(self) -> list[VersionSegment]:
        if self.version_segments or not self.response_length:
            return list(self.version_segments)
        return [VersionSegment(self.prompt_length, self.total_length, self.version)]

    def _added(self, count: int, version: PolicyVersion) -> list[VersionSegment]:
        return [VersionSegment(self.total_length, self.total_length + count, version)] if count else []
