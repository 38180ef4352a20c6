"""Results as JSON lines: a record is on disk before the next row starts, so a crash or a kill loses at most the row in progress."""

import json
import os


class Results:
    """Appends records to a file; all have the fields in `common`."""

    def __init__(self, path, **common):
        self.file = open(path, "a")  # noqa: SIM115, lives as long as the process
        self.common = common

    def add(self, record, **fields):
        self.file.write(json.dumps({"record": record, **self.common, **fields}, default=str) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def read(path):
    """The records of a file; a last line that was cut off is left out."""
    records = []
    with open(path) as file:
        for line in file:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records
