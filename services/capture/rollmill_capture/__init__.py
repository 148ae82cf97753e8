"""Capture: the proxy in front of an engine. Every call of an agent becomes a record in the log.

- In: HTTP on port 8700. ``/v1/sessions`` opens, shows and closes sessions; ``/sessions/{id}/v1`` serves the clients of
  OpenAI, Anthropic and Gemini by their base URL alone (the session also by the header ``x-session-id``, or by its token
  as API key); ``/admin/policies`` pauses and resumes. Topics ``sessions`` (what other replicas opened and closed),
  ``policies`` (announced versions) and, where admission is on, ``outcomes`` from its end.
- Out: to the engine, the client's request plus the fields that ask for token ids and log-probs; to topic
  ``completions`` the sessions' events and a record of each call, failed ones too; to topic ``sessions`` an entry when
  a session opens or closes; to the client, the engine's reply without what it did not ask for.
- State: the tables in memory, read whole at every start; the spool on the disk, for what Kafka does not take now; the
  calls in flight; replies for clients that retry, what is remembered of replies and known of engines, which a restart
  may forget.
- Crash: the calls in flight end without their end: the end of a reply is held until its record is acknowledged, so
  what a client saw end normally is in the log (rule S4), or in the spool, which the next start sends first (S5).
  Sessions stay open and go on at any replica.

The floors inside: ``app`` and ``server`` wire; ``surface`` says which path is which API; ``handlers``, ``call_api``,
``session_api``, ``admin_api``, ``lookups`` and ``desk`` speak HTTP, with ``fence`` in front of the calls; ``exchange``
runs one call with ``upstream`` (``places``, ``pause``, ``lanes``, ``wire``), ``client`` and ``recorder``, which writes
through ``sink`` to ``log`` or ``spool``; ``probe`` fills ``capabilities``; the rest is pure: ``auth``, ``admission``,
``continuation``, ``engines`` (one module per wire format), ``apis``
(one or two per API), ``sse``, ``relay``, ``served``, ``records``, ``versions``, ``routes``, ``opening``, ``sessions``.
"""
