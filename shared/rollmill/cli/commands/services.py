"""``rollmill up`` and ``init``: Kafka and all services on one machine, and a project to begin with."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rollmill.cli.options import Bootstrap, Prefix
from rollmill.errors import ConfigurationError


def up(
    upstream: Annotated[str, typer.Option(help="Base URL of the model server, e.g. http://127.0.0.1:8000")],
    data_dir: Annotated[Path, typer.Option(help="Kafka's data and the services' logs.")] = Path(".rollmill"),
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
    port: Annotated[int, typer.Option(help="Of capture.")] = 8700,
    kafka_port: Annotated[int, typer.Option(help="Of the Kafka that is started here.")] = 9092,
    health_port: Annotated[
        int | None, typer.Option(help="Of capture's /metrics, those of the other services follow; else free ones.")
    ] = None,
) -> None:
    """Run Kafka (unless --bootstrap-servers names one) and all five services here, until Ctrl-C."""
    _require_services()
    from rollmill.cli.up import Up, run  # noqa: PLC0415  # needs what was just looked for

    raise SystemExit(asyncio.run(run(Up(upstream, data_dir, bootstrap_servers, prefix, port, kafka_port, health_port))))


def init(directory: Annotated[Path, typer.Argument(help="A new folder; its name begins the run's topics.")]) -> None:
    """Write a small project: agent, grader, trainer, settings. It trains as it is."""
    from rollmill.cli.init import write_project  # noqa: PLC0415

    for path in write_project(directory):
        typer.echo(f"written: {path}")
    typer.echo(f"next: cd {directory}, and follow README.md")


def _require_services() -> None:
    missing = [name for name in ("faststream", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the services are not installed ({', '.join(missing)}): pip install 'rollmill[services,embedded]'"
        )
