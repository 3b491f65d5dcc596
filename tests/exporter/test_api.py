"""``flexpte.export``: arguments, the file it writes, the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from torch import nn

import flexpte
from flexpte.exporter import emit
from flexpte.exporter.api import STAGES
from flexpte.exporter.errors import Unsupported
from flexpte.models.decoder import example_inputs_and_dynamic_shapes
from tests.exporter.test_partition import CAPACITY, CONFIG, Split, decoder

INPUTS = (torch.randn(2, 3),)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("model", INPUTS), TypeError, "module must be a torch.nn.Module, got str"),
        ((nn.Linear(3, 4), INPUTS[0]), TypeError, "example_inputs must be a tuple"),
        ((nn.Linear(3, 4), list(INPUTS)), TypeError, "got list"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flexpte.export(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"delegate": "all"}, ValueError, "'full', 'attention', 'none', got 'all'"),
        ({"kv_dtype": "int8"}, Unsupported, "kv_dtype='int8'"),
        ({"quantize": "int4"}, Unsupported, "quantize='int4'"),
        ({"metadata": {"a": {1, 2}}}, TypeError, "JSON"),
        ({"metadata": ["a"]}, TypeError, "must be a dict"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flexpte.export(nn.Linear(3, 4), INPUTS, **options)


def exported(delegate: str, **options: Any) -> Any:
    model = decoder(CONFIG)
    inputs, shapes = example_inputs_and_dynamic_shapes(model.config, CAPACITY)
    return flexpte.export(model, inputs, shapes, delegate=delegate, **options)


def test_a_decoder_is_one_delegate_call_and_nothing_else() -> None:
    stages: list[tuple[str, int, int]] = []
    result = exported("full", metadata={"name": "tiny"}, progress=lambda *stage: stages.append(stage))
    file = deserialize_pte_binary(result.buffer)
    (plan,) = file.program.execution_plan
    assert [type(i.instr_args).__name__ for i in plan.chains[0].instructions] == ["DelegateCall"]
    assert [d.id for d in plan.delegates] == ["FlexpteBackend"]
    assert not file.mutable_data
    metadata = json.loads(file.named_data.buffers[file.named_data.pte_data["flexpte.metadata"].buffer_index])
    assert metadata["name"] == "tiny"
    assert metadata["flexpte_version"] == flexpte.__version__
    assert len(metadata["caches"]) == 4
    assert stages[-1] == ("emit", len(STAGES), len(STAGES))


def test_weights_are_in_the_file_once_and_untouched() -> None:
    model = decoder(CONFIG)
    inputs, shapes = example_inputs_and_dynamic_shapes(model.config, CAPACITY)
    result = flexpte.export(model, inputs, shapes)
    data = result.buffer
    for parameter in model.parameters():
        assert data.count(parameter.detach().numpy().tobytes()) == 1


def test_saved_file_equals_buffer_and_leaves_nothing_else(tmp_path: Path) -> None:
    result = exported("full")
    result.save(tmp_path / "m.pte")
    assert (tmp_path / "m.pte").read_bytes() == result.buffer
    assert [p.name for p in tmp_path.iterdir()] == ["m.pte"]


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = flexpte.export(nn.Linear(3, 4), INPUTS)
    (tmp_path / "m.pte").write_bytes(b"old")

    def broken(pieces: list[bytes]) -> Any:
        yield b"half"
        raise OSError("no space left")

    monkeypatch.setattr(emit, "contents", broken)
    with pytest.raises(OSError, match="no space left"):
        result.save(tmp_path / "m.pte")
    assert [p.name for p in tmp_path.iterdir()] == ["m.pte"]
    assert (tmp_path / "m.pte").read_bytes() == b"old"


def test_attention_mode_leaves_the_rest_to_operators() -> None:
    result = exported("attention")
    (plan,) = deserialize_pte_binary(result.buffer).program.execution_plan
    kinds = [type(i.instr_args).__name__ for i in plan.chains[0].instructions]
    assert kinds.count("DelegateCall") == 2
    assert any(o.name.startswith("aten::") for o in plan.operators)


def test_what_is_refused_runs_between_delegate_calls() -> None:
    result = flexpte.export(Split(), INPUTS)
    (plan,) = deserialize_pte_binary(result.buffer).program.execution_plan
    kinds = [type(i.instr_args).__name__ for i in plan.chains[0].instructions]
    assert kinds == ["DelegateCall", "KernelCall", "DelegateCall"]
    assert "cumsum" in str(result.report)


def test_report_reads_well() -> None:
    text = str(exported("full").report)
    assert "1 delegate call" in text
    assert "mask_mod: kv_idx <= c0[q_idx]" in text
    assert "layers.0.self_attn.k_cache" in text
