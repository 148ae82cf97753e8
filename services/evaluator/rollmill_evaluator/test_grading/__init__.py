"""Grading by tests: what `test_on_output` and `swebench_harness` share.

`answers` takes a patch or a file out of a session's output, `worktrees` makes the fresh tree and the steps of a job,
`frameworks` reads results out of what a test command printed or wrote, `scoring` compares them with what was expected.
All of it is pure; the evaluators themselves run the job.
"""
