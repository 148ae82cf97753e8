"""One call: the request that goes upstream, the reply, the record. May import all but ``app`` and ``http``.

- `call_handler`: the whole course of a call; `call_reply`: what it ends with when it is no whole reply.
- `upstream_request`: the request as it is sent; `response_stream`: the response, and what of a stream it may contain.
- `recorder`: makes and writes the record; `record_size`: of records that are too large; `call_metrics`: counts them.
- `continuation`: a reply that the engine breaks off for new weights, with `reasoning_parser` for its text and
  `tokenization` for its ids.
"""
