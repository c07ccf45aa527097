"""Whole models on kernels and CUDA graphs: golden parity, and decoding under every plan."""

import copy
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cedar.analysis.parity import run_parity
from cedar.cache.layout import KVLayout
from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import LoadedModel, load_model
from cedar.engine.core import EngineCore
from cedar.engine.output import TokenLogprob
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Decoding, Runner
from cedar.engine.runner_protocol import Work
from cedar.model import Batch
from cedar.ops import select_ops, with_operations
from cedar.testing.tiny import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GOLDEN = Path(__file__).parents[1] / "golden"
SETS = ("mini_bf16.expect_fp32", "mini_fp8fp4.expect_fp32", "mini_bf16.expect_bf16",
        "mini_fp8fp4.expect_bf16")  # fmt: skip


# What an H200 gave, on plain PyTorch, too.
KNOWN = {"mini_fp8fp4.expect_fp32": "last bits decide how a quantiser rounds: an expert in layer 8"}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("name", SETS)
def test_golden_parity_on_the_device(name: str, kernels: bool, request: Any) -> None:
    if name in KNOWN:
        request.applymarker(pytest.mark.xfail(reason=KNOWN[name], strict=True))
    report = run_parity(GOLDEN, name, device="cuda", ops=select_ops("cuda", kernels=kernels))
    assert report.failures == ()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("name", KNOWN)
def test_golden_parity_but_for_last_bits(name: str, kernels: bool) -> None:
    """Where a last bit decides, some noise in the last bit gives every number of the golden set.

    So nothing else is different: a mistake would stay in every draw.
    """
    ops = select_ops("cuda", kernels=kernels)

    def holds(seed: int) -> bool:
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def rms_norm(*args: Any, **options: Any) -> torch.Tensor:
            y = ops.rms_norm(*args, **options)
            if y.dtype != torch.float32:
                return y
            noise = torch.randn(y.shape, generator=generator, device="cuda")
            return y * (1 + 6e-8 * noise)  # half of a float32's last bit

        changed = with_operations(ops, rms_norm=rms_norm)
        return run_parity(GOLDEN, name, device="cuda", ops=changed).failures == ()

    assert any(holds(seed) for seed in range(8))


@cache
def loaded() -> LoadedModel:
    found = load_model("cedar-tiny", device="cuda")
    assert found.model.ops.has_kernels
    return found


PROMPT, PAGE = 300, 64


def new_runner(decoding: Decoding, draft: bool = True) -> Runner:
    layout = KVLayout.from_config(loaded().model.config, page_tokens=PAGE)
    return Runner(loaded(), layout, num_pages=64, num_slots=4, draft=draft, decoding=decoding)


def words(length: int, seed: int) -> list[int]:
    """Random tokens without the special ones at the end of the vocabulary."""
    return [token % 2500 for token in random_tokens(loaded().model.config, length, seed=seed)]


def work(slot: int, start: int, count: int) -> Work:
    text = words(PROMPT + 64, slot)
    return Work(
        slot=slot,
        tokens=tuple(text[start : start + count]),
        start=start,
        pages=tuple(range(slot * 16, slot * 16 + 16)),
        wants_logits="all" if start else "last",
        is_last_chunk=True,
        prompt_tokens=PROMPT,
    )


def decoded(decoding: Decoding) -> list[torch.Tensor]:
    runner = new_runner(decoding)
    for slot in range(3):
        runner.open(slot)
    found = []
    for batch in (
        [work(slot, 0, PROMPT) for slot in range(3)],
        [work(0, PROMPT, 1)],
        [work(slot, PROMPT + (slot == 0), 1) for slot in range(3)],
        [work(0, PROMPT + 2, 4), work(2, PROMPT + 1, 6)],
        [work(slot, PROMPT + (6, 1, 7)[slot], 1) for slot in (2, 0, 1)],
    ):
        found += [result.logits for result in runner.execute(batch)]
    proposal = runner.draft([0, 1, 2], [5, 6, 7])
    return [*found, proposal.logits_NBV]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_graphs_change_nothing() -> None:
    """Recorded passes give the bits of the same passes run as they are."""
    plain, recorded = decoded(Decoding.DEVICE), decoded(Decoding.GRAPHS)
    for number, (want, got) in enumerate(zip(plain, recorded, strict=True)):
        assert torch.equal(got, want), number


