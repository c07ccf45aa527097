"""The end of a text: stop strings at every split into tokens, stop tokens, length."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine import SamplingParams
from cedar.engine.stopping import FinishReason, StopChecker
from cedar.inputs.tokenizer import Tokenizer

EOS = -1
TEXTS = st.text("ab ", max_size=14)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3)


class Pieces:
    """A tokenizer stream whose token i is the i-th piece; the rest comes at the end."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        rest, self._rest = self._rest, ""
        return rest


def run(
    pieces: Sequence[str],
    stop: Sequence[str],
    *,
    rest: str = "",
    max_tokens: int = 1000,
    checker: type[StopChecker] = StopChecker,
) -> tuple[str, FinishReason | None, list[str], int | str | None]:
    """All pieces, then end of text: the shown text, the reason, each part, what stopped it."""
    params = SamplingParams(stop=tuple(stop), max_tokens=max_tokens)
    found = checker(params, EOS, Pieces(pieces, rest))
    parts = []
    for token in (*range(len(pieces)), EOS):
        progress = found.push(token)
        parts.append(progress.text)
        if progress.finish_reason is not None:
            break
    return "".join(parts), progress.finish_reason, parts, found.stopped_by


def naive(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Reading character by character; the longest stop string that is complete first."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(text: str, cuts: int) -> list[str]:
    """Bit i of ``cuts`` cuts after character i."""
    pieces, start = [], 0
    for i in range(1, len(text)):
        if cuts >> (i - 1) & 1:
            pieces.append(text[start:i])
            start = i
    return [*pieces, text[start:]]


def check_every_split(text: str, stop: Sequence[str], checker: type[StopChecker]) -> None:
    expected, found = naive(text, stop)
    for cuts in range(2 ** max(0, len(text) - 1)):
        pieces = split(text, cuts)
        shown, reason, _, by = run(pieces, stop, checker=checker)
        assert (shown, by) == (expected, found or EOS), pieces
        assert reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("one\n\ntwo", ["\n\n"]),
        ("aabaabaaab", ["aabaaa"]),  # the search has to fall back inside itself
        ("xabcdy", ["bc", "abcd"]),  # complete first, though it begins later
        ("xabcdy", ["abcd", "cd"]),  # complete together: the longest
        ("abababa", ["aba"]),
        ("User: hi", ["User:", "Us", "ser"]),
        ("nothing", ["xyz"]),
        ("stop", ["stop"]),
        ("a😀bé!", ["bé"]),
    ],
)
def test_every_split_into_tokens_gives_the_same_text(text: str, stop: list[str]) -> None:
    check_every_split(text, stop, StopChecker)


class LooksAtOneTokenOnly(StopChecker):
    """Faulty: what came before is forgotten."""

    def _certain(self, new: str) -> str:
        self._held = ""
        text = super()._certain(new)
        text, self._held = text + self._held, ""
        return text


def test_a_checker_without_memory_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        check_every_split("one\n\ntwo", ["\n\n"], LooksAtOneTokenOnly)


@settings(max_examples=300)
@given(TEXTS, STOPS, st.integers(0, 2**13 - 1))
@example("ab", ["b", "ab"], 1)
def test_any_text_stops_and_split(text: str, stop: list[str], cuts: int) -> None:
    expected, found = naive(text, stop)
    shown, _, parts, by = run(split(text, cuts), stop)
    assert (shown, by) == (expected, found or EOS)
    # What was shown at each moment is a beginning of the text, so nothing is ever taken back.
    so_far = ""
    for part in parts:
        so_far += part
        assert expected.startswith(so_far)


