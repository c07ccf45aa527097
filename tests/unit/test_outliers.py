"""The trained model with outlier channels in every cache, as large trained models have them.

The bundled model is small and its caches are even: no value is ten times the median. Here a copy
of it is scaled by a power of two: some channels of windows and main KV up, and whatever reads them
down. Without quantisers this is the same function to the last bit; with them it is a model whose
scales differ from block to block by far. A pair of index keys is scaled, too.

This is the eighth of the "Faults others shipped" in the specification of inference: what a small
even model passes bit for bit may fail here, and that is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cedar.cache.dense as dense
import cedar.cache.paged as paged
from cedar.cache import DenseKV
from cedar.cache.layout import KVLayout
from cedar.cache.paged import PagedKV
from cedar.engine.build import LoadedModel, load_model
from cedar.engine.params import SamplingParams
from cedar.engine.stats import EngineStats
from cedar.model import Batch, Model
from cedar.ops import with_operations
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, BlockFormat, fake_quantize
from real_engine import drain, loaded_tiny, make_core

FACTOR = 64.0
HEAD = (5, 40, 41)  # one channel that is not rotated and a pair that is, in blocks of their own
KEY = (8, 9)  # all channels of the bundled index keys are rotated, in pairs
INPUT = (17, 90)

TEXT = "Once upon a time there was a king who had three sons, and the people of the land said: "
PAGE = 8


def weights_of(model: Model) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in model.named_parameters()}


def scale_keys(model: Model) -> None:
    """Scale a pair of the index keys up, in place.

    Its queries stay: at this width an index key is one block of FP4, and so is a query. If the
    pair were large in the one and small in the other, all products would vanish. So what is
    selected changes, as if it had been trained to be selected by this pair.
    """
    for name, weight in weights_of(model).items():
        if name.endswith("indexer.k_norm.weight"):
            weight[list(KEY)] *= FACTOR


def scale_entries(model: Model) -> None:
    """Scale channels of windows, main KV and attention's input up where they are written and
    down where they are read, in place: the same function."""
    config = model.config
    weights = weights_of(model)

    def norm(name: str, channels: Sequence[int]) -> None:
        weights[name][list(channels)] *= FACTOR

    def outputs(name: str, width: int, channels: Sequence[int]) -> None:
        """Rows of a projection to heads of ``width`` channels."""
        weights[name].unflatten(0, (-1, width))[:, list(channels)] /= FACTOR

    def inputs(name: str, width: int, channels: Sequence[int]) -> None:
        """Columns of a projection from (several times) ``width`` channels."""
        weights[name].unflatten(1, (-1, width))[..., list(channels)] /= FACTOR

    backbone = [f"layers.{plan.index}" for plan in model.plan if plan.index < config.n_layers]
    for layer in (*backbone, *(f"mtp.{k}" for k in range(config.n_mtp_layers))):
        attn = f"{layer}.attn"
        # Keys are values: queries see the channel, and so does the output projection. Main KV
        # and windows share both, so all of them have the same channels.
        norm(f"{attn}.kv_norm.weight", HEAD)
        outputs(f"{attn}.wq_b.weight", config.head_dim, HEAD)
        inputs(f"{attn}.wo_a.weight", config.head_dim, HEAD)
        if f"{attn}.compressor.norm.weight" in weights:
            norm(f"{attn}.compressor.norm.weight", HEAD)
            inputs(f"{attn}.indexer.wk.weight", config.head_dim, HEAD)
    for layer in backbone:  # draft blocks read main states, too, which pass no such norm
        norm(f"{layer}.attn_norm.weight", INPUT)
        for name in ("wq_a", "wkv", "compressor.wkv", "compressor.wgate", "indexer.weights_proj"):
            if f"{layer}.attn.{name}.weight" in weights:
                inputs(f"{layer}.attn.{name}.weight", config.dim, INPUT)


def fresh() -> LoadedModel:
    return load_model("cedar-tiny", dtype=torch.float64)


@cache
def even() -> LoadedModel:
    """The bundled model as it is; nobody may change it."""
    return fresh()


@cache
def uneven() -> LoadedModel:
    """Its copy with outliers; nobody may change it."""
    loaded = fresh()
    scale_entries(loaded.model)
    scale_keys(loaded.model)
    return loaded


@cache
def tokens() -> list[int]:
    return [0, *even().tokenizer.encode(TEXT * 5, control=False)][:99]


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


# --- the model ------------------------------------------------------------------------------------


def exchange(model: Model, **operations: Any) -> None:
    """Give a model other operations."""
    ops = with_operations(model.ops, **operations)
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = ops


def without_quantisers(model: Model) -> Model:
    exchange(model, cast=lambda x, fmt: x)
    return model


def everything(model: Model, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits of a text in two parts, and of the drafts behind it."""
    store = DenseKV(model.config, dtype=torch.float64)
    rows = []
    for part in (text[:37], text[37:]):
        batch = Batch.pack([part])
        output = model(batch, store)
        assert output.taps_TX is not None
        model.draft_write(output.taps_TX, batch, store)
        rows.append(output.logits)
    drafts = model.draft_propose(torch.tensor([7]), (0,), store)
    return torch.cat(rows), drafts.logits_NBV


