"""Reading what engines answer, one module per wire format; pure, and the same for streams and whole bodies.

| module | wire format |
|---|---|
| `chat` | OpenAI chat completions and completions as vLLM and SGLang extend them: whole bodies |
| `chat_stream` | the same as a stream of chunks |
| `generate` | SGLang's native route |
| `responses`, `messages` | OpenAI Responses and Anthropic Messages, from upstreams that speak them themselves |
| `wires` | where each format is asked for, and who reads it |
| `asking` | what has to be asked of each engine |
| `stream`, `tool_calls`, `items` | what streams share: their ends, the pieces of calls, replies without ids |
| `logprobs`, `details` | ids and log-probs per token, with every way they can be missing; and taking them out |
| `oddities` | signs of a parser that failed |
| `reading` | what all formats come down to: a `ParsedReply` |
"""

from rollmill_capture.upstream.formats.parsed_reply import ParsedChoice, ParsedReply

__all__ = ["ParsedChoice", "ParsedReply"]
