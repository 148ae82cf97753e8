"""Capture: the proxy in front of an engine. Every call of an agent becomes a record in the log.

- In: HTTP on port 8700. ``/v1/sessions`` opens, shows and closes sessions; ``/sessions/{id}/v1`` serves the clients of
  OpenAI, Anthropic and Gemini by their base URL alone (the session also by the header ``x-session-id``, or by its token
  as API key); ``/admin/policies`` pauses and resumes. Topics ``sessions`` (what other replicas opened and closed),
  ``policies`` (announced versions) and, where admission is on, ``outcomes`` from its end.
- Out: to the engine, the client's request plus the fields that ask for token ids and log-probs; to topic
  ``completions`` the sessions' events and a record of each call, failed ones too; to topic ``sessions`` an entry when
  a session opens or closes; to the client, the engine's reply without what it did not ask for.
- State: the tables in memory, read whole at every start; the spool on the disk, for what Kafka does not take now; the
  calls in flight; replies for clients that retry, the cache of replies and what is known of engines, which a restart
  may forget.
- Crash: the calls in flight are cut off: the end of a reply is held back until its record is acknowledged, so what a
  client saw end normally is in the log (rule S4), or in the spool, which the next start sends first (rule S5).
  Sessions stay open and go on at any replica.

The packages, each of which imports only those below it (import-linter checks it):

- ``app``: settings to tables, writers, background tasks and server; the only module that starts anything.
- ``http``: routes, sessions, rewards, administration, idempotency; what a request is before it is a call.
- ``proxy``: one call, from the prepared request to the acknowledged record.
- ``apis``: the APIs of clients: their requests in the engine's format, the engine's replies in theirs.
- ``upstream``: the engines: client, replicas, probe; ``upstream.formats`` reads ids and log-probs from their replies.
- ``coordination``: what all replicas agree on by the topic ``sessions``, and the policies' versions and pauses.
- ``event_log``: Kafka's producer, and the spool for what Kafka does not take now.
- ``settings``, ``model_config``, ``admission``, ``errors``, ``sse``, ``bodies``: configuration and pure
  helpers of all of them.

A chat call goes ``http.application`` (route), ``http.idempotency``, ``http.model_calls`` (session, request),
``proxy.call_handler`` (the course of the call), ``upstream.client`` (the engine), ``proxy.recorder`` (its record),
``event_log.event_writer`` (Kafka or the spool); ``tests/contract/test_call_path.py`` counts the files on this way.
"""
