"""Checks the onnxruntime of this Python environment with the ai.moh custom-operator library.

usage: ort_check.py LIBRARY CASES [MODEL.onnx ...]        (needs onnxruntime and numpy)

CASES is the folder that ort_cases.py wrote. A MODEL holds its operators' function bodies: it must give the same
outputs with the library and without, and its profile must name the operators' kernels with the library only.
Prints one line a check: name, ok, skip or FAIL, and why; exits with 1 if any failed.
"""

import json
import re
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import onnxruntime as ort

NUMPY_TYPES = {"float": np.float32, "float16": np.float16, "double": np.float64, "int64": np.int64,
               "int32": np.int32, "bool": np.bool_}
ort.set_default_logger_severity(4)


def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


def options(library, threads=0, profile=None, **settings):
    o = ort.SessionOptions()
    o.log_severity_level = 4
    o.intra_op_num_threads = threads
    for name, value in settings.items():
        setattr(o, name, value)
    if library:
        o.register_custom_ops_library(str(library))
    if profile:
        o.enable_profiling = True
        o.profile_file_prefix = str(profile)
    return o


def session(model, library, **settings):
    return ort.InferenceSession(str(model), options(library, **settings), providers=["CPUExecutionProvider"])


def resident():
    """Resident memory of this process in KiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def steady(work, times):
    """Fails if to repeat the work takes more and more memory: 70 bytes each of 10,000 times.

    A host's allocators take a while to settle: a leak is what every round adds.
    """
    for _ in range(times // 4):
        work()
    grown = []
    for _ in range(8):
        before = resident()
        for _ in range(times):
            work()
        grown.append(resident() - before)
        if grown[-1] < 700:
            return f"{grown[-1]} KiB"
    raise AssertionError(f"{grown} KiB more in each round")


def kernels(profile):
    """The types of the nodes that a profile names, with their number."""
    ran = {}
    for event in json.loads(Path(profile).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            op = event["args"]["op_name"]
            ran[op] = ran.get(op, 0) + 1
    return ran


def close(found, expected, tolerance):
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if found.shape != expected.shape:
        raise AssertionError(f"shape {found.shape}, expected {expected.shape}")
    if not np.array_equal(np.isnan(found), np.isnan(expected)):
        raise AssertionError("NaN in other places than expected")
    error = np.nan_to_num(np.abs(found - expected) / (1 + np.abs(expected))).max(initial=0)
    if not error <= tolerance:
        raise AssertionError(f"error {error:.2g}, more than {tolerance:g}")
    return f"error {error:.1e}"


def varint(data, at):
    """A protobuf number at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data):
    """The fields of a protobuf message: number, and a number or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire in (1, 2, 5):
            size, at = varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            value, at = data[at:at + size], at + size
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        yield key >> 3, value


def declared(model):
    """The IR version and the version of ONNX's own operators that a file declares.

    Those of its functions do not count: a host that knows the file's versions has to load it.
    """
    ir_version = opset = 0
    for number, value in fields(memoryview(Path(model).read_bytes())):
        if number == 1:  # ModelProto.ir_version
            ir_version = value
        elif number == 8:  # ModelProto.opset_import: OperatorSetIdProto of domain = 1, version = 2
            entry = dict(fields(value))
            if bytes(entry.get(1, b"")) in (b"", b"ai.onnx"):
                opset = entry.get(2, 0)
    return ir_version, opset


class Skip(Exception):
    """Why a check does not apply."""


class Checks:
    def __init__(self, library, cases):
        self.library, self.folder, self.failed = library, Path(cases), 0
        self.cases = json.loads((self.folder / "cases.json").read_text())

    def run(self, name, check):
        # Printed first: if the process dies, the last line names the check.
        print(name, end="\t", flush=True)
        try:
            print("ok", check() or "", sep="\t", flush=True)
        except Skip as reason:
            print("skip", reason, sep="\t", flush=True)
        except Exception as error:  # whatever a host throws
            self.failed += 1
            print("FAIL", f"{type(error).__name__}: {error}".replace("\n", " ")[:300], sep="\t", flush=True)

    def feeds(self, case):
        """A case's inputs and expected output."""
        arrays = dict(np.load(self.folder / f"{case['name']}.npz"))
        return arrays, arrays.pop("expected", None)

    def model(self, name):
        return self.folder / f"{name}.onnx"

    def case(self, case):
        if version(ort.__version__) < version(case["since"]):
            raise Skip(f"needs onnxruntime {case['since']}")
        feeds, expected = self.feeds(case)
        try:
            s = session(self.model(case["name"]), self.library)
        except Exception as error:
            return self.error(case, "load", error)
        if case["shape"] and case["expect"] == "ok":
            # Symbolic dimensions must survive shape inference.
            found = s.get_outputs()[0].shape
            assert found == case["shape"], f"inferred shape {found}, expected {case['shape']}"
        try:
            found = s.run(None, feeds)[0]
        except Exception as error:
            return self.error(case, "run", error)
        assert "ok" in case["expect"].split(), f"no error, expected one at {case['expect']}"
        return close(found, expected, case["tolerance"])

    @staticmethod
    def error(case, stage, error):
        text = str(error).replace("\n", " ")
        assert stage in case["expect"].split(), f"error at {stage}, expected {case['expect']}: {text}"
        assert case["message"] in text, f"error without '{case['message']}': {text}"
        return f"error at {stage}"

    def reads_versions(self):
        """What a file declares is what ort_cases.py wrote."""
        found = {declared(self.model(name)) for name in ("causal", "router")}
        assert found == {(8, 17)}, f"IR version and opset {found}"

    def kernel_runs(self):
        """The profile names the kernel."""
        with tempfile.TemporaryDirectory() as folder:
            s = session(self.model("causal"), self.library, profile=Path(folder) / "p")
            s.run(None, self.feeds({"name": "causal"})[0])
            ran = kernels(s.end_profiling())
        assert ran == {"RoutedAttention": 1}, f"kernels {ran}"

    def threads(self):
        """Concurrent calls of two sessions, of 1 and 2 threads, give what one call gives."""
        feeds, expected = self.feeds({"name": "f32-rows-padding"})
        sessions = [session(self.model("f32-rows-padding"), self.library, threads=n) for n in (1, 2)]
        errors = []

        def work(s):
            try:
                for _ in range(200):
                    close(s.run(None, feeds)[0], expected, 2e-5)
            except Exception as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(s,)) for s in sessions * 3]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        if errors:
            raise errors[0]

    def session_settings(self):
        """Other executors, allocators and optimizers."""
        feeds, expected = self.feeds({"name": "f16-cache"})
        for settings in ({"execution_mode": ort.ExecutionMode.ORT_PARALLEL, "inter_op_num_threads": 2},
                         {"enable_cpu_mem_arena": False}, {"enable_mem_pattern": False},
                         {"graph_optimization_level": ort.GraphOptimizationLevel.ORT_DISABLE_ALL}):
            s = session(self.model("f16-cache"), self.library, **settings)
            for _ in range(3):
                close(s.run(None, feeds)[0], expected, 4e-3)

    def many_runs(self):
        """10,000 calls leave no memory behind."""
        s, feeds = session(self.model("f32-rows"), self.library), self.feeds({"name": "f32-rows"})[0]
        return steady(lambda: s.run(None, feeds), 10000)

    def many_errors(self):
        """Nor do failing ones."""
        if version(ort.__version__) < (1, 23):
            raise Skip("this host does not release the status of a failed call")
        s, feeds = session(self.model("rank-fed"), self.library), self.feeds({"name": "rank-fed"})[0]

        def fail():
            try:
                s.run(None, feeds)
            except Exception:
                return
            raise AssertionError("no error")

        return steady(fail, 10000)

    def many_sessions(self):
        """Sessions that come and go leave no memory behind; the library stays usable."""
        feeds = self.feeds({"name": "f32-rows"})[0]
        return steady(lambda: session(self.model("f32-rows"), self.library, threads=1).run(None, feeds), 500)

    def same_options(self):
        """Two sessions may share one set of options."""
        o = options(self.library)
        for _ in range(2):
            s = ort.InferenceSession(str(self.model("causal")), o, providers=["CPUExecutionProvider"])
            feeds, expected = self.feeds({"name": "causal"})
            close(s.run(None, feeds)[0], expected, 2e-5)

    def registered_twice(self):
        """The second registration changes nothing."""
        o = options(self.library)
        o.register_custom_ops_library(str(self.library))
        session = ort.InferenceSession(str(self.model("causal")), o, providers=["CPUExecutionProvider"])
        feeds, expected = self.feeds({"name": "causal"})
        close(session.run(None, feeds)[0], expected, 2e-5)

    def precisions(self):
        """The session's entry reaches the library, which refuses what it does not know."""
        feeds, expected = self.feeds({"name": "causal"})
        for precision in ("highest", "high", "medium", "low"):
            o = options(None)
            o.add_session_config_entry("ai.moh.float32_matmul_precision", precision)
            try:
                o.register_custom_ops_library(str(self.library))
            except Exception as error:
                assert precision == "low" and "expected highest, high, medium" in str(error), error
                continue
            assert precision != "low", "accepted"
            s = ort.InferenceSession(str(self.model("causal")), o, providers=["CPUExecutionProvider"])
            close(s.run(None, feeds)[0], expected, 2e-5)

    def portable(self, model):
        """A whole model, with the library and without."""
        ir_version, opset = declared(model)
        if version(ort.__version__) < (1, 18) and (ir_version > 9 or opset > 20):
            raise Skip(f"the model is newer than this host: IR version {ir_version}, opset {opset}")
        outputs, feeds = {}, None
        for library in (None, self.library):
            with tempfile.TemporaryDirectory() as folder:
                s = session(model, library, threads=2, profile=Path(folder) / "p")
                feeds = feeds or example_inputs(s)
                outputs[library] = s.run(None, feeds)
                ran = {op: n for op, n in kernels(s.end_profiling()).items() if op.startswith("Routed")}
            assert bool(ran) == bool(library), f"our kernels with library {library}: {ran or 'none'}"
        half = any(x.dtype == np.float16 for x in outputs[None])
        errors = [close(x, y, 2e-2 if half else 2e-4) for x, y in zip(outputs[self.library], outputs[None])]
        nodes = ", ".join(f"{n} {op}" for op, n in ran.items())
        return f"{nodes}, {max(errors)}"


