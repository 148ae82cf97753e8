"""docs/security.md names a test for each check: all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CITED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
PENDING: frozenset[str] = frozenset(
    {
        "tests/integration/test_client_faults.py",
        "tests/property/test_decode_properties.py",
        "tests/unit/capture/test_isolation.py",
        "tests/unit/capture/test_reply_bounds.py",
        "tests/unit/capture/test_tenants.py",
        "tests/unit/test_dead_letters.py::test_f2_what_a_client_causes_never_counts",
        "tests/unit/test_foreign_code.py",
        "tests/unit/test_spec_maxima.py",
    }
)
"""Of checks that are not in yet; whoever adds one removes it here."""


def exists(file: str, test: str) -> bool:
    path = ROOT / file
    if not path.is_file():
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return not test or test in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}


@pytest.mark.parametrize(("file", "test"), CITED, ids=lambda part: part or "all")
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    pending = file in PENDING or f"{file}::{test}" in PENDING
    assert exists(file, test) is not pending, "name another test" if not pending else "remove it from PENDING"


def test_the_table_is_read() -> None:
    assert len(CITED) >= 20
    assert {name.partition("::")[0] for name in PENDING} <= {file for file, _ in CITED}
