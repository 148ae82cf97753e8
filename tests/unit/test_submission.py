"""What a session handed in, out of its output."""

import time
from typing import Any

import pytest

from rollmill.models import SessionStatus, Trajectory
from rollmill_evaluator.test_grading.submission import Submission, fenced_blocks


def text(output: Any, **answer: Any) -> str | None:
    return Submission(**answer).text(Trajectory(session_id="s1", status=SessionStatus.COMPLETED, output=output))


@pytest.mark.parametrize(
    ("said", "blocks"),
    [
        ("```diff\na\n```\n", [("diff", "a\n")]),
        ("~~~ patch title=x\na\n```\nb\n~~~\n", [("patch", "a\n```\nb\n")]),
        ("````\n```\ninner\n```\n````\n", [("", "```\ninner\n```\n")]),
        ("```\none\n```\ntext\n```py\ntwo\n```  \n", [("", "one\n"), ("py", "two\n")]),
        ("```diff\nnever closed\n", []),
        ("```\n```", [("", "")]),
        ("no blocks", []),
    ],
)
def test_blocks_between_fences(said: str, blocks: list[tuple[str, str]]) -> None:
    assert list(fenced_blocks(said)) == blocks


def test_many_fences_cost_no_more_than_their_length() -> None:
    began = time.process_time()
    assert list(fenced_blocks("\n".join("`" * length for length in range(1500, 3, -1)))) == []
    assert time.process_time() - began < 2


def test_the_last_block_of_the_wanted_language_is_the_answer() -> None:
    said = {"text": "```diff\n1\n```\n```patch\n2\n```\n```python\n3\n```\n```text\n4\n```\n"}
    assert text(said, take="fenced", field="text") == "2\n"
    assert text(said, take="fenced", field="text", language="python") == "3\n"
    assert text(said, take="fenced", field="text", write_to="a.py") == "4\n"
    assert text({"text": "prose"}, take="fenced", field="text") is None


def test_fields_and_artifacts_are_found_by_name() -> None:
    assert text({"patch": "p"}) == "p"
    assert text({"a": {"b": "p"}}, field="a.b") == "p"
    assert text({"a": "p"}, field="a.b") is None
    assert text({"artifacts": {"fix.diff": "p"}}, take="artifact", name="fix.diff") == "p"
    assert text({"artifacts": {}}, take="artifact", name="fix.diff") is None
    assert text(None) is None
    assert text({"patch": " \n\t"}) is None
