"""The trainer's side: steps of batches come in, acknowledgements and policy versions go out.

In: ``batches`` (one partition per data-parallel rank), ``policies``. Out: ``outcomes`` and ``acks`` with the position
in one transaction per step, and ``policies``. State: the position after the last acknowledged step, committed and in
the trainer's own checkpoint (`BatchStream.state_dict`). After a crash the steps that were not acknowledged come again,
bit-identical.

- batches/: `BatchStream`, the steps of one rank; trajectories/: `TrajectoryStream`, for trainers that batch themselves.
- layouts/: arrays and tensors of a micro-batch; policy/: `PolicyPublisher`, `Captures`; flux/: the Flux API.
- producer_records, transactional_writer, committed_offsets: what is written to Kafka, by whom, and read back.
- consumer_mode: one consumer of record per run; event_loop_thread: makes the outside synchronous.
- dataset, device: torch's dataset and copies to a device; these two alone import torch.

May import models, codec, topics, settings, errors and `rollmill.runtime` (kafka, claim_check, telemetry), no stream
engine and no service. The import needs no torch; tensors do (``pip install rollmill[trainer]``).
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
