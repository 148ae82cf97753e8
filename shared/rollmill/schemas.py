"""The published schemas, in the wheel and in the source tree: JSON Schema of every event, AsyncAPI, OpenAPI of capture.

```python
from rollmill import schemas

schemas.names()  # ['completion_event.v1.schema.json', …, 'openapi.json', 'topics.yaml']
schemas.load("trajectory.v1.schema.json")
```
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import orjson

_SUFFIXES = (".json", ".yaml")


def names() -> list[str]:
    """Names of all files, sorted."""
    return sorted(item.name for item in _folder().iterdir() if item.name.endswith(_SUFFIXES))


def text(name: str) -> str:
    """A file as it is. Raises KeyError: there is none of this name."""
    if name not in names():
        raise KeyError(f"no schema has the name {name!r}; those that there are: {', '.join(names())}")
    return (_folder() / name).read_text(encoding="utf-8")


def load(name: str) -> dict[str, Any]:
    """A file of JSON. Raises KeyError: there is none of this name; ValueError: it is YAML."""
    if not name.endswith(".json"):
        raise ValueError(f"{name!r} is no JSON; `text` returns it as it is")
    loaded: dict[str, Any] = orjson.loads(text(name))
    return loaded


def _folder() -> Traversable:
    """The wheel has the files beside the package's modules, the source tree at its root."""
    shipped = files("rollmill") / "schema_files"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "schemas"
