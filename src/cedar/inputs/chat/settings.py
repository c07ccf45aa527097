"""What a body says about reasoning, sampling and length, for all three APIs."""

from typing import Any

from cedar.inputs.chat.shape import Notes, Path
from cedar.inputs.chat.types import Api

__all__ = ["LOGPROBS", "effort_of", "limit_of", "sampling_of", "stops_of", "thinking_of"]

LOGPROBS = "message.output_text.logprobs"
"""What ``include`` names in Responses to have log probabilities."""

_SAME = (
    "temperature",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
)


def effort_of(api: Api, body: dict[str, Any]) -> tuple[str | int | None, Path]:
    """The reasoning effort that was asked for, and where."""
    paths: tuple[tuple[str, ...], ...] = {
        Api.CHAT: (("reasoning_effort",), ("chat_template_kwargs", "reasoning_effort")),
        Api.RESPONSES: (("reasoning", "effort"),),
        Api.MESSAGES: (("output_config", "effort"),),
    }[api]
    for path in paths:
        value: Any = body
        for step in path:
            value = value.get(step, {})
        if value != {}:
            return value, path
    return None, paths[0]


def thinking_of(api: Api, body: dict[str, Any], default: bool, notes: Notes) -> bool:
    """Whether the reply begins with reasoning.

    Switches decide, then an effort: "none" is off, any other is on. Without both it is
    ``default``, in Messages off, as that API has it. Raises `ProtocolError` where they contradict.
    """
    effort, path = effort_of(api, body)
    switches: list[tuple[Path, bool]] = []
    for name in ("budget_tokens", "display"):
        if name in body.get("thinking", {}):
            notes.ignore(("thinking", name))
    if "thinking" in body:
        switches.append((("thinking", "type"), body["thinking"]["type"] != "disabled"))
    keywords = body.get("chat_template_kwargs", {})
    switches += [
        (("chat_template_kwargs", name), keywords[name])
        for name in ("thinking", "enable_thinking")
        if name in keywords
    ]
    for place, on in switches[1:]:
        if on != switches[0][1]:
            notes.fail(place, f"contradicts {notes.spell(switches[0][0])}. Leave one of them out.")
    if switches:
        if switches[0][1] and effort == "none":
            notes.fail(path, f'"none" contradicts {notes.spell(switches[0][0])}.')
        return switches[0][1]
    if effort is not None:
        return effort != "none"
    if any(message.get("task") for message in body.get("messages", ())):
        return False
    return default and api is not Api.MESSAGES


def limit_of(api: Api, body: dict[str, Any], notes: Notes) -> int | None:
    """The most tokens to generate; None if the body does not say."""
    if api is Api.RESPONSES:
        return body.get("max_output_tokens")
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        notes.fail(("max_tokens",), f"is {old}, but max_completion_tokens is {new}. Send one.")
    return old if new is None else new


def stops_of(api: Api, body: dict[str, Any]) -> tuple[str, ...]:
    """The strings that end the answer."""
    stops = body.get("stop_sequences" if api is Api.MESSAGES else "stop", [])
    return (stops,) if isinstance(stops, str) else tuple(stops)


def sampling_of(api: Api, body: dict[str, Any], vocab_size: int, notes: Notes) -> dict[str, Any]:
    """Sampling parameters by the engine's names, only those that the body sets; stops apart."""
    found: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    if "top_p" in body:
        # The limit of ever smaller shares is the likeliest token; the engine wants more than 0.
        found["top_p"] = max(body["top_p"], 1e-9)
    if "top_k" in body:
        found["top_k"] = max(body["top_k"], 0)
    if "seed" in body:
        found["seed"] = body["seed"] % 2**63
    if body.get("n", 1) != 1:
        found["n"] = body["n"]
    if body.get("logit_bias"):
        found["logit_bias"] = _bias(body["logit_bias"], vocab_size, notes)
    if (count := _logprobs(api, body, notes)) is not None:
        found["logprobs"] = count
    return found


def _logprobs(api: Api, body: dict[str, Any], notes: Notes) -> int | None:
    count: int = body.get("top_logprobs", 0)
    if api is Api.RESPONSES:
        include = body.get("include", [])
        for name in include:
            if name != LOGPROBS:
                notes.ignore(("include", name))
        return count if LOGPROBS in include or count else None
    if count and not body.get("logprobs"):
        notes.fail(("top_logprobs",), "needs logprobs: true beside it.")
    return count if body.get("logprobs") else None


def _bias(bias: dict[str, float], vocab_size: int, notes: Notes) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, amount in bias.items():
        known = key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size
        if not known:
            notes.fail(
                ("logit_bias",),
                f"the key {key[:40]!r} is no token id; expected 0 to {vocab_size - 1}.",
            )
        found[int(key)] = amount
    return found
