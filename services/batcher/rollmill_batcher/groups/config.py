"""The configuration of a run: every constant that a cut depends on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from rollmill.strategies import BaseAdvantage
from rollmill_batcher.groups.eligibility import EligibilityCriteria, SamplePolicy
from rollmill_batcher.groups.group_scoring import Scoring
from rollmill_batcher.groups.staleness import PolicyClock, Staleness

MICRO_BATCH_BYTES = 6 * 2**20
HEADER_BYTES = 2**20
"""Together with escaping and names they stay below the 8 MiB of a record (rule C1)."""


class StepOrder(StrEnum):
    """``fifo``: first opened; ``freshest``: youngest tokens; ``oldest_in_window``: oldest tokens inside the limit.

    ``stratified``: every age in proportion to the groups that wait with it, in an order drawn from the seed.
    """

    FIFO = "fifo"
    FRESHEST = "freshest"
    OLDEST_IN_WINDOW = "oldest_in_window"
    STRATIFIED = "stratified"


class LossWeighting(StrEnum):
    """``token_mean``: 1. ``rollout_mean``: 1 / trained tokens of the rollout over all its traces in the step.

    ``group_mean``: 1 / trained tokens of the group. ``constant``: 1 / a constant length, and the denominator is
    the number of rollouts, so that long replies weigh as much per token as short ones (Dr. GRPO).
    """

    TOKEN_MEAN = "token_mean"  # noqa: S105  # no password
    ROLLOUT_MEAN = "rollout_mean"
    GROUP_MEAN = "group_mean"
    CONSTANT = "constant"


class Credit(StrEnum):
    """Whose reward makes an advantage: one for all traces of a rollout, or each trace's own."""

    ROLLOUT = "rollout"
    TRACE = "trace"


@dataclass(frozen=True)
class Size:
    """Of one trace: ``tokens`` of prompt and response, ``nbytes`` in a batch record."""

    tokens: int
    nbytes: int

    @property
    def cost(self) -> int:
        """Of attention: the square of the length."""
        return self.tokens**2


@dataclass(frozen=True)
class GroupRules:
    """When a group is ready. ``deadline_seconds`` counts from the end of its first member."""

    min_k: int = 2
    deadline_seconds: float = 7200.0
    close_before_stale: bool = False
    drop_zero_variance: bool = False
    late_window_seconds: float = 21600.0


@dataclass(frozen=True)
class Learning:
    """How rewards become the numbers of a loss. ``constant`` is the length of `LossWeighting.CONSTANT`."""

    name: str
    """Of the advantage strategy, as the settings give it."""
    advantage: BaseAdvantage
    weighting: LossWeighting = LossWeighting.TOKEN_MEAN
    constant: float = 1024.0
    credit: Credit = Credit.ROLLOUT


@dataclass(frozen=True)
class BatcherConfig:
    """Everything that a cut depends on beside the state."""

    run: str
    policy: str
    learning: Learning
    groups: GroupRules = GroupRules()
    scoring: Scoring | None = None
    """None: rollouts have the rewards of their evaluators."""
    staleness: Staleness = field(default_factory=Staleness)
    sample_policy: SamplePolicy = field(default_factory=SamplePolicy)
    groups_per_step: int = 8
    tokens_per_step: int | None = None
    """Instead of a number of groups: as many as have no more tokens together, at least one."""
    order: StepOrder = StepOrder.FIFO
    filtered_log_probs: bool = False
    steps_ahead: int = 1
    world_size: int = 1
    placement: int = 0
    """See `BatchHeader.placement`."""
    max_ranks: int = 2**31
    """Partitions of ``batches``."""
    returnable_steps: int = 0
    """Number of acknowledged steps that keep their groups, so that these, too, can be resharded."""
    micro_batch: Size = field(default_factory=lambda: Size(16384, MICRO_BATCH_BYTES))
    """Budget of one micro-batch: tokens, and bytes of its tensors."""
    header_bytes: int = HEADER_BYTES
    """Bytes for a step's table in every record's header; a step that needs more takes fewer groups."""
    flush_seconds: float | None = None
    seed: int = 0

    def criteria(self, clock: PolicyClock) -> EligibilityCriteria:
        size = self.micro_batch
        return EligibilityCriteria(
            self.sample_policy, self.staleness, clock, size.tokens, size.nbytes, self.filtered_log_probs
        )

    def step_seed(self, step: int) -> int:
        """Of one step's randomness: a function of run, seed and step (rule E3)."""
        return int.from_bytes(_digest(f"{self.run}/{self.seed}/{step}", 6), "big")

    def batch_id(self, step: int, sequence: int) -> str:
        return _digest(f"{self.run}/{step}/{sequence}", 12).hex()


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
