"""Fewer, larger instructions: chains of elementwise work become one expression, copies disappear.

Every pass takes and returns instructions; views may be added, values never change meaning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flexpte.exporter import ir, views
from flexpte.exporter.ir import Elementwise, Instruction, Op, Size, Value
from flexpte.exporter.lower import Lowering
from flexpte.exporter.scalars import ExpressionBuilder
from flexpte.exporter.symbols import plus, same, times

MAX_NODES = 48
MAX_INPUTS = 12
# Computed again for every repetition, these would cost more than the memory traffic they save.
_CHEAP = frozenset({"Input", "Constant", "Scalar", "Cast", "RoundTo", "Neg", "Add", "Sub", "Mul", "LogicalNot"})
# Instructions that round their float32 accumulator to whatever floating dtype their result has.
_ACCUMULATING = (ir.Linear, ir.MatMul, ir.RmsNorm, ir.LayerNorm)


def fuse(b: Lowering) -> None:
    """Run all passes on a lowered region."""
    b.instructions = without_dead(b, b.instructions)
    b.instructions = written_out_norms(b, b.instructions)
    b.instructions = without_dead(b, b.instructions)
    b.instructions = retargeted_copies(b, b.instructions)
    b.instructions = weighted_norms(b, b.instructions)
    b.instructions = fused_elementwise(b, b.instructions)
    b.instructions = split_at_cats(b, b.instructions)
    b.instructions = fused_elementwise(b, b.instructions)
    b.instructions = retargeted_copies(b, b.instructions)
    b.instructions = without_dead(b, b.instructions)


class _Uses:
    """Which instructions read and write each storage, by position."""

    def __init__(self, b: Lowering, instructions: Iterable[Instruction | None]) -> None:
        self.b = b
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.writers: dict[int, set[int]] = defaultdict(set)
        for position, instruction in enumerate(instructions):
            if instruction is not None:
                self.add(position, instruction.op)

    def add(self, position: int, op: Op) -> None:
        """Enter an instruction."""
        for number in op.reads():
            self.readers[self.b.values[number].storage].add(position)
        for number in op.writes():
            self.writers[self.b.values[number].storage].add(position)

    def remove(self, position: int, op: Op) -> None:
        """Take an instruction out."""
        for number in op.reads():
            self.readers[self.b.values[number].storage].discard(position)
        for number in op.writes():
            self.writers[self.b.values[number].storage].discard(position)

    def only_writer(self, storage: int) -> int | None:
        """The one instruction that writes an arena storage, if there is just one."""
        if self.b.storages[storage].kind != "Arena" or len(self.writers[storage]) != 1:
            return None
        return next(iter(self.writers[storage]))


def without_dead(b: Lowering, instructions: list[Instruction]) -> list[Instruction]:
    """Without those whose results nobody reads."""
    read: set[int] = set()
    kept = []
    for instruction in reversed(instructions):
        written = {b.values[n].storage for n in instruction.op.writes()}
        if any(b.storages[s].kind != "Arena" or s in read for s in written):
            read.update(b.values[n].storage for n in instruction.op.reads())
            kept.append(instruction)
    return kept[::-1]


def _single(
    b: Lowering, uses: _Uses, instructions: list[Instruction], number: int, ops: set[str]
) -> Elementwise | None:
    """The writer of a value, if it is elementwise and computes nothing but these operations."""
    writer = uses.only_writer(b.values[number].storage)
    op = instructions[writer].op if writer is not None else None
    if not isinstance(op, Elementwise) or len(op.inputs) != 1 or op.captures or op.scalars:
        return None
    done = [n.op for n in op.expression.nodes if n.op not in ("Input", "Constant")]
    return op if len(done) == 1 and done[0] in ops else None


def _squares(op: Elementwise) -> bool:
    nodes = op.expression.nodes
    if nodes[-1].op == "Mul":
        return nodes[-1].args == (0, 0) and nodes[0].op == "Input"
    return nodes[-1].op == "Square"


def written_out_norms(b: Lowering, instructions: list[Instruction]) -> list[Instruction]:
    """x * rsqrt(mean(x^2) + eps) as one RmsNorm without weight."""
    uses = _Uses(b, instructions)
    result = list(instructions)
    for position, instruction in enumerate(instructions):
        op = instruction.op
        if not isinstance(op, Elementwise) or len(op.inputs) != 2:
            continue
        if [n.op for n in op.expression.nodes] != ["Input", "Input", "Mul"]:
            continue
        for x, inverse in (op.inputs, op.inputs[::-1]):
            root = _single(b, uses, instructions, inverse, {"Rsqrt"})
            shifted = root and _single(b, uses, instructions, root.inputs[0], {"Add"})
            eps = [n.value_float for n in shifted.expression.nodes if n.op == "Constant"] if shifted else []
            if shifted is None or len(eps) != 1:
                continue
            writer = uses.only_writer(b.values[shifted.inputs[0]].storage)
            mean = instructions[writer].op if writer is not None else None
            if not isinstance(mean, ir.Reduce) or mean.op != "Mean" or mean.num_dims != 1:
                continue
            square = _single(b, uses, instructions, mean.x, {"Square", "Mul"})
            if square is None or not _squares(square):
                continue
            # Square, mean and product run over the same rows of the same tensor.
            base = views.normalised(b.values[x])
            over = b.values[square.out]
            if views.normalised(b.values[square.inputs[0]]) != base or b.values[mean.x] != over:
                continue
            row = b.values[inverse]
            if base.sizes != over.sizes or not same(row.strides[-1], 0) or not _rows(base):
                continue
            result[position] = Instruction(
                ir.RmsNorm(_before_cast(b, uses, instructions, x), op.out, eps[0]), instruction.name
            )
            break
    return result


def _before_cast(b: Lowering, uses: _Uses, instructions: list[Instruction], number: int) -> int:
    """What a float32 copy of a narrower floating value was made from, to be read instead."""
    writer = uses.only_writer(b.values[number].storage)
    op = instructions[writer].op if writer is not None else None
    if isinstance(op, Elementwise) and len(op.inputs) == 1 and len(op.expression.nodes) == 1 and op.out == number:
        source = b.values[op.inputs[0]]
        if source.dtype in ("F16", "BF16") and _rows(source) and b.storages[source.storage].kind != "State":
            return op.inputs[0]
    return number


def _rows(value: Value) -> bool:
    """Whether rows are contiguous and evenly spaced."""
    lead = replace(value, sizes=value.sizes[:-1], strides=value.strides[:-1])
    return (
        bool(value.sizes) and same(value.strides[-1], 1) and views.reshape(lead, [views.num_elements(lead)]) is not None
    )


def weighted_norms(b: Lowering, instructions: list[Instruction]) -> list[Instruction]:
    """RmsNorm without a weight, then a product with a row: one RmsNorm with that weight."""
    uses = _Uses(b, instructions)
    result: list[Instruction | None] = list(instructions)
    for position, instruction in enumerate(instructions):
        op = instruction.op
        if not isinstance(op, Elementwise) or len(op.inputs) != 2:
            continue
        if [n.op for n in op.expression.nodes if n.op not in ("Input", "Cast")] != ["Mul"]:
            continue
        for x, weight in (op.inputs, op.inputs[::-1]):
            writer = uses.only_writer(b.values[x].storage)
            norm = instructions[writer].op if writer is not None else None
            row = b.values[weight]
            if (
                not isinstance(norm, ir.RmsNorm)
                or norm.weight >= 0
                or norm.out != x
                or uses.readers[b.values[x].storage] != {position}
                or row.dtype not in ir.FLOATING
                or not same(row.strides[-1], 1)
                or not all(same(s, 0) for s in row.strides[:-1])
                or b.storages[row.storage].kind != "Constant"
            ):
                continue
            number = b.number(replace(row, sizes=row.sizes[-1:], strides=row.strides[-1:]))
            assert writer is not None
            result[position] = Instruction(replace(norm, weight=number, out=op.out), instruction.name)
            result[writer] = None
            break
    return [i for i in result if i is not None]


@dataclass(frozen=True)
class _Mapping:
    """How a view of a value's storage runs over that value: per dimension of the view, one of the value."""

    dims: tuple[int | None, ...]  # None: repeats, or has size 1
    starts: tuple[int, ...]  # of the value's dimensions
    repeats: bool
    whole: bool  # reads each element exactly once


