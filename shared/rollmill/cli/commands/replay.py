"""``rollmill replay``: the command and its options."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, json_object, kafka_settings, on_kafka
from rollmill.errors import InvalidInputError

OFFSETS = "an offset, or partition:offset,partition:offset"


def replay(
    into: Annotated[str, typer.Option(help="Prefix of the replay's topics, with a dot at the end.")],
    since: Annotated[
        str | None, typer.Option(help="Sessions that began since: an ISO 8601 time, or 2h ago as 2h.")
    ] = None,
    from_offset: Annotated[str | None, typer.Option(help=f"Sessions that begin at {OFFSETS}.")] = None,
    builder: Annotated[str | None, typer.Option(help="Build with this strategy instead of the session's own.")] = None,
    builder_config: Annotated[str | None, typer.Option(help="Its configuration, a JSON object.")] = None,
    evaluator: Annotated[
        list[str] | None, typer.Option(help="Grade with this strategy; may be repeated. Else as recorded.")
    ] = None,
    evaluator_config: Annotated[str | None, typer.Option(help="Of the one evaluator, a JSON object.")] = None,
    max_staleness: Annotated[str | None, typer.Option(help="Inclusive; none is no limit.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="Another setting of a stage: name=value, e.g. min_k=4.")
    ] = None,
    as_json: AsJson = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Read the log again with other rules, into another prefix, and compare. The live run is only read."""
    from rollmill.cli.timestamps import parse_time  # noqa: PLC0415
    from rollmill.models import EvaluatorSpec, StrategySpec  # noqa: PLC0415
    from rollmill.ops.replay import Plan, replay  # noqa: PLC0415
    from rollmill.ops.replay.plan import settings_into  # noqa: PLC0415
    from rollmill.strategies.allow_list import allowed_by_hand  # noqa: PLC0415

    live = kafka_settings(bootstrap_servers, prefix)
    if evaluator_config is not None and len(evaluator or ()) != 1:
        raise InvalidInputError("--evaluator-config goes with exactly one --evaluator")
    if builder_config is not None and builder is None:
        raise InvalidInputError("--builder-config goes with --builder")
    graders = tuple(
        EvaluatorSpec(strategy=name, config=json_object(evaluator_config) or {}) for name in evaluator or ()
    )
    plan = Plan(
        live=live,
        into=settings_into(live, into),
        builder=None if builder is None else StrategySpec(strategy=builder, config=json_object(builder_config) or {}),
        evaluators=graders or None,
        since=None if since is None else parse_time(since, time.time()),
        from_offset=None if from_offset is None else offsets(from_offset),
        options=options([*(option or ()), *([] if max_staleness is None else [f"max_staleness={max_staleness}"])]),
    )
    by_hand = [builder, json_object(builder_config), *(evaluator or ()), json_object(evaluator_config)]
    with allowed_by_hand([*by_hand, *plan.options.values()]):
        comparison = on_kafka(live, replay(plan, lambda line: typer.echo(line, err=True)))
    typer.echo(json.dumps(comparison.as_json()) if as_json else comparison.table())


def offsets(text: str) -> int | dict[int, int]:
    """One offset for all partitions, or some by partition. Raises InvalidInputError."""
    if text.isdecimal():
        return int(text)
    pairs = [part.strip().partition(":") for part in text.split(",")]
    if not all(number.isdecimal() and offset.isdecimal() for number, _, offset in pairs):
        raise InvalidInputError(f"{text!r} is no offset: give {OFFSETS}")
    return {int(number): int(offset) for number, _, offset in pairs}


def options(given: list[str]) -> dict[str, Any]:
    """Values are JSON, ``none``, or text. Raises InvalidInputError."""
    found: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise InvalidInputError(f"{item!r} is no setting: give name=value")
        found[name.strip()] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
