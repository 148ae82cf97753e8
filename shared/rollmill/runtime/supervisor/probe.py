"""Asks a service's health server whether it is ready."""

from __future__ import annotations

import asyncio
from contextlib import suppress

ANSWER_SECONDS = 2.0


async def is_ready(host: str, port: int) -> bool:
    """Whether ``/ready`` answers 200; anything else, no answer included, is False."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return b" 200 " in await _status_line(host, port)
    except (OSError, TimeoutError, ValueError):
        return False


async def _status_line(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return await reader.readline()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
