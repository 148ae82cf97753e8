"""What one task of the builder keeps of its sessions, and what it sends at their end. Imports ``merging``, ``storage``.

``session_state``: open sessions and closed markers, in memory and in the changelog. ``incremental_builder``: custom
builders that get each call at once. ``finalize``: the trajectory of a closed session; ``token_accounting`` checks it.
``outputs``: the records sent. ``task_resources``: memory budget and timer of a task. ``expiry_timer``: when sessions
expire. ``late_window``: how long ended ones are remembered, and what is too old.
"""
