"""From a conversation to the prompt's tokens.

The recipe renders the text and says which parts of it are control tokens. Those become their ids;
everything between is encoded without the added vocabulary, so that no message can forge one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import deepseek_recipe as recipe

from cedar.errors import DataError
from cedar.inputs.chat.messages import Task
from cedar.inputs.chat.types import ProtocolError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["Prompt", "Renderer"]

_EFFORT_LINE = re.compile(r"(Reasoning Effort: )\d+( \(range)")
_IMAGES = ("<｜deepseek_image｜>", "<｜image｜>")
_KINDS = recipe.SpecialToken
_NEEDED = (
    _KINDS.Bos,
    _KINDS.Eos,
    _KINDS.System,
    _KINDS.User,
    _KINDS.Assistant,
    _KINDS.ThinkingStart,
    _KINDS.ThinkingEnd,
    _KINDS.Dsml,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A rendered conversation.

    text: with control tokens spelled out. tokens: its ids. images: the URLs of the images, in the
    order of their placeholders. in_reasoning: the last marker opens the reasoning.
    """

    text: str
    tokens: tuple[int, ...]
    images: tuple[str, ...]
    in_reasoning: bool


# A piece of a prompt, and whether it is a control token.
_Segment = tuple[str, bool]


class Renderer:
    """Renders for one tokenizer; `DataError` if it lacks the protocol's control tokens.

    special: the spellings that the tokenizer has. max_bytes: a longer prompt is refused before it
    is cut into tokens, which takes long; None refuses nothing.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        known = tokenizer.control_ids
        image = next((name for name in _IMAGES if name in known), _IMAGES[0])
        self.special = recipe.SpecialTokens(image=image)
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(self.special)
        missing = [name for kind in _NEEDED if (name := self.spelling(kind)) not in known]
        if missing:
            raise DataError(
                f"the tokenizer has no control tokens {', '.join(missing)}; expected those of the "
                "DeepSeek-V4.1 prompt protocol. Serve plain completions with it instead."
            )

    def spelling(self, kind: recipe.SpecialToken) -> str:
        """How the prompt spells a control token."""
        return self.special.token(kind)

    def render(
        self,
        conversation: recipe.Conversation,
        *,
        effort: int | None = None,
        tasks: Sequence[Task] = (),
    ) -> Prompt:
        """The prompt of a conversation.

        effort: a number in place of the named effort's. tasks: quick tasks by assistant turn; only
        outside thinking mode. Raises `ProtocolError` for a prompt that is too long, and for a
        control token that the tokenizer lacks.
        """
        rendered = self._encoding.render_conversation(conversation)
        size = len(rendered.prompt.encode())
        if self._max_bytes is not None and size > self._max_bytes:
            raise ProtocolError(
                f"the prompt has {size} bytes; what fits has {self._max_bytes} bytes at most. "
                "Shorten the conversation.",
                code="context_length_exceeded",
            )
        segments = _split(rendered.prompt, rendered.special_ranges)
        if effort is not None:
            segments = _with_effort(segments, effort)
        for turn, task in tasks:
            segments = self._with_task(segments, turn, task)
        markers = [
            text == self.spelling(_KINDS.ThinkingStart)
            for text, control in segments
            if control
            and text in (self.spelling(_KINDS.ThinkingStart), self.spelling(_KINDS.ThinkingEnd))
        ]
        return Prompt(
            text="".join(text for text, _ in segments),
            tokens=tuple(self._encode(segments)),
            images=tuple(source.url or "" for source in rendered.image_sources),
            in_reasoning=bool(markers) and markers[-1],
        )

    def _encode(self, segments: Sequence[_Segment]) -> list[int]:
        tokens: list[int] = []
        for text, control in segments:
            if not control:
                tokens += self._tokenizer.encode(text, control=False)
                continue
            number = self._tokenizer.control_ids.get(text)
            if number is None:
                raise ProtocolError(
                    f"the conversation needs the control token {text}, which this model's "
                    "tokenizer does not have."
                )
            tokens.append(number)
        return tokens

    def _with_task(self, segments: list[_Segment], turn: int, task: str) -> list[_Segment]:
        """The task's token in place of an assistant header; ``action`` keeps the header."""
        assistant = (self.spelling(_KINDS.Assistant), True)
        headers = [place for place, segment in enumerate(segments) if segment == assistant]
        place = headers[turn]
        assert segments[place + 1] == (self.spelling(_KINDS.ThinkingEnd), True)
        token: _Segment = (f"<｜{task}｜>", True)
        kept = segments[place : place + 2] if task == "action" else []
        return [*segments[:place], *kept, token, *segments[place + 2 :]]


def _split(prompt: str, ranges: Sequence[tuple[int, int]]) -> list[_Segment]:
    segments: list[_Segment] = []
    done = 0
    for start, stop in ranges:
        if start > done:
            segments.append((prompt[done:start], False))
        segments.append((prompt[start:stop], True))
        done = stop
    if done < len(prompt):
        segments.append((prompt[done:], False))
    return segments


def _with_effort(segments: list[_Segment], effort: int) -> list[_Segment]:
    """The number in the effort line, which follows the first two control tokens.

    The recipe prints no such line where there is nothing but an empty system message.
    """
    text, control = segments[2]
    if control or not text.startswith("Reasoning Effort: "):
        return segments
    line = _EFFORT_LINE.sub(rf"\g<1>{effort}\g<2>", text, count=1)
    return [*segments[:2], (line, False), *segments[3:]]
