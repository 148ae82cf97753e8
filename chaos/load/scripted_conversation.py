"""The known content of every session, token by token, computed without the code under test. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from rollmill.testing.http.canned_server import CannedRequest, CannedResponse
from rollmill.testing.http.scripted_engine import END, ScriptedEngine, encode, logprob, render

TURNS = 3
VOCABULARY = ("iron", "roll", "mill", "sheet", "slab", "hot", "cold", "gauge", "strip", "coil")


@dataclass(frozen=True)
class ScriptedConversation:
    """A session of ``TURNS`` turns, fully determined by its id."""

    session_id: str
    group_id: str
    member: int

    @property
    def reward(self) -> float:
        return float(self.member % 2)

    def question(self, turn: int) -> str:
        return self.session_id if turn == 0 else f"go on, {turn}"

    @cached_property
    def replies(self) -> tuple[str, ...]:
        return replies(self.session_id)

    def messages(self, turn: int) -> list[dict[str, str]]:
        """The messages of a turn's request, the history included."""
        history: list[dict[str, str]] = []
        for before in range(turn):
            history.append({"role": "user", "content": self.question(before)})
            history.append({"role": "assistant", "content": self.replies[before]})
        return [*history, {"role": "user", "content": self.question(turn)}]

    def prompt(self, turn: int) -> list[int]:
        return encode(render(self.messages(turn), ()))

    def reply_ids(self, turn: int) -> list[int]:
        return [*encode(self.replies[turn]), END]

    def turn_of(self, prompt: list[int]) -> int | None:
        """The turn that has exactly this prompt."""
        return next((turn for turn in range(TURNS) if self.prompt(turn) == prompt), None)

    def sequence(self, turns: int) -> list[int]:
        """Prompt and replies of the first ``turns`` turns, as one trace."""
        return [*self.prompt(turns - 1), *self.reply_ids(turns - 1)]

    def positions(self, turn: int) -> range:
        """The positions of a turn's reply in a trace that contains it."""
        start = len(self.prompt(turn))
        return range(start, start + len(self.reply_ids(turn)))

    def log_probs(self, turn: int) -> list[float]:
        return [logprob(position, token) for position, token in enumerate(self.reply_ids(turn))]


def replies(session_id: str) -> tuple[str, ...]:
    """The model's reply in each turn."""
    rng = random.Random(session_id)
    return tuple(
        f"{session_id} {turn}: " + " ".join(rng.choices(VOCABULARY, k=rng.randint(1, 6))) for turn in range(TURNS)
    )


def respond(request: CannedRequest) -> CannedResponse:
    """The engine: the conversation's first message determines its replies, so the same request has the same reply."""
    messages = (request.body or {}).get("messages") or [{}]
    return ScriptedEngine(replies(str(messages[0].get("content")))).answer(request)
