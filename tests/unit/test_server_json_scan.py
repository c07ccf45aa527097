"""The look at JSON bytes before any parser, against plain ways to find the same."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cedar.server.errors import ApiError
from cedar.server.json_scan import JsonScanner


def naive(data: bytes) -> tuple[int, int]:
    """(deepest, values) by looking at one byte after the other."""
    depth = deepest = values = 0
    inside = escaped = False
    for byte in data:
        if byte == 0x5C:
            escaped = not escaped
            continue
        if byte == 0x22 and not escaped:
            inside = not inside
        elif not inside:
            depth += (byte in b"[{") - (byte in b"]}")
            values += byte in b"[{,"
        escaped = False
        deepest = max(deepest, depth)
    return deepest, values


def refused_code(data: bytes, cuts: Sequence[int], depth: int, values: int) -> str | None:
    scanner = JsonScanner(depth=depth, values=values)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    try:
        for start, stop in itertools.pairwise(edges):
            scanner.feed(data[start:stop])
        scanner.finish()
    except ApiError as error:
        return error.code
    return None


@settings(deadline=None, max_examples=400)
@given(
    data=st.text('[]{},:"\\ ab1é', max_size=60).map(str.encode),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
@example(data=b'"\\n"[[', cuts=[2, 3])
@example(data=b'"\\\\"[[', cuts=[2])
@example(data=b'\\\\"[', cuts=[1])
@example(data=b'"\\\\\\"[[', cuts=[2, 3, 4])
def test_the_scan_equals_a_plain_one_whatever_the_pieces(data: bytes, cuts: list[int]) -> None:
    deepest, values = naive(data)
    assert refused_code(data, cuts, max(deepest, 1), max(values, 1)) is None
    if deepest > 1:
        assert refused_code(data, cuts, deepest - 1, 10**6) == "too_deep"
    if values > 1:
        assert refused_code(data, cuts, 10**6, values - 1) == "too_many_values"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@settings(deadline=None)
@given(value=json_values, ascii=st.booleans(), cut=st.integers(0, 100))
def test_the_depth_is_that_of_the_parsed_document(value: Any, ascii: bool, cut: int) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "replace")
    depth = depth_of(json.loads(data))
    assert naive(data)[0] == depth
    assert refused_code(data, [cut], max(depth, 1), 10**6) is None
    if depth > 1:
        assert refused_code(data, [cut], depth - 1, 10**6) == "too_deep"


def test_long_bodies_are_scanned_across_blocks() -> None:
    picture = b"A" * 200_000
    for extra in range(65_530, 65_540):
        data = b'["' + b"\\\\" * (extra // 2) + b"x" * (extra % 2) + b'\\"[[[[' + picture + b'", [['
        assert refused_code(data, [], 3, 10) is None
        assert refused_code(data, [], 2, 10) == "too_deep"
