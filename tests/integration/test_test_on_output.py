"""`test_on_output` on real repositories, in the real sandbox: the right verdict and reward for each patch."""

import io
import os
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import InfrastructureError, InvalidInputError
from rollmill.models import EvalResult, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory, Verdict
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.strategies import EvaluationContext, evaluator_registry, validate_session_spec
from rollmill.strategies.sandbox import Sandbox
from rollmill.testing.samples.repositories import Repository
from rollmill_evaluator.grading import EvaluationLimits, Grader
from rollmill_evaluator.sandbox.selection import SandboxOptions, local_sandbox

FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n",
    "tests/test_calc.py": (
        "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n\n\n"
        "def test_sub():\n    assert calc.sub(3, 2) == 1\n"
    ),
    "tests/test_other.py": "def test_add():\n    assert True\n",
    ".gitattributes": "tests export-ignore\n",
}
FIXED = FILES["calc.py"].replace("return a - b", "return a + b", 1)
EXPECTED = {
    "fail_to_pass": ["tests/test_calc.py::test_add"],
    "pass_to_pass": ["tests/test_calc.py::test_sub", "tests/test_other.py::test_add"],
}
CONFIG: dict[str, Any] = {
    "source": "calc",
    "test_command": [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"],
    "expected": EXPECTED,
    "environment": {"PYTHONPATH": ".", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    "resources": {"test_seconds": 60, "memory_mib": 256, "disk_mib": 16, "processes": 32},
}


@pytest.fixture
def calc(public_path: Path) -> Repository:
    return Repository.made(public_path / "calc", FILES)


@pytest.fixture
def surroundings(sandbox: Sandbox, public_path: Path) -> EvaluationContext:
    return EvaluationContext(deadline_seconds=60.0, sandbox=sandbox, sources=public_path)


async def graded(context: EvaluationContext, patch: str | None, **changes: Any) -> EvalResult:
    return await handed_in(context, None if patch is None else {"patch": patch}, **changes)


async def handed_in(context: EvaluationContext, output: Any, **changes: Any) -> EvalResult:
    evaluator = evaluator_registry().create(EvaluatorSpec(strategy="test_on_output", config={**CONFIG, **changes}))
    trajectory = Trajectory(session_id="s1", status=SessionStatus.COMPLETED, output=output)
    return await evaluator.evaluate(trajectory, context)


def is_graded(result: EvalResult, reward: float) -> None:
    assert (result.verdict, result.outcome_reward, result.not_graded) == (Verdict.GRADED, reward, None), result


async def test_a_patch_that_fixes_it_passes(surroundings: EvaluationContext, calc: Repository) -> None:
    result = await graded(surroundings, calc.patch({"calc.py": FIXED}))
    is_graded(result, 1.0)
    assert result.components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0, "exit_accepted": 1.0}
    assert result.metadata["tests"] == 3


async def test_a_patch_that_does_not_fix_it_fails_and_keeps_its_parts(
    surroundings: EvaluationContext, calc: Repository
) -> None:
    patch = calc.patch({"calc.py": FILES["calc.py"].replace("return a - b", "return a * b", 1)})
    result = await graded(surroundings, patch)
    is_graded(result, 0.0)
    assert result.components == {"fail_to_pass": 0.0, "pass_to_pass": 1.0, "exit_accepted": 1.0}
    assert result.metadata["failing"] == EXPECTED["fail_to_pass"]
    is_graded(await graded(surroundings, patch, score="fraction"), 2 / 3)


async def test_new_files_are_part_of_a_patch_and_new_tests_do_no_harm(
    surroundings: EvaluationContext, calc: Repository
) -> None:
    files = {
        "calc.py": "from deep.down.sums import add\n\n\ndef sub(a, b):\n    return a - b\n",
        "deep/down/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/test_more.py": "def test_add():\n    assert True\n\n\ndef test_extra():\n    assert False\n",
    }
    is_graded(await graded(surroundings, calc.patch(files)), 1.0)


async def test_a_patch_that_does_not_apply_is_named(surroundings: EvaluationContext, calc: Repository) -> None:
    patch = calc.patch({"calc.py": FIXED}).replace("def sub(a, b)", "def subtract(a, b)")
    result = await graded(surroundings, patch)
    assert (result.verdict, result.outcome_reward) == (Verdict.FAILED_TO_APPLY, 0.0)
    assert "patch does not apply" in result.metadata["output"]
    assert (await graded(surroundings, "no patch at all")).verdict is Verdict.FAILED_TO_APPLY
    is_graded(await graded(surroundings, patch, fuzz=2), 1.0)


async def test_what_a_verdict_carries_is_the_configs(surroundings: EvaluationContext, calc: Repository) -> None:
    rewards = {"failed_to_apply": -1.0, "empty_patch": None}
    result = await graded(surroundings, "no patch", rewards=rewards)
    assert (result.verdict, result.outcome_reward) == (Verdict.FAILED_TO_APPLY, -1.0)
    result = await graded(surroundings, calc.patch({}), rewards=rewards)
    assert (result.verdict, result.outcome_reward, result.not_graded) == (Verdict.EMPTY_PATCH, None, "empty_patch")


@pytest.mark.parametrize("output", [None, {}, {"patch": ""}, {"patch": " \n"}, {"patch": 7}, [1], {"other": "x"}])
async def test_nothing_handed_in_is_an_empty_patch(surroundings: EvaluationContext, output: Any) -> None:
    result = await handed_in(surroundings, output)
    assert (result.verdict, result.outcome_reward) == (Verdict.EMPTY_PATCH, 0.0)


async def test_a_patch_that_hangs_times_out(surroundings: EvaluationContext, calc: Repository) -> None:
    patch = calc.patch({"calc.py": "while True:\n    pass\n"})
    result = await graded(surroundings, patch, resources={**CONFIG["resources"], "test_seconds": 1.0})
    assert (result.verdict, result.outcome_reward) == (Verdict.TIMED_OUT, 0.0)


async def test_a_patch_that_eats_memory_fails(surroundings: EvaluationContext, calc: Repository) -> None:
    alone = "kept = []\nwhile True:\n    kept.append(bytearray(2**24))\n"
    result = await graded(surroundings, calc.patch({"calc.py": alone}))
    is_graded(result, 0.0)
    assert "MemoryError" in result.metadata["output"]
    together = "import os, time\nfor _ in range(4):\n    os.fork()\nkept = bytearray(2**26)\ntime.sleep(60)\n"
    result = await graded(surroundings, calc.patch({"calc.py": together}))
    is_graded(result, 0.0)
    assert result.metadata["ending"] == "exhausted"


async def test_a_crash_after_passing_tests_is_no_pass(surroundings: EvaluationContext, calc: Repository) -> None:
    crash = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGSEGV)\n"
    result = await graded(surroundings, calc.patch({"calc.py": crash + FIXED}))
    is_graded(result, 0.0)
    assert result.components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0, "exit_accepted": 0.0}
    killed = "import atexit, os, signal\natexit.register(os.kill, -1, signal.SIGKILL)\n"
    result = await graded(surroundings, calc.patch({"calc.py": killed + FIXED}))
    is_graded(result, 0.0)
    assert result.metadata["ending"] == "died"


