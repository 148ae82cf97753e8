"""Pytest fixtures: the programs of Prometheus. Where one is missing the test is skipped, and fails in CI."""

from __future__ import annotations

import shutil

import pytest

from rollmill.testing.requirements import fail_in_ci_or_skip


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        fail_in_ci_or_skip(f"{name} is not on the PATH; `make test` gets it where Debian's packages can be had")
    return found


@pytest.fixture
def prometheus() -> str:
    return _program("prometheus")


@pytest.fixture
def promtool() -> str:
    return _program("promtool")
