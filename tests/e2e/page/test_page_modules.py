"""The page's own logic, module by module, run by the browser that will run it."""

from collections.abc import Iterator
from typing import Any

import pytest
from playing import PIXEL, REPLY, visiting
from playwright.sync_api import Browser, Page

EVENTS = (
    'event: a\r\ndata: {"x":1}\r\n\r\n: ping\n\ndata: one\ndata:two\n\ndata\n\rdata: [DONE]\r\rx'
)
READ = [
    {"event": "a", "data": '{"x":1}'},
    {"event": "", "data": "one\ntwo"},
    {"event": "", "data": ""},
    {"event": "", "data": "[DONE]"},
]


@pytest.fixture(scope="module")
def page(browser: Browser, address: str) -> Iterator[Page]:
    """One page for all; none of it is clicked."""
    with visiting(browser, address) as visit:
        yield visit.page
        assert visit.complaints == []


def call(page: Page, module: str, code: str, given: Any = None) -> Any:
    """The value of a call of one of a module's functions; ``given`` may be used in it."""
    name = code.partition("(")[0]
    script = f"""async (given) => {{
        const {{ {name} }} = await import("/page/{module}");
        return {code};
    }}"""
    return page.evaluate(script, given)


def test_events_are_the_same_wherever_the_stream_is_cut(page: Page) -> None:
    results = page.evaluate(
        """async (text) => {
            const { EventParser } = await import("/page/sse.js");
            const found = new Set();
            for (let cut = 0; cut <= text.length; cut += 1)
                for (const next of [cut, cut + 1, text.length]) {
                    const parser = new EventParser();
                    const parts = [text.slice(0, cut), text.slice(cut, next), text.slice(next)];
                    found.add(JSON.stringify(parts.flatMap((part) => parser.push(part))));
                }
            return [...found].map(JSON.parse);
        }""",
        EVENTS,
    )
    assert results == [READ]


def test_bytes_of_one_character_may_come_apart(page: Page) -> None:
    found = page.evaluate(
        """async () => {
            const { events } = await import("/page/sse.js");
            const bytes = new TextEncoder().encode("data: 木é🌲\\n\\n");
            const body = new ReadableStream({
                start(sink) {
                    for (const byte of bytes) sink.enqueue(Uint8Array.of(byte));
                    sink.close();
                },
            });
            const found = [];
            for await (const event of events(body)) found.push(event.data);
            return found;
        }"""
    )
    assert found == ["木é🌲"]


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("", ""),
        ("one", ""),
        ("one\n", ""),
        ("one\n\n", "one\n\n"),
        ("one\n\ntwo\nthree", "one\n\n"),
        ("one\n```py\na\n\nb", "one\n"),
        ("one\n```py\na\n\nb\n```\n", "one\n```py\na\n\nb\n```\n"),
        ("````\n```\n\n", ""),
        ("~~~\n```\n\n~~~\nrest", "~~~\n```\n\n~~~\n"),
        ("``` not a fence ` \n\nrest", "``` not a fence ` \n\n"),
        ("a\n\n```", "a\n\n"),
    ],
)
def test_only_whole_blocks_are_settled(page: Page, text: str, settled: str) -> None:
    found = call(page, "blocks.js", "settle(given)", text)
    assert found == {"settled": settled, "rest": text[len(settled) :]}


def test_what_is_settled_only_grows(page: Page) -> None:
    lengths = page.evaluate(
        """async (text) => {
            const { settle } = await import("/page/blocks.js");
            return [...text].map((_, end) => settle(text.slice(0, end + 1)).settled.length);
        }""",
        REPLY,
    )
    assert lengths == sorted(lengths)
    assert lengths[-1] > len(REPLY) // 2


LONG = "".join(
    f"Paragraph {n}.\n\n```\ncode {n}\n\nmore\n```\n- a\n\n- b {n}\n\n" for n in range(40)
)


def test_long_texts_come_apart_between_blocks(page: Page) -> None:
    found = call(page, "blocks.js", "pieces(given, 200)", LONG)
    assert "".join(found) == LONG
    assert len(found) == 10
    for piece in found:
        assert piece.count("```") % 2 == 0
        assert not piece.startswith(("- ", " ", "\n"))
        assert len(piece) < 300


