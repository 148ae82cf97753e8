"""The builder: makes token-faithful trajectories of the model calls of sessions.

What comes in: the topic ``completions`` (session opened, completion recorded, session closed or expired).
What goes out: one trajectory per (session, attempt) to ``built``; to ``outcomes`` the token ranges captured by every
accepted call and, at the close, those that no trace trains, each with its reason; timers append ``session_expired``
to ``completions``.
What state is kept: the calls of open sessions, reduced to what a trace needs, and for a while a marker of each
closed session; both in memory and in the changelog ``state.builder``. Above a memory budget the calls of idle sessions
move to a local file, which may be lost.
What happens on a crash: the successor fences this process, restores the state of the last commit from the
changelog and continues from the input position committed with it; the same trajectories are sent, each once.

The map, from the top; each folder imports only what is below it, and its docstring describes its files:

- ``app``, ``settings``: wiring and configuration. ``stage``: the processor; one event in, records and updates out.
- ``sessions``: open sessions, closed markers, timers, memory, and the end of a session.
- ``merging``: the calls of a closed session become traces; the builders ``prefix_merging`` and ``per_request``.
- ``storage``: the bytes of open sessions. An accepted call passes ``stage``, ``sessions`` and ``storage`` only;
  ``merging`` runs once, when the session has ended.
"""
