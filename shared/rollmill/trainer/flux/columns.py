"""Per-token lists of a trajectory, brought to the length of its tokens, or refused."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollmill.errors import InvalidInputError


class AlignmentError(InvalidInputError, ValueError):
    """Values that belong to no token, or tokens of which nobody knows whether they are prompt or response."""


class Lengths(Protocol):
    """What the alignment of a trajectory is checked against."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def total_length(self) -> int: ...


def at_token(owner: Lengths, name: str, values: list[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """[T], value *i* belongs to token *i*. A list over the response alone is put behind the prompt, which gets zeros.

    Raises AlignmentError for any other length.
    """
    total, prompt = owner.total_length, owner.prompt_length
    array = np.asarray(values, dtype=dtype)
    if len(array) == total:
        return array
    if len(array) != total - prompt:
        raise AlignmentError(
            f"trajectory {owner.id!r}: {name} has {len(array)} values for {total} tokens ({prompt} of the prompt)"
        )
    return np.concatenate([np.zeros(prompt, dtype), array])
