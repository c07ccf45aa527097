"""Images of a request are checked when it is handed in, not by the pass that would run them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from cedar.config import tiny
from cedar.engine.images import ImageInput, check_images, place_images
from cedar.errors import RequestError
from cedar.inputs.images import ImageSettings
from real_engine import loaded_tiny, make_runner, picture, prefill, with_image

CONFIG = loaded_tiny().model.config
SETTINGS = ImageSettings.from_config(CONFIG)
TOKEN = CONFIG.image_token_id
TEXT = list(range(3, 33))
IMAGE = picture(9, seed=1)
PROMPT = with_image(TEXT, IMAGE)


def check(
    tokens: Sequence[int] = PROMPT, images: Sequence[Any] = (IMAGE,)
) -> tuple[ImageInput, ...]:
    return check_images(tokens, images, TOKEN, SETTINGS)


def of(**changes: Any) -> dict[str, Any]:
    return {"images": (replace(IMAGE, **changes),)}


def test_what_place_images_makes_is_accepted() -> None:
    """Pictures of many shapes, several in a prompt, at its ends and side by side."""
    config = tiny()
    settings = ImageSettings.from_config(config)
    token = config.image_token_id
    sizes = [(84, 84), (20, 300), (500, 13), (400, 300), (1, 1), (43, 85)]
    pictures = [Image.new("RGB", size, (k, 2 * k, 3 * k)) for k, size in enumerate(sizes)]
    for prompt in ([token], [token, 5, token], [5, token, token, 6, 7, token, token, 8, token]):
        given = pictures[: prompt.count(token)]
        tokens, images = place_images(prompt, given, token, settings)
        assert check_images(tokens, images, token, settings) == images
    assert check_images([5, 6], (), token, settings) == ()


def test_the_pictures_of_the_tests_are_accepted() -> None:
    two = picture(20, seed=2)
    assert check() == (IMAGE,)
    assert check(with_image(PROMPT, two), [IMAGE, two]) == (IMAGE, two)
    behind = picture(17, seed=2)
    assert check(with_image(PROMPT, behind), [IMAGE, behind]) == (IMAGE, behind)


def test_a_model_without_a_tower() -> None:
    for known in ((None, None), (TOKEN, None), (None, SETTINGS)):
        with pytest.raises(RequestError, match=r"no vision tower .* Send text only"):
            check_images(PROMPT, (IMAGE,), *known)
    # The number means nothing there, as any other.
    assert check_images(PROMPT, (), None, None) == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        # Where the span stands.
        (of(start=10), r"images\[0\]: its span is positions 10 to 17, but prompt token 17 is 12"),
        (of(start=8), r"8 to 15, but prompt token 8 is 11; expected 61"),
        (of(start=-1), r"positions -1 to 6; expected a part of the prompt, which is 0 to 37"),
        (of(start=31), r"positions 31 to 38; expected a part of the prompt, which is 0 to 37"),
        ({"tokens": PROMPT[:16]}, r"positions 9 to 16; .* 0 to 15"),
        ({"tokens": [*PROMPT[:12], 5, *PROMPT[13:]]}, r"prompt token 12 is 5; expected 61"),
        ({"images": (IMAGE, IMAGE)}, r"images\[1\].*, but the image before ends at 16"),
        (
            {
                "tokens": with_image(PROMPT, picture(20, seed=2)),
                "images": (picture(20, seed=2), IMAGE),
            },
            r"images\[1\].* 9 to 16, but the image before ends at 27; expected .* order",
        ),
        # Image tokens that belong to nothing.
        ({"images": ()}, r"prompt token 9 is 61, the image token, but stands in none of the 0"),
        ({"tokens": [*PROMPT, TOKEN]}, r"prompt token 38 is 61.* none of the 1 images' spans"),
        ({"tokens": [*PROMPT[:17], TOKEN, *PROMPT[17:]]}, r"prompt token 17 is 61"),
        # Types and grid.
        (
            of(types=(0, 1, 1, 1, 1, 1, 2, 3)),
            r"8 positions, 5 of them IMAGE; expected START, then 2",
        ),
        (of(types=(0, 1, 1, 1, 1, 2, 2, 3)), r"types has 8 positions, 4 of them IMAGE"),
        (of(types=IMAGE.types[:-1]), r"types has 7 positions"),
        (of(types=()), r"types has 0 positions"),
        (of(grid=(6, 7)), r"rows of 3 IMAGE and a NEWLINE, then END, for a grid of 6 x 7"),
        (of(grid=(6, 0)), r"grid is \(6, 0\); expected rows and columns"),
        (of(grid=(6,)), r"grid is \(6,\); expected rows and columns"),
        (of(grid=(60, 60)), r"grid of 60 x 60 patches takes 422 positions; allowed are 64"),
        # Patches.
        (of(patches=IMAGE.patches[:30]), r"of shape \[30, 3, 2, 2\]; .* \[36, 3, 2, 2\] .* 6 x 6"),
        (of(patches=IMAGE.patches[:, :1]), r"of shape \[36, 1, 2, 2\]"),
        (of(patches=IMAGE.patches.flatten(2)), r"of shape \[36, 3, 4\]"),
        (of(patches=(127 * IMAGE.patches).to(torch.uint8)), r"are torch.uint8 .* floating point"),
        (of(patches=IMAGE.patches.index_fill(0, torch.tensor(35), torch.nan)), "NaN or infinity"),
        (of(patches=IMAGE.patches.index_fill(0, torch.tensor(0), -torch.inf)), "NaN or infinity"),
        (of(patches=1e300 * IMAGE.patches), "NaN or infinity"),
        # Not an image at all.
        ({"images": (Image.new("RGB", (8, 8)),)}, "images holds a Image; expected ImageInput"),
        ({"images": ("a.png",)}, "images holds a str; expected ImageInput"),
    ],
)
def test_mistakes_name_image_found_and_expected(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        of(types=(0, 1, 1, 1, 1, 2, 2, 3)),
        of(patches=IMAGE.patches.index_fill(0, torch.tensor(35), torch.nan)),
        of(start=10),
        {"images": ()},
    ],
    ids=["order of types", "not a number", "elsewhere", "no image"],
)
def test_the_pass_would_not_notice(wrong: dict[str, Any]) -> None:
    """Why it is checked here: the runner takes these, and the answer is of something else."""

    def logits(images: tuple[ImageInput, ...]) -> torch.Tensor:
        runner = make_runner()
        runner.open(0)
        work = prefill(runner, 0, PROMPT, 0, len(PROMPT), len(PROMPT), images=images)
        (result,) = runner.execute([work])
        assert result.logits is not None
        return result.logits

    found, expected = logits(wrong["images"]), logits((IMAGE,))
    assert not torch.allclose(found, expected, atol=1e-6)
