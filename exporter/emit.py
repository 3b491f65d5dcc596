"""From lowered regions to a ``.pte``: delegate calls, what is left of the graph, named data, the file.

The regions are taken out before the graph is converted to ExecuTorch's Edge dialect, so that the
conversion sees only what is left, in a plain decoder one call; weights that a region owns never enter it.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import sympy
import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig, to_edge
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, TensorArgument
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from flexpte.exporter.files import write_whole
from flexpte.exporter.ir import Size
from flexpte.exporter.pack import pack, tensor_bytes
from flexpte.exporter.partition import Lowered, Partition
from flexpte.exporter.symbols import size_of

BACKEND_ID = "FlexpteBackend"
METADATA_KEY = "flexpte.metadata"
WEIGHT_ALIGNMENT_BYTES = 64


class WeightBytes(bytes):
    """Stands for a weight where ExecuTorch wants ``bytes``: holds the digest, and is as long as the weight.

    The weight itself is read when the file is written, so that it is never copied.
    """

    data: memoryview

    @staticmethod
    def of(tensor: torch.Tensor) -> WeightBytes:
        """The bytes of a tensor."""
        data = tensor_bytes(tensor)
        self = WeightBytes(hashlib.sha256(data).digest())
        self.data = data
        return self

    def __len__(self) -> int:
        return self.data.nbytes

    @property
    def key(self) -> str:
        """The key in named data: equal weights have equal keys."""
        return "w." + bytes.hex(self)[:32]


class _Shapes:
    """What ExecuTorch asks of a delegated region's original program: its results, for shapes only."""

    def __init__(self, lowered: Lowered) -> None:
        self.outputs = [(node.meta["val"], [size_of(s) for s in node.meta["val"].shape]) for node in lowered.outputs]
        self.symbols = lowered.region.symbols
        self.graph = fx.Graph()  # read for debug handles only
        self.graph.output(())

    def module(self) -> Any:
        """A function from the region's arguments to tensors shaped like its results."""
        return self

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        bindings = {}
        for symbol, source in self.symbols.items():
            size = args[source.input] if source.dim < 0 else args[source.input].shape[source.dim]
            bindings[symbol] = (size - source.addend) // source.factor
        return tuple(
            torch.empty([_evaluate(s, bindings) for s in sizes], dtype=val.dtype) for val, sizes in self.outputs
        )


def _evaluate(size: Size, bindings: dict[sympy.Symbol, Any]) -> Any:
    return size if isinstance(size, int) else sympy_interp(PythonReferenceAnalysis, bindings, size)


def lowered_module(
    lowered: Lowered, exporter: str, weights: dict[tuple[Any, ...], WeightBytes]
) -> LoweredBackendModule:
    """One region as ExecuTorch's delegate: payload and named data."""
    store = NamedDataStore()
    keys = {}
    for number, constant in enumerate(lowered.region.constants):
        t = constant.tensor
        identity = (t.data_ptr(), t.dtype, tuple(t.shape), tuple(t.stride()))
        if identity not in weights:
            weights[identity] = WeightBytes.of(t)
        keys[number] = weights[identity].key
        store.add_named_data(keys[number], weights[identity], WEIGHT_ALIGNMENT_BYTES)
    blob = pack(lowered.region, keys, exporter)
    return LoweredBackendModule(
        _Shapes(lowered),
        BACKEND_ID,
        blob,
        [],
        store.get_named_data_store_output(),
    )


def residual(program: ExportedProgram, partition: Partition, modules: list[LoweredBackendModule]) -> ExportedProgram:
    """The program with each region replaced by one delegate call, without the weights of the regions."""
    root = torch.nn.Module()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    member = {node for lowered in partition.regions for node in lowered.nodes}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    steps: list[tuple[int, int, Any]] = []
    for position, node in enumerate(program.graph.nodes):
        if node.op == "call_function" and node not in member:
            steps.append((partition.levels.get(node, 0), position, node))
    steps += [
        (lowered.level, -1, (lowered, module)) for lowered, module in zip(partition.regions, modules, strict=True)
    ]
    for _, _, step in sorted(steps, key=lambda s: s[:2]):
        if isinstance(step, fx.Node):
            if all(n in env for n in step.all_input_nodes):
                env[step] = graph.node_copy(step, env.__getitem__)
                if step.target is torch.ops.aten.view.default:
                    # A delegate's results are contiguous, whatever the strides of what they replace.
                    env[step].target = torch.ops.aten.reshape.default
            continue
        _call(root, graph, env, step[0], step[1], partition)
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    owned_names = {name for name, _ in partition.owned.values()}
    kept = [
        (spec, arg)
        for spec, arg in zip(specs, output.args[0], strict=True)
        if not (spec.kind is OutputKind.BUFFER_MUTATION and spec.target in owned_names)
    ]
    graph.output(tuple(env[a] if isinstance(a, fx.Node) else a for _, a in kept)).meta.update(output.meta)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and node.target is not executorch_call_delegate:
            graph.erase_node(node)
    return _program(program, root, graph, env, [(s, env.get(a) if isinstance(a, fx.Node) else a) for s, a in kept])


