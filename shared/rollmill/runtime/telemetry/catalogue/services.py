"""Metrics of the services that talk to the outside, and of the ledger."""

from __future__ import annotations

from rollmill.runtime.telemetry.catalogue.metric import Kind, Label, Metric

CAPTURE, EVALUATOR, LEDGER = "capture", "evaluator", "ledger"

_POLICY = Label("policy", free=True)
_READS = Label("reads")
_STRATEGY = Label("evaluator", free=True)
VERDICTS = ("graded", "not_graded")
FATES = ("trained", "excluded", "dead_lettered", "pending")
LENGTHS = ("to_256", "to_1024", "to_4096", "to_16384", "to_65536", "above_65536")


def _count(component: str, name: str, unit: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.COUNTER, text, (component,), labels, unit)


def _gauge(component: str, name: str, unit: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.GAUGE, text, (component,), labels, unit)


def _seconds(component: str, name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, (component,), labels, "seconds")


CAPTURE_METRICS = (
    _count(
        CAPTURE,
        "calls",
        "calls",
        "Model calls recorded, by final status.",
        Label("status", ("ok", "incomplete", "error", "client_gone")),
        Label("kind", ("agent", "aux")),
    ),
    _count(CAPTURE, "sampled_tokens", "tokens", "Token ids that engines reported as sampled."),
    _gauge(CAPTURE, "in_flight", "calls", "Model calls in flight."),
    _count(CAPTURE, "abandoned_requests", "requests", "Requests with a client that left before the call began."),
    _count(
        CAPTURE,
        "turned_away",
        "calls",
        "Calls refused before they reached the engine, by the error.",
        Label("reason", ("LogAwayError", "NoRoomError", "PausedTooLongError"), free=True),
    ),
    _count(CAPTURE, "continued_replies", "replies", "Replies interrupted by a weight update and continued."),
    _count(CAPTURE, "replayed_replies", "replies", "Replies sent again to a client that repeated its request."),
    _count(
        CAPTURE, "kv_maybe_stale", "calls", "Calls with a cached prompt that older weights may have filled.", _POLICY
    ),
    _count(CAPTURE, "calls_at_version_zero", "calls", "Calls before any version was announced.", _POLICY),
    _count(
        CAPTURE,
        "parser_failures",
        "calls",
        "Calls with a reply that the engine's parser misread, by sign.",
        Label("sign", ("tool_args_empty", "tool_parse_error")),
    ),
    _count(
        CAPTURE,
        "untrainable_replies",
        "replies",
        "Replies recorded that cannot be trained, by reason.",
        Label("reason", ("no_ids", "no_logprobs", "no_prompt_ids"), free=True),
    ),
    _count(CAPTURE, "ids_missing", "replies", "Of these, the replies without token ids."),
    _gauge(
        CAPTURE,
        "ids_missing_ratio",
        "",
        "Of the last 100 replies to be trained, the share without token ids: near 1 the run trains on nothing.",
    ),
    _gauge(
        CAPTURE,
        "engine_ids",
        "",
        "Whether an engine reports token ids: 1 or 0.",
        Label("upstream", free=True),
        Label("engine", ("auto", "vllm", "sglang", "llama_cpp", "openai")),
    ),
    _count(
        CAPTURE,
        "sessions_opened",
        "sessions",
        "Sessions opened here, by purpose.",
        Label("purpose", ("train", "eval", "collect")),
    ),
    _count(
        CAPTURE,
        "sessions_closed",
        "sessions",
        "Sessions closed here, by status.",
        Label("status", ("COMPLETED", "TIMEOUT", "ERROR")),
    ),
    _count(CAPTURE, "sessions_turned_away", "sessions", "Sessions that admission refused.", _POLICY),
    _count(CAPTURE, "sessions_forgotten", "sessions", "Closed sessions deleted after their retention."),
    _gauge(CAPTURE, "sessions_known", "sessions", "Sessions in the session table, closed ones included."),
    _count(CAPTURE, "rewards", "rewards", "Rewards reported, by evaluator.", _STRATEGY),
    _seconds(CAPTURE, "ack_seconds", "Time until a record was stored, in Kafka or in the spool."),
    _count(CAPTURE, "not_acknowledged", "records", "Records that neither Kafka nor the spool accepted."),
    _count(CAPTURE, "blobs_not_stored", "records", "Large records that the object storage did not accept."),
    _gauge(CAPTURE, "kafka_away", "", "Whether Kafka is unreachable: 1 or 0."),
    _count(CAPTURE, "spooled_records", "records", "Records spooled to the local disk."),
    _count(CAPTURE, "spooled_records_set_aside", "records", "Spooled records that Kafka refused."),
    _gauge(CAPTURE, "spool_bytes", "bytes", "Bytes in the spool."),
    _gauge(CAPTURE, "spool_records", "records", "Records in the spool."),
    _gauge(
        CAPTURE, "spool_damaged_records", "records", "Records that the spool's disk has altered: set aside, never sent."
    ),
    _gauge(CAPTURE, "spool_damaged_files", "files", "Damaged files of the spool that were kept: records may be lost."),
    _gauge(CAPTURE, "spool_saved_records", "records", "Records that this process has read from damaged spool files."),
)

