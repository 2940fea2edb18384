"""`cifar10`: 60,000 colour images of 32 x 32 pixels in 10 classes, as 64 patches or as 1,024 single pixels.

Krizhevsky, 2009, "Learning multiple layers of features from tiny images". In training, images are randomly shifted by up to 2
pixels and mirrored, differently in each epoch. The last 1,000 training images are held out for validation.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from subquad.errors import load_extra
from subquad.families.base import Mechanism
from subquad.models import SubquadForImageClassification
from subquad.tasks.base import Batch, Row, Settings, Splits, TaskInfo
from subquad.tasks.classes import Classification
from subquad.tasks.rows import Columns, model_config, stack_rows
from subquad.tasks.source import damaged_file, find_file, load_from_hub, parse_rows, require_length, require_rows, task_folder

SIDE, SHIFT, CLASSES = 32, 2, 10
HELD_OUT = 1_000
_FORMATS = ("PNG", "WEBP", "JPEG")  # of pictures; for some others Pillow runs programs
PATCH = {"patches": 4, "pixels": 1}
MEAN, SPREAD = 0.47, 0.25  # approximately, over all channels
POSITION_SPREAD = 0.5  # of the initial position embeddings, as large as those of patches: small ones are learned late


class Cifar10(Classification):
    """Classify the image."""

    info: ClassVar[TaskInfo] = TaskInfo(
        name="cifar10",
        idea="colour images of 32 x 32 in 10 classes, as 64 patches or 1,024 single pixels",
        kind="bidirectional",
        metric="accuracy",
        higher_is_better=True,
        source="uoft-cs/cifar10",
        folder="cifar10",
        defaults=Settings(
            length=64, layers=4, dim=96, heads=4, batch=64, lr=2e-3, epochs=8, label_smoothing=0.1, weight_decay=0.05
        ),
        options={"tokens": tuple(PATCH)},
    )

    def load(self, folder: Path | None, settings: Settings) -> Splits:
        tokens = self.options(settings)["tokens"]
        require_length(self.info, settings, (SIDE // PATCH[tokens]) ** 2, f"one token for each of its {tokens}")
        images, labels = self.split("train", folder)
        test_images, test_labels = self.split("test", folder)
        require_rows(self.info, len(images), HELD_OUT + 1, "training images", "Get the data again.")
        train = Shifted(images[:-HELD_OUT], labels[:-HELD_OUT], settings.seed)
        valid = Columns(pixel_values=images[-HELD_OUT:], labels=labels[-HELD_OUT:])
        return Splits(train, valid, Columns(pixel_values=test_images, labels=test_labels), scale_pixels)

    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        patch = PATCH[self.options(settings)["tokens"]]
        picture = {"image_size": SIDE, "patch_size": patch, "num_channels": 3, "num_labels": CLASSES}
        places = {"position": "learned", "max_position_embeddings": (SIDE // patch) ** 2}
        model = SubquadForImageClassification(model_config(method, settings, **picture, **places))
        positions: Any = model.model.positions
        nn.init.normal_(positions.table.weight, std=POSITION_SPREAD)
        return model

    def split(self, name: str, folder: Path | None) -> tuple[Tensor, Tensor]:
        """Images (B, 3, 32, 32) of uint8 and labels (B,)."""
        if folder is None:
            [datasets] = load_extra("train", f"the data of {self.info.name}", "datasets")
            rows = load_from_hub(self.info, split=name).cast_column("img", datasets.Image(decode=False))
            return decode_images(Path(self.info.source), rows["img"], rows["label"])
        path = find_file(self.info, task_folder(self.info, folder), [f"{name}-00000-of-00001.parquet", f"{name}.parquet"])
        [parquet] = load_extra("train", f"the data of {self.info.name}", "pyarrow.parquet")
        try:
            table = parquet.read_table(path, columns=["img", "label"])
        except Exception as error:  # pyarrow has its own errors, and need not be installed
            raise damaged_file(path, error) from error
        return decode_images(path, table.column("img").to_pylist(), table.column("label").to_pylist())


class Shifted(Dataset[Row]):
    """Training images, randomly shifted and mirrored in each epoch."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self.images, self.labels, self.seed = F.pad(images, [SHIFT] * 4), labels, seed
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        self.shifts = torch.randint(2 * SHIFT + 1, (len(self), 2), generator=generator).tolist()
        self.mirrored = torch.randint(2, (len(self),), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Row:
        down, right = self.shifts[index]
        image = self.images[index, :, down : down + SIDE, right : right + SIDE]
        return {"pixel_values": image.flip(-1) if self.mirrored[index] else image, "labels": self.labels[index]}


def scale_pixels(rows: Any) -> Batch:
    """A batch with normalized pixels."""
    batch = stack_rows(rows)
    return batch | {"pixel_values": (batch["pixel_values"].float() / 255 - MEAN) / SPREAD}


def decode_images(path: Path, images: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Encoded images as one tensor, and their labels."""
    [pictures, numpy] = load_extra("train", "the data of cifar10", "PIL.Image", "numpy")
    pictures.init()  # which `open` does not do for formats by name

    def pixels(image: Any) -> Any:
        found = numpy.asarray(pictures.open(io.BytesIO(image["bytes"]), formats=_FORMATS).convert("RGB"))
        if found.shape != (SIDE, SIDE, 3):
            raise ValueError(f"it has {found.shape[1]} x {found.shape[0]} pixels")
        return found

    found = numpy.stack(parse_rows(path, images, pixels, f"picture of {SIDE} x {SIDE}"))
    classes = parse_rows(path, labels, range(CLASSES).index, f"class from 0 to {CLASSES - 1}")
    return torch.from_numpy(found).permute(0, 3, 1, 2).contiguous(), torch.tensor(classes)
