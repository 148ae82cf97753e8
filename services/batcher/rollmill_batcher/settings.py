"""Settings of the batcher, from ``ROLLMILL_*`` environment variables; each field has its meaning below it."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import SettingsConfigDict

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.models import StalenessBasis, StrategySpec
from rollmill.settings import ServiceSettings
from rollmill.strategies import BaseAdvantage, advantage_registry, group_scorer_registry
from rollmill.topics import TRAJECTORIES
from rollmill_batcher.groups.config import (
    MICRO_BATCH_BYTES,
    BatcherConfig,
    Credit,
    GroupRules,
    Learning,
    LossWeighting,
    Size,
    StepOrder,
)
from rollmill_batcher.groups.eligibility import SamplePolicy, Treatment
from rollmill_batcher.groups.group_scoring import Scoring
from rollmill_batcher.groups.staleness import Staleness, StalenessAction


class BatcherSettings(ServiceSettings):
    """The text ``none`` in the environment is read as None."""

    model_config = SettingsConfigDict(env_parse_none_str="none")

    section: ClassVar[str] = "batcher"

    policy: str = "policy"
    """The one policy of the run; trajectories of another are excluded as ``other_policy`` (rule A8)."""
    groups_per_step: PositiveInt = 8
    """Number of usable groups that make a step."""
    tokens_per_step: PositiveInt | None = None
    """Instead: a step takes groups while their tokens, prompts included, do not exceed this; at least one group."""
    step_order: StepOrder = StepOrder.FIFO
    """Which of the waiting groups a step takes first."""
    min_k: PositiveInt = 2
    """Fewest graded members that make a group usable at its deadline."""
    group_deadline_seconds: float = Field(default=7200.0, gt=0)
    """From the end of a group's first member; after it the group is cut with the members it has, or expires."""
    evaluation_seconds: float = Field(default=1800.0, gt=0)
    """Longest evaluation deadline in the specs of the run's sessions: a group must not expire before it."""
    late_window_seconds: float = Field(default=21600.0, gt=0)
    """How long a closed group is remembered, to recognise late members and repeats."""
    close_before_stale: bool = False
    """True: an open group with min_k is cut before its finished members grow stale."""
    max_staleness: NonNegativeInt | None = 4
    """Largest number of versions between sampling and training, inclusive. None: no limit."""
    staleness_action: StalenessAction = StalenessAction.DROP
    """``drop``: a trace over the limit is not trained; ``mask``: its tokens over the limit are not. ``weight``: nothing
    is left out, a trace of age s weighs 1 / (s + 1); ``keep``: nothing happens."""
    staleness_basis: StalenessBasis = StalenessBasis.OLDEST
    """Which age of a trace's trained tokens is compared with the limit: oldest, newest or mean."""
    accept_filtered_log_probs: bool = False
    """True: replies sampled with top_p below 1 train, although the trainer's log-probs are of all tokens."""
    steps_ahead: PositiveInt = 1
    """Steps cut and not yet acknowledged: more hides latency and costs staleness."""
    world_size: PositiveInt = 1
    """Data-parallel ranks: partitions of ``batches`` that are written. `rollmill batches return` changes it later."""
    returnable_steps: NonNegativeInt = 0
    """Number of acknowledged steps that keep their groups in the state, so that a checkpoint before them can be loaded
    by another number of ranks. Steps that are not acknowledged always keep them."""
    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens of a micro-batch. A longer trace is excluded as ``too_large``."""
    advantage: str = "grpo"
    """Registered name, or ``module:ClassName``."""
    advantage_config: dict[str, Any] = Field(default_factory=dict)
    """Constructor arguments of the strategy, JSON in the environment."""
    group_scorer: str | None = None
    """Registered name (``majority``), or ``module:ClassName``: grades each rollout against the others of its group."""
    group_scorer_config: dict[str, Any] = Field(default_factory=dict)
    """Constructor arguments of the scorer, JSON in the environment."""
    credit: Credit = Credit.ROLLOUT
    """``trace``: a trace's advantage comes from its own reward, where traces are graded one by one."""
    loss_weighting: LossWeighting = LossWeighting.TOKEN_MEAN
    """What the loss is a mean over; docs/batching.md has the formulas."""
    loss_constant: float = Field(default=1024.0, gt=0)
    """Length that ``constant`` divides by."""
    drop_zero_variance: bool = False
    """True: groups of equal rewards, which teach nothing, are excluded from steps."""
    on_error: Treatment = SamplePolicy.error
    """Of rollouts that ended in an error. ``train``: counts, trains; ``count``: only counts; ``exclude``: neither."""
    on_timeout: Treatment = SamplePolicy.timeout
    """The same of rollouts that ran out of time."""
    on_truncated: Treatment = SamplePolicy.truncated
    """The same of rollouts with a reply that was cut off at its largest length."""
    flush_seconds: float | None = Field(default=None, gt=0)
    """How long a ready group waits before a step is cut with fewer groups. None: until the end of the stream."""
    seed: NonNegativeInt = 0
    """With run and step it determines every random order: of micro-batches, and of groups by ``stratified``."""

    @model_validator(mode="after")
    def _deadlines_agree(self) -> Self:
        if self.group_deadline_seconds <= self.evaluation_seconds:
            raise ValueError(
                f"group_deadline_seconds {self.group_deadline_seconds} must be above evaluation_seconds "
                f"{self.evaluation_seconds}: a group would expire while its members are still being graded"
            )
        if self.late_window_seconds < self.group_deadline_seconds:
            raise ValueError(
                f"late_window_seconds {self.late_window_seconds} must not be below group_deadline_seconds "
                f"{self.group_deadline_seconds}: a late member would open its group again"
            )
        retention = int(TRAJECTORIES.config["retention.ms"]) / 1000
        if self.group_deadline_seconds >= retention:
            raise ValueError(
                f"group_deadline_seconds {self.group_deadline_seconds} must be below the retention of "
                f"{TRAJECTORIES.name}, {retention} seconds"
            )
        return self

    @model_validator(mode="after")
    def _ranks_have_partitions(self) -> Self:
        if self.world_size > self.batch_partitions:
            raise ValueError(
                f"world_size {self.world_size} needs as many partitions of batches, not {self.batch_partitions}"
            )
        return self

    def batcher_config(self) -> BatcherConfig:
        """The configuration of every cut. Raises ConfigurationError where a strategy is unknown or does not fit."""
        return BatcherConfig(
            run=self.run,
            policy=self.policy,
            learning=Learning(self.advantage, self._strategy(), self.loss_weighting, self.loss_constant, self.credit),
            groups=self._group_rules(),
            scoring=self._scoring(),
            staleness=Staleness(self.max_staleness, self.staleness_action, self.staleness_basis),
            sample_policy=SamplePolicy(self.on_error, self.on_timeout, self.on_truncated),
            groups_per_step=self.groups_per_step,
            tokens_per_step=self.tokens_per_step,
            order=self.step_order,
            filtered_log_probs=self.accept_filtered_log_probs,
            steps_ahead=self.steps_ahead,
            world_size=self.world_size,
            max_ranks=self.batch_partitions,
            returnable_steps=self.returnable_steps,
            micro_batch=Size(self.micro_batch_tokens, MICRO_BATCH_BYTES),
            flush_seconds=self.flush_seconds,
            seed=self.seed,
        )

    def _group_rules(self) -> GroupRules:
        return GroupRules(
            min_k=self.min_k,
            deadline_seconds=self.group_deadline_seconds,
            close_before_stale=self.close_before_stale,
            drop_zero_variance=self.drop_zero_variance,
            late_window_seconds=self.late_window_seconds,
        )

    def _scoring(self) -> Scoring | None:
        if self.group_scorer is None:
            return None
        spec = StrategySpec(strategy=self.group_scorer, config=self.group_scorer_config)
        try:
            return Scoring(self.group_scorer, group_scorer_registry().create(spec))
        except InvalidInputError as error:
            raise ConfigurationError(str(error)) from error

    def _strategy(self) -> BaseAdvantage:
        try:
            strategy = advantage_registry().create(StrategySpec(strategy=self.advantage, config=self.advantage_config))
        except InvalidInputError as error:
            raise ConfigurationError(str(error)) from error
        if self.min_k < strategy.min_rollouts:
            raise ConfigurationError(
                f"advantage {self.advantage!r} compares at least {strategy.min_rollouts} rollouts of a group, so min_k "
                f"{self.min_k} would only make zeros; raise min_k, or use the advantage 'none'"
            )
        return strategy
