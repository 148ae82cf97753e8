"""Options and steps that several commands share. Nothing heavy is imported before it is used."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer

from rollmill.errors import ConfigurationError, InvalidInputError

T = TypeVar("T")

Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", help="Kafka's address; else ROLLMILL_BOOTSTRAP_SERVERS, else 127.0.0.1:9092."),
]
Prefix = Annotated[str | None, typer.Option("--prefix", help="Begins every topic name; else ROLLMILL_PREFIX.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


def on_kafka(settings: Any, work: Coroutine[Any, Any, T], *, verify: bool = True) -> T:
    """Run ``work`` on a cluster that answers and has the topics; else ConfigurationError with advice."""
    from aiokafka.errors import KafkaConnectionError  # noqa: PLC0415

    from rollmill.runtime.kafka import admin  # noqa: PLC0415

    async def verified() -> T:
        if verify:
            await admin.verify_topics(settings)
        return await work

    try:
        return asyncio.run(verified())
    except KafkaConnectionError as error:
        raise ConfigurationError(
            f"Kafka does not answer at {settings.bootstrap_servers}: start it with `rollmill up`, or name it with "
            "--bootstrap-servers"
        ) from error
    finally:
        work.close()


def kafka_settings(bootstrap_servers: str | None, prefix: str | None) -> Any:
    from rollmill.settings import KafkaSettings, load  # noqa: PLC0415

    options = {"bootstrap_servers": bootstrap_servers, "prefix": prefix}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return load(KafkaSettings, **given)


def json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"this is no JSON: {text!r} ({error})") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"a JSON object is expected, not {text}")
    return found


def this_user() -> str:
    """Of this process; the environment is not asked."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
