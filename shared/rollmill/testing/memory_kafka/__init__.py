"""Kafka in memory with the semantics of transactions, for tests of what drives Kafka's clients.

Implements what `rollmill.runtime.stream` and `rollmill.runtime.kafka` use of aiokafka's producer and consumer, with
the answers of Apache Kafka: fencing by transactional id, aborted records, last stable offsets and refused sends
(measured in ``docs/decisions/0002-transactions-on-apache-kafka.md``; a contract test runs on both). `broker` holds
partitions (`log`) and transactional ids; `clients` makes `producer` and `consumer`, which call the broker over a
`network_link` that a test can slow down, cut or kill.
"""

from rollmill.testing.memory_kafka.broker import MemoryBroker
from rollmill.testing.memory_kafka.clients import MemoryKafkaClients
from rollmill.testing.memory_kafka.network_link import LinkFault, NetworkLink, ProcessKilledError

__all__ = ["LinkFault", "MemoryBroker", "MemoryKafkaClients", "NetworkLink", "ProcessKilledError"]
