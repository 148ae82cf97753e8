"""Which modules a name ``module:ClassName`` may import: those that the operator has listed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollmill.cli.inspect.token_text import pieces_of
from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.models import EvaluatorSpec, SessionSpec, StrategySpec
from rollmill.settings import ServiceSettings
from rollmill.strategies import builder_registry, evaluator_registry, validate_session_spec
from rollmill.strategies.allow_list import SETTING, allowed_by_hand, imported
from rollmill.strategies.maxima import LARGEST
from rollmill_batcher.settings import BatcherSettings

PACKAGE = """
from rollmill.strategies import BaseTrajectoryEvaluator
class Grader(BaseTrajectoryEvaluator):
    async def evaluate(self, trajectory, context): ...
def spell(ids): return "".join(map(str, ids))
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boundarypkg", "boundarypkg_evil"):
        (tmp_path / name).mkdir()
        for module in ("__init__", "graders"):
            (tmp_path / name / f"{module}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(SETTING, raising=False)
    for name in [name for name in sys.modules if name.startswith("boundarypkg")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("setting", "module"),
    [
        ("", "boundarypkg"),
        ("boundarypkg.graders", "boundarypkg"),
        ("boundarypkg", "boundarypkg_evil"),
        ("boundarypkg", "boundarypkg_evil.graders"),
        ("boundarypkg.grader", "boundarypkg.graders"),
        ("*", "boundarypkg"),
        (",, ,", "boundarypkg"),
        (".", ".boundarypkg"),
    ],
)
def test_f3_a_module_that_is_not_listed_is_refused_before_its_import(
    setting: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, setting)
    for refused in (
        lambda: validate_session_spec(SessionSpec(evaluators=(EvaluatorSpec(strategy=f"{module}:Grader"),))),
        lambda: validate_session_spec(SessionSpec(builder=StrategySpec(strategy=f"{module}:Grader"))),
        lambda: validate_session_spec(SessionSpec(builder=with_tokenizer(f"{module}:spell"))),
        lambda: validate_session_spec(SessionSpec(evaluators=(composite({"strategy": f"{module}:Grader"}),))),
        lambda: evaluator_registry().create(EvaluatorSpec(strategy=f"{module}:Grader")),
    ):
        with pytest.raises(InvalidInputError, match=SETTING):
            refused()
    assert not [name for name in sys.modules if name.startswith("boundarypkg")]


@pytest.mark.parametrize("field", ["advantage", "group_scorer"])
def test_f3_the_batcher_imports_what_is_listed_alone(field: str) -> None:
    with pytest.raises(ConfigurationError, match=SETTING):
        BatcherSettings.model_validate({field: "boundarypkg:Grader"}).batcher_config()
    assert "boundarypkg" not in sys.modules


@pytest.mark.parametrize(
    ("setting", "module"),
    [
        ("boundarypkg", "boundarypkg"),
        ("boundarypkg", "boundarypkg.graders"),
        ("other , boundarypkg.graders", "boundarypkg.graders"),
    ],
)
def test_a_listed_package_allows_its_modules(setting: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, setting)
    spec = EvaluatorSpec(strategy=f"{module}:Grader")
    validate_session_spec(SessionSpec(builder=with_tokenizer(f"{module}:spell"), evaluators=(spec,)))
    assert ServiceSettings().strategy_modules == setting


def test_what_is_no_longer_listed_is_refused_although_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "boundarypkg")
    evaluator_registry().create(EvaluatorSpec(strategy="boundarypkg:Grader"))
    monkeypatch.delenv(SETTING)
    with pytest.raises(InvalidInputError, match=SETTING):
        evaluator_registry().create(EvaluatorSpec(strategy="boundarypkg:Grader"))


@pytest.mark.parametrize("bad", ["*", "my-pkg", "mypkg:Class", "mypkg,", "mypkg..x", "mypkg;other"])
def test_a_list_that_names_no_packages_is_refused_at_the_start(bad: str) -> None:
    with pytest.raises(ValidationError, match="strategy_modules"):
        ServiceSettings(strategy_modules=bad)


def test_what_is_named_at_the_command_line_is_allowed_there_alone() -> None:
    named = {"parts": [{"strategy": "boundarypkg.graders:Grader"}], "n": 1, "text": "no module"}
    with allowed_by_hand([None, "composite", named]):
        assert imported("evaluator", "boundarypkg.graders:Grader").__name__ == "Grader"
        with pytest.raises(InvalidInputError, match=SETTING):
            imported("evaluator", "boundarypkg_evil:Grader")
    with pytest.raises(InvalidInputError, match=SETTING):
        imported("evaluator", "boundarypkg.graders:Grader")
    assert pieces_of("boundarypkg:spell")([7]) == ["7"]


def test_a_tokenizer_that_leaves_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "boundarypkg" / "leaves.py").write_text("raise SystemExit(0)")
    monkeypatch.setenv(SETTING, "boundarypkg")
    for spec in (with_tokenizer("boundarypkg.leaves:spell"), StrategySpec(strategy="boundarypkg.leaves:Builder")):
        with pytest.raises(InvalidInputError, match="SystemExit"):
            builder_registry().create(spec)


def test_f16_nested_evaluators_are_bounded_in_depth() -> None:
    deep = EvaluatorSpec(strategy="reported")
    for _ in range(LARGEST.evaluator_depth - 1):
        deep = composite(deep.model_dump())
    validate_session_spec(SessionSpec(evaluators=(deep,)))
    with pytest.raises(InvalidInputError, match=r"33 inside of each other is above .* maximum of 32"):
        validate_session_spec(SessionSpec(evaluators=(composite(deep.model_dump()),)))


def test_f16_thousands_of_levels_are_refused_and_not_recursed_into() -> None:
    config: dict[str, Any] = {}
    for _ in range(20_000):
        config = {"parts": [{"strategy": "composite", "config": config}]}
    spec = EvaluatorSpec.model_construct(strategy="composite", config=config, name=None, weight=1.0)
    for refused in (
        lambda: validate_session_spec(SessionSpec.model_construct(evaluators=(spec,))),
        lambda: evaluator_registry().create(spec),
    ):
        with pytest.raises(InvalidInputError, match="inside of each other"):
            refused()
    while config:  # freed level by level
        config = config["parts"][0]["config"]


def test_f16_evaluators_are_bounded_in_number_with_their_parts() -> None:
    parts = [{"strategy": "reported", "name": f"r{number}"} for number in range(20)]
    inner = [{"strategy": "composite", "name": f"c{number}", "config": {"parts": parts}} for number in range(20)]
    with pytest.raises(InvalidInputError, match=r"evaluators: 257 is above .* maximum of 256"):
        validate_session_spec(SessionSpec(evaluators=(composite(*inner),)))
    many = tuple(EvaluatorSpec(strategy="reported", name=f"r{number}") for number in range(LARGEST.evaluators + 1))
    validate_session_spec(SessionSpec(evaluators=many[:-1]))
    with pytest.raises(InvalidInputError, match=r"evaluators: 257 is above .* maximum of 256"):
        validate_session_spec(SessionSpec(evaluators=many))


def with_tokenizer(source: str) -> StrategySpec:
    return StrategySpec(strategy="prefix_merging", config={"tokenizer": source})


def composite(*parts: dict[str, Any]) -> EvaluatorSpec:
    return EvaluatorSpec(strategy="composite", config={"parts": list(parts)})
