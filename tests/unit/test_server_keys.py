"""API keys: where they come from, who is known, and what each may use."""

import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.errors import ConfigError
from cedar.server import keys as keys_module
from cedar.server.errors import error_response
from cedar.server.keys import BudgetSpent, Key, KeyBudget, KeyRing, Unauthorized

ANNA, BERT = "sk-anna-0123456789", "sk-bert-0123456789"
FILE = f"""
# who          key
anna           {ANNA}
bert@home-2.x  {BERT} max_concurrent=2 tokens_per_minute=1000  # from the cellar
   # nobody else
"""


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


# --- where keys come from --------------------------------------------------------------------


def test_a_file_of_keys(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing.from_file(file)
    assert ring.names == ("anna", "bert@home-2.x")
    assert ring.check(bearer(ANNA)) == Key(name="anna")
    assert ring.check(bearer(BERT)) == Key(
        name="bert@home-2.x", max_concurrent=2, tokens_per_minute=1000
    )
    assert caplog.records == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_warned_about(
    file: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    file.chmod(mode)
    KeyRing.from_file(file)
    assert "can be read by other users" in caplog.text
    assert ANNA not in caplog.text


def test_the_variable() -> None:
    ring = KeyRing.from_text(f"anna:{ANNA}, bert:with:colon:in:it,")
    assert ring.names == ("anna", "bert")
    assert ring.check(bearer("with:colon:in:it")).name == "bert"


def test_both_sources_count_and_none_is_no_ring(file: Path) -> None:
    variable = {"CEDAR_API_KEYS": "carl:sk-carl-0123456789"}
    ring = KeyRing.load(file, variable)
    assert ring is not None
    assert ring.names == ("anna", "bert@home-2.x", "carl")
    assert KeyRing.load(None, {}) is None
    assert KeyRing.load(None, {"CEDAR_API_KEYS": ""}) is None
    with pytest.raises(ConfigError, match="'anna' stands there twice"):
        KeyRing.load(file, {"CEDAR_API_KEYS": "anna:another-0123456789"})


def test_what_was_meant_to_have_keys_never_serves_without(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# later\n")
    empty.chmod(0o600)
    for attempt in (
        lambda: KeyRing.load(empty, {}),
        lambda: KeyRing.load(None, {"CEDAR_API_KEYS": " , "}),
        lambda: KeyRing([]),
    ):
        with pytest.raises(ConfigError, match="there is none"):
            attempt()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("anna", "expected 'name key"),
        ("anna # later", "expected 'name key"),
        ("an/na 0123456789012345", "expected a name of letters"),
        ("a" * 65 + " 0123456789012345", "expected a name of letters"),
        ("anna 0123456789ä12345", "printable"),
        ("anna " + "x" * 513, "printable"),
        ("anna secret-one secret-two", "not understood"),
        ("anna secret-one max_concurrent=0", "not understood"),
        ("anna secret-one max_concurrent=-1", "not understood"),
        ("anna secret-one max_concurrent=1.5", "not understood"),
        ("anna secret-one max_concurrent=", "not understood"),
        ("anna secret-one max_concurrent=1 max_concurrent=2", "not understood"),
        ("anna secret-one tokens=5", "not understood"),
        ("anna secret-one tokens_per_minute=" + "9" * 19, "not understood"),
    ],
)
def test_lines_that_are_not_understood(file: Path, line: str, said: str) -> None:
    file.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match=said) as caught:
        KeyRing.from_file(file)
    assert f"{file}, line 2" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, file: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            KeyRing.from_file(path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyRing.from_file(file)


@pytest.mark.parametrize(
    "text", ["anna", ":key", "anna:", "an na:key", "anna:with blank", "a:b:c d"]
)
def test_entries_that_are_not_understood(text: str) -> None:
    with pytest.raises(ConfigError, match="CEDAR_API_KEYS, entry 2"):
        KeyRing.from_text(f"carl:sk-carl-0123456789,{text}")


def test_one_key_for_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bert' has the key of another name") as caught:
        KeyRing.from_text(f"anna:{ANNA},bert:{ANNA}")
    assert ANNA not in str(caught.value)


def test_short_keys_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    KeyRing.from_text("anna:0123456789abcde")
    assert "anna has fewer than 16" in caplog.text
    assert "0123456789abcde" not in caplog.text
    caplog.clear()
    KeyRing.from_text("anna:0123456789abcdef")
    assert caplog.records == []


# --- who is known ----------------------------------------------------------------------------


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing.from_text(f"anna:{ANNA},bert:{BERT}")


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {ANNA}")],
        [("Authorization", f"bearer   {ANNA} ")],
        [("x-api-key", ANNA)],
        [("X-Api-Key", f" {ANNA} ")],
        [("authorization", "Bearer something-else"), ("x-api-key", ANNA)],
        [("authorization", f"Bearer {ANNA}"), ("x-api-key", BERT)],
        [("authorization", "Basic eDp5"), ("x-api-key", ANNA)],
    ],
)
def test_headers_that_name_a_key(ring: KeyRing, headers: list[tuple[str, str]]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    assert ring.check(iter(raw)).name == "anna"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([], "No API key"),
        ([("authorization", "")], "No API key"),
        ([("authorization", "Bearer ")], "No API key"),
        ([("authorization", ANNA)], "No API key"),
        ([("authorization", f"Basic {ANNA}")], "No API key"),
        ([("x-api-key", " ")], "No API key"),
        ([("cookie", ANNA)], "No API key"),
        ([("x-api-key", ANNA[:-1])], "not known"),
        ([("x-api-key", ANNA + "0")], "not known"),
        ([("x-api-key", ANNA.upper())], "not known"),
        ([("x-api-key", "ä")], "not known"),
        ([("x-api-key", "anna")], "not known"),
        ([("authorization", f"Bearer Bearer {ANNA}")], "not known"),
    ],
)
def test_headers_that_do_not(ring: KeyRing, headers: list[tuple[str, str]], said: str) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    with pytest.raises(Unauthorized, match=said) as caught:
        ring.check(raw)
    assert caught.value.status == 401
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert ANNA not in str(caught.value)


