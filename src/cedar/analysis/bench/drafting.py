"""Drafting: how many tokens a round gives, and what it costs in steps."""

import dataclasses
import statistics
import time
from collections.abc import Iterator

from torch import Tensor

from cedar.analysis.bench.rig import Rig

__all__ = ["drafting"]

_PROMPT = 256


def drafting(rig: Rig) -> Iterator[tuple[str, float]]:
    """Greedy text, drafted and verified, and the same text token by token.

    The formula: speedup = accepted length / (T_verify / T_step + T_draft / T_step). Beside it the
    speedup that was measured, both texts from the clock on the wall.
    """
    if not rig.loaded.model.config.n_mtp_layers:
        return
    rounds = 16 if rig.quick else 64
    text, seconds, draft, verify = _with_drafts(rig, rounds)
    plain, alone, step = _without(rig, len(text))
    pairs = enumerate(zip(text, plain, strict=True))
    equal = next((n for n, (a, b) in pairs if a != b), len(text))
    cost = draft / step + verify / step
    yield "accepted_length", len(text) / rounds
    yield "draft_verify_over_step", verify / step
    yield "draft_draft_over_step", draft / step
    yield "draft_round_over_step", cost
    yield "drafting_speedup_by_formula", len(text) / rounds / cost
    yield "drafting_speedup_measured", alone / seconds
    # Where rows round by how many there are (`cedar.ops.linear.rows`) a near-tie may differ.
    yield "drafting_equal_until_token", equal
    yield "drafting_measured_over_formula", (alone / seconds) / (len(text) / rounds / cost)


def _with_drafts(rig: Rig, rounds: int) -> tuple[list[int], float, float, float]:
    """The text, its seconds, and the median seconds of drafting and of verifying."""
    capacity = _PROMPT + 8 * rounds + 64
    runner = rig.runner(capacity, draft=True)
    runner.open(0)
    (result,) = runner.execute([rig.work(rig.text[:_PROMPT], 0, _PROMPT, capacity)])
    committed, position = int(_rows(result.logits)[-1].argmax()), _PROMPT
    text: list[int] = []
    drafts, verified = [], []
    begin = time.perf_counter()
    for _ in range(rounds):
        start = time.perf_counter()
        block = runner.draft([0], [committed]).tokens_NB[0].tolist()
        middle = time.perf_counter()
        work = rig.work([committed, *block], position, _PROMPT, capacity)
        (result,) = runner.execute([dataclasses.replace(work, wants_logits="all")])
        truth = _rows(result.logits).argmax(-1).tolist()
        good = 0
        while good < len(block) and block[good] == truth[good]:
            good += 1
        runner.rollback(0, position + 1 + good)
        position, committed = position + 1 + good, truth[good]
        text += truth[: good + 1]
        drafts.append(middle - start)
        verified.append(time.perf_counter() - middle)
    seconds = time.perf_counter() - begin
    return text, seconds, statistics.median(drafts), statistics.median(verified)


def _without(rig: Rig, count: int) -> tuple[list[int], float, float]:
    """The text, its seconds, and the median seconds of a step."""
    capacity = _PROMPT + count + 64
    runner = rig.runner(capacity)
    runner.open(0)
    (result,) = runner.execute([rig.work(rig.text[:_PROMPT], 0, _PROMPT, capacity)])
    text, steps = [int(_rows(result.logits)[-1].argmax())], []
    begin = time.perf_counter()
    for n in range(count):
        start = time.perf_counter()
        (result,) = runner.execute([rig.work(text[-1:], _PROMPT + n, _PROMPT, capacity)])
        text.append(int(_rows(result.logits)[-1].argmax()))
        steps.append(time.perf_counter() - start)
    return text[1:], time.perf_counter() - begin, statistics.median(steps)


def _rows(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise RuntimeError("the runner returned no logits")
    return logits
