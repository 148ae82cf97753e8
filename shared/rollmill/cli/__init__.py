"""The command line ``rollmill``; private, apart from `main`. It may import everything in `rollmill`, and no service.

commands/ (the commands with their options, light imports only), options (what several commands share), up (Kafka and
all services here), dead_letters (``dlq``), stopped_tasks (``tasks``), tail, timestamps; ledger/ (on a console, and as
metrics), inspect/ (a session explained), generate/ (schemas, topic documents). Every command imports what it needs when
it runs.
"""

from rollmill.cli.commands import main

__all__ = ["main"]
