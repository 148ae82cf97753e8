"""Capture: the proxy in front of an engine. Every call of an agent becomes a record in the log.

- In: HTTP on port 8700. ``/v1/sessions`` opens, shows and closes sessions; ``/sessions/{id}/v1`` serves the clients of
  OpenAI, Anthropic and Gemini by their base URL alone (the session id also as header ``x-session-id`` or as API key).
  Topics ``sessions`` (what other replicas opened and closed) and ``policies`` (announced versions).
- Out: to the engine, the client's request plus the fields that ask for token ids and log-probs; to topic
  ``completions`` the sessions' events and a record of each call, failed ones too; to topic ``sessions`` an entry when
  a session opens or closes; to the client, the engine's reply without what it did not ask for.
- State: both tables in memory, read whole at every start; the calls in flight; what is remembered of replies and known
  of engines, which a restart may forget.
- Crash: the calls in flight end without their end: the end of a reply is held until its record is acknowledged, so
  what a client saw end normally is in the log (RULES S4). Sessions stay open and go on at any replica.

The floors inside: ``app`` and ``server`` wire; ``surface`` says which path is which API; ``handlers``, ``call_api``,
``session_api``, ``lookups`` and ``desk`` speak HTTP; ``exchange`` runs one call with ``upstream``, ``client`` and
``recorder``; ``probe`` fills ``capabilities``; the rest is pure: ``engines`` (one module per wire format), ``apis``
(one or two per API), ``sse``, ``relay``, ``served``, ``records``, ``versions``, ``routes``, ``opening``, ``sessions``.
"""
