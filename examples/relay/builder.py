"""A builder that puts the loss mask one token late, for the demo's own test: ``relay.builder:ShiftedMaskBuilder``."""

import numpy as np

from rollmill.models import CompletionSession, StrategySpec, Trace, Trajectory
from rollmill.strategies import BaseTrajectoryBuilder, builder_registry


class ShiftedMaskBuilder(BaseTrajectoryBuilder):
    """What ``prefix_merging`` builds, with each trace's mask and log-probs rolled by one: lengths and sums agree."""

    def build(self, session: CompletionSession) -> Trajectory:
        honest = builder_registry().create(StrategySpec(strategy="prefix_merging")).build(session)
        return honest.replace(traces=tuple(map(_shifted, honest.traces)))


def _shifted(trace: Trace) -> Trace:
    log_probs = None if trace.response_logprobs is None else np.roll(trace.response_logprobs, 1)
    return trace.replace(loss_mask=np.roll(trace.loss_mask, 1), response_logprobs=log_probs)
