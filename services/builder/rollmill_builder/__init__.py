"""The builder: folds the model calls of a session into token-faithful trajectories.

What comes in: the topic ``completions`` (session opened, completion recorded, session closed or expired).
What goes out: one trajectory per (session, attempt) to ``built``; to ``outcomes`` the units captured by every
accepted call and, at the close, the units that no trace trains, each with its reason; timers append
``session_expired`` to ``completions``.
What state is kept: the calls of open sessions, reduced to what a trace needs, and for a while a marker of each
closed session; both in memory and in the changelog ``state.builder``. Over a budget the calls of idle sessions lie in a
local file, which may be lost.
What happens on a crash: the successor fences this process, restores the state of the last commit from the
changelog and reads on from the position committed with it; the same trajectories come out, each once.

Inside, intake only stores: `parts` (a call taken apart) → `lines`, `trie`, `buffer` (what earlier calls hold already) →
`deltas` (what the changelog holds) → `call_log` (a session's calls) → `sessions`. At the close: `ended` → `calls` (what
may be trained) → `parents` (which call continues which, by `marks` in the trie) → `splice` (where the copy of a reply
ends in the next prompt) → `branches` (who inherits a chain, why another one starts) → `limits` → `assembly` (tokens,
masks, versions, turns) → `accounting` (every sampled token claimed exactly once). `closing` makes a trajectory of it,
`folding` feeds incremental custom builders, `shards`, `memory`, `spill` and `timers` are a task's own, `handlers` is
the stage.
"""
