"""SWE-bench instances: given in a config, or found in a file of the operator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from rollmill.errors import NotGradedError
from rollmill.models.base import Record
from rollmill_evaluator.test_grading.config import Name, Resources, Rewards
from rollmill_evaluator.test_grading.submission import Submission
from rollmill_evaluator.test_grading.workspace import REVISION, located

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
"""What the package's grading needs of an instance; a data set of its version 5 has them all."""


class SwebenchHarnessConfig(Record):
    """The config of `swebench_harness`."""

    instance: dict[str, Any] | None = None
    """The instance itself, as a row of the data set."""
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
    """Patterns of paths that are left out of the patch, beside what running Python leaves behind."""
    fuzz: int = Field(default=5, ge=0, le=10)
    """Lines of context that may differ where git finds no place for a hunk."""
    rewards: Rewards = Rewards()
    environment: dict[str, str] = Field(default_factory=dict)
    resources: Resources = Resources(test_seconds=1800.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.instance is None) == (self.instances is None):
            raise ValueError("give either an instance, or a file of instances with an instance_id")
        if (self.instances is None) != (self.instance_id is None):
            raise ValueError("instance_id says which one of the file instances is meant: they go together")
        if (self.runtime == "local") != (self.source is not None):
            raise ValueError("source is for runtime: local, and needed there")
        if self.answer.write_to is not None:
            raise ValueError("the answer to a SWE-bench instance is a patch")
        if self.instance is not None:
            complete(self.instance)
        return self


def complete(instance: dict[str, Any]) -> dict[str, Any]:
    """``instance`` if it has all that grading needs. Raises ValueError with what is missing."""
    if missing := [name for name in FIELDS if name not in instance]:
        raise ValueError(f"the instance lacks {', '.join(missing)}; data sets of swebench 5 have them")
    if not REVISION.match(str(instance.get("base_commit", "HEAD"))):
        raise ValueError(f"base_commit {instance['base_commit']!r} is no revision")
    return instance


def found(sources: Path | None, name: str, instance_id: str) -> dict[str, Any]:
    """The instance of that id in the file. Raises InfrastructureError without the file, NotGradedError without it."""
    try:
        rows = _rows(located(sources, name).read_bytes())
        return complete(next(row for row in rows if row["instance_id"] == instance_id))
    except StopIteration as error:
        raise NotGradedError(INSTANCE_INVALID, f"{name} holds no instance {instance_id!r}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise NotGradedError(INSTANCE_INVALID, f"{name}: {error}") from error


def _rows(data: bytes) -> list[dict[str, Any]]:
    if data.lstrip().startswith(b"["):
        rows: list[dict[str, Any]] = orjson.loads(data)
        return rows
    return [orjson.loads(line) for line in data.splitlines() if line.strip()]
