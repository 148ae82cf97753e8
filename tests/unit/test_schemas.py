"""The published schemas, by name."""

from pathlib import Path

import jsonschema
import pytest

from rollmill import schemas

FILES = Path(__file__).parents[2] / "schemas"


def test_b15_every_published_schema_is_listed_and_loads() -> None:
    assert schemas.names() == sorted(path.name for path in FILES.iterdir() if path.is_file())
    for name in schemas.names():
        assert schemas.text(name) == (FILES / name).read_text()
        if name.endswith(".schema.json"):
            jsonschema.Draft202012Validator.check_schema(schemas.load(name))
    assert schemas.load("openapi.json")["openapi"] == "3.1.0"


def test_b15_an_unknown_schema_is_refused_with_the_names_of_those_that_there_are() -> None:
    with pytest.raises(KeyError, match=r"no schema has the name 'nothing.json'.*openapi.json"):
        schemas.load("nothing.json")
    with pytest.raises(ValueError, match="is no JSON"):
        schemas.load("topics.yaml")
