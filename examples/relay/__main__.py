"""The demo: ``python -m relay``. Exit code 0 means that every check of the run was passed."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from relay.display import Display, make_display
from relay.options import Layout, Options
from relay.report import Report, failures, summary
from relay.run import run
from relay.sabotage import Sabotage
from rollmill.errors import EXIT_FATAL, RollmillError

_FAILED = 1


def main(
    steps: Annotated[int, typer.Option(min=1, help="Train so many steps at most, then drain.")] = 40,
    goal: Annotated[float, typer.Option(help="Drain as soon as five steps have this mean reward.")] = 0.95,
    min_rise: Annotated[float, typer.Option(help="Least rise of the reward; 0 asks for none.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Of weights, digits and sampling.")] = 0,
    sabotage: Annotated[Sabotage, typer.Option(help="Spoils one thing: the demo has to notice.")] = Sabotage.NONE,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON at the end; the rest on stderr.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Keep Kafka's data and all logs here.")] = None,
    bootstrap_servers: Annotated[str | None, typer.Option(help="Use this cluster instead of an own one.")] = None,
    partitions: Annotated[int, typer.Option(min=1, help="Of the topics that are keyed by session.")] = 2,
    layout: Annotated[Layout, typer.Option(help="What the trainer computes on.")] = Layout.PACKED,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Data-parallel ranks; their gradients are summed.")] = 1,
    seconds: Annotated[float, typer.Option(help="Give up after so long.")] = 600.0,
) -> None:
    """Runs the closed loop: agents, capture, builder, evaluator, reward-merger, batcher, and a trainer that learns."""
    console = Console(stderr=as_json)
    display = make_display(console, live=console.is_terminal and not as_json)
    options = Options(steps, goal, seed, sabotage, partitions, seconds, layout, ranks, bootstrap_servers)
    try:
        report = _run(options, data_dir, display)
    except* (RollmillError, httpx.HTTPError, TimeoutError) as errors:
        _complain([f"the run ended early (--data-dir keeps its logs): {error}" for error in _leaves(errors)])
        raise SystemExit(EXIT_FATAL) from errors
    print(json.dumps(report.as_json()) if as_json else summary(report))
    _complain(complaints := failures(report, min_rise=min_rise))
    display.say(f"{len(complaints)} checks failed" if complaints else "every check passed")
    raise SystemExit(_FAILED if complaints else 0)


def _run(options: Options, data_dir: Path | None, display: Display) -> Report:
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(options, data_dir, display))
    with tempfile.TemporaryDirectory(prefix="rollmill-demo-") as directory:
        return asyncio.run(run(options, Path(directory), display))


def _leaves(errors: BaseExceptionGroup[Exception]) -> list[Exception]:
    return [
        leaf
        for error in errors.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


def _complain(lines: list[str]) -> None:
    for line in lines:
        print(f"FAILED {line}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
