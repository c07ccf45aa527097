"""docs/performance.md is what its tool makes of the committed lines, and the tool reads right."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABOUT: dict[str, Any] = {
    "commit": "0123456789abcdef+",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "devices": {"cuda:0": "a GPU"},
}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    names = ("kernel_lines", "kernel_goals", "kernel_table")
    lines, goals, table = (importlib.import_module(name) for name in names)
    return lines, goals, table


def line(op: str, ours: float | str, floor: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"op": op, "floor_us": floor, "ours_us": ours, "error": 0.0, **more, **ABOUT}


def test_the_page_is_up_to_date(tools: tuple[ModuleType, ...]) -> None:
    lines, _, table = tools
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.page(lines.read()) == text, "run python tools/kernel_table.py"


def test_of_one_case_the_last_line_counts(tools: tuple[ModuleType, ...], tmp_path: Path) -> None:
    lines = tools[0]
    old = [line("mhc", 9.0, tokens=1, bytes=3), line("mhc", 8.0, tokens=2)]
    new = [line("mhc", 4.0, tokens=1, bytes=4, liger_us=2.0), line("step", 5.0, batch=1)]
    for name, some in (("h200-ops", old), ("h200-ops-later", new), ("cpu-engine", old)):
        text = "\n".join(map(json.dumps, some))
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    found = lines.read(tmp_path)
    assert [x["ours_us"] for x in found] == [4.0, 8.0, 5.0]
    assert lines.case(found[0]) == {"tokens": 1}


def test_what_a_run_lacks_stays_in_force(tools: tuple[ModuleType, ...], tmp_path: Path) -> None:
    lines, _, table = tools
    absent = "cannot run: ModuleNotFoundError: No module named 'liger_kernel'"
    before = ABOUT | {"commit": "fedcba9876543210"}
    old = line("mhc", 9.0, tokens=1, liger_us=5.0, liger_error=0.1, fla_us=1.0) | before
    old |= {"pytorch_compiled_us": 7.0, "copy_us": 3.0, "flashinfer_us": 2.0}
    new = line("mhc", 8.0, tokens=1, liger=absent, fla="not timed: error above 0.01")
    third = line("mhc", 7.0, tokens=1, liger=absent, tile_kernels_us=6.0, flashinfer_us=4.0)
    text = "\n".join(map(json.dumps, (old, new, third)))
    (tmp_path / "h200-ops.jsonl").write_text(text, encoding="utf-8")
    (one,) = lines.read(tmp_path)
    assert one["ours_us"] == 7.0
    # A peer that failed has no time any more; one that was not there keeps it.
    assert lines.peers(one) == {"liger": 5.0, "tile_kernels": 6.0, "flashinfer": 4.0}
    assert one["liger_error"] == 0.1
    assert "liger" not in one
    assert lines.times(one, lines.PLAIN) == {"pytorch_compiled": 7.0}
    assert lines.beside(one) == {}
    assert one["kept"] == {"liger": before["commit"], "pytorch_compiled": before["commit"]}
    assert lines.case(one) == {"tokens": 1}
    assert "0123456789a"[:9] in table.made([one])
    assert "fedcba987" in table.made([one])


def test_columns(tools: tuple[ModuleType, ...]) -> None:
    lines, _, table = tools
    one = line(
        "mhc", 4.0, tokens=2048, pytorch_us=9.0, pytorch_compiled_us=3.0, copy_us=1.0,
        liger_us=2.0, flashinfer="cannot run: no", spread_us=[3.9, 4.3], someone_us=6.0,
    )  # fmt: skip
    assert lines.peers(one) == {"liger": 2.0}
    assert lines.beside(one) == {"copy": 1.0, "someone": 6.0}
    assert lines.fraction(one) == 0.25
    shown = table.table("mhc", [one])
    assert "| 1.00 | 4.00 | 0.25 | 10 % | 2.00 (Liger) | 3.00 | 1.00 | 6.00 | 0.0e+00 |" in shown
    assert "- mhc, FlashInfer: cannot run: no" in table.silent([one])
    faster = table.faster([one])
    assert "| mhc | tokens 2048 | Liger | 4.00 | 2.00 | 2.00x |" in faster
    assert "PyTorch, compiled" in faster
    assert "PyTorch, eager" not in faster
    assert "someone" not in faster
    assert "Nowhere" in table.faster([line("mhc", "not timed: error above 1", tokens=1)])


def test_a_context_end_to_end(tools: tuple[ModuleType, ...]) -> None:
    table = tools[2]
    one = {
        "op": "long_context", "tokens": 1048000, "prefill_s": 9.5, "prefill_tokens_per_s": 110316,
        "decode_us": 900.5, "decode_us_after_8K": 850.0, **ABOUT,
    }  # fmt: skip
    text = table.page([one])
    assert "| 1,048,000 | 9.5 | 110,316 | 900.5 | 850.0 |" in text
    assert "long context" not in table.page([line("mhc", 1.0, tokens=1)])


def test_end_to_end_beside_another_model(tools: tuple[ModuleType, ...]) -> None:
    lines, _, table = tools
    one = {
        "op": "end_to_end", "pass": "decode", "tokens": 8192, "ours_us": 500.0, "full_us": 501.0,
        "transformers_us": 25000.0, "transformers_compiled": "cannot run: no", "label": "a label",
        "parameters": {"cedar": 150000000}, **ABOUT,
        "versions": {**ABOUT["versions"], "transformers": "5.17.0"},
    }  # fmt: skip
    assert lines.case(one) == {"pass": "decode", "tokens": 8192}
    text = table.page([one])
    assert "transformers 5.17.0, deepseek_v4: a label" in text
    assert "| decode | 8,192 | 500 | 501 | 25,000 |  |" in text
    assert "150M parameters in cedar" in text
    assert "- end_to_end, transformers, compiled: cannot run: no" in text
    assert "Nowhere" in text


def test_a_goal_is_judged_by_its_worst_case(tools: tuple[ModuleType, ...]) -> None:
    _, goals, _ = tools
    by_name = {goal.name: goal for goal in goals.GOALS if goal.name}
    forward = by_name["G1"]
    some = [line("mhc", 10.0, 8.5, tokens=2048), line("mhc", 10.0, 9.5, tokens=8192)]
    assert forward.find(some) == 0.85
    assert goals.verdict(forward, 0.85) == "met"
    assert goals.verdict(forward, 0.95) == "aim met"
    assert goals.verdict(forward, 0.75) == "missed"
    assert goals.verdict(forward, None) == "not measured"
    # What was not timed is no success.
    assert forward.find([*some, line("mhc", "not timed: wrong", 1.0, tokens=4096)]) is None
    few = by_name["G3"]
    assert few.find([line("mhc", 7.0, tokens=128), line("mhc", 99.0, tokens=129)]) == 7.0
    assert goals.verdict(few, 7.0) == "met"
    assert goals.verdict(few, 9.0) == "missed"


def test_steps(tools: tuple[ModuleType, ...]) -> None:
    lines, goals, _ = tools
    one = {"batch": 1, "queries": 1, "gigabytes": {"keys": 1.5}, "engram_share": 0.01}
    steps = [
        line("step", 100.0, 50.0, context="8K", kernels_per_reuse_layer=13, **one),
        line("step", 103.0, 52.0, context="1M", kernels_per_reuse_layer=12, **one),
        line("step", 300.0, 150.0, context="1M", batch=1, queries=6),
    ]
    by_name = {goal.name: goal for goal in goals.GOALS if goal.name}
    assert by_name["G15"].find(steps) == 0.5
    assert lines.case(steps[0]) == {"context": "8K", "batch": 1, "queries": 1}
    assert by_name["G16"].find(steps) == 1.03
    assert by_name["G17"].find(steps) == 1.5
    kernels = goals.GOALS[goals.GOALS.index(by_name["G15"]) + 1]
    assert kernels.find(steps) == 13
