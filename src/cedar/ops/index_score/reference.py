"""Scores by matrix products."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.ops.precision import widen

__all__ = ["index_score", "index_score_rows"]


def index_score(q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor) -> Tensor:
    return _weigh(torch.matmul(q_TIJ, keys_SJ.transpose(0, 1)), w_TI)


def index_score_rows(q_TIJ: Tensor, w_TI: Tensor, keys_RJ: Tensor, rows_TM: Tensor) -> Tensor:
    return _weigh(torch.matmul(q_TIJ, F.embedding(rows_TM, keys_RJ).transpose(1, 2)), w_TI)


def _weigh(dot_TIS: Tensor, w_TI: Tensor) -> Tensor:
    weighted = dot_TIS.relu() * w_TI.unsqueeze(-1)
    return widen(weighted).sum(1).to(dot_TIS.dtype)
