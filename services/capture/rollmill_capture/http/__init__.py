"""What agents, harnesses and operators ask over HTTP. May import every package of capture but ``app``.

- `application`: the parts of the application, and which path is which API; `server`: uvicorn around it.
- `keys`: keys and tokens; `requests`: of every request the session that it may use, and its body.
- `idempotency`: one call for each idempotency key.
- `model_calls`: a model call by any API, up to its `CallHandler`; `models`: lists of models, counts of tokens.
- `sessions`: open, show, close, with the bodies in `session_requests`; `rewards`: rewards from outside.
- `admin`: pause and resume a policy.
- `error_replies`: errors in the format of the API that is called.
- `reference`: the OpenAPI document, its page, and docs/http.md.
"""
