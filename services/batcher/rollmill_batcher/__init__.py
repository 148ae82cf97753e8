"""The batcher: trajectories become groups, groups become steps, steps become packed micro-batches.

In: ``trajectories`` (all partitions), ``policies`` and ``acks``, by the one task of the run (rule B1).
Out: ``batches`` (safetensors, partition = data-parallel rank), ``cuts`` (every decision), ``refills`` (groups to sample
again) and ``outcomes`` (tokens that are not trained, with the reason).
State (``state.batcher``): a slim copy of every waiting trajectory by group, a marker for each closed group that
recognises late members, the steps that are not acknowledged, and the run's progress (next step, newest policy version,
acknowledgements).
On a crash: intake is commutative and every decision is a cut, written in one transaction with its batches; the
next owner restores the state and cuts again what was not committed. Equal topics and cuts give equal bytes.

From the top down, each importing only what comes after it: `app` (the service), `stage` (intake and punctuation),
beside it `settings` and `consumer_mode` (batches or trajectories for the trainer); `steps` (from groups to a step's
records); `state` (keys and values); `progress` (how far the run is); `groups` (one group: verdicts, staleness, and the
configuration `BatcherConfig`); `sizes` (bytes of a trace in a record).
"""
