"""Markdown of replies: what people want is rendered, what could act is not."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from cedar.server.markdown import MarkdownRenderer

ALLOWED = {
    "a": {"href", "title", "target", "rel"},
    "code": {"class"},
    "ol": {"start"},
    "td": {"align"},
    "th": {"align"},
    **dict.fromkeys(
        "blockquote br em h1 h2 h3 h4 h5 h6 hr li p pre s strong table tbody thead tr ul".split(),  # noqa: SIM905
        frozenset[str](),
    ),
}


class Reader(HTMLParser):
    """Collects everything in a document that is not plainly harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ALLOWED:
            self.problems.append(f"<{tag}>")
            return
        for name, value in attributes:
            if name not in ALLOWED[tag]:
                self.problems.append(f"{tag} {name}")
            elif name == "href" and not re.match(r"(https?|mailto):", value or "", re.IGNORECASE):
                self.problems.append(f"href {value}")


def problems(html: str) -> list[str]:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader.problems


@pytest.fixture(scope="module")
def renderer() -> MarkdownRenderer:
    return MarkdownRenderer()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**b** *i* `c` ~~s~~", "<p><strong>b</strong> <em>i</em> <code>c</code> <s>s</s></p>\n"),
        ("# T\n\n> q", "<h1>T</h1>\n<blockquote>\n<p>q</p>\n</blockquote>\n"),
        ("3. a\n4. b", '<ol start="3">\n<li>a</li>\n<li>b</li>\n</ol>\n'),
        ("```c++\na < b\n```", '<pre><code class="language-c++">a &lt; b\n</code></pre>\n'),
        ("```\nx\n```", "<pre><code>x\n</code></pre>\n"),
    ],
)
def test_ordinary_text_is_rendered(renderer: MarkdownRenderer, text: str, html: str) -> None:
    assert renderer.render(text) == html


def test_links_open_elsewhere_and_tell_nothing(renderer: MarkdownRenderer) -> None:
    assert renderer.render('[a](https://b.example/ "t")') == (
        '<p><a href="https://b.example/" title="t" target="_blank" '
        'rel="noopener noreferrer nofollow">a</a></p>\n'
    )


def test_table_cells_are_aligned_without_styles(renderer: MarkdownRenderer) -> None:
    html = renderer.render("| a | b | c |\n| :-- | --: | --- |\n| 1 | 2 | 3 |")
    assert '<th align="left">a</th>' in html
    assert '<td align="right">2</td>' in html
    assert "<td>3</td>" in html
    assert "style" not in html


def test_pictures_become_links(renderer: MarkdownRenderer) -> None:
    html = renderer.render("![a *b* <c>](https://d.example/e.png)")
    assert "<img" not in html
    assert re.search(r'<a href="https://d.example/e.png"[^>]*>a b &lt;c&gt;</a>', html)
    assert ">picture</a>" in renderer.render("![](https://d.example/e.png)")


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg/onload=alert(1)>",
        '<a href="javascript:alert(1)">a</a>',
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](<java&NewLine;script:alert(1)>)",
        "[a](data:text/html,<script>alert(1)</script>)",
        "[a](vbscript:x)",
        "[a](file:///etc/passwd)",
        "[a](/v1/models)",
        "[a](//b.example)",
        "[a]: javascript:alert(1)\n\n[a]",
        "<javascript:alert(1)>",
        "![a](data:image/svg+xml,<svg onload=alert(1)>)",
        "![a](javascript:alert(1))",
        '![" onerror="alert(1)](https://b.example)',
        '[a](https://b.example "\\" onclick=\\"alert(1)")',
        '```x" onclick="alert(1)\ny\n```',
        '```"><script>\ny\n```',
        "<style>*{display:none}</style>",
        "<iframe src=https://b.example></iframe>",
        "<form action=https://b.example><button>a</button></form>",
        "<!-- --><base href=https://b.example>",
        "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
        "`<script>`<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
        "a\u0000<script>alert(1)</script>",
        "|a|\n|-|\n|<img src=x onerror=alert(1)>|",
    ],
)
def test_nothing_can_act(renderer: MarkdownRenderer, text: str) -> None:
    assert problems(renderer.render(text)) == []


def test_the_check_itself_can_fail() -> None:
    careless = MarkdownIt("commonmark", {"html": True})
    hostile = "<script>a</script>\n\n<img src=x onerror=a>\n\n[a](/b) ![a](https://b.example/c)"
    found = problems(careless.render(hostile))
    assert {"<script>", "<img>", "href /b"} <= set(found)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"<>[]()!`*_~|#\"'&;:/\\\n\t -=a1",
                "<script",
                "onerror=",
                "javascript:",
                "data:",
                "&#x3c;",
                "```",
                "\n\n",
                "![",
                "](",
                "|-|",
            ]
        ),
        max_size=60,
    ).map("".join)
)
def test_no_mixture_of_marks_can_act(text: str) -> None:
    assert problems(MarkdownRenderer().render(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        "![" * 30_000,
        "> " * 30_000 + "a",
        "*a **b " * 8_000,
        "`" * 60_000,
        "- " * 20_000,
        "<" * 60_000,
        "|" + "a|" * 2000 + "\n|" + "-|" * 2000 + "\n" + "|\n" * 2000,
    ],
    ids=["brackets", "pictures", "quotes", "emphasis", "ticks", "lists", "angles", "cells"],
)
def test_text_made_to_be_slow_ends(renderer: MarkdownRenderer, text: str) -> None:
    assert problems(renderer.render(text)) == []
