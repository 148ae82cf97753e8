"""TransferQueue as a contender, in a process of its own: its packages are in ``.rollmill/bench-venv``.

That environment is made here where it is missing. torch is the project's own: a ``.pth`` file puts the project's
packages behind those of the environment, so that pip finds torch installed, and both sides run with the same one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".rollmill" / "bench-venv"
PACKAGES = ("TransferQueue==0.1.11", "ray==2.60.0", "tensordict==0.15.3")
INSTALL_SECONDS = 900.0
SECONDS = 300.0


class MissingError(Exception):
    """Why there is no TransferQueue here."""


def transfer_queue(lengths: list[int]) -> dict[str, Any]:
    """``seconds`` of the fastest round of one put and one get, or None with the ``reason``."""
    try:
        python = _installed()
    except MissingError as error:
        return {"seconds": None, "reason": str(error)}
    script = Path(__file__).with_name("queue_process.py")
    try:
        done = subprocess.run(  # noqa: S603  # our own script
            [python, script], input=json.dumps(lengths), capture_output=True, text=True, check=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"seconds": None, "reason": f"no answer in {SECONDS} seconds"}
    except subprocess.CalledProcessError as error:
        return {"seconds": None, "reason": _last_words(error)}
    rounds = json.loads(done.stdout.strip().splitlines()[-1])
    return {"seconds": min(rounds), "rounds": len(rounds), "packages": PACKAGES}


def _installed() -> Path:
    """The Python of the environment; made anew where it is missing, unfinished or of other packages."""
    python, stamp = VENV / "bin" / "python", VENV / ".installed"
    wanted = json.dumps([PACKAGES, _own_packages()])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(PACKAGES)} into {VENV.relative_to(ROOT)}", file=sys.stderr)
    _run(sys.executable, "-m", "venv", "--clear", str(VENV))
    packages = sysconfig.get_path("purelib", "venv", {"base": str(VENV), "platbase": str(VENV)})
    Path(packages, "project.pth").write_text(_own_packages() + "\n", encoding="utf-8")
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _own_packages() -> str:
    return sysconfig.get_path("purelib")


def _run(*command: str) -> None:
    """Raises MissingError. Standard output belongs to the benchmark's result, so pip's words go to standard error."""
    try:
        done = subprocess.run(  # noqa: S603  # our own commands
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS
        )
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stdout)
        raise MissingError(f"TransferQueue does not install: {_last_words(error)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"TransferQueue does not install: {error}") from error
    sys.stderr.write(done.stdout)


def _last_words(error: subprocess.CalledProcessError) -> str:
    said = (error.stderr or error.stdout or "").strip().splitlines()
    return said[-1] if said else f"no word, exit code {error.returncode}"
