"""Why a broker that is there refuses this client: aiokafka tells a wrong password and a dead broker alike."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from aiokafka.conn import AIOKafkaConnection, collect_hosts
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    NoError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import SaslHandShakeRequest

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka.security import client_security
from rollmill.settings import KafkaSettings

SECONDS = 5.0
"""For each step of the questioning."""
CLOSING_SECONDS = 1.0
HOSTNAME_MISMATCH, ADDRESS_MISMATCH = 62, 64
"""OpenSSL's codes: the certificate is good, and another's."""


async def refuse_settings(settings: KafkaSettings) -> None:
    """Raise ConfigurationError, with advice, where the first broker that listens refuses these settings.

    Asked after a client could not start. Returns where nobody listens, or where the settings are not the reason.
    """
    options = client_security(settings)
    for host, port, _ in collect_hosts(settings.bootstrap_servers, randomize=False):
        answer = await _ask(host, port, **options)
        if isinstance(answer, OSError) and not isinstance(answer, (ssl.SSLError, ConnectionResetError, TimeoutError)):
            continue  # nobody listens
        advice = _told(answer, settings) or await _found_out(answer, host, port, options)
        if advice is not None:
            raise ConfigurationError(f"Kafka at {host}:{port} refuses this client: {advice}") from answer
        return


async def _ask(host: str, port: int, **options: Any) -> Exception | None:
    """What comes of TLS, SASL and a first request; None: they are answered."""
    try:
        async with _connected(host, port, **options):
            return None
    except (OSError, KafkaError) as error:
        return error


@asynccontextmanager
async def _connected(host: str, port: int, **options: Any) -> AsyncIterator[AIOKafkaConnection]:
    """A connection that is closed at the end, refused or not.

    aiokafka's own ``create_conn`` lets go of a refused one while its TLS still waits for the broker's farewell.
    """
    connection = AIOKafkaConnection(host, port, request_timeout_ms=4000, **options)
    try:
        async with asyncio.timeout(SECONDS):
            await connection.connect()
        yield connection
    finally:
        farewell = connection.close()
        if connection._protocol is not None:  # noqa: SLF001  # None: nothing was opened, and the future never ends
            await asyncio.wait((farewell,), timeout=CLOSING_SECONDS)


def _told(answer: Exception | None, settings: KafkaSettings) -> str | None:
    """What the broker, or the certificate, says itself."""
    if isinstance(answer, SaslAuthenticationFailed):
        return (
            f"user {settings.sasl_username!r} or its password is wrong for {settings.sasl_mechanism}; set "
            "ROLLMILL_SASL_USERNAME, ROLLMILL_SASL_PASSWORD and ROLLMILL_SASL_MECHANISM as they are on the broker"
        )
    if isinstance(answer, UnsupportedSaslMechanismError):
        return f"{settings.sasl_mechanism} is not enabled there; set ROLLMILL_SASL_MECHANISM to one that is ({answer})"
    if isinstance(answer, IllegalSaslStateError):
        return f"it asks for no user; set ROLLMILL_SECURITY_PROTOCOL to {_plain(settings.security_protocol)}"
    if isinstance(answer, ssl.SSLCertVerificationError):
        return _certificate(answer)
    return None


def _certificate(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in (HOSTNAME_MISMATCH, ADDRESS_MISMATCH):
        return (
            f"its certificate is for another name ({error.verify_message}); name the broker in "
            "ROLLMILL_BOOTSTRAP_SERVERS and its advertised listeners as its certificate does"
        )
    return (
        f"its certificate is not trusted here ({error.verify_message}); set ROLLMILL_TLS_CA_FILE to the PEM of the "
        "authority that signed it"
    )


async def _found_out(answer: Exception | None, host: str, port: int, options: dict[str, Any]) -> str | None:
    """What the broker does not say: it closes the connection, or goes silent."""
    protocol: str = options["security_protocol"]
    if answer is None:
        return await _wants_user(host, port, options) if not protocol.startswith("SASL") else None
    if protocol.endswith("SSL") and await _ask(host, port) is None:
        return f"it speaks no TLS there; set ROLLMILL_SECURITY_PROTOCOL to {protocol.replace('SSL', 'PLAINTEXT')}"
    if not await _speaks_tls(host, port):
        return None
    if protocol.endswith("SSL"):
        return (
            "it wants a certificate of the client, or another one; set ROLLMILL_TLS_CERTIFICATE_FILE and "
            "ROLLMILL_TLS_KEY_FILE"
        )
    return f"it speaks TLS there; set ROLLMILL_SECURITY_PROTOCOL to {protocol.replace('PLAINTEXT', 'SSL')}"


def _plain(protocol: str) -> Literal["SSL", "PLAINTEXT"]:
    return "SSL" if protocol == "SASL_SSL" else "PLAINTEXT"


async def _wants_user(host: str, port: int, options: dict[str, Any]) -> str | None:
    """A listener without SASL does not take the request that begins it."""
    try:
        async with _connected(host, port, **options) as connection:
            reply = await connection.send(SaslHandShakeRequest("SCRAM-SHA-512"))
    except (OSError, KafkaError):
        return None
    if reply.error_code not in (NoError.errno, UnsupportedSaslMechanismError.errno):
        return None
    return (
        f"it asks for a user; set ROLLMILL_SECURITY_PROTOCOL to SASL_{options['security_protocol']}, with "
        "ROLLMILL_SASL_USERNAME and ROLLMILL_SASL_PASSWORD"
    )


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent: only whether TLS is spoken
    try:
        async with asyncio.timeout(SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        async with asyncio.timeout(CLOSING_SECONDS):
            await writer.wait_closed()
    return True
