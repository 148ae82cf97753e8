"""Every setting by the section of the file that may hold it: from ``names.json``, which `make schemas` writes.

A program knows the settings of all others by it, without importing them: they share one environment and one file.
"""

from __future__ import annotations

from pathlib import Path

import orjson

SECTIONS: dict[str, list[str]] = orjson.loads(Path(__file__).with_name("names.json").read_bytes())
