"""The engine's loop: equal to each request alone, whatever runs beside it or goes wrong."""

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_setting import VOCAB, ToyRunner, alone, drain, make_core, toy_logits

from cedar.engine.assemble import EngineConfig
from cedar.engine.core import EngineCore
from cedar.engine.engine import Engine
from cedar.engine.llm import LLM
from cedar.engine.output import Output
from cedar.engine.params import SamplingParams
from cedar.errors import CapacityError, CedarError, ConfigError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
SAMPLED = SamplingParams(seed=5, max_tokens=12, repetition_penalty=1.2, top_p=0.9)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random ones, of which some share a beginning."""
    draw = random.Random(seed)
    shared = [draw.randrange(2, VOCAB) for _ in range(11)]
    return [
        [*shared[: draw.randrange(12)], *(draw.randrange(2, VOCAB) for _ in range(1 + k % 9))]
        for k in range(count)
    ]


def params(k: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if k % 3 == 0 else 0.8, seed=k, max_tokens=3 + k % 12, top_k=k % 2 * 20
    )


# --- equal to alone -------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("num_pages", [64, 9])
def test_every_request_equals_itself_alone(draft: bool, num_pages: int) -> None:
    core = make_core(num_pages=num_pages, draft=draft)
    given = prompts(24)
    ids = [core.submit(core.request(p, params(k))) for k, p in enumerate(given)]
    found = drain(core)
    for k, (id, prompt) in enumerate(zip(ids, given, strict=True)):
        assert found[id, 0] == alone(prompt, params(k))
    stats = core.stats()
    assert (stats.preemptions > 0) == (num_pages == 9)
    assert stats.finished == {"length": 24}
    assert stats.running == stats.waiting == 0
    if draft:
        assert 0 < sum(stats.accepted) < sum(stats.drafted)
        assert stats.accepted_length > 1.2


def test_drafting_saves_steps() -> None:
    steps = []
    for draft in (False, True):
        core = make_core(ToyRunner(64, wrong_draft=1000), draft=draft)
        core.submit(core.request([3, 4, 5], SamplingParams(seed=1, max_tokens=40)))
        drain(core)
        steps.append(core.stats().steps)
    assert steps[1] < 0.4 * steps[0]


def test_requests_run_in_one_pass() -> None:
    runner = ToyRunner(64)
    core = make_core(runner)
    for prompt in prompts(6):
        core.submit(core.request(prompt, GREEDY))
    drain(core)
    assert max(runner.lengths) == 6


def test_a_later_request_finds_the_prefix() -> None:
    core = make_core()
    prompt = list(range(10, 30))
    for prefix_expected in (0, 16):
        core.submit(core.request(prompt, GREEDY))
        (last,) = [o for o in _all(core) if o.finish_reason]
        assert last.usage.cached_tokens == prefix_expected
    assert core.stats().cached_tokens == 16
    assert core.stats().cache_hit_rate == 16 / 40


def _all(core: EngineCore) -> list[Output]:
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


# --- several samples ------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [8, 2])
@pytest.mark.parametrize("draft", [False, True])
def test_samples_share_the_prompt_and_equal_themselves_alone(num_slots: int, draft: bool) -> None:
    core = make_core(num_slots=num_slots, draft=draft, token_budget=8)
    prompt = list(range(50, 71))  # five full pages and a token
    wanted = SamplingParams(n=4, seed=9, max_tokens=10)
    id = core.submit(core.request(prompt, wanted))
    found = drain(core)
    assert [found[id, k] for k in range(4)] == [alone(prompt, wanted, k) for k in range(4)]
    assert len({found[id, k].tokens for k in range(4)}) == 4
    if num_slots == 8 and not draft:  # the prompt ran once
        assert core.stats().computed_tokens == len(prompt) + 4 * 9


def test_samples_hold_the_pages_of_the_prompt_once() -> None:
    core = make_core()
    core.submit(core.request(list(range(50, 71)), SamplingParams(n=4, seed=9, max_tokens=3)))
    used = 0
    while core.has_work:
        core.step()
        used = max(used, core.stats().pages_used)
    assert used == 5 + 4  # five shared, one of its own for each


def test_a_page_that_is_not_copied_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(ToyRunner(64, copies=False))
    id = core.submit(core.request(list(range(50, 71)), SamplingParams(n=2, max_tokens=6)))
    assert drain(core)[id, 1].finish_reason == "error"
    assert "the slot and the pages contradict each other" in caplog.text


# --- what is reported -----------------------------------------------------------------------


def test_logprobs_are_those_of_the_model() -> None:
    core = make_core(draft=True, token_budget=9)
    prompt = list(range(40, 60))
    wanted = SamplingParams(seed=2, max_tokens=6, logprobs=2, prompt_logprobs=1)
    core.submit(core.request(prompt, wanted))
    outputs = _all(core)
    tokens = [t for o in outputs for t in o.tokens]
    entries = [e for o in outputs for e in o.logprobs or ()]
    assert [e.token for e in entries] == tokens
    for k, entry in enumerate(entries):
        scores = toy_logits([*prompt, *tokens[:k]]).double().log_softmax(0)
        assert entry.logprob == pytest.approx(float(scores[entry.token]))
        assert [t for t, _ in entry.top] == scores.topk(2).indices.tolist()
    (scored,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert scored[0] is None
    assert len(scored) == len(prompt)
    for k, each in enumerate(scored[1:], 1):
        assert each is not None
        assert each.token == prompt[k]
        scores = toy_logits(prompt[:k]).double().log_softmax(0)
        assert each.logprob == pytest.approx(float(scores[prompt[k]]))


def test_prompt_scores_need_the_whole_prompt_even_if_it_is_cached() -> None:
    core = make_core()
    prompt = list(range(40, 60))
    core.submit(core.request(prompt, GREEDY))
    drain(core)
    core.submit(core.request(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    assert any(o.prompt_logprobs for o in _all(core))


def test_stop_strings_end_a_text_and_are_not_shown() -> None:
    prompt = [7, 8, 9]
    whole = alone(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    cut = whole.text[len(whole.text) // 2 :][:2]
    for draft in (False, True):
        core = make_core(draft=draft)
        id = core.submit(
            core.request(prompt, SamplingParams(temperature=0.0, max_tokens=20, stop=(cut,)))
        )
        found = drain(core)[id, 0]
        assert found.finish_reason == "stop"
        assert found.text == whole.text[: whole.text.index(cut)]


@pytest.mark.parametrize("stop", ["string", "token", "length"])
def test_the_last_output_names_the_stop_string(stop: str) -> None:
    prompt = [7, 8, 9]
    whole = alone(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    cut = whole.text[len(whole.text) // 2 :][:2]
    more: dict[str, Any] = {
        "string": {"stop": ("no such text", cut)},
        "token": {"stop_token_ids": (whole.tokens[4],)},
        "length": {},
    }[stop]
    core = make_core()
    core.submit(core.request(prompt, SamplingParams(temperature=0.0, max_tokens=20, **more)))
    *before, last = _all(core)
    assert last.stopped_by == (cut if stop == "string" else None)
    assert last.finish_reason == ("length" if stop == "length" else "stop")
    assert all(output.stopped_by is None for output in before)


def test_a_grammar_sees_accepted_tokens_only() -> None:
    class Even:
        """Only even tokens, which it counts."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self) -> torch.Tensor:
            return torch.arange(VOCAB) % 2 == 0

        def accept(self, token: int) -> None:
            self.seen.append(token)

    made: list[Even] = []

    def masks() -> Even:
        made.append(Even())
        return made[-1]

    core = make_core(draft=True)
    id = core.submit(core.request([3, 4], SamplingParams(n=2, seed=1, max_tokens=15)), masks=masks)
    found = drain(core)
    assert sum(core.stats().drafted) > sum(core.stats().accepted)
    for k in range(2):
        assert found[id, k].tokens == tuple(made[k].seen)
        assert all(token % 2 == 0 for token in made[k].seen)


