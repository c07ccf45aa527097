"""Options that commands share: declared once, the engine's own settings, and read the same way."""

import inspect
import io
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cedar.cli import chat, generate
from cedar.cli.options import EngineOptions, ModelOptions, grouped, open_core
from cedar.cli.sampling import SamplingOptions
from cedar.config import ModelConfig, tiny
from cedar.engine import EngineConfig
from cedar.errors import BackendUnavailable, CedarError, ConfigError, RequestError

GROUPS = (SamplingOptions, ModelOptions, EngineOptions)
# Decided by the command, or of no use to one that serves one conversation.
NOT_OFFERED = {"max_running", "max_waiting", "check"}


def options(command: Any) -> dict[str, inspect.Parameter]:
    """By name, as typer sees them."""
    return dict(inspect.signature(command).parameters)


def declared(option: inspect.Parameter) -> dict[str, Any]:
    (info,) = option.annotation.__metadata__
    return {"type": option.annotation.__origin__, **vars(info)}


class TestOneDeclaration:
    def test_both_commands_take_every_group_with_the_same_defaults(self) -> None:
        first, second = options(generate.command), options(chat.command)
        shared = {field.name for group in GROUPS for field in fields(group)} | {"checkpoint"}
        assert shared == first.keys() & second.keys()
        for name in shared:
            one, other = first[name], second[name]
            assert declared(one) == declared(other), name
            same = one.default == other.default
            assert same != (name == "temperature"), name  # a chat is a little cooler

    def test_neither_declares_an_option_of_a_group(self) -> None:
        names = {field.name for group in GROUPS for field in fields(group)}
        for module in (chat, generate):
            own = inspect.unwrap(module.command)
            assert not names & set(inspect.signature(own).parameters)

    def test_the_engine_can_be_set_as_from_python(self) -> None:
        """The same names and the same defaults; nothing is forgotten."""
        offered = {field.name: field.default for field in fields(EngineOptions)}
        settings = {field.name: field.default for field in fields(EngineConfig)}
        assert settings.keys() - offered.keys() == NOT_OFFERED
        assert offered.keys() <= settings.keys()
        different = {name for name, value in offered.items() if value != settings[name]}
        assert different == {"draft"}  # left open: it depends on the model
        assert EngineOptions().config(None) == EngineConfig()

    @pytest.mark.parametrize("name", ["generate", "chat"])
    def test_help_loads_no_heavy_module(self, name: str) -> None:
        code = (
            "import sys\nimport cedar.cli.__main__ as cli\n"
            f"try: cli.main(['{name}', '--help'])\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'numpy', 'tokenizers', 'cedar.config'} & set(sys.modules)\n"
            "sys.exit(f'loaded: {heavy}' if heavy else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for heading in ("Sampling", "Model", "Engine"):
            assert heading in done.stdout


class TestGroups:
    def test_values_arrive_in_their_group(self) -> None:
        @dataclass(frozen=True, kw_only=True, slots=True)
        class Colours:
            red: Annotated[int, typer.Option("--red", "-r")] = 1
            names: Annotated[list[str] | None, typer.Option()] = None

        @dataclass(frozen=True, kw_only=True, slots=True)
        class Darker(Colours):
            red: Annotated[int, typer.Option("--red", "-r")] = 0

        seen: list[Any] = []

        def paint(where: str, colours: Colours, dry: bool = False) -> None:
            """Paint it."""
            seen.append((where, colours, dry))

        # Names of a function's own scope cannot be resolved from text.
        paint.__annotations__ |= {"colours": Darker}
        app = typer.Typer()
        app.command()(grouped(paint))
        run = CliRunner().invoke
        assert run(app, ["wall"]).exit_code == 0
        assert run(app, ["wall", "-r", "7", "--names", "a", "--names", "b", "--dry"]).exit_code == 0
        assert seen == [("wall", Darker(), False), ("wall", Darker(red=7, names=["a", "b"]), True)]
        assert run(app, ["wall", "--red", "much"]).exit_code == 2
        shown = run(app, ["--help"]).output
        assert "Paint it." in shown
        assert "--colours" not in shown

    def test_every_option_has_a_default_and_a_help(self) -> None:
        for group in GROUPS:
            assert all(field.default is not MISSING for field in fields(group))
        for command in (chat.command, generate.command):
            for name, each in options(command).items():
                assert declared(each)["help"], name


class TestEngine:
    @pytest.mark.parametrize(
        ("given", "model", "expected"),
        [
            (None, tiny(), True),
            (None, None, False),
            (False, tiny(), False),
            (True, None, True),
        ],
    )
    def test_drafting_is_on_where_there_is_a_head(
        self, given: bool | None, model: ModelConfig | None, expected: bool
    ) -> None:
        assert EngineOptions(draft=given).config(model).draft is expected

    def test_settings_that_are_no_options_are_passed_on(self) -> None:
        assert EngineOptions(token_budget=9).config(None, max_running=3) == EngineConfig(
            token_budget=9, max_running=3
        )

    @pytest.mark.parametrize(
        ("engine", "said"),
        [
            (EngineOptions(replay="some"), "replay is 'some'"),
            (EngineOptions(token_budget=0, max_draft=-1), "token_budget is 0.* max_draft is -1"),
            (EngineOptions(disk_cache=Path("x"), replay="off"), "disk_cache needs the prefix"),
            (EngineOptions(disk_cache=Path("x"), prefix_cache=False), "--no-prefix-cache"),
            (EngineOptions(batch_invariant=True, decoding="host"), "passes of one size"),
            (EngineOptions(batch_invariant=True, disk_cache=Path("x")), "batch_invariant excludes"),
        ],
    )
    def test_mistakes_are_found_before_a_weight_is_read(
        self, engine: EngineOptions, said: str
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            open_core("no-such-checkpoint", ModelOptions(), engine, max_running=1)
        with pytest.raises(CedarError, match="no-such-checkpoint"):  # the control
            open_core("no-such-checkpoint", ModelOptions(), EngineOptions(), max_running=1)


class TestModel:
    def test_device_and_type(self) -> None:
        with pytest.raises(BackendUnavailable, match="--device is 'abacus'"):
            ModelOptions(device="abacus").load("cedar-tiny")
        with pytest.raises(RequestError, match="--dtype is 'int3'"):
            ModelOptions(device="cpu", dtype="int3").load("cedar-tiny")


class TestSampling:
    def test_the_defaults_of_the_parameters_but_for_top_p(self) -> None:
        from cedar.engine.params import SamplingParams

        assert SamplingOptions().params() == SamplingParams(top_p=0.95)

    def test_lists_and_additions(self) -> None:
        given = SamplingOptions(
            stop=["a"], stop_token_id=[4, 5], logit_bias=["42=-5", "7=-inf"], timeout=2.5
        )
        params = given.params(stop=("b",), n=3)
        assert params.stop == ("a", "b")
        assert params.stop_token_ids == (4, 5)
        assert params.logit_bias == {42: -5.0, 7: float("-inf")}
        assert params.n == 3

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"top_p": 2.0, "min_p": -1.0}, "top_p is 2.0.* min_p is -1.0"),
            ({"timeout": 0.0}, "timeout is 0.0; expected more than 0 seconds"),
            ({"timeout": float("nan")}, "timeout is nan"),
            ({"logit_bias": ["a=b"]}, "--logit-bias is 'a=b'"),
            ({"logit_bias": ["5"]}, "--logit-bias is '5'"),
            ({"stop": [""]}, "stop is .* expected strings of one character"),
        ],
    )
    def test_mistakes(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(RequestError, match=said):
            SamplingOptions(**given).params()


class TestPrompt:
    def test_from_a_file_and_from_standard_input(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "a.txt"
        file.write_bytes("Grüße\n".encode())
        assert generate._prompt_text("", file) == "Grüße\n"
        assert generate._prompt_text("Grüße", None) == "Grüße"
        raw = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", raw)
        with pytest.raises(RequestError, match=r"standard input is no text: .* Expected UTF-8"):
            generate._prompt_text("-", None)
        file.write_bytes(b"\xff\xfe")
        with pytest.raises(RequestError, match=r"--prompt-file .*a\.txt is no text"):
            generate._prompt_text("", file)
        with pytest.raises(RequestError, match="--prompt is no text"):
            generate._prompt_text("a\udcff", None)
        with pytest.raises(RequestError, match="both --prompt and --prompt-file"):
            generate._prompt_text("x", file)

    def test_a_chat_line_that_is_no_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.TextIOWrapper(io.BytesIO(b"Hello\n\xff\n"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", raw)
        with pytest.raises(RequestError, match="standard input is no text"):
            list(chat._lines())


def test_an_answer_never_holds_the_token_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes part of the next prompt, and there a picture would be missing."""
    seen: list[Any] = []
    monkeypatch.setattr(chat, "_lines", lambda: ["Hello"])
    monkeypatch.setattr(chat, "_turn", lambda core, talk, line, *rest: seen.append((core, rest[0])))
    chat.command(
        checkpoint="cedar-tiny",
        **{field.name: field.default for group in GROUPS for field in fields(group)}
        | {"device": "cpu", "logit_bias": ["5=1"]},
        system="",
        protocol=False,
    )
    ((core, params),) = seen
    token = core.limits.image_token_id
    assert token is not None
    assert params.logit_bias == {5: 1.0, token: float("-inf")}