def test_decoding_on_kernels_is_decoding() -> None:
    """As far from float32 on a CPU as plain PyTorch in bfloat16 on this device is."""
    text = words(PROMPT + 64, 0)[: PROMPT + 6]
    cpu = load_model("cedar-tiny", device="cpu").model
    plain = copy.deepcopy(loaded().model)
    ops = select_ops("cuda", kernels=False)
    for module in plain.modules():
        if hasattr(module, "ops"):
            module.ops = ops
    with torch.inference_mode():
        exact = cpu(Batch.pack([text])).logits[PROMPT:]
        near = plain(Batch.pack([text], device="cuda")).logits[PROMPT:].cpu()
    on_kernels = decoded(Decoding.GRAPHS)
    rows = torch.cat([on_kernels[3], on_kernels[4], on_kernels[7]]).cpu()
    errors = error(rows, exact), error(near, exact)
    assert errors[0] < 1.5 * errors[1] + 0.01, errors
    # The same, planned by the host from a store of numbers, drafts included. One more rounding in
    # every product moves single outputs of this model by up to 0.3, when a selection changes.
    apart = [error(got, w) for w, got in zip(decoded(Decoding.HOST), on_kernels, strict=True)]
    assert statistics.median(apart) < errors[1], apart
    assert max(apart) < 0.5, apart


Text = list[TokenLogprob]


def texts(core: EngineCore, prompts: list[list[int]], tokens: int) -> list[Text]:
    """Greedy texts with the two likeliest tokens at every place."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    for number, prompt in enumerate(prompts):
        core.submit(core.request(prompt, params, id=str(number)))
    found: dict[str, Text] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            found.setdefault(output.id, []).extend(output.logprobs or ())
    return [found[str(number)] for number in range(len(prompts))]


def pairs(**options: Any) -> list[tuple[Text, Text]]:
    """Of 200 prompts the text without drafts and with them."""
    # Longer than 128 tokens: products of fewer have kernels for every few lengths, each to compile.
    prompts = [words(130 + 4 * (n % 40), n) for n in range(200)]
    found = []
    for draft in (False, True):
        config = EngineConfig(
            draft=draft, max_running=16, pool_tokens=16384, decoding="graphs", check=True, **options
        )
        found.append(texts(build_core(loaded(), config), prompts, 12))
    return list(zip(*found, strict=True))


def test_drafts_change_no_greedy_text() -> None:
    """In passes of one size not even the last bit of a probability."""
    for number, (without, with_drafts) in enumerate(pairs(batch_invariant=True)):
        assert without == with_drafts, number


def test_drafts_part_texts_where_two_tokens_are_near() -> None:
    """A pass over several tokens may round differently from a pass over one, and a rounding before
    a quantiser or a selection moves this model. So texts part, but where the two likeliest tokens
    are much nearer to each other than elsewhere, and mostly for the second of them."""
    elsewhere, parted, second = [], [], []
    for without, with_drafts in pairs():
        for one, other in zip(without, with_drafts, strict=True):
            (_, likeliest), (runner_up, next_to_it) = one.top
            if one.token != other.token:
                parted.append(likeliest - next_to_it)
                second.append(other.token == runner_up)
                break
            elsewhere.append(likeliest - next_to_it)
    gaps = statistics.median(parted or [0.0]), statistics.median(elsewhere)
    print(
        f"{len(parted)} texts part, {sum(second)} for the second; nats {gaps[0]:.3f} {gaps[1]:.3f}"
    )
    if parted:
        assert gaps[0] < gaps[1] / 4
        assert sum(second) > len(second) / 2
