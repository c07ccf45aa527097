"""Sets of a whole model: the float32 and bfloat16 expectations for a checkpoint."""

import re

import torch
from torch import Tensor

from cedar.analysis.parity.blocks import compare_blocks
from cedar.analysis.parity.cases import Case, run_case
from cedar.analysis.parity.judge import Judge
from cedar.analysis.parity.sets import Golden, GoldenSet
from cedar.errors import DataError

__all__ = ["compare_expectation", "edge_lengths", "prompt_length"]

_INPUTS = ("input_ids", "engram_token_map")
# The released decoding takes index keys of other layers; there for reference only.
_REFERENCE_ONLY = "decode_released."


def compare_expectation(judge: Judge, golden: Golden, which: GoldenSet) -> None:
    """Prefill, caches, decoding and edge cases; bfloat16 block by block."""
    tensors = judge.golden.tensors
    single = which.kind == "expect_fp32"
    judge.skip(*_INPUTS, *(key for key in tensors if key.startswith(_REFERENCE_ONLY)))
    model = golden.model(which.base, judge.golden, torch.float32 if single else torch.bfloat16)
    tokens = golden.inputs(which.base, judge.golden, "input_ids")
    if tokens is None:
        raise DataError(f"{which.name}: no input_ids; expected int64 [sequences, tokens].")
    prompt = prompt_length(judge, tokens, "prefill.logits_full")
    if not single:
        compare_blocks(judge, model, tokens, prompt)
    case = Case(prefix="", tokens_BT=tokens, prompt=prompt, exact_only=not single)
    run_case(judge, model, case)
    for length in edge_lengths(judge, "edge."):
        run_case(
            judge,
            model,
            Case(
                prefix=f"edge.{length}.",
                tokens_BT=tokens,
                prompt=length,
                exact_only=not single,
            ),
        )


def prompt_length(judge: Judge, tokens_BT: Tensor, whole: str) -> int:
    """Tokens of the prefill: what the sidecar says, else the length of a value that has all."""
    stated = judge.golden.sidecar.get("prefill_len")
    if isinstance(stated, int) and 0 < stated <= tokens_BT.shape[1]:
        return stated
    value = judge.golden.find(whole)
    return tokens_BT.shape[1] if value is None else value.shape[1]


def edge_lengths(judge: Judge, prefix: str) -> list[int]:
    """Prompt lengths of the edge cases below ``prefix``, which ends in ``edge.``."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    found = {int(match[1]) for key in judge.open if (match := pattern.match(key))}
    return sorted(found)
