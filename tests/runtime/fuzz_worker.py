"""Loads and runs mutated files in a process of its own: a crash ends it, and that is the failure.

    python fuzz_worker.py FILE KIND FIRST LAST

KIND is ``byte`` (mutation i changes byte i of the flatbuffer, in a way that i decides), ``word`` (four bytes) or
``cut`` (the first i bytes only). Prints the number of the mutation before it is tried, and a summary at the end.
"""

from __future__ import annotations

import random
import sys

import numpy as np

import flexpte

DTYPES = {"bfloat16": "float32"}
WORDS = (0, 1, 2, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000000)


def mutated(data: bytes, kind: str, number: int) -> bytes:
    if kind == "cut":
        return data[:number]
    chance = random.Random(f"{kind}{number}")
    if kind == "byte":
        at = number % len(data)
        return data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :]
    at = 4 * (number % (len(data) // 4))
    word = chance.choice([*WORDS, chance.randrange(2**32)])
    return data[:at] + word.to_bytes(4, "little") + data[at + 4 :]


def run(data: bytes) -> None:
    program = flexpte.load(data, num_threads=1)
    session = program.session()
    _ = program.report
    for method in program.methods.values():
        inputs = []
        for info in method.inputs:
            if info.kind == "tensor":
                shape = tuple(min(size, 7) if info.dynamic else size for size in info.shape)
                if int(np.prod(shape, dtype=object)) > 1 << 22:
                    return
                inputs.append(np.zeros(shape, DTYPES.get(info.dtype or "", info.dtype)))
            else:
                inputs.append({"int": 1, "bool": True, "float": 1.0}.get(info.kind))
        session.run(method.name, *inputs)


def main() -> None:
    path, kind, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with open(path, "rb") as file:
        data = file.read()
    refused = 0
    for number in range(first, last):
        print(number, flush=True)
        try:
            run(mutated(data, kind, number))
        except flexpte.FlexpteError as error:
            if not str(error):
                raise
            refused += 1
    print(f"done {refused} {last - first}")


if __name__ == "__main__":
    main()
