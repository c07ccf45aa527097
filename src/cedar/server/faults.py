"""Faults of ours: told to the client by an id, and logged under it without any text of users."""

import logging
import traceback

from cedar.server.errors import ApiError

__all__ = ["internal_error", "report"]

_LOG = logging.getLogger(__name__)


def report(fault: BaseException, id: str) -> None:
    """Log where a fault came from. Messages of exceptions may quote a prompt, so they are not."""
    lines = []
    cause: BaseException | None = fault
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        where = "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in frames)
        lines.append(f"{type(cause).__module__}.{type(cause).__qualname__}{where}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    _LOG.error("request %s failed\n%s", id, "\ncaused by ".join(lines))


def internal_error(id: str) -> ApiError:
    """What the client is told."""
    return ApiError(
        500,
        f"Something went wrong in the server. Report it with the id {id}, under which the "
        "server's log has more.",
        code="internal_error",
    )
