"""What the builder's reason codes mean, in a sentence for people. A code that is not here stands for itself."""

from __future__ import annotations

BREAKS = {
    "compaction": "a new conversation: the prompt goes on from no earlier call",
    "drift": "the reply stands in the prompt in other tokens, and on_drift says to fork",
    "drift_over_n": "the reply stands in the prompt in too many other tokens",
    "end_of_turn_ambiguous": "where the reply ends in the prompt is not certain",
    "end_of_turn_missing": "the template wrote no end-of-turn token after the reply",
    "end_of_turn_unknown": "no end-of-turn token is configured, and the records show none",
    "fingerprint_changed": "tokenizer, template or model changed",
    "fork": "another call went on with the parent's trace",
    "history_shrunk": "the messages go on, but the prompt became shorter",
    "no_end_of_turn": "the prompt holds no end of the earlier reply",
    "over_long": "the trace had reached its limit; it goes on here, with the end of the prompt only",
    "policy_changed": "another policy was asked",
    "prefix_rewritten": "the messages go on, but stand in the prompt in other tokens",
    "reasoning_stripped": "the reply stands in the prompt without its reasoning",
    "reply_differs": "the prompt carries another reply than the sampled one",
    "reply_unverified": "the reply stands in the prompt in other tokens, and nothing shows that it is the same",
    "scaffold_inserted": "the prompt holds tokens in front of the reply that were not sampled",
    "scaffold_removed": "the prompt lacks tokens that stood in front of the earlier reply",
    "sibling": "the same prompt was answered more than once; another answer has the trace",
    "stop_string": "a stop string ended the reply, so its end in the prompt is not certain",
    "sub_agent": "a conversation of its own, beside another that goes on",
    "system_changed": "the system prompt changed",
    "tool_arguments": "the prompt carries the reply with its tool arguments rewritten",
    "tools_changed": "the tools changed",
}

EXCLUSIONS = {
    "aux": "an auxiliary call, never trained",
    "builder_dropped": "the builder said nothing of it",
    "client_gone": "the client left before the reply was whole",
    "empty_reply": "nothing was sampled",
    "error": "the call failed",
    "incomplete": "the reply broke off",
    "late": "it came after the session's end",
    "logprob_unknown": "a log-prob is missing or no log-prob",
    "no_ids": "the engine gave no token ids",
    "no_logprobs": "the engine gave no log-probs",
    "no_prompt_ids": "the engine gave no prompt ids",
    "over_long": "it lies beyond the limit of a trace",
    "sibling": "another answer to the same prompt is used",
}


def explained(reason: str, meanings: dict[str, str]) -> str:
    """``reason``, and what it means."""
    meaning = meanings.get(reason)
    return reason if meaning is None else f"{reason}: {meaning}"
