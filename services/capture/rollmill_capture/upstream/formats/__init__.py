"""Parsing what engines answer, one module per wire format; pure, and the same for streams and whole bodies.

| module | content |
|---|---|
| `upstream_format` | the table of formats: the path of each, and who parses its answers |
| `parsed_reply` | what all formats come down to: a `ParsedReply`, with checks of ids and log-probs; `StreamAssembler` |
| `chat`, `chat_stream` | OpenAI chat completions and completions as vLLM and SGLang extend them; whole, streamed |
| `sglang_generate` | SGLang's native route ``/generate`` |
| `openai_responses`, `anthropic_messages` | these APIs, from upstreams that serve them themselves |
| `reply_items` | a reply without ids, gathered item by item, for the two formats above |

Imports nothing else of capture. The APIs and the proxy import it; so does the rest of `upstream`.
"""
