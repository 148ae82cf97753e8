"""Batches, cuts and the trainer's acknowledgements (rules B1 to B4, R1 to R4, A1 to A5)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rollmill.models.base import EventTime, FiniteFloat, Identifier, NonNegativeInt, PositiveInt, Record
from rollmill.models.token_accounting import TokenRange
from rollmill.models.versions import PolicyVersion, StalenessBasis

TENSORS: dict[str, tuple[str, str]] = {
    "input_ids": ("int32 [T]", "token ids, prompt and response, packed trace after trace"),
    "loss_mask": ("uint8 [T]", "1 = sampled by the policy and trained; at token"),
    "behavior_log_probs": ("float32 [T]", "log-prob of the token under the policy that sampled it; 0.0 at context"),
    "versions": ("int32 [R, 3]", "runs of (epoch, version, length) over [T]; (-1, -1, n) at context"),
    "cu_seqlens": ("int32 [N + 1]", "start of each trace in [T], and the end"),
    "prompt_lengths": ("int32 [N]", "tokens before the first sampled token's turn of each trace"),
    "trace_index": ("int32 [N]", "row of each trace in the header's table; -1 in a filler"),
    "group_index": ("int32 [N]", "place of the trace's group in the header's groups; -1 in a filler"),
    "session_index": ("int32 [N]", "number of the trace's rollout, counted over the step; -1 in a filler"),
    "advantages": ("float32 [N]", "advantage of the trace's rollout, one per trace"),
    "rewards": ("float32 [N]", "reward of the trace"),
    "later_rewards": (
        "float32 [N]",
        "token rewards of the rollout's later traces; the trace's reward where no token of the rollout has one",
    ),
    "loss_weights": ("float32 [N]", "weight of every trained token of the trace (rule A1)"),
    "temperatures": (
        "float32 [U]",
        "sampling temperature of each run of turn_ids; 0.0 = no turn of the trace knows it",
    ),
    "turn_ids": ("int32 [U, 2]", "runs of (turn, length) over [T]; turn -1 at context"),
    "token_rewards": ("float32 [T]", "reward given at a single token; only where any trace has them"),
}
"""Tensors of a micro-batch on the wire: dtype and shape, meaning. T tokens, N traces, R and U runs."""

EXTRA = "extra."
"""Prefix of further tensors, [V, ...] each, one for each name in the traces' ``extras``: rows of the tokens that have
one, in their order; dtype and shape in the header's ``extras``."""
EXTRA_SPANS = "extra_spans."
"""Prefix of int32 [S, 2]: (first token, number of tokens) in [T] of the rows of an extra."""


class GroupRow(Record):
    """One group of a step, with all that a trainer needs to normalise rewards itself (rule A5)."""

    group_id: Identifier
    size: PositiveInt
    """Rollouts that the sessions announced."""
    rewards: tuple[FiniteFloat, ...]
    """Of every rollout that counts, whether or not it trains, in the order of session ids."""
    mean: FiniteFloat
    deviation: FiniteFloat
    """Population standard deviation of ``rewards``."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Rollouts that do not count, by reason: no grade came, whatever the policy did."""
    scorer: str | None = None
    """Group scorer that gave ``rewards``; None: they are of each session's own evaluators."""
    own_rewards: tuple[FiniteFloat | None, ...] = ()
    """With a group scorer: what the evaluators had given, in the same order."""


class TraceRow(Record):
    """One trace of a step, in the table that every rank's header holds (rule A3)."""

    session_id: Identifier
    attempt: PositiveInt = 1
    trace: NonNegativeInt = 0
    group_id: Identifier
    rank: NonNegativeInt
    micro_batch: NonNegativeInt
    tokens: PositiveInt
    mask_sum: PositiveInt
    oldest: PolicyVersion
    loss_weight: FiniteFloat
    reward: FiniteFloat | None = None
    """Of the rollout, as its group's statistics count it; the tensor ``rewards`` holds the trace's own."""
    units: tuple[TokenRange, ...]


class Denominators(Record):
    """Step-wide sums over all ranks and micro-batches, by which a summed loss is divided."""

    tokens: NonNegativeInt
    """Tokens with mask 1."""
    weighted_tokens: FiniteFloat
    """Sum of the loss weights of all tokens with mask 1; the denominator of the step's loss."""
    rollouts: NonNegativeInt
    groups: NonNegativeInt


