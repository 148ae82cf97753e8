"""The closed loop itself: agents, trainer and those who look on, until the goal, and then the drain."""

import asyncio
import signal
import time
from dataclasses import dataclass
from typing import Final

import httpx
from openai import DefaultAsyncHttpxClient

from relay.admission import Admission
from relay.agents import Crew, Transcript, make_client
from relay.capture_sessions import CaptureSessions
from relay.display import Board, Display
from relay.model import RelayModel
from relay.options import Options
from relay.pacing import EngineVersions, SlowTool, run_groups, tools
from relay.pipeline import GROUP_SIZE, GROUPS_AT_ONCE, GROUPS_PER_STEP, MAX_STALENESS, STEPS_AHEAD, Pipeline
from relay.report import LAST_STEPS, last_mean
from relay.training import Lessons, Trainer
from relay.transcripts import AgentsRecord
from relay.watch import Watcher
from rollmill.errors import FatalError
from rollmill.ops.ledger import Balance, settled_balance
from rollmill.settings import KafkaSettings

_SETTLE_SECONDS: Final = 60.0
_STALL_SECONDS: Final = 90.0
_HTTP: Final = httpx.Limits(max_connections=None, max_keepalive_connections=256)


@dataclass(frozen=True)
class Played:
    """What a loop leaves behind."""

    record: AgentsRecord
    lessons: Lessons
    balance: Balance
    stale: int
    """Trajectories excluded at a cut because they were too old."""
    seconds: float
    """From the first session to the last disposition."""
    agents_seconds: float


class Loop:
    """Use once. Everything of it happens in `play`."""

    def __init__(
        self, options: Options, settings: KafkaSettings, pipeline: Pipeline, model: RelayModel, display: Display
    ) -> None:
        self._options = options
        self._settings = settings
        self._pipeline = pipeline
        self._display = display
        self._stop = asyncio.Event()
        self._record = AgentsRecord()
        self._lessons = Lessons()
        self._admission = Admission(GROUPS_PER_STEP * (1 + STEPS_AHEAD), GROUPS_AT_ONCE, GROUP_SIZE)
        self._watcher = Watcher(settings, self._admission.settled)
        self._board = Board(options.steps, self._lessons, self._record, self._watcher.tally)
        self._loop = asyncio.get_running_loop()
        self._trainer = Trainer(settings, model, pipeline.engine, self._lessons, self._after_step, options)

    async def play(self) -> Played:
        """Until the goal or the last step, or SIGINT; then the drain. What fails in it ends all of it."""
        self._loop.add_signal_handler(signal.SIGINT, self._stop.set)
        async with asyncio.TaskGroup() as tasks:
            aside = [
                tasks.create_task(work)
                for work in (self._watcher.run(), self._alarm(), self._patience(), self._display.follow(self._board))
            ]
            training = tasks.create_task(asyncio.to_thread(self._trainer.run))
            try:
                played = await self._work_and_drain()
            finally:
                self._trainer.no_more.set()
                self._trainer.finished.set()
            await training
            for task in aside:
                task.cancel()
        return played

    async def _work_and_drain(self) -> Played:
        began = time.monotonic()
        await self._agents()
        worked = time.monotonic() - began
        balance = await self._drained()
        stale = len(self._watcher.tally.stale)
        return Played(self._record, self._lessons, balance, stale, time.monotonic() - began, worked)

    async def _agents(self) -> None:
        """Groups of sessions, until the stop; those that run are finished, and slow tools let go."""
        async with (
            httpx.AsyncClient(
                base_url=self._pipeline.capture, headers=self._pipeline.headers, limits=_HTTP, timeout=60
            ) as capture,
            httpx.AsyncClient(base_url=self._pipeline.engine, limits=_HTTP) as engine,
            make_client(DefaultAsyncHttpxClient()) as client,
        ):
            slow = SlowTool(EngineVersions(engine), MAX_STALENESS, self._stop)
            crew = Crew(
                client,
                CaptureSessions(capture, GROUP_SIZE, self._options.sabotage),
                tools(slow),
                self._note,
                seed=self._options.seed,
                group_size=GROUP_SIZE,
                sabotage=self._options.sabotage,
            )
            await run_groups(crew, self._admission.admit, self._stop)

    def _note(self, transcript: Transcript) -> None:
        self._record.add(transcript)
        if transcript.error is not None:
            self._display.say(f"session {transcript.session_id} failed: {transcript.error}")
        self._admission.ended(transcript)

    def _after_step(self) -> None:
        """Called in the trainer's thread."""
        self._loop.call_soon_threadsafe(self._stop_at_goal)

    def _stop_at_goal(self) -> None:
        rewards = self._lessons.rewards
        reached = len(rewards) >= LAST_STEPS and (last_mean(rewards) or 0.0) >= self._options.goal
        if reached or len(rewards) >= self._options.steps:
            self._stop.set()

    async def _drained(self) -> Balance:
        """Every session gets its reward, every token its end; the balance is read from the log, whatever came of it."""
        self._board.phase = "draining"
        self._display.say(f"draining after {len(self._lessons.steps)} steps")
        await self._watcher.until(lambda tally: len(tally.rewarded) >= len(self._record), _SETTLE_SECONDS)
        self._trainer.no_more.set()
        await self._watcher.until(lambda tally: not tally.unsettled, _SETTLE_SECONDS)
        return await settled_balance(self._settings, _SETTLE_SECONDS)

    async def _alarm(self) -> None:
        if self._pipeline.supervisor is not None:
            raise FatalError(await self._pipeline.supervisor.fatal_exit())

    async def _patience(self) -> None:
        """A run of which every token is excluded would go on for ever."""
        while not self._stop.is_set():
            trained = len(self._lessons.steps)
            await asyncio.sleep(_STALL_SECONDS)
            if len(self._lessons.steps) == trained and not self._stop.is_set():
                raise FatalError(f"no step was trained in {_STALL_SECONDS:g} s; {self._board.line()}")
