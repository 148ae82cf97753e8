"""The demo's trainer: the loop of ``grpo_minimal``, watched, in a thread of its own."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import httpx
import torch

from grpo_minimal import train
from relay.faulty_stream import make_stream
from relay.gap import LogProbGap
from relay.learning import make_optimizer, packed_log_probs
from relay.model import RelayModel, to_bytes
from relay.options import Options
from relay.oracle import TrainedStep, trained_step
from relay.ranks import LAYOUTS, RankStreams
from rollmill.settings import KafkaSettings
from rollmill.trainer import BatchStream, NoBatch, PolicyPublisher, Step

_WAIT_SECONDS: Final = 0.25


@dataclass
class Lessons:
    """What was trained so far. Written by the trainer's thread, read by others."""

    steps: list[TrainedStep] = field(default_factory=list)
    gap: LogProbGap = field(default_factory=LogProbGap)
    version: int = 0

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [step.reward for step in list(self.steps)]


@dataclass(frozen=True)
class Trainer:
    """``told`` is called in the trainer's thread after each step."""

    settings: KafkaSettings
    model: RelayModel
    engine: str
    """Base URL."""
    lessons: Lessons
    told: Callable[[], None]
    options: Options = field(default_factory=Options)
    no_more: threading.Event = field(default_factory=threading.Event)
    """Set it when no more trajectories will come."""
    finished: threading.Event = field(default_factory=threading.Event)
    """Set it to end `run`."""

    def run(self) -> None:
        """Train until ``finished``."""
        with (
            httpx.Client(base_url=self.engine) as http,
            PolicyPublisher(settings=self.settings) as publisher,
            RankStreams.open(self._stream, self.options.ranks) as stream,
        ):
            self.lessons.gap.weights.keep(0, self.model)
            publisher.announce(0)
            hand_over = partial(self._hand_over, http)
            learn = partial(self._learn, stream, publisher, make_optimizer(self.model), hand_over)
            learn(self.no_more)
            stream.end_of_stream()
            learn(self.finished)

    def _learn(
        self,
        stream: RankStreams,
        publisher: PolicyPublisher,
        optimizer: torch.optim.Optimizer,
        hand_over: Callable[[int], None],
        end: threading.Event,
    ) -> None:
        """Train until ``end``, which is looked at also while no step comes."""
        while not end.is_set():
            with suppress(NoBatch):
                train(
                    stream,
                    publisher,
                    self.model,
                    optimizer,
                    log_probs=partial(packed_log_probs, self.model),
                    hand_over=hand_over,
                    after_step=self._note,
                    until=end.is_set,
                    timeout=_WAIT_SECONDS,
                    layout=LAYOUTS[self.options.layout],
                )

    def _stream(self, rank: int) -> BatchStream:
        return make_stream(self.settings, self.options.sabotage, rank, self.options.ranks)

    def _hand_over(self, http: httpx.Client, version: int) -> None:
        """Returns once the engine samples with the new weights; a copy is kept for the comparison of log-probs."""
        self.lessons.gap.weights.keep(version, self.model)
        weights = to_bytes(self.model.state_dict())
        http.post("/admin/weights", params={"version": version}, content=weights).raise_for_status()
        self.lessons.version = version

    def _note(self, step: Step, _loss: float) -> None:
        self.lessons.gap.compare(step.arrays)
        self.lessons.steps.append(trained_step(step))
        self.told()
