"""docs/security.md names a test for each check: all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CITED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())


def exists(file: str, test: str) -> bool:
    path = ROOT / file
    if not path.is_file():
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return not test or test in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}


@pytest.mark.parametrize(("file", "test"), CITED, ids=lambda part: part or "all")
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    assert exists(file, test), "name another test"


def test_the_table_is_read() -> None:
    assert len(CITED) >= 20
