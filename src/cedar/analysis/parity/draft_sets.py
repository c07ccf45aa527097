"""The draft head: what it proposes after every decode step."""

import re

import torch
from torch import Tensor

from cedar.analysis.parity.caches import compare_caches
from cedar.analysis.parity.cases import Case, run_case
from cedar.analysis.parity.judge import BLOCK_RMS, Judge
from cedar.analysis.parity.model_sets import edge_lengths, prompt_length
from cedar.analysis.parity.report import Kind
from cedar.analysis.parity.sets import Golden, GoldenSet
from cedar.cache import DenseKV
from cedar.config.plan import Half
from cedar.errors import CedarError, DataError
from cedar.model import Batch, Model

__all__ = ["compare_drafts"]

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compare_drafts(judge: Judge, golden: Golden, which: GoldenSet) -> None:
    """Every ``<checkpoint>.<type>.…`` part of the set, with ``<base>_<checkpoint>.weights``."""
    judge.skip("edge.input_ids", "input_ids")
    pattern = re.compile(r"(\w+)\.(fp32|bf16)\.")
    parts = sorted({match.groups() for key in judge.open if (match := pattern.match(key))})
    for checkpoint, kind in parts:
        base = f"{which.base}_{checkpoint}" if which.base else checkpoint
        try:
            _compare_part(judge, golden, base, f"{checkpoint}.{kind}.", _TYPES[kind])
        except CedarError as error:
            _fail_part(judge, f"{checkpoint}.{kind}.", str(error))


def _fail_part(judge: Judge, prefix: str, message: str) -> None:
    judge.skip(*(key for key in judge.golden.tensors if key.startswith(prefix)))
    judge.fail(f"{prefix}*", message)


def _compare_part(judge: Judge, golden: Golden, base: str, prefix: str, dtype: torch.dtype) -> None:
    model = golden.model(base, judge.golden, dtype)
    if model.mtp is None:
        _fail_part(judge, prefix, f"the configuration of {base} has no draft head (n_mtp_layers)")
        return
    tokens = golden.inputs(base, judge.golden, "input_ids")
    if tokens is None:
        raise DataError(
            f"{judge.golden.name}: its prompt is the input_ids of {base}.expect_fp32, "
            "which is missing."
        )
    prompt = prompt_length(judge, tokens, f"{prefix}prefill.main_hidden")
    single = dtype is torch.float32
    if not single:
        _compare_fed(judge, model, prefix, tokens, prompt)
    case = Case(prefix=prefix, tokens_BT=tokens, prompt=prompt, exact_only=not single)
    run_case(judge, model, case)
    edge_tokens = judge.golden.find("edge.input_ids")
    for length in edge_lengths(judge, f"{prefix}edge."):
        run_case(
            judge,
            model,
            Case(
                prefix=f"{prefix}edge.{length}.",
                tokens_BT=tokens if edge_tokens is None else edge_tokens,
                prompt=length,
                exact_only=not single,
            ),
        )


class _Given:
    """Chooses what it was given, one after the other, whatever the logits."""

    def __init__(self, tokens: list[Tensor]) -> None:
        self._left = iter(tokens)

    def __call__(self, logits: Tensor) -> Tensor:
        return next(self._left)


def _compare_fed(judge: Judge, model: Model, prefix: str, tokens_BT: Tensor, prompt: int) -> None:
    """bfloat16: the draft blocks alone, on golden main states and golden choices."""
    tensors = judge.golden.tensors
    names = ("prefill.main_hidden", "decode.main_hidden", "decode.draft_ids")
    if any(prefix + name not in tensors for name in names):
        return
    prefill, decode, chosen = (tensors[prefix + name] for name in names)
    count, steps = decode.shape[:2]
    slots = tuple(range(count))
    store = DenseKV(model.config, count, dtype=model.compute_dtype)

    def commit(taps_BTX: Tensor, tokens: Tensor) -> None:
        for slot in slots:
            store.advance(slot, Half.ENCODER, taps_BTX.shape[1])
        model.draft_write(taps_BTX.flatten(0, 1), Batch.pack(tokens.tolist()), store)

    commit(prefill, tokens_BT[:, :prompt])
    caches = {
        key: key.removeprefix(f"{prefix}after_prefill.")
        for key in tensors
        if key in judge.open and key.startswith(f"{prefix}after_prefill.mtp.")
    }
    compare_caches(judge, model.config, store, caches, length=prompt, how=Kind.BFLOAT16)
    logits, confidence = [], []
    for step in range(steps):
        place = prompt + step
        commit(decode[:, step : step + 1], tokens_BT[:, place : place + 1])
        first, *later = chosen[:, step].unbind(1)
        proposal = model.draft_propose(first, slots, store, _Given(later))
        logits.append(proposal.logits_NBV)
        confidence.append(proposal.confidence_NB)
    for name, values in (("draft_logits", logits), ("confidence", confidence)):
        key = f"{prefix}decode.{name}"
        if key in tensors:
            judge.relative_rms(key, torch.stack(values, dim=1), limit=BLOCK_RMS)
