"""Which addresses are public, and which URLs lead anywhere at all."""

import ipaddress
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cedar.errors import ConfigError, RequestError
from cedar.server.addresses import MAX_URL, AllowedHost, Target, is_public, looks_numeric

PRIVATE = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "100.100.100.200",  # metadata
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",  # metadata
    "169.254.169.254",  # metadata
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",  # metadata
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",  # deprecated form of 127.0.0.1
    "::808:808",
    "::ffff:0:127.0.0.1",
    "64:ff9b:1::7f00:1",
    "100::1",
    "2001::1",  # Teredo
    "2001:10::1",
    "2001:db8::1",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "2002:808:808::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",  # metadata
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1%eth0",
    "fec0::1",
    "ff02::1",
    "",
    "example.org",
    "127.1",
    "2130706433",
    "0177.0.0.1",
    "127.0.0.1 ",
    "1.1.1.1/32",
]
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "192.0.1.1", "223.255.255.255"]
PUBLIC_V6 = ["2606:4700:4700::1111", "2a00:1450:4001::200e", "2400:cb00::1"]

v4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
v6 = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address)


@pytest.mark.parametrize("address", PRIVATE)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [*PUBLIC, *PUBLIC_V6])
def test_ordinary_addresses_are_public(address: str) -> None:
    assert is_public(address)


@given(address=v4 | v6)
def test_nothing_is_public_that_the_standard_library_calls_special(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(str(address)) and getattr(address, "ipv4_mapped", None) is None:
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_link_local
        assert not address.is_loopback


@given(address=v4)
@example(address=ipaddress.IPv4Address("127.0.0.1"))
@example(address=ipaddress.IPv4Address("169.254.169.254"))
@example(address=ipaddress.IPv4Address("8.8.8.8"))
def test_embedded_addresses_are_judged_by_themselves(address: ipaddress.IPv4Address) -> None:
    public = is_public(str(address))
    assert is_public(f"::ffff:{address}") == public
    assert is_public(f"64:ff9b::{address}") == public
    low = f"{int(address) >> 16:x}:{int(address) & 0xFFFF:x}"
    assert is_public(f"::ffff:{low}") == public
    assert not is_public(f"::{low}")
    assert not is_public(f"2002:{low}::1")


def spellings(address: int) -> list[str]:
    """Ways in which resolvers accept an IPv4 address."""
    parts = address.to_bytes(4)
    middle, low = address & 0xFFFFFF, address & 0xFFFF
    return [
        str(address),
        hex(address),
        f"0{address:o}",
        ".".join(f"0{part:o}" for part in parts),
        ".".join(hex(part) for part in parts),
        f"{parts[0]}.{middle}",
        f"{parts[0]}.{parts[1]}.{low}",
        f"0x{parts[0]:X}.{middle}",
        ".".join(map(str, parts)),
    ]


@given(address=st.integers(0, 2**32 - 1))
@example(address=0x7F000001)
def test_numbers_are_never_taken_for_names(address: int) -> None:
    for spelled in spellings(address):
        assert looks_numeric(spelled)
        assert is_public(spelled) <= (spelled == str(ipaddress.IPv4Address(address)))


def test_resolvers_do_accept_these_spellings() -> None:
    # Negative control: without the check each of them would lead to this machine.
    for spelled in spellings(0x7F000001):
        assert socket.getaddrinfo(spelled, 80, type=socket.SOCK_STREAM)[0][4][0] == "127.0.0.1"
    for name in ("example.org", "127.0.0.1.example.org", "1and1.com", "a.b1", "0x.org", "x0"):
        assert not looks_numeric(name)


# --- URLs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://example.org", ("http", "example.org", 80, "/")),
        ("HTTPS://Example.ORG./a?b=c#d", ("https", "example.org", 443, "/a?b=c")),
        ("https://example.org:8443/%20", ("https", "example.org", 8443, "/%20")),
        ("http://[2606:4700::1]:81/x", ("http", "2606:4700::1", 81, "/x")),
        ("http://localhost.?q", ("http", "localhost", 80, "/?q")),
        ("https://xn--bcher-kva.example//b", ("https", "xn--bcher-kva.example", 443, "//b")),
    ],
)
def test_urls_that_are_read(url: str, target: tuple[str, str, int, str]) -> None:
    assert tuple(Target.parse(url)) == target


