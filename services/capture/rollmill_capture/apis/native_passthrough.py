"""APIs that the upstream speaks itself, passed on as they are: recorded without ids, and never trained.

For a route whose `native` names them: a judge or a teacher behind a provider's own API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill_capture.apis.api import Ask
from rollmill_capture.apis.history_cache import SessionMemory
from rollmill_capture.apis.passthrough_reply import Same
from rollmill_capture.apis.validation import is_stream
from rollmill_capture.errors import Shape
from rollmill_capture.upstream.formats.wire_format import Wire


@dataclass(frozen=True)
class PassingApi:
    name: str
    wire: Wire
    shape: Shape

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionMemory) -> Ask:
        del place, memory
        return Ask(self.wire, body, Same(self.wire, self.shape), is_stream(body))
