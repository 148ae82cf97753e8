"""Tools for operators, which work from the topics alone; private. May import the pipeline's runtime, and no service.

ledger: whether every captured token is accounted for. dlq: dead letters, replayed or dropped. stopped_tasks: tasks over
their limit of dead letters. replay: a run's log processed again with other rules; it finds the services' stages by
entry points.
"""
