"""The repository's address, as pyproject.toml has it: ``python -m deploy.repository_address [URL | --check URL]``.

Without an argument it is printed. With one, every file that has it gets the new one (``make address URL=…``).
``--check`` compares only, for the release: an index page keeps its links for ever.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ADDRESS: Final = re.compile(r"https://[\w.-]+/[\w.-]+/[\w.-]+")


def current(root: Path = ROOT) -> str:
    """The address, without a slash at its end."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str = project["urls"]["Repository"]
    return address


def files_with(address: str, root: Path = ROOT) -> list[Path]:
    """Tracked files that contain the address."""
    command = ["git", "grep", "-lzF", address]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.split("\0")  # noqa: S603
    return [root / name for name in names if name]


def move(address: str, root: Path = ROOT) -> list[Path]:
    """Write another address into every file that has the current one; returns the files. ValueError: not an address."""
    if not ADDRESS.fullmatch(address):
        raise ValueError(
            f"{address!r} is not the address of a repository: https://host/owner/name, without a slash behind"
        )
    before = current(root)
    changed = files_with(before, root)
    for path in changed:
        path.write_text(path.read_text(encoding="utf-8").replace(before, address), encoding="utf-8")
    return changed


def main(arguments: list[str]) -> int:
    """Exit code 1: the address differs from the one to check. 64: not an address."""
    match arguments:
        case []:
            print(current())  # noqa: T201
        case ["--check", address]:
            if address != current():
                advice = f"run `make address URL={address}`, commit, and tag again"
                print(f"pyproject.toml has the address {current()}: {advice}", file=sys.stderr)  # noqa: T201
                return 1
        case [address]:
            try:
                print("\n".join(str(path.relative_to(ROOT)) for path in move(address)))  # noqa: T201
            except ValueError as error:
                print(error, file=sys.stderr)  # noqa: T201
                return 64
        case _:
            print("give one address, or --check and one", file=sys.stderr)  # noqa: T201
            return 64
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
