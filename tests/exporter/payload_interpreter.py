"""Runs a payload with numpy: the oracle of the lowering, slow and literal, independent of the C++ devices.

Results live in one arena at the planned offsets, poisoned before every call, so a wrong plan shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flexpte.metal_delegate import payload_generated as schema

NUMPY = {
    "Bool": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": np.uint16,
    "F32": np.float32,
    "F64": np.float64,
}
COMPUTED = {"Bool": np.bool_, "I32": np.int32, "I64": np.int64, "F32": np.float32}
TORCH = {
    "Bool": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


def names(enum: type) -> dict[int, str]:
    return {v: k.rstrip("_") for k, v in vars(enum).items() if isinstance(v, int)}


DTYPE, EXPR_OP, SCALAR_OP, STORAGE, REDUCE, OP = (
    names(e) for e in (schema.DType, schema.ExprOp, schema.ScalarOp, schema.StorageKind, schema.ReduceOp, schema.Op)
)


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Floating values as float32, others as they are."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype in ("F16", "F64") else array


def narrow(array: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest even, integers wrapped."""
    if dtype == "BF16":
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(torch.bfloat16)
        return tensor.view(torch.uint16).numpy()
    return np.asarray(array).astype(NUMPY[dtype])


@dataclass
class Interpreter:
    """One delegate call: its payload, its named data, its states."""

    blob: bytes
    data: dict[str, bytes]
    states: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert schema.Payload.PayloadBufferHasIdentifier(self.blob, 0)
        self.payload = schema.PayloadT.InitFromObj(schema.Payload.GetRootAs(self.blob, 0))
        for state in self.payload.states or []:
            name = state.name.decode()
            dtype = NUMPY[DTYPE[state.dtype]]
            if name in self.states:
                continue
            if state.initial >= 0:
                key = self.payload.constants[state.initial].key.decode()
                self.states[name] = np.frombuffer(self.data[key], np.uint8).copy()
            else:
                self.states[name] = np.zeros(int(np.prod(state.sizes)) * np.dtype(dtype).itemsize, np.uint8)

    def run(self, *inputs: Any) -> list[torch.Tensor]:
        """Inputs (tensors or ints) to outputs."""
        self.inputs = inputs
        self.scalars: list[int] = []
        for s in self.payload.scalars or []:
            self.scalars.append(self.scalar(s))
        self.buffers = [self.buffer(s) for s in self.payload.storages]
        for instruction in self.payload.instructions:
            getattr(self, OP[instruction.opType])(instruction.op)
        outputs = []
        for number in self.list(self.payload.outputs):
            value = self.payload.values[number]
            tensor = torch.from_numpy(np.array(self.view(number), order="C"))
            outputs.append(tensor.view(torch.bfloat16) if DTYPE[value.dtype] == "BF16" else tensor)
        return outputs

    def scalar(self, s: Any) -> int:
        op, v = SCALAR_OP[s.op], self.scalars
        if op == "Constant":
            return s.value
        if op == "InputSize":
            return int(self.inputs[s.a].shape[s.b])
        if op == "InputValue":
            return int(self.inputs[s.a])
        a, b = v[s.a], v[s.b]
        result = {
            "Add": lambda: a + b,
            "Sub": lambda: a - b,
            "Mul": lambda: a * b,
            "FloorDiv": lambda: a // b,
            "Mod": lambda: a % b,
            "Min": lambda: min(a, b),
            "Max": lambda: max(a, b),
        }[op]()
        assert result <= s.upperBound, f"{op} {a} {b} exceeds its bound {s.upperBound}"
        return result

    def sym(self, n: int) -> int:
        return n if n >= 0 else self.scalars[-1 - n]

    @staticmethod
    def list(x: Any) -> list[int]:
        return [] if x is None else [int(i) for i in x]

    def buffer(self, s: Any) -> np.ndarray:
        kind = STORAGE[s.kind]
        if kind == "Input":
            tensor = self.inputs[s.index].contiguous()
            raw = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
            assert raw.nbytes <= s.sizeBytes, "an input larger than planned"
            return raw.copy()
        if kind == "Constant":
            return np.frombuffer(self.data[self.payload.constants[s.index].key.decode()], np.uint8)
        if kind == "State":
            return self.states[self.payload.states[s.index].name.decode()]
        if kind == "Output":
            return np.full(s.sizeBytes, 0xFF, np.uint8)
        if not hasattr(self, "arena"):
            self.arena = np.full(self.payload.arenaSizeBytes, 0xFF, np.uint8)
        assert s.offsetBytes % 64 == 0
        assert s.offsetBytes + s.sizeBytes <= len(self.arena)
        return self.arena[s.offsetBytes : s.offsetBytes + s.sizeBytes]

    def view(self, number: int) -> np.ndarray:
        v = self.payload.values[number]
        dtype = np.dtype(NUMPY[DTYPE[v.dtype]])
        sizes = [self.sym(s) for s in self.list(v.sizes)]
        strides = [self.sym(s) for s in self.list(v.strides)]
        offset = self.sym(v.offset)
        flat = self.buffers[v.storage]
        if all(sizes):
            last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
            inside = offset >= 0 and (last + 1) * dtype.itemsize <= len(flat)
            assert inside, f"value {number} leaves its storage"
        flat = flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
        return np.lib.stride_tricks.as_strided(
            flat[offset:], sizes, [s * dtype.itemsize for s in strides], writeable=flat.flags.writeable
        )

    def load(self, number: int) -> np.ndarray:
        return widen(self.view(number), DTYPE[self.payload.values[number].dtype])

    def store(self, number: int, array: np.ndarray) -> None:
        target = self.view(number)
        assert target.shape == np.shape(array), f"{target.shape} {np.shape(array)}"
        target[...] = narrow(array, DTYPE[self.payload.values[number].dtype])

    # Instructions.

    def Linear(self, o: Any) -> None:
        result = self.load(o.x) @ self.load(o.weight).T
        self.store(o.out, result + self.load(o.bias) if o.bias >= 0 else result)

    def MatMul(self, o: Any) -> None:
        self.store(o.out, self.load(o.a) @ self.load(o.b))

    def Gather(self, o: Any) -> None:
        self.store(o.out, np.take(self.load(o.source), self.view(o.index), axis=o.dim))

    def RmsNorm(self, o: Any) -> None:
        x = self.load(o.x)
        y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(o.eps))
        self.store(o.out, y * self.load(o.weight) if o.weight >= 0 else y)

    def LayerNorm(self, o: Any) -> None:
        x = self.load(o.x)
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + np.float32(o.eps))
        y = y * self.load(o.weight) if o.weight >= 0 else y
        self.store(o.out, y + self.load(o.bias) if o.bias >= 0 else y)

    def Softmax(self, o: Any) -> None:
        x = torch.from_numpy(self.load(o.x).copy())
        self.store(o.out, (x.log_softmax(-1) if o.log else x.softmax(-1)).numpy())

    def Reduce(self, o: Any) -> None:
        x, op = self.load(o.x), REDUCE[o.op]
        x = x.reshape(*x.shape[: x.ndim - o.numDims], -1)
        if op in ("ArgMax", "ArgMin"):
            result = {"ArgMax": np.argmax, "ArgMin": np.argmin}[op](x, axis=-1)
        else:
            wide = x.astype(np.int64) if x.dtype.kind in "iu" and op in ("Sum", "Prod") else x
            result = {
                "Sum": np.sum,
                "Mean": np.mean,
                "Max": np.max,
                "Min": np.min,
                "Prod": np.prod,
                "Any": np.any,
                "All": np.all,
            }[op](wide, axis=-1)
        self.store(o.out, np.asarray(result))

    def IndexCopy(self, o: Any) -> None:
        target, index = self.view(o.target), self.view(o.index)
        assert STORAGE[self.payload.storages[self.payload.values[o.target].storage].kind] == "State"
        assert ((index >= 0) & (index < target.shape[o.dim])).all(), "index out of range"
        np.moveaxis(target, o.dim, 0)[index] = np.moveaxis(self.view(o.source), o.dim, 0)

    def Arange(self, o: Any) -> None:
        out = self.view(o.out)
        start, step = self.sym(o.start), self.sym(o.step)
        self.store(o.out, start + step * np.arange(out.shape[0]))

    def Elementwise(self, o: Any) -> None:
        inputs = [self.load(i) for i in self.list(o.inputs)]
        out = self.view(o.out)
        assert all(i.shape == out.shape for i in inputs), "inputs and output have equal sizes"
        scalars = [self.scalars[s] for s in self.list(o.scalars)]
        result = self.evaluate(o.expression, {"Input": inputs}, scalars, self.list(o.captures))
        self.store(o.out, np.broadcast_to(result, out.shape))

    def FlexAttention(self, o: Any) -> None:
        q, k, v = self.load(o.query), self.load(o.key), self.load(o.value)
        batch, heads, q_len, _ = q.shape
        group = heads // k.shape[1]
        k, v = (np.broadcast_to(x, (batch, *x.shape[1:])).repeat(group, axis=1) for x in (k, v))
        kv_len = k.shape[2]
        leaves = {
            "Batch": np.arange(batch, dtype=np.int32).reshape(-1, 1, 1, 1),
            "Head": np.arange(heads, dtype=np.int32).reshape(1, -1, 1, 1),
            "QIdx": np.arange(q_len, dtype=np.int32).reshape(1, 1, -1, 1),
            "KvIdx": np.arange(kv_len, dtype=np.int32).reshape(1, 1, 1, -1),
        }
        scores = (q @ k.swapaxes(-1, -2)) * np.float32(o.scale)
        shape = scores.shape
        seen = np.ones(shape, bool)
        if o.kvNumBlocks >= 0:
            listed = np.zeros(shape, bool)
            full = np.zeros(shape, bool)
            self.listed(listed, o, o.kvNumBlocks, o.kvIndices)
            if o.fullKvNumBlocks >= 0:
                self.listed(full, o, o.fullKvNumBlocks, o.fullKvIndices)
            seen = listed
        if o.mask >= 0:
            scalars = [self.scalars[s] for s in self.list(o.maskScalars)]
            seen = seen & self.evaluate(o.mask, leaves, scalars, self.list(o.maskCaptures))
        if o.kvNumBlocks >= 0:
            seen = seen | full
        if o.score >= 0:
            scalars = [self.scalars[s] for s in self.list(o.scoreScalars)]
            leaves["Score"] = scores
            scores = np.broadcast_to(self.evaluate(o.score, leaves, scalars, self.list(o.scoreCaptures)), shape)
        weights = torch.from_numpy(np.where(seen, scores, -np.inf).astype(np.float32))
        probabilities = torch.where(torch.from_numpy(seen), weights.softmax(-1).nan_to_num(0.0), 0.0).numpy()
        out = np.zeros((*shape[:3], v.shape[-1]), np.float32)
        for b, h, r in np.ndindex(*shape[:3]):  # unseen keys may hold anything, NaN included
            keys = seen[b, h, r]
            out[b, h, r] = probabilities[b, h, r, keys] @ v[b, h, keys]
        self.store(o.out, out)
        if o.lse >= 0:
            self.store(o.lse, weights.logsumexp(-1).numpy())

    def listed(self, seen: np.ndarray, o: Any, counts: int, indices: int) -> None:
        num, idx = self.view(counts), self.view(indices)
        for b, h, i in np.ndindex(*num.shape):
            rows = slice(i * o.qBlockSize, (i + 1) * o.qBlockSize)
            bs = slice(b, b + 1) if num.shape[0] > 1 else slice(None)
            hs = slice(h, h + 1) if num.shape[1] > 1 else slice(None)
            for j in idx[b, h, i, : num[b, h, i]]:
                seen[bs, hs, rows, j * o.kvBlockSize : (j + 1) * o.kvBlockSize] = True

    # Expressions.

    def evaluate(self, number: int, leaves: dict[str, Any], scalars: list[int], captures: list[int]) -> Any:
        results: list[Any] = []
        with np.errstate(all="ignore"):
            for node in self.payload.expressions[number].nodes:
                args = [results[a] for a in self.list(node.args)]
                results.append(self.node(node, args, leaves, scalars, captures))
        return results[-1]

    def node(self, n: Any, args: list[Any], leaves: Any, scalars: list[int], captures: list[int]) -> Any:
        op, type = EXPR_OP[n.op], COMPUTED[DTYPE[n.type]]
        if op == "Constant":
            return type(n.valueFloat if type is np.float32 else n.valueInt)
        if op == "Input":
            return np.asarray(leaves["Input"][n.index]).astype(type)
        if op == "Scalar":
            return type(scalars[n.index])
        if op == "Load":
            array = self.load(captures[n.index])
            wrapped = [np.where(a < 0, a + s, a) for a, s in zip(args, array.shape, strict=True)]
            return array[tuple(np.clip(w, 0, s - 1) for w, s in zip(wrapped, array.shape, strict=True))].astype(type)
        if op in leaves:
            return np.asarray(leaves[op]).astype(type)
        if op == "RoundTo":
            dtype = DTYPE[n.roundTo]
            return widen(narrow(args[0], dtype), dtype).astype(type)
        if op == "Cast":
            return (
                np.trunc(args[0]).astype(type)
                if np.asarray(args[0]).dtype.kind == "f"
                else np.asarray(args[0]).astype(type)
            )
        if op not in BY_TORCH:
            raise NotImplementedError(op)
        tensors = [torch.from_numpy(np.array(a)) for a in args]
        if len({t.dtype for t in tensors[-2:]}) != 1:
            raise AssertionError(f"{op} of different types {[t.dtype for t in tensors]}")
        return BY_TORCH[op](*tensors).numpy().astype(type)