def mapping(base: Value, view: Value) -> _Mapping | None:
    """Express ``view`` by dimensions of ``base``; None where it is not made of whole or narrowed ones."""
    starts = [0] * len(base.sizes)
    rest = plus(view.offset, times(-1, base.offset))
    if not same(rest, 0):
        if not isinstance(rest, int) or rest < 0:
            return None
        steps = [
            (s, d) for d, s in enumerate(base.strides) if isinstance(s, int) and s > 0 and not same(base.sizes[d], 1)
        ]
        for stride, dim in sorted(steps, reverse=True):
            starts[dim], rest = divmod(rest, stride)
            size = base.sizes[dim]
            if isinstance(size, int) and starts[dim] >= size:
                return None
        if rest:
            return None
    dims: list[int | None] = []
    repeats, whole = False, not any(starts)
    used: set[int] = set()
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if same(size, 1):
            dims.append(None)
            continue
        if same(stride, 0):
            dims.append(None)
            repeats = True
            continue
        for dim, (full, step) in enumerate(zip(base.sizes, base.strides, strict=True)):
            if dim in used or same(full, 1) or not same(stride, step):
                continue
            if same(size, full) and starts[dim] == 0:
                break
            if isinstance(size, int) and isinstance(full, int) and starts[dim] + size <= full:
                whole = False
                break
        else:
            return None
        used.add(dim)
        dims.append(dim)
    whole = whole and not repeats and all(d in used or same(s, 1) for d, s in enumerate(base.sizes))
    return _Mapping(tuple(dims), tuple(starts), repeats, whole)


