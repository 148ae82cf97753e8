"""Grading by tests: what the evaluators `test_on_output` and `swebench_harness` share.

`config` and `swebench_instances` are the configs of the two; `submission` takes a patch or a file out of a session's
output; `workspace` makes the fresh work tree and the steps of a job; `frameworks` parses test results, one file per
framework; `scoring` turns results, or a run that ended early, into a grade; `swebench_package` calls the package.
All but the last are pure. The evaluators run the jobs; nothing here imports `sandbox` or an evaluator.
"""
