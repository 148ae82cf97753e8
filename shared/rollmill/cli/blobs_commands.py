"""``rollmill blobs``: object storage of large values."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, kafka_settings, on_kafka
from rollmill.errors import ConfigurationError, InvalidInputError

app = typer.Typer(help="Object storage of large values.", no_args_is_help=True)

LEAST_HOURS = 1.0
"""Longer than any transaction and any wait for Kafka; what a spool held back lies in the trash for as long again."""


@app.callback()
def _blobs() -> None:
    """Commands of ``rollmill blobs`` keep their own names, also while there is only one."""


@app.command("gc")
def collect(
    older_than: Annotated[float, typer.Option(help="Hours; younger blobs may belong to records under way.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: AsJson = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Take away blobs that no retained record refers to: first to the trash, at a later call for good."""
    from rollmill.runtime.claim_check.blob_store import BlobStore  # noqa: PLC0415
    from rollmill.runtime.claim_check.garbage_collection import collect_garbage, references  # noqa: PLC0415
    from rollmill.runtime.telemetry.clock import SystemClock  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    if not settings.claim_check_url:
        raise ConfigurationError("there is no object storage to sweep: set ROLLMILL_CLAIM_CHECK_URL")
    if older_than < LEAST_HOURS:
        raise InvalidInputError(f"--older-than must be at least {LEAST_HOURS:g} hour: records may be under way")
    store = BlobStore(settings.claim_check_url, settings.prefix)
    work = collect_garbage(
        store,
        lambda: references(settings),
        now=SystemClock().now(),
        safety_seconds=older_than * 3600,
        dry_run=dry_run,
    )
    swept = on_kafka(settings, work)
    said = {**swept.as_dict(), "dry_run": dry_run}
    typer.echo(json.dumps(said) if as_json else "\n".join(f"{name}: {value}" for name, value in said.items()))
