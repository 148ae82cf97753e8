"""A record of the spool, and the digest by which a damaged one is recognised."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from rollmill.topics import REGISTRY

DIGEST_BYTES = 16
TOPICS = frozenset(topic.name for topic in REGISTRY)


@dataclass(frozen=True)
class SpooledRecord:
    """A record for a topic, by its name without the prefix. ``number`` 0: not in the file yet."""

    topic: str
    key: str
    value: bytes
    number: int = 0

    def digest(self) -> bytes:
        """Of everything, the place in the order included; lengths keep the parts apart."""
        topic, key = self.topic.encode(), self.key.encode("utf-8", "backslashreplace")
        sizes = b"%d %d %d " % (self.number, len(topic), len(key))
        return blake2b(sizes + topic + key + self.value, digest_size=DIGEST_BYTES).digest()

    def is_intact(self, digest: object) -> bool:
        """Whether this is what was written; without a digest, as release 0.1.0 wrote it, it can only look like it."""
        if not (isinstance(self.key, str) and isinstance(self.value, bytes) and self.topic in TOPICS):
            return False
        return digest is None or digest == self.digest()
