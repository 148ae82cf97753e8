"""The evaluator: runs the evaluators that a session's spec names, each on the finished trajectory.

Comes in: ``built``. Goes out: ``evaluations``, one JSON record per session and evaluator, graded or not graded with a
reason; an infrastructure failure never becomes a number. State: none but the commits of its consumer groups, one for
each resource class, and one over ``trajectories`` for the webhook.
Evaluators have side effects, so they run outside of any transaction: concurrently, at least once, idempotent by
evaluation id. On a crash: what had not been published is evaluated again by whoever gets the partition; the same id
again is a duplicate to the reward-merger (rule V1).

Modules: `session_completed`, `reported`, `external`, `composite`, `test_on_output` and `swebench_harness` (evaluators),
`remote` (those that ask a service), `testing` (what the last two share), `sandbox` (where they run code), `checking`
and `retrying` (what an answer and a failure are), `grading` (one evaluator on one trajectory), `answering` (one record
of ``built``), `watermark` (offset bookkeeping, pure), `commits` (offsets on the broker), `group` (the polling loop),
`notices` and `webhook` (results told), `worker` and `app` (wiring).
"""
