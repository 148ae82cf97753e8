"""``rollmill inspect`` on files: what it reads, what it says, how it looks."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollmill.cli.inspect.command import SessionQuery, find_sessions, print_views
from rollmill.cli.inspect.drawing import Pen, draw
from rollmill.cli.inspect.event_file import read_lines
from rollmill.cli.inspect.recordings import Recording, folded
from rollmill.cli.inspect.token_text import pieces_of
from rollmill.cli.inspect.views import SessionView
from rollmill.errors import InvalidInputError
from rollmill.models import CallKind, CompletionEvent, SessionClosed, SessionExpired, SessionOpened, SessionSpec
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.sessions import assistant, completion, user

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sessions" / "three_traces.jsonl"
ASK = [user("?")]
SECOND = [*ASK, assistant("ab"), user("and?")]


def small() -> list[CompletionEvent]:
    """A drifted reply that two calls go on from (one of them is a fork), and a title."""
    return [
        SessionOpened(session_id="s1", spec=SessionSpec(task_id="t1"), at=1.0),
        completion("c1", [1, 2], [5, 6, 9], at=2.0, messages=ASK, text="ab"),
        completion("title", [1, 30], [8, 9], at=2.5, kind=CallKind.AUX),
        completion("c2", [1, 2, 8, 9, 3], [7, 9], at=3.0, messages=SECOND, text="g"),
        completion("c3", [1, 2, 8, 9, 4], [7, 7, 9], at=4.0, messages=SECOND, text="gg"),
        SessionClosed(session_id="s1", at=5.0),
    ]


def jsonl(path: Path, events: Iterable[CompletionEvent | str]) -> str:
    lines = [event if isinstance(event, str) else event.model_dump_json() for event in events]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def views(source: str, **more: Any) -> tuple[list[SessionView], tuple[str, ...]]:
    return find_sessions(SessionQuery(source, **more), KafkaSettings())


def text(view: SessionView, pen: Pen | None = None, **more: Any) -> list[str]:
    """Lines as drawn, without the names of branches."""
    out = io.StringIO()
    Console(file=out, width=100, highlight=False, **more).print(draw(view, pen or Pen()))
    return [re.sub(r", branch \w{12}", "", line).rstrip() for line in out.getvalue().splitlines()]


def the_view(source: str, **more: Any) -> SessionView:
    ((view,), problems) = views(source, **more)
    assert problems == ()
    return view


def test_a_fork_an_aux_call_and_a_drift(tmp_path: Path) -> None:
    assert text(the_view(jsonl(tmp_path / "s.jsonl", small()))) == [
        "session s1, attempt 1: COMPLETED",
        "task t1; 4 calls became 2 traces, built here by prefix_merging",
        "10 tokens sampled = 8 trained + 2 excluded (aux 2)",
        "legend: · prompt  - context  █ trained  x excluded  ≈ repaired drift",
        "├── trace 1 of 2: 2 prompt, 1 context, 5 trained, 1 repaired",
        "│   ··███-██",
        "│   ├── c1  stop  version 0:0  ≈ the next prompt holds it in other tokens",
        "│   │   prompt 2   1 2",
        "│   │   trained 3  5 6 9",
        "│   │   └── trace 2 of 2, from c1: 5 prompt, 3 trained",
        "│   │       why: fork: another call went on with the parent's trace",
        "│   │       ·····███",
        "│   │       └── c3  stop  version 0:0",
        "│   │           prompt 5   (4 as in c2) 4",
        "│   │           trained 3  7 7 9",
        "│   └── c2  stop  version 0:0",
        "│       context 1  3",
        "│       trained 2  7 9",
        "└── in no trace",
        "    └── title  aux: an auxiliary call, never trained, 2 tokens",
    ]


def test_the_example_says_where_a_prompt_parts() -> None:
    lines = text(the_view(str(EXAMPLE)))
    at = next(number for number, line in enumerate(lines) if "trace 3 of 3" in line)
    assert [line.lstrip("│ ") for line in lines[at + 1 : at + 4]] == [
        "why: reply_differs: the prompt carries another reply than the sampled one",
        "after 45 tokens c3 sampled  112 23 9",
        "this prompt has             108 131 112 23 9 6 3 140 128 9 6 4",
    ]
    assert any("c5  stop  no_logprobs: the engine gave no log-probs" in line for line in lines)


def test_the_documentation_shows_the_example_as_it_is() -> None:
    out = io.StringIO()
    print_views([the_view(str(EXAMPLE))], Pen(pieces_of("rollmill.testing.simulation:decode")), out)
    assert out.getvalue() in (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    view = the_view(jsonl(tmp_path / "s.jsonl", small()))
    coloured = "\n".join(text(view, force_terminal=True, color_system="standard"))
    assert "\x1b[1;32m5 6 9\x1b[0m" in coloured
    assert "\x1b[36m3" in coloured
    out = io.StringIO()
    print_views([view], Pen(), out)
    assert "\x1b" not in out.getvalue()
    assert not any(line.endswith(" ") for line in out.getvalue().splitlines())


def test_lines_that_cannot_be_read_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    bare = small()[1].model_dump(mode="json")
    del bare["type"]
    tailed = {"partition": 0, "offset": 7, "key": "s1", "value": small()[3].model_dump(mode="json")}
    source = jsonl(tmp_path / "s.jsonl", ["{", "", json.dumps(bare), "[1]", '{"type": "nonsense"}', json.dumps(tailed)])
    ((view,), problems) = views(source)
    assert view.calls == 2
    assert view.open
    assert [problem.partition(": ")[0] for problem in problems] == ["line 1", "line 4", "line 5"]
    assert "malformed" in problems[0]
    assert "nonsense" in problems[2]


def test_another_builder_and_config(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", small())
    assert the_view(source, builder="per_request").traces_in_all == 3
    (first, *_) = the_view(source, config={"on_drift": "fork"}).traces[1:]
    assert first.break_reason == "drift"
    with pytest.raises(InvalidInputError, match="known are per_request, prefix_merging"):
        views(source, builder="nonsense")


def test_long_runs_are_abbreviated(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", [completion("c1", range(1000, 1100), [5, 9], at=1.0)])
    shown = "\n".join(text(the_view(source)))
    assert shown.startswith("session s1, attempt 1: no end yet")
    assert "1022 1023 … 68 more … 1092 1093" in re.sub(r"\s+", " ", shown)
    assert "(a mark is 2 tokens)" in shown
    assert "more" not in "\n".join(text(the_view(source), Pen(full=True)))


def test_tokens_are_shown_as_texts(tmp_path: Path) -> None:
    pen = Pen(pieces_of("rollmill.testing.simulation:decode"))
    assert "│   │   trained 3  ba d <9>" in text(the_view(str(EXAMPLE)), pen)
    with pytest.raises(InvalidInputError, match="no file"):
        pieces_of(str(tmp_path / "nowhere.json"))
    with pytest.raises(InvalidInputError, match="cannot be imported"):
        pieces_of("rollmill.testing.simulation:nonsense")


def test_a_tokenizer_file(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"ba": 108, "d": 23, "Ġface": 5, "<unk>": 0}, "unk_token": "<unk>"}
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": model,
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            }
        ),
        encoding="utf-8",
    )
    assert pieces_of(str(path))([108, 23, 5, 77]) == ["ba", "d", "␣face", "<77>"]
    bad = tmp_path / "bad.json"  # a file that was read once is not read again
    bad.write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="is no tokenizer file"):
        pieces_of(str(bad))


def the_recording(*events: CompletionEvent) -> Recording:
    (recording,) = folded(events)
    return recording


def test_what_the_builder_ignores_is_noted() -> None:
    c1 = completion("c1", [1, 2], [5, 9], at=2.0)
    other = completion("c1", [1, 2], [6, 9], at=2.0)
    late = completion("c9", [1, 2], [6, 9], at=9.0)
    end = SessionClosed(session_id="s1", at=5.0)
    recording = the_recording(c1, c1, other, end, late, end)
    assert recording.calls == (c1,)
    assert recording.late == (late,)
    assert recording.notes == (
        "c1 came more than once",
        "c1 came again with another content: refused (conflict)",
        "session_closed came after the end and is ignored",
    )


def test_an_expired_session_is_a_timeout() -> None:
    c1 = completion("c1", [1, 2], [5, 9], at=2.0)
    idle = SessionExpired(session_id="s1", reason="idle", seen=0, at=30.0)
    assert the_recording(c1, idle).end is None
    over = the_recording(c1, SessionExpired(session_id="s1", reason="deadline", seen=1, at=60.0))
    assert (over.session().status, over.session().error) == ("TIMEOUT", "session expired: deadline")
    assert (over.session().opened_at, over.session().closed_at) == (2.0, 60.0)


def test_attempts_and_sessions_are_apart(tmp_path: Path) -> None:
    again = completion("c1", [1, 2], [5, 9], at=2.0, attempt=2)
    source = jsonl(tmp_path / "s.jsonl", [*small(), again, completion("c1", [1], [2], session_id="s2")])
    shown, _ = views(source)
    assert [(view.session_id, view.attempt) for view in shown] == [("s1", 1), ("s1", 2), ("s2", 1)]
    assert [view.attempt for view in views(source, attempt=2)[0]] == [2]
    with pytest.raises(InvalidInputError, match="no record of attempt 3"):
        views(source, attempt=3)


def test_a_call_without_tokens_is_shown_with_its_error() -> None:
    failed = completion("c1", [1, 2], None, status="error", error="prompt too long")
    read = read_lines([failed.model_copy(update={"choices": ()}).model_dump_json().encode()])
    assert read.problems == ()
    (recording,) = folded(read.events)
    assert recording.calls[0].error == "prompt too long"


def rollmill(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollmill.cli", "inspect", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)


def test_the_command(tmp_path: Path) -> None:
    plain = rollmill(str(EXAMPLE))
    assert plain.returncode == 0
    assert "7 calls became 3 traces" in plain.stdout
    lines = EXAMPLE.read_text(encoding="utf-8") + "{\n"
    piped = rollmill("-", "--json", "--builder", "per_request", given=lines)
    shown = json.loads(piped.stdout)
    assert (shown["session_id"], shown["traces_in_all"], shown["trained"]) == ("three-traces", 6, 21)
    assert piped.stderr.startswith("rollmill: -, line 10: malformed")
    missing = rollmill(str(tmp_path / "nowhere.jsonl"))
    assert (missing.returncode, missing.stdout) == (70, "")
    assert "neither a file nor a session id" in missing.stderr
    assert "this is no JSON" in rollmill(str(EXAMPLE), "--config", "{").stderr
