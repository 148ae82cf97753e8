"""Topics on the broker: create what is missing, refuse to start on what differs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
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


async def apply_topics(settings: KafkaSettings, topics: Iterable[Topic] = REGISTRY) -> list[str]:
    """Create the missing topics of a prefix, then verify all. Returns the full names created."""
    async with opened_admin(settings) as admin:
        created = await _create_missing(admin, settings, list(topics))
        await _until_known(admin, created)
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
            topic_configs=topic.broker_config(),
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
    names = [topic.full_name(settings.prefix) for topic in topics]
    counts = {item["topic"]: len(item["partitions"]) for item in await admin.describe_topics(names)}
    complaints = []
    for topic in topics:
        name, wanted = topic.full_name(settings.prefix), topic.partitions(settings)
        if not counts.get(name):
            complaints.append(f"{name} is missing (run `rollmill topics apply`)")
        elif counts[name] != wanted:
            complaints.append(f"{name} has {counts[name]} partitions, {wanted} are configured")
    return complaints


async def _config_complaints(admin: AIOKafkaAdminClient, settings: KafkaSettings, topics: list[Topic]) -> list[str]:
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic.full_name(settings.prefix)) for topic in topics]
    found: dict[str, dict[str, str]] = {}
    for response in await admin.describe_configs(resources):
        for resource in response.resources:
            found[resource[3]] = {entry[0]: entry[1] for entry in resource[4]}
    return [
        f"{topic.full_name(settings.prefix)}: {key} is {actual}, {wanted} is needed"
        for topic in topics
        for key, wanted in topic.broker_config().items()
        if (actual := found.get(topic.full_name(settings.prefix), {}).get(key)) != wanted
    ]
