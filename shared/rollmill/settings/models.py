"""Settings common to all programs; the text below a field is its description, here and in docs/settings.md."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, SecretStr, field_validator, model_validator

from rollmill.errors import InvalidInputError
from rollmill.models.spec_maxima import SpecMaxima
from rollmill.runtime.failpoints import Failpoints
from rollmill.settings.sources import ProgramSettings

PACKAGE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"


class KafkaSettings(ProgramSettings):
    """How to reach the log, and how a run's topics are called."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Kafka's addresses, ``host:port``, separated by commas."""
    prefix: str = Field(default="rollmill.", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*\.$|^$")
    """Begins every topic name, group and transactional id: several runs can share a cluster."""
    partitions: PositiveInt = 8
    """Of the co-partitioned topics; fixed for the life of a prefix (rule T1)."""
    batch_partitions: PositiveInt = 8
    """Of ``batches``: the largest data-parallel world size."""
    replication_factor: PositiveInt = 1
    """Three on a real cluster."""
    transaction_timeout_ms: PositiveInt = 30_000
    """After this the broker aborts what a dead process left open."""
    request_timeout_ms: PositiveInt = 20_000
    """For one request to the broker."""
    kafka_seconds: float = Field(default=60.0, ge=0)
    """How long a trainer's stream or publisher waits for Kafka before it gives up."""
    session_timeout_ms: PositiveInt = 10_000
    """After this a silent member of a group counts as dead. Whoever joins waits for it, so it has to be well below
    the request timeout, or a join after a crash is given up again and again."""
    run: str = "run"
    """Names the training run in batches, cuts and acknowledgements. A prefix holds one run: the batcher refuses another
    name once it has cut."""
    hand_over: Literal["batches", "trajectories", "none"] = "batches"
    """What is handed to the trainer of the run: steps of the batcher, the trajectories themselves (`TrajectoryStream`,
    no batcher), or nothing, where runs are only collected. There is one consumer of record (rule A9)."""
    claim_check_url: str = ""
    """Object storage of large values, ``file:///a/directory`` or ``s3://bucket/prefix``, the same for every program of
    the prefix; empty: every value stays in its record, and larger ones are refused (rule C1)."""
    claim_check_bytes: int = Field(default=2**20, ge=2**16)
    """Larger values are stored there, with a reference in their records. Positions and the like stay in the log."""
    spec_maxima: SpecMaxima = SpecMaxima()
    """The most that a session's spec may ask for, as JSON of what differs from the defaults; the same for every
    program: capture refuses to open a session that asks for more, and the evaluator does not grade it."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Protocol of the broker's listener: SSL is TLS, SASL is with a user's name and password."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """PLAIN sends the password itself, so it is allowed with TLS alone."""
    sasl_username: str = ""
    """The user, where the protocol is SASL."""
    sasl_password: SecretStr | None = None
    """The user's password."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that may have signed the broker's certificate; None: those that the system trusts."""
    tls_certificate_file: Path | None = None
    """PEM of this client's own certificate and its chain, for a broker that asks for one."""
    tls_key_file: Path | None = None
    """PEM of its private key."""
    tls_key_password: SecretStr | None = None
    """Opens that file where it is encrypted."""
    tls_check_hostname: bool = True
    """Whether the broker's certificate must name the host that was asked; False for tunnels alone."""
    failpoints: str = ""
    """For tests of failures alone: where this program ends, fails or is suspended (`rollmill.runtime.failpoints`)."""

    @field_validator("prefix", mode="before")
    @classmethod
    def _ends_with_a_dot(cls, text: object) -> object:
        if isinstance(text, str) and text and not text.endswith("."):
            raise ValueError(f"it has to end with a dot, such as {text}.")
        return text

    @field_validator("failpoints")
    @classmethod
    def _known_failpoints(cls, text: str) -> str:
        try:
            Failpoints.parse(text)
        except InvalidInputError as error:
            raise ValueError(str(error)) from error
        return text

    @model_validator(mode="after")
    def _has_what_its_protocol_needs(self) -> Self:
        sasl, tls = self.security_protocol.startswith("SASL"), self.security_protocol.endswith("SSL")
        if sasl and not (self.sasl_username and self.sasl_password):
            raise ValueError(f"security_protocol {self.security_protocol} needs sasl_username and sasl_password")
        if sasl and not tls and self.sasl_mechanism == "PLAIN":
            raise ValueError("sasl_mechanism PLAIN would send the password in the clear: use SASL_SSL, or SCRAM")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file belong together: give both or none")
        return self

    @model_validator(mode="after")
    def _joins_outlast_dead_members(self) -> Self:
        if self.session_timeout_ms + 5000 > self.request_timeout_ms:
            raise ValueError(
                f"session_timeout_ms {self.session_timeout_ms} must be at least 5000 below request_timeout_ms "
                f"{self.request_timeout_ms}: a member that joins waits until a dead one's session ends"
            )
        return self


