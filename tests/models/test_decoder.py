"""The decoder against transformers, on tiny random models of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flexpte.models.checkpoints import load_checkpoint
from flexpte.models.config import DecoderConfig, Llama3Scaling, Rotary
from flexpte.models.decoder import Decoder, example_inputs_and_dynamic_shapes, inverse_frequencies
from tests.models.tiny import FAMILIES, random_tokens, save, transformers_model

NUM_TOKENS = 40  # several times the windows
NUM_PREFILL = 34

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save(transformers_model(request.param), folder)


def poison(decoder: Decoder) -> None:
    """A slot that nobody wrote must not matter."""
    for block in decoder.layers:
        block.self_attn.k_cache.fill_(1e2)
        block.self_attn.v_cache.fill_(1e4)


@torch.no_grad()
def run(decoder: Decoder, tokens: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """All logits [T, V], feeding ``tokens`` in pieces of the given lengths."""
    rows, start = [], 0
    for length in pieces:
        positions = torch.arange(start, start + length)
        rows.append(decoder(tokens[:, start : start + length], positions)[0])
        start += length
    return torch.cat(rows)


def test_float32_prefill_and_decode_equal_transformers(family: tuple[str, Path]) -> None:
    name, folder = family
    tokens = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        expected = transformers_model(name)(tokens).logits[0]
    decoder = load_checkpoint(folder).decoder(NUM_TOKENS + 3, logits="all")
    poison(decoder)
    actual = run(decoder, tokens, [NUM_PREFILL] + [1] * (NUM_TOKENS - NUM_PREFILL))
    assert expected.std() > 0.05  # else the comparison says nothing
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pieces", [[NUM_TOKENS], [1] * 12 + [28], [7, 8, 9, 1, 15]])
def test_any_cut_into_calls_gives_the_same_rows(family: tuple[str, Path], pieces: list[int]) -> None:
    _, folder = family
    tokens = random_tokens(NUM_TOKENS, seed=1)
    decoder = load_checkpoint(folder).decoder(NUM_TOKENS, logits="all")
    whole = run(decoder, tokens, [NUM_PREFILL, NUM_TOKENS - NUM_PREFILL])
    torch.testing.assert_close(run(decoder, tokens, pieces), whole, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_transformers(family: tuple[str, Path], dtype: torch.dtype) -> None:
    name, folder = family
    tokens = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        expected = transformers_model(name)(tokens).logits[0]
        theirs = transformers_model(name).to(dtype)(tokens).logits[0].float()
    decoder = load_checkpoint(folder, dtype).decoder(NUM_TOKENS, logits="all")
    ours = run(decoder, tokens, [NUM_PREFILL] + [1] * (NUM_TOKENS - NUM_PREFILL)).float()
    their_error, our_error = (
        (theirs - expected).square().mean().sqrt(),
        (ours - expected).square().mean().sqrt(),
    )
    assert their_error > 0
    assert our_error <= 1.25 * their_error


def test_last_logits_are_the_last_row(family: tuple[str, Path]) -> None:
    _, folder = family
    model = load_checkpoint(folder)
    tokens, positions = random_tokens(9), torch.arange(9)
    with torch.no_grad():
        last = model.decoder(16)(tokens, positions)
        rows = model.decoder(16, logits="all")(tokens, positions)
    assert last.shape == (1, 1, model.config.vocab_size)
    torch.testing.assert_close(last, rows[:, -1:], atol=1e-5, rtol=0)


def test_a_second_conversation_does_not_see_the_first(family: tuple[str, Path]) -> None:
    _, folder = family
    decoder = load_checkpoint(folder).decoder(NUM_TOKENS, logits="all")
    tokens = random_tokens(12, seed=5)
    alone = run(decoder, tokens, [12])
    run(decoder, random_tokens(NUM_TOKENS, seed=6), [NUM_TOKENS])
    torch.testing.assert_close(run(decoder, tokens, [5, 7]), alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_window_sees_exactly_its_tokens(tmp_path: Path, window: int) -> None:
    folder = save(transformers_model("mistral", num_hidden_layers=1, sliding_window=window), tmp_path)
    decoder = load_checkpoint(folder).decoder(32)
    tokens = random_tokens(20)
    with torch.no_grad():
        base = decoder(tokens, torch.arange(20))
        for position in range(20):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % 120
            differs = not torch.equal(decoder(changed, torch.arange(20)), base)
            assert differs == (position > 19 - window), position


def test_llama3_frequencies_follow_the_published_bands() -> None:
    rotary = Rotary(5e5, 128, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain = inverse_frequencies(Rotary(5e5, 128)).double()
    scaled = inverse_frequencies(rotary).double()
    wavelength = 2 * torch.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    torch.testing.assert_close(scaled[short], plain[short], rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-6, atol=0)
    between = ~short & ~long
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


def test_casting_the_module_keeps_the_frequencies(tmp_path: Path) -> None:
    model = load_checkpoint(save(transformers_model("llama"), tmp_path))
    decoder = model.decoder(16)
    expected = decoder.inv_freq_0.clone()
    decoder.to(torch.bfloat16)
    assert decoder.embed_tokens.weight.dtype == torch.bfloat16
    assert torch.equal(decoder.inv_freq_0, expected)


def test_weights_are_shared_between_decoders_and_with_a_tied_head(tmp_path: Path) -> None:
    model = load_checkpoint(save(transformers_model("qwen3"), tmp_path))
    first, second = model.decoder(8), model.decoder(16, logits="all")
    pointers = {d.get_parameter("embed_tokens.weight").data_ptr() for d in (first, second)}
    assert pointers == {first.lm_head.weight.data_ptr()}
    assert "lm_head.weight" not in model.state
    assert model.state["layers.0.mlp.up_proj.weight"].data_ptr() == second.layers[0].mlp.up_proj.weight.data_ptr()


@pytest.mark.parametrize("capacity", [0, 257])
def test_a_context_beyond_the_model_is_refused(tmp_path: Path, capacity: int) -> None:
    model = load_checkpoint(save(transformers_model("llama"), tmp_path))
    with pytest.raises(ValueError, match=rf"1 to 256 tokens.*got {capacity}"):
        model.decoder(capacity)


@pytest.mark.parametrize("family_name", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("logits", ["last", "all"])
def test_one_program_for_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_name: str, logits: str
) -> None:
    """torch.export leaves the number of tokens free, apart from the block mask, whose making inside
    forward torch itself pins (the exporter replaces it): here the mask is left out."""
    from flexpte.models import decoder as module

    model = load_checkpoint(save(transformers_model(family_name), tmp_path))
    monkeypatch.setattr(module, "create_block_mask", lambda *arguments, **options: None)
    decoder = model.decoder(24, logits=logits)  # type: ignore[arg-type]
    inputs, dynamic_shapes = example_inputs_and_dynamic_shapes(model.config, 24)
    with torch.no_grad():
        program = torch.export.export(decoder, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    (constraint,) = {(int(r.lower), int(r.upper)) for r in program.range_constraints.values()}
    assert constraint == (1, 24)
    updates = [n for n in program.graph.nodes if n.target is torch.ops.aten.index_copy_.default]
    assert len(updates) == 2 * model.config.num_layers
    sines = [n for n in program.graph.nodes if n.target is torch.ops.aten.sin.default]
    assert len(sines) == len({layer.rotary for layer in model.config.layers})
    for count in (1, 2, 24):
        with torch.no_grad():
            out = program.module()(random_tokens(count), torch.arange(count))
        assert out.shape == (1, 1 if logits == "last" else count, model.config.vocab_size)


def test_masks_are_made_once_for_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexpte.models import decoder as module

    made = []
    monkeypatch.setattr(
        module, "create_block_mask", lambda *a, **k: made.append(1) or torch_flex.create_block_mask(*a, **k)
    )
    decoder = load_checkpoint(save(transformers_model("gemma3"), tmp_path)).decoder(16)
    with torch.no_grad():
        decoder(random_tokens(3), torch.arange(3))
    assert len(made) == 2


def test_capacity_one_exports_statically() -> None:
    config = DecoderConfig.from_hugging_face(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    )
    (tokens, positions), shapes = example_inputs_and_dynamic_shapes(config, 1)
    assert (tokens.shape, positions.shape) == ((1, 1), (1,))
    assert shapes == {"tokens": {}, "input_pos": {}}
