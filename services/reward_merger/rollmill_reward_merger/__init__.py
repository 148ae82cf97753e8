"""The reward-merger: joins the trajectory that was built of a session with the evaluations of its graders.

In: ``built`` (trajectories without reward) and ``evaluations`` (grades, from the evaluator or any grader).
Out: ``trajectories``, one record per revision: revision 0 once every evaluator that the session's spec names has
answered or its deadline has passed, and one more for every further evaluation.
State (``state.reward-merger``): per session the built trajectory and its evaluations in the order of their partition,
while revisions are taken; then a marker. Both topics may be read in any interleaving, the revisions are the same.
On a crash: nothing is lost or doubled, the stage engine commits input positions, output and state together.

From the top down, each importing only what comes after it: `app` (the service), `stage` (records in, revisions out),
beside it `settings`; `timers` (deadlines as records) and `size_limit` (what is left out of a large trajectory);
`revisions` (which evaluations make which revision) and `state` (keys, values and their bytes); `merging` (rewards and
provenance), `combining` (rewards of several evaluators by a rule), `trace_rewards` (of one evaluation).
"""
