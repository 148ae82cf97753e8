"""``rollmill inspect``: why a session became these traces.

Reading and drawing are apart: `lines` and `log` find the events of sessions in a file or on Kafka, `recordings` folds
them as the builder's stage would, `views` says what became of every call, and `drawing` puts that on a terminal.
"""
