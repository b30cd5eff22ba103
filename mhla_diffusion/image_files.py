"""Which way up an image is: cameras store it as the sensor lay, and in its EXIF data how to turn it."""

from __future__ import annotations

import contextlib
import struct

from PIL import ExifTags, Image, ImageOps

UNREADABLE_EXIF = (EOFError, IndexError, KeyError, OSError, SyntaxError, TypeError, ValueError, struct.error)
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange height and width


def turn_upright(image: Image.Image) -> None:
    """Turn `image` in place as its EXIF orientation says; it stays as it is where that cannot be read.

    Raises what Pillow raises for pixels that cannot be read.
    """
    image.load()
    with contextlib.suppress(*UNREADABLE_EXIF):
        ImageOps.exif_transpose(image, in_place=True)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) that `turn_upright` will give, from the head of the file."""
    try:
        # Not image.getexif(): of a PNG without EXIF data in its head, that would decode all pixels to look behind them.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except UNREADABLE_EXIF:
        orientation = None
    return (image.width, image.height) if orientation in SIDEWAYS else (image.height, image.width)
