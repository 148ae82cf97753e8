"""``rollmill batches``: what a person does about steps that wait for a trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmill.cli.options import Bootstrap, Prefix, kafka_settings, on_kafka

app = typer.Typer(no_args_is_help=True, help="Steps that wait for the trainer: return.")


@app.callback()
def batches() -> None:
    """Keeps `return` a command of its own, beside those to come."""


@app.command("return")
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
    placed = on_kafka(settings, return_steps(settings, SystemClock(), world_size, from_step, timeout))
    typer.echo(f"{placed.steps} steps from step {placed.next_step} on are laid out for {placed.world_size} ranks")
