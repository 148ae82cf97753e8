"""Small git repositories for tests, and the patches that an agent would submit for them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IDENTITY = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")


@dataclass(frozen=True)
class Repository:
    """A repository with one commit."""

    path: Path

    @classmethod
    def made(cls, path: Path, files: Mapping[str, str]) -> Repository:
        path.mkdir(parents=True)
        repository = cls(path)
        repository.git("init", "--quiet")
        repository._write(files)
        repository.git("add", "--all")
        repository.git("commit", "--quiet", "--message", "Begin")
        return repository

    def git(self, *arguments: str) -> str:
        """The output of a git command in the repository. Raises CalledProcessError."""
        done = subprocess.run(("git", *IDENTITY, *arguments), cwd=self.path, check=True, capture_output=True, text=True)  # noqa: S603, S607  # fixed arguments of the tests
        return done.stdout

    def patch(self, files: Mapping[str, str | None]) -> str:
        """The diff that writes ``files``, new ones included; None deletes. The repository itself is not changed."""
        self._write(files)
        self.git("add", "--all")
        diff = self.git("diff", "--cached", "--binary")
        self.git("reset", "--quiet", "--hard")
        return diff

    def _write(self, files: Mapping[str, str | None]) -> None:
        for name, text in files.items():
            file = self.path / name
            if text is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
