"""Kafka: clients, transactions, topics on the broker, tables, and the embedded broker.

`clients` makes every client, with `security` from the settings; `client_cancellation` separates a client's own
cancellations from requests to stop; `connection_diagnostics` finds out why a broker refuses a client. `transaction`
sends one transaction with every wait bounded; `admin` creates and verifies topics; `global_table` reads a whole topic
and follows it; `embedded` is a broker for development and tests. Imports: topics, codec, settings, failpoints, errors.
"""
