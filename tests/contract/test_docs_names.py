"""The documents name what exists: paths and dotted names of this repository, what the tour cites, links and anchors."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rollmill.runtime.telemetry.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
TRACKED = tuple(
    subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
)
PAGES = tuple(name for name in TRACKED if name.endswith(".md"))
DOCUMENTS = tuple(name for name in PAGES if name.startswith("docs/") or name in {"README.md", "CONTRIBUTING.md"})
TOUR = "docs/contributing/tour.md"

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
DOTTED = re.compile(r"(?<![\w./-])rollmill(?:_(?:capture|builder|evaluator|reward_merger|batcher))?(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"^from (rollmill[\w.]*) import ([\w, ]+)$", re.MULTILINE)
SETTING = re.compile(r"(?<![\w-])ROLLMILL_[A-Z0-9_]*[A-Z0-9]\b")
METRIC = re.compile(r"(?<![\w./-])rollmill_\w+[\w…<]")
CONFIGURED = {".py", ".yml", ".yaml", ".sh", ".tpl"}
NO_MODULES = {
    "rollmill.toml": "the settings file",
    "rollmill.job": "a label of containers",
    "rollmill.client.reward": "the function, as users call it",
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def prose(name: str) -> str:
    """The document without its fenced blocks."""
    return FENCE.sub("", text_of(name))


# ---- paths and names ----------------------------------------------------------------------------------------------


@cache
def top_folders() -> frozenset[str]:
    return frozenset(name.split("/")[0] for name in TRACKED if "/" in name)


def is_there(path: str) -> bool:
    """Whether the repository has the path; a file of Python is also found by the end of its path."""
    if path.endswith(".py") and any(f"/{name}".endswith(f"/{path}") for name in TRACKED):
        return True
    return any((ROOT / path).parent.glob(Path(path).name))


def is_checked(code: str) -> bool:
    """Paths from the top of the repository, and files of Python."""
    if not PATH.fullmatch(code):
        return False
    return code.endswith(".py") or ("/" in code and code.split("/", maxsplit=1)[0] in top_folders())


def missing_paths(name: str) -> list[str]:
    codes = {code for code in CODE.findall(prose(name)) if is_checked(code)}
    return sorted(code for code in codes if not is_there(code))


@cache
def groups() -> frozenset[str]:
    """Groups of entry points: names with dots that are no modules."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    return frozenset(project["entry-points"])


def exists(dotted: str) -> bool:
    """Whether a module, or something in one, has this name. Looks into the source: importing torch takes seconds."""
    if dotted in groups() or dotted in NO_MODULES:
        return True
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = source_of(".".join(parts[:length]))
        if path is not None:
            name = ".".join(parts[length:])
            return not name or name in defined_in(path) | passed_on_by(path) or _resolves(dotted)
    return False


@cache
def source_of(module: str) -> str | None:
    """Path of a module's source in the repository."""
    path = module.replace(".", "/")
    ends = (f"/{path}.py", f"/{path}/__init__.py")
    return next((name for name in TRACKED if name.endswith(ends)), None)