class BatchHeader(Record):
    """Header of one micro-batch: safetensors metadata key ``header``, JSON."""

    schema_version: Literal[1] = 1
    run: Identifier
    policy: Identifier
    batch_id: str
    step: NonNegativeInt
    rank: NonNegativeInt
    world_size: PositiveInt
    micro_batch: NonNegativeInt
    micro_batches: PositiveInt
    placement: NonNegativeInt = 0
    """How often the run's steps were returned and laid out anew before: a record of a lower one is void (rule R4)."""
    filler: bool = False
    """True: added so that every rank has the same number of micro-batches; nothing in it is trained."""
    policy_version: PolicyVersion
    """Newest announced version at the cut."""
    forks: dict[int, int] = Field(default_factory=dict)
    """Version from which each later epoch went on, for staleness over epochs."""
    max_staleness: NonNegativeInt | None = None
    """The limit at hand-over, in versions, inclusive; None: nothing is cleared there."""
    staleness_basis: StalenessBasis = StalenessBasis.OLDEST
    """Of which trained token of a trace the age is compared with the limit (`trace_age`)."""
    staleness_action: str = "drop"
    """What the cut did with traces over the limit: ``drop``, ``mask``, ``weight`` or ``keep``."""
    queued_steps: NonNegativeInt = 0
    """Steps cut before this one and not yet acknowledged at the cut."""
    advantage: str = "grpo"
    """Strategy that computed ``advantages``; ``none`` leaves them zero for a trainer that normalises itself."""
    credit: str = "rollout"
    """Whose reward an advantage is of: the ``rollout``'s, or each ``trace``'s own."""
    loss_weighting: str = "token_mean"
    denominators: Denominators
    staleness_histogram: dict[int, int] = Field(default_factory=dict)
    """Trained tokens by staleness at the cut."""
    generation_ages: dict[int, int] = Field(default_factory=dict)
    """Traces by the versions that passed while they were sampled: newest minus oldest trained token."""
    queue_ages: dict[int, int] = Field(default_factory=dict)
    """Traces by the versions between their newest trained token and the cut, queued steps included."""
    packing_efficiency: FiniteFloat = 1.0
    """Tokens over token budget, over the step's micro-batches."""
    extras: dict[str, str] = Field(default_factory=dict)
    """Extras of the step by name: dtype and shape, such as ``uint8 [T, 48, 8]``, the same on every rank."""
    extras_left_out: dict[str, int] = Field(default_factory=dict)
    """Traces with an extra of this name that has another dtype or shape than most; it is left out there. By name."""
    fingerprints: dict[str, int] = Field(default_factory=dict)
    """Traces of the step by the digest of tokenizer, chat template and model; those in none of them have no digest."""
    table: tuple[TraceRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    """All groups of the step, the same in every rank's header."""
    tensors: dict[str, str] = Field(default_factory=lambda: {k: f"{d}: {m}" for k, (d, m) in TENSORS.items()})


class RefillRequest(Record):
    """A group left without a step: new rollouts are wanted in its place (topic ``refills``).

    Its id is closed, so they make a new group, of the same task or of another; whoever drives rollouts decides.
    """

    run: Identifier
    policy: Identifier
    group_id: Identifier
    task_id: str | None = None
    dataset: str | None = None
    count: PositiveInt
    """Rollouts of the group that is missing: its announced size."""
    reason: str
    """``group_expired``, ``group_too_small``, ``zero_variance``, or why none of its traces could train."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Members that did not count, by reason: of the infrastructure, such as a grader that gave no answer."""
    sequence: NonNegativeInt
    """Of the cut that closed the group."""
    at: EventTime
    """Time of that cut."""


class Cut(Record):
    """One decision of the batcher (topic ``cuts``): with the same topics it gives the same bytes (rule B2)."""

    run: Identifier
    policy: Identifier
    step: NonNegativeInt
    """The step that this cut made, or the next step where it made none."""
    sequence: NonNegativeInt
    """Counts all cuts of the run, also those that yield no batch."""
    positions: dict[str, int]
    """Next input offset by ``topic/partition``."""
    policy_version: PolicyVersion
    queued_steps: NonNegativeInt
    now: EventTime
    seed: NonNegativeInt
    flush: bool = False
    """True: take what is ready although the step is not full (end of stream or flush interval)."""
    batch_id: str | None = None
    """None: only exclusions were decided."""
    groups: tuple[str, ...] = ()
    excluded: dict[str, int] = Field(default_factory=dict)
    """Tokens excluded at this cut by reason."""


class StepAcknowledged(Record):
    """A rank has finished a step: its optimizer step is done (topic ``acks``)."""

    type: Literal["acknowledged"] = "acknowledged"
    run: Identifier
    rank: NonNegativeInt
    world_size: PositiveInt
    step: NonNegativeInt
    batch_id: str
    placement: NonNegativeInt = 0
    """Of the records that were read."""
    at: EventTime


class Rewound(Record):
    """A trainer went back to a checkpoint: steps from ``next_step`` on are un-acknowledged (rules R3, A4)."""

    type: Literal["rewound"] = "rewound"
    run: Identifier
    next_step: NonNegativeInt
    rank: NonNegativeInt | None = None
    """The rank that went back; None is all of them. Ranks start at different times, so each reports its own."""
    at: EventTime


class EndOfStream(Record):
    """No more trajectories will come: what is ready may be cut although a step is not full (topic ``acks``)."""

    type: Literal["end_of_stream"] = "end_of_stream"
    run: Identifier
    at: EventTime


class StepsReturned(Record):
    """A request to the batcher: lay the steps that are not acknowledged out anew, for other ranks (rule R4)."""

    type: Literal["returned"] = "returned"
    run: Identifier
    request_id: Identifier
    world_size: PositiveInt
    next_step: NonNegativeInt | None = None
    """The first of them; None is the first that not every rank has acknowledged."""
    offsets: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """By partition of ``batches``: an offset that no record of the new layout is below."""
    at: EventTime


class StepsResharded(Record):
    """The batcher's answer, in one transaction with the new records. Steps from ``next_step`` on are open again."""

    model_config = ConfigDict(title="StepsPlaced")  # the name of its schema
    type: Literal["placed"] = "placed"
    run: Identifier
    request_id: Identifier
    placement: PositiveInt
    world_size: PositiveInt
    next_step: NonNegativeInt
    steps: NonNegativeInt
    """How many were laid out anew; each keeps its number, its batch id and its content."""
    offsets: dict[str, NonNegativeInt]
    at: EventTime


TrainerEvent = Annotated[
    StepAcknowledged | Rewound | EndOfStream | StepsReturned | StepsResharded, Field(discriminator="type")
]
"""Any record of the topic ``acks``."""
