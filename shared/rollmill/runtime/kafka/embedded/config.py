"""Configuration of the embedded broker, and the ``server.properties`` and Java options it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from rollmill.runtime.kafka.embedded.listeners import Listener, User, properties

MIB = 2**20
INTERNAL_PARTITIONS = "4"
"""Of offsets and transaction state. Never changed for storage that exists: Kafka refuses another count."""


class BrokerConfig(BaseModel):
    """One node, sized for a laptop or a test run; each field gives its reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: PositiveInt | None = None
    """For clients. None: a free one, taken again at the next start."""
    more_listeners: tuple[Listener, ...] = ()
    """Beside the one at ``port``, all on loopback."""
    users: tuple[User, ...] = ()
    """Created when the storage is; they come in through listeners with SASL."""
    message_max_bytes: PositiveInt = 10 * MIB
    """Of one record batch: the registry's largest record, its envelope, and what a dead letter adds."""
    heap_mb: PositiveInt = 512
    """Kafka relies on the page cache; 512 MB are enough for a gigabyte of 1 MB records."""
    transaction_max_timeout_ms: PositiveInt = 120_000
    """The longest that a dead client can hold back read_committed readers."""
    test_mode: bool = False
    """Clean up within a second instead of minutes, so that tests of timeouts and compaction end (rule G2)."""
    quick_start: bool = True
    """Compile with C1 only: starts in two thirds of the time; what a broker does is mostly copying."""
    start_seconds: PositiveFloat = 60.0
    """Longest wait for the broker to answer."""
    stop_seconds: PositiveFloat = 20.0
    """A clean stop gets this long before SIGKILL; the next start then recovers the log."""
    lock_seconds: PositiveFloat = 3.0
    """How long to wait for a broker of a dead parent to leave the same data directory."""

    def java_options(self) -> tuple[str, ...]:
        """The serial collector wins on two cores; without perf data nothing is left in the system's temp folder."""
        c1_only = ("-XX:TieredStopAtLevel=1",) if self.quick_start else ()
        heap = ("-Xms64m", f"-Xmx{self.heap_mb}m", "-XX:+ExitOnOutOfMemoryError")
        return (*heap, "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Djava.awt.headless=true", *c1_only)

    def server_properties(self, *, log_dir: Path, broker_port: int, controller_port: int) -> str:
        """Text of the properties file of one combined broker and controller."""
        addresses = _addresses(broker_port, controller_port, self.more_listeners)
        sizes = {
            "log.dirs": str(log_dir),
            "message.max.bytes": str(self.message_max_bytes),
            "replica.fetch.max.bytes": str(self.message_max_bytes),
            "replica.fetch.response.max.bytes": str(self.message_max_bytes),
            "transaction.max.timeout.ms": str(self.transaction_max_timeout_ms),
        }
        speeds = TEST_SPEEDS if self.test_mode else {}
        all_of_it = {**SINGLE_NODE, **addresses, **properties(self.more_listeners, self.users), **sizes, **speeds}
        return "".join(f"{key}={value}\n" for key, value in all_of_it.items())


SINGLE_NODE = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.num.partitions": INTERNAL_PARTITIONS,
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": INTERNAL_PARTITIONS,
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Nobody else is going to join: members need not wait for each other.
    "group.initial.rebalance.delay.ms": "0",
    # A laptop that was shut for a fortnight still has its offsets.
    "offsets.retention.minutes": "525600",
    # The default takes 128 MB of heap; this many bytes map a million keys in one cleaning pass.
    "log.cleaner.dedupe.buffer.size": str(32 * MIB),
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "4",
}

TEST_SPEEDS = {
    # A killed broker may not register again before its old session has ended: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Background work starts 30 s after the broker by default, longer than most test runs.
    "log.initial.task.delay.ms": "500",
    "log.cleaner.backoff.ms": "200",
    "log.retention.check.interval.ms": "500",
    "log.segment.delete.delay.ms": "500",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "10000",
    "group.min.session.timeout.ms": "1000",
}

LOG4J = """\
rootLogger.level = INFO
rootLogger.appenderRef.file.ref = FILE
appender.file.type = RollingFile
appender.file.name = FILE
appender.file.fileName = {log_file}
appender.file.filePattern = {log_file}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %m (%c{{1}})%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 16MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
logger.config.name = org.apache.kafka.common.config
logger.config.level = WARN
"""


def log4j_properties(log_file: Path) -> str:
    """Logging of the broker: one file that rolls, without the page of settings that Kafka prints at each start."""
    return LOG4J.format(log_file=log_file)


def _addresses(broker_port: int, controller_port: int, more: tuple[Listener, ...]) -> dict[str, str]:
    own = {"PLAINTEXT": broker_port, "CONTROLLER": controller_port}
    protocols = dict.fromkeys(own, "PLAINTEXT") | {listener.name: listener.protocol for listener in more}
    return {
        "listeners": _listed({**own, **{listener.name: listener.port for listener in more}}),
        "advertised.listeners": _listed({**own, **{listener.name: listener.advertised_port for listener in more}}),
        "listener.security.protocol.map": ",".join(f"{name}:{kind}" for name, kind in protocols.items()),
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
    }


def _listed(ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
