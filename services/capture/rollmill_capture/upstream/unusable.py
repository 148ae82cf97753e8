"""Answers that no model server gives: whatever listens there, the message shows its address and what it answered."""

from __future__ import annotations

from rollmill_capture.upstream.client import BAD_GATEWAY, UpstreamError

SHOWN_BYTES = 80


def unusable_answer(url: str, content: bytes) -> str:
    """The message, with the first bytes of the answer."""
    return f"{url} answered what is no reply of a model server, and begins {shown(content)}: is it the right address?"


def unusable(url: str, content: bytes) -> UpstreamError | None:
    """The same as an error; None: there is nothing to show."""
    return UpstreamError(unusable_answer(url, content), BAD_GATEWAY, began=True) if content else None


def shown(content: bytes) -> str:
    return repr(content[:SHOWN_BYTES].decode("utf-8", "replace"))
