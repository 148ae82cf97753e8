"""``rollmill ledger`` and ``rollmill evals``: the balance of tokens, and pass@k of eval sessions."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, kafka_settings, on_kafka
from rollmill.errors import EXIT_NOT_IN_ORDER


def ledger(
    as_json: AsJson = False,
    settle: Annotated[bool, typer.Option("--settle", help="Wait until nothing is pending.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C or settled.")] = False,
    timeout: Annotated[float, typer.Option(help="Longest wait of --settle, in seconds.")] = 60.0,
    every: Annotated[float | None, typer.Option(help="Seconds between two looks; else 2 with --watch.")] = None,
    oldest: Annotated[
        int, typer.Option(min=0, help="Name so many sessions with pending tokens, the longest waiting first.")
    ] = 0,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve the balance for Prometheus on this port instead of printing it, until SIGTERM."),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address to serve it on.")] = "127.0.0.1",
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Balance captured against trained, excluded, dead-lettered and pending. Exit code 3: tokens lost or doubled."""
    from rollmill.cli.ledger.console import LedgerOptions, run  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    if metrics_port is not None:
        from rollmill.cli.ledger.exporter import export  # noqa: PLC0415

        on_kafka(settings, export(settings, metrics_host, metrics_port, 15.0 if every is None else every))
        return
    pause = every if every is not None else 2.0 if watch else 0.5
    balance = on_kafka(settings, run(settings, LedgerOptions(as_json, settle, watch, timeout, pause, oldest)))
    raise SystemExit(0 if balance.balanced else EXIT_NOT_IN_ORDER)


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
    from rollmill.ops.ledger.pass_at_k import default_ks, read_evals, report, table  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    lines = report(on_kafka(settings, read_evals(settings)), right_from)
    ks = sorted(set(k)) if k else default_ks(lines)
    typer.echo(json.dumps([line.as_json(ks) for line in lines]) if as_json else "\n".join(table(lines, ks)))
