"""The prompt protocol against the published examples, ids and the authors' own library."""

import json
import random
from typing import Any

import pytest

from cedar.inputs.chat import Api, ChatRequest
from chat_setting import (
    HELLO,
    IMAGE,
    MODEL,
    SCHEMA,
    TOOLS,
    body_of,
    encoding,
    oracle,
    play,
    protocol,
    read,
    spell,
    tokenizer,
)

B, E = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
OFF = {"thinking": {"type": "disabled"}}


def effort(number: int) -> str:
    return (
        f"{SYSTEM}Reasoning Effort: {number} (range 1-100, the higher the value, the more "
        "thorough the reasoning)\n\n"
    )


def chat(*messages: dict[str, Any], kind: str = "real", **fields: Any) -> ChatRequest:
    return read(Api.CHAT, kind=kind, messages=list(messages), **fields)


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: str | None, reasoning: str | None = None, **fields: Any) -> dict[str, Any]:
    found = {"role": "assistant", "content": content, **fields}
    return found if reasoning is None else found | {"reasoning_content": reasoning}


def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def result(id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def parameter(name: str, value: str, string: bool = False) -> str:
    flag = "true" if string else "false"
    return f'<｜DSML｜ parameter name="{name}" string="{flag}">{value}</｜DSML｜ parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(parameters)}</｜DSML｜ invoke>\n'


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}
LOOP = [
    user("q"),
    assistant(
        "",
        "think1",
        tool_calls=[
            call("c1", "get_weather", {"location": "Paris", "n": 2}),
            call("c2", "get_weather", {"location": "Rome", "opts": {"a": [1, 2.5, None, True]}}),
        ],
    ),
    result("c2", "rainy"),
    result("c1", "sunny"),
]
LOOP_CALLS = (
    "\n\n<｜DSML｜ calls>\n"
    + invoke("get_weather", parameter("location", "Paris", True), parameter("n", "2"))
    + invoke(
        "get_weather",
        parameter("location", "Rome", True),
        parameter("opts", '{"a": [1, 2.5, null, true]}'),
    )
    + "</｜DSML｜ calls>"
)
RESULTS = "<tool_result>sunny</tool_result>\n\n<tool_result>rainy</tool_result>"
LOOP_TEXT = f"{USER}q{ASSISTANT}<think>think1</think>{LOOP_CALLS}{E}{USER}{RESULTS}"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

