import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cedar.errors import DataError
from cedar.inputs.ngrams import RELEASED_DIGEST, RELEASED_NUM_CLASSES, TokenMap, token_map
from cedar.inputs.tokenizer import Tokenizer
from real_tokenizer import rebuild

BUNDLED = Path(__file__).parents[2] / "src" / "cedar" / "bundled" / "cedar-tiny"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(rebuild(tmp_path_factory.getbasetemp() / "v41-tokenizer"))


@pytest.fixture(scope="module")
def released(real: Tokenizer) -> TokenMap:
    return token_map(real, 129280)


def test_released_map(released: TokenMap) -> None:
    assert released.num_classes == RELEASED_NUM_CLASSES == 99092
    assert released.digest == RELEASED_DIGEST
    assert released.classes.shape == (129280,)
    assert released.classes.dtype == np.int64
    assert released.classes[[2, 129264, 128799]].tolist() == [2, 99076, 98611]


def test_classes_are_numbered_by_first_appearance(released: TokenMap) -> None:
    new = np.maximum.accumulate(released.classes)
    assert released.classes[0] == 0
    assert (np.diff(new) <= 1).all()
    assert new[-1] == released.num_classes - 1


def test_case_accents_and_blanks_do_not_count(real: Tokenizer, released: TokenMap) -> None:
    def classes(*texts: str) -> set[int]:
        ids = [real.encode(text, control=False) for text in texts]
        assert all(len(number) == 1 for number in ids)
        return {int(released.classes[number[0]]) for number in ids}

    assert len(classes("the", " the", "The", " The", "THE")) == 1
    assert len(classes(" ", "  ", "\n", "\n\n")) == 1  # blanks alone stay blanks
    assert len(classes("the", "he")) == 2
    assert classes(" ").isdisjoint(classes("the"))


def test_pieces_of_characters_stay_apart(real: Tokenizer, released: TokenMap) -> None:
    lone_bytes = [number for number in range(3, 259) if real.token_bytes(number) >= b"\x80"]
    assert len(lone_bytes) == 128
    assert len({int(released.classes[number]) for number in lone_bytes}) == 128


def test_the_digest_notices_another_tokenizer(real: Tokenizer, released: TokenMap) -> None:
    content: dict[str, Any] = json.loads(real.raw.to_str())
    (system,) = (token for token in content["added_tokens"] if token["id"] == 128799)
    system["content"] = "<｜▁PAD▁｜>"  # now equal to the padding token but for its case
    other = token_map(Tokenizer(json.dumps(content)), 129280)
    assert other.num_classes == released.num_classes - 1
    assert other.digest != released.digest


def test_digest_is_of_little_endian_int64() -> None:
    found = token_map(BUNDLED)
    content = b"".join(int(number).to_bytes(8, "little") for number in found.classes)
    assert found.digest == hashlib.sha256(content).hexdigest()
    assert not found.classes.flags.writeable


def test_bundled_map_and_a_model_with_spare_ids() -> None:
    found = token_map(str(BUNDLED / "tokenizer.json"), 2560)
    assert found.num_classes == 2097
    assert found.classes[[0, 1, 2]].tolist() == [0, 1, 2]
    wider = token_map(BUNDLED, 2600)
    assert wider.classes[:2560].tolist() == found.classes.tolist()
    assert set(wider.classes[2560:].tolist()) == {2097}


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(DataError, match="2560 ids but the model's vocab_size is 2559"):
        token_map(BUNDLED, 2559)
