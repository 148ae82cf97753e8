"""Replay: a run's log read again with other rules, into topics of another prefix.

In: `completions`, and `evaluations`, `policies` and `acks` as they were recorded, of a live prefix, which is only read:
no group, no commit, no transactional id of it is used. Out: the topics of the new prefix, written by the services' own
stages, driven here one record after the other, and a comparison of both runs. Time is event time alone, so the same log
with the same rules gives the same records. State: the stages' own, in memory and in the changelogs of the new prefix.
On a crash the new prefix is left half written: replay into another one.

Order. Every partition of `completions` is built in its own order; timers are records of the log already.
Evaluations are merged in the order of their event times. The batcher takes trajectories at the event time of their
reward, announcements at theirs, and cuts are looked at every ``timer_seconds`` of event time. The recorded
acknowledgements of rank 0 are the trainer's pace: at each the oldest step in hand is finished; when there are no more
of them, every step is finished at once. What is unfinished when the log ends stays pending, as in the live run.
"""

from rollmill.ops.replay.comparison import Comparison
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.run import replay

__all__ = ["Comparison", "Plan", "replay"]