def composed(operand: Value, over: _Mapping, sizes: tuple[Size, ...]) -> Value:
    """What ``operand``, of the base's sizes, is when run over the view that ``over`` maps."""
    offset = operand.offset
    for start, stride in zip(over.starts, operand.strides, strict=True):
        offset = plus(offset, times(start, stride))
    strides = tuple(0 if d is None else operand.strides[d] for d in over.dims)
    return replace(operand, sizes=sizes, strides=strides, offset=offset)


def fused_elementwise(b: Lowering, instructions: list[Instruction]) -> list[Instruction]:
    """Producers with one elementwise reader move into it, as long as the expression stays small."""
    result: list[Instruction | None] = list(instructions)
    uses = _Uses(b, result)
    for position, instruction in enumerate(instructions):
        op: Op = instruction.op
        if not isinstance(op, Elementwise):
            continue
        tried: set[int] = set()
        while True:
            candidates = (
                writer
                for n in op.inputs
                if (writer := uses.only_writer(b.values[n].storage)) is not None and writer not in tried
            )
            writer = next(candidates, None)
            if writer is None:
                break
            tried.add(writer)
            producer = result[writer]
            assert producer is not None
            if not isinstance(producer.op, Elementwise) or writer >= position:
                continue
            if uses.readers[b.values[producer.op.out].storage] != {position} or _overwritten(
                b, uses, producer.op, writer, position
            ):
                continue
            merged = _merged(b, producer.op, op)
            if merged is None:
                continue
            uses.remove(writer, producer.op)
            uses.remove(position, op)
            op = merged
            uses.add(position, op)
            result[writer] = None
            result[position] = Instruction(op, instruction.name)
    return [i for i in result if i is not None]


def _overwritten(b: Lowering, uses: _Uses, producer: Op, begin: int, end: int) -> bool:
    """Whether something that the producer reads is written before the reader is done."""
    for number in producer.reads():
        storage = b.values[number].storage
        if b.storages[storage].kind == "State" and any(begin < w <= end for w in uses.writers[storage]):
            return True
    return False


