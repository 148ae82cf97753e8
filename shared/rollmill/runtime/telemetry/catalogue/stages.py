"""Metrics of the engine, and of the stages that run on it."""

from __future__ import annotations

from dataclasses import replace

from rollmill.runtime.telemetry.catalogue.metric import SLOW, Kind, Label, Metric

BUILDER, MERGER, BATCHER = "builder", "reward-merger", "batcher"
STAGES = (BUILDER, MERGER, BATCHER)

LENGTHS = ("to_1024", "to_4096", "to_16384", "to_65536", "above_65536")
STALENESS = (*map(str, range(9)), "more")
DEAD_LETTER_REASONS = (
    "conflict",
    "invalid",
    "late_evaluation",
    "malformed",
    "output_too_large",
    "outputs_refused",
    "stage_error",
    "too_large",
    "too_old",
    "wrong_partition",
)
EXCLUSIONS = (
    "aux",
    "client_gone",
    "error",
    "incomplete",
    "late",
    "no_ids",
    "no_logprobs",
    "over_long",
    "retried",
    "sibling",
)
CUT_EXCLUSIONS = ("group_expired", "group_too_small", "late_for_group", "stale", "trace_not_graded", "zero_variance")

EVENTS = "stage_events"
_EVENTS_HELP = "What a stage did or ignored, by name."
BUILDER_EVENTS = {
    "sessions_opened": "sessions opened",
    "sessions_closed": "sessions that ended, for whatever reason",
    "sessions_failed": "sessions of which nothing could be built",
    "sessions_unmerged": "sessions with several traces, none of which continues another",
    "completions": "calls accepted",
    "completions_rerouted": "records with another key or partition than their session's, rerouted",
    "late": "calls that came after their session's end",
    "after_close": "other records that came after their session's end",
    "duplicates": "records that were processed before",
    "expiries_ignored": "timers that were no longer due",
    "traces": "traces built",
    "traces_split": "traces that continue after another one's context was cut",
    "drift_repaired": "replies that a later prompt had in other tokens, replaced by the sampled ones",
    "scaffolds_merged": "replies with tokens of the template in front",
    "duplicate_end_tokens": "end-of-turn tokens that came twice",
    "replies_cut": "replies shortened to the length of a trace",
}
MERGER_EVENTS = {
    "trajectories": "revisions sent",
    "graded": "revisions with a reward",
    "ungraded": "revisions without one",
    "duplicates": "records that were processed before",
    "repeats_with_another_result": "evaluations repeated with another result, ignored",
    "evaluations_waiting": "evaluations that came before their trajectory",
    "evaluations_orphaned": "evaluations without a trajectory, discarded",
    "evaluations_sent_on": "evaluations on another partition than their session's, rerouted",
    "revisions_closed": "sessions that accept no more evaluations",
    "markers_forgotten": "sessions forgotten",
    "timers_asked": "timers written",
    "timers_ignored": "timers that were no longer due",
}
BATCHER_EVENTS = {
    "trajectories": "trajectories accepted, or refused at once",
    "revisions": "trajectories that replaced an earlier revision",
    "revisions_after_cut": "revisions that came after their group's end",
    "duplicates": "trajectories that were processed before",
    "other_policy": "trajectories of another policy, refused",
    "eval": "trajectories of eval sessions, never trained",
    "evals_graded": "of these, with a reward",
    "evals_ungraded": "of these, without one",
    "collect": "trajectories of collect sessions, never trained",
    "late_for_group": "trajectories that came after their group was closed, refused",
    "announcements": "policy versions read from the topic",
    "announcements_of_others": "the same of other runs and policies, ignored",
    "announcements_that_skip_epochs": "the same with an epoch beyond the next one, ignored",
    "acknowledged": "acknowledgements of steps by ranks",
    "acknowledgements_of_void_records": "acknowledgements of steps that were laid out anew since",
    "rewound": "returns of a rank to an earlier step",
    "end_of_stream": "ends of the stream announced",
    "trainer_events_of_others": "events of another run's trainer, ignored",
    "returns": "steps given back, to be laid out for other ranks",
    "steps_placed_anew": "steps laid out again",
    "cuts": "decisions",
    "steps": "steps made",
    "micro_batches": "micro-batches made",
    "fillers": "empty ones among them",
    "equal_rewards": "closed groups with one reward for all rollouts that count, so that nothing is compared",
    "rollouts_failed": "rollouts of closed groups that count although they failed or ran out of time",
    "rollouts_ungraded": "rollouts of closed groups that do not count, as they have no reward",
}


def _counter(
    name: str, unit: str, text: str, components: tuple[str, ...], *labels: Label, family: str | None
) -> Metric:
    return Metric(name, Kind.COUNTER, text, components, labels, unit, family)


def _events(component: str, known: dict[str, str]) -> Metric:
    made = _counter(EVENTS, "events", _EVENTS_HELP, (component,), Label("event", tuple(known)), family="")
    return replace(made, meanings=tuple(known.items()))


_TASK = Label("task")


