"""Messages of a checked body in the form that the conversion takes.

The recipe's conversion is stricter or poorer than the APIs in a few places; here the body is
rewritten so that it means the same there. What a body means is the recipe's business.
"""

import json
from typing import Any

from cedar.inputs.chat.body import parse_arguments
from cedar.inputs.chat.shape import Notes, Path
from cedar.inputs.chat.tools import qualified
from cedar.inputs.chat.types import Api

__all__ = ["Task", "prepare_messages", "tasks_of"]

# A quick task and which assistant turn of the conversation it begins, from 0.
Task = tuple[int, str]


def prepare_messages(api: Api, body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The fields with the conversation, rewritten."""
    if api is Api.CHAT:
        messages = [
            _chat(message, ("messages", place), notes)
            for place, message in enumerate(body["messages"])
        ]
        for place, message in enumerate(body["messages"][:-1]):
            if message.get("prefix"):
                path = ("messages", place, "prefix")
                notes.fail(path, "only the last message can be continued.")
        return {"messages": messages}
    if api is Api.MESSAGES:
        fields = {"messages": [_blocks(message) for message in body["messages"]]}
        return fields | ({"system": body["system"]} if "system" in body else {})
    fields = {name: body[name] for name in ("instructions", "input") if name in body}
    if isinstance(fields.get("input"), list):
        fields["input"] = [_item(item) for item in fields["input"]]
    return fields


def tasks_of(body: dict[str, Any], notes: Notes) -> tuple[Task, ...]:
    """The quick tasks of Chat Completions messages."""
    found: list[Task] = []
    turns = 0
    messages = body["messages"]
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            turns += 1
        if "task" in message:
            following = messages[place + 1 : place + 2]
            if following and following[0]["role"] != "assistant":
                path = ("messages", place, "task")
                notes.fail(path, "an assistant message, or nothing, must follow a task.")
            found.append((turns, message["task"]))
    return tuple(found)


def _chat(message: dict[str, Any], path: Path, notes: Notes) -> dict[str, Any]:
    role = message["role"]
    fields: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": message.get("content"),
    }
    if role == "tool":
        fields["tool_call_id"] = message["tool_call_id"]
    if role != "assistant":
        return fields
    if isinstance(fields["content"], list):
        fields["content"] = [_unrefused(part, "text") for part in fields["content"]]
    if fields["content"] is None:
        fields["content"] = message.get("refusal")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    if fields["content"] is None and (reasoning is not None or message.get("prefix")):
        fields["content"] = ""
    if message.get("tool_calls"):
        fields["tool_calls"] = [
            _call(call, (*path, "tool_calls", place), notes)
            for place, call in enumerate(message["tool_calls"])
        ]
    return fields


def _call(call: dict[str, Any], path: Path, notes: Notes) -> dict[str, Any]:
    function = call["function"]
    where = (*path, "function", "name")
    spaces = {space for space in (call.get("namespace"), function.get("namespace")) if space}
    if len(spaces) > 1:
        notes.fail((*path, "namespace"), "is not the function's. Send it once.")
    name = qualified(function["name"], spaces.pop() if spaces else None, where, notes)
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        parsed = parse_arguments(arguments)
        # What is no object stays as it is; the recipe makes one parameter of it.
        arguments = arguments if parsed is None else json.dumps(parsed, ensure_ascii=False)
    else:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _blocks(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = [_block(block) for block in content if block["type"] != "redacted_thinking"]
    return {"role": message["role"], "content": content}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """Plain text of documents, also inside results; everything else stays."""
    if block["type"] == "document":
        title = f"{block['title']}\n\n" if "title" in block else ""
        return {"type": "text", "text": title + block["source"]["data"]}
    if block["type"] == "tool_result" and isinstance(block.get("content"), list):
        return {**block, "content": [_block(inner) for inner in block["content"]]}
    return block


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "message" and isinstance(item["content"], list):
        return {**item, "content": [_unrefused(part, "output_text") for part in item["content"]]}
    if item["type"] == "function_call":
        parsed = parse_arguments(item["arguments"])
        if parsed is not None:
            return {**item, "arguments": json.dumps(parsed, ensure_ascii=False)}
    return item


def _unrefused(part: dict[str, Any], kind: str) -> dict[str, Any]:
    """A refusal is text that the model wrote."""
    return {"type": kind, "text": part["refusal"]} if part["type"] == "refusal" else part
