"""The grammar of tool calls (DSML), as `cedar.inputs.chat` reads them.

```
<｜DSML｜ calls>
<｜DSML｜ invoke name="NAME">
<｜DSML｜ parameter name="KEY" string="true">text</｜DSML｜ parameter>
<｜DSML｜ parameter name="KEY" string="false">JSON</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>
```

``｜DSML｜`` is one control token; everything around it is text. Strings stand as they are between
``string="true">`` and the next ``</｜DSML｜``; all other values are JSON. The parameters of a call
come in any order, each at most once, the required ones for certain and no others. A call without
parameters has one empty line in their place.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cedar.engine.grammar.compiler import GrammarCompiler, inline
from cedar.engine.grammar.schema import SchemaReader
from cedar.engine.grammar.values import ANY_TEXT, Value, read_value
from cedar.errors import RequestError

__all__ = ["calls_grammar"]

_NAME = re.compile(r'[^"<>\r\n]+')
# A rule can count in 64 bits, one for each parameter of a call.
_MOST_PARAMETERS = 60
_AROUND = frozenset(
    ("$anchor", "$defs", "$id", "$schema", "additionalProperties", "definitions", "id")
) | {"properties", "required", "type"}
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
_NOTHING = Value(None, None)
_ANYTHING = Value(ANY_TEXT, {"type": ["null", "boolean", "number", "array", "object"]})


class _Field(NamedTuple):
    name: str
    required: bool
    value: Value


def calls_grammar(
    tools: Any,
    compiler: GrammarCompiler,
    *,
    marker: int,
    required: bool,
    max_calls: int | None,
    opened: bool,
    otherwise: str | None,
) -> str:
    """A grammar of answers that call tools.

    tools: a list of ``{"name", "parameters", "strict"}``; a tool that is not strict takes what its
    schema says as far as that can be enforced. marker: the control token's id. required: the
    answer is a block of calls; else it is text that may end in one. max_calls: the most in a block.
    opened: the block's first line is in the prompt. otherwise: a rule for answers without calls,
    before which no text comes then; None for any text.
    Raises `RequestError` naming tool, parameter, keyword and place.
    """
    if not isinstance(tools, list) or not tools:
        raise RequestError(f"the tools are {tools!r}; expected a list of one or more.")
    mark = f"<[{marker}]>"
    writer = _Writer(mark, compiler)
    for k, tool in enumerate(tools):
        writer.tool(k, tool)
    names = " | ".join(f"call_{k}" for k in range(len(tools)))
    most = "" if max_calls is None else max(max_calls, 1)
    open_block = f'{mark} " calls>\\n" calls'
    if opened:
        start = "calls"
    elif required:
        start = f'"\\n\\n<" {open_block}'
    elif otherwise is not None:
        start = f'"\\n\\n<" {open_block} | otherwise'
    else:
        start = f"TEXT | TEXT_AND_BLOCK {open_block}"
    rules = [f"start: {start}", f'calls: call{{1,{most}}} "</" {mark} " calls>"', f"call: {names}"]
    if " otherwise" in start:
        rules.append(f"otherwise: {otherwise}")
    if "TEXT" in start:
        rules += [f"TEXT: {ANY_TEXT}", f'TEXT_AND_BLOCK: {ANY_TEXT} "\\n\\n<"']
    return "\n".join([*rules, *writer.rules])


class _Writer:
    """Collects the rules ``call_0``, ``call_1``, ..."""

    def __init__(self, mark: str, compiler: GrammarCompiler) -> None:
        self.rules: list[str] = []
        self._mark = mark
        self._compiler = compiler

    def tool(self, k: int, tool: Mapping[str, Any]) -> None:
        name = tool["name"]
        if not _NAME.fullmatch(name):
            raise RequestError(f'tool name {name!r}: expected one line without ", < and >.')
        fields = self._fields(
            f"tool {name!r}", tool.get("parameters") or {}, bool(tool.get("strict"))
        )
        if fields is None:
            self._any_parameters(k)
        else:
            self._parameters(k, fields)
        head = _quoted(f' invoke name="{name}">\n')
        tail = _quoted(" invoke>\n")
        self.rules.append(f'call_{k}: "<" {self._mark} {head} body_{k} "</" {self._mark} {tail}')

    def _fields(self, owner: str, schema: Any, strict: bool) -> list[_Field] | None:
        """The parameters of a tool; None for any parameters."""
        checked: dict[str, Any] | None
        if strict:
            checked = self._checked(owner, schema)
        elif _is_plain(schema):
            checked = self._compiler.fits(schema)
        else:
            return None
        properties = dict(schema.get("properties", {}))
        required = [name for name in schema.get("required", ()) if isinstance(name, str)]
        for name in required:
            others = schema.get("additionalProperties", True) if strict else True
            properties.setdefault(name, others)
        problem = _problem(list(properties))
        if problem is not None:
            if not strict:
                return None
            raise RequestError(f"{owner} {problem}")
        fields = []
        for name, each in properties.items():
            if each is not False:
                value = self._value(f"{owner}, parameter {name!r}", name, schema, checked, strict)
                if value != _NOTHING:  # else no value fits, so it cannot be given
                    fields.append(_Field(name, name in required, value))
        return fields

    def _value(
        self, place: str, name: str, schema: Any, checked: dict[str, Any] | None, strict: bool
    ) -> Value:
        """What one parameter may be; anything if the tool is not strict and no more is certain."""
        known = name in schema.get("properties", {})
        each = schema["properties"][name] if known else schema.get("additionalProperties", True)
        if not isinstance(each, dict) or not (known or strict):
            return _ANYTHING
        if checked is None:
            read = self._compiler.fits({**_definitions(schema), **each})
            around = {} if read is None else _definitions(read)
        else:
            read = checked["properties"][name] if known else checked["additionalProperties"]
            around = _definitions(checked)
        if read is None:
            return _ANYTHING
        try:
            return read_value(
                each,
                read,
                definitions=_definitions(schema),
                checked_definitions=around,
                compiler=self._compiler,
                name=place,
            )
        except RequestError:
            if strict:
                raise
            return _ANYTHING

    def _checked(self, owner: str, schema: Any) -> dict[str, Any]:
        """A strict tool's parameters, of which only ``properties`` are more than one's own."""
        name = f"the parameters of {owner}"
        checked = self._compiler.check(schema, name)
        kinds = checked.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            SchemaReader(name).refuse("#/type", "the parameters of a tool are an object")
        known = checked.get("properties", {})
        for keyword, value in checked.items():
            enough = keyword == "maxProperties" and value >= len(known)
            enough |= keyword == "minProperties" and value <= len(checked.get("required", ()))
            if keyword not in _AROUND and not enough:
                SchemaReader(name).refuse(
                    f"#/{keyword}", 'at the top, a tool has "properties" and which are "required"'
                )
        return checked

    def _parameters(self, k: int, fields: list[_Field]) -> None:
        if not fields:
            self.rules.append(f'body_{k}: "\\n"')
            return
        fields = sorted(fields, key=lambda field: not field.required)
        needed = sum(field.required for field in fields)
        # A bit for each parameter that has come, the required ones first.
        first = [] if needed else ['"\\n"']
        more = ['""' + (f" %if is_ones([0:{needed}])" if needed else "")]
        for i, field in enumerate(fields):
            label = f"{k}_{i}"
            first.append(f"parameter_{label} more_{k}::0x{1 << i:x}")
            more.append(f"parameter_{label} more_{k}::set_bit({i}) %if bit_clear({i})")
            head = _quoted(f' parameter name="{field.name}" string="')
            self._parameter(label, head, field.value)
        self.rules += [f"body_{k}: {' | '.join(first)}", f"more_{k}::_ : " + "\n  | ".join(more)]

    def _any_parameters(self, k: int) -> None:
        self.rules += [f'body_{k}: "\\n" | parameter_{k}+', f"NAME_{k}: /{_NAME.pattern}/"]
        self._parameter(str(k), f'" parameter name=\\"" NAME_{k} "\\" string=\\""', _ANYTHING)

    def _parameter(self, label: str, head: str, value: Value) -> None:
        tail = f"{self._mark} {_quoted(' parameter>' + chr(10))}"
        forms = []
        if value.text is not None:
            forms.append(f'"true\\">" TEXT_{label} {tail}')
            # With the bracket: a text goes on until the control token, over any other "</".
            self.rules.append(f'TEXT_{label}: {value.text} "</"')
        if value.json is not None:
            forms.append(f'"false\\">" json_{label} "</" {tail}')
            self.rules.append(f"json_{label}: {inline(value.json)}")
        self.rules += [
            f'parameter_{label}: "<" {self._mark} {head} value_{label}',
            f"value_{label}: {' | '.join(forms)}",
        ]


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _problem(names: list[str]) -> str | None:
    """What keeps parameters from being written, if anything does."""
    unfit = [name for name in names if not _NAME.fullmatch(name)]
    if unfit:
        return f'has a parameter {unfit[0]!r}; expected a name of one line without ", < and >.'
    if len(names) > _MOST_PARAMETERS:
        return (
            f"has {len(names)} parameters; a strict tool may have {_MOST_PARAMETERS}. Put some "
            "into an object."
        )
    return None


def _is_plain(schema: Any) -> bool:
    """Whether a schema lists its properties, as a tool's nearly always does."""
    if not isinstance(schema, dict) or any(keyword in schema for keyword in _OPEN):
        return False
    properties, names = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(names, list):
        return False
    return bool(properties) or not schema.get("additionalProperties", False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
