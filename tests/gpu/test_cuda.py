"""The plain PyTorch implementation on a GPU against the same on a CPU.

In float64 no quantiser boundary and no top-k tie depends on the order of sums, so the two devices
must make the same choices; casts must agree bit for bit.
"""

import pytest
import torch

import cedar
from cedar.cache import DenseKV
from cedar.model import Batch, Model, TrainSignals
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_BLOCK, FP8_ROW, BlockFormat, fake_quantize, quantize
from cedar.testing.tiny import random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (41, 7, 23)


def pair() -> tuple[Model, Model]:
    return tiny_model(), tiny_model().to("cuda")


def tokens(model: Model) -> list[list[int]]:
    flat = random_tokens(model.config, sum(LENGTHS), seed=5)
    stops = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    return [flat[stop - length : stop] for stop, length in zip(stops, LENGTHS, strict=True)]


class Selections:
    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def wants(self, name: str) -> bool:
        return False

    def record(self, name: str, value: torch.Tensor) -> None:
        if name.endswith(("topk_idxs", "candidates", "gate.indices", "hash_ids")):
            self.values[name] = value.cpu()


def test_logits_and_every_choice_agree() -> None:
    cpu, gpu = pair()
    seen_cpu, seen_gpu = Selections(), Selections()
    with torch.no_grad():
        on_cpu = cpu(Batch.pack(tokens(cpu)), probe=seen_cpu)
        on_gpu = gpu(Batch.pack(tokens(cpu), device="cuda"), probe=seen_gpu)
    # Rotary tables are float32 on every device, and cosines of two devices differ in the last bit.
    torch.testing.assert_close(on_gpu.logits.cpu(), on_cpu.logits, rtol=0, atol=1e-5)
    assert seen_cpu.values.keys() == seen_gpu.values.keys()
    assert len(seen_cpu.values) > 10
    for name, value in seen_cpu.values.items():
        assert torch.equal(value.sort(-1).values, seen_gpu.values[name].sort(-1).values), name


def test_stepping_agrees_with_one_forward() -> None:
    _, gpu = pair()
    sequences = tokens(gpu)
    store = DenseKV(gpu.config, len(sequences), device="cuda", dtype=torch.float64)
    with torch.no_grad():
        whole = gpu(Batch.pack(sequences, device="cuda")).logits
        heads = [s[:-3] for s in sequences]
        gpu(Batch.pack(heads, device="cuda"), store)
        for step in range(3):
            part = [[s[len(s) - 3 + step]] for s in sequences]
            last = gpu(Batch.pack(part, device="cuda"), store).logits
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    torch.testing.assert_close(last, whole[ends.cuda()], rtol=0, atol=1e-9)


def test_gradients_agree() -> None:
    signals = TrainSignals(index_loss=True, balance_loss=True)
    found = []
    for model, device in zip(pair(), ("cpu", "cuda"), strict=True):
        out = model(Batch.pack(tokens(model), device=device), signals=signals)
        loss = out.logits.square().mean()
        for stats in out.stats:
            for extra in (stats.index_loss, stats.balance_loss):
                loss = loss if extra is None else loss + extra
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append([None if g is None else g.cpu().double() for g in grads])
    assert sum(g is not None for g in found[0]) > 100
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert (on_cpu is None) == (on_gpu is None)
        if on_cpu is not None and on_gpu is not None:
            torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("fmt", [FP8_BLOCK, FP8_ROW, FP4_ROW, FP4_MAIN], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_agree_bit_for_bit(fmt: BlockFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    size = torch.exp2(torch.randint(-12, 8, (256, 1), generator=generator).float())
    x = (torch.randn(256, 160, generator=generator) * size).to(dtype)
    on_cpu, on_gpu = quantize(x, fmt), quantize(x.cuda(), fmt)
    assert torch.equal(on_gpu.codes.cpu().view(torch.uint8), on_cpu.codes.view(torch.uint8))
    assert torch.equal(on_gpu.scale.cpu().view(torch.uint8), on_cpu.scale.view(torch.uint8))
    assert torch.equal(fake_quantize(x.cuda(), fmt).cpu(), fake_quantize(x, fmt))


def test_the_bundled_model_says_the_same() -> None:
    texts = []
    for device in ("cpu", "cuda"):
        loaded = cedar.load_model("cedar-tiny", device=device, dtype=torch.float32)
        ids = [0, *loaded.tokenizer.encode("The President of the United States", control=False)]
        params = cedar.SamplingParams(max_tokens=24, temperature=0.0)
        *_, state = cedar.generate(loaded, ids, params)
        texts.append(state.tokens)
    # Rounding may part them at a near-tie, not from the start.
    assert texts[0][:8] == texts[1][:8]


def test_bfloat16_runs_and_stays_close() -> None:
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        loaded = cedar.load_model("cedar-tiny", device="cuda", dtype=dtype)
        ids = [0, *loaded.tokenizer.encode("The President of the United States", control=False)]
        with torch.inference_mode():
            logits.append(loaded.model(Batch.pack([ids], device="cuda")).logits)
    top = [value.argmax(-1) for value in logits]
    assert (top[0] == top[1]).float().mean() > 0.7


def test_the_engine_says_the_same_with_and_without_drafts() -> None:
    """On the GPU: batches, the packed cache and drafting change no token (float32)."""
    prompts = ["The President of the United States", "And the LORD said", "HAMLET."]
    found = []
    for options in ({}, {"draft": True}, {"max_running": 1}):
        llm = cedar.LLM(
            "cedar-tiny", device="cuda", dtype=torch.float32, pool_tokens=2048, **options
        )
        params = cedar.SamplingParams(max_tokens=24, temperature=0.0)
        found.append([out.tokens for out in llm.generate(prompts, params, progress=False)])
    for other in found[1:]:
        same = [a == b for a, b in zip(found[0], other, strict=True)]
        # Sums in batches of other shapes may round apart at a near-tie, not everywhere.
        assert sum(same) >= len(same) - 1
