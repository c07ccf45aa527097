"""Markdown of replies to HTML that is safe to put into a page.

A model's text is foreign: it may repeat what a document or a tool told it. So raw HTML stays text,
links keep only harmless schemes, pictures become links (loading one would tell its host what was
said), and what the renderer gives passes an allow-list once more.
"""

import re
from collections.abc import Sequence
from functools import partial

import nh3
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

__all__ = ["MarkdownRenderer"]

_TEXT_TAGS = frozenset({"a", "br", "code", "em", "hr", "p", "s", "strong"})
_BLOCK_TAGS = frozenset({"blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ol", "pre", "ul"})
_TABLE_TAGS = frozenset({"table", "tbody", "td", "th", "thead", "tr"})
_ATTRIBUTES = {
    "a": {"href", "title"},
    "code": {"class"},
    "ol": {"start"},
    "td": {"align"},
    "th": {"align"},
}
_SCHEMES = frozenset({"http", "https", "mailto"})
_ABSOLUTE = re.compile(r"(https?|mailto):", re.IGNORECASE)
_LANGUAGE = re.compile(r"language-[\w+#.-]{1,40}")
_ALIGNED = re.compile(r"text-align:(left|center|right)")


class MarkdownRenderer:
    """CommonMark with tables and strikethrough; no raw HTML, no bare links.

    The time grows linearly with the text, also for text that was made to be slow; nesting is
    bounded at 20 levels.
    """

    def __init__(self) -> None:
        self._markdown = MarkdownIt("commonmark", {"html": False, "linkify": False})
        self._markdown.enable(["table", "strikethrough"])
        self._markdown.add_render_rule("image", _image_as_link)
        for cell in ("th_open", "td_open"):
            self._markdown.add_render_rule(cell, _aligned_cell)
        self._clean = partial(
            nh3.clean,
            tags=set(_TEXT_TAGS | _BLOCK_TAGS | _TABLE_TAGS),
            clean_content_tags={"script", "style"},
            attributes=_ATTRIBUTES,
            attribute_filter=_kept_value,
            url_schemes=set(_SCHEMES),
            set_tag_attribute_values={"a": {"target": "_blank"}},
            link_rel="noopener noreferrer nofollow",
        )

    def render(self, text: str) -> str:
        """The HTML of ``text``: only the tags and attributes of the allow-list."""
        return self._clean(self._markdown.render(text))


def _kept_value(tag: str, attribute: str, value: str) -> str | None:
    """The value of an attribute, or None to drop it."""
    if tag == "code" and attribute == "class" and not _LANGUAGE.fullmatch(value):
        return None
    # A relative link would lead into the server's own paths.
    if attribute == "href" and not _ABSOLUTE.match(value):
        return None
    return value


def _image_as_link(
    renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    options: OptionsDict,
    env: EnvType,
) -> str:
    token = tokens[index]
    label = renderer.renderInlineAsText(token.children, options, env) or "picture"
    # renderInlineAsText gives plain text; a code token writes it escaped.
    shown = Token("text", "", 0, content=label)
    link = Token("link_open", "a", 1, attrs={"href": token.attrs.get("src", "")})
    parts = (link, shown, Token("link_close", "a", -1))
    return renderer.renderInline(parts, options, env)


def _aligned_cell(
    renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    options: OptionsDict,
    env: EnvType,
) -> str:
    """A table cell's alignment as an attribute: the page's policy forbids style attributes."""
    token = tokens[index]
    aligned = _ALIGNED.fullmatch(str(token.attrs.pop("style", "")))
    if aligned:
        token.attrs["align"] = aligned[1]
    return renderer.renderToken(tokens, index, options, env)
