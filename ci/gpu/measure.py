"""Times on a GPU, taken in turns, and tables of them."""

import json
import statistics

try:
    import torch
except ImportError:  # models.py needs only the tables
    torch = None


def graphed(function):
    """The function as a CUDA graph, so that only the GPU's time counts; itself where it cannot be captured, and why."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay, None
    except RuntimeError as error:
        torch.cuda.synchronize()
        return function, str(error).splitlines()[0]


def times(functions, rounds=9, window=0.02):
    """Milliseconds of each function by name, in turns: {name: (min, median)}. A round takes `window` seconds a function."""
    prepared = {}
    for name, function in functions.items():
        run, _ = graphed(function)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        count = max(1, min(200, int(window * 1e3 / max(start.elapsed_time(end), 1e-3))))
        prepared[name] = (run, count)
    found = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (run, count) in prepared.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                run()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) / count)
    return {name: (min(values), statistics.median(values)) for name, values in found.items()}


def relative_error(found, expected):
    """|found - expected| / |expected|, Euclidean, in float64; NaN where a result is not a number."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


class Table:
    """Rows of cells; printed as Markdown as they come, and kept for the report."""

    def __init__(self, title, columns):
        self.title, self.columns, self.rows = title, columns, []
        print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def add(self, *cells):
        self.rows.append(dict(zip(self.columns, cells, strict=True)))
        print(f"| {' | '.join(show(cell) for cell in cells)} |", flush=True)


def show(cell):
    if isinstance(cell, float):
        return "nan" if cell != cell else f"{cell:.3g}" if cell < 1e-2 else f"{cell:.3f}"
    return "" if cell is None else str(cell)


def write_report(path, machine, tables):
    report = {"machine": machine, "tables": [{"title": t.title, "rows": t.rows} for t in tables]}
    with open(path, "w") as file:
        json.dump(report, file, indent=1, default=str)


def machine():
    """What was measured on."""
    import subprocess

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        said = ""
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver, clock, highest clock, power": said,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
