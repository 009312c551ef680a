"""Read the images of a row, and convert them to RGB with 8 bits per channel and a limited size.

A cell holds one image or a list of images. An image is a path below the data's folder, the bytes of
a file, a dict {"bytes", "path"} (from the feature `Image` of a dataset), or a PIL image. Metadata,
such as the place where a photograph was taken, is not kept.
"""

import math
import os
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.data.sources import Fault

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")  # PIL reads many more, with code that is rarely used
NO_IMAGE, OUTSIDE, UNREADABLE = "image missing", "image outside the data's folder", "image unfit"


def read_images(cell: Any, folder: Path | None, column: str, max_pixels: int) -> "list[Image]":
    """Return the images of a row.

    Args:
        cell: The cell of the image column.
        folder: The folder that paths are relative to; None for a dataset on the hub.
        column: The column's name.
        max_pixels: Larger images are scaled down to this number of pixels.

    Raises:
        Fault: There is no image, or one of them cannot be used.
    """
    cells = cell if isinstance(cell, list) else [cell]
    if not cells:
        raise Fault(NO_IMAGE, column, "an empty list")
    return [_read(each, folder, column, max_pixels) for each in cells]


def _read(cell: Any, folder: Path | None, column: str, max_pixels: int) -> "Image":
    from PIL import Image

    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if not cell:
        raise Fault(NO_IMAGE, column, repr(cell))
    source = _path(cell, folder, column) if isinstance(cell, str) else cell
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            if not isinstance(source, Image.Image):
                file = BytesIO(source) if isinstance(source, bytes) else source
                source = Image.open(file, formats=FORMATS)
            return _in_one_form(source, max_pixels)
    except Exception as error:  # decoders raise errors of any type for a damaged file
        where = f"{cell!r:.80}: " if isinstance(cell, str) else ""
        raise Fault(UNREADABLE, column, f"{where}{str(error) or repr(error)}") from None


def _path(cell: str, folder: Path | None, column: str) -> Path:
    """Return the file at this path; the file, or the target of a link, must lie in the folder."""
    if folder is None:
        why = "is a path, but the dataset is on the hub: use a local copy of the dataset"
        raise Fault(NO_IMAGE, column, f"{cell!r:.80} {why}")
    path = Path(os.path.realpath(folder / cell.replace("\0", "")))
    if not path.is_relative_to(folder.resolve()):
        raise Fault(OUTSIDE, column, f"{cell!r:.80} is outside {folder}")
    if not os.path.isfile(path):  # noqa: PTH113 (a name may be too long for `Path`)
        raise Fault(NO_IMAGE, column, f"{cell!r:.80} is not a file in {folder}")
    return path


def _in_one_form(image: "Image", max_pixels: int) -> "Image":
    """Return the image upright, in RGB on a white background, with at most `max_pixels` pixels.

    Raises:
        ValueError: The image has a color depth that cannot be used.
    """
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):
        raise ValueError(f"mode {image.mode}: save it with 8 bits per channel")
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    scale = math.sqrt(max_pixels / (image.width * image.height))
    if scale >= 1:
        return image
    size = [max(1, math.floor(side * scale)) for side in image.size]
    return image.resize(tuple(size), Image.Resampling.LANCZOS)


def encode(image: "Image") -> bytes:
    """Return the image as the bytes of a PNG file, which is lossless."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def decode(file: bytes) -> "Image":
    """Return the image that `encode` converted to these bytes."""
    from PIL import Image

    return Image.open(BytesIO(file), formats=["PNG"]).convert("RGB")
