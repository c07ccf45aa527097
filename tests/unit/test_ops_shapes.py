"""The shape letters in names are true, everywhere in the model and the operations."""

import pytest
import torch
from torch import Tensor

from cedar.cache import DenseKV
from cedar.model import Batch, TrainSignals
from cedar.testing import check_shapes, random_tokens, tiny_model


def test_the_letters_of_the_model_are_true() -> None:
    model = tiny_model(dtype=torch.float32)
    config = model.config
    image = torch.randn(12, 3, 2, 2)  # 3 x 4 patches: one row of two image tokens
    lengths = (23, 9)
    types = [[-1] * 4 + [0, 1, 1, 2, 3] + [-1] * 14, [-1] * 9]
    batch = Batch.pack(
        [random_tokens(config, n, n) for n in lengths],
        image_types=types,
        images=[image],
        image_grids=[(3, 4)],
    )
    signals = TrainSignals(index_loss=True, index_dense=True, balance_loss=True)
    with check_shapes() as report:
        out = model(batch, signals=signals)
        model(batch, signals=TrainSignals(index_loss=True))
        store = DenseKV(config, 2)
        with torch.no_grad():
            out = model(batch, store)
            model.draft_write(out.taps_TX, batch, store)
            model(Batch.pack([[1], [2, 3, 4]], slots=[1, 0]), store, logits="last")
            model.draft_propose(torch.tensor([5, 6]), (0, 1), store)
        anchors = torch.tensor([3, 20, 30])
        model.draft_train(out.taps_TX, batch, anchors, anchors)
    # Letters that were looked at, so that an empty search cannot pass.
    assert len(report.checked) > 200
    for piece in ("Attention.attend: q_TNH", "select_best: best_TM", "compress: kv_GRH"):
        assert any(piece in name for name in report.checked)


def wrong_rank(x: Tensor) -> int:
    rows_TD = x[0]
    return len(rows_TD)


def divide(length: int) -> float:
    return 1 / (length - length)


def wrong_size(x: Tensor) -> int:
    q_TD, k_SD = x, x[:, :2]

    def inner() -> int:
        return len(q_TD)

    return inner() + len(k_SD)


def right(x: Tensor) -> int:
    q_TD, k_SD, w_TT = x, x[:1], x @ x.T
    return len(q_TD) + len(k_SD) + len(w_TT)


def test_the_checker_notices() -> None:
    x = torch.zeros(3, 4)
    with check_shapes(__name__) as report:
        right(x)
    assert {name.rsplit(" ", 1)[-1] for name in report.checked} == {"q_TD", "k_SD", "w_TT"}
    with pytest.raises(AssertionError, match="rows_TD has 1 dimensions"), check_shapes(__name__):
        wrong_rank(x)
    with (
        pytest.raises(AssertionError, match=r"wrong_size: D is . in (q_TD|k_SD) but"),
        check_shapes(__name__),
    ):
        wrong_size(x)
    with pytest.raises(ZeroDivisionError), check_shapes(__name__):  # the block's own fault wins
        divide(wrong_rank(x))
