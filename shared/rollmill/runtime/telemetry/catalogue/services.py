"""Metrics of the services that talk to the outside, and of the ledger."""

from __future__ import annotations

from rollmill.runtime.telemetry.catalogue.metric import Kind, Label, Metric

CAPTURE, EVALUATOR, LEDGER = "capture", "evaluator", "ledger"

_POLICY = Label("policy", free=True)
_READS = Label("reads")
_STRATEGY = Label("evaluator", free=True)
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
        "Model calls recorded, by how they ended.",
        Label("status", ("ok", "incomplete", "error", "client_gone")),
        Label("kind", ("agent", "aux")),
    ),
    _count(CAPTURE, "sampled_tokens", "tokens", "Token ids that engines reported as sampled."),
    _gauge(CAPTURE, "in_flight", "calls", "Model calls under way."),
    _count(CAPTURE, "abandoned_requests", "requests", "Requests whose client left before the call began."),
    _count(
        CAPTURE,
        "turned_away",
        "calls",
        "Calls refused before they reached the engine, by the error.",
        Label("reason", ("LogAwayError", "NoRoomError", "PausedTooLongError"), free=True),
    ),
    _count(CAPTURE, "continued_replies", "replies", "Replies that broke off at a weight update, and were continued."),
    _count(CAPTURE, "replayed_replies", "replies", "Replies sent again to a client that repeated its request."),
    _count(CAPTURE, "kv_maybe_stale", "calls", "Calls whose cached prompt older weights may have filled.", _POLICY),
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
    _count(CAPTURE, "ids_missing", "replies", "Of these, for want of token ids."),
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
        "Whether an engine says token ids: 1 or 0.",
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
    _count(CAPTURE, "sessions_forgotten", "sessions", "Sessions that are long over, and were forgotten."),
    _gauge(CAPTURE, "sessions_known", "sessions", "Sessions known, those that are over included."),
    _count(CAPTURE, "rewards", "rewards", "Rewards handed in, by who gave them.", _STRATEGY),
    _seconds(CAPTURE, "ack_seconds", "Time until a record was safe, in Kafka or in the spool."),
    _count(CAPTURE, "not_acknowledged", "records", "Records that neither Kafka nor the spool took."),
    _count(CAPTURE, "blobs_not_stored", "records", "Large records that the storage of large values did not take."),
    _gauge(CAPTURE, "kafka_away", "", "Whether Kafka does not answer: 1 or 0."),
    _count(CAPTURE, "spooled_records", "records", "Records spooled to the local disk."),
    _count(CAPTURE, "spooled_records_set_aside", "records", "Spooled records that Kafka refused."),
    _gauge(CAPTURE, "spool_bytes", "bytes", "Bytes in the spool."),
    _gauge(CAPTURE, "spool_records", "records", "Records in the spool."),
)

EVALUATOR_METRICS = (
    _count(
        EVALUATOR,
        "evaluations",
        "evaluations",
        "Evaluations given, by strategy.",
        _STRATEGY,
        Label("verdict", ("graded", "not_graded")),
    ),
    _seconds(EVALUATOR, "evaluation_seconds", "Time of an evaluation, by strategy.", _STRATEGY),
    _count(EVALUATOR, "evaluator_records", "records", "Records finished, by group of readers.", _READS),
    _gauge(
        EVALUATOR,
        "evaluator_lag_records",
        "records",
        "Records not taken yet, by group of readers.",
        _READS,
        Label("topic"),
        Label("partition"),
    ),
    _gauge(EVALUATOR, "records_in_flight", "records", "Records in hand, by group of readers.", _READS),
    _count(EVALUATOR, "repeated_records", "records", "Records that were in hand already, by group of readers.", _READS),
    _gauge(EVALUATOR, "partitions_assigned", "partitions", "Partitions of this member, by group of readers.", _READS),
    _count(EVALUATOR, "rebalances", "rebalances", "Partitions given out anew, by group of readers.", _READS),
    _count(EVALUATOR, "commits_refused", "commits", "Positions that the broker did not take.", _READS),
    _count(EVALUATOR, "unreadable_records", "records", "Records that are no trajectory, passed over."),
    _count(EVALUATOR, "misplaced_records", "records", "Records on a wrong partition, passed over."),
    _count(
        EVALUATOR,
        "webhook_notices",
        "notices",
        "Notices to the webhook, by how they ended.",
        Label("ended", ("taken", "refused", "given_up")),
    ),
    _count(EVALUATOR, "webhook_failures", "requests", "Requests to the webhook that failed, and were made again."),
)

LEDGER_METRICS = (
    _gauge(LEDGER, "ledger_captured_tokens", "tokens", "Tokens captured."),
    _gauge(LEDGER, "ledger_tokens", "tokens", "Captured tokens by their fate.", Label("fate", FATES)),
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
        "Tokens that break the balance: lost, doubled, or disposed of and never captured. 0 or it is a fault.",
        Label("kind", ("lost", "doubled", "uncaptured")),
    ),
    _gauge(LEDGER, "ledger_unreadable_records", "records", "Records of the topic outcomes that are none."),
    _gauge(
        LEDGER,
        "ledger_length_tokens",
        "tokens",
        "Captured tokens by fate and by length of their session: a rule that drops long sessions shows here.",
        Label("length", LENGTHS),
        Label("fate", FATES),
    ),
    _gauge(LEDGER, "ledger_looked_timestamp_seconds", "seconds", "When the ledger was read last, since the epoch."),
    _seconds(LEDGER, "ledger_look_seconds", "Time of a reading of the ledger."),
)

SERVICE_METRICS = (*CAPTURE_METRICS, *EVALUATOR_METRICS, *LEDGER_METRICS)