# Messages, other fields, prompt; the numbers are those of the published table.
EXAMPLES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "1": (HELLO, OFF, f"{B}{USER}Hello{ASSISTANT}</think>"),
    "2": (HELLO, {}, f"{B}{effort(75)}{USER}Hello{ASSISTANT}<think>"),
    "3": (
        [system("You are a helpful assistant."), user("hello")],
        OFF,
        f"{B}{SYSTEM}You are a helpful assistant.{USER}hello{ASSISTANT}</think>",
    ),
    "4": (
        [system("You are helpful."), *HELLO],
        {},
        f"{B}{effort(75)}You are helpful.{USER}Hello{ASSISTANT}<think>",
    ),
    "5": (
        [system("sys"), user("q1"), assistant("a1", "r1"), system("mid sys")],
        {"reasoning_effort": 88},
        f"{B}{effort(88)}sys{USER}q1{ASSISTANT}</think>a1{E}{SYSTEM}mid sys{ASSISTANT}<think>",
    ),
    "6": (
        [user("q1"), assistant("a1", "r1"), user("q2")],
        {},
        f"{B}{effort(75)}{USER}q1{ASSISTANT}</think>a1{E}{USER}q2{ASSISTANT}<think>",
    ),
    "10": (
        [user([{"type": "text", "text": "inspect"}, PICTURE])],
        OFF,
        f"{B}{USER}inspect\n\n{IMAGE}{ASSISTANT}</think>",
    ),
    "11": ([user("Hello"), user("again")], OFF, f"{B}{USER}Hello\n\nagain{ASSISTANT}</think>"),
    "12": ([user("classify me", task="query")], {}, f"{B}{USER}classify me<｜query｜>"),
    "two images": (
        [
            system("You are a helpful vision assistant."),
            user(
                [
                    {"type": "text", "text": "Compare"},
                    PICTURE,
                    {"type": "text", "text": "with"},
                    PICTURE,
                ]
            ),
        ],
        {"reasoning_effort": "max"},
        f"{B}{effort(100)}You are a helpful vision assistant.{USER}Compare\n\n{IMAGE}\n\nwith"
        f"\n\n{IMAGE}{ASSISTANT}<think>",
    ),
}
# Where only the part from the first user turn on is given.
ENDINGS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "7": (LOOP, {"tools": [WEATHER]}, f"{LOOP_TEXT}{ASSISTANT}<think>"),
    "8": (
        [*LOOP, user("and then?")],
        {"tools": [WEATHER]},
        f"{LOOP_TEXT}\n\nand then?{ASSISTANT}<think>",
    ),
    "9": (
        [*LOOP, assistant("ok", "r9"), user("z")],
        {},
        f"{USER}q{ASSISTANT}</think>{LOOP_CALLS}{E}{USER}{RESULTS}{ASSISTANT}</think>ok{E}"
        f"{USER}z{ASSISTANT}<think>",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("kind", ["real", "bundled"])
def test_published_example(name: str, kind: str) -> None:
    messages, fields, expected = EXAMPLES[name]
    request = chat(*messages, kind=kind, **fields)
    assert request.prompt == expected
    # No text of these examples spells a control token, so encoding all at once is the same.
    assert list(request.tokens) == tokenizer(kind).encode(expected)


@pytest.mark.parametrize("name", ENDINGS)
def test_published_ending(name: str) -> None:
    messages, fields, expected = ENDINGS[name]
    request = chat(*messages, **fields)
    assert request.prompt.endswith(expected)
    assert request.prompt.count(USER) == expected.count(USER)


def test_example_13_where_a_new_turn_begins_after_the_last_answer() -> None:
    """The reference ends after the answer; here generation goes on with a turn of its own."""
    request = chat(
        system("S"),
        {"role": "latest_reminder", "content": "R"},
        user("q", task="action"),
        assistant("Search"),
    )
    published = f"{B}{SYSTEM}S<｜latest_reminder｜>R{USER}q{ASSISTANT}</think><｜action｜>Search{E}"
    assert request.prompt == f"{published}{ASSISTANT}</think>"


EXAMPLE_14 = (
    "  reason  </think>summary\n\n<｜DSML｜ calls>\n"
    + invoke("lookup", parameter("query", "value", True), parameter("limit", "2"))
    + "</｜DSML｜ calls>"
)
LOOKUP = {"type": "function", "function": {"name": "lookup"}}


def test_example_14() -> None:
    request = chat(
        user("q"),
        assistant(
            "summary",
            "  reason  ",
            tool_calls=[call("1", "lookup", {"query": "value", "limit": 2})],
        ),
        result("1", "r"),
        tools=[LOOKUP],
    )
    assert f"{ASSISTANT}<think>{EXAMPLE_14}{E}" in request.prompt


def test_example_15() -> None:
    request = chat(user("q"), tools=[LOOKUP])
    message = play(request, [spell(EXAMPLE_14)]).response["choices"][0]["message"]
    assert message["reasoning_content"] == "  reason  "
    assert message["content"] == "summary"
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "lookup", "arguments": '{"query": "value", "limit": 2}'}


