"""The action ``mask``: of a trace that a weight update has split, only the tokens inside the limit train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollmill.models import PolicyVersion, TokenRange, Trace
from rollmill_batcher.groups.staleness import UNANNOUNCED


@dataclass(frozen=True)
class Masked:
    """``trace`` with mask 0 at stale tokens; ``fresh`` and ``stale`` part the units of the trace between them."""

    trace: Trace
    fresh: tuple[TokenRange, ...]
    stale: tuple[TokenRange, ...]


def masked(trace: Trace, is_stale: Callable[[PolicyVersion], bool]) -> Masked:
    """Units never span versions, so a unit is stale as a whole or not at all."""
    units = trace.units()
    kept = np.logical_not(_stale_tokens(trace, is_stale))
    if kept.all():
        return Masked(trace, units, ())
    mask = trace.loss_mask * kept.astype(np.uint8)
    fresh = tuple(unit for unit in units if not is_stale(unit.version))
    stale = tuple(unit for unit in units if is_stale(unit.version))
    return Masked(trace.replace(loss_mask=mask), fresh, stale)


def _stale_tokens(trace: Trace, is_stale: Callable[[PolicyVersion], bool]) -> npt.NDArray[np.bool_]:
    """[r]"""
    if not trace.versions:
        return np.full(len(trace.response_ids), is_stale(UNANNOUNCED))
    flags = [run.version is not None and is_stale(run.version) for run in trace.versions]
    return np.repeat(np.array(flags), [run.length for run in trace.versions])
