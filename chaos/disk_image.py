"""A small file system for the broker's data alone, so that its disk can be filled.

It is mounted in a mount namespace that only this program and its children see, and disappears with the last of them,
however they end. That takes root (or CAP_SYS_ADMIN); elsewhere the fault is skipped, with the reason.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

CLONE_NEWNS = 0x0002_0000
SIZE = "1500m"


def mount_disk_image(directory: Path) -> str | None:
    """Mount one at ``directory``. Returns None, or why that is not possible here."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        return "this system has no mount namespaces"
    if unshare(CLONE_NEWNS) != 0:
        return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
    private = ("mount", "--make-rprivate", "/")
    for command in (private, ("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "chaos", str(directory))):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return None
