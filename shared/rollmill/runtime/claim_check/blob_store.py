"""Blobs by their digest in object storage: a directory, or a bucket. No call blocks the event loop.

``<url>/<prefix>blobs/<first two characters>/<digest>``; what garbage collection has moved out is kept for a while in
``<prefix>trash``, where readers still find it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from rollmill.errors import ConfigurationError, RetryableError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SETTING = "ROLLMILL_CLAIM_CHECK_URL"
NOT_INSTALLED = (
    "large values are stored in object storage, but its client is not installed: pip install 'rollmill[blobs]'"
)

Shelf = Literal["blobs", "trash"]
DIGEST_LENGTH = 64
RETRIES = 3
ANSWER_SECONDS = 20.0
"""For one attempt; with the retries, an unreachable storage is reported within twice that."""


class StorageUnreachableError(RetryableError, OSError):
    """The object storage does not answer, or refuses: nothing is known of the blob. An OSError, as a lost broker is."""


@dataclass(frozen=True)
class Blob:
    """One in the storage. ``written_at``: seconds since the epoch, by the storage's clock."""

    digest: str
    size: int
    written_at: float


class BlobStore:
    """``url``: ``file:///a/directory``, which the first blob makes, or ``s3://bucket/prefix``.

    A bucket's address and credentials come from the ``AWS_*`` variables, as every S3 client reads them. Raises
    ConfigurationError for a URL that is none, or without the library.
    """

    def __init__(self, url: str, prefix: str) -> None:
        self._prefix = prefix
        if find_spec("obstore") is None:
            raise ConfigurationError(NOT_INSTALLED)
        parts = urlsplit(url)
        self._directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
        self._bucket = None if self._directory is not None else _opened(url)

    async def put(self, digest: str, content: bytes, shelf: Shelf = "blobs") -> None:
        """Durable when this returns. An existing blob is written again, so that it counts as new."""
        import obstore  # noqa: PLC0415  # comes with an extra

        with _reachable():
            await obstore.put_async(self._store(make=True), self._path(digest, shelf), content, use_multipart=False)
            if self._directory is not None:
                await asyncio.to_thread(_to_disk, self._directory / self._path(digest, shelf), self._directory)

    async def get(self, digest: str, most: int, shelf: Shelf = "blobs") -> bytes | None:
        """The content; None: no such blob. At most ``most`` bytes and one are read of it.

        Where the whole directory is missing, the storage counts as unreachable.
        """
        import obstore  # noqa: PLC0415  # comes with an extra

        with _reachable():
            try:
                store, path = self._store(), self._path(digest, shelf)
                found = await obstore.get_async(store, path)
                if found.meta["size"] > most:
                    return bytes(await obstore.get_range_async(store, path, start=0, length=most + 1))
                return bytes(await found.bytes_async())
            except FileNotFoundError:
                return None

    async def delete(self, digest: str, shelf: Shelf = "blobs") -> None:
        import obstore  # noqa: PLC0415  # comes with an extra

        with _reachable():
            try:
                await obstore.delete_async(self._store(), self._path(digest, shelf))
            except FileNotFoundError:
                return

    async def listed(self, shelf: Shelf = "blobs") -> AsyncIterator[Blob]:
        """All blobs of the prefix."""
        import obstore  # noqa: PLC0415  # comes with an extra

        with _reachable():
            async for chunk in obstore.list(self._store(), f"{self._prefix}{shelf}/"):
                for item in chunk:
                    name = item["path"].rpartition("/")[2]
                    if len(name) == DIGEST_LENGTH:  # a directory also shows what is being written
                        yield Blob(name, item["size"], item["last_modified"].timestamp())

    def _store(self, *, make: bool = False) -> ObjectStore:
        """A directory that is not there may be an unmounted disk: it is unreachable, unless it is to be made."""
        from obstore.store import LocalStore  # noqa: PLC0415  # comes with an extra

        if self._bucket is not None:
            return self._bucket
        if self._directory is None or not (make or self._directory.is_dir()):
            raise StorageUnreachableError(f"the directory {self._directory} is not there")
        return LocalStore(self._directory, mkdir=make)

    def _path(self, digest: str, shelf: Shelf) -> str:
        return f"{self._prefix}{shelf}/{digest[:2]}/{digest}"


def _opened(url: str) -> ObjectStore:
    from obstore.exceptions import BaseError  # noqa: PLC0415  # comes with an extra
    from obstore.store import S3Store  # noqa: PLC0415

    if not url.startswith("s3://"):
        raise ConfigurationError(f"{SETTING} {url!r}: file:///directory or s3://bucket/prefix is expected")
    options = {
        "timeout": timedelta(seconds=ANSWER_SECONDS),
        "connect_timeout": timedelta(seconds=5),
        "allow_http": True,  # where the endpoint that was set says so
    }
    retries = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=ANSWER_SECONDS)}
    try:
        return S3Store.from_url(url, client_options=options, retry_config=retries)  # type: ignore[arg-type]  # plain dicts are its typed ones
    except (BaseError, ValueError) as error:
        raise ConfigurationError(f"{SETTING} {url!r} cannot be used: {_first_line(error)}") from error


@contextmanager
def _reachable() -> Iterator[None]:
    """Turns errors of the storage into one; the caller tries again later."""
    from obstore.exceptions import BaseError  # noqa: PLC0415  # comes with an extra

    try:
        yield
    except (BaseError, OSError) as error:
        raise StorageUnreachableError(f"the object storage does not serve: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _to_disk(path: Path, root: Path) -> None:
    """The storage writes beside the name and renames; a power cut could still undo both before this."""
    for place in (path, path.parent, path.parent.parent, root):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
