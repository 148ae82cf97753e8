"""Calls of a closed session to traces, by token prefixes. Imports ``storage``.

Builders, one file each: ``prefix_merging``, ``per_request``; their ``options``. In the order of the work:
``closed_session`` (what a builder gets), ``sampled_calls`` (which replies belong in traces), ``parent_search`` (which
call continues which), ``reply_alignment`` (where a reply ends in the next prompt; ``chat_messages`` compares the
texts), ``branches`` (chains of calls, and why each begins), ``retries`` (replies that no client received),
``trace_limits``, ``trace_assembly`` (tokens and masks).
"""
