"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: vLLM's forms, which evaluations use."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cedar.inputs.chat import Api, ChatRequest
from cedar.inputs.chat.body import read_body
from cedar.inputs.chat.record import Items, Record
from cedar.inputs.chat.shape import Flag, Integer, Notes, Shape, Text
from cedar.server.completion_request import check_ids, check_model
from cedar.server.completion_scores import spelling
from cedar.server.door import Visit
from cedar.server.service import Service, body_of, notes_header

__all__ = [
    "DETOKENIZE_NOTES",
    "TOKENIZE_NOTES",
    "detokenize",
    "detokenize_record",
    "tokenize",
    "tokenize_record",
    "tokenizer_info",
]

Endpoint = Callable[[Request, Visit], Awaitable[Response]]

TOKENIZE_NOTES: Mapping[str, str] = {
    "model": "a served name, or absent",
    "prompt": "text; or else messages and the other fields of /v1/chat/completions",
    "add_special_tokens": "whether the begin-of-text token comes first, true by default",
    "parse_special": "whether text may spell control tokens, false by default",
    "return_token_strs": "whether the spelling of each token is wanted",
}
DETOKENIZE_NOTES: Mapping[str, str] = {"model": "a served name, or absent", "tokens": "token ids"}


def tokenize_record() -> Record:
    """The fields of ``/tokenize`` with text."""
    fields: dict[str, Shape] = {
        "model": Text(),
        "prompt": Text(),
        "add_special_tokens": Flag(),
        "parse_special": Flag(),
        "return_token_strs": Flag(),
    }
    return Record(fields, required=("prompt",), closed=True)


def detokenize_record(vocab_size: int) -> Record:
    """The fields of ``/detokenize``."""
    fields: dict[str, Shape] = {"model": Text(), "tokens": Items(Integer(0, vocab_size - 1))}
    return Record(fields, required=("tokens",), closed=True)


def tokenize(service: Service) -> Endpoint:
    """Token ids of a text, or of the prompt that a conversation becomes."""

    def read(body: bytes) -> ChatRequest | tuple[list[int], bool]:
        """A conversation, or the ids of a text and whether they are to be spelled."""
        given = read_body(body)
        if "messages" in given:
            return service.protocol.read(Api.CHAT, body)
        given = tokenize_record().check(given, (), Notes())
        check_model(given.get("model", service.settings.model), service.settings.models)
        return _encoded(service, given), given.get("return_token_strs", False)

    async def endpoint(request: Request, visit: Visit) -> Response:
        found = await run_in_threadpool(read, await body_of(request))
        ignored: tuple[str, ...] = ()
        if isinstance(found, ChatRequest):
            ids, spelled, ignored = list((await service.prompt(found)).tokens), False, found.ignored
        else:
            ids, spelled = found
        tokenizer = service.engine.tokenizer
        content = {
            "count": len(ids),
            "max_model_len": service.engine.info.room,
            "tokens": ids,
            "token_strs": [spelling(tokenizer, token) for token in ids] if spelled else None,
        }
        return JSONResponse(content, headers=notes_header(ignored))

    return endpoint


def detokenize(service: Service) -> Endpoint:
    """The text of token ids."""

    def text_of(body: bytes) -> str:
        engine, notes = service.engine, Notes()
        given = detokenize_record(engine.info.vocab_size).check(read_body(body), (), notes)
        check_model(given.get("model", service.settings.model), service.settings.models)
        return engine.tokenizer.decode(check_ids(given["tokens"], engine, ("tokens",), notes))

    async def endpoint(request: Request, visit: Visit) -> Response:
        text = await run_in_threadpool(text_of, await body_of(request))
        return JSONResponse({"prompt": text})

    return endpoint


def tokenizer_info(service: Service) -> Callable[[Request], Awaitable[Response]]:
    """What a client that tokenizes by the endpoints above wants to know."""
    info, tokenizer = service.engine.info, service.engine.tokenizer

    async def endpoint(request: Request) -> Response:
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": spelling(tokenizer, info.bos),
            "eos_token": spelling(tokenizer, info.eos),
            "model_max_length": info.room,
            "vocab_size": tokenizer.vocab_size,
            "add_bos_token": True,
            "chat_template": None,
        }
        return JSONResponse(content)

    return endpoint


def _encoded(service: Service, given: Mapping[str, Any]) -> list[int]:
    engine, text = service.engine, given["prompt"]
    # Clients look up the begin and end of text by their spelling; that alone forges nothing.
    for token in (engine.info.bos, engine.info.eos):
        if text == spelling(engine.tokenizer, token) and not given.get("add_special_tokens", True):
            return [token]
    ids = engine.tokenizer.encode(text, control=given.get("parse_special", False))
    return [engine.info.bos, *ids] if given.get("add_special_tokens", True) else ids
