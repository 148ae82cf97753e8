"""The frame of ``python -m rollmill_<service>``: arguments, and one line for every mistake that a person can make.

Nothing heavy is imported before a service is made: a missing package is one of those mistakes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rollmill.errors import EXIT_FATAL, FatalError, RollmillError
from rollmill.settings.sources import CONFIG

if TYPE_CHECKING:
    from rollmill.runtime.app import Service


def main(name: str, make: Callable[[], Service], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the service ``name`` that ``make`` makes; ends the process with its exit code."""
    options = _parser(name).parse_args(arguments)
    if options.config is not None:
        os.environ[CONFIG] = options.config
    try:
        service = make()
    except ModuleNotFoundError as error:
        _refuse(f"the {name} is not installed here (no module {error.name!r}): pip install 'rollmill[{name}]'")
    except RollmillError as error:
        _refuse(str(error), error.exit_code if isinstance(error, FatalError) else EXIT_FATAL)
    from rollmill.runtime.app import printed, run  # noqa: PLC0415  # comes with an extra

    if options.print_config:
        sys.stdout.write(printed(service.settings) + "\n")
        raise SystemExit(0)
    raise SystemExit(run(service))


def _refuse(message: str, code: int = EXIT_FATAL) -> NoReturn:
    sys.stderr.write(f"rollmill: {message}\n")
    raise SystemExit(code)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m rollmill_{name.replace('-', '_')}",
        description=f"Run the {name} until SIGTERM. Settings: ROLLMILL_* variables, over a file (docs/settings.md).",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="settings file; else ROLLMILL_CONFIG, else ./rollmill.toml")
    parser.add_argument("--print-config", action="store_true", help="print the settings, secrets masked, and end")
    return parser
