"""Apache Kafka itself, one KRaft node on loopback, started from its Maven artifacts without Docker.

In goes a data directory, out comes an address. State: everything under that directory (storage, ports, logs), and the
jars in the local Maven repository, each checked against a committed lock. On a crash of the program the broker ends
with it; on a crash of the broker the next start recovers its log. The artifacts are fetched once, then never again.
"""

from __future__ import annotations

from rollmill.runtime.kafka.embedded.blocking import running_kafka
from rollmill.runtime.kafka.embedded.broker import EmbeddedKafka
from rollmill.runtime.kafka.embedded.config import BrokerConfig
from rollmill.runtime.kafka.embedded.listeners import Listener, User

__all__ = ["BrokerConfig", "EmbeddedKafka", "Listener", "User", "running_kafka"]
