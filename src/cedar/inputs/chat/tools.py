"""Tools of a request: one list for all three APIs, and what their choice demands."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cedar.inputs.chat.shape import Notes, Path, nearest
from cedar.inputs.chat.tool_shapes import WEB_SEARCHES
from cedar.inputs.chat.types import Api, Constraint

__all__ = ["Tool", "ToolPlan", "plan_tools", "qualified"]

_NAME = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool of the client.

    name: as it stands in the markup, ``namespace::name`` if it has a namespace. parameters: their
    schema; shown: the schema in the prompt, None if the declaration has none.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    shown: dict[str, Any] | None
    strict: bool = False


# A tool, its declaration as the conversion is to see it, and the path of its name.
_Found = list[tuple[Tool, dict[str, Any], Path]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlan:
    """The tools of a request and its choice among them.

    declared: as the body has them, for the conversion. choice: "auto", "none" or "required". named:
    the only tool that may be called. max_calls: the most calls of one reply, None for any number.
    """

    tools: tuple[Tool, ...] = ()
    declared: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    named: str | None = None
    max_calls: int | None = None

    @property
    def active(self) -> bool:
        """Whether the reply may hold calls."""
        return bool(self.tools) and self.choice != "none"

    def constraint(self, answer: Constraint | None) -> Constraint | None:
        """What a reply must look like whose answer without calls must look like ``answer``."""
        if not self.active:
            return answer
        required = self.choice == "required"
        if not required and answer is None and not any(tool.strict for tool in self.tools):
            return None
        return Constraint(
            kind="tools",
            value=[
                {"name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
                for tool in self.tools
                if self.named in (None, tool.name)
            ],
            required=required,
            max_calls=self.max_calls,
            fallback=None if required else answer,
        )


def plan_tools(api: Api, body: dict[str, Any], notes: Notes) -> ToolPlan:
    """The tools of a checked body; raises `ProtocolError` for names that clash or are unknown."""
    found: _Found = []
    for place, entry in enumerate(body.get("tools", ())):
        read = {Api.CHAT: _chat, Api.RESPONSES: _response, Api.MESSAGES: _block}[api]
        found += read(entry, ("tools", place), notes)
    seen: set[str] = set()
    for tool, _, path in found:
        if tool.name in seen:
            notes.fail(path, f"{tool.name!r} is declared twice.")
        seen.add(tool.name)
    choice, names, path = _choice(api, body)
    for name in names:
        if name not in seen:
            hint = nearest(name, sorted(seen))
            notes.fail(path, f"{name[:100]!r} is no declared tool.{hint}")
    if choice == "required" and not found:
        notes.fail(("tool_choice",), "demands a call, but no tools are declared.")
    if choice == "allowed":
        found = [each for each in found if each[0].name in names]
        choice = _allowed(body["tool_choice"])["mode"]
    named = names[0] if choice == "named" else None
    single = body.get("parallel_tool_calls") is False or named is not None
    if api is Api.MESSAGES:
        single |= body.get("tool_choice", {}).get("disable_parallel_tool_use", False)
    declared: list[dict[str, Any]] = []
    for _, entry, _ in found:
        if not any(entry is other for other in declared):  # a namespace declares several
            declared.append(entry)
    return ToolPlan(
        tools=tuple(tool for tool, _, _ in found),
        declared=tuple(declared),
        choice="required" if named is not None else choice,
        named=named,
        max_calls=1 if single else None,
    )


def qualified(name: str, namespace: str | None, path: Path, notes: Notes) -> str:
    """``namespace::name``; a name that is qualified already keeps its form."""
    if name.count("::") > 1:
        notes.fail(path, "holds :: twice; expected a name, or namespace::name.")
    if "::" in name:
        if namespace not in (None, name.split("::")[0]):
            notes.fail(path, f"has another namespace than {namespace!r}. Send it once.")
        return name
    return name if namespace is None else f"{namespace}::{name}"


def _chat(entry: dict[str, Any], path: Path, notes: Notes) -> _Found:
    function = entry["function"]
    where = (*path, "function", "name")
    inner, outer = _namespace(function.get("namespace")), _namespace(entry.get("namespace"))
    if inner and outer and inner[0] != outer[0]:
        notes.fail((*path, "namespace"), f"is not {inner[0]!r}, the function's. Send it once.")
    space = inner or outer
    name = qualified(function["name"], space[0] if space else None, where, notes)
    tool = _tool(function, name, space[1] if space else None, where, notes)
    return [(tool, {"type": "function", "function": _plain(tool)}, where)]


def _response(entry: dict[str, Any], path: Path, notes: Notes) -> _Found:
    if entry["type"] in WEB_SEARCHES:
        notes.ignore((*path, entry["type"]))
        return []
    if entry["type"] == "custom":
        schema = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
        tool = Tool(name=entry["name"], description=None, parameters=schema, shown=None)
        return [(tool, entry, (*path, "name"))]
    if entry["type"] == "function":
        tool = _tool(entry, entry["name"], None, (*path, "name"), notes)
        return [(tool, {"type": "function", **_plain(tool)}, (*path, "name"))]
    found: _Found = []
    space = entry["name"]
    _check_name(space, (*path, "name"), notes)
    inside: list[dict[str, Any]] = []
    declared = {**entry, "tools": inside}
    for place, function in enumerate(entry["tools"]):
        where = (*path, "tools", place, "name")
        tool = _tool(function, f"{space}::{function['name']}", None, where, notes)
        inside.append({"type": "function", **_plain(tool), "name": function["name"]})
        found.append((tool, declared, where))
    return found


def _block(entry: dict[str, Any], path: Path, notes: Notes) -> _Found:
    where = (*path, "name")
    function = {**entry, "parameters": entry["input_schema"]}
    tool = _tool(function, entry["name"], None, where, notes)
    declared = _plain(tool)
    declared["input_schema"] = declared.pop("parameters")
    return [(tool, declared, where)]


def _tool(function: dict[str, Any], name: str, about: str | None, path: Path, notes: Notes) -> Tool:
    for part in name.split("::"):
        _check_name(part, path, notes)
    schema = function.get("parameters", {})
    if "type" not in schema:
        schema = {"type": "object", **schema} if schema else {"type": "object", "properties": {}}
    if schema["type"] != "object":
        field = "input_schema" if "input_schema" in function else "parameters"
        notes.fail((*path[:-1], field, "type"), 'expected "object": parameters have names.')
    description = function.get("description")
    if about is not None:
        description = about if description is None else f"{about}\n{description}"
    return Tool(
        name=name,
        description=description,
        parameters=schema,
        shown=schema if "parameters" in function else None,
        strict=function.get("strict", False),
    )


def _plain(tool: Tool) -> dict[str, Any]:
    """The declaration without ``strict``: the conversion would rewrite or refuse such schemas."""
    about = {} if tool.description is None else {"description": tool.description}
    schema = {} if tool.shown is None else {"parameters": tool.shown}
    return {"name": tool.name, **about, **schema}


def _namespace(value: str | dict[str, Any] | None) -> tuple[str, str | None] | None:
    if isinstance(value, dict):
        return value["name"], value.get("description")
    return None if value is None else (value, None)


def _check_name(name: str, path: Path, notes: Notes) -> None:
    if not _NAME.fullmatch(name):
        notes.fail(path, f"is {name[:100]!r}; expected letters, digits, _ and - only.")


def _choice(api: Api, body: dict[str, Any]) -> tuple[str, Sequence[str], Path]:
    """The kind of choice, the tools that it names, and where."""
    value = body.get("tool_choice", "auto")
    if isinstance(value, str):
        return value, (), ("tool_choice",)
    kind = value["type"]
    if api is Api.MESSAGES:
        names = (value["name"],) if kind == "tool" else ()
        modes = {"any": "required", "tool": "named"}
        return modes.get(kind, kind), names, ("tool_choice", "name")
    if kind == "allowed_tools":
        allowed = [one.get("function", one)["name"] for one in _allowed(value)["tools"]]
        return "allowed", allowed, ("tool_choice", "tools")
    if api is Api.CHAT:
        function = value["function"]
        space = function.get("namespace")
        name = function["name"] if space is None else f"{space}::{function['name']}"
        return "named", (name,), ("tool_choice", "function", "name")
    return "named", (value["name"],), ("tool_choice", "name")


def _allowed(choice: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = choice.get("allowed_tools", choice)
    return found
