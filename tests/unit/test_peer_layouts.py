"""Rows and keys as other libraries want them, read back byte by byte; columns without a peer."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.ops.peers")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.ops.peers.{name}")


def test_rows_of_flash_mla(peers: ModuleType) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    pages, held = module("flash_mla").pack(x)
    assert pages.shape == (2, 64, 1, 584)
    assert pages.stride(0) % 576 == 0
    for row in (0, 63, 64, 127):
        page = pages[row // 64].flatten()
        data = page[row % 64 * 576 :][:576]
        scales = page[64 * 576 + row % 64 * 8 :][:7].float()
        codes = data[:448].view(torch.float8_e4m3fn).float().view(7, 64)
        values = codes * torch.exp2(scales - 127).unsqueeze(1)
        assert torch.equal(values.flatten(), held[row, :448])
        assert torch.equal(data[448:].view(torch.bfloat16), x[row, 448:])
    torch.testing.assert_close(held, x.float(), rtol=2**-4, atol=2**-8)
    assert torch.equal(held[:, 448:], x[:, 448:].float())


def test_keys_of_deep_gemm(peers: ModuleType) -> None:
    x = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    pages, codes, scale = module("deep_gemm").pack_keys(x)
    assert pages.shape == (3, 64, 1, 132)
    page = pages[1].flatten()
    found = page[64 * 128 :].view(torch.float32).view(64, 1)
    found = found * page[: 64 * 128].view(torch.float8_e4m3fn).float().view(64, 128)
    assert torch.equal(found, codes[1].float() * scale[1].unsqueeze(1))
    torch.testing.assert_close(found, x[1].float(), rtol=2**-4, atol=2**-7)


def test_rows_with_a_scale_for_128_values(peers: ModuleType) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    codes, scale = module("deep_gemm").cast_rows(x)
    assert (codes.shape, scale.shape) == ((5, 256), (5, 2))
    wide = codes.float() * scale.repeat_interleave(128, 1)
    torch.testing.assert_close(wide, x, rtol=2**-4, atol=2**-7)


def test_rows_of_selected_blocks(peers: ModuleType) -> None:
    """As fla's NSA sees them: absent blocks and later rows hidden."""
    chosen = torch.tensor([[-1, 0]]).repeat(130, 1)
    chosen[64:] = torch.tensor([0, 1])
    chosen[128:] = torch.tensor([1, 2])
    slots = module("fla").block_slots(chosen)
    assert slots.shape == (130, 128)
    for query, first in ((0, 0), (63, 0), (64, 0), (127, 0), (128, 64), (129, 64)):
        seen = slots[query][slots[query] >= 0]
        assert torch.equal(seen, torch.arange(first, query + 1))


def test_a_boundary_in_the_order_of_v4(peers: ModuleType) -> None:
    mhc = importlib.import_module("cedar.ops.mhc")
    plain = importlib.import_module("cedar.ops.mhc.reference")
    settings = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, y, weight = normal(5, 4, 32), normal(5, 32), normal(32)
    mix = mhc.MhcMix(normal(5, 4), normal(5, 4), normal(5, 4, 4))
    parameters = mhc.MhcParameters(normal(24, 128) / 12, normal(24), torch.ones(3).double())
    new = plain.mhc_expand(x, y, mix)
    made = plain.mhc_coefficients(new, *parameters, **settings)
    h = plain.rms_norm(plain.mhc_collapse(new, made.pre_TC), weight, 1e-20)
    v4 = module("v4")
    case = x, (y, mix), mix.pre_TC, parameters, weight
    assert v4.boundary_error(case, (new, made, h), settings) < 1e-12
    assert v4.boundary_error(case, (new, made, 1.1 * h), settings) > 0.05
    # Streams take a sublayer's output by post: the sum of its coefficients, all gradients one.
    grads = torch.ones_like(x), torch.zeros_like(y)
    found = v4.boundary_gradients((x, y, *parameters, weight), grads, settings)
    post = plain.mhc_coefficients(x, *parameters, **settings).post_TC
    torch.testing.assert_close(found[1], post.sum(1, keepdim=True).expand_as(y))
    assert found[5].abs().max() == 0


def test_a_peer_that_is_missing_or_wrong_is_said(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = module("flashinfer").top_k([torch.zeros(1, 8)], 2)
    assert set(found.others) == {"flashinfer", "flashinfer_ties"}
    assert all(str(said).startswith("cannot run: ModuleNotF") for said in found.others.values())
    assert found.more == {}

    built = peers.Built([lambda: None], 0.5, 3)
    found = peers.column("someone", lambda: built)
    assert found.others == {"someone": "not timed: error above 0.01"}
    assert found.more == {"someone_error": 0.5, "someone_bytes": 3}
    found = peers.column("someone", lambda: built, bound=0.5) | peers.Columns({"else": "no"})
    assert callable(found.others["someone"])
    assert found.others["else"] == "no"