BY_TORCH = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "FloorDiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "TruncDiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "Remainder": torch.remainder,
    "Fmod": torch.fmod,
    "Pow": torch.pow,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Sign": torch.sign,
    "Min": torch.minimum,
    "Max": torch.maximum,
    "Reciprocal": torch.reciprocal,
    "Square": torch.square,
    "Eq": torch.eq,
    "Ne": torch.ne,
    "Lt": torch.lt,
    "Le": torch.le,
    "Gt": torch.gt,
    "Ge": torch.ge,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "LogicalNot": torch.logical_not,
    "BitAnd": torch.bitwise_and,
    "BitOr": torch.bitwise_or,
    "BitXor": torch.bitwise_xor,
    "BitNot": torch.bitwise_not,
    "ShiftLeft": torch.bitwise_left_shift,
    "ShiftRight": torch.bitwise_right_shift,
    "Where": torch.where,
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expm1": torch.expm1,
    "Log": torch.log,
    "Log2": torch.log2,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Atan2": torch.atan2,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Tanh": torch.tanh,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Sigmoid": torch.sigmoid,
    "Silu": torch.nn.functional.silu,
    "Erf": torch.erf,
    "GeluErf": torch.nn.functional.gelu,
    "GeluTanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "Relu": torch.relu,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Trunc": torch.trunc,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
}