def test_figures_add_up() -> None:
    core = make_core()
    for prompt in prompts(3):
        core.submit(core.request(prompt, GREEDY))
    outputs = _all(core)
    stats = core.stats()
    assert stats.generated_tokens == 27 == sum(len(o.tokens) for o in outputs)
    assert stats.prompt_tokens == sum(map(len, prompts(3)))
    assert stats.pages_total == 64
    assert stats.bytes_held == stats.pages_used * 4
    assert stats.busy_seconds > 0
    assert stats.tokens_per_second > 0
    last = [o for o in outputs if o.finish_reason][-1].usage
    assert last.generated_tokens == 9
    assert last.tokens_per_second > 0
    assert last.accepted_per_step == 1.0


# --- endings from outside -------------------------------------------------------------------


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("moment", range(8))
def test_cancel_at_any_moment(moment: int, draft: bool) -> None:
    core = make_core(num_pages=12, draft=draft, token_budget=10)
    given = prompts(6, seed=moment)
    ids = [
        core.submit(core.request(p, SamplingParams(n=1 + k % 2, seed=k, max_tokens=8)))
        for k, p in enumerate(given)
    ]
    before = [o for _ in range(moment) for o in core.step()]
    ended = core.cancel(ids[3])
    assert not core.cancel(ids[3])
    outputs = before + _all(core)
    reasons = [o.finish_reason for o in outputs if o.id == ids[3] and o.finish_reason]
    assert len(reasons) == 2
    assert ("cancelled" in reasons) == ended
    for k, (id, prompt) in enumerate(zip(ids, given, strict=True)):
        if k != 3:
            mine = [o for o in outputs if o.id == id and o.index == 0]
            wanted = SamplingParams(n=1 + k % 2, seed=k, max_tokens=8)
            assert tuple(t for o in mine for t in o.tokens) == alone(prompt, wanted).tokens
    assert core.stats().running == core.stats().waiting == 0


