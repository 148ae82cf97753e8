"""The demo in front of services that run already: ``python -m relay.outside``, as docker-compose.yml does it.

Agents, trainer and checks run here; Kafka, the services and the engine (`relay.engine`, with the same seed) elsewhere.
Which cluster and topics, the environment says as it does to the services. Once for each prefix: the groups of a seed
have the same names again. The evaluator needs this package on its path; the checks expect a batcher whose
``max_staleness`` is 2.
"""

import asyncio
import json
import time
from typing import Annotated

import httpx
import typer
from rich.console import Console

from relay.display import Display, make_display
from relay.loop import Loop
from relay.model import use_one_thread, warm_start
from relay.options import Options
from relay.pipeline import Pipeline
from relay.report import Report, failures, summary
from relay.run import make_report
from rollmill.errors import EXIT_FATAL, RollmillError
from rollmill.settings import KafkaSettings


def main(
    capture: Annotated[str, typer.Option(help="Base URL of capture.")] = "http://127.0.0.1:8700",
    engine: Annotated[str, typer.Option(help="Base URL of the engine.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="The tenant's key, where capture asks for one.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Train so many steps at most, then drain.")] = 40,
    goal: Annotated[float, typer.Option(help="Drain as soon as five steps have this mean reward.")] = 0.95,
    min_rise: Annotated[float, typer.Option(help="Least rise of the reward; 0 asks for none.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Of weights, digits and sampling; the engine's, too.")] = 0,
    seconds: Annotated[float, typer.Option(help="Give up after so long.")] = 600.0,
) -> None:
    """Agents and a trainer that learns; the last line is one JSON object. Exit code 0: every check passed."""
    console = Console(stderr=True)
    display = make_display(console, live=False)
    pipeline = Pipeline(None, capture, engine, key)
    try:
        report = asyncio.run(_run(Options(steps, goal, seed, seconds=seconds), pipeline, display))
    except* (RollmillError, httpx.HTTPError, TimeoutError) as errors:
        display.say(f"the run ended early: {errors.exceptions}")
        raise SystemExit(EXIT_FATAL) from errors
    complaints = failures(report, min_rise=min_rise)
    for line in (summary(report), *(f"FAILED {complaint}" for complaint in complaints)):
        display.say(line)
    print(json.dumps(report.as_json()))
    raise SystemExit(1 if complaints else 0)


async def _run(options: Options, pipeline: Pipeline, display: Display) -> Report:
    began = time.monotonic()
    use_one_thread()
    model = await asyncio.to_thread(warm_start, options.seed)
    async with asyncio.timeout(options.seconds):
        played = await Loop(options, KafkaSettings(), pipeline, model, display).play()
    return make_report(options, played, display, 0, time.monotonic() - began)


if __name__ == "__main__":
    typer.run(main)
