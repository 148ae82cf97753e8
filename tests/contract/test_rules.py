"""docs/rules.md and the tree agree: every rule that is cited stands there, and every rule there is cited somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rules.md"
RULE = r"[A-Z]\d{1,2}"
CITATION = re.compile(rf"\brules?\s+({RULE}(?:(?:,|;| and| to| or)\s+{RULE})*)|rules\.md#([a-z]\d{{1,2}})")
PROSE = {".py", ".md", ".yaml", ".yml", ".tpl", ".toml", ".sh", ".json", ""}
ELSEWHERE = re.compile(
    r"\bRUL[E]S\b|DESIGN [p]romise|field-notes|trainer-formats|bug-log|polar-semantics|peers\.md|ecosystem\.md"
)
"""Names of documents that are not in this repository."""


def texts() -> dict[str, str]:
    """Every text file of the tree by its path, apart from the page itself and what is generated or foreign."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [ROOT / name for name in names if Path(name).suffix in PROSE and not name.startswith("tests/fixtures/")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path != PAGE and path.is_file()}


def cited(text: str) -> set[str]:
    """Rules named in a text; ``T3 to T5`` names all three."""
    found: set[str] = set()
    for listed, anchor in CITATION.findall(text.replace("\n", " ").replace("# ", "")):
        found |= {anchor.upper()} if anchor else set(re.findall(RULE, listed))
        for letter, first, last in re.findall(r"([A-Z])(\d+) to [A-Z](\d+)", listed):
            found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


def test_every_cited_rule_is_on_the_page_and_every_rule_is_cited() -> None:
    rules = set(re.findall(rf"^### ({RULE})$", PAGE.read_text(), re.MULTILINE))
    missing = {name: cited(text) - rules for name, text in texts().items() if cited(text) - rules}
    assert missing == {}
    assert rules - set[str]().union(*map(cited, texts().values())) == set()


def test_every_rule_gives_its_reason() -> None:
    parts = re.split(rf"^### {RULE}$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert [part for part in parts if part.count("*Reason:*") != 1] == []


def test_nothing_cites_a_document_that_is_not_here() -> None:
    own = str(Path(__file__).relative_to(ROOT))
    found = {name: ELSEWHERE.findall(text) for name, text in texts().items() if name != own and ELSEWHERE.search(text)}
    assert found == {}