def test_example_16() -> None:
    request = chat(
        system("You are a helpful assistant."),
        user("What's the weather like in Beijing?"),
        assistant(
            "",
            "I ask.",
            tool_calls=[call("1", "get_weather", {"location": "Beijing", "unit": "celsius"})],
        ),
        result("1", '{"temperature": 22, "condition": "sunny", "humidity": 45}'),
        assistant("The weather is fine.", "It is sunny."),
        user("Thanks"),
        tools=[WEATHER, LOOKUP],
    )
    assert request.prompt.startswith(
        f"{B}{effort(75)}You are a helpful assistant.\n\n## Tools\n\nYou have access to a set of "
        "tools to help answer the user's question. You can invoke tools by writing a "
        '"<｜DSML｜ calls>" block like the following:\n\n<｜DSML｜ calls>\n'
    )
    assert (
        "You MUST strictly follow the above defined tool name and parameter schemas to invoke "
        f"tool calls.\n{USER}What's the weather like in Beijing?{ASSISTANT}<think>I ask.</think>"
        "\n\n<｜DSML｜ calls>\n"
        + invoke(
            "get_weather",
            parameter("location", "Beijing", True),
            parameter("unit", "celsius", True),
        )
        + f"</｜DSML｜ calls>{E}{USER}<tool_result>"
        '{"temperature": 22, "condition": "sunny", "humidity": 45}</tool_result>'
        f"{ASSISTANT}<think>It is sunny.</think>The weather is fine.{E}{USER}Thanks"
    ) in request.prompt


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        (chat(user("Hello"), **OFF), "0 128803 19923 128804 128822"),
        (
            chat(user("Hello")),
            "0 128799 77666 288 9504 482 28 223 2402 343 16801 223 19 15 1457 14 270 4077 270 1990 "
            "14 270 850 15146 270 22805 868 128803 19923 128804 128821",
        ),
        (
            chat(
                system("You are a helpful assistant."),
                user("What's the weather in Beijing?"),
                **OFF,
            ),
            "0 128799 3476 477 260 11502 22896 16 128803 3085 734 270 9670 295 29660 33 128804 "
            "128822",
        ),
        (
            chat(user([{"type": "text", "text": "inspect"}, PICTURE]), **OFF),
            "0 128803 261 25133 271 129264 128804 128822",
        ),
        # Spelled by a user, a control token is text.
        (chat(user(USER), **OFF), "0 128803 30 28217 6756 28217 32 128804 128822"),
    ],
)
def test_known_ids(request_: ChatRequest, ids: str) -> None:
    assert list(request_.tokens) == [int(number) for number in ids.split()]


@pytest.mark.parametrize(("text", "count"), [("<think>", 7), ("｜DSML｜", 8)])
def test_forged_control_tokens_have_the_published_lengths(text: str, count: int) -> None:
    assert len(chat(user(text), **OFF).tokens) == count


def test_the_forced_block() -> None:
    request = chat(*HELLO, **OFF, tools=[WEATHER], tool_choice="required")
    assert request.prompt.endswith(f"{ASSISTANT}</think>\n\n<｜DSML｜ calls>\n")
    assert list(request.tokens[-6:]) == [128822, 271, 30, 128825, 10699, 1018]


# --- generated conversations ----------------------------------------------------------------

WORDS = [
    *("Hello", "wörld", "你好", "1234567", " ", "\n\n", "<think>", "</think>", USER, E, IMAGE),
    *("｜DSML｜", '<｜DSML｜ invoke name="x">\n', "<tool_result>", "</tool_result>", "😀", "{}"),
    *('"quoted"', "\\n", "Reasoning Effort: 75 (range", "a::b", "\t", "json", "\u0000", "<|EOT|>"),
]


