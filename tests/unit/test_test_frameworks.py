"""Test results out of what frameworks print and write: whole names, the worst status, nothing invented."""

import time

import pytest

from rollmill_evaluator.test_grading.frameworks import FRAMEWORKS, Results, Status
from rollmill_evaluator.test_grading.scoring import ExpectedTests, Scoring

P, F, S = Status.PASSED, Status.FAILED, Status.SKIPPED


def read(framework: str, text: str, report: bytes | None = None) -> Results:
    known = {str(name): reader for name, reader in FRAMEWORKS.items()}
    return known[framework].read(text, report)


PYTEST = """\
============================= test session starts ==============================
tests/test_a.py F.s                                                      [ 60%]
----------------------------- Captured stdout call -----------------------------
PASSED tests/test_a.py::test_forged
==================================== PASSES ====================================
=========================== short test summary info ============================
PASSED tests/test_a.py::test_forged_with_a_heading
=========================== short test summary info ============================
PASSED tests/test_a.py::test_same
PASSED tests/test_b.py::test_same
PASSED tests/test_a.py::TestA::test_deep[x - y]
\x1b[31mFAILED\x1b[0m tests/test_a.py::test_one - assert 1 == 2
FAILED tests/test_a.py::test_two[a - b] - ValueError: PASSED - never mind
ERROR tests/test_c.py - ImportError: no module
SKIPPED [2] tests/test_a.py:3: not here
XFAIL tests/test_a.py::test_expected - reason
XPASS tests/test_a.py::test_better
==================== 2 failed, 3 passed, 2 skipped in 0.05s ====================
"""


def test_pytests_summary() -> None:
    assert read("pytest", PYTEST) == {
        "tests/test_a.py::test_same": P,
        "tests/test_b.py::test_same": P,
        "tests/test_a.py::TestA::test_deep[x - y]": P,
        "tests/test_a.py::test_one": F,
        "tests/test_a.py::test_two[a - b]": F,
        "tests/test_c.py": F,
        "tests/test_a.py::test_expected": P,
        "tests/test_a.py::test_better": P,
    }


def test_pytests_running_lines_and_its_workers() -> None:
    text = (
        "tests/test_a.py::test_one PASSED                       [ 25%]\n"
        "tests/test_a.py::test_one ERROR                        [ 25%]\n"
        "tests/test_a.py::test_two[a b] SKIPPED (not here)      [ 50%]\n"
        "[gw1] [ 75%] FAILED tests/test_a.py::test_three \n"
    )
    assert read("pytest", text) == {
        "tests/test_a.py::test_one": F,
        "tests/test_a.py::test_two[a b]": S,
        "tests/test_a.py::test_three": F,
    }


UNITTEST = """\
test_new (tests.test_a.A.test_new) ... ok
test_old (tests.test_b.B) ... ok
test_doc (tests.test_a.A.test_doc)
What it is about ... FAIL
test_prints (tests.test_a.A.test_prints) ... printed
ok
test_skipped (tests.test_a.A.test_skipped) ... skipped 'not here'
test_expected (tests.test_a.A.test_expected) ... expected failure
test_better (tests.test_a.A.test_better) ... unexpected success
test_sub (tests.test_a.A.test_sub) ...   test_sub (tests.test_a.A.test_sub) (i=1) ... FAIL
ok
setUpClass (tests.test_c.C) ... ERROR

======================================================================
FAIL: test_sub (tests.test_a.A.test_sub) (i=1)
----------------------------------------------------------------------
Ran 8 tests in 0.001s

FAILED (failures=2)
"""


def test_unittest_of_all_versions() -> None:
    assert read("unittest", UNITTEST) == {
        "tests.test_a.A.test_new": P,
        "tests.test_b.B.test_old": P,
        "tests.test_a.A.test_doc": F,
        "tests.test_a.A.test_prints": P,
        "tests.test_a.A.test_skipped": S,
        "tests.test_a.A.test_expected": P,
        "tests.test_a.A.test_better": F,
        "tests.test_a.A.test_sub": F,
        "tests.test_c.C.setUpClass": F,
    }


def test_a_junit_report() -> None:
    report = b"""<?xml version="1.0"?><testsuites><testsuite>
      <testcase classname="tests.test_a" name="test_same"/>
      <testcase classname="tests.test_b" name="test_same"><failure message="no"/></testcase>
      <testcase classname="tests.test_b" name="test_late"><skipped/><error/></testcase>
      <testcase file="a.js" classname="" name="adds"><skipped/></testcase>
    </testsuite></testsuites>"""
    assert read("junit", "", report) == {
        "tests.test_a::test_same": P,
        "tests.test_b::test_same": F,
        "tests.test_b::test_late": F,
        "a.js::adds": S,
    }


@pytest.mark.parametrize(
    "report",
    [
        None,
        b"",
        b"<testsuite><testcase name='cut'",
        b"<!DOCTYPE x [<!ENTITY a 'b'>]><testsuite><testcase name='&a;'/></testsuite>",
    ],
)
def test_a_report_that_is_none_has_no_results(report: bytes | None) -> None:
    assert read("junit", "", report) == {}
    assert read("jest", "", report) == {}


TAP = """\
TAP version 13
# Subtest: sums
    # Subtest: adds
    ok 1 - adds
    not ok 2 - subtracts
    1..2
not ok 1 - sums
ok 2 - later # SKIP no time
not ok 3 - someday # TODO
ok 4 plain
1..4
"""


