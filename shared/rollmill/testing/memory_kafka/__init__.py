"""Kafka in memory with the semantics of transactions, for tests of what drives Kafka's clients.

In: what `rollmill.runtime.stream` and `rollmill.runtime.kafka` ask of aiokafka's producer and consumer. Out: the
answers that Apache Kafka gives, fencing by transactional id, aborted records, last stable offsets and refused sends
included (measured in ``docs/decisions/0002-transactions-on-apache-kafka.md``; a contract test runs on both). Each
process has a `NetworkLink` to the broker, which is slow, cut or dead as a test tells it.
"""

from rollmill.testing.memory_kafka.broker import MemoryBroker
from rollmill.testing.memory_kafka.clients import MemoryKafkaClients
from rollmill.testing.memory_kafka.network_link import Fault, NetworkLink, ProcessKilledError

__all__ = ["Fault", "MemoryBroker", "MemoryKafkaClients", "NetworkLink", "ProcessKilledError"]
