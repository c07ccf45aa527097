"""From a checked body to the recipe's conversation.

The only files that know the recipe (``deepseek_recipe``) are this one, ``render`` and ``reply``.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import deepseek_recipe as recipe

from cedar.inputs.chat.messages import prepare_messages
from cedar.inputs.chat.shape import Notes
from cedar.inputs.chat.tools import ToolPlan
from cedar.inputs.chat.types import Api, Constraint, ProtocolError

__all__ = ["Converted", "convert"]

# The recipe knows models by name; requests name ours, which is checked before.
_MODEL = "cedar"
_PATH = re.compile(r"\b(?:messages|tools|input)(?:\.\d+|\[\d+\]|\.[a-z_]+)+")

Generator = (
    recipe.ChatCompletionChunkGenerator
    | recipe.ResponsesChunkGenerator
    | recipe.MessagesChunkGenerator
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A request in the recipe's terms.

    conversation: what is rendered. starts_in_tools: the prompt opens the tool block. continued:
    the reply continues the last message. generator: makes what turns parsed text into the API's
    chunks, from an id and the model's name.
    """

    conversation: recipe.Conversation
    starts_in_tools: bool
    continued: bool
    generator: Callable[[str, str], Generator]


def convert(
    api: Api,
    body: dict[str, Any],
    *,
    thinking: bool,
    effort: str | None,
    tools: ToolPlan,
    answer: Constraint | None,
    special: recipe.SpecialTokens,
    notes: Notes,
) -> Converted:
    """Let the recipe convert the conversation of a checked body.

    effort: one of the recipe's names. answer: the format that the prompt asks for. Raises
    `ProtocolError` for what the recipe refuses, such as calls without results.
    """
    fields = prepare_messages(api, body, notes) | {"model": _MODEL}
    fields |= _thinking(api, thinking, effort)
    continued = _continued(api, body)
    forced = tools.choice == "required" and not thinking and not continued
    fields |= _tools(api, tools, forced)
    options = (
        recipe.ConversionOptions(
            default_thinking_mode=thinking,
            messages_web_search=recipe.WebSearchBehavior.Reject,
        )
        .with_model_versions_by_name({_MODEL: recipe.ModelVersion.DeepseekV41Flash})
        .with_special_tokens(special)
    )
    kind: Any = {
        Api.CHAT: recipe.ChatCompletionRequest,
        Api.RESPONSES: recipe.ResponsesRequest,
        Api.MESSAGES: recipe.MessagesRequest,
    }[api]
    try:
        request: Any = kind(json.dumps(fields, ensure_ascii=False))
        spaces = request.namespace_tool_map(options) if api is Api.RESPONSES else {}
        converted: recipe.ConversationRequest = request.convert(options)
        echo = _echo(body, effort) if api is Api.RESPONSES else None
    except (recipe.ConversionError, ValueError) as error:
        _refuse(str(error))
    messages = converted.conversation.messages
    if continued:
        messages = [*messages[:-1], _continue(messages[-1])]

    def generator(id: str, model: str) -> Generator:
        made: Any = kind.chunk_generator(converted, id, model)
        if api is Api.RESPONSES:
            made = made.with_namespace_tool_map(spaces).with_echo(echo)
        return made

    conversation = recipe.Conversation(
        messages,
        thinking_mode=thinking,
        tools=_definitions(converted.conversation.tools, tools),
        # In Messages the recipe takes "any" for "auto".
        tool_choice="required" if forced else converted.conversation.tool_choice,
        reasoning_effort=converted.conversation.reasoning_effort,
        **_format(answer),
    )
    return Converted(
        conversation=conversation,
        starts_in_tools=forced,
        continued=continued,
        generator=generator,
    )


def _thinking(api: Api, thinking: bool, effort: str | None) -> dict[str, Any]:
    if api is Api.RESPONSES:
        return {"reasoning": {"effort": (effort or "high") if thinking else "none"}}
    switch = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    if effort is None or not thinking:
        return switch
    if api is Api.MESSAGES:
        return switch | {"output_config": {"effort": effort}}
    return switch | {"reasoning_effort": effort}