async def test_protected_paths_are_what_the_source_says(surroundings: EvaluationContext, calc: Repository) -> None:
    cheat = {
        "tests/test_calc.py": "def test_add():\n    pass\n\n\ndef test_sub():\n    pass\n",
        "tests/test_other.py": None,
        "conftest.py": "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef skip():\n    pytest.skip()\n",
    }
    missing = await graded(surroundings, calc.patch(cheat))
    assert set(missing.metadata["missing"]) == {*EXPECTED["fail_to_pass"], *EXPECTED["pass_to_pass"]}
    result = await graded(surroundings, calc.patch(cheat), protected=["tests", "conftest.py", "absent/file"])
    is_graded(result, 0.0)
    assert result.metadata["failing"] == EXPECTED["fail_to_pass"]
    fixed = calc.patch({**cheat, "calc.py": FIXED})
    is_graded(await graded(surroundings, fixed, protected=["tests", "conftest.py"]), 1.0)


async def test_bytecode_and_excluded_paths_are_left_out(surroundings: EvaluationContext, calc: Repository) -> None:
    junk = calc.patch({"tests/test_calc.py": "broken(", "__pycache__/calc.cpython-311.pyc": "junk", "calc.py": FIXED})
    is_graded(await graded(surroundings, junk, exclude=["tests/*"]), 1.0)


