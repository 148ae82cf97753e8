"""Evaluators that ask a service outside: `http` (a reward service), `judge` (a language model).

`asking` sends one request and tells infrastructure that failed (tried again, then named) from a service that refuses
(named at once). `account` is what a service gets to read of a session. Addresses with keys are named in the evaluator's
settings; a spec names them, or gives a URL without keys.
"""
