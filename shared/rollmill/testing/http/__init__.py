"""HTTP for tests: fake servers on real sockets, and a call of an ASGI application without one.

`canned_server` sends prepared responses (asyncio; model servers), `scripted_engine` is a small model server to put
behind it, `stub_http_server` runs on threads (reward services, webhooks), `asgi` calls an application in the process.
"""
