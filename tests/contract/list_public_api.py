"""Lists the public API of a wheel as JSON, for `test_public_api.py` to hold later versions to it.

    python tests/contract/list_public_api.py dist/rollmill-0.2.0-py3-none-any.whl > tests/fixtures/public_api_0.2.0.json

Everything is found by importing what is in the wheel; its dependencies are those of the running Python. What is public,
and what a promise covers, is said in docs/api-stability.md.
"""

from __future__ import annotations

import ast
import configparser
import inspect
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

MODULES = (
    "rollmill",
    "rollmill.client",
    "rollmill.codec",
    "rollmill.errors",
    "rollmill.models",
    "rollmill.settings",
    "rollmill.signing",
    "rollmill.strategies",
    "rollmill.strategies.bases",
    "rollmill.strategies.sandbox",
    "rollmill.strategies.services",
    "rollmill.topics",
    "rollmill.trainer",
    "rollmill.trainer.dataset",
    "rollmill.trainer.device",
    "rollmill.trainer.flux",
    "rollmill.trainer.layouts",
)
SERVICES = ("batcher", "builder", "capture", "evaluator", "reward_merger")
CATALOGUES = ("rollmill.runtime.telemetry.catalogue", "rollmill.telemetry.catalogue")
PLAIN = (str, int, float, bool, type(None))


def public_names(module: ModuleType) -> list[str]:
    """``__all__``; without it what the module itself defines, apart from type variables."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    return sorted(
        name
        for name in set(_defined(tree))
        if not name.startswith("_") and not isinstance(getattr(module, name), TypeVar)
    )


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def describe(value: Any) -> dict[str, Any]:
    """Kind, parameters, members and plain value of a public object."""
    if isinstance(value, type) and issubclass(value, Enum):
        return {"kind": "enum", "members": {member.name: _plain(member.value) for member in value}}
    if isinstance(value, type):
        return {
            "kind": "class",
            "parameters": parameters(value),
            "attributes": dict(_attributes(value)),
            **_base(value),
        }
    if inspect.isroutine(value):
        return {"kind": "function", "parameters": parameters(value)}
    plain = _plain(value)
    return {"kind": "value"} if plain is None and value is not None else {"kind": "value", "value": plain}


def _base(value: type) -> dict[str, Any]:
    """Of an exception, the errors that a caller may catch it as."""
    if not issubclass(value, BaseException):
        return {}
    return {"catches": [base.__name__ for base in value.__mro__[1:] if base.__module__ == "rollmill.errors"]}


def parameters(value: Any) -> list[dict[str, Any]]:
    """Public parameters of a callable, in order."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # made in C
        return []
    return [
        {"name": item.name, "kind": item.kind.name, "required": item.default is item.empty}
        for item in signature.parameters.values()
        if not item.name.startswith("_") and item.name != "self"
    ]


def _attributes(owner: type) -> Iterator[tuple[str, list[dict[str, Any]] | None]]:
    """Public methods with their parameters, and properties with None, of our own classes among the bases."""
    names = {name for base in owner.__mro__ if base.__module__.startswith("rollmill") for name in vars(base)}
    for name in sorted(names):
        found = inspect.getattr_static(owner, name)
        if name.startswith("_") or name == "model_config":
            continue
        if isinstance(found, staticmethod | classmethod) or inspect.isfunction(found):
            yield name, parameters(getattr(owner, name))
        elif isinstance(found, property) or hasattr(found, "__set_name__"):
            yield name, None


