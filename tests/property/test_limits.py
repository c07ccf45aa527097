"""Limits at which a mechanism must become invisible, and what the pool search may touch.

Checked against naive attention written here (dense, by position, without slots or chunks) and
against models that lack the mechanism. Float64, like `test_equalities.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.cache import DenseKV
from cedar.model import Batch, Model
from cedar.model.context import Candidates, MainKV, Shared
from cedar.ops import Ops, select_ops, with_operations
from cedar.ops.main_kv import FlatMain
from cedar.ops.select.reference import select_entries
from cedar.ops.sparse_attention import Rows
from cedar.testing import assert_bitwise, assert_close, random_tokens, randomise, tiny_model


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Recorder:
    """Keeps every value that a model shows, scores included."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        return True

    def record(self, name: str, value: Tensor) -> None:
        self.values[name] = value.clone()


def text(model: Model, length: int, seed: int) -> Batch:
    return Batch.pack([random_tokens(model.config, length, seed)])


def with_weights_of(model: Model, other: Model) -> Model:
    """``model`` with the weights of ``other``; both may lack some of the other's."""
    state: Mapping[str, Any] = other.state_dict()
    missing, _ = model.load_state_dict(state, strict=False)
    assert not missing
    return model


# --- naive attention ----------------------------------------------------------------------------


def naive_attention(window: int, ratio_of: Any) -> Any:
    """An attention operation that reads no slot: it derives from positions what is visible.

    For one sequence from its start, without a store. ``ratio_of(S)`` is the ratio of a source
    with ``S`` entries.
    """

    def attend(q: Tensor, sources: tuple[Rows, ...], sink: Tensor, scale: float) -> Tensor:
        count = len(q)
        t = torch.arange(count).unsqueeze(1)
        s = torch.arange(count).unsqueeze(0)
        keys = [sources[0].rows_RH]
        sees = [(s <= t) & (s > t - window)]
        if len(sources) > 1:
            entries = sources[1].rows_RH
            keys.append(entries)
            ratio = ratio_of(len(entries))
            sees.append((torch.arange(len(entries)) + 1) * ratio <= t + 1)
        rows, visible = torch.cat(keys), torch.cat(sees, dim=1)
        out = torch.empty_like(q)
        for n in range(q.shape[1]):
            scores = (q[:, n] @ rows.T * scale).masked_fill(~visible, -torch.inf)
            weights = torch.cat((scores, sink[n].expand(count, 1)), dim=1).double().softmax(1)
            out[:, n] = weights[:, :-1] @ rows
        return out

    return attend


