"""The overview: is everything flowing, does every token find its end, and is it learning."""

from __future__ import annotations

from dashboards.panels import ORANGE, RED, Board, Form, Panel, Row, Target, Unit

OWN = 'prefix="$prefix"'


def _rate(metric: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{{{OWN}{where}}}[$__rate_interval]))"


def _sum(metric: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}({metric}{{{OWN}{where}}})"


def _quantile(q: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {_rate(f'{metric}_bucket', labels)})"


def _stat(title: str, description: str, unit: Unit, expr: str, thresholds: tuple[tuple[float, str], ...] = ()) -> Panel:
    return Panel(title, description, unit, (Target(expr, title),), Form.STAT, thresholds, width=4, height=4)


_LAG = f"{_sum('rollmill_lag_records', 'topic')} or {_sum('rollmill_evaluator_lag_records', 'reads')}"
_GRADED = _rate("rollmill_stage_events_total", where=', component="reward-merger", event="graded"')
_GIVEN = _rate("rollmill_reward_amount_total", where=', sign="positive"')
_TAKEN = _rate("rollmill_reward_amount_total", where=', sign="negative"')
_REWARD = f"({_GIVEN} - {_TAKEN}) / {_GRADED}"
_TRAINED = _sum("rollmill_ledger_tokens", where=', fate="trained"')
_STALENESS = f"{_rate('rollmill_token_staleness_total')} / {_rate('rollmill_tokens_by_staleness_total')}"

