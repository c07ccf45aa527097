"""Train the tokenizer of cedar-tiny: byte-level BPE in the released form, on training text only.

    python tools/corpus/train_tokenizer.py [--vocab-size 2560] [--out DIR] [--report 2048 4096]

The pre-tokenizer, the flags of every protocol token and the file format are the released ones;
only the vocabulary is smaller. Id 0 is the begin, 1 the end of a text, 2 the padding; then 256
bytes, then merges, and the protocol's added tokens close the vocabulary. Every byte is a token, so
any text can be written. The result depends on the training file alone.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from cedar.inputs.ngrams import token_map
from cedar.inputs.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "src" / "cedar" / "bundled" / "cedar-tiny"

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# (spelling, special, normalized) in the order of the released ids.
PROTOCOL_TOKENS: tuple[tuple[str, bool, bool], ...] = (
    ("<｜System｜>", False, True),
    ("<｜User｜>", False, True),
    ("<｜Assistant｜>", False, True),
    ("<think>", False, True),
    ("</think>", False, True),
    ("｜DSML｜", False, True),
    ("<｜latest_reminder｜>", False, True),
    ("<｜action｜>", False, True),
    ("<｜query｜>", False, True),
    ("<｜authority｜>", False, True),
    ("<｜domain｜>", False, True),
    ("<｜title｜>", False, True),
    ("<｜read_url｜>", False, True),
    ("<｜deepseek_image｜>", False, False),
    ("<｜/polygon｜>", True, False),
    ("<｜polygon｜>", True, False),
    ("<｜/point｜>", True, False),
    ("<｜point｜>", True, False),
    ("<｜/box｜>", True, False),
    ("<｜box｜>", True, False),
    ("<｜/ref｜>", True, False),
    ("<｜ref｜>", True, False),
)
STAGES = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    r"|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
)


def texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def learn(training: Path, vocab_size: int) -> dict[str, Any]:
    """The tokenizer file, as a JSON object, with ``vocab_size`` ids in all."""
    base = vocab_size - len(PROTOCOL_TOKENS)
    raw = RawTokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(stage), "isolated") for stage in STAGES]
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=base,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts(training), trainer)
    model = json.loads(raw.to_str())["model"]
    if len(model["vocab"]) != base:
        raise SystemExit(f"the text gives only {len(model['vocab'])} of {base} base tokens")
    added = [(BOS, True, False), (EOS, True, False), (PAD, True, False), *PROTOCOL_TOKENS]
    numbers = [0, 1, 2, *range(base, vocab_size)]
    released_form = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": model["vocab"],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
    }
    split_form = [
        {"type": "Split", "pattern": {"Regex": stage}, "behavior": "Isolated", "invert": False}
        for stage in STAGES
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": normalized,
                "special": special,
            }
            for number, (content, special, normalized) in zip(numbers, added, strict=True)
        ],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*split_form, _byte_level(False, True, False)],
        },
        "post_processor": _byte_level(True, False, True),
        "decoder": _byte_level(True, True, True),
        "model": released_form,
    }


def _byte_level(prefix: bool, trim: bool, regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": trim,
        "use_regex": regex,
    }


def settings(max_length: int) -> dict[str, Any]:
    """The companion ``tokenizer_config.json``, with the released keys."""

    def token(content: str) -> dict[str, Any]:
        return {
            "__type": "AddedToken",
            "content": content,
            "lstrip": False,
            "normalized": True,
            "rstrip": False,
            "single_word": False,
        }

    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS),
        "legacy": True,
        "model_max_length": max_length,
        "pad_token": token(EOS),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, content: dict[str, Any], *, end: str = "\n") -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + end, encoding="utf-8")


def report(path: Path, corpus: Path) -> None:
    """Print the number of Engram classes and bytes per token by split and source."""
    tokenizer = Tokenizer.from_file(path)
    classes = token_map(tokenizer, tokenizer.vocab_size).num_classes
    line: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "engram_classes": classes}
    for split in ("train", "heldout"):
        sizes: dict[str, list[int]] = {}
        with (corpus / f"{split}.jsonl").open(encoding="utf-8") as lines:
            for document in map(json.loads, lines):
                num_tokens = len(tokenizer.encode(document["text"], control=False))
                for name in ("all", document["source"]):
                    total = sizes.setdefault(name, [0, 0])
                    total[0] += len(document["text"].encode())
                    total[1] += num_tokens
        line[f"{split}_tokens"] = sizes["all"][1]
        line[f"{split}_bytes_per_token"] = {k: round(b / t, 3) for k, (b, t) in sizes.items()}
    print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, default=ROOT / "data" / "corpus")
    parser.add_argument("--vocab-size", type=int, default=2560, help="ids in all")
    parser.add_argument("--max-length", type=int, default=1048576, help="model_max_length")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder of the two files")
    parser.add_argument("--report", type=int, nargs="*", default=(), help="other sizes to compare")
    options = parser.parse_args()
    training = options.corpus / "train.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "tokenizer.json", learn(training, options.vocab_size))
    write_json(options.out / "tokenizer_config.json", settings(options.max_length), end="")
    report(options.out / "tokenizer.json", options.corpus)
    for size in options.report:
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "tokenizer.json", learn(training, size))
            report(Path(folder) / "tokenizer.json", options.corpus)


if __name__ == "__main__":
    main()
