"""A whole run: build, train, evaluate, save, and go on where it stopped.

    DIR/config.json    the configuration, flat
    DIR/checkpoints/   see `state`
    DIR/log.jsonl      see `report`
    DIR/curve.png
    DIR/tokens/        tokenised corpus, unless data.cache says otherwise
    DIR/export/        the finished model, as a checkpoint directory

On a CPU a resumed run equals an uninterrupted one bit for bit. On a GPU it continues the same run,
but sums in kernels may round differently from run to run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.environment import describe_run
from cedar.errors import TrainingError
from cedar.train.build import build_model, choose_device, export_model, load_export
from cedar.train.config import DraftMode, ExportFormat, TrainConfig, validate
from cedar.train.curve import draw_curve, need_matplotlib
from cedar.train.data import TrainData, open_corpus, prefetch
from cedar.train.evaluate import evaluate
from cedar.train.interruption import Interruption
from cedar.train.optim import learning_rate, make_optimizer, set_learning_rate
from cedar.train.overrides import flatten
from cedar.train.report import LogFile, Reporter, SilentReporter, Stopwatch
from cedar.train.state import check_resumable, find_checkpoints, restore, save
from cedar.train.step import StepResult, train_step

__all__ = ["RunResult", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended.

    step: steps done.
    finished: all steps are done; False after an interruption.
    evaluation: the last held-out evaluation, empty when interrupted.
    export: the finished model's directory.
    export_evaluation: the same evaluation of the model as read back from `export`.
    """

    step: int
    finished: bool
    evaluation: dict[str, float]
    export: Path | None = None
    export_evaluation: dict[str, float] | None = None


def train(
    config: TrainConfig,
    run: Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    reporter: Reporter | None = None,
) -> RunResult:
    """Run (or go on with) the training in directory `run`.

    SIGINT and SIGTERM end it after the current step with a checkpoint; a second one ends it at
    once.

    Args:
        resume: go on from the newest checkpoint in `run`.
        stop_after: stop, as if interrupted, when this many steps are done in all.
        reporter: who is told; nobody by default.

    Raises:
        TrainingError: a wrong configuration, a run directory in use without `resume`, another
            configuration or corpus than the checkpoint's, or a loss that is not finite.
        DataError: an unreadable corpus or tokenizer.
    """
    reporter = reporter or SilentReporter()
    validate(config)
    if config.curve:
        need_matplotlib()
    device = choose_device(config.device)
    checkpoints = find_checkpoints(run)
    if resume and not checkpoints:
        raise TrainingError(f"{run} holds no checkpoint to resume from; start without resuming.")
    if checkpoints and not resume:
        raise TrainingError(
            f"{run} already holds a run (newest checkpoint: {checkpoints[-1].name}); "
            "resume it with --resume or choose another directory."
        )
    if resume:
        check_resumable(checkpoints[-1], config)
    run.mkdir(parents=True, exist_ok=True)
    _write_text(run / "config.json", json.dumps(flatten(config), indent=1) + "\n")
    with _arithmetic(config, device):
        trainer = _Trainer(config, run, device, reporter, checkpoints[-1] if resume else None)
        # Up to here nothing is lost by ending at once.
        with Interruption() as interruption:
            return trainer.run(interruption, config.steps if stop_after is None else stop_after)


