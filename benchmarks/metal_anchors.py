"""Metal attention kernels side by side: ours, PyTorch's flex_attention for MPS and MLX's, counted by one shim.

    python benchmarks/metal_anchors.py [--mlx FOLDER_OR_WHEEL] [--quick]

No GPU takes part: the kernels' text runs on this machine (metal_delegate/msl_host), which counts bytes of device
memory, flops and waiting threads. The text of the peers is taken at run time from the installed torch and from the
macOS wheel of mlx-metal (fetched by pip where it is not given), and changed only in what the shim's calling convention
asks for: buffers are numbered from 1, what the compiler would fix is fixed, tensors of data lie in device memory.
Results are checked against float64.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import ROOT, save

sys.path.insert(0, str(ROOT))
from flexpte.runtime import _native
from tests.metal_delegate import metal_flex

Array = npt.NDArray[Any]

# What steel attention uses of Metal's type traits, where the shim has none, and what clang does not take in it.
TRAITS = """
namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
using remove_addrspace_t = T;
}
"""
STEEL = (
    ("return ulong3(loc_a, loc_b, loc_c);", "ulong3 r; r.x = loc_a; r.y = loc_b; r.z = loc_c; return r;"),
    ("return short2{fn, fm};", "short2 r; r.x = fn; r.y = fm; return r;"),
    ("ulong3 tidl{tid.x, tid.y, tid.z};", "ulong3 tidl; tidl.x = tid.x; tidl.y = tid.y; tidl.z = tid.z;"),
    ("metal::vec<T, kElemRows>", "T"),
    ("MMAFrag_acc_t::mma(", "MMAFrag_acc_t::template mma<float, float, float>("),
    ("MMAFragD::mma(", "MMAFragD::template mma<float, float, float>("),
)
MLX = "mlx-metal==0.32.4"
NUM_CORES = 10
"""Of the GPU that splits are chosen for: an M1 to M4 without a suffix."""


def numbered_from_1(text: str) -> str:
    return re.sub(r"\[\[buffer\((\d+)\)", lambda m: f"[[buffer({int(m[1]) + 1})", text)


def mask_of(q_len: int, kv_len: int, window: int | None) -> Array:
    q, k = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None, :]
    visible = k <= q
    if window is not None:
        visible &= k > q - window
    return visible[None, None]


class Case:
    """Causal attention of float16, with a window or without; queries are the last positions."""

    def __init__(self, name: str, heads: tuple[int, int], q_len: int, kv_len: int, dim: int, window: int | None):
        self.name, self.heads, self.q_len, self.kv_len, self.dim, self.window = name, heads, q_len, kv_len, dim, window
        random = np.random.default_rng(0)
        self.query = random.standard_normal((1, heads[0], q_len, dim)).astype(np.float16)
        self.key = random.standard_normal((1, heads[1], kv_len, dim)).astype(np.float16)
        self.value = random.standard_normal((1, heads[1], kv_len, dim)).astype(np.float16)
        self.mask = mask_of(q_len, kv_len, window)
        self.scale = float(dim) ** -0.5
        visible_keys = int(self.mask.any(axis=2).sum())
        self.minimum = self.query.nbytes + 2 * visible_keys * heads[1] * dim * 2
        self.scores = int(self.mask.sum()) * heads[0]

    def check(self, out: Array) -> float:
        """The largest error, for some heads."""
        group = self.heads[0] // self.heads[1]
        worst = 0.0
        for head in {0, self.heads[0] - 1}:
            q, k, v = (
                x[0, h].astype(np.float64)
                for x, h in ((self.query, head), (self.key, head // group), (self.value, head // group))
            )
            scores = np.where(self.mask[0, 0], q @ k.T * self.scale, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected = weights @ v / weights.sum(axis=1, keepdims=True)
            worst = max(worst, float(np.abs(out[0, head].astype(np.float64) - expected).max()))
        if worst > 5e-3:
            raise SystemExit(f"{self.name}: the result is wrong by {worst}")
        return worst

    def row(self, contender: str, out: Array, *counters: dict[str, Any] | None) -> dict[str, Any]:
        dispatches = [c for c in counters if c is not None]

        def total(name: str) -> int:
            return sum(int(c[name]) for c in dispatches)

        error = self.check(out)
        read = total("device_read_bytes")
        return {
            "case": self.name,
            "contender": contender,
            "device_read_bytes": read,
            "times_minimum": read / self.minimum,
            "device_written_bytes": total("device_written_bytes"),
            "threadgroup_bytes": total("threadgroup_read_bytes") + total("threadgroup_written_bytes"),
            "scalar_flops_per_score": total("flops") / self.scores,
            "matrix_flops_per_score": total("matrix_flops") / self.scores,
            "barriers": total("barriers"),
            "idle": dispatches[0]["idle"],
            "largest_error": error,
        }


def splits_for(case: Case, num_threadgroups: int) -> int:
    """As metal_delegate/gpu/encode_flex.cpp chooses them for decode."""
    keys = min(case.kv_len, case.window or case.kv_len)
    wanted = -(-1024 * NUM_CORES // (128 * num_threadgroups))
    return max(1, min(wanted, -(-keys // 256)))


def ours(case: Case) -> list[dict[str, Any]]:
    rows = []
    options: dict[str, Any] = {"dtype": "F16", "scale": case.scale}
    if case.q_len == 1:
        for splits in sorted({1, splits_for(case, case.heads[1])}):
            got = metal_flex.run("decode", case.query, case.key, case.value, case.mask, splits=splits, **options)
            rows.append(case.row(f"flexpte, {splits} splits", got.out, got.counters, got.merge_counters))
    else:
        got = metal_flex.run("prefill", case.query, case.key, case.value, case.mask, **options)
        rows.append(case.row("flexpte", got.out, got.counters))
    return rows


def torch_flex(case: Case) -> list[dict[str, Any]]:
    """torch/_inductor/codegen/metal_flex_attention_template.py, with the block mask that create_block_mask makes."""
    import torch
    from torch._inductor.codegen import metal_flex_attention_template as template
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import create_block_mask

    offset, window = case.kv_len - case.q_len, case.window

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible = k <= q + offset
        return visible if window is None else visible & (q + offset - k < window)

    positions = [torch.tensor(0) for _ in range(4)]  # tracing tells tensors apart by identity
    score_graph = make_fx(lambda s, b, h, q, k: s)(torch.tensor(0.0), *positions)
    mask_graph = make_fx(mask_mod)(*positions)
    block_m = 32
    text = template._generate_metal_shader(
        torch.float16, case.dim, case.dim, score_graph, mask_graph, True, block_m, case.scale
    )
    text = text.replace("#include <c10/metal/utils.h>\n", "")
    text = re.sub(r"constant half\* ([QKV]) ", r"device const half* \1 ", text)
    text = re.sub(r"^constant (int|float) ", r"constant constexpr \1 ", text, flags=re.M)
    names = re.findall(r"long (\w+) = _params\[\d+\];", text)
    library = _native.MslLibrary(numbered_from_1(text))

    block_mask = create_block_mask(mask_mod, 1, 1, case.q_len, case.kv_len, device="cpu")
    num, indices, full_num, full_indices = (
        t.numpy()
        for t in (
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
        )
    )
    out = np.zeros((1, case.heads[0], case.q_len, case.dim), np.float16)
    values = {"B": 1, "Hq": case.heads[0], "Hkv": case.heads[1], "N_Q": case.q_len, "N_KV": case.kv_len}
    for letter, axes, tensor in (
        ("q", "zhmk", case.query),
        ("k", "zhnk", case.key),
        ("v", "zhnk", case.value),
        ("o", "zhmk", out),
    ):
        for axis, stride in zip(axes, metal_flex.strides_of(tensor), strict=True):
            values[f"stride_{letter}{axis}"] = stride
    values |= {"SPARSE_Q_BLOCK_SIZE": block_mask.BLOCK_SIZE[0], "SPARSE_KV_BLOCK_SIZE": block_mask.BLOCK_SIZE[1]}
    values |= {"gqa_shared_heads": case.heads[0] // case.heads[1], "SPARSE_Z": 1, "SPARSE_HQ": 1}
    for prefix in ("kv", "full_kv"):
        values |= {f"{prefix}_nb_stride_z": 0, f"{prefix}_nb_stride_h": 0, f"{prefix}_nb_stride_q": 1}
        values |= {f"{prefix}_idx_stride_z": 0, f"{prefix}_idx_stride_h": 0}
        values |= {f"{prefix}_idx_stride_q": indices.shape[3], f"{prefix}_idx_stride_b": 1}
    params = np.array([values[n] for n in names], np.int64)
    buffers = [out, case.query, case.key, case.value, num, indices, full_num, full_indices, params]
    counters = library.dispatch(
        "flex_attn_fwd",
        buffers,
        b"\0" * 8,
        (-(-case.q_len // block_m), case.heads[0], 1),
        (block_m, 1, 1),
        writable=[0],
        names=["out", "query", "key", "value"],
    )
    return [case.row("torch 2.13 (MPS)", out, counters)]


class Mlx:
    """Kernels of mlx-metal: headers under mlx/include."""

    def __init__(self, root: Path):
        self.root = root

    def text(self, name: str, constants: dict[str, str], instantiations: list[tuple[str, str]]) -> str:
        text = self._flat(name, set())
        for pattern, replacement in (
            (r"^#pragma (once|METAL.*)$", ""),
            (r"^#include <[^>]*>$", ""),
            (r", function_constant\(\w+\)\]\]", "]]"),
            (r"\[\[kernel, max_total_threads_per_threadgroup\([^)]*\)\]\]", "[[kernel]]"),
        ):
            text = re.sub(pattern, replacement, text, flags=re.M)
        text = re.sub(
            r"^constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];",
            lambda m: f"constant constexpr {m[1]} {m[2]} = {constants.get(m[2], 'false')};",
            text,
            flags=re.M,
        )
        head = "#include <metal_stdlib>\nusing namespace metal;\n"
        head += "#define METAL_FUNC inline __attribute__((__always_inline__))\n"
        head += "template <typename U>\nstruct Limits {\n"
        head += "  static constexpr constant U finite_min = metal::numeric_limits<U>::lowest();\n};\n"
        tail = [f'template [[host_name("{n}")]] [[kernel]] decltype({f}) {f};' for n, f in instantiations]
        return head + numbered_from_1(text) + "\n" + "\n".join(tail)

    def _flat(self, name: str, seen: set[str]) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (self.root / name).read_text(encoding="utf-8")
        return re.sub(r'^#include "(mlx/[^"]+)"$', lambda m: self._flat(m[1], seen), text, flags=re.M)

    def decode(self, case: Case) -> list[dict[str, Any]]:
        """sdpa_vector: one pass, and two where MLX takes two (4096 keys or more of grouped heads)."""
        if case.q_len != 1 or case.window is not None:
            return []
        blocks, group = 64, case.heads[0] // case.heads[1]
        types = f"half, {case.dim}, {case.dim}"
        functions = [
            ("one_pass", f"sdpa_vector<{types}>"),
            ("first_pass", f"sdpa_vector_2pass_1<{types}, 4>"),
            ("second_pass", f"sdpa_vector_2pass_2<half, {case.dim}>"),
        ]
        source = self.text("mlx/backend/metal/kernels/sdpa_vector.h", {"blocks": str(blocks)}, functions)
        library = _native.MslLibrary(source)
        count = np.array([case.kv_len], np.int32)
        strides = [np.array([s], np.uint64) for s in (case.kv_len * case.dim, case.dim)]
        scale = np.array([case.scale], np.float32)
        out = np.zeros_like(case.query)
        names = ["query", "key", "value"]
        if case.kv_len < 4096:
            counters = library.dispatch(
                "one_pass",
                [case.query, case.key, case.value, out, np.array([group], np.int32), count, *strides, *strides, scale],
                b"\0" * 8,
                (case.heads[0], 1, 1),
                (1024, 1, 1),
                names=names,
            )
            return [case.row("MLX sdpa_vector", out, counters)]
        partial = np.zeros((case.heads[0], blocks, case.dim), np.float16)
        sums, most = (np.zeros((case.heads[0], blocks), np.float32) for _ in range(2))
        first = library.dispatch(
            "first_pass",
            [case.query, case.key, case.value, partial, sums, most, None, count, *strides, *strides, scale],
            b"\0" * 8,
            (case.heads[1], 1, blocks),
            (32, group, 1),
            names=names,
        )
        second = library.dispatch(
            "second_pass",
            [partial, sums, most, out, np.array([blocks], np.int32)],
            b"\0" * 8,
            (case.heads[0], 1, 1),
            (1024, 1, 1),
        )
        return [case.row("MLX sdpa_vector_2pass", out, first, second)]

    def prefill(self, case: Case) -> list[dict[str, Any]]:
        """Steel attention with the tiles that MLX chooses for a head dimension of 64."""
        block = 32
        if case.q_len % block != 0 or case.window is not None or case.dim != 64:
            return []
        source = self.text(
            "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h",
            {"align_Q": "true", "align_K": "true", "do_causal": "true"},
            [("steel", f"attention<half, {block}, {block}, {case.dim}, {case.dim}, 4, 1, bool, float>")],
        )
        for found, replacement in STEEL:
            source = source.replace(found, replacement)
        using = "using namespace metal;\n"
        try:
            library = _native.MslLibrary(source.replace(using, using + TRAITS, 1))
        except RuntimeError:
            library = _native.MslLibrary(source)
        num_q, num_kv = case.q_len // block, case.kv_len // block
        heads, dim = case.heads[0], case.dim
        numbers = [1, heads, dim, case.q_len, case.kv_len, heads // case.heads[1]]
        params = struct.pack("6if", *numbers, case.scale)
        params += struct.pack("7i", num_q, num_kv, num_q, num_kv, 0, 0, case.kv_len - case.q_len)
        out = np.zeros_like(case.query)
        for view in (case.query, case.key, case.value, out):
            params += struct.pack("3q", *metal_flex.strides_of(view)[:3])
        counters = library.dispatch(
            "steel",
            [case.query, case.key, case.value, out, np.frombuffer(params, np.uint8)],
            b"\0" * 8,
            (num_q, heads, 1),
            (32, 4, 1),
            names=["query", "key", "value"],
        )
        return [case.row("MLX steel attention", out, counters)]


def mlx_root(given: Path | None, folder: Path) -> Path:
    """mlx/include of a folder or wheel; of a fetched wheel where none is given."""
    if given is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "macosx_14_0_arm64", "--python-version", "3.11", "--dest", str(folder), MLX]
        subprocess.run(command, check=True)
        given = next(folder.glob("mlx_metal-*.whl"))
    if given.suffix == ".whl":
        with zipfile.ZipFile(given) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("mlx/include/")])
        given = folder
    return given / "mlx" / "include"


def cases(is_quick: bool) -> list[Case]:
    result = []
    for kv_len in (1024, 8192) if is_quick else (1024, 8192, 32768):
        for window in (None, 512):
            name = f"decode, {kv_len} keys, " + (f"window {window}" if window else "causal")
            result.append(Case(name, (32, 8), 1, kv_len, 128, window))
    for length, window in ((256, None), (512, 64), (2048, 64), (2048, None)):
        if is_quick and length == 2048:
            continue
        name = f"prefill, {length} queries, " + (f"window {window}" if window else "causal")
        result.append(Case(name, (8, 8), length, length, 64, window))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx", type=Path, help="mlx-metal's macOS wheel, or the folder it was unpacked to")
    parser.add_argument("--quick", action="store_true", help="without the longest cases")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        contenders: list[Callable[[Case], list[dict[str, Any]]]] = [ours, torch_flex]
        mlx = Mlx(mlx_root(arguments.mlx, Path(folder)))
        contenders += [mlx.decode, mlx.prefill]
        print(f"{'':35}{'':25} x minimum   flops/score: scalar  matrix    idle")
        for case in cases(arguments.quick):
            for contender in contenders:
                for row in contender(case):
                    rows.append(row)
                    print(
                        f"{row['case']:35}{row['contender']:25}{row['times_minimum']:10.3f}"
                        f"{row['scalar_flops_per_score']:22.1f}{row['matrix_flops_per_score']:8.1f}"
                        f"{100 * row['idle']:7.1f}%",
                        flush=True,
                    )
    save("metal_anchors", {"rows": rows})


if __name__ == "__main__":
    main()
