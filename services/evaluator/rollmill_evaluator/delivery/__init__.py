"""What is done with each record: an evaluation is published, or a webhook is called.

`record_handler` runs the evaluators of a record of ``built`` and publishes their evaluations; `webhook` POSTs each
record of ``trajectories`` to one address; `trajectory_record` decodes the records of both. Above `grading`, `consumer`,
`remote` and `settings`; imported by `worker` and `app`.
"""
