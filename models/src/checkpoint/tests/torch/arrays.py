"""Wrote arrays-2.pkl to arrays-5.pkl, with numpy 2.4: python arrays.py FOLDER."""
import pickle
import sys

import numpy as np

out = sys.argv[1]
base = np.arange(6, dtype=np.float32).reshape(2, 3)
state = {
    "c": base,
    "fortran": np.asfortranarray(base),
    "transposed": base.T,
    "strided": np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
    "half": base.astype(np.float16),
    "double": base.astype(np.float64),
    "negative": np.array([-1.5, 1e30, 0.0], np.float32),
    "long": np.array([-1, 1 << 40]),
    "bool": np.array([True, False]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "big": base.astype(">f4"),
    "objects": np.array([None, "x"], dtype=object),
    "complex": np.zeros(2, np.complex64),
    "number": np.float32(1),
}
for protocol in range(2, 6):
    with open(f"{out}/arrays-{protocol}.pkl", "wb") as f:
        pickle.dump({"model": state, "epoch": 3}, f, protocol=protocol)
