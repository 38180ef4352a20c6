"""Tests of the installed package, with the repository's example checkpoints. ci/wheel_check.sh runs them."""

import json
import os
import pickle
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import moh_onnx

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples/checkpoints/shakespeare-moh-llama"
TRAINING = json.loads((LLAMA / "training.json").read_text())
PROMPT = 7  # tokens; 120 follow
VERSION = re.search(r'^\[workspace\.package\]\nversion = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
# Older packages of onnxruntime have no library that other programs can load.
HAS_LIBRARY = any((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The language model, exported once."""
    path = tmp_path_factory.mktemp("models") / "llama/model.onnx"
    report = moh_onnx.export(LLAMA, path)
    assert "agrees" in report["verification"] and str(path) in [file["path"] for file in report["files"]]
    return path


def feeds(session, tokens):
    """One call with all tokens, and empty caches."""
    ids = np.array([tokens], np.int64)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(len(tokens))[None]}
    for cache in session.get_inputs()[3:]:
        feeds[cache.name] = np.zeros((1, cache.shape[1], 0, cache.shape[3]), np.float32)
    return feeds


def command(name, *arguments):
    """What a command of the package prints where no environment is activated."""
    variables = ("VIRTUAL_ENV", "ORT_DYLIB_PATH", "MOH_OPS_LIBRARY")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    program = Path(sysconfig.get_path("scripts")) / name
    return subprocess.run([str(program), *map(str, arguments)], env=environment, check=True, stdout=subprocess.PIPE,
                          universal_newlines=True).stdout


def python(code, *path):
    """Runs a program in a process of its own, with folders in front of the search path."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    return done.stdout + done.stderr


def test_a_session_skips_heads_and_writes_what_pytorch_wrote(model, tmp_path):
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = moh_onnx.InferenceSession(model, options)
    assert isinstance(session, ort.InferenceSession)
    tokens = TRAINING["greedy_ids"]
    logits = session.run(None, feeds(session, tokens))[0]
    assert logits[0, PROMPT - 1:-1].argmax(-1).tolist() == tokens[PROMPT:]
    events = json.loads(Path(session.end_profiling()).read_text())
    assert any(event.get("args", {}).get("op_name") == "RoutedAttention" for event in events), "no kernel of ours ran"

    plain = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(logits, plain.run(None, feeds(plain, tokens))[0], rtol=0, atol=2e-4 * np.abs(logits).max())


def test_a_session_takes_a_path_of_any_kind_and_a_whole_model(model):
    for path in (str(model), model):
        moh_onnx.InferenceSession(path)
    with pytest.warns(UserWarning, match="CUDAExecutionProvider: the kernels of moh_onnx are for the CPU"):
        try:
            moh_onnx.InferenceSession(model, providers=[("CUDAExecutionProvider", {}), "CPUExecutionProvider"])
        except Exception:  # some versions refuse providers that they lack, others warn
            pass


def test_options_can_be_registered_twice(model):
    options = moh_onnx.session_options(moh_onnx.session_options())
    ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def test_quantised_layers_compute_in_floating_point_unless_asked_otherwise():
    entry = "session.qdq_matmulnbits_accuracy_level"
    assert moh_onnx.session_options().get_session_config_entry(entry) == "0"
    options = ort.SessionOptions()
    options.add_session_config_entry(entry, "4")
    assert moh_onnx.session_options(options).get_session_config_entry(entry) == "4"


def test_without_onnxruntime_or_with_an_old_one_the_error_says_so(tmp_path):
    (tmp_path / "absent").mkdir()
    block = "import sys; sys.modules['onnxruntime'] = None\n"
    assert "ModuleNotFoundError: moh_onnx needs onnxruntime" in python(block + "import moh_onnx; moh_onnx.session_options()")
    assert python(block + "import moh_onnx; moh_onnx.get_library_path()") == ""
    old = tmp_path / "old"
    old.mkdir()
    for text, error in (("__version__ = '1.16.3'", "onnxruntime 1.16.3 is too old: moh_onnx needs 1.17"), ("", "without a version")):
        (old / "onnxruntime.py").write_text(text)
        assert error in python("import moh_onnx; moh_onnx.session_options()", old)
    (old / "onnxruntime.py").write_text("""__version__ = '1.17.3'
class SessionOptions:
    def register_custom_ops_library(self, path): pass
    def get_session_config_entry(self, key): return '0'
def InferenceSession(*arguments, **options): raise RuntimeError('Unsupported model IR version: 10')
""")
    found = python("import moh_onnx; moh_onnx.InferenceSession('model.onnx')", old)
    assert "RuntimeError: Unsupported model IR version: 10\nonnxruntime 1.17.3 loads models exported with opset=20" in found


def test_export_raises_the_message_of_the_program(tmp_path):
    with pytest.raises(moh_onnx.ExportError, match="nowhere") as error:
        moh_onnx.export(tmp_path / "nowhere", tmp_path / "model.onnx")
    assert error.value.returncode == 1 and not str(error.value).startswith("error:")
    # As from another process.
    copy = pickle.loads(pickle.dumps(error.value))
    assert (str(copy), copy.returncode) == (str(error.value), error.value.returncode)
    with pytest.raises(TypeError, match="exports nothing"):
        moh_onnx.export("nowhere", "out/model.onnx", help=True)
    with pytest.raises(moh_onnx.ExportError, match="--no-such-option"):
        moh_onnx.export(LLAMA, tmp_path / "model.onnx", no_such_option=True)
    with pytest.raises(TypeError, match="quiet"):
        moh_onnx.export(LLAMA, tmp_path / "model.onnx", quiet=True)
    assert not list(tmp_path.iterdir())


def test_export_takes_the_options_of_the_program(tmp_path):
    output = tmp_path / "a folder" / "model.onnx"
    report = moh_onnx.export(LLAMA, tmp_path / "unverified" / "model.onnx", verify=False)
    assert report["verification"] == {"not_run": "as asked for"}
    report = moh_onnx.export(LLAMA, output, dtype="f16", for_="genai", batch=None, force=False, with_library=True)
    assert report["dtype"] == "f16"
    assert (output.parent / "libmoh_ops.so").read_bytes() == Path(moh_onnx.get_library_path()).read_bytes()
    with pytest.raises(moh_onnx.ExportError, match="--force"):
        moh_onnx.export(LLAMA, output)
    moh_onnx.export(LLAMA, output, force=True)
    moh_onnx.export(LLAMA, triton=tmp_path / "repository" / "llama")
    assert (tmp_path / "repository" / "llama" / "1" / "model.onnx").is_file()
    with pytest.raises(moh_onnx.ExportError, match="--output"):
        moh_onnx.export(LLAMA)


def test_the_library_is_where_hosts_look(tmp_path):
    assert Path(moh_onnx.get_library_path()).is_file()
    assert moh_onnx.__version__ == VERSION


def test_the_commands_run(model):
    for name in ("moh-export", "moh-run"):
        assert command(name, "--version").startswith(f"{name} {VERSION}")
    for runtime in ["tract"] + ["ort"] * HAS_LIBRARY:
        text = command("moh-run", "generate", model.parent, "--prompt", TRAINING["prompt"], "--max-tokens", 120, "--runtime", runtime)
        assert (TRAINING["prompt"] + text).strip() == TRAINING["greedy_text"].strip()


@pytest.mark.skipif(not HAS_LIBRARY, reason="onnxruntime's package has no library")
def test_moh_run_uses_the_onnxruntime_and_the_library_of_its_environment():
    found = command("moh-run", "doctor")
    assert str(Path(ort.__file__).parent) in found and str(Path(moh_onnx.get_library_path()).parent) in found
