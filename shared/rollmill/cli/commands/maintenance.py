"""``rollmill batches return`` and ``rollmill blobs gc``: steps for another number of ranks, unused large values."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, kafka_settings, on_kafka
from rollmill.errors import ConfigurationError, InvalidInputError

batches_app = typer.Typer(no_args_is_help=True, help="Steps that wait for the trainer: return.")
blobs_app = typer.Typer(help="Object storage of large values.", no_args_is_help=True)

LEAST_HOURS = 1.0
"""Longer than any transaction and any wait for Kafka; a blob that a spool still needs is kept in the trash as long."""


@batches_app.callback()
def _batches() -> None:
    """A callback makes typer treat ``return`` as a subcommand while it is the only one."""


@batches_app.command("return")
def return_batches(
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks that will read from now on.")],
    from_step: Annotated[int | None, typer.Option(min=0, help="Also acknowledged steps, from this one on.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; else ROLLMILL_RUN.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the batcher's answer.")] = 60.0,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Lay out the steps that are not acknowledged for another number of ranks. Stop the trainer first."""
    from rollmill.runtime.telemetry.clock import SystemClock  # noqa: PLC0415
    from rollmill.trainer.batches.resharding import return_steps  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    settings = settings if run is None else settings.model_copy(update={"run": run})
    answer = on_kafka(settings, return_steps(settings, SystemClock(), world_size, from_step, timeout))
    typer.echo(f"{answer.steps} steps from step {answer.next_step} on are laid out for {answer.world_size} ranks")


@blobs_app.callback()
def _blobs() -> None:
    """A callback makes typer treat ``gc`` as a subcommand while it is the only one."""


@blobs_app.command("gc")
def collect(
    older_than: Annotated[float, typer.Option(help="Hours; younger blobs may belong to records under way.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")] = False,
    as_json: AsJson = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Remove blobs that no retained record refers to: first to the trash, at a later call for good."""
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
    result = {**on_kafka(settings, work).as_dict(), "dry_run": dry_run}
    typer.echo(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))
