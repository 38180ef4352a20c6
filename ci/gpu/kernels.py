"""The CUDA kernels against the fastest dense peers of the same machine, in the same process, in turns.

usage: kernels.py LIBRARY REPORT.json [--quick] [--only PART]

Each row checks the result before it counts the time. The ratio is our time over that of the fastest dense peer for all heads:
the plan, the gathering and the zeros are in ours. Peers for the routed work alone, where there are any, have columns of their own.
"""

import argparse
import math
import sys
import traceback

import torch
import torch.nn.functional as F
from measure import Table, machine, relative_error, times, write_report
from moh_cuda import Kernels
from torch.nn.attention import SDPBackend, sdpa_kernel

ALLOWED = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
TOKENS, WIDTH = 16384, 2048
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def draw_gates(batch, length, heads, share, device="cuda"):
    """(batch, length, heads) float32: exactly round(share * heads) heads of every token have a gate, the others 0."""
    used = max(0, round(share * heads))
    order = torch.rand(batch, length, heads, device=device).argsort(-1)
    return torch.where(order < used, 0.1 + torch.rand(batch, length, heads, device=device), 0.0)


def attempt(function):
    """The function's result, or None and the reason on stderr: a peer may lack a backend for a shape."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        print(f"skipped: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        torch.cuda.synchronize()
        return None


def dense_peers(q, k, v, causal, gqa=False):
    """SDPA of (batch, heads, length, dim) views, by backend that takes them."""
    found = {}
    for name, backend in [("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:

        def run(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

        if attempt(run) is not None:
            found[name] = run
    return found


def varlen_peer(q, k, v, gates):
    """Each (sequence, head) as a sequence of its own, with the selected queries gathered. Indices and the layout of K and V are free."""
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, length, dim = q.shape
    on = gates.transpose(1, 2).reshape(batch * heads, length) != 0
    rows = on.reshape(-1).nonzero()[:, 0]
    ends = F.pad(on.sum(1).cumsum(0), (1, 0)).int()
    keys = torch.arange(batch * heads + 1, device=q.device, dtype=torch.int32) * length
    most = int(on.sum(1).max())
    flat = [x.contiguous().reshape(-1, 1, dim) for x in (q, k, v)]
    weight = gates.transpose(1, 2).reshape(-1)[rows][:, None, None].to(q.dtype)
    output = torch.zeros_like(flat[0])

    def run():
        found = varlen_attn(flat[0].index_select(0, rows), flat[1], flat[2], ends, keys, most, length)
        output.index_copy_(0, rows, found * weight)

    run()
    return run


def flex_peer(q, k, v, gates):
    """FlexAttention over gathered queries, padded to the longest list, under a mask of positions: for causal attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, heads, length, dim = q.shape
    on = gates.transpose(1, 2) != 0
    most = int(math.ceil(int(on.sum(-1).max()) / 128) * 128)
    positions = on.to(torch.int8).argsort(-1, descending=True, stable=True)[..., :most].contiguous()
    keep = on.gather(-1, positions)
    positions = torch.where(keep, positions, 0)
    mask = create_block_mask(
        lambda b, h, i, j: positions[b, h, i] >= j, batch, heads, most, length, device=q.device, BLOCK_SIZE=(128, 128)
    )
    attention = torch.compile(flex_attention, dynamic=False)
    weight = gates.transpose(1, 2).gather(-1, positions)[..., None].to(q.dtype)
    index = positions[..., None].expand(-1, -1, -1, dim)
    source, output = q.contiguous(), torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    where = torch.where(keep, positions, length - 1)[..., None].expand(-1, -1, -1, dim)

    def run():
        found = attention(source.gather(2, index), k, v, block_mask=mask)
        output.scatter_(2, where, found * weight)

    run()
    return run


def ratio(found, ours, peers):
    best = min((found[name][0] for name in peers if name in found), default=None)
    return found[ours][0] / best if best else None


def attention(kernels, quick):
    columns = ["mask", "type", "head dim", "tokens", "heads used", "ours ms", "median", "cudnn ms", "flash ms", "gathered ms", "ratio", "error"]
    table = Table(f"RoutedAttention, {TOKENS} tokens, {WIDTH} wide, against dense attention", columns)
    lengths = [256, 1024, 4096] if quick else [256, 512, 1024, 2048, 4096, 8192, 16384]
    for dtype in [torch.float16] if quick else [torch.float16, torch.bfloat16]:
        for dim in [64, 128]:
            for length in lengths:
                for causal in [False, True]:
                    shares = [1.0, 0.9, 0.75, 0.5] if length <= 512 else [1.0, 0.75, 0.5]
                    for share in shares if dtype == torch.float16 else [0.75]:
                        attempt(lambda: attention_row(table, kernels, dtype, dim, length, causal, share, quick))
    return table


