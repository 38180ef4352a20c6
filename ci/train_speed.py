#!/usr/bin/env python3
"""Times steps of a training against the published PyTorch code, on the same shapes and the same threads.

usage: train_speed.py PUBLISHED [--program target/release/examples/train_speed] [--threads 2] [--steps 8] [--turns 3] [--case NAME ..]

PUBLISHED is a clone of github.com/SkyworkAI/MoH (measured: commit 2cefd57). This Python needs torch and numpy. A step is forward, backward,
clipping and AdamW; the loss is the mean square of the outputs and 0.01 times the load-balance loss. Both take turns; the table has the
fastest step of each and their ratio. timm's layers, of which the published code uses four, are written out below.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

DIT = {
    "family": "moh-dit", "input_size": 32, "patch_size": 2, "in_channels": 4, "mlp_ratio": 4.0, "num_classes": 1000, "class_dropout_prob": 0.0,
}
VIT = {
    "family": "moh-vit", "patch_size": 4, "num_classes": 1000, "qkv_bias": True, "mlp_ratios": [8, 8, 4, 4], "sr_ratios": [8, 4, 2, 1],
    "window_size": [3, 3, 3, None], "norm_eps": 1e-6,
}
# Sizes of published models with fewer layers: a layer's time is what is compared.
CASES = {
    "MoH-DiT-S, 75 %": (
        DIT | {"hidden_size": 384, "depth": 4, "num_heads": 6, "shared_head": [2, 2, 3, 3], "routed_head": [1, 1, 1, 1]}, {"batch": 4}
    ),
    "MoH-DiT-B, 75 %": (
        DIT | {"hidden_size": 768, "depth": 2, "num_heads": 12, "shared_head": [4, 4], "routed_head": [5, 5]}, {"batch": 4}
    ),
    "MoH-ViT-S, 75 %": (
        VIT | {"img_size": 224, "embed_dims": [72, 144, 288, 576], "num_heads": [3, 6, 12, 24], "depths": [1, 1, 2, 1],
               "shared_head": [3, 6, 3, 4], "routed_head": [0, 0, 6, 12]}, {"batch": 4}
    ),
    "MoH-ViT-B, 50 %": (
        VIT | {"img_size": 224, "embed_dims": [96, 192, 384, 768], "num_heads": [4, 8, 16, 32], "depths": [1, 1, 2, 1],
               "shared_head": [2, 2, 2, 4], "routed_head": [2, 4, 6, 8]}, {"batch": 2}
    ),
}


def timm_layers():
    """What the published code imports of timm, by its formulas."""
    import torch
    from torch import nn

    class PatchEmbed(nn.Module):
        def __init__(self, size, patch, channels, width, bias=True):
            super().__init__()
            self.patch_size, self.num_patches = (patch, patch), (size // patch) ** 2
            self.proj = nn.Conv2d(channels, width, patch, patch, bias=bias)

        def forward(self, x):
            return self.proj(x).flatten(2).transpose(1, 2)

    class Mlp(nn.Module):
        def __init__(self, in_features, hidden_features, act_layer, drop):
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(in_features, hidden_features), act_layer(), nn.Linear(hidden_features, in_features)

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

    def module(name, **content):
        made = sys.modules[name] = types.ModuleType(name)
        made.__getattr__ = lambda _: None  # Imported, and never used.
        vars(made).update(content)

    trunc_normal = partial(torch.nn.init.trunc_normal_, mean=0.0)
    for name in ["timm", "timm.models", "pkg_resources"]:
        module(name)
    distribution_not_found = type("DistributionNotFound", (Exception,), {})

    def get_distribution(name):
        raise distribution_not_found(name)

    module("pkg_resources", DistributionNotFound=distribution_not_found, get_distribution=get_distribution)
    module("timm.models.vision_transformer", PatchEmbed=PatchEmbed, Mlp=Mlp, Attention=None, _cfg=dict)
    module("timm.layers", PatchEmbed=PatchEmbed, Mlp=Mlp, use_fused_attn=lambda: True)
    module("timm.models.layers", DropPath=nn.Identity, to_2tuple=lambda x: x if isinstance(x, tuple) else (x, x), trunc_normal_=trunc_normal)
    module("timm.models.registry", register_model=lambda make: make)


def published(folder, config, sizes, threads, steps):
    """Milliseconds of each step of the published code."""
    import time

    import torch

    timm_layers()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    batch = sizes["batch"]
    if config["family"] == "moh-dit":
        sys.path.insert(0, str(folder / "MoH-DiT"))
        import models

        keys = ["input_size", "patch_size", "in_channels", "hidden_size", "depth", "mlp_ratio", "num_classes", "class_dropout_prob"]
        layers = config["depth"]
        model = models.DiT(
            **{key: config[key] for key in keys}, num_heads=[config["num_heads"]] * layers, head_dim=[None] * layers, moh=True,
            shared_head=config["shared_head"], routed_head=config["routed_head"],
        )
        # Published models end in zeros, whose gradients would be zeros too.
        torch.nn.init.normal_(model.final_layer.linear.weight, std=0.02)
        size = config["input_size"]
        inputs = [torch.randn(batch, 4, size, size), torch.randint(0, 1000, (batch,)), torch.randint(0, 1000, (batch,))]
        losses = models.MoHAttention.LOAD_BALANCING_LOSSES
    else:
        sys.path.insert(0, str(folder / "MoH-ViT"))
        import transnext

        keys = ["img_size", "embed_dims", "num_heads", "depths", "mlp_ratios", "sr_ratios", "qkv_bias", "window_size", "shared_head", "routed_head"]
        model = transnext.TransNeXt(
            **{key: config[key] for key in keys}, patch_size=config["patch_size"], norm_layer=partial(torch.nn.LayerNorm, eps=1e-6)
        )
        inputs = [torch.randn(batch, 3, config["img_size"], config["img_size"])]
        losses = transnext.Attention.LOAD_BALANCING_LOSSES
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        losses.clear()
        loss = model(*inputs).square().mean()
        if losses:
            loss = loss + 0.01 * torch.stack(losses).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append((time.perf_counter() - began) * 1e3)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"parameters": count, "fastest_ms": min(times[1:]), "median_ms": sorted(times[1:])[len(times[1:]) // 2]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("--program", type=Path, default=Path("target/release/examples/train_speed"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--published-case", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.published_case:
        config, sizes = CASES[arguments.published_case]
        print(json.dumps(published(arguments.published, config, sizes, arguments.threads, arguments.steps)))
        return

    environment = os.environ | {"RAYON_NUM_THREADS": str(arguments.threads), "OMP_NUM_THREADS": str(arguments.threads)}
    print("| layers | parameters | PyTorch ms | ours ms | ratio |\n|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.case:
            config, sizes = CASES[case]
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config))
            sized = [f"{name}={size}" for name, size in sizes.items()]
            ours = [arguments.program, file, *sized, "--steps", str(arguments.steps + 1)]
            theirs = [sys.executable, __file__, arguments.published, "--published-case", case, "--threads", str(arguments.threads)]
            theirs += ["--steps", str(arguments.steps)]

            def fastest(command):
                said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env=environment).stdout
                return json.loads(said.splitlines()[-1])

            turns = [(fastest(theirs), fastest(ours)) for _ in range(arguments.turns)]
            published_ms, own_ms = (min(turn[i]["fastest_ms"] for turn in turns) for i in range(2))
            parameters = turns[0][1]["parameters"]
            if abs(parameters / turns[0][0]["parameters"] - 1) > 0.02:
                sys.exit(f"{case}: {parameters} parameters, published {turns[0][0]['parameters']}")
            print(f"| {case} | {parameters / 1e6:.1f} M | {published_ms:.0f} | {own_ms:.0f} | {own_ms / published_ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
