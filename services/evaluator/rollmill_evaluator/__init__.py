"""The evaluator: runs the evaluators that a session's spec names, each on the finished trajectory.

Input: ``built``. Output: ``evaluations``, one JSON record per session and evaluator, graded or not graded with a
reason; an infrastructure failure never becomes a number. State: none but the commits of its consumer groups, one for
each resource class, and one over ``trajectories`` for the webhook.
Evaluators have side effects, so they run outside of any transaction: concurrently, at least once, idempotent by
evaluation id. After a crash the new owner of a partition evaluates again what was not published; the same id again is
a duplicate to the reward-merger (rule V1).

- `app`, `worker`, `settings`: the service, its workers, and its environment variables
- `delivery`: one record of ``built`` or ``trajectories``: evaluations published, webhook called
- `consumer`: group membership, concurrent handling, offset commits
- `grading`: one evaluator on one trajectory; `retrying` and `result_validation`: tries, and what a result must be
- `evaluators`: those registered by name that need no service; `remote`: those that ask an HTTP service or a model
- `test_grading`: tests as a grade, shared by `test_on_output` and `swebench_harness`; `sandbox`: where they run code

Imports go down this list only (`import-linter`, "Layers of the evaluator"), and into the library.
"""
