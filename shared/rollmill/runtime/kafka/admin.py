"""Topics on the broker: create what is missing, refuse to start on what differs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, TopicAlreadyExistsError, for_code

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.connection_diagnostics import diagnose_refusal
from rollmill.settings import KafkaSettings
from rollmill.topics import REGISTRY, Topic

LOOKS = 300
LOOK_SECONDS = 0.1
REPLICAS_TO_SPARE = 3
"""With so many replicas a write can need two of them, and one broker may be away."""
MIN_IN_SYNC = "min.insync.replicas"
OF_THE_TOPIC = 1
"""Source of a configuration value, by Kafka's protocol: set for the topic itself."""


def in_sync_config(replicas: int) -> dict[str, str]:
    """How many replicas have to have a record before it is acknowledged (rule C8).

    Kafka's default of 1 lets a leader that is alone acknowledge: its disk would take those records along.
    """
    return {MIN_IN_SYNC: "2"} if replicas >= REPLICAS_TO_SPARE else {}


async def apply_topics(settings: KafkaSettings, topics: Iterable[Topic] = REGISTRY) -> list[str]:
    """Create the missing topics of a prefix, let writes need two of three replicas, then verify all.

    Returns the full names created.
    """
    async with opened_admin(settings) as admin:
        created = await _create_missing(admin, settings, list(topics))
        await _until_known(admin, created)
        await _need_replicas(admin, [topic.full_name(settings.prefix) for topic in topics])
        await _verify(admin, settings, list(topics))
    return created


async def verify_topics(settings: KafkaSettings, topics: Iterable[Topic] = REGISTRY) -> None:
    """Raise ConfigurationError where a topic is missing or differs in partitions or configuration."""
    async with opened_admin(settings) as admin:
        await _verify(admin, settings, list(topics))


@asynccontextmanager
async def opened_admin(settings: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client. Raises KafkaConnectionError, and ConfigurationError where the broker refuses the settings."""
    admin = KafkaClients(settings).admin()
    try:
        await admin.start()
    except KafkaConnectionError:
        await diagnose_refusal(settings)
        raise
    try:
        yield admin
    finally:
        await admin.close()


async def _create_missing(admin: AIOKafkaAdminClient, settings: KafkaSettings, topics: list[Topic]) -> list[str]:
    existing = set(await admin.list_topics())
    missing = [topic for topic in topics if topic.full_name(settings.prefix) not in existing]
    new = [
        NewTopic(
            topic.full_name(settings.prefix),
            topic.partitions(settings),
            settings.replication_factor,
            topic_configs={**topic.broker_config(), **in_sync_config(settings.replication_factor)},
        )
        for topic in missing
    ]
    if new:
        _raise_failures(await admin.create_topics(new))
    return [topic.full_name(settings.prefix) for topic in missing]


async def _until_known(admin: AIOKafkaAdminClient, names: list[str]) -> None:
    """The controller knows a created topic first; other brokers have its metadata a moment later."""
    for _ in range(LOOKS if names else 0):
        if all(item["partitions"] for item in await admin.describe_topics(names)):
            return
        await asyncio.sleep(LOOK_SECONDS)


def _raise_failures(response: object) -> None:
    """Aiokafka returns per-topic errors instead of raising them."""
    for name, code, *detail in getattr(response, "topic_errors", ()):
        error = for_code(code)
        if code and error is not TopicAlreadyExistsError:
            raise ConfigurationError(f"topic {name} cannot be created: {error.__name__} {detail}")


async def _verify(admin: AIOKafkaAdminClient, settings: KafkaSettings, topics: list[Topic]) -> None:
    complaints = await _partition_complaints(admin, settings, topics)
    if not complaints:
        complaints = await _config_complaints(admin, settings, topics)
    if complaints:
        raise ConfigurationError(
            "the topics differ from the registry; partition counts are fixed for the life of a prefix, "
            "so use another prefix, or correct the configuration: " + "; ".join(complaints)
        )


async def _partition_complaints(admin: AIOKafkaAdminClient, settings: KafkaSettings, topics: list[Topic]) -> list[str]:
    found = await _replicas(admin, [topic.full_name(settings.prefix) for topic in topics])
    complaints = []
    for topic in topics:
        name, wanted = topic.full_name(settings.prefix), topic.partitions(settings)
        replicas = found.get(name, [])
        if not replicas:
            complaints.append(f"{name} is missing (run `rollmill topics apply`)")
        elif len(replicas) != wanted:
            complaints.append(f"{name} has {len(replicas)} partitions, {wanted} are configured")
        elif min(replicas) < settings.replication_factor:
            complaints.append(
                f"{name} has {min(replicas)} replicas, {settings.replication_factor} are configured "
                "(ROLLMILL_REPLICATION_FACTOR): reassign its partitions with Kafka's own tools"
            )
    return complaints


async def _config_complaints(admin: AIOKafkaAdminClient, settings: KafkaSettings, topics: list[Topic]) -> list[str]:
    names = [topic.full_name(settings.prefix) for topic in topics]
    found, replicas = await _configs(admin, names), await _replicas(admin, names)
    complaints = []
    for topic, name in zip(topics, names, strict=True):
        for key, wanted in topic.broker_config().items():
            if (actual := found[name].get(key)) != wanted:
                complaints.append(f"{name}: {key} is {actual}, {wanted} is needed")
        if _needs_more_in_sync(min(replicas[name]), found[name]):
            actual = found[name].get(MIN_IN_SYNC)
            complaints.append(f"{name}: {MIN_IN_SYNC} is {actual}, 2 is needed (run `rollmill topics apply`)")
    return complaints


async def _need_replicas(admin: AIOKafkaAdminClient, names: list[str]) -> None:
    """The request replaces all of a topic's own configuration, so what it has is sent again."""
    own, effective = await _configs(admin, names, own=True), await _configs(admin, names)
    replicas = await _replicas(admin, names)
    changed = [
        ConfigResource(ConfigResourceType.TOPIC, name, {**own[name], **in_sync_config(min(replicas[name]))})
        for name in names
        if replicas.get(name) and _needs_more_in_sync(min(replicas[name]), effective[name])
    ]
    for response in await admin.alter_configs(changed) if changed else ():
        for code, detail, _kind, name in response.resources:
            if code:
                raise ConfigurationError(
                    f"topic {name}: {MIN_IN_SYNC} cannot be set: {for_code(code).__name__} {detail}"
                )


def _needs_more_in_sync(replicas: int, config: Mapping[str, str]) -> bool:
    wanted = in_sync_config(replicas).get(MIN_IN_SYNC)
    return wanted is not None and int(config.get(MIN_IN_SYNC, 1)) < int(wanted)


async def _replicas(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, list[int]]:
    """By topic the number of replicas of each of its partitions; no partition where the topic is missing."""
    described = await admin.describe_topics(names)
    return {item["topic"]: [len(partition["replicas"]) for partition in item["partitions"]] for item in described}


async def _configs(admin: AIOKafkaAdminClient, names: list[str], *, own: bool = False) -> dict[str, dict[str, str]]:
    """Configuration by topic. ``own``: without what it has from its broker."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for response in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names]):
        for resource in response.resources:
            entries = [entry for entry in resource[4] if not own or entry[3] == OF_THE_TOPIC]
            found[resource[3]] = {entry[0]: entry[1] for entry in entries}
    return found