def _merged(b: Lowering, producer: Elementwise, consumer: Elementwise) -> Elementwise | None:
    base = b.values[producer.out]
    e = ExpressionBuilder()
    inputs: list[int] = []
    captures = list(consumer.captures)
    if any(b.values[c].storage == base.storage for c in captures):
        return None
    leaves: dict[int, int] = {}
    first_scalar = len(consumer.scalars)
    capture_numbers = {}
    for index, number in enumerate(producer.captures):
        if number not in captures:
            captures.append(number)
        capture_numbers[index] = captures.index(number)

    def operand(number: int, dtype_type: str) -> int:
        if number not in inputs:
            inputs.append(number)
        return e.input(inputs.index(number), dtype_type)

    types = {n.index: n.type for n in consumer.expression.nodes if n.op == "Input"}
    producer_types = {n.index: n.type for n in producer.expression.nodes if n.op == "Input"}
    for index, number in enumerate(consumer.inputs):
        if index not in types:
            continue
        view = b.values[number]
        if view.storage != base.storage:
            leaves[index] = operand(number, types[index])
            continue
        over = mapping(base, view)
        if over is None or view.dtype != base.dtype:
            return None
        if over.repeats and not all(n.op in _CHEAP for n in producer.expression.nodes):
            return None
        inner = {
            i: operand(b.number(composed(b.values[p], over, view.sizes)), producer_types[i])
            for i, p in enumerate(producer.inputs)
            if i in producer_types
        }
        value = e.inline(producer.expression, inner, first_scalar, capture_numbers)
        leaves[index] = e.narrowed(value, base.dtype)
    expression = e.build(e.inline(consumer.expression, leaves, 0, {i: i for i in range(len(consumer.captures))}))
    if len(expression.nodes) > MAX_NODES or len(inputs) > MAX_INPUTS:
        return None
    return Elementwise(expression, tuple(inputs), consumer.out, (*consumer.scalars, *producer.scalars), tuple(captures))


def split_at_cats(b: Lowering, instructions: list[Instruction]) -> list[Instruction]:
    """Elementwise work on a concatenation is done part by part, so that nothing is concatenated."""
    uses = _Uses(b, instructions)
    replaced: dict[int, list[Instruction]] = {}
    for position, instruction in enumerate(instructions):
        op = instruction.op
        if not isinstance(op, Elementwise) or op.captures:
            continue
        for number in op.inputs:
            parts = _cat_parts(b, uses, instructions, number, position, replaced)
            if parts is None:
                continue
            dim, pieces = parts
            split = []
            start: Size = 0
            for writer, length in pieces:
                part = b.number(_part_storage(b, b.values[number], dim, length))
                cut = {
                    n: part if n == number else b.number(views.narrow(b.values[n], dim, start, length))
                    for n in (*op.inputs, op.out)
                }
                source = instructions[writer]
                replaced[writer] = [Instruction(_writing(source.op, _out(source), part), source.name)]
                split.append(
                    Instruction(
                        replace(op, inputs=tuple(cut[n] for n in op.inputs), out=cut[op.out]),
                        instruction.name,
                    )
                )
                start = plus(start, length)
            replaced[position] = split
            break
    return [i for p, instruction in enumerate(instructions) for i in replaced.get(p, [instruction])]


def _out(instruction: Instruction) -> int:
    (number,) = instruction.op.writes()
    return number


def _part_storage(b: Lowering, whole: Value, dim: int, length: Size) -> Value:
    sizes = (*whole.sizes[:dim], length, *whole.sizes[dim + 1 :])
    return b.values[b.new(sizes, whole.dtype)]


