"""The load: `scripted_conversation` is the known content of every session (pure), `workload` its agents."""