def test_the_first_pieces_stay_as_a_text_grows(page: Page) -> None:
    shorter = call(page, "blocks.js", "pieces(given, 200)", LONG[: len(LONG) // 2])
    longer = call(page, "blocks.js", "pieces(given, 200)", LONG)
    assert longer[: len(shorter) - 1] == shorter[:-1]
    assert call(page, "blocks.js", "pieces(given)", "short") == ["short"]
    assert call(page, "blocks.js", "pieces(given)", "") == []
    assert call(page, "blocks.js", "pieces(given)", "x" * 50_000) == ["x" * 50_000]


def test_calls_are_put_together_from_their_parts(page: Page) -> None:
    chunks = [
        [{"index": 1, "id": "b", "function": {"name": "second", "arguments": "{"}}],
        [{"index": 0, "id": "a", "function": {"name": "first"}}],
        [
            {"index": 1, "function": {"arguments": "}"}},
            {"index": 0, "function": {"arguments": "1"}},
        ],
    ]
    calls = page.evaluate(
        """async (chunks) => {
            const { applyChunk, newReply } = await import("/page/conversation.js");
            const reply = newReply();
            for (const tool_calls of chunks)
                applyChunk(reply, { choices: [{ delta: { tool_calls } }] });
            return reply.calls;
        }""",
        chunks,
    )
    assert calls == [
        {"id": "a", "name": "first", "arguments": "1"},
        {"id": "b", "name": "second", "arguments": "{}"},
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ""),
        ("  \n", ""),
        ('[{"type": "function", "function": {"name": "f"}}]', ""),
        ("{", "This is not JSON"),
        ("{}", "Expected a JSON list"),
        ('[{"type": "function", "function": {"name": "f"}}, 1]', "Tool 2 is not"),
        ('[{"name": "f"}]', "Tool 1 is not"),
    ],
)
def test_tool_declarations_are_checked(page: Page, text: str, problem: str) -> None:
    found = call(page, "conversation.js", "toolsProblem(given)", text)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_the_oldest_chats_make_room(page: Page) -> None:
    entries = [{"id": str(age), "changed": age, "size": 10} for age in (3, 1, 4, 2)]
    limits = {"characters": 35, "chats": 9}
    given = [entries, limits]
    assert call(page, "store.js", "outgrown(given[0], given[1])", given) == ["1"]
    assert call(page, "store.js", "outgrown(given[0], {characters: 99, chats: 2})", given) == [
        "1",
        "2",
    ]
    # The newest stays, even if it alone is too large.
    assert call(page, "store.js", "outgrown(given[0], {characters: 1, chats: 1})", given) == [
        "1",
        "2",
        "3",
    ]


def test_pictures_go_before_a_chat_does(page: Page) -> None:
    sizes = page.evaluate(
        """async (pixel) => {
            const { Store, LIMITS } = await import("/page/store.js");
            const store = new Store(localStorage);
            const url = `data:image/png;base64,${pixel}`;
            const chat = {
                id: "large", changed: 1, settings: {},
                messages: [{ role: "user", text: "look", images: [{ name: "n", url }] }],
            };
            const whole = store.save(chat);
            chat.messages[0].images[0].url = "x".repeat(LIMITS.characters);
            const kept = store.save(chat);
            return [whole, kept, store.chat("large").messages[0]];
        }""",
        PIXEL,
    )
    lost = {"role": "user", "text": "look", "images": [{"name": "n", "url": ""}]}
    assert sizes == [True, False, lost]


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([], []),
        ([[0, 10]], [[0, 10]]),
        ([[0, 10], [10, 20], [50, 60]], [[0, 20], [50, 10]]),
        ([[90, 400]], [[90, 10]]),
        ([[200, 300]], []),
    ],
)
def test_selected_ranges_are_drawn_where_they_are(page: Page, ranges: Any, found: Any) -> None:
    assert call(page, "strip.js", "places(given, 100, 100)", ranges) == found


def test_one_selected_token_of_a_million_can_be_seen(page: Page) -> None:
    for start in (0, 500_000, 999_998):
        ((left, width),) = call(
            page, "strip.js", "places(given, 1000000, 300)", [[start, start + 2]]
        )
        assert width >= 1.5
        assert 0 <= left <= 300 - width


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("bytes(0)", "0 B"),
        ("bytes(890)", "890 B"),
        ("bytes(1234)", "1.23 kB"),
        ("bytes(999499)", "999 kB"),
        ("bytes(999600)", "1 MB"),
        ("bytes(5.6e9)", "5.6 GB"),
        ("count(1234567)", "1,234,567"),
        ("counted(1, 'token')", "1 token"),
        ("counted(2, 'token')", "2 tokens"),
        ("short(0.1234)", "0.12"),
        ("short(12.34)", "12.3"),
        ("short(99.96)", "100"),
        ("seconds(61)", "1 min 1 s"),
        ("effortName(50)", "low"),
        ("effortName(51)", ""),
    ],
)
def test_numbers_are_written_for_people(page: Page, code: str, text: str) -> None:
    assert call(page, "format.js", code) == text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("ratio(10, 970)", "1/97 of"),
        ("ratio(10, 25)", "1/2.5 of"),
        ("ratio(30, 15)", "2 times"),
        ("ratio(0, 15)", ""),
    ],
)
def test_sizes_are_compared(page: Page, code: str, text: str) -> None:
    assert call(page, "panel.js", code) == text


def test_drafts_are_told_by_place_or_in_all(page: Page) -> None:
    assert call(page, "panel.js", "draftPlaces([9, 4, 0], [8, 1])") == [
        {"drafted": 9, "accepted": 8},
        {"drafted": 4, "accepted": 1},
    ]
    assert call(page, "panel.js", "draftPlaces(9, 8)") == [{"drafted": 9, "accepted": 8}]
    assert call(page, "panel.js", "draftPlaces()") == []


def test_an_export_cannot_break_out_of_its_code_block(page: Page) -> None:
    chat = {
        "created": 0,
        "settings": {"system": ""},
        "messages": [
            {"role": "user", "text": "Ünï: cöde / & more!", "images": [{"name": "p", "url": ""}]},
            {"role": "tool", "name": "f", "call": "1", "text": "a\n```\nb"},
        ],
    }
    text = call(page, "exporting.js", "asMarkdown(given, 'tiny')", chat)
    assert "````\na\n```\nb\n````" in text
    assert "*(picture: p)*" in text
    assert call(page, "exporting.js", "fileName(given, 'md')", chat) == "uni-code-more.md"
