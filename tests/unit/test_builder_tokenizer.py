"""A configured tokenizer decides whether a re-tokenised copy is the same reply; without one the messages do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from rollmill.models import CompletionRecord, Trajectory
from rollmill.strategies import builder_registry
from rollmill.strategies.allow_list import FOLDERS, SETTING
from rollmill.strategies.decoding import decoder
from rollmill.testing.samples.sessions import assistant, completion, session_of, user
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder

VOCABULARY = {"?": 0, "ask": 1, ":": 2, "next": 3, "on": 4, "a": 5, "b": 6, "g": 7, "ab": 8, "</s>": 9, "x": 30}
ASK = [user("?")]
MODULE = f"""
names = { ({number: text for text, number in VOCABULARY.items()})!r}
def spell(ids):
    return "".join(names[number] for number in ids)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))  # noqa: S106  # no secret
    tokenizer.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(params=["file", "callable"])
def tokenizer(request: pytest.FixtureRequest, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy_spelling.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(SETTING, "toy_spelling")
    monkeypatch.setenv(FOLDERS, str(Path(file).parent))
    return file if request.param == "file" else "toy_spelling:spell"


def c1(**more: Any) -> CompletionRecord:
    return completion("c1", [1, 2], [5, 6, 9], at=1.0, logprobs=[-0.1, -0.2, -0.3], **more)


def c2(prompt: list[int], **more: Any) -> CompletionRecord:
    return completion("c2", prompt, [7, 9], at=2.0, logprobs=[-0.4, -0.5], **more)


def built(*records: CompletionRecord, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(**config).build(session_of(*records))


def reasons(trajectory: Trajectory) -> list[str | None]:
    return [trace.metadata["break_reason"] for trace in trajectory.traces]


def test_t2_by_the_tokenizer_alone(tokenizer: str) -> None:
    (trace,) = built(c1(), c2([1, 2, 8, 9, 3, 4]), tokenizer=tokenizer).traces
    assert trace.response_ids.tolist() == [5, 6, 9, 3, 4, 7, 9]
    assert trace.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert trace.metadata["drift"] == 1


def test_t2_by_the_messages_alone() -> None:
    first = c1(messages=ASK, text="ab")
    (trace,) = built(first, c2([1, 2, 8, 9, 3, 4], messages=[*ASK, assistant("ab"), user("on")])).traces
    assert trace.response_ids.tolist() == [5, 6, 9, 3, 4, 7, 9]


def test_t9_by_the_tokenizer_alone(tokenizer: str) -> None:
    trajectory = built(c1(), c2([1, 2, 30, 9, 3]), tokenizer=tokenizer)
    assert reasons(trajectory) == [None, "reply_differs"]


def test_the_tokenizer_counts_more_than_messages_that_are_unchanged(tokenizer: str) -> None:
    """A template that writes another text than the message holds."""
    second = c2([1, 2, 30, 9, 3], messages=[*ASK, assistant("ab"), user("on")])
    assert reasons(built(c1(messages=ASK, text="ab"), second)) == [None]
    assert reasons(built(c1(messages=ASK, text="ab"), second, tokenizer=tokenizer)) == [None, "reply_differs"]


def test_the_messages_give_the_name_of_a_difference(tokenizer: str) -> None:
    call, other = ({"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', '{"a":1}'))
    message, copy = assistant("", tool_calls=[call]), assistant("", tool_calls=[other])
    choice = c1().choices[0].model_copy(update={"message": c1_message(message)})
    first = c1(messages=ASK).model_copy(update={"choices": (choice,)})
    second = c2([1, 2, 30, 9, 3], messages=[*ASK, copy, user("on")])
    assert reasons(built(first, second, tokenizer=tokenizer)) == [None, "tool_arguments"]


def c1_message(message: dict[str, Any]) -> bytes:
    found = completion("x", [1], [2], messages=[message]).request
    assert found is not None
    return found.removeprefix(b'{"messages":[').removesuffix(b"]}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/tokenizer.json", "no file"),
        ("no_such_module:decode", "cannot be imported"),
        ("os:no_such_name", "cannot be imported"),
        ("os:name", "no callable"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused_when_the_session_opens(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "os,no_such_module")
    monkeypatch.setenv(FOLDERS, "/no/such")
    with pytest.raises(ValueError, match=message):
        decoder(source)
    with pytest.raises(ValueError, match=message):
        PrefixMergingBuilder(tokenizer=source)
    assert "prefix_merging" in builder_registry().names


@pytest.mark.parametrize("name", ["/etc/passwd", "/no/such/file", "{}/../outside.json", "{}/link.json"])
def test_a_file_outside_the_operators_folders_is_refused_whether_or_not_it_exists(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.json").write_text("{}")
    (inside := tmp_path / "inside").mkdir()
    (inside / "link.json").symlink_to(tmp_path / "outside.json")
    for folders in ("", str(inside)):
        monkeypatch.setenv(FOLDERS, folders)
        with pytest.raises(ValueError, match=f"is not allowed: it is in no folder that the setting {FOLDERS} lists"):
            decoder(name.format(inside))


def test_a_file_is_not_read_before_a_text_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    path = tmp_path / "tokenizer.json"
    path.write_text("not read")
    assert len(built(c1(), c2([1, 2, 5, 6, 9, 3]), tokenizer=str(path)).traces) == 1
