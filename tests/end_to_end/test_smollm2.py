"""The real model: SmolLM2-135M-Instruct from its checkpoint to text, against transformers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import flexpte

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "Die drei größten Städte Deutschlands sind",
]
TEXT = (
    "The history of astronomy begins with the earliest observers of the night sky, who noticed that some "
    "lights wander among the others. They gave the wanderers names, recorded where they stood from season to "
    "season, and built calendars upon them. Centuries later the same records let others predict eclipses, "
    "and argue about what moves around what. The argument was settled slowly, by better instruments, "
    "patience, and the stubbornness of a few careful people who trusted numbers more than they trusted habit. "
    "Their notebooks are still read today."
)


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    """reference(dtype) -> transformers' model on the same dequantised weights."""
    from transformers import AutoModelForCausalLM

    loaded = {}

    def model(dtype):
        if dtype not in loaded:
            loaded[dtype] = AutoModelForCausalLM.from_pretrained(
                smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=dtype
            ).eval()
        return loaded[dtype]

    return model


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.fixture(scope="module")
def tokens(smollm2_pte):
    ids = flexpte.LLM(smollm2_pte()).encode(TEXT)
    assert len(ids) >= 96
    return ids[:96]


def run_all(path, tokens, prefill):
    """Logits of every position: one prefill, then single steps."""
    session = flexpte.load(path).session()
    rows = []
    for begin, end in [(0, prefill), *((i, i + 1) for i in range(prefill, len(tokens)))]:
        (out,) = session.run("forward", np.array([tokens[begin:end]]), np.arange(begin, end))
        rows.append(out[0])
    return np.concatenate(rows)


def test_prefill_and_decode_logits_equal_transformers(smollm2_pte, reference, tokens):
    got = run_all(smollm2_pte(logits="all"), tokens, prefill=64)
    want = reference_logits(reference(torch.float32), tokens)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 2e-3


def test_decode_step_equals_prefill_row(smollm2_pte, tokens):
    path = smollm2_pte(logits="all")
    assert np.abs(run_all(path, tokens, prefill=32) - run_all(path, tokens, prefill=96)).max() <= 1e-4 * 20


def test_last_logits_are_the_last_of_all(smollm2_pte, tokens):
    (last,) = flexpte.load(smollm2_pte()).session().run("forward", np.array([tokens]), np.arange(96))
    assert last.shape == (1, 1, 49152)
    assert np.abs(last[0, 0] - run_all(smollm2_pte(logits="all"), tokens, prefill=96)[-1]).max() <= 1e-4


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_transformers(prompt, smollm2_pte, reference):
    llm = flexpte.LLM(smollm2_pte())
    ids = llm.encode(prompt)
    model = reference(torch.float32)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=list(llm.eos_token_ids)
        )
    want = [t for t in out[0, len(ids) :].tolist() if t not in llm.eos_token_ids]
    assert llm.generate(prompt, max_tokens=64) == llm.tokenizer.decode(want, skip_special_tokens=False)
    assert llm.stats is not None
    assert llm.stats.generated_tokens == len(want)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_as_exact_as_transformers(dtype, smollm2_pte, reference, tokens):
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    exact = reference_logits(reference(torch.float32), tokens)
    own_error = np.abs(reference_logits(reference(torch_dtype), tokens) - exact).mean()
    error = np.abs(run_all(smollm2_pte(dtype=dtype, logits="all"), tokens, prefill=64) - exact).mean()
    assert error <= 1.2 * own_error


def test_attention_only_delegation_agrees_with_full(smollm2_pte, tokens):
    full = run_all(smollm2_pte(logits="all"), tokens, prefill=64)
    attention = run_all(smollm2_pte(logits="all", delegate="attention"), tokens, prefill=64)
    assert np.abs(full - attention).max() <= 2e-4


def test_the_whole_model_is_one_delegate_call(smollm2_pte):
    report = flexpte.load(smollm2_pte()).report
    assert len(report["methods"]["forward"]["delegates"]) == 1
    assert not report["methods"]["forward"]["operators"]


def test_stock_executorch_gives_the_same_logits(smollm2_pte, tokens, tmp_path):
    code = """
import sys, numpy as np, torch
import flexpte.executorch
flexpte.executorch.register()
from executorch.runtime import Runtime
path, out, tokens = sys.argv[1], sys.argv[2], [int(t) for t in sys.argv[3].split(",")]
method = Runtime.get().load_program(path).load_method("forward")
rows = []
for begin, end in [(0, 64), *((i, i + 1) for i in range(64, len(tokens)))]:
    rows.append(method.execute([torch.tensor([tokens[begin:end]]), torch.arange(begin, end)])[0][0].clone())
np.save(out, torch.cat(rows).numpy())
"""
    out = tmp_path / "logits.npy"
    path = smollm2_pte(logits="all")
    subprocess.run(
        [sys.executable, "-c", code, str(path), str(out), ",".join(map(str, tokens))],
        check=True,
        cwd=tmp_path,
    )
    assert np.abs(np.load(out) - run_all(path, tokens, prefill=64)).max() <= 1e-4


def test_chat_answers_sensibly_and_reuses_the_conversation(smollm2_pte):
    llm = flexpte.LLM(smollm2_pte())
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, max_tokens=32)
    assert "Paris" in answer
    assert llm.stats is not None
    assert llm.stats.finish_reason == "stop"
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And of Italy?"}]
    again = llm.chat(messages, max_tokens=32)
    assert llm.stats.reused_tokens > 20
    llm.reset()
    assert llm.chat(messages, max_tokens=32) == again
    assert llm.stats.reused_tokens == 0


def test_streamed_pieces_join_to_the_generated_text(smollm2_pte):
    llm = flexpte.LLM(smollm2_pte())
    pieces = list(llm.stream("Emoji: 🎉🎊 ♥ 你好", max_tokens=24))
    assert "".join(pieces) == llm.generate("Emoji: 🎉🎊 ♥ 你好", max_tokens=24)
    assert "�" not in "".join(pieces[:-1])


def test_sampling_repeats_with_its_seed(smollm2_pte):
    llm = flexpte.LLM(smollm2_pte())

    def draw(seed):
        return llm.generate("Once", max_tokens=16, temperature=1.0, top_k=50, top_p=0.95, min_p=0.02, seed=seed)

    assert draw(1) == draw(1)
    assert len({draw(s) for s in range(4)}) > 1


def test_a_prompt_longer_than_the_context_is_one_clear_error(smollm2_gguf, tmp_path):
    from flexpte.exporter.language_model import export_language_model

    path = tmp_path / "short.pte"
    export_language_model(smollm2_gguf, max_context=16).save(path)
    llm = flexpte.LLM(path)
    with pytest.raises(flexpte.FlexpteError, match=r"17 tokens .* context of 16") as caught:
        llm.generate([1] * 17)
    assert caught.value.code == "OutOfRange"
    llm.generate([1] * 12, max_tokens=50)
    assert llm.stats is not None
    assert llm.stats.finish_reason in ("context", "stop")
    if llm.stats.finish_reason == "context":
        assert llm.stats.generated_tokens == 5