@examples(4)
@given(length=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_topk_of_all_entries_is_dense_attention(length: int, seed: int) -> None:
    """K ≥ entries, in all roles at once: full, reindex inside a pool of everything, reuse."""
    limits = {"index_topk": 40, "candidate_topk_blocks": 20, "candidate_block_size": 2}
    sparse = tiny_model(seed=seed % 5, **limits)
    naive = naive_attention(6, lambda entries: 1 if entries == length else 2)
    ops = with_operations(select_ops(), sparse_attention=naive)
    dense = tiny_model(seed=seed % 5, ops=ops, **limits)
    batch = text(sparse, length, seed)
    assert_close(sparse(batch).logits, dense(batch).logits, "float64")


def test_dense_attention_notices_the_selection() -> None:
    """Negative control: with a small top-k, or another window, the two differ."""
    ops = with_operations(select_ops(), sparse_attention=naive_attention(6, lambda n: 40 // n))
    batch = text(tiny_model(), 40, 1)
    for limits in ({}, {"index_topk": 40}, {"index_topk": 40, "candidate_topk_blocks": 14}):
        sparse, dense = tiny_model(**limits), tiny_model(ops=ops, **limits)
        same = torch.allclose(sparse(batch).logits, dense(batch).logits, atol=1e-9)
        assert same == (limits.get("candidate_topk_blocks") == 14)


def test_a_topk_of_all_entries_ignores_the_indexer() -> None:
    """Other indexer weights choose other entries, unless all are chosen anyway."""
    for topk, pool, same in ((40, 14, True), (4, 14, False), (40, 2, False)):
        model = tiny_model(index_topk=topk, candidate_topk_blocks=pool)
        batch = text(model, 40, 2)
        before = model(batch).logits
        other = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if ".indexer." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=other))
        assert torch.allclose(model(batch).logits, before, atol=1e-9) == same


WINDOW_ONLY = {
    "n_layers": 4,
    "compress_ratios": (0,) * 6,
    "kv_source_layers": (),
    "index_source_layers": (),
    "candidate_source_layer": -1,
    "dspark_target_layer_ids": (1, 3),
    "engram_layer_ids": (1,),
}


@examples(4)
@given(length=st.integers(1, 40), seed=st.integers(0, 10**6), window=st.sampled_from([40, 64]))
def test_a_wide_window_is_causal_attention(length: int, seed: int, window: int) -> None:
    def causal(q: Tensor, sources: tuple[Rows, ...], sink: Tensor, scale: float) -> Tensor:
        (rows,) = (source.rows_RH for source in sources)
        scores = torch.einsum("tnh,sh->nts", q, rows) * scale
        mask = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, -torch.inf).exp()
        total = weights.sum(-1) + sink.double().exp().unsqueeze(1)
        return torch.einsum("nts,sh,nt->tnh", weights, rows, 1 / total)

    model = tiny_model(window_size=window, **WINDOW_ONLY)
    ops = with_operations(select_ops(), sparse_attention=causal)
    plain = tiny_model(window_size=window, ops=ops, **WINDOW_ONLY)
    batch = text(model, length, seed)
    assert_close(model(batch).logits, plain(batch).logits, "float64")
    narrow = tiny_model(window_size=6, **WINDOW_ONLY)
    same = torch.allclose(narrow(batch).logits, model(batch).logits, atol=1e-9)
    assert same == (length <= 6)  # negative control: a narrow window shows as soon as it can


@examples(4)
@given(length=st.integers(7, 40), seed=st.integers(0, 10**6))
def test_nothing_sees_the_future(length: int, seed: int) -> None:
    """Later tokens change no earlier logits; the last token does change its own."""
    model = tiny_model()
    tokens = random_tokens(model.config, length, seed)
    before = model(Batch.pack([tokens])).logits
    cut = seed % (length - 1) + 1
    changed = [*tokens[:cut], *((token + 7) % 60 for token in tokens[cut:])]
    after = model(Batch.pack([changed])).logits
    assert_close(after[:cut], before[:cut], "float64")
    assert not torch.allclose(after[cut:], before[cut:])