class _Trainer:
    """The objects of one run and the loop over them."""

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        device: torch.device,
        reporter: Reporter,
        checkpoint: Path | None,
    ) -> None:
        self.config, self.directory, self.device, self.reporter = config, run, device, reporter
        cache = Path(config.data.cache) if config.data.cache else run / "tokens"
        corpus = open_corpus(config, cache)
        self.corpus_digest = corpus.digest
        self.data = TrainData(config, corpus)
        anchors = config.draft.anchors if self._drafts else 0
        self.some_held_out = self.data.held_out(config.eval.tokens, anchors)
        self.all_held_out = self.data.held_out(config.eval.final_tokens, anchors)
        self.model = build_model(config, device)
        self.optimizer = make_optimizer(self.model.named_parameters(), config.optim)
        self.step, self.tokens = 0, 0
        if checkpoint is not None:
            saved = restore(
                checkpoint,
                model=self.model,
                optimizer=self.optimizer,
                config=config,
                corpus_digest=self.corpus_digest,
            )
            self.step, self.tokens = saved.step, saved.tokens
        self.saved_step = self.step
        self.sums: dict[str, Tensor] = {}
        self.sums_from = self.tokens
        self.watch = Stopwatch()

    @property
    def _drafts(self) -> bool:
        return self.config.draft.mode is not DraftMode.OFF

    def run(self, interruption: Interruption, stop_after: int) -> RunResult:
        config = self.config
        self._announce()
        stop = min(stop_after, config.steps)
        evaluation: dict[str, float] = {}
        with LogFile(self.directory / "log.jsonl", step=self.step) as log:
            log.write("run", {"step": self.step, **describe_run()})
            self.reporter.begin(self.step, config.steps)
            try:
                if self._due(config.eval.interval) and 0 < self.step < config.steps:
                    self._evaluate(log)
                self._loop(log, interruption, stop)
                finished = self.step == config.steps
                if finished:
                    evaluation = self._evaluate(log, final=True)
            finally:
                self.reporter.end()
            if config.curve and self.step:
                draw_curve(self.directory / "log.jsonl", self.directory / "curve.png")
            if not finished:
                return RunResult(step=self.step, finished=False, evaluation={})
            if config.export is ExportFormat.OFF:
                return RunResult(step=self.step, finished=True, evaluation=evaluation)
            exported = self._export(log)
        return RunResult(
            step=self.step,
            finished=True,
            evaluation=evaluation,
            export=self.directory / "export",
            export_evaluation=exported,
        )

    def _loop(self, log: LogFile, interruption: Interruption, stop: int) -> None:
        config = self.config
        anchors = config.draft.anchors if self._drafts else 0
        batches = prefetch(self.data, self.step, stop, anchors=anchors, device=self.device)
        self.watch.lap()
        for batch in batches:
            rate = learning_rate(self.step, config.steps, config.optim)
            set_learning_rate(self.optimizer, rate)
            self._add(train_step(self.model, self.optimizer, batch, config, self.step))
            self.step += 1
            self.tokens += sum(len(one.targets_T) for one in batch)
            ending = interruption.requested or self.step == stop
            saving = ending or self._due(config.checkpoint.interval)
            if self._due(config.log_interval) or saving:
                self._log(log, rate)
            if saving:
                with self.watch.paused():
                    self._save()
            self.reporter.advance(self.step)
            # An interruption may have come while the step was being reported.
            if ending or interruption.requested:
                self._save()
                batches.close()
                return
            if self._due(config.eval.interval):
                with self.watch.paused():
                    self._evaluate(log)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _add(self, result: StepResult) -> None:
        """Add a step to the running sums, on the device."""
        values = result.parts | {
            f"grad_norm_{part.value}": norm for part, norm in result.grad_norms.items()
        }
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        one = torch.ones((), device=self.device)
        self.sums["steps"] = self.sums["steps"] + one if "steps" in self.sums else one

    def _log(self, log: LogFile, rate: float) -> None:
        """Write the means since the last log point; the one place that waits for the device."""
        if not self.sums:
            return
        values = torch.stack([value.double() for value in self.sums.values()]).tolist()
        found = dict(zip(self.sums, values, strict=True))
        count = found.pop("steps")
        seconds = self.watch.lap()
        record: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            "epoch": self.data.epoch_of(self.step - 1),
            "lr": rate,
            "tokens_per_second": (self.tokens - self.sums_from) / max(seconds, 1e-9),
        }
        record |= {name: value / count for name, value in found.items()}
        self.sums, self.sums_from = {}, self.tokens
        broken = [name for name, value in found.items() if not math.isfinite(value)]
        if broken:
            kept = find_checkpoints(self.directory)
            raise TrainingError(
                f"Between steps {self.step - int(count) + 1} and {self.step} these became infinite "
                f"or not a number: {', '.join(broken)}. Lower optim.lr or optim.grad_clip, or "
                "lengthen optim.warmup_steps"
                + (f"; {kept[-1].name} is from before." if kept else ".")
            )
        log.write("train", record)
        self.reporter.train(record)

    def _save(self) -> None:
        if self.saved_step != self.step:
            save(
                self.directory,
                model=self.model,
                optimizer=self.optimizer,
                config=self.config,
                corpus_digest=self.corpus_digest,
                step=self.step,
                tokens=self.tokens,
            )
            self.saved_step = self.step

    def _evaluate(self, log: LogFile, *, final: bool = False) -> dict[str, float]:
        held_out = self.all_held_out if final else self.some_held_out
        result = evaluate(self.model, held_out, self.config, self.device)
        log.write("final" if final else "eval", {"step": self.step, **result})
        self.reporter.evaluated({"step": self.step, **result})
        return result

    def _export(self, log: LogFile) -> dict[str, float]:
        directory = self.directory / "export"
        export_model(self.model, self.config, directory)
        model = load_export(self.config, directory, self.device)
        result = evaluate(model, self.all_held_out, self.config, self.device)
        log.write("export", {"step": self.step, **result})
        return result

    def _announce(self) -> None:
        config, note = self.config, self.reporter.note
        count = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for g in self.optimizer.param_groups for p in g["params"])
        note(
            f"{count:,} parameters, {trained:,} trained, on {self.device}, activations in "
            f"{str(self.model.compute_dtype).removeprefix('torch.')}; "
            f"{self.data.tokens_per_epoch:,} tokens per epoch."
        )
        if self.step:
            note(f"Resumed after step {self.step}.")
        if config.draft.mode is DraftMode.STAGE:
            note("Only the draft head is trained; the backbone stays as it is.")
        elif config.index.weight == 0 and config.model.index_source_layers:
            note(
                "The index loss is off: nothing else trains the indexers, so they keep selecting "
                "as their initial weights do."
            )


@contextmanager
def _arithmetic(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Threads and, on a CPU, deterministic sums; both as they were afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        if config.threads:
            torch.set_num_threads(config.threads)
        if device.type == "cpu":
            # Else gradients of gathered rows are added in the order in which threads arrive.
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
