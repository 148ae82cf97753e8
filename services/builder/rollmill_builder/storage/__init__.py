"""The bytes of open sessions: each token and each byte of text is stored once. Imports nothing above it.

``call_parts``: a call taken apart, its digest and token ranges. ``trie``: sequences that share their beginnings.
``sequence_store``: the sequences of numbered calls in a trie, and references to earlier ones. ``call_store``: a
session's calls, which can be rolled back. ``spill``: a local file for the calls of idle sessions.
"""