def _cat_parts(
    b: Lowering,
    uses: _Uses,
    instructions: list[Instruction],
    number: int,
    position: int,
    replaced: dict[int, list[Instruction]],
) -> tuple[int, list[tuple[int, Size]]] | None:
    """Dimension of ``number`` and (writer, length) of each part of a concatenation read here only, else None."""
    view = b.values[number]
    writers = sorted(uses.writers[view.storage])
    if b.storages[view.storage].kind != "Arena" or len(writers) < 2 or uses.readers[view.storage] != {position}:
        return None
    if not views.is_contiguous(view) or not same(view.offset, 0) or any(w in replaced for w in writers):
        return None
    op = instructions[position].op
    if sum(b.values[n].storage == view.storage for n in op.reads()) != 1:
        return None
    for dim, size in enumerate(view.sizes):
        pieces: list[tuple[int, Size]] = []
        start: Size = 0
        for writer in writers:
            part = instructions[writer].op
            if not isinstance(part, Elementwise):
                return None
            target = b.values[part.out]
            if len(target.sizes) != len(view.sizes):
                return None
            if views.normalised(target) != views.normalised(views.narrow(view, dim, start, target.sizes[dim])):
                break
            pieces.append((writer, target.sizes[dim]))
            start = plus(start, target.sizes[dim])
        if len(pieces) == len(writers) and same(start, size):
            return dim, pieces
    return None


def retargeted_copies(b: Lowering, instructions: list[Instruction]) -> list[Instruction]:
    """Where a result is only copied, its instruction writes the copy itself."""
    result: list[Instruction | None] = list(instructions)
    uses = _Uses(b, result)
    for position, instruction in enumerate(instructions):
        copy = instruction.op
        if not isinstance(copy, Elementwise) or len(copy.inputs) != 1 or len(copy.expression.nodes) != 1:
            continue
        source, target = b.values[copy.inputs[0]], b.values[copy.out]
        if b.storages[source.storage].kind != "Arena" or b.storages[target.storage].kind == "State":
            continue
        if uses.readers[source.storage] != {position}:
            continue
        moved = _moved_writes(b, result, sorted(uses.writers[source.storage]), source, target)
        if moved is None:
            continue
        uses.remove(position, copy)
        result[position] = None
        for writer, op in moved.items():
            old = result[writer]
            assert old is not None
            uses.remove(writer, old.op)
            uses.add(writer, op)
            result[writer] = Instruction(op, old.name)
    return [i for i in result if i is not None]


def _moved_writes(
    b: Lowering, instructions: list[Instruction | None], writers: list[int], source: Value, target: Value
) -> dict[int, Op] | None:
    """The writers of a storage, writing where a copy of it goes; None unless all of them can."""
    moved: dict[int, Op] = {}
    for writer in writers:
        instruction = instructions[writer]
        assert instruction is not None
        op = instruction.op
        written = [n for n in op.writes() if b.values[n].storage == source.storage]
        if len(written) != 1 or any(b.values[n].storage in (source.storage, target.storage) for n in op.reads()):
            return None
        base = b.values[written[0]]
        if len(writers) == 1:  # the copy may permute what the one instruction wrote
            over = mapping(base, source)
            if over is None or not over.whole:
                return None
            order = {d: i for i, d in enumerate(over.dims) if d is not None}
            strides = tuple(target.strides[order[d]] if d in order else 0 for d in range(len(base.sizes)))
            place = replace(target, sizes=base.sizes, strides=strides)
        else:  # parts of a concatenation that is copied as it is
            over = mapping(source, base)
            if over is None or not views.is_contiguous(source) or not same(source.offset, 0):
                return None
            place = composed(target, over, base.sizes)
        if not _writable(op, base, place):
            return None
        moved[writer] = _writing(op, written[0], b.number(place))
    return moved if moved else None


def _writing(op: Op, old: int, new: int) -> Op:
    return replace(op, **{name: new for name in op.WRITES if getattr(op, name) == old})


def _writable(op: Op, old: Value, new: Value) -> bool:
    """Whether an instruction may write its result as ``new`` instead of ``old``."""
    if old.dtype != new.dtype and not (
        isinstance(op, _ACCUMULATING) and old.dtype in ir.FLOATING and new.dtype in ir.FLOATING
    ):
        return False
    if isinstance(op, Elementwise | ir.MatMul | ir.Gather):
        return True
    rows = bool(new.sizes) and same(new.strides[-1], 1)
    if isinstance(op, ir.FlexAttention):
        return rows
    if isinstance(op, ir.Linear | ir.RmsNorm | ir.LayerNorm | ir.Softmax):
        return _rows(new)
    return views.is_contiguous(new)
