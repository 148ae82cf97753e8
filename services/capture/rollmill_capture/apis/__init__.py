"""The APIs that clients speak; pure. Each understands a request as an `Ask` and gives the engine's reply back.

| module | API | asked of the engine as |
|---|---|---|
| `chat`, `completions` | OpenAI chat completions and completions | the same |
| `generate` | SGLang's and vLLM's routes for ids in, ids out | the same |
| `responses_request`, `responses_reply` | OpenAI Responses | chat completions |
| `messages_request`, `messages_reply` | Anthropic Messages | chat completions |
| `gemini_request`, `gemini_reply` | Gemini ``generateContent`` | chat completions |
| `passing` | Responses and Messages where the upstream speaks them itself | the same |
| `reply` | a chat reply as the others retell it | |
| `memory` | what is remembered of replies, so that histories come back byte for byte | |
"""
