"""Gradients: right where there are some, absent where selection or rounding decides.

Straight-through roundings have a gradient that finite differences do not see, so they are taken
out (`SMOOTH`) wherever a gradient is checked against a slope.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedar.cache import DenseKV
from cedar.model import Batch, Model, ModelOutput, TrainSignals, WeightStorage
from cedar.ops import Ops, select_ops, with_operations
from cedar.ops.compress.reference import compress
from cedar.ops.engram_gate.reference import engram_gate
from cedar.ops.mhc.reference import mhc_coefficients, mhc_collapse, mhc_expand
from cedar.ops.sparse_attention import Rows
from cedar.ops.sparse_attention.reference import sparse_attention
from cedar.testing import (
    assert_bitwise,
    assert_close,
    random_tokens,
    same_bits,
    tiny_config,
    tiny_model,
)

SMOOTH: Ops = with_operations(select_ops(), cast=lambda x, fmt: x)
LOSSES = TrainSignals(index_loss=True, balance_loss=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()


def gradcheck(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> bool:
    return torch.autograd.gradcheck(function, inputs, fast_mode=False)


# --- operations -----------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_mhc(iterations: int) -> None:
    def step(x: Tensor, y: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        mix = mhc_coefficients(
            x, fn, base, scale, norm_eps=1e-20, hc_eps=1e-6, sinkhorn_iters=iterations
        )
        return mhc_collapse(x, mix.pre_TC), mhc_expand(x, y, mix)

    m = 3
    assert gradcheck(
        step, random(2, m, 4), random(2, 4, seed=1), random((2 + m) * m, m * 4, seed=2),
        random((2 + m) * m, seed=3), random(3, seed=4),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["mixed", "one source", "repeated", "empty rows", "wide"])
def test_sparse_attention(kind: str) -> None:
    """Queries, both sources (key = value, so each row has two ways) and the sink."""
    slots = {
        "mixed": ([[0, 1, -1], [2, -1, -1]], [[4, -1], [0, 3]]),
        "one source": ([[0, 1, -1], [2, -1, -1]], [[-1, -1], [-1, -1]]),
        "repeated": ([[1, 1, 1], [2, 0, 2]], [[4, 4], [0, 0]]),
        "empty rows": ([[-1, -1, -1], [2, -1, -1]], [[-1, -1], [0, 3]]),
        "wide": ([list(range(5)) * 20, [-1] * 99 + [3]], [[4, 1] * 40, [0] * 80]),
    }[kind]
    window, main = (torch.tensor(one) for one in slots)

    def attend(q: Tensor, a: Tensor, b: Tensor, sink: Tensor) -> Tensor:
        return sparse_attention(q, (Rows(a, window), Rows(b, main)), sink, 0.5)

    inputs = (random(2, 2, 4), random(5, 4, seed=1), random(5, 4, seed=2), random(2, seed=3))
    assert gradcheck(attend, *inputs)


def test_key_and_value_gradients_add_up() -> None:
    """One shared row tensor gets the sum of what separate keys and values would get."""
    q, rows, sink = random(3, 2, 4), random(5, 4, seed=1), random(2, seed=2)
    slots = torch.tensor([[0, 1], [2, 4], [3, 3]])
    out = sparse_attention(q, (Rows(rows, slots),), sink, 0.5)
    upstream = random(*out.shape, seed=3).detach()
    (shared,) = torch.autograd.grad(out, rows, upstream)
    keys, values = (rows.detach().clone().requires_grad_() for _ in range(2))
    scores = torch.einsum("tnh,tkh->tnk", q, keys[slots]) * 0.5
    joint = torch.cat((scores, sink.view(1, 2, 1).expand(3, -1, 1)), dim=2).softmax(2)[..., :-1]
    apart = torch.autograd.grad(
        torch.einsum("tnk,tkh->tnh", joint, values[slots]), (keys, values), upstream
    )
    assert_close(shared, apart[0] + apart[1], "float64")
    assert not torch.allclose(shared, apart[1])  # negative control: the key's part matters


@pytest.mark.parametrize("opened", [False, True])
def test_engram_gate(opened: bool) -> None:
    open_ = torch.tensor([True, False, True]) if opened else None

    def gate(x: Tensor, key: Tensor, value: Tensor, wq: Tensor, wk: Tensor) -> Tensor:
        return engram_gate(x, key, value, wq, wk, 1e-20, open_)

    assert gradcheck(
        gate, random(3, 2, 4), random(3, 2, 4, seed=1), random(3, 4, seed=2),
        random(2, 4, seed=3), random(2, 4, seed=4),
    )  # fmt: skip


def test_pooling() -> None:
    assert gradcheck(compress, random(2, 3, 4), random(2, 3, 4, seed=1))


# --- modules --------------------------------------------------------------------------------


def smooth_model(**overrides: object) -> Model:
    """Float64 throughout (``hc_*``, sinks and router biases too), without any rounding."""
    return tiny_model(ops=SMOOTH, **overrides).double()


def gradcheck_module(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> bool:
    """By random projections (``fast_mode``), for the input and all parameters at once."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def call(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(Runner(module, run), _prefixed(named), (x,))

    x = random(9, 32, seed=7)
    values = [p.detach().clone().requires_grad_() for p in parameters.values()]
    return torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