def test_a_deadline_ends_only_its_request() -> None:
    core = make_core()
    late = core.submit(
        core.request([5, 6], SamplingParams(n=2, seed=1, max_tokens=240), timeout=0.05)
    )
    other = core.submit(core.request([5, 6, 7], GREEDY))
    found = drain(core)
    assert found[late, 0].finish_reason == found[late, 1].finish_reason == "deadline"
    assert 0 < len(found[late, 0].tokens) < 200
    assert found[other, 0] == alone([5, 6, 7], GREEDY)


def test_a_deadline_in_the_queue_ends_all_samples() -> None:
    core = make_core(num_slots=1)
    core.submit(core.request([5, 6], SamplingParams(seed=1, max_tokens=200)))
    late = core.submit(core.request([8], SamplingParams(n=3, max_tokens=2), timeout=0.02))
    found = drain(core)
    assert {found[late, k] for k in range(3)} == {((), "", "deadline")}


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda c: c.request([], GREEDY), "the prompt has no tokens"),
        (lambda c: c.request([2, VOCAB], GREEDY), "prompt token 1 is 300; expected 0 to 299"),
        (lambda c: c.request([2] * 1000, GREEDY), "positions end at 1000"),
        (
            lambda c: c.request([2] * 250, GREEDY),
            "250 tokens and max_tokens is 9, together 259; allowed are 256",
        ),
        (lambda c: c.request([2], {"top_q": 1}), "'top_q' unknown; expected some of max_tokens"),
        (lambda c: c.request([2], {"top_p": 2}), "top_p is 2; expected more than 0"),
        (lambda c: c.request([2], {"logit_bias": {"300": 1}}), "logit_bias names token 300"),
        (lambda c: c.request([2], GREEDY, timeout=-1), "timeout is -1; expected"),
        (lambda c: c.request([2], GREEDY, timeout="soon"), "timeout is 'soon'; expected"),
        (lambda c: c.request([2], GREEDY, priority=0.5), "priority is 0.5; expected"),
        (lambda c: c.request(7, GREEDY), "the prompt is a int; expected text"),
        (lambda c: c.request([2, "a"], GREEDY), "prompt token 1 is 'a'; expected 0 to"),
        (lambda c: c.submit(c.request([2], GREEDY, id="taken")), "'taken' is in use"),
    ],
)
def test_mistakes_are_named_and_the_others_are_served(
    make: Callable[[EngineCore], Any], said: str
) -> None:
    core = make_core()
    core.submit(core.request([4, 5], GREEDY, id="taken"))
    core.step()
    with pytest.raises(RequestError, match=said):
        make(core)
    assert drain(core)["taken", 0].finish_reason == "length"


def test_ids_of_samples_are_taken_too() -> None:
    core = make_core()
    core.submit(core.request([4, 5], SamplingParams(n=3, max_tokens=2), id="a"))
    with pytest.raises(RequestError, match="'a/2' is in use"):
        core.submit(core.request([4, 5], GREEDY, id="a/2"))
    core.submit(core.request([4, 5], GREEDY, id="a/3"))
    assert len(drain(core)) == 4


@pytest.mark.parametrize("breaks", [2, 3])
def test_a_grammar_that_breaks_for_one_sample_ends_that_one(breaks: int) -> None:
    class Grammar:
        def __init__(self) -> None:
            made.append(self)
            self.broken = len(made) == breaks == 3
            if len(made) == breaks == 2:
                raise KeyError("no grammar")

        def allowed(self) -> None:
            if self.broken:
                raise KeyError("no such rule")

        def accept(self, token: int) -> None:
            pass

    made: list[Grammar] = []
    core = make_core()
    wanted = SamplingParams(n=3, seed=1, max_tokens=4)
    id = core.submit(core.request([7, 8], wanted), masks=Grammar)
    found = drain(core)
    for k in range(3):
        if k == breaks - 1:
            assert found[id, k].finish_reason == "error"
        else:
            assert found[id, k] == alone([7, 8], wanted, k)