@pytest.mark.parametrize("kind", ["bare", "bundle", "archive", "folder"])
async def test_a_source_can_be_of_any_kind(surroundings: EvaluationContext, calc: Repository, kind: str) -> None:
    patch = calc.patch({"calc.py": FIXED})
    places = {name: calc.path.parent / name for name in ("bare", "calc.bundle", "calc.tar.gz", "plain")}
    calc.git("clone", "--quiet", "--bare", ".", str(places["bare"]))
    calc.git("bundle", "create", "--quiet", str(places["calc.bundle"]), "HEAD", "main")
    calc.git("worktree", "add", "--quiet", "--detach", str(places["plain"]))
    (places["plain"] / ".git").unlink()
    with tarfile.open(places["calc.tar.gz"], "w:gz") as archive:
        archive.add(places["plain"], "calc-1.0")
    source, strip = {
        "bare": ("bare", 0),
        "bundle": ("calc.bundle", 0),
        "archive": ("calc.tar.gz", 1),
        "folder": ("plain", 0),
    }[kind]
    commit = calc.git("rev-parse", "HEAD").strip()
    is_graded(await graded(surroundings, patch, source=source, strip=strip, commit=commit), 1.0)


async def test_an_answer_can_be_a_fenced_block_an_artifact_or_a_file(
    surroundings: EvaluationContext, calc: Repository
) -> None:
    patch = calc.patch({"calc.py": FIXED})
    said = f"First I thought:\n```diff\nno\n```\nBut:\n```diff\n{patch}```\nThat is it.\n```python\nprint()\n```\n"
    is_graded(await handed_in(surroundings, {"reply": said}, answer={"take": "fenced", "field": "reply"}), 1.0)
    artifact = {"take": "artifact", "name": "fix.diff"}
    is_graded(await handed_in(surroundings, {"artifacts": {"fix.diff": patch}}, answer=artifact), 1.0)
    file = {"field": "answer.code", "write_to": "calc.py"}
    is_graded(await handed_in(surroundings, {"answer": {"code": FIXED}}, answer=file), 1.0)


async def test_a_report_is_read_where_the_framework_writes_one(
    surroundings: EvaluationContext, calc: Repository
) -> None:
    changes = {
        "framework": "junit",
        "report": "out/report.xml",
        "test_command": f"{sys.executable} -m pytest -q -p no:cacheprovider --junit-xml=out/report.xml",
        "expected": {"fail_to_pass": ["tests.test_calc::test_add"], "pass_to_pass": ["tests.test_other::test_add"]},
    }
    is_graded(await graded(surroundings, calc.patch({"calc.py": FIXED}), **changes), 1.0)


@pytest.mark.parametrize("source", ["suite", "suite.bundle"])
async def test_roots_repository_is_graded_by_another_user(
    sandbox_options: SandboxOptions, public_path: Path, source: str
) -> None:
    """With the system's own Python, which everybody may run."""
    if os.geteuid() != 0 or shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("needs root, and a Python in /usr/bin")
    test = "import unittest, a\n\n\nclass A(unittest.TestCase):\n    def test_x(self):\n        assert a.x == 2\n"
    suite = Repository.made(public_path / "suite", {"a.py": "x = 1\n", "test_a.py": test})
    suite.git("bundle", "create", "--quiet", "../suite.bundle", "HEAD", "main")
    other = local_sandbox(replace(sandbox_options, uid=65534, tools=()))
    context = EvaluationContext(deadline_seconds=60.0, sandbox=other, sources=public_path)
    result = await graded(
        context,
        suite.patch({"a.py": "x = 2\n"}),
        source=source,
        framework="unittest",
        test_command="id -u; /usr/bin/python3 -m unittest -v test_a",
        expected={"fail_to_pass": ["test_a.A.test_x"]},
    )
    is_graded(result, 1.0)


ESCAPING = """\
diff --git a/../../{target} b/../../{target}
new file mode 100644
--- /dev/null
+++ b/../../{target}
@@ -0,0 +1 @@
+escaped
"""
LINKING = """\
diff --git a/way b/way
new file mode 120000
--- /dev/null
+++ b/way
@@ -0,0 +1 @@
+{folder}
\\ No newline at end of file
diff --git a/way/escaped b/way/escaped
new file mode 100644
--- /dev/null
+++ b/way/escaped
@@ -0,0 +1 @@
+escaped
"""


