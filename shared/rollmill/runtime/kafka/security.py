"""TLS and SASL of every client, from the settings; faults of certificate and key files are found before any start."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from rollmill.errors import ConfigurationError
from rollmill.settings import KafkaSettings

if TYPE_CHECKING:
    from faststream.security import BaseSecurity


def client_security(settings: KafkaSettings) -> dict[str, Any]:
    """Options of an aiokafka client. Raises ConfigurationError for files that cannot be used."""
    options: dict[str, Any] = {"security_protocol": settings.security_protocol, "ssl_context": tls_context(settings)}
    if settings.sasl_password is not None and settings.security_protocol.startswith("SASL"):
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = settings.sasl_password.get_secret_value()
    return options


def broker_security(settings: KafkaSettings) -> BaseSecurity:
    """The same for FastStream's broker."""
    from faststream.security import (  # noqa: PLC0415  # only services have FastStream
        BaseSecurity,
        SASLPlaintext,
        SASLScram256,
        SASLScram512,
    )

    context = tls_context(settings)
    if settings.sasl_password is None or not settings.security_protocol.startswith("SASL"):
        return BaseSecurity(context, use_ssl=context is not None)
    kinds = {"PLAIN": SASLPlaintext, "SCRAM-SHA-256": SASLScram256, "SCRAM-SHA-512": SASLScram512}
    password = settings.sasl_password.get_secret_value()
    made: BaseSecurity = kinds[settings.sasl_mechanism](
        settings.sasl_username, password, context, use_ssl=context is not None
    )
    return made


def tls_context(settings: KafkaSettings) -> ssl.SSLContext | None:
    """None: the protocol is without TLS. Raises ConfigurationError for files that cannot be used."""
    if not settings.security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file)
    except OSError as error:
        raise ConfigurationError(f"ROLLMILL_TLS_CA_FILE {settings.tls_ca_file} cannot be used: {error}") from error
    context.check_hostname = settings.tls_check_hostname
    if settings.tls_certificate_file is not None and settings.tls_key_file is not None:
        _load_own(context, settings)
    return context


def _load_own(context: ssl.SSLContext, settings: KafkaSettings) -> None:
    # Without a password of ours, OpenSSL would ask for that of an encrypted key at the terminal, and wait.
    secret = settings.tls_key_password
    password = "" if secret is None else secret.get_secret_value()
    files = f"{settings.tls_certificate_file} with ROLLMILL_TLS_KEY_FILE {settings.tls_key_file}"
    try:
        context.load_cert_chain(str(settings.tls_certificate_file), str(settings.tls_key_file), lambda: password)
    except OSError as error:
        raise ConfigurationError(
            f"ROLLMILL_TLS_CERTIFICATE_FILE {files} cannot be used: {error}; an encrypted key needs "
            "ROLLMILL_TLS_KEY_PASSWORD"
        ) from error
