"""What the tests of the prompt protocol share: protocols on both tokenizers, and a driver."""

import functools
import importlib.resources
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe

import real_tokenizer
from cedar.inputs.chat import Api, ChatProtocol, ChatRequest, Event, UsageDetails
from cedar.inputs.tokenizer import Tokenizer

MODEL = "cedar"
IMAGE = "<｜deepseek_image｜>"
HELLO = [{"role": "user", "content": "Hello"}]
CALLS = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="find">\n'
    '<｜DSML｜ parameter name="text" string="true">a "b" <c></｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="limits" string="false">[1, 2.5]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="list">\n\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)
"""Two calls as the model writes them."""

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "list"}},
]
RESPONSE_TOOLS = [
    {"type": "function", "name": "find", "parameters": SCHEMA},
    {"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}},
]
BLOCK_TOOLS = [
    {"name": "find", "input_schema": SCHEMA},
    {"name": "list", "input_schema": {"type": "object"}},
]
TOOLS = {Api.CHAT: CHAT_TOOLS, Api.RESPONSES: RESPONSE_TOOLS, Api.MESSAGES: BLOCK_TOOLS}


@functools.cache
def tokenizer(kind: str = "real") -> Tokenizer:
    """The released tokenizer, rebuilt, or the one of the bundled model."""
    if kind == "real":
        with tempfile.TemporaryDirectory() as folder:
            return Tokenizer.from_file(real_tokenizer.rebuild(Path(folder)))
    bundled = importlib.resources.files("cedar") / "bundled" / "cedar-tiny" / "tokenizer.json"
    return Tokenizer.from_file(Path(str(bundled)))


@functools.cache
def protocol(
    kind: str = "real", *, default_thinking: bool = True, images: bool = True
) -> ChatProtocol:
    return ChatProtocol(
        tokenizer(kind),
        models=[MODEL],
        default_thinking=default_thinking,
        accepts_images=images,
    )


def body_of(api: Api, *, reasons: bool | None = None, **fields: Any) -> dict[str, Any]:
    """A body with the least that the API asks for, and ``fields``; ``reasons``: on or off."""
    body: dict[str, Any] = {"model": MODEL}
    if api is Api.RESPONSES:
        body["input"] = "Hello"
        if reasons is not None:
            body["reasoning"] = {"effort": "high" if reasons else "none"}
    else:
        body["messages"] = HELLO
        if reasons is not None:
            body["thinking"] = {"type": "enabled" if reasons else "disabled"}
    if api is Api.MESSAGES:
        body["max_tokens"] = 100
    return body | fields


def read(
    api: Api, *, kind: str = "real", reasons: bool | None = None, **fields: Any
) -> ChatRequest:
    body = body_of(api, reasons=reasons, **fields)
    return protocol(kind).read(api, json.dumps(body).encode())


@dataclass
class Played:
    """What came of a reply: all events, and the response."""

    events: list[Event] = field(default_factory=list)
    response: dict[str, Any] = field(default_factory=dict)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event.data) for event in self.events if event.data != "[DONE]"]


def play(
    request: ChatRequest,
    pieces: Iterable[str | Sequence[int]],
    *,
    reason: str = "stop",
    kind: str = "real",
    details: UsageDetails | None = None,
    scores: Any = None,
    index: int = 0,
) -> Played:
    """Push pieces of text, or of tokens, and finish."""
    reply = protocol(kind).reply(request, "id-1", 1234, index)
    played = Played(reply.begin(10, 4))
    count = 0
    for piece in pieces:
        tokens = () if isinstance(piece, str) else tuple(piece)
        text = piece if isinstance(piece, str) else "(the tokens count)" * bool(piece)
        played.events += reply.push(text, tokens, scores and scores(tokens))
        count += len(tokens)
    played.events += reply.finish(reason, details or UsageDetails(completion_tokens=count))
    played.response = reply.response()
    return played


def spell(text: str, kind: str = "real") -> list[int]:
    """Tokens of a model's output, control tokens included."""
    return tokenizer(kind).encode(text)


def oracle(api: Api, body: dict[str, Any], *, default_thinking: bool = True) -> recipe.Conversation:
    """What the recipe by itself makes of a body."""
    options = (
        recipe.ConversionOptions(default_thinking_mode=default_thinking)
        .with_model_versions_by_name({MODEL: recipe.ModelVersion.DeepseekV41Flash})
        .with_special_tokens(recipe.SpecialTokens(image=IMAGE))
    )
    kinds: dict[Api, Any] = {
        Api.CHAT: recipe.ChatCompletionRequest,
        Api.RESPONSES: recipe.ResponsesRequest,
        Api.MESSAGES: recipe.MessagesRequest,
    }
    converted: recipe.ConversationRequest = kinds[api](json.dumps(body)).convert(options)
    return converted.conversation


@functools.cache
def encoding(kind: str = "real") -> recipe.DeepseekV41Encoding:
    """The recipe's own renderer with its own tokenizer."""
    raw = recipe.Tokenizer.from_str(tokenizer(kind).raw.to_str())
    special = recipe.SpecialTokens(image=IMAGE)
    return recipe.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(raw)


def content_of(api: Api, response: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, answer and calls of a response; arguments as given, text or parsed."""
    reasoning = answer = ""
    calls: list[tuple[str, Any]] = []
    if api is Api.CHAT:
        message = response["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return message.get("reasoning_content") or "", message["content"] or "", calls
    for part in response["output" if api is Api.RESPONSES else "content"]:
        match part["type"]:
            case "reasoning":
                reasoning += part["content"][0]["text"]
            case "thinking":
                reasoning += part["thinking"]
            case "message":
                answer += part["content"][0]["text"]
            case "text":
                answer += part["text"]
            case "function_call":
                calls.append((part["name"], part["arguments"]))
            case "tool_use":
                calls.append((part["name"], part["input"]))
    return reasoning, answer, calls
