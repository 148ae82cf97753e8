"""The evaluators that are registered by name and ask no outside service; one file each.

`session_completed` and `reported` read the trajectory, `external` leaves the grade to somebody outside, `composite`
combines other evaluators, `test_on_output` and `swebench_harness` run tests. `http` and `llm_judge` are in `remote`.
They import `test_grading`, `retrying` and `result_validation`; nothing imports them but the registry of strategies.
"""
