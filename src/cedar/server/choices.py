"""Several samples of one chat request as one answer: choices side by side, usage added up."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["join_responses", "join_usage"]

# Counts of the prompt, which the samples share.
_SHARED = ("prompt_tokens", "prompt_tokens_details")


def join_responses(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The responses of all samples in one."""
    if len(responses) == 1:
        return responses[0]
    choices = [choice for each in responses for choice in each["choices"]]
    return {**responses[0], "choices": choices, "usage": _total([r["usage"] for r in responses])}


def join_usage(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last chunks of all samples, which have usage and no choices, in one."""
    return {**chunks[0], "usage": _total([chunk["usage"] for chunk in chunks])}


def _total(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = _added(usages)
    total.update({name: usages[0][name] for name in _SHARED if name in usages[0]})
    if "total_tokens" in total:
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return total


def _added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of equal names added, also those inside objects."""
    added: dict[str, Any] = {}
    for name, value in parts[0].items():
        values = [part.get(name) for part in parts]
        if isinstance(value, Mapping):
            added[name] = _added([each for each in values if isinstance(each, Mapping)])
        elif isinstance(value, int):
            added[name] = sum(each for each in values if isinstance(each, int))
        else:
            added[name] = value
    return added