@given(text=st.binary(max_size=40))
def test_no_other_bytes_are_a_key(text: bytes) -> None:
    ring = KeyRing.from_text(f"anna:{ANNA},bert:{BERT}")
    if text.strip() not in (ANNA.encode(), BERT.encode()):
        with pytest.raises(Unauthorized):
            ring.check([(b"x-api-key", text), (b"authorization", b"Bearer " + text)])


def test_many_offered_keys_cost_little(ring: KeyRing) -> None:
    with pytest.raises(Unauthorized):
        ring.check([(b"x-api-key", b"guess")] * 4 + [(b"x-api-key", ANNA.encode())])


def test_all_keys_are_compared_every_time(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    # That the digests, of equal length, and not the keys are compared is part of it.
    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    costs = []
    for key in (ANNA, BERT, "x", "y" * 500):
        compared.clear()
        try:
            ring.check(bearer(key))
        except Unauthorized:
            assert len(key) in (1, 500)
        costs.append([len(part) for pair in compared for part in pair])
    assert costs == [[32] * 4] * 4


def test_keys_are_not_kept(ring: KeyRing) -> None:
    held = repr(vars(ring))
    assert "anna" in held
    assert ANNA not in held
    again = KeyRing.from_text(f"anna:{ANNA},bert:{BERT}")
    assert again._keys[0][0] != ring._keys[0][0]  # hashed with a secret of each ring
    assert len(hmac.digest(b"", b"", "sha256")) == 32


# --- what each may use -----------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


def spent(budget: KeyBudget, key: Key) -> BudgetSpent:
    with pytest.raises(BudgetSpent) as caught:
        budget.enter(key)
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": str(caught.value.retry_after)}
    return caught.value


def test_requests_at_once() -> None:
    budget = KeyBudget()
    two, one = Key(name="two", max_concurrent=2), Key(name="one", max_concurrent=1)
    first, second = budget.enter(two), budget.enter(two)
    refused = spent(budget, two)
    assert "has 2 requests running; it may have 2" in str(refused)
    assert refused.code == "key_concurrency"
    assert refused.retry_after == 1
    with budget.enter(one):  # each key for itself
        spent(budget, one)
    first.leave()
    first.leave()
    third = budget.enter(two)
    spent(budget, two)
    second.leave()
    third.leave()
    assert budget.running(two) == budget.running(one) == 0
    free = Key(name="free")
    leases = [budget.enter(free) for _ in range(1000)]
    assert budget.running(free) == 1000
    for lease in leases:
        lease.leave()


def test_a_request_that_fails_is_counted_out() -> None:
    budget, key = KeyBudget(), Key(name="one", max_concurrent=1)
    for _ in range(3):
        with pytest.raises(RuntimeError), budget.enter(key):
            raise RuntimeError
    assert budget.running(key) == 0


def test_tokens_of_a_minute() -> None:
    clock = Clock()
    budget, key = KeyBudget(clock), Key(name="a", tokens_per_minute=100)
    lease = budget.enter(key)
    lease.spend(60)
    clock.now += 10
    budget.enter(key).spend(39)
    budget.enter(key)  # one is left
    lease.spend(500)  # a request that runs is not cut
    refused = spent(budget, key)
    assert refused.code == "key_tokens"
    assert budget.used(key) == 599
    assert refused.retry_after == 60  # the 539 of the second spending have to go
    clock.now += 50
    assert budget.used(key) == 539  # the first 60 are a minute old
    assert spent(budget, key).retry_after == 10
    clock.now += 9.5
    assert spent(budget, key).retry_after == 1
    clock.now += 0.5
    budget.enter(key)
    assert budget.used(key) == 0


def test_retry_after_waits_for_enough_and_not_for_all() -> None:
    clock = Clock()
    budget, key = KeyBudget(clock), Key(name="a", tokens_per_minute=100)
    for tokens in (50, 30, 40):
        budget.spend(key, tokens)
        clock.now += 10
    assert spent(budget, key).retry_after == 30  # without the first 50 there are 70
    clock.now += 30
    budget.enter(key)


def test_tokens_without_a_limit_are_not_kept() -> None:
    budget, key = KeyBudget(), Key(name="a")
    budget.enter(key).spend(10**9)
    assert budget.used(key) == 0
    limited = Key(name="b", tokens_per_minute=5)
    for tokens in (0, -3):
        budget.spend(limited, tokens)
    assert budget.used(limited) == 0


SECONDS = st.integers(0, 30 * 64).map(lambda number: number / 64)  # without rounding


@given(
    spendings=st.lists(st.tuples(st.integers(0, 40), SECONDS), max_size=40),
    limit=st.integers(1, 200),
)
def test_no_minute_has_more_than_the_limit_and_one_request(
    spendings: list[tuple[int, float]], limit: int
) -> None:
    clock = Clock()
    budget, key = KeyBudget(clock), Key(name="a", tokens_per_minute=limit)
    done: list[tuple[float, int]] = []
    for tokens, pause in spendings:
        clock.now += pause
        recent = sum(count for when, count in done if when > clock.now - 60)
        try:
            lease = budget.enter(key)
        except BudgetSpent as refused:
            clock.now += refused.retry_after
            lease = budget.enter(key)  # what Retry-After says is enough
        else:
            assert recent < limit
        lease.spend(tokens)
        done.append((clock.now, tokens))
    assert len(budget._used.get(key.name, ())) <= 61


def test_long_running_counts_take_little_memory() -> None:
    clock = Clock()
    budget, key = KeyBudget(clock), Key(name="a", tokens_per_minute=10**9)
    for _ in range(5000):
        clock.now += 0.05
        budget.spend(key, 1)
    assert len(budget._used["a"]) <= 61
    assert 1180 <= budget.used(key) <= 1220


def test_refusals_in_the_form_of_each_api() -> None:
    refused = BudgetSpent("spent", code="key_tokens", retry_after=2.1)
    usual, messages = (
        error_response(path, refused) for path in ("/v1/chat/completions", "/v1/messages")
    )
    assert usual.status_code == messages.status_code == 429
    assert usual.headers["retry-after"] == messages.headers["retry-after"] == "3"
    assert b'"code":"key_tokens"' in usual.body
    assert messages.body.startswith(b'{"type":"error","error":{"type":"rate_limit_error"')
