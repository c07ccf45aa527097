"""What the page's live panel shows: a field of its own in the chunks of a watched request."""

import json
from collections.abc import Sequence
from typing import Any

from cedar.inputs.chat import Event
from cedar.server.protocols import ModelInfo, Output

__all__ = ["figures", "ranges", "watched"]


def watched(events: list[Event], output: Output, info: ModelInfo) -> list[Event]:
    """The events with the figures of the newest output in the last chunk that is an object."""
    for place in range(len(events) - 1, -1, -1):
        name, data = events[place]
        if data.startswith("{"):
            extra = json.dumps(figures(output, info), separators=(",", ":"))
            changed = Event(name, f'{data[:-1]},"cedar":{extra}}}')
            return [*events[:place], changed, *events[place + 1 :]]
    return events


def figures(output: Output, info: ModelInfo) -> dict[str, Any]:
    """Context, cache bytes, speed, drafts by place, and what a sample's last token selected.

    cache_bytes: what the context takes in the packed cache; full_cache_bytes: what bfloat16 keys
    and values of every head in every layer would take.
    """
    usage = output.usage
    context = usage.prompt_tokens + usage.generated_tokens
    found: dict[str, Any] = {
        "context_tokens": context,
        "cache_bytes": info.slot_bytes + round(info.bytes_per_token * context),
        "full_cache_bytes": info.full_bytes_per_token * context,
        "cached_tokens": usage.cached_tokens,
        "tokens_per_second": round(usage.tokens_per_second, 2),
        "drafted": usage.drafted_by_place,
        "accepted": usage.accepted_by_place,
    }
    if output.selected is not None:
        found["selected"] = ranges(output.selected, output.entry_tokens, context)
    return found


def ranges(starts: Sequence[int], length: int, end: int) -> list[tuple[int, int]]:
    """Entries of ``length`` tokens at ascending starts as the fewest ``[start, stop)``."""
    joined: list[tuple[int, int]] = []
    for start in starts:
        stop = min(start + length, end)
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