class Maker:
    """Draws bodies that the recipe takes, too, so that both can be compared."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._calls = 0

    def pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def text(self) -> str:
        return "".join(self._random.choices(WORDS, k=self._random.randint(1, 8)))

    def value(self, depth: int = 2) -> Any:
        kinds: list[Any] = [None, True, False, 0, -12, 2.5, 1e-7, 1e22, self.text(), ""]
        if depth:
            kinds.append([self.value(depth - 1) for _ in range(self._random.randint(0, 3))])
            kinds.append({self.text(): self.value(depth - 1) for _ in range(2)})
        return self._random.choice(kinds)

    def arguments(self) -> dict[str, Any]:
        return {f"k{n}": self.value() for n in range(self._random.randint(0, 3))}

    def id(self) -> str:
        self._calls += 1
        return f"call_{self._calls}"

    def picture(self) -> str:
        return self.pick("data:image/png;base64,AAAA", "https://example.com/a.png")

    def chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if self.pick(True, False):
            messages.append(system(self.text()))
        if self.pick(True, False, False):
            messages.append({"role": "latest_reminder", "content": self.text()})
        for _ in range(self._random.randint(1, 4)):
            messages += self._chat_turn()
        called = any("tool_calls" in message for message in messages)
        if not called and self.pick(True, False, False, False):
            messages.append(assistant(self.text(), self.pick(None, self.text()), prefix=True))
        fields: dict[str, Any] = {"messages": messages}
        fields |= self.pick({}, {"thinking": {"type": "enabled"}}, OFF)
        if "thinking" not in fields:
            fields |= self.pick({}, {"reasoning_effort": self.pick("low", "xhigh", "max", "none")})
        if not messages[-1].get("prefix") and self.pick(True, False):
            fields["tools"] = TOOLS[Api.CHAT]
            fields |= self.pick({}, {"tool_choice": self.pick("auto", "none")})
            if fields.get("thinking") == OFF["thinking"]:
                named = {"type": "function", "function": {"name": "find"}}
                fields |= self.pick({}, {"tool_choice": self.pick("required", named)})
        return body_of(Api.CHAT) | fields

    def _chat_turn(self) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": self.text()}]
        if self.pick(True, False, False):
            parts.append({"type": "image_url", "image_url": {"url": self.picture()}})
            self._random.shuffle(parts)
        turn = [user(self.pick(self.text(), parts))]
        kind = self.pick("answer", "loop", "more", "system")
        if kind == "answer":
            turn.append(assistant(self.text(), self.pick(None, self.text())))
        elif kind == "loop":
            ids = [self.id() for _ in range(self._random.randint(1, 3))]
            made = [call(id, self.pick("find", "list"), self.arguments()) for id in ids]
            turn.append(assistant(self.pick(None, self.text()), self.text(), tool_calls=made))
            self._random.shuffle(ids)
            turn += [result(id, self.pick(self.text(), parts)) for id in ids]
        elif kind == "system":
            turn.append(system(self.text()))
        return turn

    def responses(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 4)):
            items.append({"role": self.pick("user", "developer"), "content": self.text()})
            kind = self.pick("answer", "loop", "more")
            if kind != "more":
                text = {"type": "reasoning_text", "text": self.text()}
                items.append({"type": "reasoning", "summary": [], "content": [text]})
            if kind == "answer":
                part = {"type": "output_text", "text": self.text(), "annotations": []}
                items.append({"type": "message", "role": "assistant", "content": [part]})
            elif kind == "loop":
                id, name = self.id(), self.pick("find", "list")
                made = {"type": "function_call", "call_id": id, "name": name}
                items.append({**made, "arguments": json.dumps(self.arguments())})
                output = {"type": "function_call_output", "call_id": id, "output": self.text()}
                items.append(output)
        items.append({"role": "user", "content": [{"type": "input_text", "text": self.text()}]})
        fields: dict[str, Any] = {"input": self.pick(items, items, self.text())}
        fields |= self.pick({}, {"instructions": self.text()})
        fields |= self.pick({}, {"reasoning": {"effort": self.pick("none", "low", "max")}})
        fields |= self.pick({}, {"tools": TOOLS[Api.RESPONSES]})
        return body_of(Api.RESPONSES) | fields

    def messages(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 4)):
            text = {"type": "text", "text": self.text()}
            messages.append(user(self.pick(self.text(), [text, text])))
            kind = self.pick("answer", "loop", "more")
            thought = {"type": "thinking", "thinking": self.text(), "signature": "s"}
            if kind == "answer":
                messages.append({"role": "assistant", "content": [thought, text]})
            elif kind == "loop":
                id = self.id()
                use = {"type": "tool_use", "id": id, "name": "find", "input": self.arguments()}
                messages.append({"role": "assistant", "content": [thought, text, use]})
                source = self.pick(
                    {"type": "url", "url": "https://example.com/a.png"},
                    {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                )
                inside = self.pick(self.text(), [text, {"type": "image", "source": source}])
                done = {"type": "tool_result", "tool_use_id": id, "content": inside}
                messages.append(user([done]))
        messages.append(user(self.text()))
        fields: dict[str, Any] = {"messages": messages}
        fields |= self.pick({}, {"system": self.text()})
        # Said outright: what the API means without it is one of the listed differences.
        fields["thinking"] = self.pick({"type": "enabled"}, {"type": "disabled"})
        fields |= self.pick({}, {"output_config": {"effort": self.pick("low", "max")}})
        fields |= self.pick({}, {"tools": TOOLS[Api.MESSAGES]})
        return body_of(Api.MESSAGES) | fields


@pytest.mark.parametrize(
    ("api", "count"), [(Api.CHAT, 600), (Api.RESPONSES, 200), (Api.MESSAGES, 200)]
)
def test_generated_conversations_equal_the_recipes(api: Api, count: int) -> None:
    forged = 0
    for seed in range(count):
        maker = Maker(seed)
        body = {
            Api.CHAT: maker.chat,
            Api.RESPONSES: maker.responses,
            Api.MESSAGES: maker.messages,
        }[api]()
        conversation = oracle(api, body)
        request = protocol().read(api, json.dumps(body).encode())
        rendered = encoding().render_conversation(conversation)
        assert request.prompt == rendered.prompt, seed
        assert list(request.tokens) == encoding().encode(conversation), seed
        assert len(request.images) == len(rendered.image_sources)
        assert [image.url or image.data_url for image in request.images] == [
            source.url or source.data_url for source in rendered.image_sources
        ]
        forged += list(request.tokens) != tokenizer().encode(request.prompt)
    # Encoding the prompt in one go would have let most of these forge control tokens.
    assert forged > count / 2


def test_the_comparison_can_fail() -> None:
    body = body_of(Api.CHAT, messages=[user("a")])
    other = oracle(Api.CHAT, body_of(Api.CHAT, messages=[user("b")]))
    request = protocol().read(Api.CHAT, json.dumps(body).encode())
    assert list(request.tokens) != encoding().encode(other)


# --- where we differ from the recipe on purpose ---------------------------------------------


@pytest.mark.parametrize("role", ["developer", "system"])
def test_difference_a_developer_is_a_system(role: str) -> None:
    messages = [{"role": role, "content": "D"}, *HELLO]
    plain = oracle(Api.CHAT, body_of(Api.CHAT, messages=[system("D"), *HELLO]))
    assert list(chat(*messages).tokens) == encoding().encode(plain)
    if role == "developer":
        with pytest.raises(ValueError, match="unknown variant `developer`"):
            oracle(Api.CHAT, body_of(Api.CHAT, messages=messages))


def test_difference_effort_is_a_number_too() -> None:
    with pytest.raises(ValueError, match="invalid type: integer"):
        oracle(Api.CHAT, body_of(Api.CHAT, reasoning_effort=50))
    low = oracle(Api.CHAT, body_of(Api.CHAT, reasoning_effort="low"))
    assert list(chat(*HELLO, reasoning_effort=50).tokens) == encoding().encode(low)


def test_difference_arguments_encoded_twice_are_arguments() -> None:
    """As the reference reads them."""
    once = json.dumps({"a": 1})
    messages = [
        user("q"),
        assistant(None, tool_calls=[call("1", "f", {})]),
        result("1", "r"),
    ]
    for arguments in (once, json.dumps(once), {"a": 1}):
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        assert parameter("a", "1") in chat(*messages).prompt
    messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(once)
    twice = oracle(Api.CHAT, body_of(Api.CHAT, messages=messages))
    assert parameter("a", "1") not in encoding().render_conversation(twice).prompt
    messages[1]["tool_calls"][0]["function"]["arguments"] = ""
    assert invoke("f", "\n") in chat(*messages).prompt


def test_difference_a_required_call_beside_reasoning() -> None:
    body = body_of(Api.CHAT, tools=TOOLS[Api.CHAT])
    with pytest.raises(Exception, match="Thinking mode does not support this tool_choice"):
        oracle(Api.CHAT, body | {"tool_choice": "required"})
    request = chat(*HELLO, tools=TOOLS[Api.CHAT], tool_choice="required")
    assert request.constraint is not None
    assert request.constraint.required
    assert not request.starts_in_tools
    assert list(request.tokens) == encoding().encode(oracle(Api.CHAT, body))


def test_difference_messages_continue_the_last_assistant_message() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    body = body_of(Api.MESSAGES, messages=messages)
    request = protocol().read(Api.MESSAGES, json.dumps(body).encode())
    assert request.prompt == f"{B}{USER}Hello{ASSISTANT}</think>The answer is"
    alone = encoding().render_conversation(oracle(Api.MESSAGES, body, default_thinking=False))
    assert alone.prompt == f"{request.prompt}{E}{ASSISTANT}</think>"


def test_difference_a_prefix_beside_tools() -> None:
    messages = [*HELLO, assistant("I will", prefix=True)]
    tools = TOOLS[Api.CHAT]
    with pytest.raises(Exception, match="Function call should not be used with prefix"):
        oracle(Api.CHAT, body_of(Api.CHAT, messages=messages, tools=tools))
    request = chat(*messages, **OFF, tools=tools)
    assert request.prompt.endswith(f"{USER}Hello{ASSISTANT}</think>I will")


def test_difference_messages_reason_only_if_asked() -> None:
    body = body_of(Api.MESSAGES)
    request = protocol().read(Api.MESSAGES, json.dumps(body).encode())
    assert not request.thinking
    assert oracle(Api.MESSAGES, body).thinking_mode


def test_difference_formats_need_no_magic_word_and_keep_their_schema() -> None:
    request = chat(*HELLO, **OFF, response_format={"type": "json_object"})
    assert '{"type": "json_object"}' in request.prompt
    body = body_of(Api.CHAT, response_format={"type": "json_object"})
    with pytest.raises(Exception, match="must contain the word 'json'"):
        oracle(Api.CHAT, body)
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    wanted = {"name": "x", "schema": schema, "strict": True}
    request = chat(*HELLO, response_format={"type": "json_schema", "json_schema": wanted})
    assert json.dumps(schema) in request.prompt


def test_difference_strict_tools_keep_their_schema() -> None:
    function = {"name": "f", "parameters": SCHEMA, "strict": True}
    request = chat(*HELLO, tools=[{"type": "function", "function": function}])
    assert json.dumps(SCHEMA) in request.prompt
    body = body_of(Api.CHAT, tools=[{"type": "function", "function": function}])
    rewritten = encoding().render_conversation(oracle(Api.CHAT, body)).prompt
    assert '"additionalProperties": false' in rewritten


def test_difference_namespaces_in_chat() -> None:
    space = {"name": "ns", "description": "Of the space."}
    function = {"name": "f", "description": "Does.", "namespace": space}
    request = chat(*HELLO, tools=[{"type": "function", "function": function}])
    assert (
        '{"name": "ns::f", "description": "Of the space.\\nDoes.", "parameters"' in request.prompt
    )


def test_the_model_name_is_ours() -> None:
    assert body_of(Api.CHAT)["model"] == MODEL
