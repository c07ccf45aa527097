"""The commands `plan`, `check`, `convert` and `env`, and how errors are shown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_setting import GOLDEN, random_tensors, tiny_without_extras

import cedar.cli.__main__ as cli
from cedar.checkpoint import save_checkpoint
from cedar.config import tiny

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    code = caught.value.code
    return code if isinstance(code, int) else 0


def last_json(capsys: Capture) -> dict[str, object]:
    document: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


class TestPlan:
    def test_released_json(self, capsys: Capture) -> None:
        assert run("plan", "released", "--json") == 0
        found = last_json(capsys)
        assert list(found) == [
            "kv_bytes_per_token",
            "params",
            "inventory",
            "layers",
            "cache_layout",
        ]
        assert found["kv_bytes_per_token"] == {
            "total": 890,
            "main": 720,
            "index": 170,
            "encoder": 534,
            "decoder": 356,
        }
        assert found["params"] == {
            "backbone": 551566180464,
            "engram": 196613849600,
            "draft": 14225362530,
            "vision": 485268480,
            "active_prefill": 7895568184,
            "active_decode": 16130588784,
        }
        inventory = found["inventory"]
        assert isinstance(inventory, dict)
        assert inventory["tensors"] == 96085
        assert inventory["bytes"] == 510286023000
        assert inventory["by_dtype"]["I8"] == {"tensors": 47232, "bytes": 278585671680}
        layout = found["cache_layout"]
        assert isinstance(layout, dict)
        assert layout["slot_bytes"] == 3_128_424
        parts = ("ring_bytes", "residue_bytes", "history_bytes")
        assert layout["slot_bytes"] == sum(layout[part] for part in parts)
        assert layout["slack_rows"] == 6
        layers = found["layers"]
        assert isinstance(layers, list)
        assert len(layers) == 43
        assert layers[24] == {
            "index": 24,
            "half": "decoder",
            "mode": "reindex",
            "compress_ratio": 1,
            "kv_source": 20,
            "topk_source": 24,
            "candidate_source": 20,
            "engram": False,
        }

    @pytest.mark.usefixtures("wide")
    def test_tables(self, capsys: Capture) -> None:
        assert run("plan", "released") == 0
        out = capsys.readouterr().out
        for words in (
            "551,566,180,464",
            "288 / 2 = 144",
            "68 / 1 = 68",
            "builds pool",
            "512 / 16 (E4M3 scales)",
            "510,286,023,000",
            "(128 + 6) rows x 528",
            "3,128,424",
            "890",
            "534",
            "356",
        ):
            assert words in out

    def test_directory_and_file(self, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "config.json").write_text(tiny().nested_json())
        documents = []
        for target in ("tiny", str(tmp_path), str(tmp_path / "config.json")):
            assert run("plan", target, "--json") == 0
            documents.append(last_json(capsys))
        assert documents[0] == documents[1] == documents[2]
        assert run("plan", str(GOLDEN / "mini_bf16.weights.json"), "--json") == 0
        assert last_json(capsys) != documents[0]

    @pytest.mark.usefixtures("wide")
    def test_a_model_of_window_layers(self, tmp_path: Path, capsys: Capture) -> None:
        raw = tiny().to_flat() | {
            "compress_ratios": [0] * 14,
            "kv_source_layers": [],
            "index_source_layers": [],
            "candidate_source_layer": -1,
        }
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert run("plan", str(tmp_path)) == 0
        assert "reuse" not in capsys.readouterr().out

    def test_bad_configuration(self, tmp_path: Path, capsys: Capture) -> None:
        raw = tiny().to_flat() | {"o_groups": 3, "head_dim": 48, "[red]": 1}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert run("plan", str(tmp_path)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert "3 problems" in captured.err
        assert "[red]: found an unknown key" in captured.err
        assert "Traceback" not in captured.err


class TestCheck:
    @pytest.mark.usefixtures("wide")
    def test_good_and_bad(self, tmp_path: Path, capsys: Capture) -> None:
        config = tiny_without_extras()
        save_checkpoint(tmp_path, config, random_tensors(config), "fp8fp4")
        assert run("check", str(tmp_path)) == 0
        assert capsys.readouterr().out.startswith("ok: ")
        assert run("check", str(tmp_path), "--json") == 0
        assert last_json(capsys)["ok"] is True
        (tmp_path / "config.json").write_text(tiny().nested_json())
        assert run("check", str(tmp_path)) == 1
        assert "missing: mtp.0.main_proj.weight" in capsys.readouterr().out
        assert run("check", str(tmp_path), "--json") == 1
        assert "vision.norm.weight" in str(last_json(capsys)["missing"])

    def test_single_file_with_its_configuration(self, capsys: Capture) -> None:
        file = GOLDEN / "mini_bf16.weights.safetensors"
        config = str(file.with_suffix(".json"))
        assert run("check", str(file), "--config", config, "--json") == 0
        assert last_json(capsys)["tensors"] == 590

    def test_no_checkpoint(self, tmp_path: Path, capsys: Capture) -> None:
        assert run("check", str(tmp_path / "nowhere")) == 2
        assert "nowhere" in capsys.readouterr().err


class TestConvert:
    def test_with_companions(self, tmp_path: Path, capsys: Capture) -> None:
        config = tiny_without_extras()
        source, target = tmp_path / "a", tmp_path / "b"
        save_checkpoint(source, config, random_tensors(config), "bf16")
        (source / "tokenizer.json").write_text("{}")
        assert run("convert", str(source), str(target), "--storage", "fp8fp4") == 0
        assert "fp8fp4" in capsys.readouterr().out
        assert (target / "tokenizer.json").read_text() == "{}"
        assert run("check", str(target)) == 0
        assert run("convert", str(source), str(target), "--storage", "fp8fp4") == 2
        assert "not empty" in capsys.readouterr().err

    def test_unknown_storage(self, tmp_path: Path) -> None:
        assert run("convert", str(tmp_path), str(tmp_path / "b"), "--storage", "int4") == 2


class TestEnv:
    def test_json(self, capsys: Capture) -> None:
        assert run("env", "--device", "cpu", "--json") == 0
        found = last_json(capsys)
        operations = found["ops"]
        assert isinstance(operations, list)
        assert operations
        assert all(choice["implementation"] and choice["reason"] for choice in operations)
        assert "cpu" in str(found["devices"])

    @pytest.mark.usefixtures("wide")
    def test_tables(self, capsys: Capture) -> None:
        assert run("env", "--device", "cpu") == 0
        assert "reference" in capsys.readouterr().out

    def test_no_such_device(self, capsys: Capture) -> None:
        assert run("env", "--device", "abacus") == 2
        assert 'error: --device "abacus"' in capsys.readouterr().err


class TestMain:
    @pytest.mark.usefixtures("wide")
    def test_help_lists_every_command(self, capsys: Capture) -> None:
        assert run("--help") == 0
        out = capsys.readouterr().out
        for name, summary in cli.COMMANDS.items():
            assert name in out
            assert summary in out

    @pytest.mark.usefixtures("wide")
    def test_help_of_a_command_is_its_own(self, capsys: Capture) -> None:
        assert run("plan", "--help") == 0
        assert "Works from the configuration alone" in capsys.readouterr().out

    def test_help_loads_no_heavy_module(self) -> None:
        code = (
            "import sys\nimport cedar.cli.__main__ as cli\n"
            "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'numpy', 'tokenizers', 'cedar.config'} & set(sys.modules)\n"
            "sys.exit(f'loaded: {heavy}' if heavy else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_version(self, capsys: Capture) -> None:
        assert run("--version") == 0
        assert capsys.readouterr().out.startswith("cedar ")

    def test_unknown_command(self, capsys: Capture) -> None:
        assert run("plann") == 2
        assert "plann" in capsys.readouterr().err

    def test_missing_module_fails_only_when_called(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "absent": "Not there."})
        assert run("--help") == 0
        capsys.readouterr()
        assert run("absent") == 2
        assert "error: cedar absent: needs a module" in capsys.readouterr().err

    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(model: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("cedar.cli.plan.command", interrupt)
        assert run("plan", "tiny") == 130

    def test_our_own_faults_are_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fault(model: str) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("cedar.cli.plan.command", fault)
        with pytest.raises(ZeroDivisionError):
            cli.main(["plan", "tiny"])
