"""String formats of JSON schemas, as schemas without ``format``.

Stricter than the grammar library's own: no 30th of February, no 61st second, no host name with
parts of more than 63 characters. So what is generated also passes validators that calculate.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["FORMATS"]

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
# 29 February in years that 4 divides, but of those that 100 divides only each fourth.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DAYS = r"(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_HOURS = r"T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
# Two hyphens in a row are left to encoded names, which need a calculation.
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9])*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_SHORT_LABELS = r"[^.]{1,63}(?:\.[^.]{1,63})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """Eight groups, or ``::`` in the place of one or more of them."""
    forms = [f"{_GROUP}(?::{_GROUP}){{7}}"]
    for before in range(8):
        left = f"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        right = f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?" if before < 7 else ""
        forms.append(f"{left}::{right}")
    return f"(?:{'|'.join(forms)})"


def _uri() -> str:
    """RFC 3986: scheme, then an authority and path or a path alone, query, fragment."""
    escaped = "%[0-9A-Fa-f]{2}"
    plain = r"[A-Za-z0-9._~!$&'()*+,;=:@-]"
    segment = f"(?:{plain}|{escaped})"
    user = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{escaped})*@)?"
    host = rf"(?:\[{_ipv6()}\]|{_IPV4}|(?:[A-Za-z0-9._~!$&'()*+,;=-]|{escaped})*)"
    authority = rf"//{user}{host}(?::[0-9]{{1,5}})?(?:/{segment}*)*"
    path = rf"/?{segment}+(?:/{segment}*)*"
    rest = f"(?:[/?]|{segment})*"
    return rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{path})(?:\?{rest})?(?:#{rest})?"


def _whole(pattern: str, **more: Any) -> Mapping[str, Any]:
    return MappingProxyType({"pattern": f"^(?:{pattern})$", **more})


# Name -> schemas that all must hold.
FORMATS: Mapping[str, tuple[Mapping[str, Any], ...]] = MappingProxyType(
    {
        "date-time": (_whole(f"{_DATE}T{_TIME}"),),
        "date": (_whole(_DATE),),
        "time": (_whole(_TIME),),
        "duration": (_whole(f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]{{1,9}}W)"),),
        "email": (
            _whole(rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}", maxLength=254),
            _whole(rf"[^@]{{1,64}}@{_SHORT_LABELS}"),
        ),
        "hostname": (_whole(_HOST, maxLength=253), _whole(_SHORT_LABELS)),
        "ipv4": (_whole(_IPV4),),
        "ipv6": (_whole(_ipv6()),),
        "uuid": (_whole("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),),
        "uri": (_whole(_uri()),),
    }
)
