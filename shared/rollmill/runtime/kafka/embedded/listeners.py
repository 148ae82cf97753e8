"""Listeners of the embedded broker beside its plain one: their addresses, certificates and users."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, SecretStr, field_validator, model_validator

SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
SIMPLE_NAME = r"^[A-Za-z0-9_.-]+$"
MODULES = "org.apache.kafka.common.security"


class Listener(BaseModel):
    """A further listener: to clients that connect to it the broker advertises ``advertised_port``.

    A proxy may listen there, so that one client's network can fail alone (rule C6).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Z][A-Z0-9_]*$")
    port: PositiveInt
    advertised_port: PositiveInt
    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    key_and_chain_file: Path | None = None
    """PEM of the broker's own key (PKCS #8, unencrypted) and its certificates, for the protocols with TLS."""
    client_ca_file: Path | None = None
    """PEM of the authority that clients' certificates must come from; None: clients need none."""

    @model_validator(mode="after")
    def _has_a_certificate(self) -> Self:
        if self.protocol.endswith("SSL") and self.key_and_chain_file is None:
            raise ValueError(f"listener {self.name} of protocol {self.protocol} needs key_and_chain_file")
        return self


class User(BaseModel):
    """Who may connect through listeners with SASL, by PLAIN and both kinds of SCRAM.

    For development and tests: the password is in the broker's files, and among its arguments while they are made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=SIMPLE_NAME)
    password: SecretStr

    @field_validator("password")
    @classmethod
    def _needs_no_quotes(cls, password: SecretStr) -> SecretStr:
        if re.fullmatch(r"[A-Za-z0-9_.-]+", password.get_secret_value()) is None:
            raise ValueError("letters, digits and _ . - are allowed in a password of the embedded broker")
        return password


def properties(listeners: Iterable[Listener], users: tuple[User, ...]) -> dict[str, str]:
    """Lines of ``server.properties`` for the listeners' security."""
    found: dict[str, str] = {}
    for listener in listeners:
        prefix = f"listener.name.{listener.name.lower()}."
        found |= {prefix + key: value for key, value in (*_tls(listener), *_sasl(listener, users))}
    return found


def scram_arguments(users: Iterable[User]) -> tuple[str, ...]:
    """Options of the storage tool that create the users; the first start has them already."""
    added = (
        f"{kind}=[name={user.name},password={user.password.get_secret_value()}]" for user in users for kind in SCRAM
    )
    return tuple(argument for credential in added for argument in ("--add-scram", credential))


def _tls(listener: Listener) -> Iterator[tuple[str, str]]:
    if not listener.protocol.endswith("SSL"):
        return
    yield "ssl.keystore.type", "PEM"
    yield "ssl.keystore.location", str(listener.key_and_chain_file)
    if listener.client_ca_file is not None:
        yield "ssl.truststore.type", "PEM"
        yield "ssl.truststore.location", str(listener.client_ca_file)
        yield "ssl.client.auth", "required"


def _sasl(listener: Listener, users: tuple[User, ...]) -> Iterator[tuple[str, str]]:
    if not listener.protocol.startswith("SASL"):
        return
    known = " ".join(f'user_{user.name}="{user.password.get_secret_value()}"' for user in users)
    yield "sasl.enabled.mechanisms", ",".join(("PLAIN", *SCRAM))
    yield "plain.sasl.jaas.config", f"{MODULES}.plain.PlainLoginModule required {known};"
    for kind in SCRAM:
        yield f"{kind.lower()}.sasl.jaas.config", f"{MODULES}.scram.ScramLoginModule required;"
