"""Makes the pictures here, and expected.json: what Pillow and numpy read from them. `python3 make.py .`; needs pillow and numpy."""
import io, json, struct, sys
from pathlib import Path
import numpy as np
from PIL import Image, ImageOps
out = Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True)
expected = {}
def exif(n):
    e = Image.Exif(); e[274] = n; return e.tobytes()
def put(name, data): (out / name).write_bytes(data); return out / name
def rgb(path):
    image = ImageOps.exif_transpose(Image.open(path))
    return np.asarray(image.convert("RGB"))
def note(name, array):
    a = np.asarray(array).astype(int)
    expected[name] = {"width": a.shape[1], "height": a.shape[0], "rgb": a.reshape(-1).tolist()}
rng = np.random.default_rng(1)
# orientation, lossless
base = rng.integers(0, 256, (2, 3, 3), dtype=np.uint8)
for n in range(1, 9):
    b = io.BytesIO(); Image.fromarray(base).save(b, "PNG", exif=exif(n)[6:] if exif(n).startswith(b"Exif\0\0") else exif(n))
    note(f"orientation-{n}.png", rgb(put(f"orientation-{n}.png", b.getvalue())))
# orientation in JPEG: left half dark, right half bright
j = np.zeros((8, 16, 3), np.uint8); j[:, :8] = (200, 30, 30); j[:, 8:] = (30, 30, 200)
b = io.BytesIO(); Image.fromarray(j).save(b, "JPEG", quality=95, subsampling=0, exif=exif(6))
note("orientation-6.jpg", rgb(put("orientation-6.jpg", b.getvalue())))
# CMYK: Pillow writes Adobe's inverted samples
c = np.zeros((8, 16, 4), np.uint8)
c[:, :8] = (0, 180, 220, 20); c[:, 8:] = (200, 40, 0, 60)
b = io.BytesIO(); Image.fromarray(c, "CMYK").save(b, "JPEG", quality=98, subsampling=0)
note("cmyk.jpg", rgb(put("cmyk.jpg", b.getvalue())))
data = b.getvalue()
# the same numbers marked as YCCK: Adobe's marker with transform 2
at = data.find(b"Adobe")
print("adobe transform", data[at+11] if at >= 0 else None)
if at >= 0:
    y = bytearray(data); y[at + 11] = 2
    try:
        note("ycck.jpg", rgb(put("ycck.jpg", bytes(y))))
    except Exception as e: print("ycck", e)
# gray
g = np.zeros((8, 16), np.uint8); g[:, :8] = 40; g[:, 8:] = 210
b = io.BytesIO(); Image.fromarray(g).save(b, "JPEG", quality=95); note("gray.jpg", rgb(put("gray.jpg", b.getvalue())))
b = io.BytesIO(); Image.fromarray(j).save(b, "JPEG", quality=95, progressive=True, subsampling=0); note("progressive.jpg", rgb(put("progressive.jpg", b.getvalue())))
# 16 bits: PNG written by hand, values by numpy (the high byte)
import zlib
def png16(a, colour):
    h, w = a.shape[:2]
    raw = b"".join(b"\0" + a[y].astype(">u2").tobytes() for y in range(h))
    chunk = lambda t, d: struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 16, colour, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
a = rng.integers(0, 65536, (2, 3, 3), dtype=np.uint16)
p = put("rgb-16.png", png16(a, 2)); note("rgb-16.png", a >> 8)
assert (rgb(p) == a >> 8).all()
a = rng.integers(0, 65536, (2, 3, 1), dtype=np.uint16)
put("gray-16.png", png16(a, 0)); note("gray-16.png", np.repeat(a >> 8, 3, axis=2))
a = rng.integers(0, 65536, (2, 3, 4), dtype=np.uint16)
put("rgba-16.png", png16(a, 6))
def white(a):
    a = a.astype(np.float64); alpha = a[..., 3:] / 255
    return np.floor(a[..., :3] * alpha + 255 * (1 - alpha) + 0.5).astype(int)
note("rgba-16.png", white(a >> 8))
# transparency
a = rng.integers(0, 256, (2, 3, 4), dtype=np.uint8)
b = io.BytesIO(); Image.fromarray(a, "RGBA").save(b, "PNG"); p = put("rgba.png", b.getvalue())
over = Image.alpha_composite(Image.new("RGBA", (3, 2), "white"), Image.open(p)).convert("RGB")
note("rgba.png", np.asarray(over)); print("pillow - numpy", np.abs(np.asarray(over).astype(int) - white(a)).max())
pal = Image.fromarray(rng.integers(0, 3, (2, 3), dtype=np.uint8), "P"); pal.putpalette([10, 20, 30, 200, 100, 50, 0, 255, 0])
b = io.BytesIO(); pal.save(b, "PNG", transparency=bytes([255, 128, 0])); p = put("palette.png", b.getvalue())
over = Image.alpha_composite(Image.new("RGBA", (3, 2), "white"), Image.open(p).convert("RGBA")).convert("RGB"); note("palette.png", np.asarray(over))
# WebP
for name, kw in [("lossless.webp", dict(lossless=True, exact=True)), ("lossy.webp", dict(quality=90))]:
    w = a if name == "lossless.webp" else np.asarray(Image.fromarray(j).convert("RGB"))
    b = io.BytesIO(); im = Image.fromarray(w, "RGBA" if w.shape[2] == 4 else "RGB"); im.save(b, "WEBP", **kw); p = put(name, b.getvalue())
    i = Image.open(p)
    if i.mode == "RGBA": i = Image.alpha_composite(Image.new("RGBA", i.size, "white"), i)
    note(name, np.asarray(i.convert("RGB")))
b = io.BytesIO(); Image.fromarray(base).save(b, "WEBP", lossless=True, exif=exif(8)); note("orientation-8.webp", rgb(put("orientation-8.webp", b.getvalue())))
(out / "expected.json").write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v, separators=(",", ":"))}' for k, v in expected.items()) + "\n}\n")
