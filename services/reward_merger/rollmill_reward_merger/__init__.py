"""The reward-merger: joins what a session became with what graders say of it.

Comes in: ``built`` (trajectories without reward) and ``evaluations`` (grades, from the evaluator or any grader).
Goes out: ``trajectories``, one record per revision: revision 0 once every evaluator that the session's spec names has
answered or its deadline has passed, and one more for every further evaluation.
State: per session the built trajectory and its evaluations in the order of their partition, while revisions are
taken; then a marker. Both topics may be read in any interleaving, the revisions of a session are the same.
On a crash: nothing is lost or doubled, the stage engine commits input positions, output and state together.

Modules: `words` (what one evaluation says of each trace), `combining` (several words by a rule), `merging` (rewards and
provenance), `revisions` (which evaluations make which revision), `held` (state),
`timers` (deadlines as records), `fitting` (the size limit), `handlers` (the stage), `app`.
"""
