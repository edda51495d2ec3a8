"""Writes pictures of a page as small PNG files: with a palette of 256 colours, which the browser chooses."""

import base64
import struct
import zlib

# Colours that are nearly equal share a cell; the cells with the most pixels are the palette.
TO_PALETTE = """(async (picture) => {
  const bytes = Uint8Array.from(atob(picture), (each) => each.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: 'image/png' }));
  const { width, height } = bitmap;
  const canvas = new OffscreenCanvas(width, height).getContext('2d');
  canvas.drawImage(bitmap, 0, 0);
  const { data } = canvas.getImageData(0, 0, width, height);
  const pixels = new Uint32Array(width * height).map((_, at) =>
    (data[4 * at] << 16) | (data[4 * at + 1] << 8) | data[4 * at + 2]);
  const exact = new Map();
  for (const each of pixels) exact.set(each, (exact.get(each) ?? 0) + 1);
  const cells = new Map();
  for (const [color, count] of [...exact].sort((a, b) => b[1] - a[1])) {
    const cell = color & 0xf8f8f8;
    const known = cells.get(cell) ?? { color, count: 0 };
    cells.set(cell, { color: known.color, count: known.count + count });
  }
  const palette = [...cells.values()].sort((a, b) => b.count - a.count).slice(0, 256).map((each) => each.color);
  const part = (a, b, bits) => (((a >> bits) & 255) - ((b >> bits) & 255)) ** 2;
  const distance = (a, b) => part(a, b, 16) + part(a, b, 8) + part(a, b, 0);
  const nearest = new Map([...exact.keys()].map((color) => [color, palette.reduce((best, each, index) =>
    (distance(color, each) < distance(color, palette[best]) ? index : best), 0)]));
  let text = '';
  for (const each of pixels) text += String.fromCharCode(nearest.get(each));
  return { width, height, palette, indices: btoa(text) };
})"""
"""Returns the size, the palette and the index of each pixel's colour of a PNG file in base64."""


def palette_png(width: int, height: int, palette: list[int], indices: str) -> bytes:
    """Return a PNG file. ``palette``: colours as 0xRRGGBB; ``indices``: one byte for each pixel, in base64."""
    pixels = base64.b64decode(indices)
    rows = b"".join(b"\0" + pixels[row * width : (row + 1) * width] for row in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    colors = b"".join(color.to_bytes(3) for color in palette)
    chunks = ((b"IHDR", head), (b"PLTE", colors), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*each) for each in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
