"""Which addresses a URL of a spec may lead to: looked up, checked, and then connected to as they were checked.

Whoever opens sessions writes that URL, and this process may reach what its writer does not: other services of the
cluster, its own ports, a cloud's metadata. A name is no better than the address that it has at this moment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from rollmill.errors import InfrastructureError, NotGradedError

ADDRESS_NOT_ALLOWED = "address_not_allowed"
SERVICE_UNREACHABLE = "service_unreachable"

IPAddress = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes a host and a port; returns its addresses. Raises OSError."""

_TRANSLATED = (ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48"))
"""A gateway sends what goes there to the IPv4 address in the last four bytes."""


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True)
class AddressRule:
    """Public addresses are allowed, and those of ``networks``, which an operator names."""

    networks: tuple[Network, ...] = ()
    resolve: Resolve = look_up

    async def allowed_address(self, host: str, port: int) -> str:
        """An address of ``host`` to connect to. Raises NotGradedError (``address_not_allowed``) where one of its
        addresses is not allowed: a host with a public and a private one is no public host.
        """
        try:
            found = await self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise InfrastructureError(SERVICE_UNREACHABLE, f"{host} has no address: {error}") from error
        refused = [address for address in found if not self.allows(address)]
        if refused or not found:
            raise NotGradedError(
                ADDRESS_NOT_ALLOWED,
                f"{host} is {', '.join(refused) or 'nowhere'}, which ROLLMILL_EVALUATOR_NETWORKS does not allow",
            )
        return found[0]

    def allows(self, address: str) -> bool:
        addresses = _meant(ip_address(address))
        return all(_is_public(each) or self._is_named(each) for each in addresses)

    def _is_named(self, address: IPAddress) -> bool:
        return any(address in network for network in self.networks)


def _meant(address: IPAddress) -> tuple[IPAddress, ...]:
    """The address that packets to ``address`` reach: IPv6 has several ways to write an IPv4 address."""
    if isinstance(address, IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address, address.sixtofour)
    if any(address in network for network in _TRANSLATED):
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    return (address,)


def _is_public(address: IPAddress) -> bool:
    return address.is_global and not address.is_multicast
