"""The installed command `cedar generate` on the bundled model, and the same from Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cedar
from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine import LoadedModel
from cedar.errors import CheckpointError, RequestError

PROMPT = "The people of the United States"


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("cedar")), "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, check=False)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return cedar.load_model("cedar-tiny")


def text_of(loaded: LoadedModel, **params: float) -> tuple[list[int], str | None]:
    ids = [0, *loaded.tokenizer.encode(PROMPT, control=False)]
    *_, state = cedar.generate(loaded, ids, cedar.SamplingParams(**params))  # type: ignore[arg-type]
    return state.tokens, state.finish_reason


def test_the_command_streams_text_and_says_how_it_ended() -> None:
    done = run("cedar-tiny", "-p", PROMPT, "-n", "12", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)
    assert len(done.stdout.strip()) > len(PROMPT)
    assert "12 tokens" in done.stderr
    assert "seed 3" in done.stderr


def test_equal_seeds_repeat_and_other_seeds_differ() -> None:
    first, again, other = (
        run("cedar-tiny", "-p", PROMPT, "-n", "12", "-q", "--seed", seed).stdout
        for seed in ("3", "3", "4")
    )
    assert first == again
    assert first != other


def test_a_prompt_from_standard_input() -> None:
    done = run("cedar-tiny", "-p", "-", "-n", "4", "--temperature", "0", stdin=PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model", "-p", "x"], "no-such-model is neither a directory nor a bundled"),
        (["cedar-tiny", "-p", "x", "--temperature", "-1"], "temperature is -1.0; expected"),
        (["cedar-tiny", "-p", "x", "--top-p", "2"], "top_p is 2.0; expected"),
        (["cedar-tiny", "-p", "x", "--device", "cuda:99"], "CUDA devices"),
        (["cedar-tiny", "-p", "x", "--dtype", "int3"], "--dtype is 'int3'; expected one of"),
        (["cedar-tiny", "--no-begin"], "the prompt has no tokens"),
        (["cedar-tiny", "--prompt-file", "missing.txt"], "missing.txt cannot be read"),
    ],
)
def test_mistakes_are_one_clear_message(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    # The terminal may have wrapped the message.
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_directory_with_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    source = locate_checkpoint("cedar-tiny")
    copy = tmp_path / "model"
    shutil.copytree(source, copy)
    tokenizer = copy / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    changed = text.replace('"id": 2539', '"id": 2539', 1).replace("<｜User｜>", "<｜system｜>")
    assert changed != text
    tokenizer.write_text(changed, encoding="utf-8")
    with pytest.raises(CheckpointError, match="Engram classes"):
        cedar.load_model(copy)


def test_packed_and_mapped_give_the_same_tokens(loaded: LoadedModel) -> None:
    """Codes on the fly, codes dequantised once, and Engram rows from the file: one model."""
    expected = text_of(loaded, max_tokens=12, temperature=0.0)
    for options in ({"packed": True}, {"engram": "disk"}, {"engram": "host"}):
        other = cedar.load_model("cedar-tiny", **options)
        assert text_of(other, max_tokens=12, temperature=0.0) == expected


def test_generation_equals_one_forward_over_everything(loaded: LoadedModel) -> None:
    ids = [0, *loaded.tokenizer.encode(PROMPT, control=False)]
    tokens, _ = text_of(loaded, max_tokens=24, temperature=0.0)
    with torch.inference_mode():
        logits = loaded.model(cedar.Batch.pack([ids + tokens])).logits
    # Where the runner-up is close, rounding may decide; it must not be so often.
    top = logits[len(ids) - 1 : -1].topk(2, dim=1)
    clear = (top.values[:, 0] - top.values[:, 1]) > 1e-3
    assert clear.sum() >= len(tokens) - 2
    chosen = torch.tensor(tokens)
    assert torch.equal(top.indices[:, 0][clear], chosen[clear])


def test_the_end_of_text_token_stops(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, reason = text_of(loaded, max_tokens=5, temperature=0.0)
    assert (len(usual), reason) == (5, "length")
    eos = torch.nn.functional.one_hot(torch.tensor([1]), 2560).float()
    monkeypatch.setattr(loaded.model, "logits", lambda hidden: eos)
    assert text_of(loaded, max_tokens=5, temperature=0.0) == ([], "stop")


def test_prompts_that_cannot_be_served(loaded: LoadedModel) -> None:
    params = cedar.SamplingParams(max_tokens=1)
    with pytest.raises(RequestError, match="prompt token 1 is 99999; expected 0 to"):
        next(cedar.generate(loaded, [0, 99999], params))
    limit = loaded.model.config.max_position_embeddings
    with pytest.raises(RequestError, match=f"positions end at {limit}"):
        next(cedar.generate(loaded, [0] * limit, params))
