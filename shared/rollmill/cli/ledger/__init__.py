"""``rollmill ledger``: `console` prints the balance once or again and again, `exporter` serves it to Prometheus.

Both read it with `rollmill.ops.ledger`; the command and its options are in `rollmill.cli.commands.accounting`.
"""
