"""`swebench_harness` with the real package: its specs, log parsers and grading."""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import InfrastructureError, InvalidInputError, NotGradedError
from rollmill.models import EvalResult, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory, Verdict
from rollmill.strategies import EvaluationContext, evaluator_registry, validate_session_spec
from rollmill.strategies.sandbox import Sandbox
from rollmill.testing.samples.repositories import Repository
from rollmill_evaluator.test_grading import swebench_package

pytest.importorskip("swebench", reason="the extra rollmill[swebench] is not installed")

FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n",
    "tests/test_calc.py": "import calc\n\n\ndef test_sub():\n    assert calc.sub(3, 2) == 1\n",
}
FIXED = FILES["calc.py"].replace("return a - b", "return a + b", 1)
NEW_TEST = FILES["tests/test_calc.py"] + "\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
IMAGE = "rollmill-swebench-test"
LOG = """\
+ cd /testbed
+ git checkout 0123456789abcdef0123456789abcdef01234567 tests/test_calc.py
Updated 0 paths from 89abcdef
+ git apply -v -
Checking patch tests/test_calc.py...
Applied patch tests/test_calc.py cleanly.
+ : '>>>>> Start Test Output'
+ python -m pytest -rA tests
============================= test session starts ==============================
platform linux -- Python 3.9.20, pytest-7.4.0, pluggy-1.0.0
rootdir: /testbed
collected 2 items

tests/test_calc.py ..                                                    [100%]

==================================== PASSES ====================================
=========================== short test summary info ============================
PASSED tests/test_calc.py::test_sub
PASSED tests/test_calc.py::test_add
============================== 2 passed in 0.02s ===============================
+ SWEBENCH_TEST_EXIT_CODE=0
+ : '>>>>> End Test Output'
+ echo '>>>>> Test Exit Code: 0'
>>>>> Test Exit Code: 0
+ git checkout 0123456789abcdef0123456789abcdef01234567 tests/test_calc.py
"""


def instance(commit: str, test_patch: str, python: str = "python", **changes: Any) -> dict[str, Any]:
    """A row of a data set, with the script that such rows bring."""
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        "cd /testbed",
        f"git checkout {commit} tests/test_calc.py",
        f"git apply -v - <<'EOF_114329324912'\n{test_patch}\nEOF_114329324912",
        ": '>>>>> Start Test Output'",
        f"PYTHONPATH=. {python} -m pytest -rA -p no:cacheprovider tests",
        ": '>>>>> End Test Output'",
        f"git checkout {commit} tests/test_calc.py",
    ]
    return {
        "instance_id": "example__calc-1",
        "repo": "example/calc",
        "version": "1.0",
        "image": IMAGE,
        "base_commit": commit,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_sub"]),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": "\n".join(lines) + "\n",
        **changes,
    }


GIVEN = instance("HEAD", "")


@pytest.fixture
def calc(public_path: Path) -> Repository:
    return Repository.made(public_path / "calc", FILES)


def row(repository: Repository, **changes: Any) -> dict[str, Any]:
    commit = repository.git("rev-parse", "HEAD").strip()
    return instance(commit, repository.patch({"tests/test_calc.py": NEW_TEST}).strip("\n"), sys.executable, **changes)


async def graded(context: EvaluationContext, patch: str | None, **config: Any) -> EvalResult:
    evaluator = evaluator_registry().create(EvaluatorSpec(strategy="swebench_harness", config=config))
    output = None if patch is None else {"patch": patch}
    return await evaluator.evaluate(Trajectory(session_id="s1", status=SessionStatus.COMPLETED, output=output), context)


@pytest.mark.parametrize(
    ("log", "resolved", "shares"),
    [
        (LOG, True, {"fail_to_pass": 1.0, "pass_to_pass": 1.0}),
        (LOG.replace("PASSED tests/test_calc.py::test_add", "FAILED tests/test_calc.py::test_add - assert"), False,
         {"fail_to_pass": 0.0, "pass_to_pass": 1.0}),
        (LOG.replace("Test Exit Code: 0", "Test Exit Code: 139"), False, {}),
        (LOG[: LOG.index("+ : '>>>>> End")], False, {}),
    ],
)  # fmt: skip
def test_the_packages_grading_reads_a_log(log: str, resolved: bool, shares: dict[str, float]) -> None:
    spec = swebench_package.test_spec(GIVEN)
    report = swebench_package.report(spec, "a patch", log)
    assert report["resolved"] is resolved
    assert swebench_package.shares(report) == shares


def test_an_instance_that_the_package_cannot_read_is_not_graded() -> None:
    with pytest.raises(NotGradedError, match="no log parser 'mine'"):
        swebench_package.test_spec({**GIVEN, "log_parser": "mine"})
    with pytest.raises(NotGradedError, match="instance_invalid"):
        swebench_package.test_spec({**GIVEN, "FAIL_TO_PASS": "[broken"})