class ServiceSettings(KafkaSettings):
    """What every service has beside its own settings."""

    process_index: NonNegativeInt = 0
    """This process runs the tasks p with p mod processes = process_index; the StatefulSet's ordinal."""
    processes: PositiveInt = 1
    """How many processes of this service share its tasks."""
    poll_ms: PositiveInt = 50
    """Longest wait for the first record of a poll batch: the floor of latency when idle."""
    linger_ms: NonNegativeInt = 0
    """Pause after a transaction, in which records gather: fewer, larger transactions, so far less work for a small
    broker; every stage's latency grows by it. A full batch is not waited on."""
    poll_records: PositiveInt = 500
    """Most records of one transaction."""
    poll_bytes: PositiveInt = 16 * 2**20
    """Records beyond this many bytes wait for the next transaction: bounds memory and transaction size."""
    timer_seconds: float = Field(default=0.25, gt=0)
    """How often timers and cuts are looked at."""
    connect_seconds: float = Field(default=60.0, ge=0)
    """How long a starting service waits for Kafka before it gives up."""
    deadline_seconds: float = Field(default=20.0, gt=0)
    """For every await on the broker; below the transaction timeout."""
    drain_seconds: float = Field(default=30.0, gt=0)
    """How long a stopping service may take to finish what is in hand; below the pod's grace period."""
    dead_letter_limit: PositiveInt = 100
    """Dead letters in hand by faults of the service, of distinct keys, before a task stops: a bad deploy must not drain
    the topic. What clients cause is not counted."""
    dead_letter_leak: PositiveInt = 100
    """Good records that forgive one dead letter."""
    health_host: str = "127.0.0.1"
    """Address of /live, /ready and /metrics."""
    health_port: NonNegativeInt = 0
    """Of /live, /ready and /metrics; 0 takes a free port and logs it."""
    strategy_modules: str = Field(default="", pattern=rf"^ *({PACKAGE}( *, *{PACKAGE})*)? *$")
    """Packages with classes that a spec or a setting may name as ``module:ClassName``, separated by commas: ``mypkg``
    allows ``mypkg`` and ``mypkg.graders``. Specs come from clients and importing a module runs it, so by default there
    are none, and strategies are those that installed packages register as entry points. Every service of a prefix, and
    the command line, needs the same list."""
    tokenizer_folders: str = ""
    """Folders, separated by commas, below which a spec may name a tokenizer's file; by default none. It is read where
    sessions are opened, built and inspected."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Lines below this level are left out."""
    log_json: bool = True
    """One JSON object per line; false: text for people."""
    host_label: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """Names the process in logs; never in an output record."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.process_index >= self.processes:
            raise ValueError(
                f"process_index {self.process_index} must be below processes {self.processes} (they count from 0)"
            )
        if self.deadline_seconds * 1000 >= self.transaction_timeout_ms:
            raise ValueError(
                f"deadline_seconds {self.deadline_seconds} must be below transaction_timeout_ms "
                f"{self.transaction_timeout_ms}: a transaction must be given up before the broker aborts it"
            )
        return self


class ClientSettings(ProgramSettings):
    """How an agent's harness reaches capture."""

    capture_url: str = "http://127.0.0.1:8700"
    """Base URL of capture."""
    api_key: SecretStr | None = None
    """The tenant's key; None: capture listens on loopback and asks for none."""

    @property
    def key(self) -> str | None:
        return None if self.api_key is None else self.api_key.get_secret_value()
