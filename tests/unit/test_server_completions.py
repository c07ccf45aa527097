"""``/v1/completions``: forms of the prompt, echo, scores, choices, streams."""

import asyncio
import json
from typing import Any

import pytest
from openai.types import Completion

from serving import FakeEngine, events_of, make_app, post, tokenizer

PATH = "/v1/completions"


def complete(engine: FakeEngine | None = None, headers: Any = None, **body: Any) -> Any:
    """The answer to a request with ``body`` over a small usual one."""
    app = make_app(engine or FakeEngine())
    return asyncio.run(post(app, PATH, headers, **({"model": "cedar-tiny", "prompt": "a"} | body)))


def test_a_text_is_continued() -> None:
    engine = FakeEngine(text="one two three")
    answer = complete(engine, prompt="Count:", max_tokens=50)
    assert answer.status == 200
    found = Completion.model_validate(answer.json(), strict=True)
    assert found.choices[0].text == "one two three"
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].logprobs is None
    tokens = tokenizer().encode("Count:", control=False)
    assert engine.asked[0].prompt.tokens == (0, *tokens)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(tokens) + 1
    assert found.usage.completion_tokens == len(tokenizer().encode("one two three"))
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    details = found.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == (found.usage.completion_tokens - 1) // 2
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == found.usage.prompt_tokens // 2


def test_length_ends_a_text() -> None:
    answer = complete(max_tokens=2)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["a", [5]], None),
        (["a", "b"], None),
    ],
)
def test_forms_of_the_prompt(prompt: Any, expected: list[tuple[int, ...]] | None) -> None:
    engine = FakeEngine()
    answer = complete(engine, prompt=prompt, max_tokens=1)
    assert answer.status == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == list(
        range(len(engine.asked))
    )
    if expected is not None:
        assert [asked.prompt.tokens for asked in engine.asked] == expected
    assert len(engine.asked) == (1 if expected == [(5, 6, 7)] else 2)


def test_control_tokens_cannot_be_forged_unless_asked_for() -> None:
    engine = FakeEngine()
    complete(engine, prompt="<｜User｜>", add_special_tokens=False)
    complete(engine, prompt="<｜User｜>", add_special_tokens=False, parse_special=True)
    forged, real = engine.asked
    control = tokenizer().control_ids["<｜User｜>"]
    assert control not in forged.prompt.tokens
    assert len(forged.prompt.tokens) > 1
    assert real.prompt.tokens == (control,)


def test_prompts_and_samples_are_choices_in_order() -> None:
    engine = FakeEngine(text="x")
    answer = complete(engine, prompt=["a", "b"], n=3, max_tokens=4)
    found = answer.json()
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    lengths = [len(asked.prompt.tokens) for asked in engine.asked]
    assert found["usage"]["prompt_tokens"] == sum(lengths)  # once each, whatever n
    assert found["usage"]["completion_tokens"] == 6
    assert all(asked.params["n"] == 3 for asked in engine.asked)


def test_echo_with_scores() -> None:
    engine = FakeEngine(text=" end")
    answer = complete(engine, prompt="Hello 你", echo=True, logprobs=2, max_tokens=9)
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "Hello 你 end"
    scores = choice["logprobs"]
    ids = [*engine.asked[0].prompt.tokens, *tokenizer().encode(" end")]
    sizes = {len(scores[name]) for name in scores}
    assert sizes == {len(ids)}
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == [-0.5] * (len(ids) - 1)
    for name, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
        assert top[name] == -0.5
        assert len(top) == 2
    # Where tokens are whole characters, the offsets cut the text into them.
    for name, start in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
        if not name.startswith("bytes:"):
            assert choice["text"][start : start + len(name)] == name
    assert any(name.startswith("bytes:\\x") for name in scores["tokens"])  # of the character


def test_no_infinity_in_scores() -> None:
    engine = FakeEngine(text="x")
    answer = complete(engine, logprobs=3)
    (choice,) = answer.json()["choices"]
    assert -9999.0 in choice["logprobs"]["top_logprobs"][0].values()


def test_a_scored_prompt_always_has_a_last_token() -> None:
    """What evaluations read as scores of the prompt is everything before the last entry."""
    engine = FakeEngine(text="")  # the model ends the text at once
    answer = complete(engine, prompt=[5, 6], echo=True, logprobs=1, max_tokens=1)
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == tokenizer().decode([5, 6])
    assert engine.asked[0].params["prompt_logprobs"] == 1


def test_no_tokens_at_all_only_scores() -> None:
    answer = complete(prompt=[5, 6], echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.json()["choices"]
    assert choice["text"] == tokenizer().decode([5, 6])
    assert len(choice["logprobs"]["tokens"]) == 2
    assert answer.json()["usage"]["completion_tokens"] == 0


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine()
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop_token_ids": [9],
    }
    complete(engine, **given, stop="END", logit_bias={"5": -100}, max_tokens=3)
    params = engine.asked[0].params
    assert {name: params[name] for name in given} == given
    assert params["stop"] == ["END"]
    assert params["logit_bias"] == {5: -100}
    assert params["max_tokens"] == 3


def test_more_tokens_than_fit_are_as_many_as_fit() -> None:
    engine = FakeEngine()
    complete(engine, prompt=[5, 6], max_tokens=10**9)
    assert engine.asked[0].params["max_tokens"] == engine.info.room - 2


def test_a_stream_equals_the_whole() -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 20}
    whole = complete(**body).json()
    answer = complete(**body, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = [data for _, data in events_of(answer)]
    assert done == "[DONE]"
    *events, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["stop"]
        for name, values in choice["logprobs"].items():
            joined = [v for each in own if each["logprobs"] for v in each["logprobs"][name]]
            assert joined == values
    for event in events:
        Completion.model_validate(event | {"choices": []})
        assert event["usage"] is None


def test_ignored_fields_are_named() -> None:
    answer = complete(user="me", metadata={"a": 1})
    assert answer.status == 200
    assert answer.headers["x-cedar-ignored"] == "user, metadata"
    assert "x-cedar-ignored" not in complete().headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [99999]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", "a" * (2048 * 40 + 1)]}, "prompt[1]"),  # however it is cut
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"2560": 1}}, "logit_bias.2560"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stop": [""]}, "stop[0]"),
        ({"seed": -1}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_wrong_fields_are_named(body: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = complete(engine, **body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert param in answer.error["message"]
    assert not engine.asked


def test_an_unknown_field_gets_a_hint() -> None:
    assert "temperature" in complete(temprature=1).error["message"]


def test_an_unknown_model_is_404() -> None:
    answer = complete(model="gpt-5")
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert answer.error["param"] == "model"
    assert complete(model="other").status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model":"cedar-tiny","model":"x","prompt":"a"}',
        b'{"model":"cedar-tiny","prompt":"a","seed":NaN}',
        b'{"model":"cedar-tiny","prompt":"\\ud800"}',
        b'{"model":"cedar-tiny","prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
        b'{"model":"cedar-tiny","prompt":"a","temperature":1e999}',
        b"[" * 50,
        b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_json_objects(body: bytes) -> None:
    from serving import ask

    answer = asyncio.run(ask(make_app(FakeEngine()), "POST", PATH, body))
    assert answer.status == 400
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert json.dumps(answer.error)
