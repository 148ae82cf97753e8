"""From waiting groups to the records of a step.

Decide: `cut_planning` (which groups close), `group_selection` (order, and what fits into a step). Compute:
`advantages`, `credit`, `loss_weights`. Write: `packing` (traces to micro-batches and ranks), `tensors` (the bytes),
`step_table` (rows of the header), `micro_batches` (a whole step), `cut` (outputs of a cut), `cut_metrics`.
Around it: `resharding` (returned steps for another number of ranks), `reward_variance_monitor` (a warning).
Imports `groups`, `progress`, `state`, `sizes` and the library; not `stage` or `settings`.
"""