@given(TEXTS, STOPS, st.integers(0, 2**13 - 1))
def test_no_more_is_held_back_than_could_be_a_stop_string(
    text: str, stop: list[str], cuts: int
) -> None:
    checker = StopChecker(SamplingParams(stop=tuple(stop)), EOS, Pieces(split(text, cuts)))
    read = shown = ""
    for token, piece in enumerate(split(text, cuts)):
        progress = checker.push(token)
        read, shown = read + piece, shown + progress.text
        if progress.finish_reason is not None:
            return
        held = read[len(shown) :]
        assert held == "" or any(s != held and s.startswith(held) for s in stop)
        # And enough is: no longer end of what was read could begin a stop string.
        ends = [read[i:] for i in range(len(shown))]
        assert not any(s.startswith(end) for s in stop for end in ends)


def test_the_rest_of_the_stream_is_searched_too() -> None:
    assert run(["ab", "c"], ["cd"], rest="d!")[:2] == ("ab", FinishReason.STOP)
    assert run(["ab", "c"], ["ce"], rest="d!")[:2] == ("abcd!", FinishReason.STOP)
    assert run(["ab", "c"], ["cd"], rest="d!", max_tokens=2)[:2] == ("ab", FinishReason.STOP)


def test_length_shows_what_was_held_back() -> None:
    text, reason, parts, by = run(["ab", "<e", "nd>"], ["<end>"], max_tokens=2)
    assert (text, reason, by) == ("ab<e", FinishReason.LENGTH, None)
    assert parts == ["ab", "<e"]
    # A stop string that is complete with the last allowed token is a stop.
    assert run(["ab", "<e", "nd>"], ["<end>"], max_tokens=3)[:2] == ("ab", FinishReason.STOP)


def test_the_models_limit_counts_if_it_is_lower() -> None:
    for params_limit, limit, expected in [(5, 2, 2), (2, 5, 2), (3, None, 3)]:
        params = SamplingParams(max_tokens=params_limit)
        checker = StopChecker(params, EOS, Pieces("abcdef"), max_tokens=limit)
        count = next(i for i in range(6) if checker.push(i).finish_reason is not None) + 1
        assert (count, checker.num_tokens) == (expected, expected)


def test_stop_tokens_and_end_of_text_add_no_text() -> None:
    for ends, stop_ids, token in [(EOS, (3,), 3), ((7, 8), (), 8), (EOS, (), EOS)]:
        params = SamplingParams(stop_token_ids=stop_ids)
        checker = StopChecker(params, ends, Pieces("abcdefghij"))
        assert checker.push(0) == ("a", None)
        assert checker.push(token) == ("", FinishReason.STOP)
        assert (checker.num_tokens, checker.stopped_by) == (1, token)


def test_end_of_text_can_be_ignored_but_stop_tokens_still_count() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(2,))
    checker = StopChecker(params, 1, Pieces(["a", "<eos>", "c"]))
    assert checker.push(1) == ("<eos>", None)
    assert checker.push(2) == ("", FinishReason.STOP)


def test_nothing_may_follow_the_end() -> None:
    checker = StopChecker(SamplingParams(), EOS, Pieces("a"))
    checker.push(EOS)
    with pytest.raises(RuntimeError, match="after the text ended"):
        checker.push(0)


def test_a_text_that_is_ended_from_outside() -> None:
    checker = StopChecker(SamplingParams(stop=("<end>",)), EOS, Pieces(["ab<e"], "x"))
    assert checker.push(0).text == "ab"
    assert checker.flush() == "<ex"
    assert checker.flush() == ""


def test_with_the_bundled_tokenizer_half_characters_never_show() -> None:
    """Bytes of one character lie in several tokens, and a stop string ends inside a token."""
    tokenizer = Tokenizer.from_file(locate_checkpoint("cedar-tiny"))
    text = "Café 漢字 😀 the end of the story. And more"
    ids = tokenizer.encode(text, control=False)
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)
    for stop in ("字 😀", "end of the st", "é", "more"):
        checker = StopChecker(SamplingParams(stop=(stop,)), 1, tokenizer.stream())
        shown = ""
        for token in ids:
            progress = checker.push(token)
            shown += progress.text
            assert "\ufffd" not in shown
            if progress.finish_reason is not None:
                break
        assert shown == text[: text.index(stop)]
        assert checker.stopped_by == stop
