"""Sessions: state, independence, lifetimes, memory."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import torch

import flexpte
from tests.runtime import stock


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_buffers_keep_their_values_and_reset_restores_the_initial_ones(counter_bytes: bytes) -> None:
    session = flexpte.load(counter_bytes).session()
    x = np.array([1.0, 2.0, 3.0], np.float32)
    initial = np.array([5.0, 7.0, -1.0], np.float32)
    for _ in range(2):
        total = np.zeros(3, np.float32)
        for step in range(1, 4):
            steps, got_total = session.run("forward", x)
            total += x * (initial + step)
            np.testing.assert_array_equal(steps, initial + step)
            np.testing.assert_array_equal(got_total, total)
        session.reset()


def test_sessions_are_independent(counter_bytes: bytes) -> None:
    program = flexpte.load(counter_bytes)
    first, second = program.session(), program.session()
    x = np.ones(3, np.float32)
    for _ in range(3):
        first.run("forward", x)
    steps, _ = second.run("forward", x)
    np.testing.assert_array_equal(steps, np.array([6.0, 8.0, 0.0], np.float32))


def test_two_programs_alive_at_once(counter_bytes: bytes, mlp: tuple[stock.Mlp, bytes]) -> None:
    module, data = mlp
    one, two = flexpte.load(counter_bytes).session(), flexpte.load(data).session()
    x = torch.randn(2, 16)
    one.run("forward", np.ones(3, np.float32))
    torch.testing.assert_close(two.run("forward", x)[0], module(x), rtol=1e-4, atol=1e-5)
    steps, _ = one.run("forward", np.ones(3, np.float32))
    assert steps[0] == 7.0


def test_outputs_outlive_session_and_program(mlp: tuple[stock.Mlp, bytes]) -> None:
    module, data = mlp
    x = torch.randn(4, 16)
    program = flexpte.load(data)
    session = program.session()
    (out,) = session.run("forward", x)
    session.run("forward", torch.zeros(10, 16))
    del session, program
    gc.collect()
    torch.testing.assert_close(out, module(x), rtol=1e-4, atol=1e-5)


def test_threads_that_share_a_session_take_turns(counter_bytes: bytes) -> None:
    session = flexpte.load(counter_bytes).session()
    x = np.zeros(3, np.float32)

    def work() -> None:
        for _ in range(100):
            session.run("forward", x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps, _ = session.run("forward", x)
    assert steps[0] == 5.0 + 401


def test_load_run_unload_keeps_memory_flat(mlp_path: Path, decoder_bytes: bytes) -> None:
    x = np.zeros((3, 16), np.float32)
    tokens, input_pos = np.zeros((1, 4), np.int64), np.arange(4)

    def cycle(count: int) -> None:
        for _ in range(count):
            flexpte.load(mlp_path).session().run("forward", x)
            flexpte.load(decoder_bytes).session().run("forward", tokens, input_pos)
        gc.collect()

    cycle(50)
    before = resident_bytes()
    cycle(200)
    assert resident_bytes() - before < 2 << 20
