"""The fresh work tree of a test run: where it comes from, and the steps that make it inside of the sandbox.

Everything that reads untrusted bytes runs inside: an archive that climbs out of its folder, or a patch that writes
through a link, meets the sandbox's own folders and nothing else.
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
SOURCE = "/source"
ANSWER = "/job/answer"
KEPT = "/tmp/.kept"  # noqa: S108  # the sandbox's own /tmp
REVISION = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_./^~-]{0,199}$")
COPY = "cp -dR --preserve=mode,timestamps,links --"
EXCLUDED = ("*.pyc", "*.pyo", "**/__pycache__/**", "__pycache__/**", "**/.pytest_cache/**", ".pytest_cache/**")
"""Never part of a patch: what running the tests leaves behind."""


class Kind(StrEnum):
    """What a source is."""

    REPOSITORY = "repository"
    BARE = "bare"
    BUNDLE = "bundle"
    FOLDER = "folder"
    ARCHIVE = "archive"


def located(sources: Path | None, name: str) -> Path:
    """The source ``name`` below ``sources``. Raises InfrastructureError where it is not there, or lies elsewhere."""
    if sources is None:
        raise InfrastructureError(WORKTREE, "no folder of sources is configured: set ROLLMILL_EVALUATOR_SOURCES")
    root = sources.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise InfrastructureError(WORKTREE, f"source {name!r} lies outside of the folder of sources")
    if not path.exists():
        raise InfrastructureError(WORKTREE, f"there is no source {name!r}")
    return path


def kind_of(path: Path) -> Kind:
    if path.is_dir():
        if (path / ".git").exists():
            return Kind.REPOSITORY
        return Kind.BARE if (path / "HEAD").is_file() and (path / "objects").is_dir() else Kind.FOLDER
    return Kind.BUNDLE if path.suffix == ".bundle" else Kind.ARCHIVE


def clone(commit: str) -> Step:
    """Makes a repository at ``commit`` in the current folder, for scripts that ask git for their tests."""
    revision = shlex.quote(commit)
    copied = f"git config --global safe.directory '*' && git clone --quiet --shared --no-checkout {SOURCE} ."
    return Step.shell("unpack", f"{copied} && git checkout --quiet --detach {revision}")


def unpack(kind: Kind, commit: str, strip: int) -> Step:
    """Makes the tree of ``commit`` in the current folder, without any history."""
    repository = {Kind.REPOSITORY: f"{SOURCE}/.git", Kind.BARE: SOURCE, Kind.BUNDLE: "/tmp/.repository"}  # noqa: S108  # the sandbox's own /tmp
    match kind:
        case Kind.FOLDER:
            return Step.shell("unpack", f"{COPY} {SOURCE}/. .")
        case Kind.ARCHIVE:
            return Step.shell("unpack", f"tar -xf {SOURCE} --no-same-owner --strip-components={strip}")
        case Kind.BUNDLE:
            made = f"git clone --quiet --bare {SOURCE} {repository[kind]} && "
            return Step.shell("unpack", made + _checkout(repository[kind], commit) + f" && rm -rf {repository[kind]}")
        case _:
            return Step.shell("unpack", _checkout(repository[kind], commit))


def _checkout(repository: str, commit: str) -> str:
    """By an index of its own: the repository is read-only. `git archive` would leave out what is export-ignored."""
    git = f"GIT_INDEX_FILE=/tmp/.index git -c safe.directory='*' --git-dir={repository}"
    revision = shlex.quote(f"{commit}^{{commit}}")
    return f"{git} read-tree {revision} && {git} --work-tree=. checkout-index --all && rm -f /tmp/.index"


def keep(paths: Sequence[str]) -> Step:
    """Puts the protected paths aside before the answer is applied."""
    lines = ["set -e", f"mkdir -p {KEPT}"]
    for path in paths:
        name, folder = _quoted(path)
        lines.append(f"if [ -e {name} ]; then mkdir -p {KEPT}/{folder}; {COPY} {name} {KEPT}/{folder}/; fi")
    return Step.shell("keep", "\n".join(lines))


def restore(paths: Sequence[str]) -> Step:
    """Makes the protected paths what they were: changed, deleted and added files alike."""
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


def apply(excluded: Iterable[str], fuzz: int, folder: str = ".") -> Step:
    """Applies the patch in ``folder``; with ``fuzz`` by `patch` where git finds its context moved."""
    options = " ".join(shlex.quote(f"--exclude={pattern}") for pattern in (*EXCLUDED, *excluded))
    command = f"git apply --whitespace=nowarn {options} {ANSWER}"
    if fuzz:
        command += f" || patch -p1 --batch --forward --no-backup-if-mismatch --fuzz={fuzz} --input={ANSWER}"
    return Step.shell("apply", f"cd {shlex.quote(folder)} && {{ {command}; }}")


def write(path: str) -> Step:
    """Makes the answer a file of the tree."""
    name, folder = _quoted(path)
    return Step.shell("apply", f"mkdir -p {folder} && rm -rf -- {name} && cat {ANSWER} > {name}")
