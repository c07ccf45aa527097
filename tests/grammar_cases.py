"""Schemas for the tests of grammars: one for each keyword, some of many, random ones."""

from typing import Any

from hypothesis import strategies as st

__all__ = ["ENFORCED", "IDENTIFYING", "KEYWORDS", "REFUSED", "TOGETHER", "schemas"]

_NULL = {"type": "null"}
_BOOLEAN = {"type": "boolean"}
_INTEGER = {"type": "integer"}
_SMALL = {"type": "integer", "minimum": 0, "maximum": 20}
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"

# Keyword -> schema, documents that fit, documents that do not and would without the keyword.
ENFORCED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "type": ({"type": ["string", "null"]}, ["a", None], [1, True, [], {}]),
    "const": ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}, 1]),
    "enum": ({"enum": ["a", 2, None, [True]]}, ["a", 2, None, [True]], ["b", 3, True, []]),
    "minimum": ({"type": "number", "minimum": -1.5}, [-1.5, 0, 7.25], [-1.6, -20]),
    "maximum": ({"type": "number", "maximum": 12}, [12, -3, 11.99], [12.01, 13, 120]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, [4, 30], [3, 2, -4]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, [2, -30], [3, 4, 20]),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, [0.25, 3, 1.75], [0.3, 1.2]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "é😀"], ["", "a", "😀"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "é😀"], ["abc", "a😀b"]),
    "pattern": ({"type": "string", "pattern": "^a.*z$|q"}, ["az", "abz", "xqx"], ["a", "xaz"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    "items": ({"type": "array", "items": _BOOLEAN}, [[], [True]], [[1], [True, None]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [_BOOLEAN, _NULL]},
        [[], [True], [True, None, 3]],
        [[1], [True, 1]],
    ),
    "additionalItems": (
        {"$schema": _DRAFT_7, "type": "array", "items": [_BOOLEAN], "additionalItems": _NULL},
        [[True], [True, None, None]],
        [[True, 1]],
    ),
    "minItems": ({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    "maxItems": ({"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    "properties": ({"type": "object", "properties": {"a": _NULL}}, [{}, {"a": None}], [{"a": 1}]),
    "required": (
        {"type": "object", "required": ["a", "b"]},
        [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}],
        [{}, {"a": 1}, {"b": 2, "c": 3}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": _NULL}, "additionalProperties": _BOOLEAN},
        [{"a": None, "b": True}],
        [{"b": 1}, {"a": None, "c": None}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": _NULL}},
        [{"ab": None, "b": 1}],
        [{"ab": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "allOf": ({"allOf": [_SMALL, {"multipleOf": 7}]}, [0, 7, 14], [1, 21, -7, "a"]),
    "anyOf": ({"anyOf": [_BOOLEAN, {"type": "string", "maxLength": 1}]}, [True, "a"], ["ab", 1]),
    "oneOf": ({"oneOf": [_BOOLEAN, {"const": "a"}]}, [True, "a"], ["b", 1]),
    "$ref": (
        {"$defs": {"x/y": _SMALL}, "items": {"$ref": "#/$defs/x~1y"}, "type": "array"},
        [[1, 20]],
        [[21], ["a"]],
    ),
}

IDENTIFYING: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {
            "$defs": {"x": {"$anchor": "small", **_SMALL}},
            "items": {"$ref": "#small"},
            "type": "array",
        },
        [[1]],
        [[21]],
    ),
    (
        {
            "$id": "https://example.com/a",
            "$defs": {"x": {"$id": "b", **_SMALL}},
            "items": {"$ref": "b"},
            "type": "array",
        },
        [[1]],
        [[21]],
    ),
    (
        {
            "$schema": _DRAFT_7,
            "definitions": {"x": _SMALL},
            "items": {"$ref": "#/definitions/x"},
            "type": "array",
        },
        [[1]],
        [[21]],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "https://example.com/a",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        [4],
        [3],
    ),
]

REFUSED: dict[str, Any] = {
    "$dynamicAnchor": "a",
    "$dynamicRef": "#a",
    "$recursiveAnchor": True,
    "$recursiveRef": "#",
    "$vocabulary": {},
    "contains": _NULL,
    "contentEncoding": "base64",
    "contentMediaType": "text/plain",
    "contentSchema": {},
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "disallow": "null",
    "divisibleBy": 2,
    "else": {},
    "extends": {},
    "if": {},
    "maxContains": 1,
    "minContains": 1,
    "not": _NULL,
    "nullable": True,
    "propertyNames": {"maxLength": 3},
    "then": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
    # Not of any draft.
    "maxlength": 3,
    "enumm": [1],
    "x-guidance": {"lenient": True},
}

# The vocabularies of drafts 3, 4, 6, 7, 2019-09 and 2020-12, and of OpenAPI's schema objects.
KEYWORDS = [
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$dynamicRef",
    "$id",
    "$recursiveAnchor",
    "$recursiveRef",
    "$ref",
    "$schema",
    "$vocabulary",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "deprecated",
    "description",
    "disallow",
    "discriminator",
    "divisibleBy",
    "else",
    "enum",
    "example",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "extends",
    "externalDocs",
    "format",
    "id",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "nullable",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "readOnly",
    "required",
    "then",
    "title",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "writeOnly",
    "xml",
]


def _closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False} | more


TOGETHER: dict[str, dict[str, Any]] = {
    "enum of many types": {"enum": [1, "a", None, True, [1], {"a": 1}, 1.5, -0.0, 1e20, 1e-7, ""]},
    "enum and type": {"type": "string", "enum": ["a", 1]},
    "enum and pattern": {"enum": ["ab", "cd"], "pattern": "^a"},
    "enum and minimum": {"enum": [1, 5, 9], "minimum": 4},
    "enum and required": {"enum": [{"a": 1}, {"b": 1}], "required": ["a"]},
    "const with escapes": {"const": 'a"b\\c\nd\té'},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": _SMALL}, "required": ["a"]},
            {
                "type": "object",
                "properties": {"b": _BOOLEAN},
                "required": ["b"],
                "maxProperties": 2,
            },
        ]
    },
    "allOf of multiples": {"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]},
    "allOf of patterns": {
        "type": "string",
        "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 4}],
    },
    "allOf of arrays": {
        "allOf": [
            {"type": "array", "prefixItems": [_INTEGER, _BOOLEAN]},
            {"items": {"type": ["integer", "boolean"]}, "maxItems": 3},
        ]
    },
    "anyOf beside properties": {
        **_closed({"a": _NULL, "b": _NULL}),
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "anyOf that begin alike": {
        "anyOf": [
            _closed({"k": {"const": "x"}, "v": _SMALL}, required=["k", "v"]),
            _closed({"k": {"const": "y"}, "v": _BOOLEAN}, required=["k", "v"]),
        ]
    },
    "oneOf, tagged": {
        "oneOf": [
            _closed({"k": {"const": "x"}, "v": _SMALL}, required=["k", "v"]),
            _closed({"k": {"const": "y"}, "v": _BOOLEAN}, required=["k", "v"]),
        ]
    },
    "$ref with more beside it": {"$defs": {"x": _SMALL}, "$ref": "#/$defs/x", "multipleOf": 7},
    "a tree": {
        "$defs": {
            "node": _closed(
                {
                    "v": _BOOLEAN,
                    "c": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                required=["v", "c"],
            )
        },
        "$ref": "#/$defs/node",
    },
    "keys with escapes": {
        "type": "object",
        "properties": {'a"b\\é/': _SMALL},
        "additionalProperties": _BOOLEAN,
        "required": ['a"b\\é/'],
        "maxProperties": 2,
    },
    "patternProperties, properties and the rest": {
        "type": "object",
        "properties": {"ab": {"type": ["integer", "null"]}},
        "patternProperties": {"^a": _NULL, r"^\s": _BOOLEAN},
        "additionalProperties": {"type": "string", "maxLength": 3},
    },
    "a property that may not be": {
        "type": "object",
        "properties": {"a": False},
        "maxProperties": 2,
    },
    "no type": {"minimum": 3, "maxLength": 2, "maxItems": 1, "maxProperties": 1},
    "a pattern of other dialects": {"type": "string", "pattern": r'^[^\s"][\w.-]{0,3}[^"\\]$'},
    "a tuple": {"type": "array", "prefixItems": [_SMALL], "items": False, "minItems": 1},
    "nothing": {},
}

_bounds = st.integers(-20, 20)
_sizes = st.integers(0, 3)
_keys = st.sampled_from(["a", "b", "ab", "é", 'q"', "x y"])
_values = st.recursive(
    st.none() | st.booleans() | _bounds | st.text('ab\\"é\n', max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_keys, inner, max_size=2),
    max_leaves=4,
)
_leaves = st.one_of(
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["null", "boolean"])),
    st.builds(lambda value: {"const": value}, _values),
    st.builds(lambda values: {"enum": values}, st.lists(_values, min_size=1, max_size=3)),
    st.builds(
        lambda low, wide, many: {
            "type": "integer",
            "minimum": low,
            "maximum": low + wide,
            "multipleOf": many,
        },
        _bounds,
        st.integers(0, 30),
        st.integers(1, 7),
    ),
    st.builds(
        lambda low, wide: {"type": "number", "exclusiveMinimum": low, "maximum": low + wide},
        st.floats(-9, 9).map(lambda x: round(x, 2)),
        st.integers(1, 9),
    ),
    st.builds(
        lambda least, wide, more: {
            "type": "string",
            "minLength": least,
            "maxLength": least + wide,
            **more,
        },
        _sizes,
        _sizes,
        st.sampled_from(
            [
                {},
                {"pattern": "^[a-c]"},
                {"pattern": r"\d|\s"},
                {"pattern": '[^"]$'},
                {"pattern": "a.b"},
            ]
        ),
    ),
)


def _containers(inner: Any) -> Any:
    return st.one_of(
        st.builds(
            lambda items, least, wide: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + wide,
            },
            inner,
            _sizes,
            _sizes,
        ),
        st.builds(
            lambda first, rest: {
                "type": "array",
                "prefixItems": first,
                "items": rest,
                "maxItems": 4,
            },
            st.lists(inner, min_size=1, max_size=2),
            inner | st.just(False),
        ),
        st.builds(
            lambda properties, required, rest: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": rest,
            },
            st.dictionaries(_keys, inner, max_size=3),
            st.lists(_keys, max_size=2, unique=True),
            inner | st.booleans(),
        ),
        st.builds(
            lambda keyword, options: {keyword: options},
            st.sampled_from(["anyOf", "allOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda one, two: one | two, inner, inner),
    )


schemas = st.recursive(_leaves, _containers, max_leaves=6)
