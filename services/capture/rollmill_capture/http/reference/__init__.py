"""The HTTP reference: OpenAPI 3.1 at ``/openapi.json``, a page at ``/docs``, and docs/http.md, all from the models.

- `bodies`: models of what requests and answers hold, beside those that the endpoints validate with.
- `operations`: what each endpoint takes and answers; `document`: the OpenAPI document of all routes.
- `rendering`: the document as Markdown and as a page; `endpoints`: serves both, without a key.
- `generate`: writes ``schemas/openapi.json`` and ``docs/http.md`` of the source tree.
"""
