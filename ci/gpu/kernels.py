"""One part of the CUDA kernels against the fastest dense peers of the same machine, in one process, in turns.

usage: kernels.py LIBRARY ROWS.jsonl PART [--quick] [--type f16] [--seconds S] [--seed N] [--device cuda|cpu|emulator]
       kernels.py LIBRARY ROWS.jsonl --profile CASE     one call between two marks, for ncu --profile-from-start off

Rows are checked before they are timed. The ratio is our median over that of the fastest peer for all heads; the plan, the gathering and
the zeros are in ours. Peers may be missing; a failure of ours makes the exit status 1.
"""

import argparse
import sys

import attention
import products
import rows
from moh_cuda import Kernels
from results import Results

# name: (builder, function of `quick` that yields the rows)
PARTS = {
    "attention-64": (attention.build, lambda quick: attention.lengths(64, quick)),
    "attention-128": (attention.build, lambda quick: (row for row in attention.lengths(128, quick) if row.q_len >= (1024 if quick else 256))),
    "attention-72": (attention.build, attention.width_72),
    "attention-variants": (attention.build, attention.variants),
    "decode": (attention.build, attention.decoding),
    "cached": (attention.build, attention.cached),
    "linear": (products.build, products.linear),
    "nbits": (products.build, products.quantised),
    "experts": (products.build, products.experts),
}
PROFILES = {
    "attention-64": (attention.build, attention.prefill("f16", 4096, 64, False, 0.75)),
    "attention-128": (attention.build, attention.prefill("f16", 4096, 128, False, 0.75)),
    "attention-72": (attention.build, attention.prefill("f16", 4096, 72, False, 0.75, width=16 * 72)),
    "projection": (products.build, products.Linear("RoutedProjection", "f16", 16384, 2048, 32, 0.75)),
    "combination": (products.build, products.Linear("RoutedCombine", "f16", 16384, 2048, 32, 0.75)),
    "combination-int4": (products.build, products.Quantised("RoutedCombine", "f16", 1, 4096, 32, 0.75)),
}


def open_device(name, kernels):
    if name == "emulator":
        from device_emulated import Device

        return Device(kernels)
    from device_torch import Device

    return Device(kernels, name)


def profile(device, case):
    build, row = PROFILES[case]
    made = build(device, row.small() if device.dry else row)
    for _ in range(3):
        made.ours()
    rows.check(device, made, row.dtype)
    if not device.dry:
        device.profiled(made.ours)
    print(f"{case}: {row.name()}: ours is right")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("results")
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--name", help="the part's name in the results")
    parser.add_argument("--stage", default="")
    parser.add_argument("--profile", choices=PROFILES)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--type", choices=["f16", "bf16"], help="rows of one type")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row starts after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "emulator"])
    options = parser.parse_args()
    device = open_device(options.device, Kernels(options.library))
    device.base = options.seed * 1000
    device.seed(0)
    if options.profile:
        profile(device, options.profile)
        return
    if not options.part:
        parser.error("names a part, or --profile CASE")
    results = Results(options.results, stage=options.stage, part=options.name or options.part)
    device.warm_up()
    results.add("machine", seed=options.seed, machine=device.machine())
    build, listed = PARTS[options.part]
    chosen = [row for row in listed(options.quick) if options.type in (None, row.dtype)]
    if options.device != "cuda":
        # Of rows that become equal when they are small, one is kept.
        chosen = list({row.small().name(): row.small() for row in chosen}.values())
    passed = rows.run(device, options.part, chosen, build, results, options.quick, options.seconds)
    results.add("machine", seed=options.seed, machine=device.machine())
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