def test_max_tokens_ends_with_the_models_positions() -> None:
    core = make_core(num_pages=250)
    id = core.submit(core.request([2] * 995, SamplingParams(seed=0, max_tokens=900)))
    assert len(drain(core)[id, 0].tokens) == 5


def test_a_full_queue_says_so() -> None:
    core = make_core(max_waiting=2)
    for _ in range(2):
        core.submit(core.request([4, 5], GREEDY))
    assert not core.accepts
    with pytest.raises(CapacityError, match="max_waiting is 2"):
        core.submit(core.request([4, 5], GREEDY))


def test_a_refused_request_ends_alone() -> None:
    core = make_core(ToyRunner(64, poison=99))
    given = [[5, 6], [7, 99, 8], [9, 10, 11]]
    ids = [core.submit(core.request(p, GREEDY)) for p in given]
    outputs = _all(core)
    (failed,) = [o for o in outputs if o.finish_reason == "error"]
    assert failed.id == ids[1]
    assert "token 99 is too much" in str(failed.error)
    for id, prompt in ((ids[0], given[0]), (ids[2], given[2])):
        tokens = tuple(t for o in outputs if o.id == id for t in o.tokens)
        assert tokens == alone(prompt, GREEDY).tokens


def test_a_fault_of_the_runner_is_not_the_end_of_the_engine() -> None:
    core = make_core(ToyRunner(64, crash=99))
    id = core.submit(core.request([7, 99, 8], GREEDY))
    assert drain(core)[id, 0].finish_reason == "error"
    id = core.submit(core.request([7, 8], GREEDY))
    assert drain(core)[id, 0] == alone([7, 8], GREEDY)


def test_a_fault_of_the_runner_ends_the_guilty_alone() -> None:
    runner = ToyRunner(64, crash=99)
    core = make_core(runner, draft=True)
    given = [[5, 6], [7, 99, 8], [9, 10, 11]]
    ids = [core.submit(core.request(prompt, GREEDY)) for prompt in given]
    found = drain(core)
    assert found[ids[1], 0].finish_reason == "error"
    for id, prompt in ((ids[0], given[0]), (ids[2], given[2])):
        assert found[id, 0] == alone(prompt, GREEDY)
    assert runner.slots == {}  # all are closed


def test_a_grammar_that_breaks_ends_its_request() -> None:
    class Broken:
        def allowed(self) -> torch.Tensor:
            raise KeyError("no such rule")

        def accept(self, token: int) -> None:
            pass

    core = make_core()
    broken = core.submit(core.request([7, 8], GREEDY), masks=Broken)
    good = core.submit(core.request([7, 8, 9], GREEDY))
    found = drain(core)
    assert found[broken, 0].finish_reason == "error"
    assert found[good, 0] == alone([7, 8, 9], GREEDY)


# --- the disk -------------------------------------------------------------------------------


def test_prefixes_outlive_the_engine(tmp_path: Path) -> None:
    prompt = list(range(10, 30))
    for expected in (0, 16):
        core = make_core(disk=tmp_path / "cache")
        core.submit(core.request(prompt, GREEDY))
        outputs = _all(core)
        assert tuple(t for o in outputs for t in o.tokens) == alone(prompt, GREEDY).tokens
        assert outputs[-1].usage.cached_tokens == expected
        core.close()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_what_an_unfinished_request_stored_outlives_the_engine_too(
    how: str, tmp_path: Path
) -> None:
    prompt = list(range(10, 30))
    core = make_core(disk=tmp_path / "cache")
    endless = SamplingParams(temperature=0.0, max_tokens=200)
    id = core.submit(core.request(prompt, endless, timeout=0.1 if how == "deadline" else None))
    for _ in range(10):
        core.step()
    if how == "cancelled":
        core.cancel(id)
    assert drain(core)[id, 0].finish_reason == how
    core.close()
    core = make_core(disk=tmp_path / "cache")
    core.submit(core.request(prompt, GREEDY))
    assert _all(core)[-1].usage.cached_tokens == 16
    core.close()


# --- the asynchronous face ------------------------------------------------------------------


async def _text(engine: Engine, id: str) -> list[Output]:
    return [output async for output in engine.stream(id)]


def test_many_clients_stream_at_once() -> None:
    async def go() -> None:
        async with Engine.around(make_core(draft=True)) as engine:
            given = prompts(10)

            async def client(k: int) -> None:
                id = await engine.submit(given[k], params(k))
                outputs = await _text(engine, id)
                expected = alone(given[k], params(k))
                assert tuple(t for o in outputs for t in o.tokens) == expected.tokens
                assert "".join(o.text for o in outputs) == expected.text
                assert outputs[-1].finish_reason == expected.finish_reason

            await asyncio.gather(*(client(k) for k in range(10)))
            assert engine.stats().finished == {"length": 10}

    asyncio.run(go())


