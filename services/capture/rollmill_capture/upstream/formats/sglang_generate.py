"""SGLang's native route ``/generate``: ids in, ids out, whole and streamed. Pure.

The prompt's ids are in the request alone. Streams are cumulative by default and disjoint by a server's flag. The
running ``completion_tokens``, cumulative in both, shows which one it is, for ids and for log-probs separately, because
some builds mix the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rollmill_capture.upstream.formats.chat import UNSET_VERSION
from rollmill_capture.upstream.formats.parsed_reply import (
    Ids,
    Incomplete,
    ParsedChoice,
    ParsedReply,
    StreamAssembler,
    as_ids,
    logprob_of,
)


def parse_body(body: Any, prompt_ids: Ids | None = None) -> ParsedReply:
    """The reply in a whole body: one object, or a list of them where several samples were requested."""
    assembler = SglangGenerateAssembler(len(body) if isinstance(body, list) else 1, prompt_ids)
    pieces = body if isinstance(body, list) else [body]
    for position, piece in enumerate(pieces):
        assembler.add({"index": position, **piece} if isinstance(piece, dict) else piece)
    return assembler.parsed()


class SglangGenerateAssembler(StreamAssembler):
    """Gathers the chunks of one stream; the whole answer is a stream of one chunk per sample."""

    def __init__(self, expected: int = 1, prompt_ids: Ids | None = None) -> None:
        super().__init__()
        self._expected = expected
        self._prompt_ids = prompt_ids
        self._samples: dict[int, _Sample] = {}
        self._versions: list[str] = []

    def _add(self, chunk: dict[str, Any]) -> None:
        meta = chunk.get("meta_info")
        if not isinstance(meta, dict):
            return
        index = chunk.get("index")
        index = index if type(index) is int else 0
        self._samples.setdefault(index, _Sample(index)).add(chunk, meta)
        version = meta.get("weight_version")
        if version not in (None, UNSET_VERSION) and str(version) not in self._versions[-1:]:
            self._versions.append(str(version))

    @property
    def finished(self) -> bool:
        ends = [sample.finish_reason is not None for sample in self._samples.values()]
        return len(ends) >= self._expected and all(ends)

    def _parsed(self, why: Incomplete | None, error: str | None) -> ParsedReply:
        samples = [sample for _, sample in sorted(self._samples.items())]
        return ParsedReply(
            choices=tuple(sample.parsed() for sample in samples),
            prompt_ids=self._prompt_ids,
            usage=_usage(samples),
            weight_versions=tuple(self._versions),
            incomplete=why if why != "no_terminal_frame" or samples else "no_choices",
            error=error,
        )


def _usage(samples: Sequence[_Sample]) -> tuple[int, int] | None:
    counts = [sample.counted for sample in samples]
    if not counts or None in counts:
        return None
    return samples[0].prompt_tokens, sum(count or 0 for count in counts)


@dataclass
class _Joined:
    """A list that arrives in pieces, each of them new or all of them so far."""

    items: list[Any] | None = None
    whole: bool = True
    """Every piece so far could be read in one of the two ways."""

    def add(self, piece: list[Any], total: int | None) -> bool:
        """Take in a piece, when ``total`` tokens are sampled in all. True: it replaced the items before."""
        before = self.items or []
        if total is None:
            total = len(piece) if before and piece[: len(before)] == before else len(before) + len(piece)
        replaces = len(piece) == total
        self.whole &= replaces or len(before) + len(piece) == total
        self.items = list(piece) if replaces else before + piece
        return replaces


@dataclass
class _Sample:
    index: int
    ids: _Joined = field(default_factory=_Joined)
    pairs: _Joined = field(default_factory=_Joined)
    texts: list[str] = field(default_factory=list)
    counted: int | None = None
    prompt_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, chunk: dict[str, Any], meta: dict[str, Any]) -> None:
        count = meta.get("completion_tokens")
        self.counted = count if type(count) is int else self.counted
        prompt = meta.get("prompt_tokens")
        self.prompt_tokens = prompt if type(prompt) is int else self.prompt_tokens
        replaced = self._add_tokens(chunk.get("output_ids"), meta.get("output_token_logprobs"))
        if isinstance(chunk.get("text"), str):
            self.texts = [chunk["text"]] if replaced else [*self.texts, chunk["text"]]
        self._end(meta.get("finish_reason"))

    def _add_tokens(self, ids: Any, pairs: Any) -> bool:
        replaced = False
        if isinstance(pairs, list):
            replaced = self.pairs.add(pairs, self.counted)
        if isinstance(ids, list):
            replaced = self.ids.add(ids, self.counted)
        return replaced

    def _end(self, reason: Any) -> None:
        if isinstance(reason, dict) and isinstance(reason.get("type"), str):
            self.finish_reason = reason["type"]
            matched = reason.get("matched")
            self.stop_reason = matched if isinstance(matched, (int, str)) else None

    def parsed(self) -> ParsedChoice:
        pairs = self._pairs()
        ids = [pair[1] for pair in pairs] if self.ids.items is None and pairs else self.ids.items
        token_ids = as_ids(ids) if self.ids.whole else None
        return ParsedChoice(
            index=self.index,
            token_ids=token_ids,
            logprobs=_logprobs(token_ids, pairs),
            message=orjson.dumps({"role": "assistant", "content": "".join(self.texts)}),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _pairs(self) -> list[list[Any]] | None:
        """One pair per token; none were given where nothing was sampled."""
        if self.pairs.items is None:
            return [] if self.ids.items == [] else None
        return [pair if isinstance(pair, list) and len(pair) > 1 else [None, None] for pair in self.pairs.items]


def _logprobs(ids: Ids | None, pairs: list[list[Any]] | None) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The log-probs of the pairs; unknown where a pair is about another token than the one at its position."""
    if pairs is None or ids is None:
        return None
    known = ids.tolist()
    values = [
        logprob_of(pair[0]) if position >= len(known) or pair[1] == known[position] else math.nan
        for position, pair in enumerate(pairs)
    ]
    return np.array(values, dtype=np.float32)
