"""The command line ``rollmill``; private, apart from `main`. It may import everything in `rollmill`, and no service.

commands/ (the commands with their options, light imports only), options (what several commands share), init/ (a project
to begin with), up/ (Kafka and all services here), dead_letters (``dlq``), stopped_tasks (``tasks``), settings_report
(``config``), tail, timestamps; ledger/ (on a console, and as metrics), inspect/ (a session explained), generate/
(schemas, documents of topics and settings). Every command imports what it needs when it runs.
"""

from rollmill.cli.commands import main

__all__ = ["main"]
