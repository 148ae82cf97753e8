"""Returns of tokens, without discount (rule A5)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def returns(
    later: npt.NDArray[np.float32], token_rewards: npt.NDArray[np.float32] | None, cu_seqlens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """[T], the sum of the token rewards of the rollout from a token on, its own included.

    Traces of a rollout follow each other in its order. ``later`` [N]: what the rollout gets after the trace, wherever
    its other traces are; where no token of the rollout has a reward of its own, the trace's reward, so that it is the
    return of each of its tokens. ``token_rewards`` [T] or None, ``cu_seqlens`` [N + 1].
    """
    lengths = np.diff(cu_seqlens)
    if token_rewards is None:
        return np.repeat(later, lengths)
    sums = np.concatenate([[0.0], np.cumsum(token_rewards, dtype=np.float64)])
    return np.asarray(np.repeat(sums[cu_seqlens[1:]] + later, lengths) - sums[:-1], dtype=np.float32)
