"""How many bytes a trace takes in a batch record: an upper bound, before anything is packed."""

from __future__ import annotations

from rollmill.models import Trace

TOKEN_BYTES = 4 + 1 + 4
"""Of a token in a record: id, mask, log-prob."""


def record_bytes(trace: Trace) -> int:
    """Bytes of a trace's tensors in a record, an upper bound."""
    tokens = len(trace.prompt_ids) + len(trace.response_ids)
    rewards = 4 * tokens * (trace.token_rewards is not None)
    extras = sum(8 + values.nbytes for values in trace.extras.values())
    runs = 12 * (len(trace.versions) + 2) + 12 * (2 * len(trace.turns) + 2)
    return tokens * TOKEN_BYTES + rewards + extras + runs + 44
