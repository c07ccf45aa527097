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
