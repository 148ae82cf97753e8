"""How a run looks while it runs: a live picture on a terminal, plain lines elsewhere."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relay.report import last_mean
from relay.training import Lessons
from relay.transcripts import AgentsRecord
from relay.watch import WATCHED, Tally
from rollmill.models import Disposition

_BARS: Final = "▁▂▃▄▅▆▇█"
_LIVE_SECONDS: Final = 0.25
_LINE_SECONDS: Final = 5.0
_EVENTS: Final = 4


@dataclass
class Board:
    """Everything that there is to see of a run."""

    target: int
    """Steps at most."""
    lessons: Lessons
    record: AgentsRecord
    tally: Tally
    phase: str = "the agents work"
    began: float = field(default_factory=time.monotonic)

    @property
    def calls_per_second(self) -> float:
        return self.record.calls / max(time.monotonic() - self.began, 1e-9)

    def line(self) -> str:
        """The whole board in one line."""
        rewards, tally = self.lessons.rewards, self.tally
        now = last_mean(rewards)
        parts = [
            f"step {len(rewards)}/{self.target}",
            f"reward {'-' if now is None else f'{now:.2f}'} {sparkline(rewards)}",
            f"version {self.lessons.version}",
            f"{len(self.record)} sessions, {self.record.calls} calls, {self.calls_per_second:.0f}/s",
            f"tokens: {tally.tokens[Disposition.TRAINED]} trained, {tally.unsettled} under way",
            f"dropped: {_counts(tally.excluded)}",
        ]
        return " | ".join(parts)


class Display(Protocol):
    def say(self, line: str) -> None:
        """One event, as it happens."""

    async def follow(self, board: Board) -> None:
        """Show the board until cancelled."""


@dataclass
class PlainLines:
    """Lines for a pipe or a file."""

    console: Console

    def say(self, line: str) -> None:
        self.console.out(line, highlight=False)

    async def follow(self, board: Board) -> None:
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            self.say(board.line())


@dataclass
class LivePicture:
    """A picture that changes in place."""

    console: Console
    _events: list[str] = field(default_factory=list)
    _live: Live | None = None

    def say(self, line: str) -> None:
        if self._live is None:
            self.console.out(line, highlight=False)
        else:
            self._events.append(line)

    async def follow(self, board: Board) -> None:
        with Live(console=self.console, auto_refresh=False) as live:
            self._live = live
            try:
                while True:
                    live.update(picture(board, self._events[-_EVENTS:]), refresh=True)
                    await asyncio.sleep(_LIVE_SECONDS)
            finally:
                self._live = None


def sparkline(rewards: Sequence[float]) -> str:
    """One character for each reward between 0 and 1."""
    return "".join(_BARS[min(int(max(reward, 0.0) * len(_BARS)), len(_BARS) - 1)] for reward in rewards)


def picture(board: Board, events: Sequence[str]) -> RenderableType:
    steps = len(board.lessons.steps)
    head = Table.grid(padding=(0, 2))
    head.add_row(f"step {steps}, drains at {board.target}", ProgressBar(board.target, steps, width=40), board.phase)
    rewards = board.lessons.rewards
    head.add_row("reward", Text(sparkline(rewards), style="green"), f"{last_mean(rewards) or 0.0:.3f}")
    speed = f"{len(board.record)} sessions, {board.record.calls} calls, {board.calls_per_second:.0f} calls/s"
    head.add_row(f"policy version {board.lessons.version}", speed)
    tables = Columns([_topics(board.tally), _tokens(board.tally)], padding=(0, 4))
    return Panel(Group(head, Text(), tables, *map(Text, events)), title="rollmill: relay")


def _topics(tally: Tally) -> Table:
    table = Table("topic", "records", box=None)
    for topic in WATCHED:
        table.add_row(topic.name, str(tally.records[topic.name]))
    return table


def _tokens(tally: Tally) -> Table:
    table = Table("sampled tokens", "", box=None)
    table.add_row("captured", str(tally.tokens[Disposition.CAPTURED]))
    table.add_row("trained", str(tally.tokens[Disposition.TRAINED]))
    for reason, tokens in sorted(tally.excluded.items()):
        table.add_row(f"dropped: {reason}", str(tokens))
    table.add_row("dead-lettered", str(tally.tokens[Disposition.DEAD_LETTERED]))
    table.add_row("under way", str(tally.unsettled))
    return table


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {tokens}" for reason, tokens in sorted(reasons.items())) or "none"


def make_display(console: Console, *, live: bool) -> Display:
    return LivePicture(console) if live else PlainLines(console)
