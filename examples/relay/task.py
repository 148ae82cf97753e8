"""The relay task: say the digit that you were just told, three times in a row.

The user says `?d` and the right reply is `d`; then a tool says `=e` and the right reply is `e`. One character is one
token, for the markers too, so that text and token ids map to each other one to one and a prompt always begins with
the prompt and the reply before it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CHARACTERS: Final = "0123456789?=uat.+-*/<>"
VOCABULARY_SIZE: Final = len(CHARACTERS)
TURNS: Final = 3

_IDS: Final = {character: token_id for token_id, character in enumerate(CHARACTERS)}
_ROLES: Final = {"user": "u", "assistant": "a", "tool": "t"}

END_OF_TURN: Final = "."
END_OF_TURN_ID: Final = CHARACTERS.index(END_OF_TURN)


class UnknownTextError(ValueError):
    """A message that the vocabulary or the chat template has no token for."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str


def encode(text: str) -> list[int]:
    """One token id per character; raises `UnknownTextError` naming the first character that is no token."""
    unknown = next((character for character in text if character not in _IDS), None)
    if unknown is not None:
        raise UnknownTextError(f"{unknown!r} is not in the vocabulary {CHARACTERS!r}")
    return [_IDS[character] for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """The inverse of `encode`."""
    return "".join(CHARACTERS[token_id] for token_id in token_ids)


def reply_text(token_ids: Sequence[int]) -> str:
    """What a client reads of a sampled reply: everything but the end-of-turn token."""
    return decode(token_ids).removesuffix(END_OF_TURN)


def reply_ids(text: str, finish_reason: str) -> list[int]:
    """The ids that must have been sampled for a reply: a reply that stopped ends with the end-of-turn token."""
    return encode(text) + [END_OF_TURN_ID] * (finish_reason == "stop")


def render(messages: Sequence[Message]) -> list[int]:
    """The prompt for the next reply.

    Each message is its role's marker, its content and the end-of-turn token; the assistant's marker comes last. A
    reply that was cut by its length gets the end-of-turn token here, so for a session the next prompt is always the
    last prompt + the sampled reply + (the end-of-turn token if the reply has none) + the new message.
    """
    closed = "".join(_role_marker(message.role) + _content(message) + END_OF_TURN for message in messages)
    return encode(closed + _ROLES["assistant"])


def _role_marker(role: str) -> str:
    if role not in _ROLES:
        raise UnknownTextError(f"the chat template knows the roles {', '.join(_ROLES)}, not {role!r}")
    return _ROLES[role]


def _content(message: Message) -> str:
    if END_OF_TURN in message.content:
        raise UnknownTextError(f"{END_OF_TURN!r} ends a turn and cannot be part of a message")
    return message.content


def group_digits(seed: int, group: int) -> str:
    """The digits of a group, one per turn: every session of the group relays the same ones."""
    rng = random.Random(f"relay/{seed}/{group}")
    return "".join(rng.choices("0123456789", k=TURNS))


def group_id(group: int) -> str:
    return f"relay-{group:06d}"


def question(turn: int, digit: str) -> Message:
    """What the agent tells the model in a turn: the user asks first, later turns are answers of the tool."""
    return Message("user", f"?{digit}") if turn == 0 else Message("tool", f"={digit}")


def is_right(reply: str, digit: str) -> bool:
    return reply == digit


def reward(replies: Sequence[str], digits: str) -> float:
    """The share of right turns; a turn that never happened is wrong."""
    return sum(map(is_right, replies, digits)) / len(digits)
