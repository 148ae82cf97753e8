"""One group: its members, its state, and which of them count and train.

`group` (members, states, transitions), `staleness` (ages, limit, masking), `eligibility` (verdicts on members and
traces), `group_scoring` and `majority` (rewards by comparison), `config` (`BatcherConfig`: all constants of a run) and
`group_evaluation` (a group at a cut: open, ready, expired or failed).
Imports `sizes` and the library; nothing of `steps`, `state` or `progress`.
"""
