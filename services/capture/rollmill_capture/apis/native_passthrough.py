"""APIs that the upstream speaks itself, passed on as they are: recorded without ids, and never trained.

For a route whose `native` names them: a judge or a teacher behind a provider's own API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.apis.passthrough_reply import PassthroughFormatter
from rollmill_capture.apis.validation import is_stream
from rollmill_capture.errors import ErrorFormat
from rollmill_capture.upstream.formats.upstream_format import UpstreamFormat


@dataclass(frozen=True)
class NativePassthroughApi:
    name: str
    wire: UpstreamFormat
    shape: ErrorFormat

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        del place, memory
        return ParsedRequest(self.wire, body, PassthroughFormatter(self.wire, self.shape), is_stream(body))
