"""``python -m chaos``: one run for each seed. Exit code 0: nothing was lost, doubled or otherwise wrong."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from chaos.campaign import RunSpec, available_kinds, mutation_line, run_all, summary_line
from chaos.faults.fault_plan import FaultKind, mutation_plan, plan
from chaos.mutations import Mutation

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
        wanted = [FaultKind(kind) for kind in kinds.split(",") if kind] or list(FaultKind)
        raise SystemExit(_run_seeds(directory, range(first, first + seeds), faults, wanted, pause))


@contextmanager
def _directory(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-chaos-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _run_seeds(directory: Path, seeds: range, faults: int, wanted: list[FaultKind], pause: float) -> int:
    kinds = available_kinds(directory, wanted)
    specs = [RunSpec(f"seed-{seed}", seed, plan(seed, faults, kinds)) for seed in seeds]
    results = asyncio.run(run_all(directory, specs, pause))
    print(json.dumps(summary_line(results)), flush=True)
    return 0 if all(result.passed for result in results) else FAILED


def _check_harness(directory: Path, mutations: list[Mutation], pause: float) -> int:
    """Exit code 0 where every mutation was detected."""
    available_kinds(directory, ())
    specs = [
        RunSpec(mutation.value, number, mutation_plan(mutation), mutation) for number, mutation in enumerate(mutations)
    ]
    found = [
        mutation_line(*pair) for pair in zip(mutations, asyncio.run(run_all(directory, specs, pause)), strict=True)
    ]
    for line in found:
        print(json.dumps(line), flush=True)
    return 0 if all(line["found"] for line in found) else FAILED


if __name__ == "__main__":
    typer.run(main)
