"""The Flux trajectory API as a view of Rollmill's traces: Flux's names, fields and methods, the pipeline's concepts.

A `Trajectory` here is one trace (prompt and response, at token). A `PolicyVersion` is a version of the pipeline with
Flux's names: ``version_id`` is the version, ``epoch`` the epoch, and staleness is `rollmill.models.staleness`. Ungraded
traces have no view, because Flux's reward is a plain number.

trajectory: one trace and its status. versions: policy versions and version segments. partial: generations that were cut
off. batch: padded rows. buffer: storage by age, with seeded draws. views: from the pipeline's trajectories. May import
`rollmill.models` and errors only. The import needs no torch; `TrajectoryBatch.to_tensors` does.
"""

from rollmill.trainer.flux.batch import TrajectoryBatch
from rollmill.trainer.flux.buffer import TrajectoryBuffer
from rollmill.trainer.flux.partial import PartialTrajectory
from rollmill.trainer.flux.trajectory import AlignmentError, Trajectory, TrajectoryStatus
from rollmill.trainer.flux.versions import PolicyVersion, VersionSegment
from rollmill.trainer.flux.views import view_of, views_of

__all__ = [
    "AlignmentError",
    "PartialTrajectory",
    "PolicyVersion",
    "Trajectory",
    "TrajectoryBatch",
    "TrajectoryBuffer",
    "TrajectoryStatus",
    "VersionSegment",
    "view_of",
    "views_of",
]
