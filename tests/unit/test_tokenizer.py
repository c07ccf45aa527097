import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from cedar.errors import DataError, RequestError
from cedar.inputs.tokenizer import Tokenizer
from real_tokenizer import rebuild

BUNDLED = Path(__file__).parents[2] / "src" / "cedar" / "bundled" / "cedar-tiny"

# Ids published for the V4.1 tokenizer.
KNOWN_ANSWERS = [
    (
        "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>",
        "0 128803 19923 128804 128822",
    ),
    (
        "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 (range 1-100, the higher the "
        "value, the more thorough the reasoning)\n\n<｜User｜>Hello<｜Assistant｜><think>",
        "0 128799 77666 288 9504 482 28 223 2402 343 16801 223 19 15 1457 14 270 4077 270 1990 14 "
        "270 850 15146 270 22805 868 128803 19923 128804 128821",
    ),
    (
        "<｜begin▁of▁sentence｜><｜System｜>You are a helpful assistant.<｜User｜>What's the "
        "weather in Beijing?<｜Assistant｜></think>",
        "0 128799 3476 477 260 11502 22896 16 128803 3085 734 270 9670 295 29660 33 128804 128822",
    ),
    ("\n\n<｜DSML｜ calls>\n", "271 30 128825 10699 1018"),
    (
        "Hello, world! 你好，世界 12345 こんにちは",
        "19923 14 2058 3 223 30594 303 3427 223 6895 1883 223 4549 7245 2298 12457 2841",
    ),
    (
        "<｜begin▁of▁sentence｜><｜User｜>inspect\n\n<｜deepseek_image｜><｜Assistant｜></think>",
        "0 128803 261 25133 271 129264 128804 128822",
    ),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(rebuild(tmp_path_factory.getbasetemp() / "v41-tokenizer"))


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_file(BUNDLED)


@pytest.fixture(params=["real", "tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


# --- the real tokenizer ----------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ids"), KNOWN_ANSWERS)
def test_published_ids(real: Tokenizer, text: str, ids: str) -> None:
    expected = [int(number) for number in ids.split()]
    assert real.encode(text) == expected
    assert real.decode(expected) == text


def test_published_sizes_and_control_ids(real: Tokenizer) -> None:
    assert real.vocab_size == 129280
    assert len(real.control_ids) == 1283
    assert real.control_ids["<｜System｜>"] == 128799
    assert real.control_ids["<｜ref｜>"] == 129278
    assert sorted(real.control_ids.values()) == [0, 1, 2, *range(128000, 129280)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<｜User｜>", [30, 28217, 6756, 28217, 32]),
        ("<think>", [30, 37947, 32]),
        ("｜DSML｜", [28217, 10525, 7398, 28217]),
    ],
)
def test_text_of_users_makes_no_control_token(real: Tokenizer, text: str, ids: list[int]) -> None:
    assert real.encode(text, control=False) == ids
    # Negative control: with the added vocabulary the same text is one control token.
    assert real.encode(text) == [real.control_ids[text]]


# --- both tokenizers -------------------------------------------------------------------------


def test_no_added_token_can_be_written_by_a_user(tokenizer: Tokenizer) -> None:
    controls = set(tokenizer.control_ids.values())
    for spelling, number in tokenizer.control_ids.items():
        ids = tokenizer.encode(f"a{spelling} b", control=False)
        assert controls.isdisjoint(ids)
        assert tokenizer.decode(ids) == f"a{spelling} b"
        assert number in tokenizer.encode(f"a{spelling} b")


def test_nothing_is_added_at_the_ends(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode("x")[0] not in tokenizer.control_ids.values()


def test_a_post_processor_adds_nothing() -> None:
    raw = RawTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    bos = raw.id_to_token(0)
    raw.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    assert raw.encode("x").ids[0] == 0  # the trap is set
    assert 0 not in Tokenizer(raw.to_str()).encode("x")


def test_skip_special_keeps_role_markers(tokenizer: Tokenizer) -> None:
    text = "<｜begin▁of▁sentence｜><｜User｜>a<think>｜DSML｜<｜deepseek_image｜><｜ref｜>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    shown = tokenizer.decode(ids, skip_special=True)
    assert shown == "<｜User｜>a<think>｜DSML｜<｜deepseek_image｜>"
    stream = tokenizer.stream(skip_special=True)
    assert "".join(map(stream.push, ids)) + stream.finish() == shown


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_survives_encoding(tiny: Tokenizer, real: Tokenizer, text: str) -> None:
    for tokenizer in (tiny, real):
        for control in (True, False):
            ids = tokenizer.encode(text, control=control)
            assert tokenizer.decode(ids) == text
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@settings(deadline=None)
@given(data=st.data())
def test_a_stream_equals_decoding_the_whole(tiny: Tokenizer, real: Tokenizer, data: Any) -> None:
    for tokenizer in (tiny, real):
        numbers = st.integers(0, tokenizer.vocab_size - 1)
        broken = st.sampled_from(range(3, 259))  # single bytes: mostly not valid UTF-8
        ids = data.draw(st.lists(numbers | broken, max_size=30))
        stream = tokenizer.stream()
        parts = [stream.push(number) for number in ids]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=st.text(alphabet="aé你😀\U0001f1e9 \n", max_size=20))
def test_a_stream_never_shows_half_a_character(tiny: Tokenizer, text: str) -> None:
    ids = [3 + _BYTES.index(byte) for byte in text.encode()]  # one token per byte
    assert [tiny.token_bytes(number) for number in ids] == [bytes([b]) for b in text.encode()]
    stream = tiny.stream()
    shown = ""
    for number in ids:
        shown += stream.push(number)
        assert "\ufffd" not in shown
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


# The order of the byte tokens: by their character in the byte alphabet.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = _PRINTABLE + [byte for byte in range(256) if byte not in _PRINTABLE]


def test_a_cut_off_character_is_shown_at_the_end(tiny: Tokenizer) -> None:
    ids = [3 + _BYTES.index(byte) for byte in "é".encode()[:1]]
    stream = tiny.stream()
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\ufffd" == tiny.decode(ids)


# --- the bundled tokenizer -------------------------------------------------------------------


def test_bundled_tokenizer_has_the_released_form(tiny: Tokenizer, real: Tokenizer) -> None:
    assert tiny.vocab_size == 2560
    assert list(tiny.control_ids.values()) == [0, 1, 2, *range(2538, 2560)]
    flags = {token.content: token for token in real.raw.get_added_tokens_decoder().values()}
    for token in tiny.raw.get_added_tokens_decoder().values():
        released = flags[token.content]
        assert (token.special, token.normalized) == (released.special, released.normalized)
    order = [real.control_ids[content] for content in tiny.control_ids]
    assert order == sorted(order)


def test_bundled_tokenizer_cuts_like_the_released_one(tiny: Tokenizer, real: Tokenizer) -> None:
    text = "It's 12345 o'clock,\r\n\n  thou   art: (late)… 你好 こんにちは _x_ don't!?\n\tx "
    cut = tiny.raw.pre_tokenizer.pre_tokenize_str(text)
    assert cut == real.raw.pre_tokenizer.pre_tokenize_str(text)
    assert len(cut) > 20


def test_bundled_tokenizer_knows_every_byte(tiny: Tokenizer) -> None:
    assert [tiny.token_bytes(3 + rank) for rank in range(256)] == [bytes([b]) for b in _BYTES]


# --- other tokenizers ------------------------------------------------------------------------


@pytest.fixture
def word_level() -> Tokenizer:
    raw = RawTokenizer(models.WordLevel({"▁to": 0, "▁be": 1, "or": 2, "?": 3}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return Tokenizer(raw.to_str())


def test_a_tokenizer_without_bytes_still_streams(word_level: Tokenizer) -> None:
    ids = word_level.encode("to be to be")
    stream = word_level.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == "to be to be"
    with pytest.raises(DataError, match="no ByteLevel decoder"):
        word_level.token_bytes(0)


def test_a_word_that_is_also_a_control_token_is_refused() -> None:
    raw = RawTokenizer(models.WordLevel({"<user>": 0, "hi": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_tokens(["<user>"])
    tokenizer = Tokenizer(raw.to_str(), where="odd.json")
    assert tokenizer.encode("hi", control=False) == [1]
    with pytest.raises(DataError, match=r"odd\.json turns ordinary text into the control token 0"):
        tokenizer.encode("hi <user>", control=False)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ('{"model": {"type": "BPE", "vocab"', "is not JSON"),
        ("[1, 2]", 'no "model" section'),
        ('{"model": null}', 'no "model" section'),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": [3]}}', "cannot be"),
        (
            '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, '
            '"merges": []}}',
            "empty vocabulary",
        ),
    ],
)
def test_a_malformed_file_is_a_data_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_unreadable_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": "\xff"}')
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.from_file(tmp_path)


def test_bad_ids_and_bad_text_are_request_errors(tiny: Tokenizer) -> None:
    for ids in ([5, 2560], [-1]):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            tiny.decode(ids)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        tiny.stream().push(2560)
    with pytest.raises(RequestError, match=r"lone surrogate .* at character 1"):
        tiny.encode("a\ud800")


def test_bundled_settings_are_the_released_ones(real: Tokenizer, tmp_path: Path) -> None:
    rebuild(tmp_path)
    released = (tmp_path / "tokenizer_config.json").read_bytes()
    assert (BUNDLED / "tokenizer_config.json").read_bytes() == released
    assert json.loads(released)["add_bos_token"] is False
