"""Cuts a library's CUDA code down to one architecture, in place: keep_arch.py LIBRARY 90

A section .nv_fatbin is a row of containers: a header of 16 bytes (magic, version, header size, size of what follows), then entries,
each with its kind, sizes and architecture (offsets 0, 4, 8 and 28). Containers keep their places, and other entries become zeros.
"""

import struct
import subprocess
import sys

MAGIC = 0xBA55ED50


def section(library):
    """Offset and size of the section."""
    listing = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        words = line.replace("[ ", "[").split()
        if ".nv_fatbin" in words:
            at = words.index(".nv_fatbin")
            return int(words[at + 3], 16), int(words[at + 4], 16)
    sys.exit(f"{library}: there is no .nv_fatbin")


def cut(data, position, end, architecture):
    """Zeros what is of other architectures; the numbers of containers, and of those with something left."""
    containers = kept = 0
    while position < end - 16:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, position)
        if magic != MAGIC:
            position += 8
            continue
        containers += 1
        entry, stop, body = position + header, position + header + size, b""
        while entry < stop:
            (own_header,) = struct.unpack_from("<I", data, entry + 4)
            (length,) = struct.unpack_from("<Q", data, entry + 8)
            (of,) = struct.unpack_from("<I", data, entry + 28)
            if of == architecture:
                body += bytes(data[entry : entry + own_header + length])
            entry += own_header + length
        if body:
            kept += 1
            struct.pack_into("<Q", data, position + 8, len(body))
            data[position + header : stop] = body + bytes(size - len(body))
        position = stop
    return containers, kept


def main():
    library, architecture = sys.argv[1], int(sys.argv[2])
    start, size = section(library)
    with open(library, "rb") as file:
        data = bytearray(file.read())
    containers, kept = cut(data, start, start + size, architecture)
    with open(library, "wb") as file:
        file.write(data)
    print(f"{library}: {kept} of {containers} containers hold code for sm_{architecture}")


if __name__ == "__main__":
    main()
