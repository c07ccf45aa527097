"""What a server is told when it starts."""

from dataclasses import dataclass

from cedar.errors import ConfigError
from cedar.server.addresses import AllowedHost

__all__ = ["ServerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How the server behaves. Bad values raise one `ConfigError`.

    models: names that requests may use; the first is the one that is listed.
    thinking: whether a chat request that does not say reasons before it answers.
    max_body: bytes of a request body. max_images: images of one request.
    max_choices: samples of one request, prompts times ``n``.
    image_hosts: hosts that images may be fetched from; none means that URLs are refused.
    hosts: names besides localhost and addresses that a Host header may have, None for any; see
    `cedar.server.guard.Limits`.
    cors_origins: web pages of these origins may call the API.
    page: serve the chat page at ``/``. log_text: log prompts and answers.
    drain_seconds: how long running requests may take to end after SIGTERM.
    buffered_outputs: outputs that wait for a slow reader before its request is cancelled;
    stall_seconds: how long a reader may take none at all; ping_seconds: a comment is sent to a
    reader that waits so long. retry_after: seconds that a refused client should wait.
    """

    models: tuple[str, ...]
    thinking: bool = True
    max_body: int = 32 << 20
    max_images: int = 16
    max_choices: int = 128
    image_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    log_text: bool = False
    drain_seconds: float = 30.0
    buffered_outputs: int = 4096
    stall_seconds: float = 30.0
    ping_seconds: float = 15.0
    retry_after: int = 2

    def __post_init__(self) -> None:
        problems = []
        if not self.models or not all(self.models):
            problems.append("models is empty; expected at least one name")
        for name in ("max_body", "max_choices", "buffered_outputs", "retry_after"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.max_images < 0:
            problems.append(f"max_images is {self.max_images}; expected 0 or more")
        for name in ("stall_seconds", "ping_seconds"):
            if not getattr(self, name) > 0:
                problems.append(f"{name} is {getattr(self, name)}; expected more than 0")
        if not self.drain_seconds >= 0:
            problems.append(f"drain_seconds is {self.drain_seconds}; expected 0 or more")
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                problems.append(
                    f"cors_origins has {origin!r}; expected an origin like https://example.org"
                )
        for host in self.image_hosts:
            AllowedHost.parse(host)
        if problems:
            raise ConfigError("server: " + "; ".join(problems) + ".")

    @property
    def model(self) -> str:
        """The name that is listed."""
        return self.models[0]
