"""Puts load on serve_app.py: clients that send one request after the other.

    python load.py http://127.0.0.1:8000 completions
    python load.py http://127.0.0.1:8000 classify --picture 3.png
"""

import argparse
import json
import threading
import time
from collections import Counter
from pathlib import Path

import requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("route", choices=["completions", "classify"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--prompt", default="ROMEO:\n")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--picture", type=Path, help="file to classify")
    arguments = parser.parse_args()
    if arguments.route == "classify" and not arguments.picture:
        parser.error("classify needs --picture")
    text = json.dumps({"prompt": arguments.prompt, "max_tokens": arguments.max_tokens}).encode()
    body = arguments.picture.read_bytes() if arguments.route == "classify" else text

    statuses: Counter[int] = Counter()
    times: list[float] = []
    end = time.monotonic() + arguments.seconds

    def client() -> None:
        with requests.Session() as session:
            while (begin := time.monotonic()) < end:
                answer = session.post(f"{arguments.url}/{arguments.route}", data=body, timeout=120)
                times.append(time.monotonic() - begin)
                statuses[answer.status_code] += 1

    clients = [threading.Thread(target=client) for _ in range(arguments.clients)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    times.sort()
    median, slow = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
    print(f"statuses {dict(statuses)}, {len(times) / arguments.seconds:.1f} requests/s, p50 {median:.0f} ms, p99 {slow:.0f} ms")


if __name__ == "__main__":
    main()
