"""Archives that need only Python, with lzma for those of programs: a bare machine may lack xz and zstd.

usage: archive.py pack FOLDER PREFIX      PREFIX.ID.N.00, PREFIX.ID.N.01, ...: FOLDER's files as .tar.xz in N pieces of 8 MiB; ID is of the contents
       archive.py unpack FOLDER PIECE...  the files of the pieces, which are in order
       archive.py logs FOLDER FILE.tar.gz one archive, written again as a whole
"""

import hashlib
import io
import os
import sys
import tarfile

PIECE = 8 << 20


class Pieces(io.RawIOBase):
    """Files PREFIX.00, PREFIX.01, ... as one stream to write."""

    def __init__(self, prefix):
        self.prefix, self.number, self.room, self.file = prefix, 0, 0, None
        self.hash = hashlib.sha256()

    def writable(self):
        return True

    def write(self, data):
        data = memoryview(data)
        self.hash.update(data)
        start = 0
        while start < len(data):
            if self.room == 0:
                if self.file:
                    self.file.close()
                self.file = open(f"{self.prefix}.{self.number:02}", "wb")  # noqa: SIM115, closed when it is full
                self.number, self.room = self.number + 1, PIECE
            taken = data[start : start + self.room]
            self.file.write(taken)
            start, self.room = start + len(taken), self.room - len(taken)
        return len(data)

    def close(self):
        if self.file:
            self.file.close()
        super().close()


class Joined(io.RawIOBase):
    """Several files as one stream to read."""

    def __init__(self, paths):
        self.paths, self.file = list(paths), None

    def readable(self):
        return True

    def readinto(self, buffer):
        while True:
            if self.file is None:
                if not self.paths:
                    return 0
                self.file = open(self.paths.pop(0), "rb")  # noqa: SIM115, closed at its end
            found = self.file.readinto(buffer)
            if found:
                return found
            self.file.close()
            self.file = None


def pack(folder, prefix):
    import lzma

    # The programs hold the same kernels: so far back.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 128 << 20}]
    with (
        Pieces(prefix) as target,
        io.BufferedWriter(target, 1 << 20) as stream,
        lzma.open(stream, "w", filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as archive,
    ):
        archive.add(folder, arcname=".")
    for number in range(target.number):
        os.rename(f"{prefix}.{number:02}", f"{prefix}.{target.hash.hexdigest()[:12]}.{target.number}.{number:02}")


def unpack(folder, pieces):
    try:
        import lzma
    except ImportError:
        sys.exit("gpu: this Python has no lzma, which the packed programs need")
    with io.BufferedReader(Joined(pieces), 1 << 20) as stream, lzma.open(stream) as compressed, tarfile.open(fileobj=compressed, mode="r|") as archive:
        archive.extractall(folder, filter="data")


def logs(folder, path):
    # Parts that run at the same time write it, too.
    new = f"{path}.{os.getpid()}"
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, arcname=os.path.basename(path).removesuffix(".tar.gz"))
    os.replace(new, path)


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in ("pack", "unpack", "logs"):
        sys.exit(__doc__)
    unpack(sys.argv[2], sys.argv[3:]) if sys.argv[1] == "unpack" else globals()[sys.argv[1]](*sys.argv[2:])