def test_without_quantisers_it_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: a power of two only moves exponents. So its behaviour is a trained one."""
    monkeypatch.setattr(dense, "fake_quantize", lambda x, fmt: x)
    plain, outliers = (without_quantisers(each.model) for each in (fresh(), fresh()))
    expected = everything(plain, tokens())
    scale_entries(outliers)
    for found, wanted in zip(everything(outliers, tokens()), expected, strict=True):
        assert torch.equal(found, wanted)
    # Control: one consumer forgotten.
    weights_of(outliers)["layers.3.attn.wo_a.weight"][:, HEAD[0]] *= FACTOR
    assert not torch.allclose(everything(outliers, tokens())[0], expected[0], atol=1e-3)


def test_with_quantisers_it_is_still_a_trained_model() -> None:
    """Nine of ten next tokens are those of the model as it is."""
    chosen = [everything(each.model, tokens())[0].argmax(-1) for each in (even(), uneven())]
    assert (chosen[0] == chosen[1]).double().mean() > 0.85


def peaks(model: Model) -> dict[str, float]:
    """Of everything that a cache is made from: the largest magnitude over the median."""
    found: dict[str, float] = {}

    rms_norm = model.ops.rms_norm
    ends = ("kv_norm", "compressor.norm", "k_norm")
    norms = {id(each.weight): n for n, each in model.named_modules() if n.endswith(ends)}

    def watching(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = rms_norm(x, weight, eps)
        name = norms.get(id(weight))
        if name is not None:
            found[name] = max(found.get(name, 0.0), float(rows.abs().max() / rows.abs().median()))
        return rows

    exchange(model, rms_norm=watching)
    everything(model, tokens())
    exchange(model, rms_norm=rms_norm)
    assert len(found) == len(norms)
    return found


def test_every_cache_has_outliers() -> None:
    """Windows of all layers and draft blocks, main KV and index keys of all sources."""
    config = even().model.config
    before, after = peaks(even().model), peaks(uneven().model)
    sources = len(config.kv_source_layers)
    assert len(after) == config.n_layers + config.n_mtp_layers + 2 * sources
    assert max(before.values()) < 15  # why a scaled copy is needed
    assert min(after.values()) > 50


# --- the engine -----------------------------------------------------------------------------------


def plain_text(model: Model, prompt: list[int], most: int) -> list[int]:
    """Greedy, by the model alone: every token through every layer, one after the other."""
    store = DenseKV(model.config, dtype=torch.float64)
    new, text = prompt, []
    while len(text) < most:
        logits = model(Batch.pack([new]), store, logits="last").logits
        new = [int(logits[0].argmax())]
        text += new
    return text


PROMPTS = ((0, 50), (0, 60), (20, 61))
MOST = 12


def run(loaded: LoadedModel, **options: Any) -> tuple[list[list[int]], EngineStats]:
    """All prompts together, in chunks, greedy and with drafts."""
    settings = {"page_tokens": PAGE, "draft": True, "token_budget": 64, "max_running": 3}
    core = make_core(loaded, **settings | options)
    params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
    for k, (start, stop) in enumerate(PROMPTS):
        core.submit(core.request(tokens()[start:stop], params, id=str(k)))
    found = drain(core)
    stats = core.stats()
    core.close()
    assert all(seen.error is None for seen in found.values())
    return [found[str(k), 0].tokens for k in range(len(PROMPTS))], stats


def test_the_engine_gives_what_the_model_gives_alone() -> None:
    """In chunks, beside others, preempted in a small pool, with accepted and rejected drafts."""
    loaded = uneven()
    found, stats = run(loaded, replay="off", pool_tokens=23 * PAGE)
    assert found == [plain_text(loaded.model, tokens()[a:b], MOST) for a, b in PROMPTS]
    assert stats.preemptions > 0
    assert 0 < sum(stats.accepted) < sum(stats.drafted)


def test_pages_that_come_back_give_what_a_cold_run_gives(tmp_path: Path) -> None:
    """From the cache of the process, and from the disk in another one."""
    wanted, cold = run(uneven(), prefix_cache=False)
    assert cold.cached_tokens == 0
    for turn in range(2):
        found, stats = run(uneven(), disk_cache=tmp_path)
        assert found == wanted
        assert (stats.cached_tokens > 100) == (turn == 1)


# --- the store, and faults in it ------------------------------------------------------------------


def check_store(model: Model, text: Sequence[int], chunk: int = 33) -> None:
    """Packed and in chunks against no store at all: every logit."""
    layout = KVLayout.from_config(model.config)
    pages = layout.pages_for(len(text))
    store = PagedKV(model.config, layout, num_pages=pages, num_slots=1, dtype=torch.float64)
    store.open(0, range(pages))
    parts = [text[at : at + chunk] for at in range(0, len(text), chunk)]
    found = torch.cat([model(Batch.pack([part]), store).logits for part in parts])
    torch.testing.assert_close(found, model(Batch.pack([text])).logits, rtol=0, atol=1e-10)


def test_the_packed_store_loses_nothing() -> None:
    check_store(uneven().model, tokens(), chunk=11)


Pack = Callable[[Tensor, BlockFormat], Tensor]
REAL: Pack = paged.pack_rows
LIMIT = 8.0  # more than the caches of even models hold, less than the outliers


def saturating(x: Tensor, fmt: BlockFormat) -> Tensor:
    """As by a scale that cannot grow further: one bit of its exponent was lost."""
    return REAL(x.clamp(-LIMIT, LIMIT), fmt)


def per_tensor(x: Tensor, fmt: BlockFormat) -> Tensor:
    """One scale for all that is written at once."""
    coarse = replace(fmt, cols=max(x.numel(), 1))
    return REAL(fake_quantize(x.reshape(1, -1), coarse).view_as(x), fmt)


def per_row(x: Tensor, fmt: BlockFormat) -> Tensor:
    """One scale a row."""
    return REAL(fake_quantize(x, replace(fmt, cols=x.shape[-1])), fmt)


def neighbours(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Every row with the scales of the row before it, as from a buffer that is one row off."""
    raw = REAL(x, fmt).clone()
    codes = raw.shape[1] - x.shape[1] // fmt.cols
    raw[1:, codes:] = raw[:-1, codes:].clone()
    return raw


