"""The fresh work tree of a test run: where it comes from, and the steps that make it inside of the sandbox.

Everything that reads untrusted bytes runs inside: an archive with paths outside of its folder, or a patch that writes
through a link, reaches the sandbox's own folders only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path, PurePosixPath

from rollmill.errors import InfrastructureError
from rollmill.strategies.sandbox import Step

WORKTREE = "worktree_unavailable"
APPLY = "apply"
"""Name of the step that fails where the submission does not fit; any other failure is infrastructure."""
SOURCE = "/source"
ANSWER = "/job/answer"
KEPT = "/tmp/.kept"  # noqa: S108  # the sandbox's own /tmp
REVISION = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_./^~-]{0,199}$")
COPY = "cp -dR --preserve=mode,timestamps,links --"
EXCLUDED = ("*.pyc", "*.pyo", "**/__pycache__/**", "__pycache__/**", "**/.pytest_cache/**", ".pytest_cache/**")
"""Never part of a patch: files that running the tests creates."""


class SourceKind(StrEnum):
    """Form of a source."""

    REPOSITORY = "repository"
    BARE = "bare"
    BUNDLE = "bundle"
    FOLDER = "folder"
    ARCHIVE = "archive"


def resolve_source(sources: Path | None, name: str) -> Path:
    """The source ``name`` below ``sources``. Raises InfrastructureError where it is missing or not below it."""
    if sources is None:
        raise InfrastructureError(WORKTREE, "no folder of sources is configured: set ROLLMILL_EVALUATOR_SOURCES")
    root = sources.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise InfrastructureError(WORKTREE, f"source {name!r} is outside of the folder of sources")
    if not path.exists():
        raise InfrastructureError(WORKTREE, f"there is no source {name!r}")
    return path


def source_kind(path: Path) -> SourceKind:
    if path.is_dir():
        if (path / ".git").exists():
            return SourceKind.REPOSITORY
        return SourceKind.BARE if (path / "HEAD").is_file() and (path / "objects").is_dir() else SourceKind.FOLDER
    return SourceKind.BUNDLE if path.suffix == ".bundle" else SourceKind.ARCHIVE


def clone(commit: str) -> Step:
    """Clones the repository at ``commit`` into the current folder, for scripts that get their tests from git."""
    revision = shlex.quote(commit)
    cloned = f"git config --global safe.directory '*' && git clone --quiet --shared --no-checkout {SOURCE} ."
    return Step.shell("unpack", f"{cloned} && git checkout --quiet --detach {revision}")


def unpack(kind: SourceKind, commit: str, strip: int) -> Step:
    """Makes the tree of ``commit`` in the current folder, without any history."""
    repository = {
        SourceKind.REPOSITORY: f"{SOURCE}/.git",
        SourceKind.BARE: SOURCE,
        SourceKind.BUNDLE: "/tmp/.repository",  # noqa: S108  # the sandbox's own /tmp
    }
    match kind:
        case SourceKind.FOLDER:
            return Step.shell("unpack", f"{COPY} {SOURCE}/. .")
        case SourceKind.ARCHIVE:
            return Step.shell("unpack", f"tar -xf {SOURCE} --no-same-owner --strip-components={strip}")
        case SourceKind.BUNDLE:
            cloned = f"git clone --quiet --bare {SOURCE} {repository[kind]} && "
            return Step.shell("unpack", cloned + _checkout(repository[kind], commit) + f" && rm -rf {repository[kind]}")
        case _:
            return Step.shell("unpack", _checkout(repository[kind], commit))


def _checkout(repository: str, commit: str) -> str:
    """With an index outside of the repository, which is read-only. `git archive` would omit export-ignored files."""
    git = f"GIT_INDEX_FILE=/tmp/.index git -c safe.directory='*' --git-dir={repository}"
    revision = shlex.quote(f"{commit}^{{commit}}")
    return f"{git} read-tree {revision} && {git} --work-tree=. checkout-index --all && rm -f /tmp/.index"


def save_protected(paths: Sequence[str]) -> Step:
    """Saves the protected paths before the answer is applied."""
    lines = ["set -e", f"mkdir -p {KEPT}"]
    for path in paths:
        name, folder = _quoted(path)
        lines.append(f"if [ -e {name} ]; then mkdir -p {KEPT}/{folder}; {COPY} {name} {KEPT}/{folder}/; fi")
    return Step.shell("keep", "\n".join(lines))


def restore_protected(paths: Sequence[str]) -> Step:
    """Restores the saved paths: changed and deleted files come back, added ones go."""
    lines = ["set -e"]
    for path in paths:
        name, folder = _quoted(path)
        lines.append(f"rm -rf -- {name}")
        lines.append(f"if [ -e {KEPT}/{name} ]; then mkdir -p {folder}; {COPY} {KEPT}/{name} {folder}/; fi")
    return Step.shell("restore", "\n".join([*lines, f"rm -rf {KEPT}"]))


def _quoted(path: str) -> tuple[str, str]:
    """A path and its folder for the shell; ``./`` keeps one that begins with a dash from being an option."""
    pure = PurePosixPath(path)
    return shlex.quote(f"./{pure}"), shlex.quote(f"./{pure.parent}")


def apply_patch(excluded: Iterable[str], fuzz: int, folder: str = ".") -> Step:
    """Applies the patch in ``folder``; with ``fuzz``, `patch` tries where `git apply` rejects it."""
    options = " ".join(shlex.quote(f"--exclude={pattern}") for pattern in (*EXCLUDED, *excluded))
    command = f"git apply --whitespace=nowarn {options} {ANSWER}"
    if fuzz:
        command += f" || patch -p1 --batch --forward --no-backup-if-mismatch --fuzz={fuzz} --input={ANSWER}"
    return Step.shell(APPLY, f"cd {shlex.quote(folder)} && {{ {command}; }}")


def write_answer(path: str) -> Step:
    """Writes the answer to a file of the work tree."""
    name, folder = _quoted(path)
    return Step.shell(APPLY, f"mkdir -p {folder} && rm -rf -- {name} && cat {ANSWER} > {name}")
