"""``rollmill evals``: pass@k by data set and policy version."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, kafka_settings, on_kafka


def evals(
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="May be repeated; else 1 and what all have.")
    ] = None,
    right_from: Annotated[float, typer.Option(help="Least reward of a right answer.")] = 1.0,
    as_json: AsJson = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Report eval sessions: pass@k by data set and policy version, from the trajectories that are kept."""
    from rollmill.ops.ledger.evals import read_evals  # noqa: PLC0415
    from rollmill.ops.ledger.pass_at_k import default_ks, report, table  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    lines = report(on_kafka(settings, read_evals(settings)), right_from)
    ks = sorted(set(k)) if k else default_ks(lines)
    typer.echo(json.dumps([line.as_json(ks) for line in lines]) if as_json else "\n".join(table(lines, ks)))
