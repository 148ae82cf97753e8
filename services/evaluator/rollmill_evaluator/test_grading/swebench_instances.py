"""The config of `swebench_harness`, and its instance: given in the config, or found in a file of the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from rollmill.errors import NotGradedError
from rollmill.models.base import Record
from rollmill_evaluator.test_grading.config import Name, Resources
from rollmill_evaluator.test_grading.scoring import VerdictRewards
from rollmill_evaluator.test_grading.submission import Submission
from rollmill_evaluator.test_grading.workspace import REVISION, resolve_source

INSTANCE_INVALID = "instance_invalid"
FIELDS = (
    "instance_id",
    "image",
    "repo",
    "version",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "log_parser",
    "eval_type",
    "eval_script",
)
"""Fields that the package's grading needs of an instance; data sets of its version 5 have them all."""


class SwebenchHarnessConfig(Record):
    """The config of `swebench_harness`."""

    instance: dict[str, Any] | None = None
    """The instance itself, a row of the data set."""
    instances: Name | None = None
    """A file of instances (JSON, or one per line) below the evaluator's folder of sources."""
    instance_id: Name | None = None
    """Which one of ``instances``."""
    runtime: Literal["container", "local"] = "container"
    """``container``: in the instance's image, on a Docker engine. ``local``: in this machine's sandbox, for instances
    that need nothing but the evaluator's own tools."""
    source: Name | None = None
    """For ``local``: the repository that holds the base commit, below the folder of sources."""
    answer: Submission = Submission()
    exclude: tuple[Name, ...] = ()
    """Patterns of paths that are left out of the patch, in addition to files that running Python creates."""
    fuzz: int = Field(default=5, ge=0, le=10)
    """Lines of context that `patch` may ignore where `git apply` rejects a hunk."""
    rewards: VerdictRewards = VerdictRewards()
    environment: dict[str, str] = Field(default_factory=dict)
    resources: Resources = Resources(test_seconds=1800.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.instance is None) == (self.instances is None):
            raise ValueError("give either an instance, or a file of instances with an instance_id")
        if (self.instances is None) != (self.instance_id is None):
            raise ValueError("give instances and instance_id together: the id selects one instance of the file")
        if (self.runtime == "local") != (self.source is not None):
            raise ValueError("source is for runtime: local, and needed there")
        if self.answer.write_to is not None:
            raise ValueError("the answer to a SWE-bench instance is a patch")
        if self.instance is not None:
            require_complete(self.instance)
        return self


def require_complete(instance: dict[str, Any]) -> dict[str, Any]:
    """``instance``, if it has all fields that grading needs. Raises ValueError with those that are missing."""
    if missing := [name for name in FIELDS if name not in instance]:
        raise ValueError(f"the instance lacks {', '.join(missing)}; data sets of swebench 5 have them")
    if not REVISION.fullmatch(str(instance.get("base_commit", "HEAD"))):
        raise ValueError(f"base_commit {instance['base_commit']!r} is not a git revision")
    return instance


def find_instance(sources: Path | None, name: str, instance_id: str) -> dict[str, Any]:
    """The instance with this id in the file. Raises InfrastructureError where the file is missing, NotGradedError where
    the instance is, or where it is not valid.
    """
    try:
        rows = _rows(resolve_source(sources, name).read_bytes())
        return require_complete(next(row for row in rows if row["instance_id"] == instance_id))
    except StopIteration as error:
        raise NotGradedError(INSTANCE_INVALID, f"{name} holds no instance {instance_id!r}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise NotGradedError(INSTANCE_INVALID, f"{name}: {error}") from error


def _rows(data: bytes) -> list[dict[str, Any]]:
    if data.lstrip().startswith(b"["):
        rows: list[dict[str, Any]] = orjson.loads(data)
        return rows
    return [orjson.loads(line) for line in data.splitlines() if line.strip()]
