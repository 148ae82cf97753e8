"""TransferQueue as a contender, in a process of its own, where ``.rollmill/bench-venv`` has it.

To install it there: ``python -m venv .rollmill/bench-venv``, then its pip: ``install torch TransferQueue``.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".rollmill" / "bench-venv" / "bin" / "python"
SECONDS = 300.0


def transfer_queue(lengths: list[int]) -> dict[str, Any]:
    """``seconds`` of the fastest round of one put and one get, or None with the ``reason``."""
    if not PYTHON.exists():
        return {"seconds": None, "reason": f"{PYTHON.relative_to(ROOT)} is missing"}
    script = Path(__file__).with_name("queue_process.py")
    try:
        done = subprocess.run(  # noqa: S603  # our own script
            [PYTHON, script], input=json.dumps(lengths), capture_output=True, text=True, check=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"seconds": None, "reason": f"no answer in {SECONDS} seconds"}
    except subprocess.CalledProcessError as error:
        return {"seconds": None, "reason": (error.stderr.strip().splitlines() or ["no word"])[-1]}
    rounds = json.loads(done.stdout.strip().splitlines()[-1])
    return {"seconds": min(rounds), "rounds": len(rounds)}
