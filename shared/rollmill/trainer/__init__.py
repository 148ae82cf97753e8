"""The trainer's side: steps of batches come in, acknowledgements and policy versions go out.

In: ``batches`` (one partition per data-parallel rank), ``policies``. Out: ``outcomes`` and ``acks`` with the position
in one transaction per step, and ``policies``. State: the position after the last acknowledged step, committed and in
the trainer's own checkpoint (`BatchStream.state_dict`). After a crash the steps that were not acknowledged come again,
bit-identical.

The import needs no torch; handing tensors over does (``pip install rollmill[trainer]``).
"""

from rollmill.trainer.batches.mini_batch import MiniBatch
from rollmill.trainer.batches.staleness_filter import StaleAction
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.stream import BatchStream, NoBatch
from rollmill.trainer.layouts.arrays import PackedArrays, PaddedArrays
from rollmill.trainer.layouts.micro_batch import MicroBatch, PaddedMicroBatch
from rollmill.trainer.policy.capture_client import Captures, CaptureUnreachableError
from rollmill.trainer.policy.publisher import PolicyPublisher
from rollmill.trainer.trajectories.stream import Rollout, TrajectoryStream

__all__ = [
    "BatchStream",
    "CaptureUnreachableError",
    "Captures",
    "MicroBatch",
    "MiniBatch",
    "NoBatch",
    "PackedArrays",
    "PaddedArrays",
    "PaddedMicroBatch",
    "PolicyPublisher",
    "Rollout",
    "StaleAction",
    "Step",
    "TrajectoryStream",
]