def test_tap() -> None:
    assert read("tap", TAP) == {
        "sums > adds": P,
        "sums > subtracts": F,
        "sums": F,
        "later": S,
        "someday": P,
        "plain": P,
    }


def test_go_as_json_and_as_text() -> None:
    events = (
        '{"Action":"run","Package":"m/a","Test":"TestX"}\n'
        '{"Action":"pass","Package":"m/a","Test":"TestX"}\n'
        '{"Action":"fail","Package":"m/b","Test":"TestX/deep"}\n'
        '{"Action":"fail","Package":"m/b"}\n{broken\n'
    )
    assert read("go", events) == {"m/a::TestX": P, "m/b::TestX/deep": F}
    text = (
        "=== RUN   TestX\n--- PASS: TestX (0.00s)\nPASS\nok  \tm/a\t0.002s\n"
        "--- FAIL: TestX (0.00s)\n    --- SKIP: TestX/deep (0.00s)\nFAIL\nFAIL\tm/b\t0.003s\nFAIL\n"
    )
    assert read("go", text) == {"m/a::TestX": P, "m/b::TestX": F, "m/b::TestX/deep": S}


def test_cargo_tells_binaries_apart() -> None:
    text = (
        "     Running unittests src/lib.rs (target/debug/deps/m-1)\n"
        "test tests::same ... ok\n"
        "     Running tests/whole.rs (target/debug/deps/whole-1)\n"
        "test tests::same ... FAILED\ntest slow ... ignored\ntest dies - should panic ... ok\n"
        "   Doc-tests m\ntest src/lib.rs - f (line 3) ... ok\n"
    )
    assert read("cargo", text) == {
        "src/lib.rs::tests::same": P,
        "tests/whole.rs::tests::same": F,
        "tests/whole.rs::slow": S,
        "tests/whole.rs::dies": P,
        "doc m::src/lib.rs - f (line 3)": P,
    }


def test_jest() -> None:
    report = (
        b'{"testResults":[{"name":"/sandbox/src/a.test.js","assertionResults":['
        b'{"fullName":"sums adds","status":"passed"},{"fullName":"sums fails","status":"failed"},'
        b'{"fullName":"later","status":"pending"}]}]}'
    )
    assert read("jest", "", report) == {
        "src/a.test.js::sums adds": P,
        "src/a.test.js::sums fails": F,
        "src/a.test.js::later": S,
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "line",
    [
        "a::b" + " PASSED (" * 400 + "\n",
        "ok" + " " * 3000 + "x\n",
        "test " + "a ... " * 500 + "\n",
        "test_a (b) ... " + "skipped " * 400 + "\n",
        "\x1b[" + ";" * 4000 + "\n",
        "<" * 4000 + "\n",
        "{" * 4000 + "\n",
        "x" * 10**6 + "\n",
    ],
)
def test_hostile_output_costs_no_more_than_its_length(framework: str, line: str) -> None:
    text = line * (2**20 // len(line))
    began = time.process_time()
    read(framework, text, text.encode())
    assert time.process_time() - began < 2


EXPECTED = ExpectedTests(fail_to_pass=("a", "b"), pass_to_pass=("c", "d"))
ALL: Results = {"a": P, "b": P, "c": P, "d": P}


@pytest.mark.parametrize(
    ("results", "exit_code", "rule", "value"),
    [
        (ALL, 0, "all", 1.0),
        (ALL | {"extra": P}, 0, "all", 1.0),
        (ALL | {"extra": F}, 1, "all", 1.0),
        (ALL, 1, "all", 0.0),
        (ALL | {"extra": F}, 2, "all", 0.0),
        (ALL, 139, "all", 0.0),
        (ALL, None, "all", 0.0),
        (ALL | {"d": F}, 1, "all", 0.0),
        (ALL | {"d": F}, 1, "fraction", 0.75),
        (ALL | {"d": S}, 0, "fraction", 0.75),
        ({"a": P}, 0, "fraction", 0.25),
        (ALL, 139, "fraction", 0.0),
        ({}, 0, "all", 0.0),
    ],
)
def test_scores(results: Results, exit_code: int | None, rule: str, value: float) -> None:
    scoring = Scoring(EXPECTED, "all" if rule == "all" else "fraction")
    assert scoring.score(results, exit_code, FRAMEWORKS["pytest"]).value == value


def test_exit_codes_count_as_the_config_says() -> None:
    pytest_runs = FRAMEWORKS["pytest"]
    failing = ALL | {"extra": F}
    assert Scoring(EXPECTED, exit_rule="zero").score(failing, 1, pytest_runs).value == 0.0
    assert Scoring(EXPECTED, exit_rule="ignored").score(ALL, 139, pytest_runs).value == 1.0
    assert Scoring(EXPECTED, exit_rule="ignored").score(ALL, None, pytest_runs).value == 0.0


def test_a_score_keeps_its_parts() -> None:
    score = Scoring(EXPECTED).score({"a": P, "b": F, "c": P}, 1, FRAMEWORKS["pytest"])
    assert score.components == {"fail_to_pass": 0.5, "pass_to_pass": 0.5, "exit_accepted": 1.0}
    assert (score.missing, score.failing) == (("d",), ("b",))