def test_mistakes_are_raised_where_they_are_made() -> None:
    async def go() -> None:
        async with Engine.around(make_core()) as engine:
            good = await engine.submit([4, 5], GREEDY)
            with pytest.raises(RequestError, match="top_p is 3"):
                await engine.submit([4, 5], {"top_p": 3})
            with pytest.raises(RequestError, match="'nobody' is unknown"):
                await _text(engine, "nobody")
            assert (await _text(engine, good))[-1].finish_reason == "length"
            with pytest.raises(RequestError, match="stream has ended"):
                await _text(engine, good)

    asyncio.run(go())


def test_cancelling_and_leaving_a_stream_end_the_request() -> None:
    async def go() -> None:
        async with Engine.around(make_core(num_pages=250)) as engine:
            endless = SamplingParams(seed=1, max_tokens=900)
            first = await engine.submit([4, 5], endless)
            second = await engine.submit([6], endless)
            third = await engine.submit([6, 7], GREEDY)
            async for _ in engine.stream(second):
                break
            assert await engine.cancel(first)
            assert (await _text(engine, first))[-1].finish_reason == "cancelled"
            assert not await engine.cancel(first)
            assert (await _text(engine, third))[-1].finish_reason == "length"
            while engine.stats().running:
                await asyncio.sleep(0.01)
            assert engine.stats().finished["cancelled"] == 2

    asyncio.run(go())


def test_closing_ends_streams_and_the_thread() -> None:
    async def go() -> None:
        engine = Engine.around(make_core(num_pages=250))
        assert engine.alive
        id = await engine.submit([4, 5], SamplingParams(seed=1, max_tokens=900))
        reader = asyncio.create_task(_text(engine, id))
        await asyncio.sleep(0.05)
        await engine.close()
        assert (await reader)[-1].finish_reason == "cancelled"
        with pytest.raises(RequestError, match="engine is closed"):
            await engine.submit([4], GREEDY)
        assert not engine.alive
        await engine.close()

    before = threading.active_count()
    asyncio.run(go())
    assert threading.active_count() == before


def test_a_fault_of_the_loop_reaches_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        core = make_core()

        def fail(now: float) -> Any:
            raise ZeroDivisionError("broken books")

        monkeypatch.setattr(core._scheduler, "step", fail)
        async with Engine.around(core) as engine:
            id = await engine.submit([4, 5], GREEDY)
            last = (await _text(engine, id))[-1]
            assert last.finish_reason == "error"
            assert isinstance(last.error, CedarError)
            assert "broken books" in str(last.error)
            assert not engine.alive
            with pytest.raises(RequestError, match="stopped after a fault"):
                await engine.submit([4], GREEDY)

    asyncio.run(go())


# --- many prompts from a script -------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM.around(make_core(max_waiting=3, num_slots=2))
    given = prompts(8)
    done = llm.generate(given, [params(k) for k in range(8)])
    for k, each in enumerate(done):
        expected = alone(given[k], params(k))
        assert (tuple(each.tokens), each.text, each.finish_reason) == expected
    assert capfd.readouterr().out == ""  # the bar is on standard error


def test_one_prompt_and_a_text() -> None:
    llm = LLM.around(make_core())
    (done,) = llm.generate([3, 4], SamplingParams(seed=1, n=3, max_tokens=4), progress=False)
    assert len(done.samples) == 3
    wide = SamplingParams(max_tokens=1)
    with pytest.raises(RequestError, match=r"prompt 0: .* expected 0 to 299"):
        llm.generate("Some text with words", wide, progress=False)  # ids beyond the toy's


def test_a_prompt_that_cannot_be_served_is_named_before_any_runs() -> None:
    llm = LLM.around(make_core())
    with pytest.raises(RequestError, match="prompt 1: prompt token 0 is 999"):
        llm.generate([[3], [999]], GREEDY, progress=False)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        llm.generate([[3], [4]], [GREEDY], progress=False)
    assert llm.stats().steps == 0


def test_settings_that_are_wrong_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(pool_tokens=0, replay="half", max_running=-1)
    for name in ("pool_tokens is 0", "replay is 'half'; expected one of", "max_running is -1"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="token_budget is 4; expected at least max_running"):
        EngineConfig(token_budget=4)
    with pytest.raises(RequestError, match="no option drafts; expected one of device"):
        LLM("cedar-tiny", drafts=True)
