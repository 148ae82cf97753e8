"""Runs the benchmarks: `make bench`, `make bench ARGS=--json`, `make bench ARGS="--save --note 'idle machine'"`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import batcher, capture, codec_formats
from benchmarks.provenance import provenance

BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {
    "batcher": batcher.measure,
    "capture": capture.measure,
    "codec_formats": codec_formats.measure,
}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _options()
    chosen = options.only or list(BENCHMARKS)
    results = {name: BENCHMARKS[name]() for name in chosen}
    document = {**provenance(), "note": options.note, "results": results}
    if not options.json:
        print(json.dumps(results, indent=2))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        for name in chosen:
            (RESULTS / f"{name}.json").write_text(json.dumps({**document, "results": results[name]}, indent=2) + "\n")
    if options.json:
        print(json.dumps(document))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), help="run one of them; may be repeated")
    return parser.parse_args()


main()