def attention_row(table, kernels, dtype, dim, length, causal, share, quick):
    heads, batch = WIDTH // dim, TOKENS // length
    query, key, value = (torch.randn(batch, length, WIDTH, device="cuda", dtype=dtype) for _ in range(3))
    gates = draw_gates(batch, length, heads, share)
    output = torch.full((batch, length, WIDTH), torch.nan, device="cuda", dtype=dtype)
    attributes = dict(num_heads=heads, kv_num_heads=heads, scale=dim**-0.5, is_causal=int(causal))
    ours = kernels.call("RoutedAttention", attributes, [query, key, value, gates], output)
    split = [x.view(batch, length, heads, dim).transpose(1, 2) for x in (query, key, value)]
    peers = dense_peers(*split, causal)
    ours()
    expected = (peers["flash"]().transpose(1, 2) * gates[..., None]).reshape(batch, length, WIDTH)
    error = relative_error(output, expected)
    off = output.view(batch, length, heads, dim)[gates == 0]
    if not error <= ALLOWED[dtype] or not bool((off == 0).all()):
        table.add("causal" if causal else "full", NAMES[dtype], dim, length, share, *[None] * 6, f"WRONG {error:.2g}")
        return
    functions = {"ours": ours, **peers}
    if share < 1 and not quick and dtype == torch.float16 and length in (512, 1024, 4096):
        gathered = attempt(lambda: (flex_peer if causal else varlen_peer)(*split, gates))
        functions |= {"gathered": gathered} if gathered else {}
    found = times(functions)
    least = lambda name: found[name][0] if name in found else None
    table.add(
        "causal" if causal else "full", NAMES[dtype], dim, length, share, *found["ours"],
        least("cudnn"), least("flash"), least("gathered"), ratio(found, "ours", peers), error,
    )


def decode(kernels, quick):
    columns = ["type", "sequences", "keys", "heads", "KV heads", "head dim", "heads used", "ours ms", "cudnn ms", "flash ms", "ratio", "TB/s", "error"]
    table = Table("RoutedAttention, one query a sequence, cache layout, against dense attention", columns)
    shapes = [(32, 8192, 32, 32, 64), (32, 8192, 32, 32, 128), (32, 8192, 32, 8, 128), (1, 8192, 32, 32, 64)]
    for dtype in [torch.float16] if quick else [torch.float16, torch.bfloat16]:
        for shape in shapes[:1] if quick else shapes:
            for share in [1.0, 0.75, 0.5]:
                attempt(lambda: decode_row(table, kernels, dtype, *shape, share))
    return table


def decode_row(table, kernels, dtype, batch, keys, heads, kv_heads, dim, share):
    query = torch.randn(batch, 1, heads * dim, device="cuda", dtype=dtype)
    key, value = (torch.randn(batch, kv_heads, keys, dim, device="cuda", dtype=dtype) for _ in range(2))
    gates = draw_gates(batch, 1, heads, share)
    output = torch.full((batch, 1, heads * dim), torch.nan, device="cuda", dtype=dtype)
    attributes = dict(num_heads=heads, kv_num_heads=kv_heads, scale=dim**-0.5, is_causal=1)
    ours = kernels.call("RoutedAttention", attributes, [query, key, value, gates], output)
    peers = dense_peers(query.view(batch, heads, 1, dim), key, value, False, gqa=kv_heads != heads)
    ours()
    expected = (next(iter(peers.values()))().view(batch, 1, heads, dim) * gates[..., None]).view(batch, 1, -1)
    error = relative_error(output, expected)
    if not error <= ALLOWED[dtype]:
        table.add(NAMES[dtype], batch, keys, heads, kv_heads, dim, share, *[None] * 5, f"WRONG {error:.2g}")
        return
    found = times({"ours": ours, **peers})
    needed = int((gates.view(batch, kv_heads, -1) != 0).any(-1).sum())
    rate = 2 * needed * keys * dim * key.element_size() / found["ours"][0] / 1e9
    least = lambda name: found[name][0] if name in found else None
    table.add(
        NAMES[dtype], batch, keys, heads, kv_heads, dim, share, found["ours"][0], least("cudnn"), least("flash"),
        ratio(found, "ours", peers), rate, error,
    )


def linear(kernels, quick):
    columns = ["operator", "type", "tokens", "width", "heads used", "ours ms", "matmul ms", "ratio", "error"]
    table = Table("RoutedProjection and RoutedCombine against dense matrix products", columns)
    for dtype in [torch.float16] if quick else [torch.float16, torch.bfloat16]:
        for tokens, width, heads in [(32, 4096, 32), (4096, 1152, 16), (TOKENS, WIDTH, 32), (TOKENS, 2 * WIDTH, 32)]:
            for share in [1.0, 0.75, 0.5]:
                for operator in ["RoutedProjection", "RoutedCombine"]:
                    attempt(lambda: linear_row(table, kernels, operator, dtype, tokens, width, heads, share))
    return table


