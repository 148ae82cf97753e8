"""``rollmill init``: writes a small project (agent, grader, trainer, settings) that runs as it is.

The files are in ``project``, each with ``.txt`` behind its name; ``{name}`` is the project's.
"""

from __future__ import annotations

import re
from pathlib import Path

from rollmill.errors import InvalidInputError

TEMPLATES = Path(__file__).parent / "project"
SUFFIX = ".txt"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)


def write_project(directory: Path) -> list[Path]:
    """The files that were written. Raises InvalidInputError for a name that topics cannot begin with, and where a file
    is there already: nothing is written then.
    """
    name = directory.resolve().name
    if not NAME.fullmatch(name):
        raise InvalidInputError(f"{name!r} cannot begin the names of topics: use letters, digits, - and _")
    texts = {
        directory / template.name.removesuffix(SUFFIX): template.read_text(encoding="utf-8").replace("{name}", name)
        for template in sorted(TEMPLATES.glob(f"*{SUFFIX}"))
    }
    there = [path.name for path in texts if path.exists()]
    if there:
        raise InvalidInputError(f"{directory} has {', '.join(there)} already: choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
