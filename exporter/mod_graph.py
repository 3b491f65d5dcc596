"""A mod run once on 0-d tensors and recorded as a graph of ATen ops.

What the mod reads besides its own arguments (closures, module state, values of the surrounding forward)
becomes placeholders, so that the graph is a function of tensors only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flexpte.exporter.errors import Unsupported

SCORE_ARGUMENTS = ("score", "batch", "head", "q_idx", "kv_idx")
MASK_ARGUMENTS = SCORE_ARGUMENTS[1:]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass
class ModGraph:
    """The graph of one mod.

    Placeholders are the mod's arguments, then one per captured tensor, whose tensor ``captures`` has.
    Every node has ``meta["val"]`` (fake tensor) and ``meta["source"]`` (line of the model, or None).
    """

    graph: fx.Graph
    captures: dict[fx.Node, Tensor] = field(default_factory=dict)


def record(
    mod: Callable[..., Tensor], arguments: tuple[str, ...], like: Tensor, kept: frozenset[Any] = frozenset()
) -> ModGraph:
    """Run ``mod`` on 0-d fake tensors named ``arguments`` and record what it does.

    The score is float32, the indices are int64, as in eager mode (PyTorch's ``_higher_order_ops/flex_attention.py``).
    ``like``: a tensor whose fake mode is used if it has one. Ops outside ``kept`` are decomposed where torch can.

    Raises Unsupported for what depends on values, for mutation of captured tensors, and for a result that is
    no 0-d tensor.
    """
    mode = like.fake_mode if isinstance(like, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    with without_modes(), torch.no_grad(), mode:
        inputs = [
            torch.empty((), dtype=torch.float32 if name == "score" else torch.int64, device=like.device)
            for name in arguments
        ]
        recorder = _Recorder(mode, kept)
        for name, tensor in zip(arguments, inputs, strict=True):
            recorder.add_input(name, tensor)
        with recorder, _IndexByTensors():
            try:
                result = mod(*inputs)
            except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
                raise _depends_on_values(model_line(error.__traceback__)) from error
            except DynamicOutputShapeException as error:
                raise Unsupported(
                    f"a mod calls {error.func}, whose result size depends on values",
                    source=model_line(error.__traceback__),
                    fix="Use torch.where, or compute it in forward and capture the result",
                ) from error
        if not isinstance(result, Tensor) or result.dim() != 0:
            got = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
            raise Unsupported(
                f"a mod returns {got}",
                source=function_line(mod),
                fix="It must return one 0-d tensor; reduce it, or index it with b, h, q_idx, kv_idx",
            )
        recorder.graph.output(recorder.node_of(result))
    recorder.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))  # no op recorded has effects
    return ModGraph(recorder.graph, {n: t for n, t in recorder.captures.items() if n.users})


class _Recorder(TorchDispatchMode):
    def __init__(self, fake_mode: FakeTensorMode, kept: frozenset[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.captures: dict[fx.Node, Tensor] = {}
        self._fake_mode, self._kept = fake_mode, kept
        self._nodes: dict[int, fx.Node] = {}
        self._fakes: dict[int, Tensor] = {}
        self._expanding: list[Any] = []
        self._keep_alive: list[Tensor] = []  # ids stay unique

    def add_input(self, name: str, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"], node.meta["source"] = tensor, None
        self._bind(tensor, node)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            with self.graph.inserting_after(self._last_placeholder()):
                node = self.add_input(f"capture_{len(self.captures)}", tensor)
            node.meta["val"] = self._fake(tensor)
            self.captures[node] = tensor
        return self._nodes[id(tensor)]

    def _last_placeholder(self) -> fx.Node:
        last: fx.Node = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        return last

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._keep_alive.append(tensor)

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            with torch.utils._python_dispatch._disable_current_modes():
                shape, stride = tensor.shape, tensor.stride()
            with self._fake_mode:
                self._fakes[id(tensor)] = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            self._keep_alive.append(tensor)
        return self._fakes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        source = model_line(sys._getframe(1))
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            return self._literal(args[0], source)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _depends_on_values(source)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unsupported(
                f"a mod draws random numbers ({func})",
                source=source,
                fix="A mod must be a pure function; draw them in forward and capture the tensor",
            )
        if func._schema.is_mutable:
            return self._mutation(func, args, kwargs, source)
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, self._fake, (args, kwargs))
        if func not in self._kept and func not in self._expanding:
            self._expanding.append(func)  # some forms lead back to the op itself
            with self:
                result = _decomposed(func, args, kwargs)
            self._expanding.pop()
            if result is not NotImplemented:
                return result
        result = func(*fake_args, **fake_kwargs)
        if not any(isinstance(r, Tensor) for r in pytree.tree_leaves(result)):
            return result
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node_of, (args, kwargs))
        self._record(func, node_args, node_kwargs, result, source)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, source: str | None) -> None:
        node = self.graph.call_function(func, args, kwargs)
        node.meta["val"], node.meta["source"] = result, source
        if isinstance(result, Tensor):
            self._bind(result, node)
            return
        for i, item in enumerate(result):
            if isinstance(item, Tensor):
                part = self.graph.call_function(getitem, (node, i))
                part.meta["val"], part.meta["source"] = item, source
                self._bind(item, part)

    def _literal(self, tensor: Tensor, source: str | None) -> Tensor:
        """torch.tensor(...) inside the mod: the values are part of the graph."""
        with torch.utils._python_dispatch._disable_current_modes():
            values = tensor.tolist()
        with self._fake_mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._record(literal, (values,), {"dtype": tensor.dtype}, fake, source)
        return fake

    def _mutation(self, func: Any, args: Any, kwargs: Any, source: str | None) -> Tensor:
        """``x += y`` on a value of the mod is recorded out of place."""
        target: Tensor = args[0]
        name = func._schema.name.removeprefix("aten::")
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if functional is None or not name.endswith("_") or id(target) not in self._nodes:
            raise _mutates(func, source)
        if self._nodes[id(target)] in self.captures:
            raise _mutates(func, source)
        with self:
            result = getattr(functional, func._overloadname)(*args, **kwargs).to(target.dtype)
        self._bind(target, self.node_of(result))
        return target


def _decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    """An op by simpler ones, NotImplemented where torch has no such form of it."""
    if func in decomposition_table:
        return decomposition_table[func](*args, **kwargs)
    if func.namespace == "prims":
        return func.impl_aten(*args, **kwargs)
    if func.namespace != "aten":
        return NotImplemented
    return func.decompose(*args, **kwargs)


def getitem(items: Any, index: int) -> Any:
    """One result of an op with several."""
    return items[index]


def literal(values: Any, *, dtype: torch.dtype) -> Tensor:
    """A tensor written out inside a mod."""
    return torch.tensor(values, dtype=dtype)


def _depends_on_values(source: str | None) -> Unsupported:
    return Unsupported(
        "a mod turns a tensor into a Python number or branches on its value",
        source=source,
        fix="Keep it a tensor: torch.where in place of `if`, no .item(), int() or bool()",
    )


def _mutates(func: Any, source: str | None) -> Unsupported:
    return Unsupported(
        f"a mod changes a tensor in place ({func})",
        source=source,
        fix="A mod must be a pure function; update buffers in forward",
    )


class _IndexByTensors(TorchFunctionMode):
    """``t[...]`` with 0-d integer tensors among the indices reads elements, not `.item()`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in items):
                return _index(args[0], items)
        return func(*args, **(kwargs or {}))


