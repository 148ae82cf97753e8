"""Pytest fixtures: Prometheus' own programs; a test that needs one that is not there is skipped with the reason."""

from __future__ import annotations

import shutil

import pytest


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH; `make test` gets it where Debian's packages can be had")
    return found


@pytest.fixture
def prometheus() -> str:
    return _program("prometheus")


@pytest.fixture
def promtool() -> str:
    return _program("promtool")
