"""A write needs two of three replicas: created so, verified at every start, mended by `rollmill topics apply`."""

import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka import admin
from rollmill.runtime.kafka.admin import apply_topics, in_sync_config, opened_admin, verify_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.settings import KafkaSettings
from rollmill.topics import BUILT, COMPLETIONS

pytestmark = pytest.mark.kafka


@pytest.fixture
def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=1)


async def configuration(settings: KafkaSettings, name: str) -> dict[str, str]:
    async with opened_admin(settings) as client:
        (response,) = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    return {entry[0]: entry[1] for entry in response.resources[0][4]}


def test_f15_three_replicas_need_two() -> None:
    assert [in_sync_config(count) for count in (1, 2)] == [{}, {}]
    assert [in_sync_config(count)["min.insync.replicas"] for count in (3, 5)] == ["2", "2"]


async def test_f15_what_one_replica_could_acknowledge_is_refused_and_applied(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test's cluster has one broker, so the number of replicas from which two are needed is lowered."""
    await apply_topics(settings, [COMPLETIONS, BUILT])
    await verify_topics(settings, [COMPLETIONS, BUILT])
    name = COMPLETIONS.full_name(settings.prefix)
    before = await configuration(settings, name)
    monkeypatch.setattr(admin, "REPLICAS_TO_SPARE", 1)
    with pytest.raises(
        ConfigurationError, match=r"min.insync.replicas is 1, 2 is needed \(run `rollmill topics apply`"
    ):
        await verify_topics(settings, [COMPLETIONS])
    assert await apply_topics(settings, [COMPLETIONS, BUILT]) == []
    assert await configuration(settings, name) == {**before, "min.insync.replicas": "2"}


async def test_f15_fewer_replicas_than_configured_are_refused(settings: KafkaSettings) -> None:
    await apply_topics(settings, [BUILT])
    wanted = settings.model_copy(update={"replication_factor": 3})
    with pytest.raises(ConfigurationError, match=r"built has 1 replicas, 3 are configured"):
        await verify_topics(wanted, [BUILT])