def _index(tensor: Tensor, items: tuple[Any, ...]) -> Tensor:
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis in [i for i in items if not isinstance(i, Tensor)]:
        at = next(n for n, i in enumerate(items) if i is Ellipsis)
        items = (*items[:at], *[slice(None)] * (tensor.dim() - used), *items[at + 1 :])
    indices: list[Tensor | None] = []
    for item in items:
        dim = len(indices)
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, slice):
            if item != slice(None):
                start, stop, step = item.start, item.stop, item.step
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, stop, 1 if step is None else step)
        elif isinstance(item, bool):
            raise TypeError("a bool cannot index a captured tensor in a mod")
        elif isinstance(item, Tensor):
            indices.append(item)
            continue
        else:
            tensor = tensor.select(dim, item)
            continue
        indices.append(None)
    if all(i is None for i in indices):
        return tensor
    indexed: Tensor = torch.ops.aten.index.Tensor(tensor, indices)
    return indexed


@contextmanager
def without_modes() -> Iterator[None]:
    """Plain tensor semantics: no tracing, no function modes."""
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


def model_line(where: Any) -> str | None:
    """``file:line`` of the innermost frame that is neither torch's nor ours; from a frame or a traceback."""
    if hasattr(where, "tb_next"):
        found = None
        while where is not None:
            if not where.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
                found = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
            where = where.tb_next
        return found
    while where is not None:
        name = where.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{name}:{where.f_lineno}"
        where = where.f_back
    return None


def function_line(function: Any) -> str | None:
    """``file:line`` of a function's definition, looking through functools.partial and methods."""
    while hasattr(function, "func"):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:  # an object with a call method
        code = getattr(type(function).__dict__.get("__call__"), "__code__", None)
    if code is None or code.co_filename.startswith(_LIBRARIES):  # what Dynamo made of it
        return None
    return f"{code.co_filename}:{code.co_firstlineno}"
