"""``python -m chaos``: seeds one after the other. Exit code 0: nothing was lost, doubled or otherwise wrong."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from chaos.mutations import Mutation
from chaos.runs import Job, damage, possible_kinds, run_jobs, summed_up
from chaos.schedule import Kind, mutation_plan, plan

FAILED = 1


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    first: Annotated[int, typer.Option(help="The first one.")] = 1,
    faults: Annotated[int, typer.Option(min=1, help="Per seed.")] = 7,
    kinds: Annotated[str, typer.Option(help="Only these, comma-separated, beside kills and failpoints.")] = "",
    pause: Annotated[float, typer.Option(help="Seconds between two groups of sessions.")] = 0.6,
    mutations: Annotated[str, typer.Option(help="Check the harness: spoil the services in these ways, or `all`.")] = "",
    data_dir: Annotated[Path | None, typer.Option(help="Keep all logs here.")] = None,
) -> None:
    """Runs the pipeline under faults and counts every token."""
    with _directory(data_dir) as directory:
        if mutations:
            names = list(Mutation) if mutations == "all" else [Mutation(name) for name in mutations.split(",")]
            raise SystemExit(_check_harness(directory, names, pause))
        wanted = [Kind(kind) for kind in kinds.split(",") if kind] or list(Kind)
        raise SystemExit(_run_seeds(directory, range(first, first + seeds), faults, wanted, pause))


@contextmanager
def _directory(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-chaos-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _run_seeds(directory: Path, seeds: range, faults: int, wanted: list[Kind], pause: float) -> int:
    kinds = possible_kinds(directory, wanted)
    jobs = [Job(f"seed-{seed}", seed, plan(seed, faults, kinds)) for seed in seeds]
    verdicts = asyncio.run(run_jobs(directory, jobs, pause))
    print(json.dumps(summed_up(verdicts)), flush=True)
    return 0 if all(verdict.passed for verdict in verdicts) else FAILED


def _check_harness(directory: Path, mutations: list[Mutation], pause: float) -> int:
    """Exit code 0 where each of the mutations was found out."""
    possible_kinds(directory, ())
    jobs = [Job(mutation.value, number, mutation_plan(mutation), mutation) for number, mutation in enumerate(mutations)]
    found = [damage(*pair) for pair in zip(mutations, asyncio.run(run_jobs(directory, jobs, pause)), strict=True)]
    for line in found:
        print(json.dumps(line), flush=True)
    return 0 if all(line["found"] for line in found) else FAILED


if __name__ == "__main__":
    typer.run(main)
