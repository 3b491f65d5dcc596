"""Files appear whole or not at all, and errors name the file that was asked for."""

from __future__ import annotations

import os

import pytest

from flexpte.exporter.files import check_writable, write_whole


def test_the_pieces_replace_what_was_there(tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(b"old")
    check_writable(path)
    assert path.read_bytes() == b"old"
    write_whole(path, [b"new", memoryview(b"er")])
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(b"old")

    def pieces():
        yield b"new"
        raise MemoryError

    with pytest.raises(MemoryError):
        write_whole(path, pieces())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        for attempt in (check_writable, lambda path: write_whole(path, [b""])):
            with pytest.raises(OSError, match=r"no regular file|is a folder"):
                attempt(path)
    assert (tmp_path / "pipe").is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("name", ["missing/model.pte", "file/model.pte", "x" * 300])
def test_errors_name_the_file(name, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for attempt in (check_writable, lambda path: write_whole(path, [b""])):
        with pytest.raises(OSError, match=name[:10]) as caught:
            attempt(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