def _gauge(name: str, unit: str, text: str, components: tuple[str, ...], *labels: Label) -> Metric:
    return Metric(name, Kind.GAUGE, text, components, labels, unit)


ENGINE_METRICS = (
    _counter("records", "records", "Records read and processed.", STAGES, Label("topic"), family=None),
    _counter(
        "transactions",
        "transactions",
        "Transactions committed: outputs, state and position in one.",
        STAGES,
        family=None,
    ),
    _counter("task_failures", "failures", "Failures after which a task was started again.", STAGES, _TASK, family=None),
    _counter(
        "tasks_stopped",
        "tasks",
        "Tasks that stopped over their limit of dead letters while others of the process go on.",
        STAGES,
        _TASK,
        family=None,
    ),
    _counter(
        "dead_letters",
        "records",
        "Records that became dead letters, by reason.",
        STAGES,
        Label("reason", DEAD_LETTER_REASONS, free=True),
        family="dead_letters_",
    ),
    Metric("transaction_seconds", Kind.HISTOGRAM, "Time of a transaction.", STAGES, unit="seconds"),
    Metric("restore_seconds", Kind.HISTOGRAM, "Time until a task was ready, its state read.", STAGES, unit="seconds"),
    _gauge("lag_records", "records", "Records not read yet.", STAGES, Label("topic"), Label("partition")),
    _gauge("state_keys", "keys", "Keys of a task's state.", STAGES, _TASK),
)

BUILDER_METRICS = (
    _events(BUILDER, BUILDER_EVENTS),
    _gauge("sessions_open", "sessions", "Sessions that have not ended.", (BUILDER,), _TASK),
    _counter("tokens_captured", "tokens", "Sampled tokens accepted.", (BUILDER,), family=None),
    _counter("tokens_in_traces", "tokens", "Tokens that traces offer for training.", (BUILDER,), family=None),
    _counter(
        "tokens_excluded",
        "tokens",
        "Tokens that will not be trained, by reason.",
        (BUILDER,),
        Label("reason", EXCLUSIONS, free=True),
        family="excluded_",
    ),
    _counter(
        "trace_breaks",
        "traces",
        "Traces that begin anew, by why they go on from no earlier one.",
        (BUILDER,),
        Label("reason", ("compaction", "fork", "prefix_rewritten", "reasoning_stripped", "sub_agent"), free=True),
        family="break_",
    ),
)

MERGER_METRICS = (
    _events(MERGER, MERGER_EVENTS),
    _gauge("trajectories_held", "trajectories", "Trajectories that may still get a grade.", (MERGER,), _TASK),
    _counter(
        "reward_amount",
        "reward",
        "Sum of the rewards of graded revisions: those above zero, and the size of those below.",
        (MERGER,),
        Label("sign", ("positive", "negative")),
        family="reward_",
    ),
)

BATCHER_METRICS = (
    _events(BATCHER, BATCHER_EVENTS),
    _gauge("groups_open", "groups", "Groups that wait for members or for their step.", (BATCHER,), _TASK),
    _gauge("steps_queued", "steps", "Steps cut and not acknowledged yet.", (BATCHER,), _TASK),
    _counter(
        "groups_closed",
        "groups",
        "Groups that ended: in a step, at their deadline, or unusable.",
        (BATCHER,),
        Label("state", ("cut", "expired", "failed")),
        family="groups_",
    ),
    _counter("tokens_batched", "tokens", "Tokens of the micro-batches, context included.", (BATCHER,), family=None),
    _counter(
        "tokens_excluded",
        "tokens",
        "Tokens that will not be trained, by reason.",
        (BATCHER,),
        Label("reason", CUT_EXCLUSIONS, free=True),
        family="excluded_",
    ),
    _counter(
        "tokens_by_staleness",
        "tokens",
        "Trained tokens by how many policy versions passed between sampling and cut.",
        (BATCHER,),
        Label("versions", STALENESS),
        family="staleness_",
    ),
    _counter(
        "token_staleness",
        "versions",
        "Sum of the staleness of the trained tokens: over their number, the mean.",
        (BATCHER,),
        family=None,
    ),
    _counter(
        "traces_judged",
        "traces",
        "Traces of closed groups, by length in tokens.",
        (BATCHER,),
        Label("length", LENGTHS),
        family="traces_",
    ),
    _counter(
        "traces_stale",
        "traces",
        "Of these, too stale to train.",
        (BATCHER,),
        Label("length", LENGTHS),
        family="traces_stale_",
    ),
    Metric(
        "age_at_cut_seconds",
        Kind.HISTOGRAM,
        "Time from the end of a rollout's sampling to the cut of its step.",
        (BATCHER,),
        unit="seconds",
        buckets=SLOW,
    ),
    Metric(
        "age_at_hand_over_seconds",
        Kind.HISTOGRAM,
        "Time from the end of a rollout's sampling until every rank had acknowledged its step.",
        (BATCHER,),
        unit="seconds",
        buckets=SLOW,
    ),
)

STAGE_METRICS = (*ENGINE_METRICS, *BUILDER_METRICS, *MERGER_METRICS, *BATCHER_METRICS)
