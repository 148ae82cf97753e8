"""What the replicas of a prefix agree on, by the compacted topic ``sessions``. May import ``event_log`` and below.

- `sessions_topic`: the topic as it is read; `session_table`: the sessions, and the calls in flight of each.
- `tenants`: under which names their sessions and groups are recorded, and their quotas.
- `membership`: heartbeats of the replicas, and which of them is the leader.
- `session_retention`: the leader's removal of sessions that ended long ago.
- `policies`: versions of the policies, and their pauses for weight updates.
"""
