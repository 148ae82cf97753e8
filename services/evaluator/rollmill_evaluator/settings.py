"""Settings of the evaluator, from ``ROLLMILL_*`` environment variables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, IPvAnyNetwork, NonNegativeInt, PositiveInt, SecretStr

from rollmill.settings import ServiceSettings
from rollmill.strategies import ExternalService, ResourceClass
from rollmill.topics import EVALUATIONS
from rollmill_evaluator.consumer.concurrent_consumer import ConsumerLimits
from rollmill_evaluator.grading import EvaluationLimits
from rollmill_evaluator.sandbox.selection import SandboxOptions

ResourceClassName = Literal["light", "remote", "custom", "sandbox"]


class ServiceAddress(BaseModel):
    """Address and keys of an outside service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://[^\s]+$")
    api_key: SecretStr | None = None
    """Sent as ``Authorization: Bearer …``."""
    signing_key: SecretStr | None = None
    """Signs requests; None: they are not signed."""

    @property
    def revealed(self) -> ExternalService:
        return ExternalService(self.url, _revealed(self.api_key), _revealed(self.signing_key))


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


class EvaluatorSettings(ServiceSettings):
    section: ClassVar[str] = "evaluator"

    evaluator_classes: tuple[ResourceClassName, ...] = Field(("light", "remote", "custom", "sandbox"), min_length=1)
    """The resource classes that this process evaluates, as a JSON list. All of them have to run somewhere."""
    evaluator_concurrency: PositiveInt = 32
    """Evaluations at once, for each strategy by itself."""
    evaluator_concurrency_of: dict[str, PositiveInt] = Field(default_factory=dict)
    """The same for single strategies, by name, as JSON."""
    evaluator_records: PositiveInt = 256
    """Sessions in flight in each resource class; above it the class stops polling. Also bounds what a crash repeats."""
    evaluator_bytes: PositiveInt = 128 * 2**20
    """Of the records in flight in each resource class: bounds memory."""
    evaluator_seconds: float = Field(default=600.0, gt=0)
    """Longest time for one evaluation; below a session's `evaluation_seconds`, so that ``evaluator_timeout`` is
    published before the reward-merger stops waiting."""
    evaluator_attempts: PositiveInt = 3
    """Tries, where an evaluator raises RetryableError."""
    evaluator_retry_seconds: float = Field(default=0.5, ge=0)
    """Wait before the second try; doubled, with jitter, before each further one."""
    evaluator_services: dict[str, ServiceAddress] = Field(default_factory=dict)
    """Name to address and keys of the services that the evaluators ``http`` and ``llm_judge`` may ask by name, as JSON;
    keys belong here and never into a spec, which is kept in the log."""
    evaluator_any_url: bool = False
    """False: specs can name services but give no URL. True is for development, where everyone who opens sessions is
    trusted: they make this process send requests to any public address, and to any of ``evaluator_networks``."""
    evaluator_networks: tuple[IPvAnyNetwork, ...] = ()
    """Networks that are not public and to which a spec's URL may lead all the same, such as ``10.1.0.0/16``, as a JSON
    list. Services that are named here, the webhook's too, may be anywhere."""
    evaluator_sources: Path | None = None
    """The folder below which specs name repositories, bundles and archives; nothing else can be named."""
    sandbox_bwrap: Path | None = None
    """The program bubblewrap; None: ``bwrap`` on PATH. Without it, specs that run code are not graded
    (``sandbox_unavailable``)."""
    sandbox_uid: NonNegativeInt = 65534
    """User that runs untrusted code where the service is root; it must be able to read the sources and tools. 0: root
    stays root, in a user namespace of its own."""
    sandbox_tools: tuple[Path, ...] = ()
    """Files and folders that sandboxes see read-only beside /usr, such as a language's installation; a JSON list."""
    sandbox_cgroup: Path | None = None
    """A cgroup (v2) with the controllers memory and pids that was delegated to the service: limits by the kernel.
    None: by resource limits, and by reading the usage of the processes several times a second."""
    sandbox_jobs: PositiveInt = 4
    """Jobs at once, for each kind of sandbox: each may take the memory that its spec asks for."""
    sandbox_docker: str = "docker"
    """The command line of the engine that runs containers."""
    webhook_url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    """Each session's result, and each revision of it, is POSTed here as JSON, at least once. None: no webhook."""
    webhook_api_key: SecretStr | None = None
    """Sent as ``Authorization: Bearer …``."""
    webhook_signing_key: SecretStr | None = None
    """Signs the notices (`rollmill.signing`); None: they are not signed."""
    webhook_records: PositiveInt = 64
    """Notices in flight; a target that accepts none stops only the reading of further ones."""
    webhook_seconds: float = Field(default=10.0, gt=0)
    """For one try."""
    webhook_retry_seconds: float = Field(default=1.0, gt=0)
    """Wait before the second try; doubled, with jitter, before each further one."""
    webhook_longest_wait_seconds: float = Field(default=60.0, gt=0)
    """Between two tries of one notice."""
    webhook_patience_seconds: float = Field(default=24 * 3600.0, gt=0)
    """For all tries of one notice; then it is counted as given up. Below the retention of ``trajectories``."""
    commit_seconds: float = Field(default=1.0, gt=0)
    """How often finished records are committed: a crash repeats at most these, and those that were running."""

    @property
    def webhook(self) -> ExternalService | None:
        if self.webhook_url is None:
            return None
        return ExternalService(self.webhook_url, _revealed(self.webhook_api_key), _revealed(self.webhook_signing_key))

    @property
    def webhook_limits(self) -> ConsumerLimits:
        return replace(self.group_limits, records=self.webhook_records)

    @property
    def resource_classes(self) -> tuple[ResourceClass, ...]:
        return tuple(each for each in ResourceClass if each.label in self.evaluator_classes)

    @property
    def sandboxes(self) -> SandboxOptions:
        return SandboxOptions(
            bwrap=self.sandbox_bwrap,
            uid=self.sandbox_uid,
            tools=self.sandbox_tools,
            cgroup=self.sandbox_cgroup,
            docker=self.sandbox_docker,
            jobs=self.sandbox_jobs,
        )

    @property
    def limits(self) -> EvaluationLimits:
        return EvaluationLimits(
            seconds=self.evaluator_seconds,
            attempts=self.evaluator_attempts,
            retry_seconds=self.evaluator_retry_seconds,
            bytes=EVALUATIONS.max_bytes,
        )

    @property
    def group_limits(self) -> ConsumerLimits:
        return ConsumerLimits(
            records=self.evaluator_records,
            bytes=self.evaluator_bytes,
            poll_seconds=self.poll_ms / 1000,
            commit_seconds=self.commit_seconds,
            drain_seconds=self.drain_seconds / 2,
            deadline_seconds=self.deadline_seconds,
            join_seconds=self.deadline_seconds + 2 * self.session_timeout_ms / 1000,
        )
