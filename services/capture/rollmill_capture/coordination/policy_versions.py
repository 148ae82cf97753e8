"""Which policy version sampled a call (rules R1, A8). Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.models import PolicyAnnouncement, PolicySpan, PolicyVersion
from rollmill_capture.model_config import Route, VersionSource

_STAMP = re.compile(r"(?:(\d{1,9}):)?(\d{1,18})")


class AnnouncedVersions:
    """The newest announced version of each policy; (0, 0) before any announcement."""

    def __init__(self) -> None:
        self._newest: dict[str, PolicyVersion] = {}
        self._stale: set[str] = set()

    def apply(self, _key: str, announcement: PolicyAnnouncement | None) -> None:
        if announcement is not None:
            self.learn(announcement.policy, announcement.version)

    def learn(self, policy: str, version: PolicyVersion) -> None:
        """The engines have loaded a version; an older one is no news."""
        known = self._newest.get(policy)
        if known is not None and version > known:
            self._stale.add(policy)
        self._newest[policy] = version if known is None else max(known, version)

    def caches_reset(self, policy: str) -> None:
        """The engines hold nothing that older weights have computed."""
        self._stale.discard(policy)

    def caches_may_be_stale(self, policy: str) -> bool:
        """Whether weights have changed since the engines' prefix caches were known to be empty."""
        return policy in self._stale

    def newest(self, policy: str) -> PolicyVersion:
        return self._newest.get(policy, PolicyVersion())


def version_span(route: Route, stamps: Sequence[str], before: PolicyVersion, after: PolicyVersion) -> PolicySpan:
    """The versions of one call. ``stamps`` is the engine's word; ``before`` and ``after`` are the announced ones.

    An engine that says nothing readable is taken to run what was announced.
    """
    if route.version_source is VersionSource.FIXED:
        return PolicySpan(name=route.policy, before=route.version, after=route.version)
    read = [read_stamp(stamp, before.epoch) for stamp in stamps]
    known = [version for version in read if version is not None]
    if route.version_source is VersionSource.ENGINE and known:
        return PolicySpan(name=route.policy, before=known[0], after=known[-1])
    return PolicySpan(name=route.policy, before=before, after=after)


def read_stamp(stamp: str, epoch: int) -> PolicyVersion | None:
    """``7`` is version 7 of ``epoch``, ``2:7`` names its own epoch; None: anything else."""
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        return None
    return PolicyVersion(epoch if match[1] is None else int(match[1]), int(match[2]))
