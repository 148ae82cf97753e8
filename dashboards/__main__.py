"""``python -m dashboards``: ``generate`` the files of the tree, or ``preview`` what they show."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dashboards.files import write

PICTURES = Path(".rollmill/dashboards")
RECORDING = "recording.json"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def generate() -> None:
    """Write the dashboards and docs/metrics.md from the code."""
    for path in write():
        typer.echo(f"written: {path}")


@app.command()
def preview(
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = PICTURES,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the demo that is recorded.")] = 25,
    again: Annotated[bool, typer.Option("--again", help="Draw what was recorded before.")] = False,
    bootstrap_servers: Annotated[str | None, typer.Option(help="Use this cluster instead of an own one.")] = None,
) -> None:
    """Play the demo under a Prometheus and draw every panel of the overview from what it recorded."""
    from dashboards.show import draw, load, record, save  # noqa: PLC0415  # torch and matplotlib take seconds

    folder.mkdir(parents=True, exist_ok=True)
    if not again:
        with tempfile.TemporaryDirectory(prefix="rollmill-dashboards-") as work:
            save(asyncio.run(record(_prometheus(), Path(work), steps, bootstrap_servers)), folder / RECORDING)
    for file in draw(load(folder / RECORDING), folder):
        typer.echo(f"drawn: {file}")


def _prometheus() -> str:
    program = shutil.which("prometheus")
    if program is None:
        typer.echo("prometheus is not on the PATH (Debian's package has it)", err=True)
        raise SystemExit(1)
    return program


if __name__ == "__main__":
    app()
