"""``rollmill up``: Kafka and all services on this machine. preflight: what is checked before anything starts. progress:
what the services count, as lines. command: the run itself.
"""

from rollmill.cli.up.command import Up, run

__all__ = ["Up", "run"]
