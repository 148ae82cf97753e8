"""Where settings come from: what the code gives, environment variables, then a file of TOML."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, ClassVar

from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from rollmill.errors import ConfigurationError

PREFIX = "ROLLMILL_"
CONFIG = f"{PREFIX}CONFIG"
"""The variable that names the file."""
FILE = Path("rollmill.toml")
"""Read from the working directory where the variable names none."""


class ProgramSettings(BaseSettings):
    """Settings of one program. In the file, its own ``section`` is over the names outside of all sections."""

    # A complaint would show all that was given, secrets with it.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    section: ClassVar[str] = ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Three sources, the first one wins."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, InitSettingsSource(settings_cls, file_values(cls.section))


def config_file() -> Path | None:
    """The file that is read; None: there is none. Raises ConfigurationError where the named one is missing."""
    named = os.environ.get(CONFIG)
    if not named:
        return FILE if FILE.is_file() else None
    if not Path(named).is_file():
        raise ConfigurationError(f"the settings file {named} ({CONFIG}, --config) is not there")
    return Path(named)


def file_content() -> dict[str, Any]:
    """Names and sections as the file has them. Raises ConfigurationError where it is no TOML."""
    path = config_file()
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as TOML: {error}") from error


def file_values(section: str) -> dict[str, Any]:
    """What the file gives a program of ``section``; empty: one without a section of its own."""
    content = file_content()
    own = content.get(section, {}) if section else {}
    return {**content, **(own if isinstance(own, dict) else {})}
