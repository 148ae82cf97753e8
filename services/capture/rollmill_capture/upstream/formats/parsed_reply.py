"""What a reply comes down to, whatever its wire format; and which of its tokens may be trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]

Incomplete = Literal["error_frame", "no_terminal_frame", "not_sse", "not_json", "bad_frame", "no_choices"]
"""Why an answer is no whole reply: an error in place of a frame; a stream that just ended; a body that is no
stream, or no JSON; a frame that is no JSON object; an answer without choices."""


@dataclass(frozen=True)
class ParsedChoice:
    """One sampled reply. ``token_ids`` [n] int32; ``logprobs`` [n] float32 at token, NaN where it is unknown."""

    index: int
    token_ids: Ids | None = None
    """None: the engine gave none."""
    logprobs: LogProbs | None = None
    """None: the engine gave none. Not always as many as ids."""
    message: bytes | None = None
    """The assistant message as JSON."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def unfit(self) -> str | None:
        """Why the log-probs or the end forbid training; None: they do not."""
        if not self.tokens:
            return "empty"
        if self.logprobs is None:
            return "logprobs_missing"
        if len(self.logprobs) != self.tokens:
            return f"logprobs({len(self.logprobs)})!=ids({self.tokens})"
        unknown = np.flatnonzero(np.isnan(self.logprobs))
        if unknown.size:
            return f"logprob_unknown_at:{unknown[0]}"
        return "partial:abort" if self.finish_reason == "abort" else None

    @property
    def tokens(self) -> int:
        return 0 if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True)
class ParsedReply:
    """One call's answer."""

    choices: tuple[ParsedChoice, ...] = ()
    prompt_ids: Ids | None = None
    """[p] int32; None: the engine gave none."""
    sent_ids: Ids | None = None
    """[s] int32, the prompt where the request gave it as ids."""
    several_prompts: bool = False
    """The choices answer different prompts, so ``prompt_ids`` is None."""
    usage: tuple[int, int] | None = None
    """Prompt (0: it did not say) and completion tokens by the engine's own count; None where it did not say."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the engine's prefix cache, as far as it says."""
    weight_versions: tuple[str, ...] = ()
    """The engine's word on the weights that sampled, each once, in the order they appeared."""
    model: str | None = None
    incomplete: Incomplete | None = None
    """None: every choice came to its end and nothing said otherwise."""
    error: str | None = None
    """The engine's own message where it failed."""

    @property
    def complete(self) -> bool:
        return self.incomplete is None

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled token ids, over all choices."""
        return sum(choice.tokens for choice in self.choices)

    def untrainable(self, choice: ParsedChoice) -> str | None:
        """Why ``choice`` must not be trained; None: it may be."""
        return (
            self.incomplete or self._missing_ids(choice) or self._other_prompt() or self._miscounted() or choice.unfit
        )

    def _missing_ids(self, choice: ParsedChoice) -> str | None:
        if choice.token_ids is None:
            return "no_ids" if self.prompt_ids is None else "completion_ids_missing"
        if self.prompt_ids is None:
            return "several_prompts" if self.several_prompts else "prompt_ids_missing"
        return None

    def _other_prompt(self) -> str | None:
        """Some paths decode a prompt of ids and encode it again: the client's tokens are not what was sampled from."""
        sent, served = self.sent_ids, self.prompt_ids
        if sent is None or served is None or np.array_equal(sent, served):
            return None
        return f"prompt_mismatch:sent({len(sent)}),served({len(served)})"

    def _miscounted(self) -> str | None:
        """Builds that lose ids of held-back tokens, or tokenise a prompt of ids again, show it only in the count."""
        prompt, completion = self.usage or (0, self.sampled_tokens)
        if completion != self.sampled_tokens:
            return f"captured_ids({self.sampled_tokens})!=usage.completion_tokens({completion})"
        known = 0 if self.prompt_ids is None else len(self.prompt_ids)
        return f"prompt_ids({known})!=usage.prompt_tokens({prompt})" if prompt not in (0, known) else None
