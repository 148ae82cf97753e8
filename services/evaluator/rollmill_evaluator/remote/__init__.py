"""Evaluators that ask an outside service: `http` (a reward service) and `judge` (a language model).

`http_request` sends one request and classifies its failure: infrastructure (tried again, then named) or a refusal
(named at once). `request_payload` is what a service is sent of a session, `judge_prompt` the judge's request and the
parsing of its answer; both are pure. Addresses with keys are named in the evaluator's settings; a spec names them, or
gives a URL without keys, which leads to public addresses and to those that an operator allows (`addresses`). Imports
the library only.
"""
