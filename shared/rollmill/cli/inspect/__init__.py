"""``rollmill inspect``: why a session became these traces.

command: the whole way. event_file, session_log: the events of sessions from a file or from Kafka. recordings: events
folded as the builder's stage does it. views: what every call became, as plain data; differences: where a prompt differs
from earlier calls. drawing: views on a terminal; token_text: tokens as text. Reading and drawing know nothing of each
other.
"""
