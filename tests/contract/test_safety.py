"""What the sources never do, and what settings never show."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from rollmill.settings import KafkaSettings

ROOT = Path(__file__).parents[2]
TREES = ("shared", "services", "examples", "benchmarks", "chaos", "tests")
SERVICES = ("capture", "builder", "evaluator", "reward_merger", "batcher")

UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
"""Modules that run what they read."""
HARMLESS = {("tests/unit/test_trainer_device.py", "pickle")}
"""Shows that an object refuses to be pickled."""


def sources() -> Iterator[Path]:
    for tree in TREES:
        yield from (path for path in (ROOT / tree).rglob("*.py") if "__pycache__" not in path.parts)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            return [str(node.args[0].value)]
    return []


def said(node: ast.Call, keyword: str) -> object:
    values = [item.value for item in node.keywords if item.arg == keyword]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def faults(text: str, path: str) -> list[str]:
    """Ways of running what was read."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [name for name in imported(node) if name.partition(".")[0] in UNPICKLING]
        found += [f"{path} imports {name}" for name in names if (path, name) not in HARMLESS]
        if isinstance(node, ast.Call):
            found += [f"{path}:{node.lineno} {fault}" for fault in called(node)]
    return found


def called(node: ast.Call) -> Iterator[str]:
    if said(node, "allow_pickle") is True:
        yield "allows pickle"
    if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        yield f"calls {node.func.id}"
    if not (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
        return
    owner, name = node.func.value.id, node.func.attr
    if owner == "torch" and name == "load" and said(node, "weights_only") is not True:
        yield "torch.load without weights_only=True"
    if owner == "yaml" and name in ("load", "load_all", "unsafe_load", "full_load"):
        yield f"yaml.{name}"


def test_nothing_that_is_read_is_run() -> None:
    paths = list(sources())
    assert len(paths) > 300
    assert not [fault for path in paths for fault in faults(path.read_text(), str(path.relative_to(ROOT)))]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import importlib\nimportlib.import_module('dill')",
        "def f():\n    import marshal",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x', Loader=yaml.Loader)",
        "eval('1')",
    ],
)
def test_the_look_through_the_sources_finds_what_it_looks_for(text: str) -> None:
    assert faults(text, "x.py")


# ---- secrets ---------------------------------------------------------------------------------------------------------

SECRET = re.compile(r"(^|_)(password|passwd|secret|api_key|signing_key|private_key|credential|auth)s?($|_)")
NO_SECRET = {"api_keys", "api_keys_file"}
"""Tenant to the SHA-256 of its key, and where that is written down."""


def models() -> set[type[BaseModel]]:
    """All classes of settings, and every model that one of their fields holds."""
    for package in ("rollmill", *(f"rollmill_{name}" for name in SERVICES)):
        importlib.import_module(package)
        if package != "rollmill":
            importlib.import_module(f"{package}.settings")
    for module in pkgutil.walk_packages(importlib.import_module("rollmill").__path__, "rollmill."):
        if module.name.endswith("settings"):
            importlib.import_module(module.name)
    classes = importlib.import_module("rollmill.settings")
    found: set[type[BaseModel]] = {classes.ClientSettings}
    waiting: list[type[BaseModel]] = [KafkaSettings]
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            waiting += [
                *model.__subclasses__(),
                *(kind for f in model.model_fields.values() for kind in held(f.annotation)),
            ]
    return found


def held(annotation: Any) -> Iterator[type[BaseModel]]:
    if typing.get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from held(part)


def test_what_looks_like_a_secret_is_held_as_one() -> None:
    found = models()
    assert {"BatcherSettings", "CaptureSettings", "EvaluatorSettings", "Route"} <= {model.__name__ for model in found}
    for model in found:
        for name, field in model.model_fields.items():
            if SECRET.search(name) and name not in NO_SECRET:
                assert field.annotation in (SecretStr, SecretStr | None), f"{model.__name__}.{name}"


SECRETS = {
    "ROLLMILL_SASL_PASSWORD": "sesame-1",
    "ROLLMILL_TLS_KEY_PASSWORD": "sesame-2",
    "ROLLMILL_UPSTREAM_API_KEY": "sesame-3",
    "ROLLMILL_WEBHOOK_API_KEY": "sesame-4",
    "ROLLMILL_EVALUATOR_SERVICES": json.dumps({"judge": {"url": "http://j", "api_key": "sesame-5"}}),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_prints_its_settings_without_their_secrets(service: str) -> None:
    given = {"ROLLMILL_UPSTREAM": "http://engine/v1", "ROLLMILL_SASL_USERNAME": "alice", **SECRETS}
    done = subprocess.run(
        [sys.executable, "-m", f"rollmill_{service}", "--print-config"],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = json.loads(done.stdout)
    assert printed["bootstrap_servers"] == "127.0.0.1:9092"
    assert printed["sasl_username"] == "alice"
    assert set(printed["sasl_password"]) == {"*"}
    assert "sesame" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("service", "given", "complaint"),
    [
        ("builder", {"ROLLMILL_POLL_MS": "-1"}, "ROLLMILL_POLL_MS"),
        (
            "builder",
            {"ROLLMILL_SASL_PASSWORD": "sesame-1", "ROLLMILL_SECURITY_PROTOCOL": "SASL_SSL"},
            "ROLLMILL_SASL_USERNAME",
        ),
        ("evaluator", {"ROLLMILL_EVALUATOR_SERVICES": '{"j": {"url": "no url", "api_key": "sesame-5"}}'}, "url"),
        ("evaluator", {"ROLLMILL_EVALUATOR_SERVICES": '{"j": "sesame-6"}'}, "ROLLMILL_EVALUATOR_SERVICES.j"),
    ],
)
def test_a_refused_setting_keeps_its_secret(service: str, given: dict[str, str], complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"rollmill_{service}"],
        env={**os.environ, **SECRETS, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "sesame" not in done.stdout + done.stderr


ENDS_WITH_A_DOLLAR = re.compile(r"""^([A-Z_]+) = (?:re\.compile\()?rf?"[^"\n]*\$"\)?$""", re.MULTILINE)
ON_LINES = "frameworks"
"""The parsers of test output match lines, from which ``splitlines`` has taken the ends."""


def test_f18_a_pattern_with_a_dollar_is_matched_in_full() -> None:
    """With ``match`` a dollar accepts a line feed after it; ``fullmatch`` and pydantic's patterns do not."""
    texts = {path: path.read_text() for path in sources() if ON_LINES not in path.parts and "tests" not in path.parts}
    names = {name for text in texts.values() for name in ENDS_WITH_A_DOLLAR.findall(text)}
    assert {"IDENTIFIER_PATTERN", "REVISION", "DIGEST"} <= names
    either = "|".join(sorted(names))
    loose = re.compile(rf"\b(?:{either})\.(?:match|search)\(|re\.(?:match|search)\((?:{either})\b")
    assert {str(path): loose.findall(text) for path, text in texts.items() if loose.search(text)} == {}
