"""The tree as docs/architecture.md promises it: small folders and files, a map in every package, no import circle."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "shared", *sorted(path for path in (ROOT / "services").iterdir() if path.is_dir()))
MODULES_IN_A_FOLDER, LINES_OF_A_FILE, WORDS_OF_A_MAP = 16, 300, 12


def modules() -> dict[str, Path]:
    """Every module of the library and the services, the test kit included, by its dotted name."""
    found = {}
    for source in SOURCES:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, imports for type checkers and inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def graph() -> Mapping[str, set[str]]:
    return {
        name: {used for used in imports(path) if used in MODULES and used != name} for name, path in MODULES.items()
    }


def test_no_folder_holds_more_modules_than_a_person_can_survey() -> None:
    folders = Counter(path.parent.relative_to(ROOT) for path in MODULES.values())
    assert {str(folder): n for folder, n in folders.items() if n > MODULES_IN_A_FOLDER} == {}


def test_no_file_is_longer_than_a_person_reads_at_once() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > LINES_OF_A_FILE} == {}


@pytest.mark.parametrize("name", sorted(name for name, path in MODULES.items() if path.name == "__init__.py"))
def test_a_package_begins_with_its_map(name: str) -> None:
    text = ast.get_docstring(ast.parse(MODULES[name].read_text())) or ""
    assert len(text.split()) >= WORDS_OF_A_MAP, f"{name}: its docstring says too little: {text!r}"


def test_there_is_no_circle_of_imports() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