def _tools(api: Api, tools: ToolPlan, forced: bool) -> dict[str, Any]:
    """Declarations and choice as the recipe takes them."""
    if not tools.tools:
        return {}
    declared = list(tools.declared)
    if api is Api.CHAT:  # it refuses the names that namespaces give, so it sees numbers
        declared = [
            {**entry, "function": {**entry["function"], "name": _placeholder(place, tool.name)}}
            for place, (entry, tool) in enumerate(zip(declared, tools.tools, strict=True))
        ]
    # A forced call beside reasoning is the grammar's business: the recipe refuses it there.
    choice: Any = "auto" if tools.choice == "required" and not forced else tools.choice
    if forced and tools.named is not None:
        name = tools.named
        if api is Api.CHAT:
            place = [tool.name for tool in tools.tools].index(name)
            choice = {"type": "function", "function": {"name": _placeholder(place, name)}}
        elif api is Api.MESSAGES:
            choice = {"type": "tool", "name": name}
        else:
            custom = any(entry["type"] == "custom" and entry["name"] == name for entry in declared)
            choice = {"type": "custom" if custom else "function", "name": name}
    elif api is Api.MESSAGES:
        choice = {"type": {"required": "any"}.get(choice, choice)}
    return {"tools": declared, "tool_choice": choice}


def _placeholder(place: int, name: str) -> str:
    return f"tool-{place}" if "::" in name else name


def _definitions(
    converted: list[recipe.ToolDefinition], tools: ToolPlan
) -> list[recipe.ToolDefinition]:
    """The recipe's tools, with the names of namespaces in place of numbers."""
    spaced = {
        _placeholder(place, tool.name): tool
        for place, tool in enumerate(tools.tools)
        if "::" in tool.name
    }
    found = []
    for one in converted:
        tool = spaced.get(one.name)
        if tool is not None:
            one = recipe.ToolDefinition(tool.name, tool.description, tool.shown)
        found.append(one)
    return found


def _continued(api: Api, body: dict[str, Any]) -> bool:
    """Whether the reply continues the last message instead of being a new one."""
    if api is Api.RESPONSES:
        return False
    last = body["messages"][-1]
    return last["role"] == "assistant" and (api is Api.MESSAGES or bool(last.get("prefix")))


def _continue(message: recipe.Message) -> recipe.Message:
    return recipe.AssistantMessage(
        message.content, message.reasoning_content, message.tool_calls, prefix=True
    )


def _format(answer: Constraint | None) -> dict[str, Any]:
    if answer is None:
        return {}
    if answer.kind == "json_schema":
        return {"response_schema": answer.value}
    if answer.kind == "regex":
        return {"response_regex": answer.value}
    return {"response_format": "json_object"}


def _echo(body: dict[str, Any], effort: str | None) -> recipe.ResponsesEcho:
    """The settings that a Responses object repeats."""
    names = ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "tools")
    fields = {name: body[name] for name in names if name in body}
    form = body.get("text", {}).get("format", {"type": "text"})
    # The name is optional here, but not in the object.
    name = {"name": "answer"} if form["type"] == "json_schema" else {}
    fields["text"] = {"format": name | form}
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice = choice["mode"]
    if "reasoning" in body:
        fields["reasoning"] = {"effort": effort or "none"}
    fields |= {"model": _MODEL, "input": "", "tool_choice": choice}
    return recipe.ResponsesRequest(json.dumps(fields, ensure_ascii=False)).echo()


def _refuse(message: str) -> NoReturn:
    """The recipe's message as ours, with the field that it names."""
    message = message.removeprefix("invalid request body: ").rstrip(".")
    found = _PATH.search(message)
    raise ProtocolError(f"{message}.", param=found.group() if found else None)