AT_A_GLANCE = Row(
    "At a glance",
    (
        _stat(
            "Ledger imbalance",
            "Tokens lost, doubled, or disposed of and never captured. Not 0 is a fault: see `rollmill ledger`.",
            Unit.TOKENS,
            _sum("rollmill_ledger_imbalance_tokens"),
            ((1, RED),),
        ),
        _stat(
            "Dead letters",
            "Records set aside since the services started. `rollmill dlq list` shows them.",
            Unit.RECORDS,
            _sum("rollmill_dead_letters_total"),
            ((1, ORANGE), (100, RED)),
        ),
        _stat(
            "Largest lag",
            "Records that the slowest reader has not read yet, of all partitions of a topic.",
            Unit.RECORDS,
            f"max({_LAG})",
            ((1000, ORANGE), (10000, RED)),
        ),
        _stat("Sessions open", "Sessions that have not ended.", Unit.NUMBER, _sum("rollmill_sessions_open")),
        _stat("Groups open", "Groups that wait for members or a step.", Unit.NUMBER, _sum("rollmill_groups_open")),
        _stat(
            "Tokens trained",
            "Share of the captured tokens that were trained. The rest is excluded, dead-lettered or under way.",
            Unit.SHARE,
            f"{_TRAINED} / {_sum('rollmill_ledger_captured_tokens')}",
        ),
    ),
)
FLOW = Row(
    "Flow",
    (
        Panel(
            "Throughput by topic",
            "Records that the stages read and settled.",
            Unit.RECORDS_PER_SECOND,
            (Target(_rate("rollmill_records_total", "topic"), "{{topic}}"),),
        ),
        Panel(
            "Lag by topic",
            "Records not read yet by the stage that reads the topic, and by the evaluator's groups of readers.",
            Unit.RECORDS,
            (
                Target(_sum("rollmill_lag_records", "topic"), "{{topic}}"),
                Target(_sum("rollmill_evaluator_lag_records", "reads"), "evaluator, {{reads}}"),
            ),
            thresholds=((1000, ORANGE), (10000, RED)),
        ),
        Panel(
            "Open work",
            "What waits inside the stages: sessions that have not ended, groups, steps that nobody has acknowledged.",
            Unit.NUMBER,
            (
                Target(_sum("rollmill_sessions_open"), "sessions open"),
                Target(_sum("rollmill_groups_open"), "groups open"),
                Target(_sum("rollmill_steps_queued"), "steps queued"),
            ),
        ),
        Panel(
            "Model calls",
            "Calls recorded by capture, by how they ended.",
            Unit.CALLS_PER_SECOND,
            (Target(_rate("rollmill_calls_total", "status"), "{{status}}"),),
            Form.STACKED,
        ),
        Panel(
            "Records written",
            "By the services, by topic: also the changelogs, cuts and outcomes, which no stage reads.",
            Unit.RECORDS_PER_SECOND,
            (Target(_rate("rollmill_written_records_total", "topic"), "{{topic}}"),),
        ),
        Panel(
            "Time of commits and replies, p95",
            "Transactions of the stages; until a call's record is safe; evaluations.",
            Unit.SECONDS,
            (
                Target(_quantile(0.95, "rollmill_transaction_seconds", "component"), "transaction, {{component}}"),
                Target(_quantile(0.95, "rollmill_ack_seconds"), "capture's record is safe"),
                Target(_quantile(0.95, "rollmill_evaluation_seconds"), "evaluation"),
            ),
            thresholds=((1, ORANGE), (10, RED)),
        ),
    ),
)
TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Tokens by fate",
            "Every captured token, by what became of it. From the log alone, so it survives restarts.",
            Unit.TOKENS,
            (Target(_sum("rollmill_ledger_tokens", "fate"), "{{fate}}"),),
            Form.STACKED,
        ),
        Panel(
            "Excluded tokens by reason",
            "Tokens that will never be trained. docs/building.md and docs/architecture.md explain the reasons.",
            Unit.TOKENS,
            (Target(_sum("rollmill_ledger_excluded_tokens", "reason"), "{{reason}}"),),
            Form.STACKED,
        ),
        Panel(
            "Token rates",
            "Sampled tokens that engines named, those the builder accepted, and those in micro-batches (with context).",
            Unit.TOKENS_PER_SECOND,
            (
                Target(_rate("rollmill_sampled_tokens_total"), "sampled"),
                Target(_rate("rollmill_tokens_captured_total"), "captured"),
                Target(_rate("rollmill_tokens_batched_total"), "batched"),
            ),
        ),
        Panel(
            "Ledger imbalance by kind",
            "Tokens that break the balance. All lines stay at 0.",
            Unit.TOKENS,
            (Target(_sum("rollmill_ledger_imbalance_tokens", "kind"), "{{kind}}"),),
            thresholds=((1, RED),),
        ),
        Panel(
            "Oldest pending token",
            "Time since it was sampled. `rollmill ledger --oldest 10` names the sessions that wait longest.",
            Unit.SECONDS,
            (Target(f"max(rollmill_ledger_oldest_pending_seconds{{{OWN}}})", "oldest"),),
        ),
        Panel(
            "Dead letters by reason",
            "Records that the stages set aside.",
            Unit.RECORDS,
            (Target(_sum("rollmill_dead_letters_total", "reason"), "{{reason}}"),),
            thresholds=((1, ORANGE), (100, RED)),
        ),
        Panel(
            "Dead-lettered tokens by reason",
            "Tokens that were in dead letters.",
            Unit.TOKENS,
            (Target(_sum("rollmill_ledger_dead_lettered_tokens", "reason"), "{{reason}}"),),
            Form.STACKED,
        ),
    ),
)
LEARNING = Row(
    "Learning",
    (
        Panel(
            "Reward, mean",
            "Mean reward of graded trajectories, revisions included, as the reward-merger sends them.",
            Unit.NUMBER,
            (Target(_REWARD, "reward"),),
            signed=True,
        ),
        Panel(
            "Staleness, mean",
            "Policy versions between sampling and cut, over the trained tokens; queued steps count as versions.",
            Unit.VERSIONS,
            (Target(_STALENESS, "staleness"),),
        ),
        Panel(
            "Trained tokens by staleness",
            "The same as a distribution.",
            Unit.TOKENS_PER_SECOND,
            (Target(_rate("rollmill_tokens_by_staleness_total", "versions"), "{{versions}}"),),
            Form.STACKED,
        ),
        Panel(
            "Age from sampling to hand-over",
            "From the end of a rollout's sampling to the cut of its step, and until every rank had acknowledged it.",
            Unit.SECONDS,
            (
                Target(_quantile(0.5, "rollmill_age_at_cut_seconds"), "cut, p50"),
                Target(_quantile(0.5, "rollmill_age_at_hand_over_seconds"), "acknowledged, p50"),
                Target(_quantile(0.95, "rollmill_age_at_hand_over_seconds"), "acknowledged, p95"),
            ),
        ),
        Panel(
            "Groups closed",
            "Groups that went into a step, ran out of time, or were unusable (no spread, too few grades).",
            Unit.GROUPS_PER_SECOND,
            (Target(_rate("rollmill_groups_closed_total", "state"), "{{state}}"),),
            Form.STACKED,
        ),
        Panel(
            "Steps",
            "Training steps cut so far, and those not acknowledged yet.",
            Unit.NUMBER,
            (
                Target(
                    _sum("rollmill_stage_events_total", where=', component="batcher", event="steps"'),
                    "cut since the start",
                ),
                Target(_sum("rollmill_steps_queued"), "queued"),
            ),
        ),
    ),
)

OVERVIEW = Board(
    "rollmill-overview",
    "Rollmill overview",
    "From an agent's model calls to training batches: flow, tokens, learning.",
    (AT_A_GLANCE, FLOW, TOKENS, LEARNING),
)
BOARDS = {"overview": OVERVIEW}
