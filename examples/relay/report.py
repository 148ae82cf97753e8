"""What a run came to, in numbers, and the checks that it has to pass."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Final

LAST_STEPS: Final = 5
GAP_LIMIT: Final = 1e-3
"""Nats: the engine samples row by row what the trainer computes packed, so the last bits differ."""


@dataclass(frozen=True)
class Report:
    """The line of ``--json``. Tokens are sampled tokens; rewards are means over the trajectories of a step."""

    reward_first: float | None
    reward_last: float | None
    """Mean of the last five steps."""
    steps: int
    policy_version: int
    sessions: int
    calls: int
    calls_per_second: float
    seconds: float
    """From the first session to the last disposition."""
    seconds_in_all: float
    tokens_read: int
    """Sampled tokens of the replies that the agents read, by their own record."""
    tokens_captured: int
    tokens_trained: int
    tokens_excluded: dict[str, int]
    """By reason."""
    tokens_dead_lettered: int
    tokens_pending: int
    """Counted from what is held."""
    tokens_lost: int
    tokens_doubled: int
    tokens_uncaptured: int
    """Given a disposition, but never captured."""
    stale_trajectories: int
    """Excluded at a cut because they were too old."""
    agent_errors: int
    restarts: int
    """Of services, beyond their first start."""
    logprob_gap_max: float
    logprob_gap_tokens: int
    oracle_mismatches: int
    oracle_mismatches_by_kind: dict[str, int]
    layout: str
    ranks: int
    seed: int
    sabotage: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def rise(self) -> float:
        """Of the reward; below every demand where no step was trained."""
        if self.reward_first is None or self.reward_last is None:
            return float("-inf")
        return self.reward_last - self.reward_first

    @property
    def accounted(self) -> int:
        """Tokens that were trained or excluded or set aside, or are pending; all that was captured."""
        excluded = sum(self.tokens_excluded.values())
        return self.tokens_trained + excluded + self.tokens_dead_lettered + self.tokens_pending


def last_mean(rewards: Sequence[float]) -> float | None:
    """Mean of the last five; None of none."""
    return mean(rewards[-LAST_STEPS:]) if rewards else None


def failures(report: Report, *, min_rise: float) -> list[str]:
    """The checks that the run fails, by name; ``min_rise`` 0 asks for no rise of the reward."""
    return [f"{name}: {detail}" for name, passed, detail in _checks(report, min_rise) if not passed]


def _checks(report: Report, min_rise: float) -> Iterator[tuple[str, bool, str]]:
    yield from _ledger_checks(report)
    yield from _oracle_checks(report)
    rise = "nothing was trained" if report.reward_first is None else f"the reward rose by {report.rise:.3f}"
    yield "reward_rise", min_rise == 0 or report.rise >= min_rise, f"{rise}, at least {min_rise} is asked"
    yield "stale", report.stale_trajectories > 0, "no trajectory was excluded as stale at a cut"


def _ledger_checks(report: Report) -> Iterator[tuple[str, bool, str]]:
    captured, accounted = report.tokens_captured, report.accounted
    yield "tokens_lost", report.tokens_lost == 0, f"{report.tokens_lost} captured tokens have no end and no place"
    yield "tokens_doubled", report.tokens_doubled == 0, f"{report.tokens_doubled} tokens were disposed of twice"
    yield "tokens_uncaptured", report.tokens_uncaptured == 0, f"{report.tokens_uncaptured} were never captured"
    yield "balance", captured == accounted, f"{captured} tokens captured, {accounted} accounted for"
    yield "trained", report.tokens_trained > 0, "no token was trained"
    # An agent whose call failed cannot know what was sampled for it.
    read = report.agent_errors > 0 or report.tokens_read == captured
    yield "tokens_read", read, f"the agents read {report.tokens_read} sampled tokens, {captured} were captured"


def _oracle_checks(report: Report) -> Iterator[tuple[str, bool, str]]:
    gap, compared = report.logprob_gap_max, report.logprob_gap_tokens
    yield "logprob_gap_max", gap < GAP_LIMIT, f"{gap:.2e} nats between a label's weights and the captured log-prob"
    all_compared = compared == report.tokens_trained
    yield "logprob_gap_tokens", all_compared, f"{compared} tokens compared, {report.tokens_trained} trained"
    kinds = ", ".join(f"{kind} {count}" for kind, count in report.oracle_mismatches_by_kind.items())
    yield "oracle_mismatches", report.oracle_mismatches == 0, kinds


def summary(report: Report) -> str:
    """The report for people."""
    excluded = ", ".join(f"{reason} {tokens}" for reason, tokens in report.tokens_excluded.items()) or "none"
    first, last = report.reward_first or 0.0, report.reward_last or 0.0
    tokens = (
        f"tokens: {report.tokens_captured} captured = {report.tokens_trained} trained + excluded ({excluded}) + "
        f"{report.tokens_dead_lettered} dead-lettered + {report.tokens_pending} pending; "
        f"{report.tokens_lost} lost, {report.tokens_doubled} doubled"
    )
    oracle = (
        f"log-probs: largest gap {report.logprob_gap_max:.1e} over {report.logprob_gap_tokens} tokens; "
        f"{report.oracle_mismatches} mismatches with the agents' own record"
    )
    learned = f"reward {first:.3f} -> {last:.3f} in {report.steps} steps, {report.seconds_in_all:.0f} s in all"
    calls = f"{report.sessions} sessions, {report.calls} calls, {report.calls_per_second:.0f} calls/s"
    return f"{learned}\n{calls}\n{tokens}\n{oracle}"
