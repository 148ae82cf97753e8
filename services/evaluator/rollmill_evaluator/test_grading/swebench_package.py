"""Calls of the package ``swebench``, imported when the first instance is graded: it takes seconds, and is an extra."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Protocol

from rollmill.errors import NotGradedError
from rollmill_evaluator.test_grading.swebench_instances import INSTANCE_INVALID

SWEBENCH_MISSING = "swebench_missing"
START = ">>>>> Start Test Output"
"""The line that an instance's script prints before its tests."""
PARTS = {"FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "pass_to_pass"}


class TestSpec(Protocol):
    """The part of the package's own class that is used here."""

    instance_id: str
    log_parser: str

    @property
    def eval_script(self) -> str: ...


def test_spec(instance: dict[str, Any]) -> TestSpec:
    """The package's specification of ``instance``. Raises NotGradedError without the package, or for a bad instance."""
    utils, parsers = _imported("swebench.harness.utils"), _imported("swebench.harness.log_parsers")
    try:
        spec: TestSpec = utils.make_test_spec(instance)
    except (KeyError, TypeError, ValueError) as error:
        raise NotGradedError(INSTANCE_INVALID, repr(error)) from error
    if spec.log_parser not in parsers.PARSER_REGISTRY:
        raise NotGradedError(INSTANCE_INVALID, f"swebench {version()} has no log parser {spec.log_parser!r}")
    return spec


def report(spec: TestSpec, patch: str, log: str) -> dict[str, Any]:
    """The package's report on the log of a run."""
    grading = _imported("swebench.harness.grading")
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "policy", "model_patch": patch}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log)
        found: dict[str, Any] = grading.get_eval_report(spec, prediction, str(path), True)[spec.instance_id]  # noqa: FBT003  # the package's own order
    return found


def shares(found: dict[str, Any]) -> dict[str, float]:
    """The share of tests of each kind with the expected result; empty where the log could not be parsed."""
    status = found.get("tests_status", {})
    counts = {
        name: (len(status[part]["success"]), len(status[part]["failure"])) for part, name in PARTS.items() if status
    }
    return {name: good / (good + bad) for name, (good, bad) in counts.items() if good + bad}


def version() -> str:
    return version_of("swebench")


def _imported(name: str) -> Any:
    try:
        with _same_environment():
            return import_module(name)
    except ImportError as error:
        raise NotGradedError(SWEBENCH_MISSING, f"pip install 'rollmill[swebench]': {error}") from error


@contextmanager
def _same_environment() -> Iterator[None]:
    """The package loads a file ``.env`` when imported: remove what that adds, so that it configures nothing here."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