def _plain(value: Any) -> Any:
    """JSON of a simple constant; None for anything else."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, tuple | list | frozenset | set):
        items = [_plain(item) for item in value]
        simple = all(isinstance(item, PLAIN) for item in value)
        return (sorted(items) if isinstance(value, frozenset | set) else items) if simple else None
    return value if isinstance(value, PLAIN) else None


def environment_settings() -> dict[str, dict[str, Any]]:
    """Environment variables with their defaults, by class of settings."""
    classes = [
        getattr(import_module("rollmill.settings"), name)
        for name in ("ClientSettings", "KafkaSettings", "ServiceSettings")
    ]
    for service in SERVICES:
        module = import_module(f"rollmill_{service}.settings")
        name = f"{service.title().replace('_', '')}Settings"
        classes.append(getattr(module, name))
    return {kind.__name__: dict(_variables(kind)) for kind in classes}


def _variables(kind: Any) -> Iterator[tuple[str, Any]]:
    from pydantic_core import to_jsonable_python  # noqa: PLC0415  # the names alone need no pydantic

    prefix = kind.model_config["env_prefix"]
    for name, field in kind.model_fields.items():
        variable = f"{prefix}{name}".upper()
        factory = field.default_factory
        if field.is_required():
            yield variable, {"required": True}
        elif factory is not None and factory.__name__ == "<lambda>":
            yield variable, {"computed": True}
        else:
            yield variable, {"default": to_jsonable_python(field.get_default(call_default_factory=True))}


def commands() -> dict[str, dict[str, Any]]:
    """By command path its arguments and flags."""
    from typer.main import get_command  # noqa: PLC0415  # the same

    return dict(_commands(get_command(import_module("rollmill.cli.commands").app), ()))


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*path, name))
    if path and not hasattr(command, "commands"):
        arguments = [item.name for item in command.params if item.param_type_name == "argument"]
        flags = sorted(flag for item in command.params for flag in item.opts if item.param_type_name == "option")
        yield " ".join(path), {"arguments": arguments, "flags": [flag for flag in flags if flag != "--help"]}


def metrics() -> dict[str, dict[str, Any]]:
    """By full name type, labels and components."""
    found: dict[str, dict[str, Any]] = {}
    for metric in _catalogue():
        entry = {"type": str(metric.kind.value), "labels": list(metric.label_names), "components": set()}
        found.setdefault(metric.full_name, entry)["components"] |= set(metric.components)
    return {name: {**entry, "components": sorted(entry["components"])} for name, entry in sorted(found.items())}


def _catalogue() -> tuple[Any, ...]:
    for name in CATALOGUES:
        try:
            catalogue: tuple[Any, ...] = import_module(name).CATALOGUE
        except ModuleNotFoundError:
            continue
        return catalogue
    raise LookupError(f"no catalogue of metrics in {', '.join(CATALOGUES)}")


def topics() -> dict[str, dict[str, Any]]:
    """By name what clients of a topic rely on."""
    fields = ("schema", "format", "partitioning", "max_bytes")
    registry = import_module("rollmill.topics").REGISTRY
    return {topic.name: {field: _plain(getattr(topic, field)) for field in fields} for topic in registry}


def public_api(entry_points: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, of whatever `rollmill` is imported; ``entry_points``: by group, the names."""
    modules = {name: import_module(name) for name in MODULES}
    return {
        "version": modules["rollmill"].__version__,
        "modules": {
            name: {each: describe(getattr(module, each)) for each in public_names(module)}
            for name, module in modules.items()
        },
        "entry_points": entry_points,
        "settings": environment_settings(),
        "commands": commands(),
        "metrics": metrics(),
        "topics": topics(),
    }


def of_wheel(wheel: Path) -> str:
    """JSON of a wheel's public API; read by another process, which imports the wheel and not the tree around it."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--extracted", folder]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
        read = subprocess.run(
            command,
            env={**environment, "PYTHONPATH": folder},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return read.stdout


def _of_extracted(folder: Path) -> str:
    (declared,) = folder.glob("rollmill-*.dist-info/entry_points.txt")
    groups = configparser.ConfigParser(delimiters=("=",))
    groups.read(declared, encoding="utf-8")
    api = public_api({group: sorted(groups[group]) for group in sorted(groups.sections())})
    if not Path(import_module("rollmill").__file__ or "").is_relative_to(folder):
        raise RuntimeError(f"another rollmill than the wheel's was imported: {import_module('rollmill').__file__}")
    return json.dumps(api, indent=1, sort_keys=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--extracted", folder]:
            sys.stdout.write(_of_extracted(Path(folder)) + "\n")
        case [wheel]:
            sys.stdout.write(of_wheel(Path(wheel)))
        case _:
            raise SystemExit(__doc__)
