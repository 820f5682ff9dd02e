"""Images in folders, one for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from espalier.train.sections import FolderData

_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})


@dataclass(frozen=True)
class ImageFolder:
    """Images and the numbers of their classes: ``pixel_values`` [channels, height, width] and ``labels``.

    Attributes:
        files: each with its class.
        image: [channels, height, width] that they are brought to.
        mean, std: by channel: values from 0 to 1 less the mean, divided by std.
        flip: mirror half of them.
    """

    files: Sequence[tuple[Path, int]]
    image: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    flip: bool

    @classmethod
    def pair(cls, data: FolderData, image: tuple[int, int, int], classes: int) -> tuple[Self, Self]:
        """What to train and what to validate on.

        Raises:
            ValueError: there are no images, or of more classes than the model has.
        """
        if find_spec("PIL") is None:
            reason = "images are read by pillow, which is not installed: pip install 'espalier[data]'"
            raise ValueError(reason)
        root = Path(data.source)
        if not root.is_dir():
            raise ValueError(f"data.source = {data.source!r} is no folder")
        inner = [root / name for name in ("train", "val") if (root / name).is_dir()]
        if len(inner) == 2:
            names = _classes(inner[0], classes)
            train, val = ([(p, i) for i, c in enumerate(names) for p in _files(at / c)] for at in inner)
        else:
            train, val = [], []
            for i, name in enumerate(_classes(root, classes)):
                files = _files(root / name)
                # spread over each class, in the order of names
                kept = max(round(len(files) * data.val_fraction), 1) if len(files) > 1 else 0
                apart = {j * len(files) // kept for j in range(kept)}
                train += [(p, i) for j, p in enumerate(files) if j not in apart]
                val += [(p, i) for j, p in enumerate(files) if j in apart]
        if not train or not val:
            raise ValueError(f"data.source = {data.source!r} has too few images to train and to validate on")
        channels = image[0]
        for key, values in (("mean", data.mean), ("std", data.std)):
            if len(values) not in (1, channels):
                raise ValueError(f"data.{key} = {values}: expected one number, or one for each of {channels}")
        mean, std = (list(v) * (channels // len(v)) for v in (data.mean, data.std))
        return cls(train, image, mean, std, data.flip), cls(val, image, mean, std, False)

    def __len__(self) -> int:
        return len(self.files)

    def row(self, index: int, draw: np.random.Generator) -> Mapping[str, Any]:
        """One image."""
        from PIL import Image

        path, label = self.files[index]
        channels, height, width = self.image
        with Image.open(path) as opened:
            colours = opened.convert("L" if channels == 1 else "RGB")
            resized = colours.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized, np.float64).reshape(height, width, -1).transpose(2, 0, 1) / 255
        if self.flip and draw.random() < 0.5:
            pixels = pixels[:, :, ::-1]
        mean, std = (np.array(x).reshape(-1, 1, 1) for x in (self.mean, self.std))
        return {"pixel_values": (pixels - mean) / std, "labels": label}


def _classes(root: Path, most: int) -> list[str]:
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise ValueError(f"{root} has no folders: expected one for each class")
    if len(names) > most:
        raise ValueError(f"{root} has {len(names)} classes, but the model tells {most} apart")
    return names


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _ENDINGS and p.is_file())
