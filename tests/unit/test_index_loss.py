"""The indexer's loss, recomputed query by query from what a layer hands to it."""

from functools import cache

import pytest
import torch
from torch import Tensor

from cedar.model import Batch, TrainSignals
from cedar.testing import assert_close, random_tokens, tiny_config, tiny_model


def batch_of(*lengths: int) -> Batch:
    return Batch.pack([random_tokens(tiny_config(), n, n) for n in lengths])


@cache
def captured(dense: bool) -> list[tuple[tuple[object, ...], Tensor]]:
    """Arguments and result of every index loss of one pass."""
    calls: list[tuple[tuple[object, ...], Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        import cedar.model.attention as attention

        real = attention.index_loss

        def spy(*args: object) -> Tensor:
            calls.append((args, real(*args)))  # type: ignore[arg-type]
            return calls[-1][1]

        patch.setattr(attention, "index_loss", spy)
        signals = TrainSignals(index_loss=True, index_dense=dense)
        with torch.no_grad():
            tiny_model()(batch_of(13, 1, 40), signals=signals)
    return calls


@pytest.mark.parametrize("dense", [False, True])
def test_index_loss_as_written(dense: bool) -> None:
    calls = captured(dense)
    assert len(calls) == 5
    for args, got in calls:
        _, query, q, window, main, sink, scale, shared, plan, ctx = args
        terms, apart = [], []
        for t in range(len(q)):
            visible = (int(ctx.positions_T[t]) + 1) // plan.compress_ratio
            first = main.first[int(ctx.sequence_T[t])]
            if dense:
                entries = list(range(visible))
            elif plan.candidate_source is not None:
                blocks = [b for b in shared.candidates.blocks_TB[t].tolist() if b >= 0]
                entries = [e for b in blocks for e in range(3 * b, 3 * b + 3) if e < visible]
            else:
                entries = [e for e in shared.selection.entries_TK[t].tolist() if e >= 0]
            if len(entries) < 2:
                continue
            rows = main.rows_RH[[first + e for e in entries]]
            near = window.rows_RH[[s for s in window.slots_TK[t].tolist() if s >= 0]]
            teacher = torch.zeros(len(entries), dtype=torch.float64)
            for n in range(q.shape[1]):
                logits = torch.cat((rows @ q[t, n], near @ q[t, n])) * scale
                joint = torch.cat((logits, sink[n : n + 1].double())).softmax(0)
                teacher += joint[: len(entries)]
            teacher /= teacher.sum()
            entries_only = (rows @ q[t].T * scale).softmax(0).mean(1)
            keys = main.keys_RJ[[first + e for e in entries]]
            scores = sum(
                query.w_TI[t, h] * (keys @ query.q_TIJ[t, h]).relu()
                for h in range(query.w_TI.shape[1])
            )
            student = torch.as_tensor(scores).softmax(0)
            terms.append((teacher * (teacher / student).log()).sum())
            apart.append((entries_only * (entries_only / student).log()).sum())
        assert len(terms) > 20
        assert_close(got, torch.stack(terms).mean(), "float64")
        # Negative control: a softmax over the entries alone is another teacher.
        assert abs(float(torch.stack(apart).mean() - got)) > 1e-4


def test_index_loss_of_a_single_entry_is_zero() -> None:
    """No query with two entries: the loss is zero, not 0 / 0, and still has a gradient."""
    model, batch = tiny_model(), batch_of(1)
    stats = model(batch, signals=TrainSignals(index_loss=True)).stats
    loss = torch.stack([s.index_loss for s in stats if s.index_loss is not None]).sum()
    assert loss.item() == 0.0
    loss.backward()
