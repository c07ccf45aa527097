"""The keywords of JSON schemas (draft 4 to 2020-12) by what becomes of them in a grammar."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "ANNOTATIONS",
    "ENFORCED",
    "LISTED",
    "NAMED",
    "NO_EFFECT",
    "ONE",
    "REMEDIES",
    "VALUES",
]

# Keywords whose value is a schema, a list of schemas, schemas by name.
ONE = ("additionalItems", "additionalProperties", "items")
LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "patternProperties", "properties")
# Keywords whose value constrains, or is needed for others to be understood.
VALUES = (
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "multipleOf",
    "maxProperties",
    "minProperties",
)
KEPT = ("$anchor", "$id", "$ref", "$schema", "id", "required", "type")
REWRITTEN = ("format", "pattern")
ANNOTATIONS = (
    "$comment",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
)
NO_EFFECT: Mapping[str, Any] = MappingProxyType(
    {
        "nullable": False,
        "unevaluatedItems": True,
        "unevaluatedProperties": True,
        "uniqueItems": False,
    }
)
REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "contentEncoding": 'Use "pattern"',
        "dependentRequired": 'Use "anyOf" with "required"',
        "if": 'Use "anyOf"',
        "nullable": 'Use "type": [..., "null"]',
        "not": 'Use "enum" or "anyOf" for what is allowed',
        "oneOf": 'Use "anyOf", or give each alternative a required property with its own "const"',
        "propertyNames": 'Use "patternProperties" with "additionalProperties": false',
        "uniqueItems": 'Check it in the answer, or use "enum" items with "maxItems": 1',
        "x-guidance": "Leave it out",
    }
)
ENFORCED = (*ONE, *LISTED, *NAMED, *VALUES, *KEPT, *REWRITTEN)
