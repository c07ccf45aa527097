"""The launches by hand, of many tokens and of few, on a device against the reference."""

import pytest
import torch
from torch import Tensor

from cedar.ops.mhc import MhcMix
from cedar.ops.mhc import reference as plain
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import mhc_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for Hopper", allow_module_level=True)
    from cedar.ops.mhc.hopper import Persistent
    from cedar.ops.mhc.hopper_few import Few
    from cedar.ops.mhc.triton import MhcStepKernel

SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}
Outputs = tuple[Tensor, MhcMix, Tensor]


def poisoned(x: Tensor, update: object) -> Outputs:
    def wide(*shape: int) -> Tensor:
        return torch.full((len(x), *shape), torch.nan, device="cuda")

    out = torch.full_like(x, torch.nan) if update is not None else x
    return out, MhcMix(wide(4), wide(4), wide(4, 4)), wide(x.shape[2]).to(x.dtype)


def launched(kernel: "Persistent | Few", case: tuple, **options: object) -> Outputs:
    found = poisoned(*case[:2])
    kernel.launch(*case, *found, **SETTINGS, **options)
    return found


def assert_good(found: Outputs, case: tuple) -> None:
    """The update within one rounding; the rest of the streams as the kernel rounded them."""
    x, update, pre, parameters, weight = case
    out, mix, h = found
    want = x.double()
    if update is not None:
        y, old = update
        want = plain.mhc_expand(want, y.double(), MhcMix(*(v.double() for v in old)))
    assert_close(out, want, "bfloat16 op")
    _, want_mix, want_h = plain.mhc_step(
        out.double(), None, pre.double(), parameters, weight, **SETTINGS
    )
    for a, b in zip(mix, want_mix, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).abs().max() < 1e-4
    assert h.isfinite().all()
    assert (h.double() - want_h).abs().max() <= 2**-7 * want_h.abs().max()
    assert (h.double() - want_h).norm() <= 2**-8 * want_h.norm()


@pytest.mark.parametrize("width", [128, 512, 5120])
def test_launches_go_on_where_the_last_one_ended(width: int) -> None:
    """Odd numbers of tiles, one after another, on the same ring; each twice, bit for bit."""
    kernel = Persistent()
    for count in (64, 1, 333, 700, 65, 1281, 333):
        case = mhc_case(seed=count, count=count, width=width, dtype=torch.bfloat16, device="cuda")
        found = launched(kernel, case)
        assert_good(found, case)
        again = launched(kernel, case)
        for a, b in zip(
            (found[0], *found[1], found[2]), (again[0], *again[1], again[2]), strict=True
        ):
            assert_bitwise(a, b)


def test_the_first_sublayer() -> None:
    case = mhc_case(seed=2, count=450, width=1024, dtype=torch.bfloat16, device="cuda")
    first = (case[0], None, *case[2:])
    assert_good(launched(Persistent(), first), first)


def test_a_token_does_not_depend_on_the_others() -> None:
    case = mhc_case(seed=4, count=900, width=5120, dtype=torch.bfloat16, device="cuda")
    kernel = Persistent()
    out, mix, h = launched(kernel, case)
    x, (y, old), pre, *rest = case
    few = slice(128, 501)
    cut = (x[few], (y[few], MhcMix(*(v[few] for v in old))), pre[few], *rest)
    some = launched(kernel, cut)
    for a, b in zip((out, *mix, h), (some[0], *some[1], some[2]), strict=True):
        assert_bitwise(a[few], b)


def test_what_the_way_back_wants() -> None:
    case = mhc_case(seed=5, count=300, width=512, dtype=torch.bfloat16, device="cuda")
    kept, rates = torch.full((25, 300), torch.nan, device="cuda"), torch.empty(300, device="cuda")
    out, _, _ = launched(Persistent(), case, keep=(kept, rates))
    flat = out.double().flatten(1)
    z = flat @ case[3].fn.double().T
    torch.testing.assert_close(kept[:24].T.double(), z, rtol=1e-4, atol=1e-4)
    rho = flat.square().mean(1).rsqrt()
    torch.testing.assert_close(kept[24].double(), rho, rtol=1e-5, atol=1e-6)
    collapsed = plain.mhc_collapse(out, case[2]).double()
    torch.testing.assert_close(
        rates.double(), collapsed.square().mean(1).rsqrt(), rtol=2e-3, atol=1e-6
    )


def test_replays_of_a_graph() -> None:
    """Counters go on through replays, with other launches between them."""
    case = mhc_case(seed=6, count=600, width=5120, dtype=torch.bfloat16, device="cuda")
    kernel = MhcStepKernel()
    want = kernel(*case, **SETTINGS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [kernel(*case, **SETTINGS) for _ in range(2)]
    for _ in range(3):
        for out, mix, h in found:
            for value in (out, *mix, h):
                value.fill_(torch.nan)
        graph.replay()
        kernel(*case, **SETTINGS)
        torch.cuda.synchronize()
        for out, mix, h in found:
            for a, b in zip((out, *mix, h), (want[0], *want[1], want[2]), strict=True):
                assert_bitwise(a, b)


@pytest.mark.parametrize("width", [128, 640, 5120])
def test_few(width: int) -> None:
    """Whole and odd tiles, one after another, on the same places; each twice, bit for bit."""
    kernel = Few()
    for count in (1, 8, 9, 16, 3, 16):
        case = mhc_case(seed=count, count=count, width=width, dtype=torch.bfloat16, device="cuda")
        assert kernel.takes(case[0], case[1], case[4])
        found, again = launched(kernel, case), launched(kernel, case)
        assert_good(found, case)
        for a, b in zip(
            (found[0], *found[1], found[2]), (again[0], *again[1], again[2]), strict=True
        ):
            assert_bitwise(a, b)


def test_few_of_the_first_sublayer() -> None:
    case = mhc_case(seed=3, count=5, width=5120, dtype=torch.bfloat16, device="cuda")
    first = (case[0], None, *case[2:])
    assert_good(launched(Few(), first), first)


def test_one_of_few_does_not_depend_on_the_others() -> None:
    x, (y, old), pre, *rest = mhc_case(
        seed=7, count=16, width=5120, dtype=torch.bfloat16, device="cuda"
    )
    kernel = Few()
    out, mix, h = launched(kernel, (x, (y, old), pre, *rest))
    for few in (slice(0, 1), slice(8, 15)):
        cut = (x[few], (y[few], MhcMix(*(v[few] for v in old))), pre[few], *rest)
        some = launched(kernel, cut)
        for a, b in zip((out, *mix, h), (some[0], *some[1], some[2]), strict=True):
            assert_bitwise(a[few], b)


def test_replays_of_few() -> None:
    """Numbers go on through replays, with launches of other sizes between them."""
    cases = [
        mhc_case(seed=count, count=count, width=5120, dtype=torch.bfloat16, device="cuda")
        for count in (2, 13)
    ]
    kernel = MhcStepKernel()
    wants = [kernel(*case, **SETTINGS) for case in cases]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        founds = [kernel(*case, **SETTINGS) for case in cases for _ in range(2)]
    for _ in range(3):
        for out, mix, h in founds:
            for value in (out, *mix, h):
                value.fill_(torch.nan)
        graph.replay()
        kernel(*cases[0], **SETTINGS)
        torch.cuda.synchronize()
        for (out, mix, h), want in zip(founds, [w for w in wants for _ in range(2)], strict=True):
            for a, b in zip((out, *mix, h), (want[0], *want[1], want[2]), strict=True):
                assert_bitwise(a, b)
