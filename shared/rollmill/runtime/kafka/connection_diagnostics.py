"""Finds out why a broker refuses this client: aiokafka raises the same for a wrong password and for no broker."""

from __future__ import annotations

import asyncio
import logging
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
"""For each attempt to connect."""
CLOSING_SECONDS = 1.0
RETRY_SECONDS = 0.5
HOSTNAME_MISMATCH, ADDRESS_MISMATCH = 62, 64
"""OpenSSL's codes: the certificate is valid, but for another name."""

log = logging.getLogger(__name__)


async def diagnose_refusal(settings: KafkaSettings) -> None:
    """Raise ConfigurationError, with advice, where the first broker that listens refuses these settings.

    Called after a client could not start. Returns where no broker listens, or where the settings are not the reason.
    """
    options = client_security(settings)
    for host, port, _ in collect_hosts(settings.bootstrap_servers, randomize=False):
        failure = await _try_connect(host, port, **options)
        if isinstance(failure, OSError) and not isinstance(failure, (ssl.SSLError, ConnectionResetError, TimeoutError)):
            continue  # no broker listens there
        advice = _reported(failure, settings) or await _probed(failure, host, port, options)
        if advice is not None:
            raise ConfigurationError(f"Kafka at {host}:{port} refuses this client: {advice}") from failure
        return


async def await_broker(settings: KafkaSettings) -> None:
    """Wait until a broker listens, for ``kafka_seconds``. Raises ConfigurationError, with advice, after that."""
    began = asyncio.get_running_loop().time()
    reported = False
    while not await _listens(settings):
        waited = asyncio.get_running_loop().time() - began
        if waited >= settings.kafka_seconds:
            raise ConfigurationError(
                f"Kafka does not answer at {settings.bootstrap_servers}; start it with `rollmill up`, or set "
                "ROLLMILL_BOOTSTRAP_SERVERS"
            )
        if not reported:
            where, seconds = settings.bootstrap_servers, settings.kafka_seconds
            log.warning("Kafka does not answer at %s yet; trying for %g s", where, seconds)
        reported = True
        await asyncio.sleep(RETRY_SECONDS)


async def _listens(settings: KafkaSettings) -> bool:
    """Whether anything accepts connections at one of the addresses."""
    for host, port, _ in collect_hosts(settings.bootstrap_servers, randomize=False):
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(SECONDS):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return True
    return False


async def _try_connect(host: str, port: int, **options: Any) -> Exception | None:
    """The failure of TLS, SASL or a first request; None: all are answered."""
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


def _reported(failure: Exception | None, settings: KafkaSettings) -> str | None:
    """Advice where the broker's error, or the certificate, names the reason."""
    if isinstance(failure, SaslAuthenticationFailed):
        return (
            f"user {settings.sasl_username!r} or its password is wrong for {settings.sasl_mechanism}; set "
            "ROLLMILL_SASL_USERNAME, ROLLMILL_SASL_PASSWORD and ROLLMILL_SASL_MECHANISM as they are on the broker"
        )
    if isinstance(failure, UnsupportedSaslMechanismError):
        return f"{settings.sasl_mechanism} is not enabled there; set ROLLMILL_SASL_MECHANISM to one that is ({failure})"
    if isinstance(failure, IllegalSaslStateError):
        return f"it does not ask for a user; set ROLLMILL_SECURITY_PROTOCOL to {_plain(settings.security_protocol)}"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return _certificate(failure)
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


async def _probed(failure: Exception | None, host: str, port: int, options: dict[str, Any]) -> str | None:
    """Advice where the broker only closes the connection or does not failure: other protocols are tried."""
    protocol: str = options["security_protocol"]
    if failure is None:
        return await _requires_user(host, port, options) if not protocol.startswith("SASL") else None
    if protocol.endswith("SSL") and await _try_connect(host, port) is None:
        return f"it does not use TLS there; set ROLLMILL_SECURITY_PROTOCOL to {protocol.replace('SSL', 'PLAINTEXT')}"
    if not await _uses_tls(host, port):
        return None
    if protocol.endswith("SSL"):
        return (
            "it wants a certificate of the client, or another one; set ROLLMILL_TLS_CERTIFICATE_FILE and "
            "ROLLMILL_TLS_KEY_FILE"
        )
    return f"it uses TLS there; set ROLLMILL_SECURITY_PROTOCOL to {protocol.replace('PLAINTEXT', 'SSL')}"


def _plain(protocol: str) -> Literal["SSL", "PLAINTEXT"]:
    return "SSL" if protocol == "SASL_SSL" else "PLAINTEXT"


async def _requires_user(host: str, port: int, options: dict[str, Any]) -> str | None:
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


async def _uses_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent: only whether TLS is used
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
