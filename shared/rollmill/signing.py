"""Signatures of requests to services outside, and of their answers: HMAC with SHA-256 and a shared key. Pure.

A request carries ``x-rollmill-signature: t=<seconds>,v1=<hex>``, made over ``<seconds>.<body>``; `verify` checks it at
the receiver. An answer may carry ``x-rollmill-answer-signature: v1=<hex>``, made over the request's signature and the
answer's body, so that it fits no other request (`sign_answer`).
"""

from __future__ import annotations

import hashlib
import hmac

HEADER = "x-rollmill-signature"
ANSWER_HEADER = "x-rollmill-answer-signature"
TOLERANCE_SECONDS = 300.0


def sign(key: str, body: bytes, at: float) -> str:
    """The signature of a request that is sent at ``at``, in seconds since the Unix epoch."""
    return f"t={int(at)},v1={_mac(key, f'{int(at)}.'.encode() + body)}"


def verify(key: str, body: bytes, signature: str, now: float, *, tolerance: float = TOLERANCE_SECONDS) -> bool:
    """True: ``body`` was signed with ``key``, less than ``tolerance`` seconds ago."""
    fields = dict(part.partition("=")[::2] for part in signature.split(","))
    at = fields.get("t", "")
    if not (at.isascii() and at.isdigit()) or abs(now - int(at)) > tolerance:
        return False
    return hmac.compare_digest(sign(key, body, int(at)).encode(), signature.encode())


def sign_answer(key: str, request_signature: str, body: bytes) -> str:
    """The signature of the answer to the request that carried ``request_signature``."""
    return f"v1={_mac(key, request_signature.encode() + b'.' + body)}"


def verify_answer(key: str, request_signature: str, body: bytes, signature: str) -> bool:
    return hmac.compare_digest(sign_answer(key, request_signature, body).encode(), signature.encode())


def _mac(key: str, content: bytes) -> str:
    return hmac.new(key.encode(), content, hashlib.sha256).hexdigest()
