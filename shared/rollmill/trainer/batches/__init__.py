"""The steps of one data-parallel rank. May import layouts, policy.history and the top of `rollmill.trainer`.

stream: `BatchStream`, synchronous. rank_consumer: the same on an event loop, with Kafka. reader, step_assembly: records
to whole steps. rank_assignment, resharding: partitions of a rank, steps for another number of ranks. rank_agreement:
the step at which all ranks go on. state: what a checkpoint and a commit keep. staleness_filter: what of a step is too
old. step, mini_batch, minibatch_split: what the training loop gets. acknowledgement: what is written when it is done.
"""
