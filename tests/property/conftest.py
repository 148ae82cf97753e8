"""For all properties: builders may name the test kit's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollmill.strategies.allow_list import SETTING


@pytest.fixture(autouse=True, scope="session")
def _allowed_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "rollmill.testing")
        yield
