#!/usr/bin/env python3
"""Makes the matrices of a checkpoint of random weights larger, so that what it generates depends on what it reads.

usage: spread_weights.py model.safetensors FACTOR
"""

import sys

from safetensors.numpy import load_file, save_file

path, factor = sys.argv[1], float(sys.argv[2])
tensors = load_file(path)
save_file({name: tensor * factor if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}, path)
