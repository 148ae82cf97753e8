"""What a visitor of the repository or of an index page meets: workflows, templates, addresses, versions, licences."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import rollmill
from deploy import cli_page, docs_hooks, repository_address, third_party

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILT_IN_SCHEMAS = {
    ".github/workflows/ci.yml": "vendor.github-workflows",
    ".github/workflows/release.yml": "vendor.github-workflows",
    ".github/dependabot.yml": "vendor.dependabot",
    ".github/ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/idea.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "CITATION.cff": "vendor.citation-file-format",
}


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(("path", "schema"), BUILT_IN_SCHEMAS.items())
def test_a_file_for_the_forge_follows_its_schema(path: str, schema: str) -> None:
    checked = run(tool("check-jsonschema"), "--builtin-schema", schema, path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_file_for_the_forge_is_checked() -> None:
    written = {str(path.relative_to(ROOT)) for path in (ROOT / ".github").rglob("*.yml")}
    assert written == {path for path in BUILT_IN_SCHEMAS if path.startswith(".github")}


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint")
def test_actionlint_accepts_the_workflows() -> None:
    checked = run("actionlint")
    assert checked.returncode == 0, checked.stdout


def test_ci_tries_every_python_of_the_classifiers_by_the_same_script() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    named = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if ":: Python :: 3." in line]
    assert jobs["check"]["strategy"]["matrix"]["python"] == named
    assert ".ci/run" in [step.get("run") for step in jobs["check"]["steps"]]


def test_the_targets_that_workflows_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for names in re.findall(r"^ *- run: make ([a-z -]+)$", path.read_text(), re.MULTILINE):
            assert set(names.split()) <= targets, path


def test_an_image_is_released_for_each_service() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    extras = {line.partition("[")[2] for line in PROJECT["project"]["optional-dependencies"]["services"]}
    assert {",".join(jobs["images"]["strategy"]["matrix"]["service"]) + "]"} == extras


def test_hooks_run_before_a_commit_fetch_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [source["repo"] for source in config["repos"]] == ["local"]
    assert {hook["language"] for source in config["repos"] for hook in source["hooks"]} == {"system"}
    assert run(tool("pre-commit"), "validate-config").returncode == 0


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    chart = yaml.safe_load((ROOT / "charts/rollmill/Chart.yaml").read_text())
    compose = set(re.findall(r"ROLLMILL_VERSION:-([\d.]+)", (ROOT / "docker-compose.yml").read_text()))
    assert {citation["version"], str(chart["appVersion"]), *compose} == {rollmill.__version__}


def test_all_addresses_of_the_repository_are_one() -> None:
    address = repository_address.current()
    assert all(url.startswith(address) for url in PROJECT["project"]["urls"].values())
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == address
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert all(f"]({address}/" in each["replacement"] for each in hook["substitutions"])
    assert docs_hooks.address() == address


def test_the_address_is_changed_in_every_file(tmp_path: Path) -> None:
    before, after = repository_address.current(), "https://forge.test/somebody/rollmill"
    for path in repository_address.files_with(before):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    changed = repository_address.move(after, tmp_path)
    assert {"pyproject.toml", "CITATION.cff"} <= {str(path.relative_to(tmp_path)) for path in changed}
    assert repository_address.current(tmp_path) == after
    assert repository_address.files_with(before, tmp_path) == []
    with pytest.raises(ValueError, match="not the address of a repository"):
        repository_address.move("somewhere", tmp_path)


def test_a_release_with_another_address_is_refused() -> None:
    refused = run(sys.executable, "-m", "deploy.repository_address", "--check", "https://forge.test/somebody/rollmill")
    assert refused.returncode == 1
    assert "make address URL=https://forge.test/somebody/rollmill" in refused.stderr


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    assert cli_page.PAGE.read_text() == cli_page.text(), "run `make schemas`"


def test_the_page_of_licences_is_what_the_packages_say() -> None:
    assert third_party.PAGE.read_text() == third_party.text(), "run `make schemas`"


def test_the_licence_of_java_is_named_where_its_extra_is() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"`embedded`[^.]*GPLv2 with the\s+Classpath exception", readme)


def test_the_package_passes_the_checks_of_an_index(tmp_path: Path) -> None:
    """Built from the files in git, by the installed tools: nothing is fetched."""
    built = run(tool("pyproject-build"), "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    assert built.returncode == 0, built.stdout + built.stderr
    files = sorted(str(path) for path in tmp_path.iterdir())
    assert len(files) == 2
    checked = run(tool("twine"), "check", "--strict", *files)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    unpacked = tmp_path / "wheel"
    shutil.unpack_archive(next(name for name in files if name.endswith(".whl")), unpacked, "zip")
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", metadata.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\]\((?![a-z]+:|#)[^()\s]+\)", text) == []
    assert "![Throughput" in text
    assert f"]({repository_address.current()}/raw/v{rollmill.__version__}/docs/images/overview.png)" in text


# ---- the site -----------------------------------------------------------------------------------------------------


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = run(tool("mkdocs"), "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    assert built.returncode == 0, built.stdout + built.stderr
    trainer = (tmp_path / "sdk" / "trainer" / "index.html").read_text()
    assert "BatchStream" in trainer
    assert "<table>" in (tmp_path / "topics" / "index.html").read_text()


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- ([\w/-]+\.md)$", config, re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed, f"add to nav of mkdocs.yml: {sorted(pages - listed)}"
