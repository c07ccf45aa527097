"""lm-eval through the server gives what the engine gives without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cedar.engine.llm import LLM
from cedar.inputs.chat import Api, ChatProtocol
from served import serving

pytestmark = pytest.mark.soak

QUESTIONS = [
    ("And the LORD said unto Moses,", [" Go in unto Pharaoh", " zebra quantum pizza"]),
    ("In the beginning God created", [" purple is of and", " the heaven and the earth"]),
    ("We the people of the United", [" States of America", " sofa under the yes"]),
    ("It was the best of", [" times and the worst of times", " qx jj the of of"]),
]
CHOICES = """
task: cedar_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
num_fewshot: 0
"""
WORDS = """
task: cedar_words
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, temperature: 0.0}
metric_list: [{metric: exact_match}]
num_fewshot: 0
"""


def evaluate(folder: Path, model: str, arguments: str, task: str, *more: str) -> dict[str, Any]:
    """Run the harness; its results and samples of a task."""
    output = folder / f"{model}-{task}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model]
    command += ["--model_args", arguments, "--tasks", task, "--include_path", str(folder)]
    command += ["--output_path", str(output), "--log_samples", *more]
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    lines = samples.read_text(encoding="utf-8").splitlines()
    return {
        "results": json.loads(results.read_text(encoding="utf-8"))["results"][task],
        "samples": sorted((json.loads(line) for line in lines), key=lambda each: each["doc_id"]),
    }


def in_process(llm: LLM) -> list[list[float]]:
    """Log likelihood of every choice, by the engine alone."""
    tokenizer, found = llm.core.tokenizer, []
    for question, choices in QUESTIONS:
        row = []
        for choice in choices:
            start = len(tokenizer.encode(question, control=False))
            tokens = tokenizer.encode(question + choice, control=False)
            (done,) = llm.generate(
                [tokens], {"max_tokens": 1, "prompt_logprobs": 0}, progress=False
            )
            assert done.prompt_logprobs is not None
            row.append(sum(each.logprob for each in done.prompt_logprobs[start:] if each))
        found.append(row)
    return found


def replies(llm: LLM, before: str = "") -> list[str]:
    """The answer to every question as a chat, by the engine alone."""
    protocol = ChatProtocol(
        llm.core.tokenizer, models=["cedar-tiny"], default_thinking=False, accepts_images=True
    )
    found = []
    for question, _ in QUESTIONS:
        messages = [{"role": "user", "content": before + question}]
        body = json.dumps({"model": "cedar-tiny", "messages": messages}).encode()
        params = {"max_tokens": 8, "temperature": 0.0, "stop": ["."]}
        (done,) = llm.generate([protocol.read(Api.CHAT, body).tokens], params, progress=False)
        found.append(done.text)
    return found


def test_scores_are_those_of_the_engine(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for question, choices in QUESTIONS:
            answer = max(range(2), key=lambda place, choices=choices: len(choices[place]) % 7)
            line = {"question": question, "choices": choices, "answer": answer}
            file.write(json.dumps(line) + "\n")
    for name, text in (("choices", CHOICES), ("words", WORDS)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(data)), encoding="utf-8")

    llm = LLM("cedar-tiny", pool_tokens=4096)
    expected = in_process(llm)
    answers = [json.loads(line)["answer"] for line in data.read_text().splitlines()]
    accuracy = sum(row.index(max(row)) == a for row, a in zip(expected, answers, strict=True)) / 4

    with serving("--no-draft", "--pool-tokens", "8192") as served:
        arguments = f"model=cedar-tiny,base_url={served.url}/v1/completions,num_concurrent=1"
        found = evaluate(tmp_path, "local-completions", arguments, "cedar_choices")
        assert found["results"]["acc,none"] == accuracy
        for sample, row in zip(found["samples"], expected, strict=True):
            scores = [float(each[0]) for each in sample["filtered_resps"]]
            assert scores == pytest.approx(row, abs=2e-3)

        arguments = f"model=cedar-tiny,base_url={served.url}/v1/chat/completions"
        chat = evaluate(
            tmp_path, "local-chat-completions", arguments, "cedar_words", "--apply_chat_template"
        )
        texts = [sample["filtered_resps"][0] for sample in chat["samples"]]
        assert texts == replies(llm)
        right = [QUESTIONS[n][1][answers[n]] == text for n, text in enumerate(texts)]
        assert chat["results"]["exact_match,none"] == sum(right) / 4
        assert "Traceback" not in served.log
    assert all(texts)
    assert texts != replies(llm, "Now: ")  # negative control