async def test_an_instance_end_to_end_in_the_local_sandbox(
    sandbox: Sandbox, public_path: Path, calc: Repository
) -> None:
    context = EvaluationContext(deadline_seconds=60.0, sandbox=sandbox, sources=public_path)
    local = {"runtime": "local", "source": "calc", "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
    given = row(calc)
    new_file = calc.patch({"calc.py": "from sums import add, sub\n", "sums.py": FIXED})
    for patch, reward in ((calc.patch({"calc.py": FIXED}), 1.0), (new_file, 1.0), (calc.patch({"x.py": ""}), 0.0)):
        result = await graded(context, patch, instance=given, **local)
        assert (result.verdict, result.outcome_reward) == (Verdict.GRADED, reward), result.metadata
        assert result.components == {"fail_to_pass": reward, "pass_to_pass": 1.0}
    (public_path / "rows.jsonl").write_text(f"{json.dumps(given)}\n{json.dumps(GIVEN)}\n")
    by_name = {"instances": "rows.jsonl", "instance_id": "example__calc-1"}
    result = await graded(context, calc.patch({"calc.py": FIXED}), **by_name, **local)
    assert result.outcome_reward == 1.0


async def test_verdicts_beside_the_grade(sandbox: Sandbox, public_path: Path, calc: Repository) -> None:
    context = EvaluationContext(deadline_seconds=60.0, sandbox=sandbox, sources=public_path)
    local = {"runtime": "local", "source": "calc"}
    given, patch = row(calc), calc.patch({"calc.py": FIXED})
    assert (await graded(context, None, instance=given, **local)).verdict is Verdict.EMPTY_PATCH
    broken = patch.replace("def sub", "def other").replace("return a - b", "return 1")
    assert (await graded(context, broken, instance=given, **local)).verdict is Verdict.FAILED_TO_APPLY
    hanging = calc.patch({"calc.py": "while True:\n    pass\n"})
    result = await graded(context, hanging, instance=given, resources={"test_seconds": 1.5}, **local)
    assert (result.verdict, result.outcome_reward) == (Verdict.TIMED_OUT, 0.0)
    unready = {**given, "eval_script": "#!/bin/bash\necho nothing is installed\n"}
    with pytest.raises(InfrastructureError, match="never started its tests"):
        await graded(context, patch, instance=unready, **local)
    (public_path / "none.json").write_text("[]")
    with pytest.raises(NotGradedError, match="holds no instance"):
        await graded(context, patch, instances="none.json", instance_id="absent", **local)


async def test_an_instance_in_a_container_of_its_image(
    containers: Sandbox, public_path: Path, calc: Repository
) -> None:
    """Runs where a Docker engine answers; it is skipped elsewhere, with the engine's word for it."""
    (calc.path / "Dockerfile").write_text("FROM python:3.11\nRUN pip install pytest\nCOPY . /testbed\n")
    building = await asyncio.create_subprocess_exec(
        shutil.which("docker") or "docker", "build", "--quiet", "--tag", IMAGE, str(calc.path)
    )
    assert await building.wait() == 0
    given = {**instance(calc.git("rev-parse", "HEAD").strip(), calc.patch({"tests/test_calc.py": NEW_TEST}).strip())}
    context = EvaluationContext(deadline_seconds=300.0, containers=containers, sources=public_path)
    result = await graded(context, calc.patch({"calc.py": FIXED}), instance=given)
    assert (result.verdict, result.outcome_reward) == (Verdict.GRADED, 1.0), result.metadata


async def test_without_an_engine_it_is_not_graded(calc: Repository) -> None:
    with pytest.raises(NotGradedError, match="sandbox_unavailable"):
        await graded(EvaluationContext(deadline_seconds=9.0), calc.patch({"calc.py": FIXED}), instance=GIVEN)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"instance": {"instance_id": "x"}},
        {"instance": GIVEN, "instances": "rows.json", "instance_id": "x"},
        {"instances": "rows.json"},
        {"instance": GIVEN, "runtime": "local"},
        {"instance": GIVEN, "source": "calc"},
        {"instance": {**GIVEN, "base_commit": "--upload-pack=x"}},
        {"instance": GIVEN, "answer": {"write_to": "calc.py"}},
    ],
)
def test_a_wrong_config_is_refused_when_the_session_opens(wrong: dict[str, Any]) -> None:
    spec = EvaluatorSpec(strategy="swebench_harness", config=wrong)
    with pytest.raises(InvalidInputError, match="swebench_harness"):
        validate_session_spec(SessionSpec(evaluators=(spec,)))


READING = """
import importlib, os, sys
sys.settrace(lambda *_: None)  # as under a debugger: then the package looks for .env in the working folder
{load}
print(os.environ.get("ROLLMILL_SANDBOX_JOBS"))
"""


@pytest.mark.parametrize(
    ("load", "found"),
    [
        ("importlib.import_module('swebench.harness.utils')", "7"),
        (
            "from rollmill_evaluator.test_grading import swebench_package as p; p._imported('swebench.harness.utils')",
            "None",
        ),
    ],
    ids=["by-itself", "by-us"],
)
async def test_a_file_that_the_package_reads_does_not_set_up_the_service(tmp_path: Path, load: str, found: str) -> None:
    (tmp_path / ".env").write_text("ROLLMILL_SANDBOX_JOBS=7\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READING.format(load=load), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert said.decode().split()[-1] == found
