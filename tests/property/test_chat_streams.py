"""However a reply is cut into pieces, its events and its response say the same."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.inputs.chat import Api, ChatRequest, UsageDetails
from chat_setting import CALLS, TOOLS, Played, content_of, play, read, spell

APIS = list(Api)
DETAILS = UsageDetails(completion_tokens=50)
FRAGMENTS = [
    *(
        "Hello",
        " ",
        "\n",
        "\n\n",
        "wörld",
        "😀",
        "</think>",
        "<",
        "</",
        "<｜",
        "｜DSML｜",
        "x" * 20,
    ),
    *("<｜DSML｜ calls>\n", "</｜DSML｜ calls>", '<｜DSML｜ invoke name="find">\n', "STOP", "ST"),
    *("</｜DSML｜ invoke>\n", '<｜DSML｜ parameter name="a" string="true">', '"', "\\", "{", "]"),
    *('<｜DSML｜ parameter name="b" string="false">', "</｜DSML｜ parameter>\n", CALLS, "calls>"),
]
REPLIES = [
    "Hm, let me see.\n\n</think>\n\nThe answer is 42.\n",
    f"I search.</think>Looking.{CALLS}",
    f"I search, unclosed{CALLS}",
    f"</think>{CALLS}",
    "never closed",
    "</think>no <b>markup</b> < here \n\n<｜ at all",
    f"a</think>b{CALLS[:-40]}",
]


def request_of(api: Api, *, tools: bool, reasons: bool, stop: bool = False) -> ChatRequest:
    fields: dict[str, Any] = {"tools": TOOLS[api]} if tools else {}
    if stop and api is not Api.RESPONSES:
        fields["stop_sequences" if api is Api.MESSAGES else "stop"] = ["STOP", "The answer"]
    return read(api, kind="bundled", reasons=reasons, stream=True, **fields)


def said(played: Played) -> str:
    """The response without what differs by chance."""
    text = json.dumps(played.response, ensure_ascii=False)
    text = re.sub(r"call_(\d\d)_\w+", r"call_\1", text)
    return re.sub(r'"completed_at": \d+', "", text)


def streamed(api: Api, played: Played) -> tuple[str, str, list[str]]:
    """Reasoning, answer and arguments that the events add up to."""
    reasoning = answer = ""
    arguments: list[str] = []
    for chunk in played.chunks:
        delta = chunk.get("delta")
        if api is Api.CHAT:
            delta = chunk["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content") or ""
            answer += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                arguments += [""] if "id" in call else []
                arguments[-1] += call["function"]["arguments"]
        elif chunk["type"] == "response.reasoning_text.delta":
            reasoning += delta
        elif chunk["type"] == "response.output_text.delta":
            answer += delta
        elif chunk["type"] == "response.output_item.added":
            arguments += [""] if chunk["item"]["type"] == "function_call" else []
        elif chunk["type"] == "response.function_call_arguments.delta":
            arguments[-1] += delta
        elif chunk["type"] == "content_block_start":
            arguments += [""] if chunk["content_block"]["type"] == "tool_use" else []
        elif chunk["type"] == "content_block_delta":
            reasoning += delta.get("thinking", "")
            answer += delta.get("text", "")
            if "partial_json" in delta:
                arguments[-1] += delta["partial_json"]
    return reasoning, answer, arguments


def check_same(api: Api, request: ChatRequest, text: str, pieces: list[Any]) -> Played:
    one = play(request, [text], kind="bundled", details=DETAILS)
    many = play(request, pieces, kind="bundled", details=DETAILS)
    assert said(many) == said(one)
    for played in (one, many):
        reasoning, answer, arguments = streamed(api, played)
        expected = content_of(api, played.response)
        assert (reasoning, answer) == expected[:2]
        if api is not Api.MESSAGES:  # whose response has parsed arguments
            assert arguments == [given for _, given in expected[2]]
        assert len(arguments) == len(expected[2])
    return many


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("text", REPLIES)
def test_every_cut_gives_the_same(api: Api, text: str) -> None:
    request = request_of(api, tools=True, reasons=True, stop=True)
    for place in range(len(text) + 1):
        check_same(api, request, text, [text[:place], text[place:]])
    played = check_same(api, request, text, list(text))
    # With tools declared no markup is left, wherever the cuts were.
    assert "｜DSML｜" not in "".join(content_of(api, played.response)[:2])


@settings(max_examples=150, deadline=None)
@given(
    api=st.sampled_from(APIS),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    places=st.lists(st.integers(0, 400), max_size=6),
    tools=st.booleans(),
    reasons=st.booleans(),
    stop=st.booleans(),
)
def test_any_cuts_of_any_text(
    api: Api, text: str, places: list[int], tools: bool, reasons: bool, stop: bool
) -> None:
    request = request_of(api, tools=tools, reasons=reasons, stop=stop)
    cuts = [0, *sorted({place for place in places if place < len(text)}), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    check_same(api, request, text, pieces)
    check_same(api, request, text, list(text))


@settings(max_examples=150, deadline=None)
@given(
    api=st.sampled_from(APIS),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    tools=st.booleans(),
    reasons=st.booleans(),
)
def test_any_groups_of_tokens(
    api: Api, text: str, sizes: list[int], tools: bool, reasons: bool
) -> None:
    request = request_of(api, tools=tools, reasons=reasons)
    tokens = spell(text, "bundled")
    groups, start = [], 0
    while start < len(tokens):
        size = sizes[len(groups) % len(sizes)]
        groups.append(tokens[start : start + size])
        start += size
    one = play(request, [tokens], kind="bundled", details=DETAILS)
    many = play(request, groups, kind="bundled", details=DETAILS)
    assert said(many) == said(one)
    assert [event.name for event in many.events] == [event.name for event in one.events]


def test_the_comparison_can_fail() -> None:
    request = request_of(Api.CHAT, tools=False, reasons=False)
    with pytest.raises(AssertionError):
        check_same(Api.CHAT, request, "Hello", ["Hello", "!"])
