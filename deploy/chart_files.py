"""Writes what of the chart follows from the code: ``python -m deploy.chart_files``, as a part of ``make schemas``.

In ``values.schema.json`` the definitions of the settings, so that a setting no service has is refused when the chart is
installed; ``files/topics.yaml``, of which the chart makes KafkaTopic resources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from rollmill.cli.generate.topics import GENERATED, topics_document
from rollmill.settings import KafkaSettings
from rollmill_batcher.settings import BatcherSettings
from rollmill_builder.settings import BuilderSettings
from rollmill_capture.settings import CaptureSettings
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_reward_merger.settings import RewardMergerSettings

CHART: Final = Path(__file__).parents[1] / "charts" / "rollmill"

PROGRAMS: Final[Mapping[str, type[KafkaSettings]]] = {
    "capture": CaptureSettings,
    "builder": BuilderSettings,
    "evaluator": EvaluatorSettings,
    "reward-merger": RewardMergerSettings,
    "batcher": BatcherSettings,
    "ledger": KafkaSettings,
}
"""What runs all the time, and the settings of each."""

OWNED: Final = frozenset(
    {
        *("bootstrap_servers", "security_protocol", "sasl_mechanism", "sasl_username", "sasl_password"),
        *("tls_ca_file", "tls_certificate_file", "tls_key_file", "tls_key_password", "tls_check_hostname"),
        *("process_index", "processes", "drain_seconds", "health_host", "health_port", "host_label", "failpoints"),
        *("host", "port", "api_keys_file", "spool_dir", "spill_directory"),
    }
)
"""Settings that the chart decides itself, from other values or because nothing else would work."""


def values_schema(written: dict[str, Any]) -> dict[str, Any]:
    """The schema of the values with its definitions of settings made anew; the rest is written by hand."""
    return {**written, "$defs": {**written.get("$defs", {}), **dict(_definitions())}}


def topics_file() -> str:
    """The registry, as the chart reads it."""
    text: str = yaml.safe_dump(topics_document(), sort_keys=False, width=120)
    return GENERATED + text


def _definitions() -> Iterator[tuple[str, dict[str, Any]]]:
    common = KafkaSettings.model_json_schema()["properties"]
    yield "settings", _settings(common, none=None)
    for service, model in PROGRAMS.items():
        fields = model.model_json_schema()["properties"]
        own = [name for name in fields if name not in OWNED]
        yield f"{service}-settings", _settings(fields, none=model.model_config.get("env_parse_none_str"))
        secrets = {name: {"$ref": "#/$defs/secret"} for name in sorted(own)}
        yield f"{service}-secrets", {"type": "object", "additionalProperties": False, "properties": secrets}


def _settings(fields: Mapping[str, Any], *, none: str | None) -> dict[str, Any]:
    """Of what a map of settings may hold; passwords and keys are never among it. ``none`` is the word for None."""
    names = sorted(name for name in fields if name not in OWNED and "password" not in json.dumps(fields[name]))
    properties = {name: _property(_types(fields[name]), none) for name in names}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(types: set[str], none: str | None) -> dict[str, Any]:
    """Null cannot be said: Helm takes a null for the absence of the value."""
    kinds = {"type": sorted(types - {"null"})}
    return {"anyOf": [kinds, {"const": none}]} if none is not None and "null" in types else kinds


def _types(field: Mapping[str, Any]) -> set[str]:
    """JSON types of a field; what refers to a model of its own is text or an object."""
    if "anyOf" in field:
        return set().union(*map(_types, field["anyOf"]))
    return {field["type"]} if "type" in field else {"string", "object"}


def main() -> None:
    schema = CHART / "values.schema.json"
    made = values_schema(json.loads(schema.read_text()))
    schema.write_text(json.dumps(made, indent=2) + "\n")
    (CHART / "files" / "topics.yaml").write_text(topics_file())


if __name__ == "__main__":
    main()
