"""Reading requests."""

from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe

from cedar.inputs.chat.body import read_body
from cedar.inputs.chat.convert import convert
from cedar.inputs.chat.fields import PARAMETERS, check_fields, schema_of
from cedar.inputs.chat.messages import tasks_of
from cedar.inputs.chat.output_filter import OutputFilter, TextTokens
from cedar.inputs.chat.pictures import image_number, take_images
from cedar.inputs.chat.render import Renderer
from cedar.inputs.chat.reply import Format, Reply
from cedar.inputs.chat.settings import effort_of, limit_of, sampling_of, stops_of, thinking_of
from cedar.inputs.chat.shape import Notes
from cedar.inputs.chat.tools import plan_tools
from cedar.inputs.chat.types import Api, ChatRequest, Constraint, ImageRef, ProtocolError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["ChatProtocol"]


class ChatProtocol:
    """Reads requests of the three APIs for one tokenizer, and makes their replies.

    models: the names by which requests may call the model. default_thinking: whether a request
    that does not say so reasons (Messages apart, where the API's own default is not to).
    accepts_images: whether the model sees. max_prompt_bytes: the longest prompt that is cut into
    tokens at all. Raises `DataError` for a tokenizer without the
    protocol's control tokens. It may be used by several threads at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        models: Sequence[str],
        default_thinking: bool,
        accepts_images: bool,
        max_prompt_bytes: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._models = tuple(models)
        self._default_thinking = default_thinking
        self._accepts_images = accepts_images
        self._renderer = Renderer(tokenizer, max_prompt_bytes)
        self._text_tokens = TextTokens(
            tokenizer,
            end=self._renderer.spelling(recipe.SpecialToken.ThinkingEnd),
            markup=self._renderer.spelling(recipe.SpecialToken.Dsml),
        )
        self._decoder = recipe.Tokenizer.from_str(tokenizer.raw.to_str())

    def read(self, api: Api, body: bytes, *, count_only: bool = False) -> ChatRequest:
        """Check and convert the body of a request; raises `ProtocolError`, nothing else.

        count_only: only the prompt's length is wanted, so ``max_tokens`` may be missing.
        """
        notes = Notes(api)
        table = PARAMETERS[api]
        given = read_body(body)
        if count_only and api is Api.MESSAGES:
            given.setdefault("max_tokens", 1)
        fields = check_fields(table, given, notes)
        self._check_model(fields["model"], notes)
        images = take_images(api, fields, notes)
        if images and not self._accepts_images:
            raise ProtocolError(
                f"{images[0].path}: this model reads text only. Send the request without images.",
                param=images[0].path,
                code="images_not_supported",
            )
        thinking = thinking_of(api, fields, self._default_thinking, notes)
        effort, _ = effort_of(api, fields)
        tasks = tasks_of(fields, notes) if api is Api.CHAT else ()
        if tasks and thinking:
            notes.fail(("messages",), "a task is answered without reasoning. Turn it off.")
        answer = _answer_format(api, fields)
        tools = plan_tools(api, fields, notes)
        converted = convert(
            api,
            fields,
            thinking=thinking,
            effort="high" if isinstance(effort, int) else effort,
            tools=tools,
            answer=answer,
            special=self._renderer.special,
            notes=notes,
        )
        if converted.continued and answer is not None:
            notes.fail(
                ("messages", len(fields["messages"]) - 1),
                "is continued, so its text cannot have a format of its own. Leave the format out, "
                "or do not end with an assistant message.",
            )
        number = effort if thinking and isinstance(effort, int) else None
        prompt = self._renderer.render(converted.conversation, effort=number, tasks=tasks)
        stops = stops_of(api, fields)
        sampling = sampling_of(api, fields, self._tokenizer.vocab_size, notes)
        if stops and not thinking and not tools.active:
            sampling["stop"] = stops  # here the whole text is the answer
        streamed = fields.get("stream", False)
        if "stream_options" in fields and not streamed:
            notes.fail(("stream_options",), "is only for requests with stream: true.")
        return ChatRequest(
            api=api,
            model=fields["model"],
            stream=streamed,
            include_usage=fields.get("stream_options", {}).get("include_usage", False),
            thinking=thinking and prompt.in_reasoning,
            tokens=prompt.tokens,
            prompt=prompt.text,
            images=_in_order(images, prompt.images),
            sampling=sampling,
            max_tokens=limit_of(api, fields, notes),
            constraint=tools.constraint(answer),
            starts_in_tools=converted.starts_in_tools,
            ignored=tuple(notes.ignored),
            state=Format(
                generator=converted.generator,
                special=self._renderer.special,
                stage=_stage(thinking, converted.continued, prompt.in_reasoning),
                starts_in_tools=converted.starts_in_tools,
                parse_tools=tools.active,
                stops=stops,
                max_calls=tools.max_calls if tools.active else None,
                scored="logprobs" in sampling,
                spaced=any("::" in tool.name for tool in tools.tools),
                echo=_echo(api, fields),
            ),
        )

    def reply(self, request: ChatRequest, id: str, created: int, index: int = 0) -> Reply:
        """A new reply to a request; ``created`` is in seconds since 1970, ``index`` the sample."""
        output = OutputFilter(
            self._text_tokens, calls=request.state.parse_tools, reasoning=request.thinking
        )
        return Reply(self._decoder, output, request, id, created, index)

    def schema(self, api: Api) -> dict[str, Any]:
        """The bodies of an API as a JSON schema without references."""
        return schema_of(PARAMETERS[api])

    def _check_model(self, model: str, notes: Notes) -> None:
        if model not in self._models:
            raise ProtocolError(
                f"model: {model[:100]!r} is not served here; there is {', '.join(self._models)}.",
                param="model",
                status=404,
                code="model_not_found",
            )


def _answer_format(api: Api, body: dict[str, Any]) -> Constraint | None:
    """The format that the answer must have."""
    wanted: dict[str, Any] | None
    if api is Api.CHAT:
        wanted = body.get("response_format")
        if wanted is not None and wanted["type"] == "json_schema":
            wanted = {"type": "json_schema", **wanted["json_schema"]}
    else:
        wanted = body.get("text" if api is Api.RESPONSES else "output_config", {}).get("format")
    if wanted is None or wanted["type"] == "text":
        return None
    if wanted["type"] == "json_schema":
        return Constraint(kind="json_schema", value=wanted["schema"])
    if wanted["type"] == "regex":
        return Constraint(kind="regex", value=wanted["regex"])
    return Constraint(kind="json_object")


def _stage(
    thinking: bool, continued: bool, in_reasoning: bool
) -> recipe.ThinkingInitialStage | None:
    """Where parsing begins; a continued text keeps its leading newlines."""
    stages = recipe.ThinkingInitialStage
    if continued:
        return stages.ReasoningContinuation if in_reasoning else stages.ContentContinuation
    return stages.ReasoningStart if thinking else None


def _in_order(images: Sequence[ImageRef], urls: Sequence[str]) -> tuple[ImageRef, ...]:
    """Images in the order of their placeholders: results of calls may have changed places."""
    return tuple(images[image_number(url)] for url in urls)


def _echo(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """What a Responses object repeats and the recipe does not."""
    if api is not Api.RESPONSES:
        return {}
    return {
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "presence_penalty": body.get("presence_penalty", 0.0),
        "frequency_penalty": body.get("frequency_penalty", 0.0),
    }
