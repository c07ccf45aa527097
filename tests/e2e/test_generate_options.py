"""What `cedar generate` offers through the engine."""

import subprocess
import sys
from pathlib import Path

PROMPT = "The people of the United States"
GREEDY = ("--temperature", "0", "-q")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("cedar")), "generate", "cedar-tiny"]
    done = subprocess.run(
        [*command, "-p", PROMPT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_drafts_do_not_change_the_text() -> None:
    plain = run("-n", "24", *GREEDY).stdout
    drafted = run("-n", "24", "--temperature", "0", "--draft")
    assert drafted.stdout == PROMPT + plain
    assert "drafts accepted" in drafted.stderr


def test_a_stop_string_is_not_shown() -> None:
    whole = run("-n", "24", *GREEDY).stdout
    stop = whole.split()[3]
    cut = run("-n", "24", "--stop", stop, *GREEDY).stdout
    assert cut.rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")


def test_several_samples_are_written_one_after_the_other() -> None:
    done = run("-n", "6", "--samples", "3", "--seed", "5")
    assert [line for line in done.stdout.splitlines() if line.startswith("---")] == [
        "--- 1 of 3 ---",
        "--- 2 of 3 ---",
        "--- 3 of 3 ---",
    ]
    assert done.stderr.count(" 6 tokens at ") == 3
    alone = run("-n", "6", "--seed", "5")
    assert alone.stdout.strip() in done.stdout


def test_log_probabilities_are_listed() -> None:
    done = run("-n", "3", "--logprobs", "2", "--prompt-logprobs", "0", "--seed", "1")
    scored = [line for line in done.stderr.splitlines() if line.strip().startswith("-")]
    assert sum(" of " in line for line in scored) == 3
    assert len(scored) > 3


def test_a_bias_forbids_a_token() -> None:
    from cedar.checkpoint.locate import locate_checkpoint
    from cedar.inputs.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(locate_checkpoint("cedar-tiny"))
    text = run("-n", "1", *GREEDY).stdout.rstrip("\n")
    (token,) = tokenizer.encode(text, control=False)
    other = run("-n", "1", "--logit-bias", f"{token}=-inf", *GREEDY).stdout.rstrip("\n")
    assert other != text


def test_prefixes_on_disk_are_found_by_the_next_process(tmp_path: Path) -> None:
    long = ("-p", f"{PROMPT} " * 20, "-n", "8", "--temperature", "0")
    cache = ("--cache-directory", str(tmp_path / "prefixes"))
    first, second = run(*long, *cache), run(*long, *cache)
    assert first.stdout == second.stdout
    assert "cached" not in first.stderr
    assert "cached" in second.stderr
