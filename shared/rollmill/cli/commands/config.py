"""``rollmill config``: the commands and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmill.cli.options import AsJson
from rollmill.errors import EXIT_NOT_IN_ORDER

app = typer.Typer(no_args_is_help=True, help="Settings: what holds, and what is wrong.")


@app.command()
def show(
    program: Annotated[str | None, typer.Argument(help="capture, builder, … or client; else all of them.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print every setting with its value, secrets masked, and where the value comes from."""
    from rollmill.cli.settings_report import as_table, found  # noqa: PLC0415
    from rollmill.models import dump_json  # noqa: PLC0415

    settings = found(program)
    typer.echo(dump_json([item._asdict() for item in settings]).decode() if as_json else as_table(settings))


@app.command()
def check() -> None:
    """Find mistakes in the settings of all programs. Exit code 3: there is one."""
    from rollmill.cli.settings_report import mistakes  # noqa: PLC0415

    lines = mistakes()
    for line in lines:
        typer.echo(line)
    typer.echo("the settings are not in order" if lines else "the settings are in order")
    raise SystemExit(EXIT_NOT_IN_ORDER if lines else 0)
