from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollmill.cli.generate.files import differing
from rollmill.cli.generate.schemas import event_models, schema_path
from rollmill.codec import JSON, MSGPACK, decode, encode
from rollmill.errors import PoisonRecordError
from rollmill.topics import REGISTRY

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "schemas"
EXAMPLES = sorted((SCHEMAS / "examples").glob("*.json"))
JSON_HEADER = (("content-type", JSON.encode()),)
MSGPACK_HEADER = (("content-type", MSGPACK.encode()),)


def event_of(example: Path) -> str:
    return example.name.partition(".")[0]


def schema_of(event: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMAS / schema_path(event)).read_text())
    return schema


def test_generated_files_are_as_they_would_be_generated_now() -> None:
    assert [str(path.relative_to(ROOT)) for path in differing(ROOT)] == [], "run `make schemas` and commit"


@pytest.mark.parametrize("event", event_models())
def test_every_event_has_a_valid_schema_and_an_example(event: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(event))
    assert (SCHEMAS / "examples" / f"{event}.v1.json").exists()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_validate_against_schema_and_model(example: Path) -> None:
    value = json.loads(example.read_text())
    jsonschema.Draft202012Validator(schema_of(event_of(example))).validate(value)
    assert decode(event_models()[event_of(example)], example.read_bytes(), JSON_HEADER)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_survive_both_formats(example: Path) -> None:
    model = event_models()[event_of(example)]
    record = decode(model, example.read_bytes(), JSON_HEADER)
    assert decode(model, encode(record, MSGPACK), MSGPACK_HEADER) == record
    as_json = encode(record, JSON)
    assert decode(model, as_json, JSON_HEADER) == record
    jsonschema.Draft202012Validator(schema_of(event_of(example))).validate(json.loads(as_json))


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("completion_record", {"session_id": "a/b"}),
        ("session_closed", {"status": "done"}),
        ("evaluation", {"outcome_reward": "1.0"}),
        ("evaluation", {"outcome_reward": True}),
        ("policy_announcement", {"version": [0, -1]}),
        ("policy_announcement", {"at": -1.0}),
    ],
)
def test_schema_and_model_refuse_the_same_mistakes(event: str, change: dict[str, Any]) -> None:
    value = {**json.loads((SCHEMAS / "examples" / f"{event}.v1.json").read_text()), **change}
    assert not jsonschema.Draft202012Validator(schema_of(event)).is_valid(value)
    with pytest.raises(PoisonRecordError, match="invalid"):
        decode(event_models()[event], json.dumps(value).encode(), JSON_HEADER)


def test_the_topic_documents_name_every_topic_and_only_schemas_that_exist() -> None:
    topics = yaml.safe_load((SCHEMAS / "topics.yaml").read_text())["topics"]
    assert [entry["name"] for entry in topics] == [topic.name for topic in REGISTRY]
    asyncapi = yaml.safe_load((SCHEMAS / "asyncapi.yaml").read_text())
    assert list(asyncapi["channels"]) == [topic.name for topic in REGISTRY]
    references = [
        message["payload"]["schema"]["$ref"]
        for message in asyncapi["components"]["messages"].values()
        if "payload" in message
    ]
    assert references
    for path in [entry["schema"] for entry in topics if entry["schema"]] + references:
        assert (SCHEMAS / path).exists()
