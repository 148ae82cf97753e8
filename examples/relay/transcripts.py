"""What the agents' own record says that training must have seen. It owes nothing to what anybody captured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mean, stdev

from relay.agents import Transcript, Turn
from relay.task import Message, render, reply_ids

_EPS = 1e-4
"""Added to the standard deviation: the batcher's default."""


@dataclass(frozen=True)
class ExpectedTrace:
    """A session as one sequence: ids and mask (1 = sampled) of the same length; the prompt is what comes first."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    prompt_length: int


def expected_trace(turns: tuple[Turn, ...]) -> ExpectedTrace:
    """The ids that the model read and sampled, rebuilt from the text of the turns. At least one turn is needed."""
    messages: list[Message] = []
    ids: list[int] = []
    mask: list[int] = []
    for number, turn in enumerate(turns):
        messages.append(Message("tool" if number else "user", turn.asked))
        prompt, sampled = render(messages), reply_ids(turn.text, turn.finish_reason)
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(sampled)
        ids = prompt + sampled
        messages.append(Message("assistant", turn.text))
    return ExpectedTrace(tuple(ids), tuple(mask), mask.index(1))


@dataclass
class AgentsRecord:
    """All transcripts of a run, by session and by the group they truly belong to."""

    _sessions: dict[str, Transcript] = field(default_factory=dict)
    _groups: dict[int, dict[int, Transcript]] = field(default_factory=dict)

    def add(self, transcript: Transcript) -> None:
        self._sessions[transcript.session_id] = transcript
        self._groups.setdefault(transcript.group, {})[transcript.member] = transcript

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Transcript]:
        return iter(list(self._sessions.values()))

    @property
    def sessions(self) -> Mapping[str, Transcript]:
        return self._sessions

    @property
    def calls(self) -> int:
        """Model calls that were answered."""
        return sum(len(transcript.turns) for transcript in self)

    @property
    def tokens(self) -> int:
        """Sampled tokens of the replies that the agents read."""
        return sum(sum(expected_trace(one.turns).mask) for one in self if one.turns)

    @property
    def errors(self) -> list[Transcript]:
        return [transcript for transcript in self if transcript.error is not None]

    def advantage(self, transcript: Transcript) -> float:
        """The reward against the group's: (reward - mean) / (sample standard deviation + eps), GRPO.

        Every member that said anything is in the statistics, whether it was trained or not; equal rewards give 0.
        """
        rewards = [one.reward for one in self._groups[transcript.group].values() if one.turns]
        if min(rewards) == max(rewards):
            return 0.0
        return (transcript.reward - mean(rewards)) / (stdev(rewards) + _EPS)
