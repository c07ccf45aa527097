"""API keys: who is calling. How much each may use is counted in `key_budget`.

A key is compared by a keyed hash, with all keys every time, so that the time of an answer says
nothing about any of them. Keys themselves are neither kept nor logged.
"""

import hmac
import logging
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from cedar.errors import ConfigError
from cedar.server.errors import ApiError
from cedar.server.key_budget import BudgetSpent, Key, KeyBudget, Lease

__all__ = ["ENVIRONMENT", "BudgetSpent", "Key", "KeyBudget", "KeyRing", "Lease", "Unauthorized"]

ENVIRONMENT = "CEDAR_API_KEYS"
SHORT_KEY = 16  # characters; shorter keys can be guessed

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[\w.@-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_LIMITS = ("max_concurrent", "tokens_per_minute")


class Unauthorized(ApiError):
    """401: no key was sent, or one that is not known."""

    def __init__(self, message: str) -> None:
        super().__init__(
            401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


class KeyRing:
    """The keys that are known. Build it by `load`, `from_file` or `from_text`."""

    def __init__(self, keys: Iterable[tuple[Key, str]]) -> None:
        # With a secret of this process nobody can choose keys whose hashes are alike.
        self._secret = secrets.token_bytes(32)
        self._keys: tuple[tuple[bytes, Key], ...] = ()
        seen: set[str] = set()
        for key, text in keys:
            if key.name in seen:
                raise ConfigError(f"API keys: the name {key.name!r} stands there twice.")
            if self._find(text) is not None:
                raise ConfigError(f"API keys: {key.name!r} has the key of another name.")
            if len(text) < SHORT_KEY:
                _LOG.warning(
                    "the API key of %s has fewer than %d characters and could be guessed",
                    key.name,
                    SHORT_KEY,
                )
            seen.add(key.name)
            self._keys += ((self._digest(text.encode()), key),)
        if not self._keys:
            raise ConfigError("API keys: there is none. Remove the option to serve without keys.")

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str]) -> "KeyRing | None":
        """Keys of a file and of the variable `ENVIRONMENT`, or None if neither is given."""
        keys: list[tuple[Key, str]] = []
        if file is not None:
            keys += _read_file(file)
        variable = environment.get(ENVIRONMENT, "")
        if variable:
            keys += _read_variable(variable)
        # What was meant to have keys and has none must not become a server without keys.
        return cls(keys) if file is not None or variable else None

    @classmethod
    def from_file(cls, file: Path) -> "KeyRing":
        """One key a line: ``name key [max_concurrent=N] [tokens_per_minute=N]``; # comments.

        Raises ConfigError naming the line, never the key. Warns if others can read the file.
        """
        return cls(_read_file(file))

    @classmethod
    def from_text(cls, text: str) -> "KeyRing":
        """``name:key`` separated by commas. Raises ConfigError."""
        return cls(_read_variable(text))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all keys, in order."""
        return tuple(key.name for _, key in self._keys)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Key:
        """Whose key is in a request's headers (raw, as ASGI has them), or Unauthorized.

        ``Authorization: Bearer KEY`` and ``X-Api-Key: KEY`` are looked at; one good key is enough.
        """
        offered = _offered(headers)
        if not offered:
            raise Unauthorized(
                "No API key was sent. Send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'."
            )
        for text in offered:
            key = self._find(text)
            if key is not None:
                return key
        raise Unauthorized("The API key is not known to this server.")

    def _find(self, text: str | bytes) -> Key | None:
        digest = self._digest(text if isinstance(text, bytes) else text.encode())
        found = None
        for known, key in self._keys:  # all of them, whichever is right
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def _digest(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, "sha256")


def _offered(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    offered = []
    for name, value in headers:
        if name.lower() == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and rest.strip():
                offered.append(rest.strip())
        elif name.lower() == b"x-api-key" and value.strip():
            offered.append(value.strip())
    return offered[:4]  # clients send one, at most two


def _read_file(file: Path) -> list[tuple[Key, str]]:
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{file}: the API keys cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: the API keys are not UTF-8 text.") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _LOG.warning("%s can be read by other users of this machine; chmod 600 it", file)
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_read_words(words, f"{file}, line {number}"))
    return keys


def _read_words(words: list[str], where: str) -> tuple[Key, str]:
    if len(words) < 2 or words[1].startswith("#"):
        raise ConfigError(f"{where}: expected 'name key [max_concurrent=N] [tokens_per_minute=N]'.")
    name, text, *options = words
    _check(name, text, where)
    limits: dict[str, int] = {}
    for option in options:
        if option.startswith("#"):
            break
        field, _, number = option.partition("=")
        if field not in _LIMITS or field in limits or not re.fullmatch(r"[1-9]\d{0,17}", number):
            # What stands there may be a key with a blank in it, so it is not repeated.
            raise ConfigError(
                f"{where}: what follows the key of {name!r} is not understood; expected "
                f"{' or '.join(f'{limit}=N' for limit in _LIMITS)}, each once, N from 1."
            )
        limits[field] = int(number)
    key = Key(
        name=name,
        max_concurrent=limits.get("max_concurrent"),
        tokens_per_minute=limits.get("tokens_per_minute"),
    )
    return key, text


def _read_variable(text: str) -> list[tuple[Key, str]]:
    keys = []
    for number, entry in enumerate(text.split(","), 1):
        if not entry.strip():
            continue
        name, _, key = entry.strip().partition(":")
        where = f"{ENVIRONMENT}, entry {number}"
        _check(name, key, where)
        keys.append((Key(name=name), key))
    return keys


def _check(name: str, text: str, where: str) -> None:
    if not _NAME.fullmatch(name) or not _KEY.fullmatch(text):
        raise ConfigError(
            f"{where}: expected a name of letters, digits and . _ - @, and a key of printable "
            "ASCII characters without blanks."
        )
