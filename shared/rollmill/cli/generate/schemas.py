"""JSON Schema of every event, from the models of the topic registry. Pure: file names to texts."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from rollmill.models import DeadLetterInfo, Manifest
from rollmill.models.dead_letter import DeadLetterDecision
from rollmill.topics import REGISTRY

VERSION = 1
"""Of all schemas. A change that makes old records invalid needs a new version; the old one stays."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def event_models() -> dict[str, Any]:
    """Event name to model: the topics' own, the members of their unions, and what travels in headers."""
    models: dict[str, Any] = {
        "manifest": Manifest,
        "dead_letter_info": DeadLetterInfo,
        "dead_letter_decision": DeadLetterDecision,
    }
    for topic in REGISTRY:
        if topic.model is not None:
            models[topic.schema] = topic.model
            models |= {event_name(member): member for member in union_members(topic.model)}
    return dict(sorted(models.items()))


def union_members(model: Any) -> tuple[type[BaseModel], ...]:
    """Members of an annotated union; none for a model."""
    annotated = get_args(model)
    return get_args(annotated[0]) if annotated else ()


def event_name(model: type[BaseModel]) -> str:
    """The model's title, which is its class name unless it has another, in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", model.model_config.get("title") or model.__name__).lower()


def schema_path(event: str) -> str:
    """Path of an event's schema under ``schemas/``."""
    return f"{event}.v{VERSION}.schema.json"


def json_schema(event: str, model: Any) -> dict[str, Any]:
    """What a reader accepts, as JSON Schema; fields with a default may be left out, unknown ones are kept (rule C7)."""
    schema = _standard(TypeAdapter(model).json_schema(mode="validation"))
    named = {"$schema": DIALECT, "$id": f"urn:rollmill:{event}:v{VERSION}", "title": event}
    return {**named, **schema, **named}


def _standard(schema: Any) -> Any:
    """Bounds under the names of JSON Schema: for a number with custom validators pydantic keeps its own names."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = BOUNDS if schema.get("type") == "number" else {}
    return {named.get(key, key): _standard(value) for key, value in schema.items()}


def schema_files() -> dict[str, str]:
    """All schema files, by path under ``schemas/``."""
    return {
        schema_path(event): json.dumps(json_schema(event, model), indent=2) + "\n"
        for event, model in event_models().items()
    }
