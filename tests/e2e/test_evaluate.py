"""The installed command `cedar evaluate`."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cedar


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("cedar")), "evaluate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    documents = [
        {"source": "speech", "text": "The Congress of the United States has the power."},
        {"source": "verse", "text": "And the LORD said unto him, Go, and he went."},
        {"source": "speech", "text": "Our trade with foreign nations is larger than before."},
    ]
    path.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    return path


def test_figures_by_source_and_together(corpus: Path) -> None:
    done = run("cedar-tiny", str(corpus), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["speech", "verse", "all"]
    assert found["all"]["bytes"] == 48 + 44 + 53
    assert found["all"]["tokens"] == found["speech"]["tokens"] + found["verse"]["tokens"]
    nats = sum(found[s]["loss_per_byte"] * found[s]["bytes"] for s in ("speech", "verse"))
    assert found["all"]["loss_per_byte"] == pytest.approx(nats / found["all"]["bytes"])
    assert found["all"]["bits_per_byte"] == pytest.approx(
        found["all"]["loss_per_byte"] / math.log(2)
    )
    assert found["all"]["loss_per_token"] < math.log(2560)
    assert found["all"]["loss_per_token_without_engram"] != found["all"]["loss_per_token"]


def test_the_loss_is_that_of_the_logits(corpus: Path) -> None:
    """Against the definition, document by document."""
    loaded = cedar.load_model("cedar-tiny")
    total, count = 0.0, 0
    for line in corpus.read_text(encoding="utf-8").splitlines():
        ids = [0, *loaded.tokenizer.encode(json.loads(line)["text"], control=False), 1]
        with torch.inference_mode():
            logits = loaded.model(cedar.Batch.pack([ids])).logits[:-1]
        total += float(
            torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])) * len(logits)
        )
        count += len(logits)
    found = json.loads(run("cedar-tiny", str(corpus), "--json").stdout.splitlines()[-1])["all"]
    assert found["tokens"] == count
    assert found["loss_per_token"] == pytest.approx(total / count, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), ("not json\n", "line 1: not valid JSON"), ("", "holds no document")],
)
def test_a_bad_corpus_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = run("cedar-tiny", str(path))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