class Runner(nn.Module):
    """Gives a module a call with one tensor."""

    def __init__(self, module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.module, x)


def _prefixed(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": value for name, value in named.items()}


@pytest.mark.parametrize("layer", [1, 4], ids=["ratio 2", "ratio 1"])
def test_compressor(layer: int) -> None:
    model = smooth_model()
    ctx = model.context(Batch.pack([[3] * 5, [4] * 4]))
    compressor = model.backbone()[layer].attn.compressor
    assert gradcheck_module(compressor, lambda module, x: module(x, ctx))


def test_moe() -> None:
    model = smooth_model()
    text = torch.tensor([True] * 6 + [False] * 3)
    moe = model.backbone()[2].ffn
    assert gradcheck_module(moe, lambda module, x: module(x, text)[0])


# --- the whole model against its slope --------------------------------------------------------


LENGTHS = (13, 1, 2, 4, 40, 7)


def batch_of(config_lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Batch:
    config = tiny_config()
    return Batch.pack([random_tokens(config, n, seed + n) for n in config_lengths])


def lm_loss(out: ModelOutput, batch: Batch) -> Tensor:
    """Summed over tokens, so that it adds up over sequences."""
    parts = [
        F.cross_entropy(
            out.logits[start : stop - 1], batch.tokens_T[start + 1 : stop], reduction="sum"
        )
        for start, stop in batch.bounds
        if stop - start > 1
    ]
    return torch.stack(parts).sum()


def index_loss(out: ModelOutput) -> Tensor:
    return torch.stack([s.index_loss for s in out.stats if s.index_loss is not None]).sum()


def balance_loss(out: ModelOutput) -> Tensor:
    return torch.stack([s.balance_loss for s in out.stats if s.balance_loss is not None]).sum()


def slope(model: Model, loss: Callable[[], Tensor], chosen: Callable[[str], bool]) -> float:
    """Relative error of the gradient along one random direction of the chosen parameters."""
    parameters = [p for n, p in model.named_parameters() if p.requires_grad and chosen(n)]
    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    g = torch.Generator().manual_seed(11)
    direction = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in parameters]
    along = sum(
        float((d * v).sum()) for d, v in zip(gradients, direction, strict=True) if d is not None
    )
    step, values = 1e-7, []
    for sign in (1, -2, 1):  # forth, back beyond, and home again
        with torch.no_grad():
            for p, v in zip(parameters, direction, strict=True):
                p.add_(v, alpha=sign * step)
            values.append(float(loss()))
    measured = (values[0] - values[1]) / (2 * step)
    return abs(along - measured) / max(abs(measured), 1e-9)


def test_language_model_loss_follows_its_gradient() -> None:
    model, batch = smooth_model(), batch_of()
    assert slope(model, lambda: lm_loss(model(batch), batch), lambda name: True) < 1e-5


@pytest.mark.parametrize("dense", [False, True])
def test_index_loss_follows_its_gradient(dense: bool) -> None:
    """Along the indexers' parameters; reindex layers reach the keys of their source."""
    model, batch = smooth_model(), batch_of()
    signals = TrainSignals(index_loss=True, index_dense=dense)

    def loss() -> Tensor:
        return index_loss(model(batch, signals=signals))

    assert slope(model, loss, lambda name: ".indexer." in name) < 1e-5


def test_the_slope_notices() -> None:
    """Negative control: with roundings the loss is a staircase, and one missing path shows."""
    model, batch = tiny_model().double(), batch_of()
    assert slope(model, lambda: lm_loss(model(batch), batch), lambda name: True) > 1e-3

    def cut(q: Tensor, sources: tuple[Rows, ...], sink: Tensor, scale: float) -> Tensor:
        detached = tuple(Rows(s.rows_RH.detach(), s.slots_TK) for s in sources[1:])
        return sparse_attention(q, (*sources[:1], *detached), sink, scale)

    broken = tiny_model(ops=with_operations(SMOOTH, sparse_attention=cut)).double()
    assert slope(broken, lambda: lm_loss(broken(batch), batch), lambda name: True) > 1e-4


# --- who gets a gradient ----------------------------------------------------------------------


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor | None]:
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