async def test_patches_do_not_leave_the_tree(
    surroundings: EvaluationContext, calc: Repository, public_path: Path
) -> None:
    target = str(public_path / "escaped").lstrip("/")
    for patch in (ESCAPING.format(target=target), LINKING.format(folder=public_path)):
        for fuzz in (0, 3):
            result = await graded(surroundings, patch, fuzz=fuzz)
            assert result.outcome_reward == 0.0
    file = {"field": "code", "write_to": "way/escaped"}
    linked = calc.path / "way"
    linked.symlink_to(public_path)
    calc.git("add", "--all")
    calc.git("commit", "--quiet", "--message", "A link out of the tree")
    await handed_in(surroundings, {"code": "escaped"}, answer=file)
    assert not (public_path / "escaped").exists()


async def test_archives_do_not_leave_the_tree(surroundings: EvaluationContext, public_path: Path) -> None:
    escaped = public_path / "escaped"
    with tarfile.open(public_path / "evil.tar", "w") as archive:
        for name in (f"../../..{escaped}", str(escaped)):
            archive.addfile(_entry(name), io.BytesIO(b"escaped"))
        link = tarfile.TarInfo("way")
        link.type, link.linkname = tarfile.SYMTYPE, str(public_path)
        archive.addfile(link)
        archive.addfile(_entry("way/escaped"), io.BytesIO(b"escaped"))
    with pytest.raises(InfrastructureError, match="worktree_unavailable"):
        await graded(surroundings, "a patch", source="evil.tar")
    assert not escaped.exists()


def _entry(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = len(b"escaped")
    return entry


@pytest.mark.parametrize("source", ["absent", "../outside", "/etc"])
async def test_sources_lie_below_their_folder(surroundings: EvaluationContext, source: str) -> None:
    with pytest.raises(InfrastructureError, match="worktree_unavailable"):
        await graded(surroundings, "a patch", source=source)


async def test_infrastructure_is_never_a_number(public_path: Path) -> None:
    (public_path / "calc").mkdir()
    spec = EvaluatorSpec(strategy="test_on_output", config=CONFIG)
    trajectory = Trajectory(session_id="s1", status=SessionStatus.COMPLETED, output={"patch": "x"})
    limits = EvaluationLimits(seconds=30.0, attempts=2, retry_seconds=0.0, bytes=10_000)
    without = EvaluationContext(deadline_seconds=0.0, sources=public_path)
    said = await Grader(evaluator_registry(), limits, ManualClock(1.0), without).grade(trajectory, "d", spec)
    assert (said.verdict, said.not_graded, said.outcome_reward) == (Verdict.NOT_GRADED, "sandbox_unavailable", None)
    assert "without a sandbox" in said.metadata["error"]


async def test_a_commit_that_is_not_there_is_infrastructure(surroundings: EvaluationContext, calc: Repository) -> None:
    with pytest.raises(InfrastructureError, match="unpack"):
        await graded(surroundings, calc.patch({"calc.py": FIXED}), commit="0" * 40)


@pytest.mark.parametrize(
    "wrong",
    [
        {"commit": "--upload-pack=x"},
        {"expected": {}},
        {"framework": "junit"},
        {"report": "r.xml"},
        {"protected": ["../x"]},
        {"protected": ["/etc"]},
        {"report": "../../etc/passwd", "framework": "junit"},
        {"answer": {"write_to": "../x"}},
        {"answer": {"take": "artifact"}},
        {"test_command": ""},
        {"test_command": []},
        {"resources": {"test_seconds": 0}},
        {"rewards": {"timed_out": "much"}},
        {"unknown": 1},
    ],
)
def test_a_wrong_config_is_refused_when_the_session_opens(wrong: dict[str, Any]) -> None:
    spec = EvaluatorSpec(strategy="test_on_output", config={**CONFIG, **wrong})
    with pytest.raises(InvalidInputError, match="test_on_output"):
        validate_session_spec(SessionSpec(evaluators=(spec,)))