@pytest.mark.parametrize("queries", [1, 3])
def test_chunks_of_queries_do_not_matter(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory bound of scoring and attention: any chunk size gives the same selections."""
    import cedar.model.indexer as indexer
    import cedar.ops.sparse_attention.reference as attention

    model = tiny_model()
    config = model.config
    batch = Batch.pack([random_tokens(config, n, n) for n in (31, 1, 12)])
    whole, chunked = Recorder(), Recorder()
    model(batch, probe=whole)
    sizes: list[int] = []
    real = indexer.Indexer._chunks

    def spy(*args: Any) -> list[slice]:
        sizes.extend(chunk.stop - chunk.start for chunk in real(*args))
        return real(*args)

    monkeypatch.setattr(indexer.Indexer, "_chunks", spy)
    pool = 6 * (config.index_head_dim + config.index_n_heads)
    monkeypatch.setattr(indexer, "_CHUNK_ELEMENTS", {"cpu": queries * pool})
    monkeypatch.setattr(attention, "_queries_per_chunk", lambda q, width: queries)
    model(batch, probe=chunked)
    assert 1 <= min(sizes) <= queries < 12  # it did cut
    for name, value in whole.values.items():
        if value.dtype == torch.int64:
            assert_bitwise(chunked.values[name], value, name)
        else:
            assert_close(chunked.values[name], value, "float64", name)


def test_the_tiny_preset_exceeds_every_limit() -> None:
    """In a text of 200 tokens window, top-k and pool of `cedar.config.tiny` all act."""
    from cedar.config import tiny

    config = tiny()
    tokens = torch.arange(config.vocab_size)

    def logits(**changes: Any) -> Tensor:
        changed = replace(config, **changes)
        model = Model(changed, dtype=torch.float64, trainable=True, token_map=tokens)
        return randomise(model, 1)(text(model, 200, 1)).logits

    before = logits()
    for field, wide in (("window_size", 200), ("index_topk", 200), ("candidate_topk_blocks", 50)):
        assert getattr(config, field) < wide
        assert (logits(**{field: wide}) - before).abs().max() > 1e-2, field
    assert_bitwise(logits(index_topk=config.index_topk), before)  # negative control


# --- Engram -------------------------------------------------------------------------------------


@examples(4)
@given(length=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_engram_without_value_is_the_identity(length: int, seed: int) -> None:
    """With a zero value projection the model equals one without Engram, and `disable_engram`."""
    model = tiny_model()
    batch = text(model, length, seed)
    with_engram = model(batch).logits
    without = model(batch, disable_engram=True).logits
    assert not torch.allclose(with_engram, without)  # negative control
    dim = model.config.dim
    silenced = tiny_model()
    for layer in silenced.config.engram_layer_ids:
        engram = silenced.backbone()[layer].engram
        assert engram is not None
        engram.wkv.weight[-dim:] = 0  # rows: keys of every stream, then the value
    assert_close(silenced(batch).logits, without, "float64")
    absent = with_weights_of(tiny_model(engram_layer_ids=()), model)
    assert_close(absent(batch).logits, without, "float64")


def test_engram_is_closed_on_image_tokens() -> None:
    """The write changes text positions only; a changed value matrix shows nowhere else."""
    model = tiny_model()
    types = [-1] * 4 + [0, 1, 2, 3] + [-1] * 4
    batch = Batch.pack(
        [random_tokens(model.config, 12, 1)],
        image_types=[types],
        features=torch.ones(1, 32, dtype=torch.float64),
    )
    seen = Recorder()
    model(batch, probe=seen)
    written = seen.values["layers.0.engram.out"]
    entering = model.embed_batch(batch).x_TCD
    assert_bitwise(written[4:8], entering[4:8].contiguous())
    assert ((written != entering).flatten(1).any(1) == (torch.tensor(types) < 0)).all()


# --- hierarchical search ------------------------------------------------------------------------


@examples(4)
@given(length=st.integers(1, 42), seed=st.integers(0, 10**6))
def test_a_pool_of_everything_is_invisible(length: int, seed: int) -> None:
    """pool ≥ entries: as if no layer built candidates."""
    none = tiny_model(candidate_source_layer=-1)
    whole = with_weights_of(tiny_model(candidate_topk_blocks=14), none)  # 42 entries
    batch = text(none, length, seed)
    assert_close(whole(batch).logits, none(batch).logits, "float64")


def test_a_pool_that_is_too_small_shows() -> None:
    """Negative control: one block fewer than the text needs."""
    none = tiny_model(candidate_source_layer=-1, index_topk=12)
    batch = text(none, 42, 0)
    for blocks, same in ((14, True), (13, False)):
        pool = tiny_model(candidate_topk_blocks=blocks, index_topk=12)
        assert torch.allclose(pool(batch).logits, none(batch).logits, atol=1e-9) == same


class Spy:
    """The operations with a list of the calls of both scorings."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        plain = select_ops()

        def index_score(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
            self.calls.append("all")
            return plain.index_score(q, w, keys)

        def index_score_rows(q: Tensor, w: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
            self.calls.append("pool")
            return plain.index_score_rows(q, w, keys, rows)

        self.ops: Ops = with_operations(
            plain, index_score=index_score, index_score_rows=index_score_rows
        )


def dense_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Force the other path: score all entries, then mask what is not in the pool."""
    from cedar.model.indexer import Indexer

    def search(
        self: Indexer, query: Any, main: MainKV, n: int, pool: Candidates, visible_T: Tensor
    ) -> Tensor:
        scores = self._scores(query, main.keys(n, int(visible_T.max())), visible_T)
        inside = torch.zeros_like(scores, dtype=torch.bool)
        for t, row in enumerate(pool.blocks_TB.tolist()):
            for block in row:
                if block >= 0:
                    inside[t, block * pool.block_size : (block + 1) * pool.block_size] = True
        return select_entries(scores.masked_fill(~inside, -torch.inf), self.topk)

    monkeypatch.setattr(Indexer, "_search_pool", search)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [1, 2])
def test_candidate_scoring_equals_masking_all_scores(
    seed: int, ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both paths, on a prefill that is longer than the pool and on steps after it."""
    spy = Spy()
    ratios = (0, 2, 2, 2, *[ratio] * 4, 0, 0)
    model = tiny_model(seed=seed, ops=spy.ops, compress_ratios=ratios, index_topk=3)
    batch, more = text(model, 37, seed), text(model, 5, seed + 9)

    def run() -> tuple[list[str], dict[str, Tensor]]:
        seen, store = Recorder(), DenseKV(model.config, 1, dtype=torch.float64)
        spy.calls.clear()
        model(batch, store, probe=seen)
        values = dict(seen.values)
        model(more, store, probe=seen)
        return list(spy.calls), values | {f"more.{k}": v for k, v in seen.values.items()}

    calls, pooled = run()
    assert calls.count("pool") == 4  # layers 5 and 7, twice: nothing is scored all over there
    dense_everywhere(monkeypatch)
    calls, masked = run()
    assert calls.count("pool") == 0
    for name, value in pooled.items():
        if name.endswith("topk_idxs"):
            assert_bitwise(value, masked[name], name)
    assert_close(pooled["logits"], masked["logits"], "float64")
    assert_close(pooled["more.logits"], masked["more.logits"], "float64")
    # What a probe is shown as scores selects the same entries.
    for layer in (1, 3, 4, 5, 7):
        name = f"layers.{layer}.attn.indexer"
        shown = select_entries(pooled[f"{name}.scores"], 3)
        assert_bitwise(shown, pooled[f"{name}.topk_idxs"], name)
    # Negative control: outside the pool better entries exist.
    free = with_weights_of(
        tiny_model(compress_ratios=ratios, index_topk=3, candidate_source_layer=-1), model
    )
    seen = Recorder()
    free(batch, probe=seen)
    assert not torch.equal(
        seen.values["layers.5.attn.indexer.topk_idxs"], pooled["layers.5.attn.indexer.topk_idxs"]
    )


def captured_step(model: Model) -> tuple[Tensor, Shared, Any]:
    """What enters the attention of layer 5 (reindex) in a step of one token after 50."""
    store = DenseKV(model.config, 1, dtype=torch.float64)
    model(text(model, 50, 1), store)
    caught: list[tuple[Tensor, Shared, Any]] = []
    attention = model.backbone()[5].attn
    hook = attention.register_forward_pre_hook(lambda _, args: caught.append(args))
    model(Batch.pack([[9]]), store)
    hook.remove()
    x, shared, ctx = caught[0]
    # The step has stored its window row already; a second run must not store it again.
    return x, shared, replace(ctx, store=None, window_slots_TW=ctx.window_slots_TW[:, -1:] * 0)


@pytest.mark.parametrize("topk", [2, 4, 6])
def test_the_pool_is_all_that_is_touched(topk: int) -> None:
    """NaN in every key outside the pool changes nothing; inside, or on the dense path, it does."""
    model = tiny_model(index_topk=topk)
    x, shared, ctx = captured_step(model)
    attention = model.backbone()[5].attn
    assert shared.main is not None
    assert shared.candidates is not None
    assert isinstance(shared.main, FlatMain)
    (first,) = shared.main.first
    pool = [e for e in shared.candidates.entries(torch.tensor([51]))[0].tolist() if e >= 0]
    assert 3 < len(pool) <= 6
    assert shared.main.counts == (51,)

    def result(keys: Tensor, candidates: Candidates | None = shared.candidates) -> Tensor:
        assert isinstance(shared.main, FlatMain)
        main = replace(shared.main, keys_RJ=keys)
        _, after, _ = attention(x, Shared(main, shared.selection, candidates), ctx)
        assert after.selection is not None
        return after.selection.entries_TK

    keys = shared.main.keys_RJ
    want = result(keys)
    assert set(want[0].tolist()) <= {*pool, -1}
    poisoned = torch.full_like(keys, torch.nan)
    inside = [first + entry for entry in pool]
    poisoned[inside] = keys[inside]
    assert_bitwise(result(poisoned), want)
    # Negative controls: the dense path reads everything, and the pool itself is read.
    everything = Candidates(
        4, torch.arange(17).unsqueeze(0), shared.candidates.block_size
    )  # 51 entries
    assert not torch.equal(result(poisoned, everything), want)
    poisoned[inside] = torch.nan
    assert not torch.equal(result(poisoned), want) or topk >= len(pool)


def test_the_pool_holds_the_best_blocks_and_the_newest() -> None:
    """Recomputed from the source's own scores, entry by entry."""
    model = tiny_model()
    seen = Recorder()
    model(text(model, 40, 4), probe=seen)
    scores = seen.values["layers.4.attn.indexer.scores"]
    blocks = seen.values["layers.4.attn.indexer.candidates"]
    pinned_only = 0
    for t in range(40):
        best = {b: max(scores[t, 3 * b : 3 * b + 3].tolist()) for b in range(t // 3 + 1)}
        newest = t // 3
        by_score = sorted(best, key=lambda b: (-best[b], b))
        want = {newest, *[b for b in by_score if b != newest][:1]}
        assert {b for b in blocks[t].tolist() if b >= 0} == want
        pinned_only += newest not in by_score[:2]
    assert pinned_only > 0  # the pin does decide somewhere


# --- residual streams ---------------------------------------------------------------------------


def test_two_pass_mixing_is_another_model() -> None:
    """Selectable, different, and different in the way that section 1 says."""
    single, double = tiny_model(), tiny_model(hc_single_pass=False)
    batch = text(single, 20, 6)
    one, two = Recorder(), Recorder()
    single(batch, probe=one)
    double(batch, probe=two)
    assert (one.values["logits"] - two.values["logits"]).abs().max() > 0.05
    # Layer 0's attention: in two passes the input is scaled by the mix, which its norm removes
    # (all streams are equal but for the Engram write, so take a model without it).
    for model, seen in ((single, one), (double, two)):
        model(batch, probe=seen, disable_engram=True)
    assert_close(one.values["layers.0.attn.out"], two.values["layers.0.attn.out"], "float32 op")
    assert not torch.allclose(one.values["layers.0.ffn.out"], two.values["layers.0.ffn.out"])


@pytest.mark.parametrize("single_pass", [True, False])
def test_which_mix_a_sublayer_reads(single_pass: bool) -> None:
    """The experts of a block read the mix that its attention computed, or their own."""
    model = tiny_model(hc_single_pass=single_pass)
    seen = Recorder()
    inputs: list[Tensor] = []
    layer = model.backbone()[2]
    hook = layer.ffn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(text(model, 12, 1), probe=seen)
    hook.remove()
    x, y = seen.values["layers.2.in"], seen.values["layers.2.attn.out"]

    def coefficients(part: str, streams: Tensor) -> Any:
        return model.ops.mhc_coefficients(
            streams, *(getattr(layer, f"hc_{part}_{n}") for n in ("fn", "base", "scale")),
            norm_eps=1e-20, hc_eps=1e-6, sinkhorn_iters=20,
        )  # fmt: skip

    attention = coefficients("attn", x)
    streams = model.ops.mhc_expand(x, y, attention)
    own, carried = coefficients("ffn", streams).pre_TC, attention.pre_TC
    used, other = (carried, own) if single_pass else (own, carried)
    enters = [layer.ffn_norm(model.ops.mhc_collapse(streams, mix)) for mix in (used, other)]
    assert_close(inputs[0], enters[0], "float64")
    assert not torch.allclose(inputs[0], enters[1])