def test_the_language_model_loss_does_not_reach_indexers() -> None:
    model, batch = tiny_model(), batch_of()
    for name, gradient in gradients(model, lm_loss(model(batch), batch)).items():
        if ".indexer." in name:
            assert gradient is None, name
    out = model(batch)
    assert all(s.index_loss is None and s.balance_loss is None for s in out.stats)


def test_the_index_loss_reaches_indexers_alone() -> None:
    model, batch = tiny_model(), batch_of()
    found = gradients(model, index_loss(model(batch, signals=LOSSES)))
    reached = {name for name, g in found.items() if g is not None and bool((g != 0).any())}
    assert reached == {name for name in found if ".indexer." in name}
    # A reindex layer alone reaches its own queries and the keys of its source (layer 4).
    stats = model(batch, signals=LOSSES).stats
    alone = gradients(model, next(s.index_loss for s in stats if s.layer == 5))  # type: ignore[arg-type]
    reached = {name for name, g in alone.items() if g is not None and bool((g != 0).any())}
    assert reached == {
        f"layers.{layer}.attn.indexer.{name}.weight"
        for layer, name in ((4, "wk"), (4, "k_norm"), (5, "wq_b"), (5, "weights_proj"))
    }


@pytest.mark.parametrize("storage", [WeightStorage.PLAIN, WeightStorage.QAT])
@pytest.mark.parametrize("dense", [False, True])
def test_indexers_move_with_their_loss_and_only_with_it(
    storage: WeightStorage, dense: bool
) -> None:
    batch = batch_of()
    for wanted in (True, False):
        model = tiny_model(storage=storage)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        signals = TrainSignals(index_loss=wanted, index_dense=dense, balance_loss=True)
        out = model(batch, signals=signals)
        loss = lm_loss(out, batch) + balance_loss(out)
        if wanted:
            loss = loss + index_loss(out)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        loss.backward()
        optimiser.step()
        moved = {n for n, p in model.named_parameters() if not same_bits(p, before[n])}
        indexers = {n for n in before if ".indexer." in n}
        assert len(indexers) == 5 * 2 + 3 * 2  # queries and weights of five, keys of three
        assert moved & indexers == (indexers if wanted else set())


def test_router_biases_get_no_gradient() -> None:
    model, batch = tiny_model(), batch_of()
    out = model(batch, signals=LOSSES)
    (lm_loss(out, batch) + balance_loss(out) + index_loss(out)).backward()
    biases = {
        n: p for n, p in model.named_parameters() if n.endswith(("gate.bias", "gate.bias_vl"))
    }
    assert len(biases) == 2 * (8 + 2)
    assert all(p.grad is None and not p.requires_grad for p in biases.values())
    # Also if somebody asked for one: the bias only selects.
    gate = model.backbone()[2].ffn.gate
    gate.bias.requires_grad_()
    assert gradients(model, lm_loss(model(batch), batch))["layers.2.ffn.gate.bias"] is None
    assert gate.weight.grad is not None  # negative control
    assert (gate.weight.grad != 0).any()


def image_batch(model: Model) -> Batch:
    """A text of 30 with a span of one row of two image tokens, and a text of 9."""
    config = model.config
    types = [[-1] * 4 + [0, 1, 1, 2, 3] + [-1] * 21, [-1] * 9]
    patches = torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(5))
    return Batch.pack(
        [random_tokens(config, 30, 1), random_tokens(config, 9, 2)],
        image_types=types,
        images=[patches.to(model.compute_dtype)],
        image_grids=[(3, 4)],
    )


@pytest.mark.parametrize("storage", [WeightStorage.PLAIN, WeightStorage.QAT])
def test_every_parameter_is_trained_by_some_loss(storage: WeightStorage) -> None:
    """Text, images, indexers, router balance and draft head: nothing is left over."""
    model = tiny_model(storage=storage)
    batch = image_batch(model)
    out = model(batch, signals=LOSSES)
    assert out.taps_TX is not None
    anchors = torch.tensor([3, 12, 20, 33])
    first = batch.tokens_T[anchors + 1]
    draft = model.draft_train(out.taps_TX.detach(), batch, anchors, first)
    bias = model.draft.markov_bias(first)
    confidence = model.draft.confidence(draft.hidden_NBD[:, 0], first)
    logits = draft.logits_NBV + bias.unsqueeze(1)
    loss = (
        lm_loss(out, batch) + index_loss(out) + balance_loss(out)
        + logits.logsumexp(-1).sum() - logits[..., 5].sum() + confidence.square().sum()
    )  # fmt: skip
    idle = {n for n, g in gradients(model, loss).items() if g is None or not bool((g != 0).any())}
    assert idle == set()