def example_inputs(s):
    """Small inputs for a model: equal symbols are equal sizes; past lengths are 0."""
    rng, sizes = np.random.default_rng(0), {}
    small = {"batch": 2, "batch_size": 2}

    def size(dim):
        if isinstance(dim, int):
            return dim
        zero = dim is not None and "past" in dim and "+" not in dim and "total" not in dim
        return 0 if zero else small.get(dim) or sizes.setdefault(dim, 6)

    feeds = {}
    for i in s.get_inputs():
        shape = [size(d) for d in i.shape]
        ty = NUMPY_TYPES[re.fullmatch(r"tensor\((\w+)\)", i.type).group(1)]
        if "mask" in i.name:
            feeds[i.name] = np.ones(shape, ty)
        elif i.name == "position_ids":
            feeds[i.name] = np.broadcast_to(np.arange(shape[-1]), shape).astype(ty)
        elif np.issubdtype(ty, np.floating):
            feeds[i.name] = rng.standard_normal(shape).astype(ty)
        else:
            feeds[i.name] = rng.integers(0, 8, shape).astype(ty)
    return feeds


def main(library, cases, *models):
    checks = Checks(library, cases)
    for case in checks.cases:
        checks.run(case["name"], lambda: checks.case(case))
    for check in (checks.reads_versions, checks.kernel_runs, checks.threads, checks.same_options, checks.registered_twice,
                  checks.precisions, checks.session_settings, checks.many_runs, checks.many_errors, checks.many_sessions):
        checks.run(check.__name__.replace("_", "-"), check)
    for model in models:
        checks.run(model, lambda: checks.portable(model))
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
