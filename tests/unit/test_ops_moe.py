"""Router and experts: selection bias, weights, clamps, and where the routing weight enters."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.model import Batch
from cedar.model.context import LayerStats
from cedar.model.moe import balance_loss
from cedar.ops.experts.reference import experts, swiglu
from cedar.ops.route import Routing
from cedar.ops.route.reference import route, router
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, fake_quantize, quantize
from cedar.testing import assert_bitwise, assert_close, tiny_model

FUNCTIONS = {
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "sqrtsoftplus": lambda x: (1 + x.exp()).log().sqrt(),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_route_as_written(function: str, normalize: bool) -> None:
    logits, bias = random(9, 6), random(1, 6, seed=1)
    got = route(logits, bias, 3, score_func=function, normalize=normalize, route_scale=1.5)
    scores = FUNCTIONS[function](logits)
    assert_close(got.scores_TE, scores, "float64")
    for t in range(9):
        ranked = sorted(range(6), key=lambda e: -float(scores[t, e] + bias[0, e]))[:3]
        assert sorted(got.experts_TA[t].tolist()) == sorted(ranked)
        weights = scores[t, got.experts_TA[t]]  # the bias does not enter the weight
        total = weights.sum() + 1e-20 if normalize else 1.0
        assert_close(got.weights_TA[t], 1.5 * weights / total, "float64")


def test_the_bias_selects_per_token() -> None:
    logits = torch.zeros(2, 4)
    bias = torch.tensor([[0.0, 0, 0, 1], [1.0, 0, 0, 0]])
    got = route(logits, bias, 1, score_func="sigmoid", normalize=True, route_scale=2.0)
    assert got.experts_TA.tolist() == [[3], [0]]
    assert got.weights_TA.tolist() == [[2.0], [2.0]]


def test_ties_go_to_the_lowest_number() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 1.0]])
    got = route(
        logits, torch.zeros(1, 6), 4, score_func="softmax", normalize=False, route_scale=1.0
    )
    assert got.experts_TA.tolist() == [[1, 3, 0, 2]]


def test_the_router_multiplies_in_float32() -> None:
    x, weight, bias = random(5, 64).bfloat16(), random(6, 64, seed=1).bfloat16(), random(6, seed=2)
    options = {"score_func": "sigmoid", "normalize": True, "route_scale": 2.0}
    got = router(x, weight, bias, 3, temp=0.7, **options)
    logits = x.double() @ weight.double().T / 0.7
    want = route(logits, bias, 3, **options)
    assert got.scores_TE.dtype == torch.float32
    assert_close(got.scores_TE, want.scores_TE.float(), "float32 op")
    assert_close(got.weights_TA, want.weights_TA.float(), "float32 op")
    assert got.experts_TA.equal(want.experts_TA)


def test_all_experts_and_vanishing_scores() -> None:
    got = route(
        torch.full((2, 3), -200.0),
        torch.zeros(1, 3),
        3,
        score_func="softmax",
        normalize=True,
        route_scale=1.0,
    )
    assert sorted(got.experts_TA[0].tolist()) == [0, 1, 2]
    dead = route(
        torch.full((1, 3), -torch.inf),
        torch.zeros(1, 3),
        2,
        score_func="sigmoid",
        normalize=True,
        route_scale=1.0,
    )
    assert (dead.weights_TA == 0).all()  # not 0 / 0


def test_swiglu_clamps_the_gate_above_and_the_value_on_both_sides() -> None:
    gate = torch.tensor([-50.0, -1.0, 1.0, 2.0, 3.0, 50.0])
    up = torch.ones(6)
    want = torch.tensor([F.silu(torch.tensor(min(g, 2.0))).item() for g in gate.tolist()])
    assert_close(swiglu(gate, up, 2.0), want, "float32 op")
    value = torch.tensor([-50.0, -2.0, -1.0, 1.0, 2.0, 50.0])
    silu_one = F.silu(torch.tensor(1.0))
    assert_close(swiglu(up, value, 2.0), silu_one * value.clamp(-2, 2), "float32 op")
    assert swiglu(gate.bfloat16(), up.bfloat16(), 2.0).dtype == torch.float32
    assert not torch.allclose(swiglu(gate, up, 100.0), want)  # negative control


def expert_case(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "x": random(7, 32, dtype=dtype),
        "experts": torch.stack([torch.randperm(5, generator=g)[:2] for _ in range(7)]),
        "weights": torch.rand(7, 2, generator=g).to(dtype),
        "w1": random(5, 64, 32, seed=4, dtype=dtype) / 4,
        "w2": random(5, 32, 64, seed=5, dtype=dtype) / 4,
        "w3": random(5, 64, 32, seed=6, dtype=dtype) / 4,
    }


def naive_experts(c: dict[str, Tensor], limit: float, quantized: bool) -> Tensor:
    def cast(v: Tensor) -> Tensor:
        return fake_quantize(v, FP8_ROW) if quantized else v

    out = torch.zeros_like(c["x"])
    for t, a in ((t, a) for t in range(7) for a in range(2)):
        e = int(c["experts"][t, a])
        x = cast(c["x"][t : t + 1])[0]
        gate, up = (c["w1"][e] @ x).clamp(max=limit), (c["w3"][e] @ x).clamp(-limit, limit)
        hidden = c["weights"][t, a] * (gate * gate.sigmoid() * up)  # before W2
        out[t] += c["w2"][e] @ cast(hidden.unsqueeze(0))[0]
    return out


@pytest.mark.parametrize("quantized", [False, True])
def test_experts_token_by_token(quantized: bool) -> None:
    c = expert_case()
    fmt = FP8_ROW if quantized else None
    args = (c["x"], c["experts"], c["weights"], c["w1"], c["w2"], c["w3"])
    got = experts(*args, limit=0.8, input_format=fmt)
    assert_close(got, naive_experts(c, 0.8, quantized), "float64")
    if quantized:
        # Where the weight enters matters only because of the rounding behind it.
        late = experts(
            c["x"], c["experts"], torch.ones_like(c["weights"]), *args[3:], limit=0.8,
            input_format=fmt,
        )  # fmt: skip
        assert not torch.allclose(late, got)


@pytest.mark.parametrize("quantized", [False, True])
def test_with_the_shared_expert(quantized: bool) -> None:
    """One more expert, of another width, that every token visits with weight 1."""
    c, fmt = expert_case(), FP8_ROW if quantized else None
    s1, s2, s3 = (random(*shape, seed=8) / 4 for shape in ((96, 32), (32, 96), (96, 32)))
    args = (c["x"], c["experts"], c["weights"], c["w1"], c["w2"], c["w3"])
    got = experts(*args, limit=0.8, input_format=fmt, shared=(s1, s2, s3))
    every = torch.zeros(7, 1, dtype=torch.int64)
    alone = naive_experts(
        c | {"experts": every.expand(7, 2), "weights": torch.tensor([[1.0, 0.0]] * 7).double()}
        | {"w1": s1[None], "w2": s2[None], "w3": s3[None]}, 0.8, quantized,
    )  # fmt: skip
    assert_close(got, naive_experts(c, 0.8, quantized) + alone, "float64")
    packed = tuple(quantize(s.float(), FP8_BLOCK) for s in (s1, s2, s3))
    dense = tuple(q.dequantize() for q in packed)
    args = tuple(a.float() if a.is_floating_point() else a for a in args)
    found = experts(*args, limit=0.8, input_format=fmt, shared=packed)
    assert_bitwise(found, experts(*args, limit=0.8, input_format=fmt, shared=dense))
    assert experts(
        args[0].bfloat16(), *args[1:], limit=0.8, input_format=fmt, shared=packed
    ).dtype == torch.bfloat16  # fmt: skip


def test_packed_experts_equal_their_values() -> None:
    c = expert_case(torch.float32)
    packed = [quantize(c[name], FP4_ROW) for name in ("w1", "w2", "w3")]
    dense = [q.dequantize() for q in packed]
    args = (c["x"], c["experts"], c["weights"])
    a = experts(*args, *packed, limit=10.0, input_format=FP8_ROW)
    b = experts(*args, *dense, limit=10.0, input_format=FP8_ROW)
    assert_bitwise(a, b)


def test_unvisited_experts_are_not_touched() -> None:
    c = expert_case()
    c["experts"] = torch.tensor([[1, 3]] * 7)
    want = naive_experts(c, 9.0, False)
    for name in ("w1", "w2", "w3"):
        c[name][[0, 2, 4]] = torch.nan
    args = (c["x"], c["experts"], c["weights"], c["w1"], c["w2"], c["w3"])
    assert_close(experts(*args, limit=9.0, input_format=None), want, "float64")
    c["w2"][3] = torch.nan  # negative control
    assert experts(*args, limit=9.0, input_format=None).isnan().any()


def test_no_tokens() -> None:
    c = expert_case()
    out = experts(
        c["x"][:0], c["experts"][:0], c["weights"][:0], c["w1"], c["w2"], c["w3"],
        limit=1.0, input_format=None,
    )  # fmt: skip
    assert out.shape == (0, 32)


def routing_of(choices: list[list[int]], seed: int = 0) -> Routing:
    scores = torch.rand(len(choices), 4, generator=torch.Generator().manual_seed(seed))
    chosen = torch.tensor(choices)
    return Routing(chosen, scores.gather(1, chosen), scores)


def test_loads_by_modality() -> None:
    routing = routing_of([[0, 1], [1, 2], [1, 3], [0, 1]])
    everything, none = LayerStats(7, routing.experts_TA, 4).loads()
    assert everything.tolist() == [2, 4, 1, 1]
    assert none.tolist() == [0, 0, 0, 0]
    open_T = torch.tensor([True, False, False, True])
    text, image = LayerStats(7, routing.experts_TA, 4, open_T).loads()
    assert text.tolist() == [2, 2, 0, 0]
    assert image.tolist() == [0, 2, 1, 1]


def test_balance_loss_per_sequence() -> None:
    """``E/A · Σ mean(chosen) · mean(share)``: one when even, larger when crowded, per sequence."""
    ctx = tiny_model().context(Batch.pack([[3, 4, 5], [6]]))
    routing = routing_of([[0, 1], [1, 2], [1, 3], [0, 1]])
    share = routing.scores_TE / routing.scores_TE.sum(1, keepdim=True)
    want = 0.0
    for rows in ([0, 1, 2], [3]):
        for e in range(4):
            chosen = sum(e in routing.experts_TA[t].tolist() for t in rows) / len(rows)
            want += chosen * float(share[rows, e].mean()) * 4 / 2 / 2
    assert_close(balance_loss(routing, ctx), torch.tensor(want), "float32 op")
    even = Routing(torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]), share, torch.ones(4, 4))
    one = tiny_model().context(Batch.pack([[3, 4, 5, 6]]))
    assert_close(balance_loss(even, one), torch.tensor(1.0), "float32 op")
    crowded = Routing(torch.tensor([[0, 1]] * 4), share, torch.tensor([[9.0, 9, 1, 1]] * 4))
    assert balance_loss(crowded, one) > 1.5
