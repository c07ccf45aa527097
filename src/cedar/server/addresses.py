"""Where a server may be sent by a stranger's URL: hosts that are listed, addresses that are public.

What is public is written out here because the standard library's ``is_global`` differs between
Python versions and counts some transition addresses as global. Source: the IANA special-purpose
address registries.
"""

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass
from typing import NamedTuple

from cedar.errors import ConfigError, RequestError

__all__ = ["AllowedHost", "Target", "check_characters", "is_public", "looks_numeric"]

MAX_URL = 8192

_PORTS = {"http": 80, "https": 443}

_V4_REFUSED = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carriers' translation
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's host service, though in public space
        "169.254.0.0/16",  # link-local, with the metadata services of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT relays
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
)
_V6_PUBLIC = ipaddress.IPv6Network("2000::/3")
_V6_REFUSED = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, with Teredo, ORCHID and benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address in disguise
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
# Networks without IPv4 reach all of it through this prefix, so it is as good as what it embeds.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_AUTHORITY = re.compile(
    r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.I | re.A
)
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")


def is_public(address: str) -> bool:
    """Whether an address (as a resolver gives it) is a plain one of the public internet.

    IPv4 addresses inside of IPv6 (mapped, NAT64) are judged by themselves. Whatever is not an
    address, or names a network interface (``fe80::1%eth0``), is not public.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return False
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        else:
            return ip in _V6_PUBLIC and not any(ip in network for network in _V6_REFUSED)
    return ip.is_global and not any(ip in network for network in _V4_REFUSED)


def looks_numeric(host: str) -> bool:
    """Whether resolvers may read ``host`` as an IPv4 address: its last label is a number.

    They accept ``2130706433``, ``0x7f.1`` and ``0177.0.0.1``; all of them are ``127.0.0.1``.
    """
    return bool(_NUMERIC_LABEL.fullmatch(host.rpartition(".")[2].lower()))


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of the list: ``host`` exactly, or with ``below`` the names that end in ``.host``.

    port: the only one allowed; None for 80 with http and 443 with https.
    """

    host: str
    below: bool = False
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> "AllowedHost":
        """Read ``example.org``, ``*.example.org`` or either with ``:port``; ConfigError if not."""
        below = text.startswith("*.")
        host, port = _host_and_port(text[2:] if below else text)
        if host is None or (below and (":" in host or looks_numeric(host))):
            raise ConfigError(
                f"allowed image host {text!r}: expected a host name, *.suffix, or either with "
                "a :port, as in images.example.org or *.example.org."
            )
        return cls(host, below, port)

    def allows(self, target: "Target") -> bool:
        """Whether a URL may lead there."""
        port = _PORTS[target.scheme] if self.port is None else self.port
        named = target.host.endswith("." + self.host) if self.below else target.host == self.host
        return named and target.port == port


class Target(NamedTuple):
    """A checked URL: where to connect and what to ask for."""

    scheme: str
    host: str  # lower case, without a dot at its end
    port: int
    path: str  # with the query

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Read an http or https URL; RequestError for every other and for unusual spellings."""
        check_characters(url)
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError:
            raise RequestError("is not a valid URL") from None
        if parts.scheme not in _PORTS:
            raise RequestError("is not an http or https URL; files and other schemes are refused")
        if "@" in parts.netloc:
            raise RequestError("carries a user name or password; expected none")
        host, port = _host_and_port(parts.netloc)
        if host is None:
            raise RequestError("has no valid host or port")
        path = parts.path or "/"
        if not path.startswith("/"):
            raise RequestError("is not a valid URL")
        query = f"?{parts.query}" if parts.query else ""
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], path + query)

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def check_characters(url: str) -> None:
    """Refuse, by RequestError, what parsers of URLs disagree about before one sees it."""
    if len(url) > MAX_URL:
        raise RequestError(f"has {len(url)} characters; expected at most {MAX_URL}")
    if not url.isascii() or any(c <= " " or c in '"<>\\^`{|}\x7f' for c in url):
        raise RequestError(
            "has characters that do not belong into a URL; percent-encode them, and write "
            "international host names in their xn-- form"
        )


def _host_and_port(text: str) -> tuple[str | None, int | None]:
    """A host in lower case without a dot at its end, and the port if there is one.

    The host is None if the text is anything but a name or an IPv6 address in brackets, without a
    zone, and perhaps a port.
    """
    found = _AUTHORITY.fullmatch(text)
    if found is None or (found[3] and not 0 < int(found[3]) < 65_536):
        return None, None
    host = (found[1] or found[2]).lower().removesuffix(".")
    labels = host.split(".")
    if not found[1] and (len(host) > 253 or not all(0 < len(label) < 64 for label in labels)):
        return None, None
    return host, int(found[3]) if found[3] else None