def _call(
    root: torch.nn.Module,
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    lowered: Lowered,
    module: LoweredBackendModule,
    partition: Partition,
) -> None:
    name = f"lowered_module_{len(list(root.children()))}"
    root.add_module(name, module)
    args = [
        env[source] if isinstance(source, fx.Node) else _size_node(graph, env, source, partition)
        for source in lowered.inputs
    ]
    call = graph.call_function(executorch_call_delegate, (_get_attr(graph, name), *args))
    call.meta["val"] = tuple(n.meta["val"] for n in lowered.outputs)
    call.meta["debug_handle"] = 0
    for index, node in enumerate(lowered.outputs):
        item = graph.call_function(__import__("operator").getitem, (call, index))
        item.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "debug_handle")}
        env[node] = item


def _get_attr(graph: fx.Graph, name: str) -> fx.Node:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph does not own its module yet
        return graph.get_attr(name)


def _size_node(graph: fx.Graph, env: dict[fx.Node, fx.Node], symbol: Size, partition: Partition) -> fx.Node:
    """A node that computes a symbol from the program's inputs."""
    for node in partition.placeholders.user:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and size_of(val) == symbol:
            return env[node]
        if isinstance(val, torch.Tensor):
            for dim, size in enumerate(val.shape):
                if size_of(size) == symbol:
                    result = graph.call_function(torch.ops.aten.sym_size.int, (env[node], dim))
                    result.meta["val"] = size
                    return result
    for old, new in env.items():
        if isinstance(old.meta.get("val"), torch.SymInt) and size_of(old.meta["val"]) == symbol:
            return new
    from flexpte.exporter.errors import Unsupported

    raise Unsupported(f"size {symbol} is the size of no input", fix="Pass a tensor of that size to forward")


def _program(
    program: ExportedProgram,
    root: torch.nn.Module,
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    outputs: list[Any],
) -> ExportedProgram:
    signature = program.graph_signature
    by_name = {old.name: new for old, new in env.items() if old.op == "placeholder"}
    mutated = {s.target for s, _ in outputs if s.kind is OutputKind.BUFFER_MUTATION}
    input_specs, state_dict, constants = [], {}, {}
    for spec in signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind is not InputKind.USER_INPUT and not node.users and spec.target not in mutated:
            graph.erase_node(node)
            continue
        input_specs.append(replace(spec, arg=replace(spec.arg, name=node.name)))
        if spec.target in program.state_dict:
            state_dict[spec.target] = program.state_dict[spec.target]
        elif spec.target in program.constants:
            constants[spec.target] = program.constants[spec.target]
    output_specs = []
    for spec, node in outputs:
        arg = (
            TensorArgument(node.name)
            if isinstance(node, fx.Node) and isinstance(spec.arg, TensorArgument)
            else spec.arg
        )
        output_specs.append(type(spec)(spec.kind, arg, spec.target))
    module = fx.GraphModule(root, graph)
    module.meta.update(program.graph_module.meta)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(input_specs, output_specs),
        state_dict=state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=None,
        constants=constants,
        verifiers=[program.verifier],
    )


def edge_program(program: ExportedProgram) -> EdgeProgramManager:
    """The residual program in Edge dialect; nothing is converted where only delegate calls are left."""
    config = EdgeCompileConfig(_check_ir_validity=False)
    import operator

    plain = all(
        n.op != "call_function" or n.target in (executorch_call_delegate, operator.getitem, torch.ops.aten.sym_size.int)
        for n in program.graph.nodes
    )
    if not plain:
        return to_edge(program, compile_config=config)
    edge = ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=None,
        constants=program.constants,
        verifiers=[EXIREdgeDialectVerifier(edge_compile_config=config, class_only=True)],
    )
    return EdgeProgramManager(edge, compile_config=config)


def emit(manager: EdgeProgramManager, metadata: dict[str, Any]) -> list[bytes]:
    """The pieces of the file, in order; weights as :class:`WeightBytes`."""
    text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    manager._named_data_store.add_named_data(METADATA_KEY, text.encode())
    result = manager.to_executorch(ExecutorchBackendConfig(emit_mutable_buffer_names=True))
    return list(result._pte_data._buffers)


def contents(pieces: list[bytes]) -> Iterator[bytes | memoryview]:
    """What to write for each piece."""
    for piece in pieces:
        yield piece.data if isinstance(piece, WeightBytes) else piece


def write(pieces: list[bytes], path: Path) -> None:
    """Write the file: whole or not at all."""
    write_whole(path, contents(pieces))
