"""The engines that answer: which one a call goes to, what it can, and the call itself.

| module | content |
|---|---|
| `client` | model name to `Target` (`RouteTable`), replica (`LoadBalancer`), and the call (`Upstream`) |
| `http_transport` | HTTP/1.1 for the client: connections, and the pool of them |
| `capabilities` | what is known of each engine, and what has to be asked of it |
| `probe` | finds out in the background what each engine can |
| `unusable` | the message about an answer that no model server gives |
| `formats` | the wire formats of engines, and how their answers are parsed |

Imports `settings`, `model_config`, `sse`, `bodies` and `coordination.policies`; never `apis`, `proxy` or
`http`; these import it.
"""
