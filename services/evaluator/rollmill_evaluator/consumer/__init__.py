"""A consumer of one topic that handles records concurrently, at least once; the evaluator and the webhook both run one.

`concurrent_consumer` polls, follows rebalances and commits; `in_flight` runs the handler of each record and bounds how
much runs at once; `offset_commits` reads and writes the group's offsets on the broker; `watermark` computes which
offset may be committed (pure). Imports the library only, and nothing else of this service.
"""