def test_the_host_header() -> None:
    for url, authority in (
        ("http://example.org:80/", "example.org"),
        ("https://example.org:80/", "example.org:80"),
        ("http://[::1]/", "[::1]"),
        ("https://[::1]:8443/", "[::1]:8443"),
    ):
        assert Target.parse(url).authority == authority


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://example.org/", "not an http or https URL"),
        ("file:///etc/passwd", "not an http or https URL"),
        ("//example.org/", "not an http or https URL"),
        ("http:example.org", "no valid host"),
        ("http:/example.org", "no valid host"),
        ("http:///etc/passwd", "no valid host"),
        ("http://", "no valid host"),
        ("http://.", "no valid host"),
        ("http://a..b/", "no valid host"),
        ("http://*.example.org/", "no valid host"),
        ("http://exa%6dple.org/", "no valid host"),
        ("http://127.0.0.1%2f@x/", "user name"),
        ("http://user@example.org/", "user name"),
        ("http://user:pass@example.org/", "user name"),
        ("http://@example.org/", "user name"),
        ("http://example.org:0/", "no valid host or port"),
        ("http://example.org:99999/", "no valid host or port"),
        ("http://example.org:x/", "no valid host or port"),
        ("http://example.org:/", "no valid host or port"),
        ("http://[::1]example.org/", "valid"),
        ("http://::1/", "no valid host"),
        ("http://[::1/", "not a valid URL"),
        ("http://[fe80::1%25eth0]/", "valid"),
        ("http://[v1.a]/", "valid"),
        ("http://example.org\\@evil.org/", "characters"),
        ("http://example.org/ a", "characters"),
        ("http://example.org/\r\nHost: evil.org", "characters"),
        ("http://example.org/\x00", "characters"),
        ("http://ⓔxample.org/", "characters"),
        ("http://example。org/", "characters"),
        ("http://" + "a" * 64 + ".org/", "no valid host"),
        ("http://" + "a." * 130 + "org/", "no valid host"),
        ("http://example.org/" + "a" * MAX_URL, "characters; expected at most"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Target.parse(url)


@given(text=st.text(max_size=60))
@example(text="[::1]]")
@example(text="[")
def test_any_url_is_read_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"https://example.org{text}"):
        try:
            target = Target.parse(url)
        except RequestError:
            continue
        assert target.path.startswith("/")
        assert target.host == target.host.strip().lower()
        assert 0 < target.port < 65_536


# --- the list --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("example.org", "https://example.org/", True),
        ("example.org", "http://EXAMPLE.org./", True),
        ("Example.ORG.", "https://example.org/", True),
        ("example.org", "https://www.example.org/", False),
        ("example.org", "https://badexample.org/", False),
        ("example.org", "https://example.org.evil.net/", False),
        ("example.org", "https://example.org:8443/", False),
        ("example.org", "https://example.org:80/", False),
        ("example.org", "http://example.org:443/", False),
        ("*.example.org", "https://a.example.org/", True),
        ("*.example.org", "https://a.b.example.org/", True),
        ("*.example.org", "https://example.org/", False),
        ("*.example.org", "https://badexample.org/", False),
        ("example.org:8443", "https://example.org:8443/", True),
        ("example.org:8443", "http://example.org:8443/", True),
        ("example.org:8443", "https://example.org/", False),
        ("*.example.org:81", "http://a.example.org:81/", True),
        ("[2606:4700::1]", "http://[2606:4700::1]/", True),
    ],
)
def test_entries_of_the_list(entry: str, url: str, allowed: bool) -> None:
    assert AllowedHost.parse(entry).allows(Target.parse(url)) == allowed


@pytest.mark.parametrize(
    "entry",
    [
        "",
        " ",
        "*",
        "*.",
        "**.org",
        "a.*.org",
        "*.*.org",
        "*example.org",
        "https://example.org",
        "example.org/path",
        "user@example.org",
        "example.org:0",
        "example.org:x",
        "exa mple.org",
        "bücher.example",
        "*.1",
        "?",
        "#",
    ],
)
def test_entries_that_are_not_understood(entry: str) -> None:
    with pytest.raises(ConfigError, match="expected a host name"):
        AllowedHost.parse(entry)
