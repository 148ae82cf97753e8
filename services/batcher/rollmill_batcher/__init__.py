"""The batcher: trajectories become groups, groups become steps, steps become packed micro-batches.

In: ``trajectories`` (all partitions), ``policies`` and ``acks``, by the one task of the run (rule B1).
Out: ``batches`` (safetensors, partition = data-parallel rank), ``cuts`` (every decision) and ``outcomes``
(whatever is not trained, with its reason).
State (``state.batcher``): a slim copy of every waiting trajectory by group, a marker for each closed group that
names late members, and the run's progress (next step, newest policy version, acknowledgements).
On a crash: intake is commutative and every decision is a cut, written in one transaction with its batches; the
next owner restores the state and cuts again what was not committed. Equal topics and cuts give equal bytes.
"""