EVALUATOR_METRICS = (
    _count(
        EVALUATOR,
        "evaluations",
        "evaluations",
        "Evaluations given, by strategy.",
        _STRATEGY,
        Label("verdict", VERDICTS),
    ),
    _seconds(EVALUATOR, "evaluation_seconds", "Time of an evaluation, by strategy.", _STRATEGY),
    _count(EVALUATOR, "evaluator_records", "records", "Records finished, by consumer group.", _READS),
    _gauge(
        EVALUATOR,
        "evaluator_lag_records",
        "records",
        "Records not polled yet, by consumer group.",
        _READS,
        Label("topic"),
        Label("partition"),
    ),
    _gauge(EVALUATOR, "records_in_flight", "records", "Records being processed, by consumer group.", _READS),
    _count(
        EVALUATOR,
        "repeated_records",
        "records",
        "Records polled again while being processed, by consumer group.",
        _READS,
    ),
    _gauge(EVALUATOR, "partitions_assigned", "partitions", "Partitions of this member, by consumer group.", _READS),
    _count(EVALUATOR, "rebalances", "rebalances", "Rebalances of partitions, by consumer group.", _READS),
    _count(EVALUATOR, "commits_refused", "commits", "Commits of positions that the broker refused.", _READS),
    _count(EVALUATOR, "unreadable_records", "records", "Records that are no trajectory, ignored."),
    _count(EVALUATOR, "misplaced_records", "records", "Records on a wrong partition, ignored."),
    _count(
        EVALUATOR,
        "webhook_notices",
        "notices",
        "Webhook requests, by result.",
        Label("ended", ("taken", "refused", "given_up")),
    ),
    _count(EVALUATOR, "webhook_failures", "requests", "Webhook requests that failed and were retried."),
)

LEDGER_METRICS = (
    _gauge(LEDGER, "ledger_captured_tokens", "tokens", "Tokens captured."),
    _gauge(LEDGER, "ledger_tokens", "tokens", "Captured tokens by disposition.", Label("fate", FATES)),
    _gauge(
        LEDGER,
        "ledger_excluded_tokens",
        "tokens",
        "Excluded tokens by reason.",
        Label("reason", ("aux", "stale", "stale_at_hand_over", "error", "group_expired"), free=True),
    ),
    _gauge(
        LEDGER,
        "ledger_dead_lettered_tokens",
        "tokens",
        "Tokens of dead letters by reason.",
        Label("reason", ("conflict", "invalid", "wrong_partition"), free=True),
    ),
    _gauge(
        LEDGER,
        "ledger_imbalance_tokens",
        "tokens",
        "Tokens that break the balance: lost, doubled, or disposed of and never captured. Anything but 0 is a fault.",
        Label("kind", ("lost", "doubled", "uncaptured")),
    ),
    _gauge(LEDGER, "ledger_unreadable_records", "records", "Records of the topic outcomes that cannot be read."),
    _gauge(
        LEDGER,
        "ledger_uncounted_records",
        "records",
        "Records of completions that the builder has not read and the ledger cannot: their tokens are in no number.",
    ),
    _gauge(
        LEDGER,
        "ledger_oldest_pending_seconds",
        "seconds",
        "Age of the oldest pending token, since it was sampled; 0 where nothing is pending.",
    ),
    _gauge(
        LEDGER,
        "ledger_length_tokens",
        "tokens",
        "Captured tokens by disposition and by length of their session: a rule that drops long sessions shows here.",
        Label("length", LENGTHS),
        Label("fate", FATES),
    ),
    _gauge(
        LEDGER, "ledger_looked_timestamp_seconds", "seconds", "Time of the last reading of the ledger, since the epoch."
    ),
    _seconds(LEDGER, "ledger_look_seconds", "Time of a reading of the ledger."),
)

SERVICE_METRICS = (*CAPTURE_METRICS, *EVALUATOR_METRICS, *LEDGER_METRICS)