def test_the_draft_loss_stays_out_of_the_backbone() -> None:
    """With detached taps only the shared embedding and head are reached beside the draft head."""
    model, batch = tiny_model(), batch_of()
    out = model(batch)
    anchors = torch.tensor([3, 20])
    draft = model.draft_train(out.taps_TX.detach(), batch, anchors, anchors)  # type: ignore[union-attr]
    found = gradients(model, draft.logits_NBV.square().sum())
    reached = {n for n, g in found.items() if g is not None}
    assert {n for n in reached if not n.startswith("mtp.")} == {"embed.weight", "head.weight"}
    attached = model.draft_train(out.taps_TX, batch, anchors, anchors)  # type: ignore[arg-type]
    found = gradients(model, attached.logits_NBV.square().sum())
    assert found["layers.0.attn.wkv.weight"] is not None  # negative control


# --- whole steps ------------------------------------------------------------------------------


def test_packed_gradients_are_the_sum_of_those_alone() -> None:
    model, batch = tiny_model(), batch_of()
    together = gradients(model, lm_loss(model(batch), batch))
    alone: dict[str, Tensor | None] = dict.fromkeys(together)
    for start, stop in batch.bounds:
        if stop - start > 1:
            one = Batch.pack([batch.tokens_T[start:stop].tolist()])
            for name, g in gradients(model, lm_loss(model(one), one)).items():
                if g is not None:
                    before = alone[name]
                    alone[name] = g if before is None else before + g
    for name, g in together.items():
        want = alone[name]
        if g is None or want is None:
            assert g is want, name
        elif g.dtype == torch.float64:
            assert_close(g, want, "float64", name)
        else:
            assert_close(g, want, "float32 op", name)


class Counting:
    """An operation that counts its calls, and may add a little noise from one call on."""

    def __init__(self, noisy_from: int | None = None) -> None:
        self.calls, self.noisy_from = 0, noisy_from

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.calls += 1
        out = select_ops().rms_norm(x, weight, eps)
        late = self.noisy_from is not None and self.calls > self.noisy_from
        return out * (1 + 1e-9) if late else out


@pytest.mark.parametrize("storage", [WeightStorage.PLAIN, WeightStorage.QAT])
def test_checkpointing_gives_equal_gradients(storage: WeightStorage) -> None:
    """Bit for bit, although layers hand selections, entries and pools along."""

    def run(recompute: bool, op: Counting) -> tuple[Tensor, dict[str, Tensor | None]]:
        model = tiny_model(storage=storage, ops=with_operations(select_ops(), rms_norm=op))
        batch = image_batch(model)
        out = model(batch, signals=replace(LOSSES, checkpoint=recompute))
        loss = lm_loss(out, batch) + index_loss(out) + balance_loss(out)
        return loss.detach(), gradients(model, loss)

    plain_op, op = Counting(), Counting()
    loss, want = run(False, plain_op)
    again, found = run(True, op)
    assert op.calls > 1.8 * plain_op.calls  # layers did run twice
    assert_bitwise(again, loss)
    for name, g in want.items():
        other = found[name]
        if g is None or other is None:
            assert g is other, name
        else:
            assert_bitwise(other, g, name)
    # Negative control: a recomputation that sees other values gives other gradients silently.
    again, found = run(True, Counting(noisy_from=plain_op.calls))
    assert_bitwise(again, loss)
    pairs = [(g, found[n]) for n, g in want.items() if g is not None]
    assert any(o is not None and not same_bits(g, o) for g, o in pairs)


@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 1), (6, 7), (40,), (1, 5, 13, 40, 2, 7)])
@pytest.mark.parametrize("storage", [WeightStorage.PLAIN, WeightStorage.QAT])
def test_a_training_step_for_any_length(lengths: tuple[int, ...], storage: WeightStorage) -> None:
    """Around window (6), top-k (4) and pool (6 entries); float32, as training runs."""
    model = tiny_model(storage=storage, dtype=torch.float32)
    batch = batch_of(lengths)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        out = model(batch, signals=replace(LOSSES, checkpoint=True))
        loss = index_loss(out) + balance_loss(out)
        if max(lengths) > 1:
            loss = loss + lm_loss(out, batch) / sum(lengths)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    losses = [step() for _ in range(3)]
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        assert p.grad is None or p.grad.isfinite().all(), name
    assert all(loss == loss for loss in losses)


def test_a_few_steps_learn_a_text_by_heart() -> None:
    model, batch = tiny_model(storage=WeightStorage.QAT, dtype=torch.float32), batch_of()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = lm_loss(model(batch), batch) / len(batch.tokens_T)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_a_store_takes_no_graph() -> None:
    """What a store keeps is detached, so that generating during training leaks nothing."""
    model = tiny_model()
    store = DenseKV(model.config, 1, dtype=torch.float64)
    model(batch_of((9,)), store)
    out = model(Batch.pack([[3]]), store)
    assert out.logits.requires_grad
    kept = [store.window(0, 0), *store.entries(1, 0), *store.residue(1, 0)]
    assert not any(tensor.requires_grad for tensor in kept)
