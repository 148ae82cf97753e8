"""Returns of tokens, without discount (RULES A5)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def returns(
    rewards: npt.NDArray[np.float32], token_rewards: npt.NDArray[np.float32] | None, cu_seqlens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """[T], the sum of the token rewards from a token on to the end of its trace, its own included.

    Where no token has a reward of its own, the trace's reward counts as given at its end, so it is the return of
    each of its tokens. ``rewards`` [N], ``token_rewards`` [T] or None, ``cu_seqlens`` [N + 1].
    """
    lengths = np.diff(cu_seqlens)
    if token_rewards is None:
        return np.repeat(rewards, lengths)
    sums = np.concatenate([[0.0], np.cumsum(token_rewards, dtype=np.float64)])
    return np.asarray(np.repeat(sums[cu_seqlens[1:]], lengths) - sums[:-1], dtype=np.float32)