def faulty(fault: Pack, where: BlockFormat) -> Pack:
    return lambda x, fmt: fault(x, fmt) if fmt is where and len(x) else REAL(x, fmt)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        *((per_tensor, where) for where in (FP8_ROW, FP4_MAIN, FP4_ROW)),
        *((neighbours, where) for where in (FP8_ROW, FP4_MAIN, FP4_ROW)),
        *((per_row, where) for where in (FP8_ROW, FP4_MAIN)),  # a key here is one block
    ],
    ids=lambda each: each.name if isinstance(each, BlockFormat) else each.__name__,
)
def test_a_wrong_layout_of_scales_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: Pack, where: BlockFormat
) -> None:
    """In windows, in main KV and in index keys, each alone."""
    monkeypatch.setattr(paged, "pack_rows", faulty(fault, where))
    with pytest.raises(AssertionError):
        check_store(uneven().model, tokens())


@pytest.mark.parametrize("where", [FP8_ROW, FP4_MAIN, FP4_ROW], ids=lambda each: each.name)
def test_even_models_pass_with_a_fault_that_outliers_show(
    monkeypatch: pytest.MonkeyPatch, where: BlockFormat
) -> None:
    """Why they are needed: random weights pass to the last bit, and so do the bundled ones."""
    monkeypatch.setattr(paged, "pack_rows", faulty(saturating, where))
    check_store(even().model, tokens())
    check_store(loaded_tiny().model, tokens_of_tiny())
    with pytest.raises(AssertionError):
        check_store(uneven().model, tokens())


def tokens_of_tiny() -> list[int]:
    return [3 + (7 * k * k) % 50 for k in range(60)]