def _resolves(dotted: str) -> bool:
    """For members of what a package passes on."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def missing_names(name: str) -> list[str]:
    text = text_of(name)
    dotted = set(DOTTED.findall(text))
    dotted |= {f"{module}.{each.strip()}" for module, names in IMPORT.findall(text) for each in names.split(",")}
    return sorted(each for each in dotted if not exists(each))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_paths_that_exist(name: str) -> None:
    assert missing_paths(name) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_modules_and_objects_that_exist(name: str) -> None:
    assert missing_names(name) == []


@cache
def settings() -> frozenset[str]:
    """Environment variables: fields of settings, and what is spelled out anywhere but in a document."""
    own = str(Path(__file__).relative_to(ROOT))
    texts = [text_of(name) for name in TRACKED if Path(name).suffix in CONFIGURED and name != own]
    declared = "".join(text_of(name) for name in TRACKED if name.endswith(("/settings.py", "/settings/models.py")))
    fields = {field.upper() for field in re.findall(r"^    ([a-z]\w+): ", declared, re.MULTILINE)}
    return frozenset({f"ROLLMILL_{field}" for field in fields}.union(*map(SETTING.findall, texts)))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_settings_that_exist(name: str) -> None:
    assert sorted(set(SETTING.findall(text_of(name))) - settings()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_metrics_that_exist(name: str) -> None:
    known = {metric.full_name for metric in CATALOGUE}
    packages = {Path(path).name for path in TRACKED for path in Path(path).parts if path.startswith("rollmill_")}
    assert sorted(set(METRIC.findall(text_of(name))) - known - packages) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert "ROLLMILL_UPSTREAM" in settings()
    assert "ROLLMILL_NO_SUCH_SETTING" not in settings()
    assert exists("rollmill.models.TokenRange")
    assert not exists("rollmill.models.NoSuchThing")
    assert not exists("rollmill.exchange")
    assert is_there("shared/rollmill/topics.py")
    assert is_there("stage.py")
    assert not is_there("shared/rollmill/kafka/tables.py")
    assert not is_there("exchange.py")


# ---- the tour -----------------------------------------------------------------------------------------------------


@cache
def defined_in(path: str) -> frozenset[str]:
    """Functions and classes that a file defines, methods and fields as ``Class.name``."""
    names: set[str] = set()
    for node in ast.parse(text_of(path)).body:
        names |= set(_names(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for each in node.body for member in _names(each)}
    return frozenset(names)


@cache
def passed_on_by(path: str) -> frozenset[str]:
    """Names that a file imports from others."""
    imports = [node for node in ast.parse(text_of(path)).body if isinstance(node, ast.ImportFrom)]
    return frozenset(alias.asname or alias.name for node in imports for alias in node.names)


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.AnnAssign(target=ast.Name() as target):
            yield target.id
        case ast.Assign():
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        case _:
            pass


def rows_of_the_tour() -> Iterator[tuple[str, tuple[str, ...]]]:
    """File and names of every row that begins with a file."""
    for line in text_of(TOUR).splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and first.endswith(".py`"):
            yield first.strip("`"), tuple(CODE.findall(cells[0]))


def test_the_tour_names_functions_of_the_files_beside_them() -> None:
    rows = list(rows_of_the_tour())
    assert len(rows) > 30
    missing = []
    for path, names in rows:
        found = [name for name in TRACKED if name.endswith(f"/{path}")]
        assert len(found) == 1, f"{path} is {found or 'nowhere'}"
        assert names, f"{path}: no function is named"
        missing += [f"{path}: {name}" for name in names if name not in defined_in(found[0])]
    assert missing == []


# ---- links --------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


@cache
def anchors(name: str) -> frozenset[str]:
    """Anchors of a page's headings, made as GitHub makes them."""
    found: set[str] = set(ANCHOR.findall(text_of(name)))
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(prose(name)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def broken_links(name: str) -> list[str]:
    return sorted({target for target in LINK.findall(prose(name)) if not leads_somewhere(name, target)})


def leads_somewhere(name: str, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = target.partition("#")
    page = (ROOT / name).parent / path if path else ROOT / name
    if not page.exists():
        return False
    if not anchor or page.suffix != ".md":
        return True
    return anchor in anchors(str(page.resolve().relative_to(ROOT)))


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_to_files_and_headings(name: str) -> None:
    assert broken_links(name) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    assert leads_somewhere("README.md", "docs/rules.md#t4")
    assert not leads_somewhere("README.md", "docs/rules.md#no-rule")
    assert not leads_somewhere("README.md", "docs/nothing.md")


# ---- tables -------------------------------------------------------------------------------------------------------


def uneven_rows(name: str) -> list[str]:
    """Rows with another number of cells than the first row of their table: a pipe too many or too few."""
    uneven, cells = [], 0
    for line in prose(name).splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        found = len(re.findall(r"(?<!\\)\|", CODE.sub("", line)))
        cells = cells or found
        if found != cells:
            uneven.append(line)
    return uneven


@pytest.mark.parametrize("name", PAGES)
def test_rows_of_a_table_have_equally_many_cells(name: str) -> None:
    assert uneven_rows(name) == []
