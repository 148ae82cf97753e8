"""The APIs for clients; pure. Each parses a request for the engine, and formats the engine's reply for the client.

| module | API | asked of the engine as |
|---|---|---|
| `api` | the interface of all: `ApiAdapter`, `ParsedRequest`, `ResponseFormatter`, `StreamFormatter` | |
| `openai` | OpenAI chat completions and completions; the formatter that passes a reply on | the same |
| `native` | SGLang's and vLLM's routes for ids in, ids out; what upstreams serve themselves | the same |
| `openai_responses_request`, `openai_responses_reply` | OpenAI Responses | chat completions |
| `anthropic_request`, `anthropic_reply` | Anthropic Messages | chat completions |
| `gemini_request`, `gemini_reply` | Gemini ``generateContent`` | chat completions |
| `content`, `chat_reply` | requests and replies of chat completions, as the three above need them | |
| `history_cache` | sampled arguments and responses, so that histories come back byte for byte | |

Imports `upstream.formats`, `sse` and `errors`; HTTP and the proxy import it.
"""
