"""Events to Kafka, or to the spool while Kafka is away (rule S5). Imports nothing else of capture.

- `event_writer`: what the rest of capture writes with, and Kafka's producer behind it.
- `spool`: the bounded spool, written from a thread; `spool_store`: its file (SQLite); `spooled_record`: a row of it.
- `spool_recovery`: opens the file, and replaces a damaged one; `spool_salvage`: finds rows in its pages.
- `spool_drain`: sends what is spooled when Kafka is back.
"""
