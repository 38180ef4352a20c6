#!/usr/bin/env python3
"""Which programs are the tests of some packages: `cargo test --no-run --message-format=json ... | test_programs.py PACKAGE...`.

Prints a line for each: the package's folder, where cargo runs them, a tab, and the program. It is an error if a package has none.
"""

import json
import os
import sys

packages = sys.argv[1:]
found = set()
for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] != "compiler-artifact" or not message["profile"]["test"] or not message["executable"]:
        continue
    # path+file:///folder#name@version, or #version where the folder has the package's name.
    name = message["package_id"].rsplit("#", 1)[1].split("@")[0]
    if name in packages:
        found.add(name)
        print(os.path.dirname(message["manifest_path"]), message["executable"], sep="\t")
if found != set(packages):
    sys.exit(f"test_programs: no tests of {', '.join(sorted(set(packages) - found))}")
