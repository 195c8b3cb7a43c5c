"""Flip and crop, against a plain loop over the images, and in distribution."""

import pytest
import torch
import torch.nn.functional as F

from shaver.data import FlipCrop


def every_outcome(image: torch.Tensor, pad: int, flip: bool) -> list[torch.Tensor]:
    """All the images that ``FlipCrop`` may make of one, by slicing: shifts row by row, then mirrored ones."""
    height, width = image.shape[1:]
    padded = F.pad(image, (pad,) * 4)
    shifts = range(2 * pad + 1)
    crops = [padded[:, r : r + height, c : c + width] for r in shifts for c in shifts]
    return crops + ([crop.flip(2) for crop in crops] if flip else [])


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_every_image_is_one_of_the_possible_crops_each_equally_often(flip, dtype):
    image = torch.arange(1, 1 + 2 * 5 * 4).reshape(2, 5, 4).to(dtype)
    n, pad = 9000, 1
    made = FlipCrop(pad=pad, flip=flip)(image.expand(n, -1, -1, -1), torch.Generator().manual_seed(0))
    assert made.shape == (n, 2, 5, 4)
    assert made.dtype == dtype
    counts = torch.tensor([(made == outcome).flatten(1).all(1).sum() for outcome in every_outcome(image, pad, flip)])
    assert int(counts.sum()) == n
    expected = n / len(counts)
    chi_square = float((counts - expected).square().sum() / expected)
    assert chi_square < 50  # 9 or 18 outcomes: the chance of this is below 1e-4, and the seed is fixed


def test_images_draw_apart_from_each_other_but_channels_together():
    batch = torch.arange(6 * 6).reshape(1, 1, 6, 6).expand(64, 3, 6, 6)
    made = FlipCrop(pad=2)(batch, torch.Generator().manual_seed(0))
    assert torch.equal(made[:, 0], made[:, 1])
    assert torch.equal(made[:, 0], made[:, 2])
    assert len(made[:, 0].flatten(1).unique(dim=0)) > 20


def test_no_padding_and_no_flip_change_nothing():
    batch = torch.randint(0, 256, (5, 3, 7, 4), dtype=torch.uint8)
    assert torch.equal(FlipCrop(pad=0, flip=False)(batch, torch.Generator()), batch)


def test_the_generator_decides():
    batch = torch.randint(0, 256, (30, 1, 8, 8), dtype=torch.uint8)
    one, same, other = (FlipCrop()(batch, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_wrong_shapes_and_settings_are_named():
    with pytest.raises(ValueError, match=r"not \(4, 8\)"):
        FlipCrop()(torch.zeros(4, 8), torch.Generator())
    with pytest.raises(ValueError, match="pad must be an integer of at least 0, not -1"):
        FlipCrop(pad=-1)
