"""Running the model on one golden case, and laying its values out as the golden files do.

A case is a prompt that is prefilled at once, then tokens that are decoded one at a time. Its
keys are ``<prefix>prefill.…``, ``<prefix>after_prefill.…`` and ``<prefix>decode.…``; the rest of
a key is the name of a probed value, so that whatever a model records can be compared.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cedar.analysis.parity.caches import compare_caches
from cedar.analysis.parity.exact import ExactProducts
from cedar.analysis.parity.judge import Judge
from cedar.analysis.parity.report import Kind
from cedar.cache import DenseKV
from cedar.config.model import ModelConfig
from cedar.model import Batch, Model

__all__ = ["Case", "Recorder", "ascending", "in_golden_form", "run_case"]

_DRAFTED = ("draft_ids", "draft_logits", "confidence")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Tokens ``[B, prompt + steps]`` and, for a prompt with images, their types and patches.

    exact_only: compare choices that depend on token ids alone, and show everything else.
    """

    prefix: str
    tokens_BT: Tensor
    prompt: int
    image_types_BT: Tensor | None = None
    images: tuple[Tensor, ...] = ()
    image_grids: tuple[tuple[int, int], ...] = ()
    exact_only: bool = False

    @property
    def sequences(self) -> int:
        """How many sequences the case has."""
        return self.tokens_BT.shape[0]

    def prompt_batch(self) -> Batch:
        """The prompt of every sequence."""
        types = self.image_types_BT
        return Batch.pack(
            self.tokens_BT[:, : self.prompt].tolist(),
            image_types=None if types is None else types.tolist(),
            images=self.images,
            image_grids=self.image_grids,
        )

    def step_batch(self, step: int) -> Batch:
        """The token of every sequence at a decode step."""
        place = self.prompt + step
        return Batch.pack(self.tokens_BT[:, place : place + 1].tolist())


@dataclass(slots=True)
class Recorder:
    """A probe that keeps the values of some names."""

    names: Collection[str]
    values: dict[str, Tensor] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return name in self.names

    def record(self, name: str, value: Tensor) -> None:
        if name in self.names:
            self.values[name] = value


def run_case(judge: Judge, model: Model, case: Case) -> None:
    """Compare all keys of a case that are still open.

    A float32 model runs with `ExactProducts`.
    """
    single = model.compute_dtype is torch.float32
    with ExactProducts() if single else nullcontext():
        _run_case(judge, model, case)


def _run_case(judge: Judge, model: Model, case: Case) -> None:
    rest = {
        key: key.removeprefix(case.prefix)
        for key in judge.golden.tensors
        if key in judge.open and key.startswith(case.prefix)
    }
    drafting = model.mtp is not None and any(
        name.startswith(("after_prefill.mtp", *(f"decode.{one}" for one in _DRAFTED)))
        for name in rest.values()
    )
    store = DenseKV(model.config, case.sequences, dtype=model.compute_dtype)
    wanted = _phase(rest, "prefill.")
    values, _ = _forward(model, case.prompt_batch(), store, wanted.values(), drafting=drafting)
    for key, name in wanted.items():
        if name in values:
            compare_value(judge, key, name, values, model.config, case)
    compare_caches(
        judge,
        model.config,
        store,
        _phase(rest, "after_prefill."),
        length=case.prompt,
        how=Kind.SHOWN if case.exact_only else Kind.FLOAT32,
    )
    wanted = _phase(rest, "decode.")
    if wanted:
        _decode(judge, model, case, store, wanted, drafting=drafting)


def _phase(rest: Mapping[str, str], phase: str) -> dict[str, str]:
    return {key: name.removeprefix(phase) for key, name in rest.items() if name.startswith(phase)}


