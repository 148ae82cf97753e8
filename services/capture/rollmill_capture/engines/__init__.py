"""Reading what engines answer, one module per wire format; pure, and the same for streams and whole bodies.

| module | wire format |
|---|---|
| `chat` | OpenAI chat completions as vLLM extends them: whole bodies, and what both forms share |
| `chat_stream` | the same as a stream of chunks |
| `logprobs` | log-probs and ids per token, with every way they can be missing |
| `reading` | what all formats come down to: a `Reading` |
"""

from rollmill_capture.engines.reading import ReadChoice, Reading

__all__ = ["ReadChoice", "Reading"]