def linear_row(table, kernels, operator, dtype, tokens, width, heads, share):
    x = torch.randn(1, tokens, width, device="cuda", dtype=dtype)
    weight = torch.randn(width, width, device="cuda", dtype=dtype) * width**-0.5
    gates = draw_gates(1, tokens, heads, share)
    mask = (gates != 0).repeat_interleave(width // heads, -1)
    output = torch.full((1, tokens, width), torch.nan, device="cuda", dtype=dtype)
    ours = kernels.call(operator, dict(num_heads=heads, weight_layout=0), [x, weight, gates], output)
    ours()
    combine = operator == "RoutedCombine"
    expected = F.linear(x.float() * mask if combine else x.float(), weight.float()) * (1 if combine else mask)
    error = relative_error(output, expected)
    if not error <= ALLOWED[dtype]:
        table.add(operator, NAMES[dtype], tokens, width, share, None, None, None, f"WRONG {error:.2g}")
        return
    found = times({"ours": ours, "matmul": lambda: F.linear(x, weight)})
    table.add(
        operator, NAMES[dtype], tokens, width, share, found["ours"][0], found["matmul"][0],
        ratio(found, "ours", ["matmul"]), error,
    )


def experts(kernels, quick):
    columns = ["operator", "experts", "used", "tokens", "ours ms", "matmul ms", "ratio", "error"]
    table = Table("Mixtures of experts, f16, against dense matrix products for the experts that a token uses", columns)
    for tokens in [4096] if quick else [512, 4096, TOKENS]:
        for number in [8, 32, 64]:
            for operator in ["RoutedProjection", "RoutedCombine"]:
                attempt(lambda: expert_row(table, kernels, operator, number, 8, tokens))
    for number, used in [(8, 2)] if quick else [(4, 1), (8, 2), (16, 4)]:
        for tokens in [8, 2048]:
            attempt(lambda: expert_row(table, kernels, "RoutedMLP", number, used, tokens))
    return table


def expert_row(table, kernels, operator, number, used, tokens, width=1024, dim=128, hidden=2048):
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float16) * shape[-2] ** -0.5
    gates = draw_gates(1, tokens, number, used / number)
    mask = (gates != 0).float()
    if operator == "RoutedMLP":
        x, first, second = draw(1, tokens, width) * tokens**0.5, draw(number, width, hidden), draw(number, hidden, width)
        inputs, attributes, columns = [x, first, second, gates], dict(num_experts=number, activation=3), width
        kept = F.silu(torch.einsum("btc,ech->bteh", x.float(), first.float())).half().float() * gates[..., None]
        expected = torch.einsum("bteh,ehc->btc", kept, second.float())
        wide, narrow = draw(used * hidden, width), draw(width, used * hidden)
        dense = lambda: F.linear(F.silu(F.linear(x, wide)), narrow)
    elif operator == "RoutedProjection":
        x, weight = draw(1, tokens, width) * tokens**0.5, draw(number, width, dim)
        inputs, attributes, columns = [x, weight, gates], dict(num_heads=number, weight_layout=1), number * dim
        expected = torch.einsum("btc,ecd,bte->bted", x.float(), weight.float(), mask).reshape(1, tokens, columns)
        matrix = draw(used * dim, width)
        dense = lambda: F.linear(x, matrix)
    else:
        x, weight = draw(1, tokens, number * dim) * tokens**0.5, draw(number, dim, width)
        inputs, attributes, columns = [x, weight, gates], dict(num_heads=number, weight_layout=1), width
        expected = torch.einsum("bted,edc,bte->btc", x.view(1, tokens, number, dim).float(), weight.float(), mask)
        part, matrix = x[..., : used * dim].contiguous(), draw(width, used * dim)
        dense = lambda: F.linear(part, matrix)
    output = torch.full((1, tokens, columns), torch.nan, device="cuda", dtype=torch.float16)
    ours = kernels.call(operator, attributes, inputs, output)
    ours()
    error = relative_error(output, expected)
    if not error <= ALLOWED[torch.float16]:
        table.add(operator, number, used, tokens, None, None, None, f"WRONG {error:.2g}")
        return
    found = times({"ours": ours, "matmul": dense})
    table.add(operator, number, used, tokens, found["ours"][0], found["matmul"][0], ratio(found, "ours", ["matmul"]), error)


PARTS = {"attention": attention, "decode": decode, "linear": linear, "experts": experts}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("report")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    torch.manual_seed(torch.seed() % 2**31)
    print(f"seed {torch.initial_seed()}, {machine()}")
    kernels, tables, failed = Kernels(options.library), [], False
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        try:
            tables.append(part(kernels, options.quick))
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            failed = True
        write_report(options.report, machine(), tables)
    wrong = [row for table in tables for row in table.rows if str(row["error"]).startswith("WRONG")]
    sys.exit(1 if failed or wrong or not any(table.rows for table in tables) else 0)


if __name__ == "__main__":
    main()