def _forward(
    model: Model, batch: Batch, store: DenseKV, names: Iterable[str], *, drafting: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Everything recorded, under golden names, and the tokens that follow."""
    wanted = {"logits" if name == "logits_full" else name for name in names}
    wanted |= {_numbers_of(name) for name in wanted if name.endswith("gate.weights")}
    recorder = Recorder(wanted)
    output = model(batch, store, probe=recorder)
    if drafting and output.taps_TX is not None:
        model.draft_write(output.taps_TX, batch, store)
    last = torch.tensor([stop - 1 for _, stop in batch.bounds])
    next_B = output.logits[last].argmax(-1)
    values = recorder.values
    if "logits" in values:
        values["logits_full"] = values["logits"]
    values["next_ids"] = next_B
    return values, next_B


def _decode(
    judge: Judge,
    model: Model,
    case: Case,
    store: DenseKV,
    wanted: Mapping[str, str],
    *,
    drafting: bool,
) -> None:
    tensors = judge.golden.tensors
    steps = min(max(tensors[key].shape[1] for key in wanted), case.tokens_BT.shape[1] - case.prompt)
    parts: dict[str, list[Tensor]] = {key: [] for key in wanted}
    slots = tuple(range(case.sequences))
    for step in range(steps):
        values, next_B = _forward(
            model, case.step_batch(step), store, wanted.values(), drafting=drafting
        )
        if drafting:
            proposal = model.draft_propose(next_B, slots, store)
            values["draft_ids"] = torch.cat((next_B.unsqueeze(1), proposal.tokens_NB), dim=1)
            values["draft_logits"] = proposal.logits_NBV
            values["confidence"] = proposal.confidence_NB
        for key, name in wanted.items():
            if name in values:
                like = tensors[key][:, step : step + 1]
                shaped = in_golden_form(
                    name, _ordered(name, values), like, model.config, case.sequences
                )
                parts[key].append(shaped)
    for key, name in wanted.items():
        if parts[key]:
            _judge_value(judge, key, name, torch.cat(parts[key], dim=1), case)


def compare_value(
    judge: Judge, key: str, name: str, values: Mapping[str, Tensor], config: ModelConfig, case: Case
) -> None:
    """Compare one recorded value of a prefill."""
    like = judge.golden.tensors[key]
    ours = in_golden_form(name, _ordered(name, values), like, config, case.sequences)
    _judge_value(judge, key, name, ours, case)


def _ordered(name: str, values: Mapping[str, Tensor]) -> Tensor:
    """Experts have no order: their numbers ascending, their weights likewise."""
    value = values[name]
    if name.endswith("gate.indices"):
        return value.sort(-1).values
    if name.endswith("gate.weights"):
        experts = values.get(_numbers_of(name))
        return value.sort(-1).values if experts is None else value.gather(-1, experts.argsort(-1))
    return value


def _numbers_of(name: str) -> str:
    return name.removesuffix("weights") + "indices"


def _judge_value(judge: Judge, key: str, name: str, ours: Tensor, case: Case) -> None:
    tensors = judge.golden.tensors
    # Weights are put in the order of the experts that the same file names for them.
    siblings = {name: tensors[key]}
    if (numbers := tensors.get(_numbers_of(key))) is not None:
        siblings[_numbers_of(name)] = numbers
    golden = _ordered(name, siblings)
    if name.endswith("topk_idxs"):
        golden = ascending(golden, golden.shape[-1])
    if case.exact_only and name != "engram_hash_ids":
        judge.shown(key, ours, golden=golden)
    elif _is_choice(name):
        judge.exact(key, ours, golden=golden)
    else:
        judge.float32(key, ours, golden=golden)


def _is_choice(name: str) -> bool:
    """Whether a value is a discrete choice."""
    return name.endswith(("topk_idxs", "candidates", "gate.indices", "_ids"))


def in_golden_form(
    name: str, value: Tensor, like: Tensor, config: ModelConfig, sequences: int
) -> Tensor:
    """A packed value ``[B · T, …]`` as ``[B, T, …]``, cut to the rows that ``like`` has."""
    if name == "next_ids" and like.dim() == 1:
        return value
    if ".gate." in name and like.dim() == 2:
        return value[: like.shape[0]]  # the golden rows are packed as well
    if not name.startswith(_DRAFTED):
        value = value.unflatten(0, (sequences, -1))
    else:
        value = value.unsqueeze(1)
    value = value[: like.shape[0]]
    if name.endswith("logits_full"):
        return value[:, value.shape[1] - like.shape[1] :]
    if name.endswith("topk_idxs"):
        return ascending(value, like.shape[-1])
    if name.endswith("candidates"):
        return _mask(value, config.candidate_block_size, like.shape[-1])
    if name.endswith("scores"):
        missing = like.shape[-1] - value.shape[-1]
        return torch.nn.functional.pad(value, (0, max(missing, 0)), value=-torch.inf)
    return value


def ascending(entries: Tensor, width: int) -> Tensor:
    """int64 entry numbers in ascending order with −1 at the end, at least ``width`` of them."""
    missing = max(width - entries.shape[-1], 0)
    wide = torch.nn.functional.pad(entries.to(torch.int64), (0, missing), value=-1)
    last = torch.iinfo(torch.int64).max
    ordered = wide.masked_fill(wide < 0, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)


def _mask(blocks: Tensor, block_size: int, width: int) -> Tensor:
    """Block numbers ``[…, K]``, −1 for none, as a mask ``[…, width]`` over entries."""
    count = -(-width // block_size)
    kept = torch.zeros((*blocks.shape[:-1], count + 1), dtype=torch.bool)
    kept.scatter_(-1, torch.where(blocks >= 0, blocks, count), True)
    return kept[..., :count].repeat_interleave(block_size, dim=-1)[..., :width]
