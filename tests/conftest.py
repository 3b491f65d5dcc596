"""What all rooms' tests share: seeds, and the real model, exported once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same numbers whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct, fetched once."""
    from flexpte.models.fetch import fetch_smollm2

    return fetch_smollm2(ROOT / "models-cache")


@pytest.fixture(scope="session")
def smollm2_pte(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """smollm2_pte(dtype="fp32", delegate="full", logits="last") -> the exported file."""
    from flexpte.exporter.language_model import export_language_model

    folder = tmp_path_factory.mktemp("smollm2")

    def exported(**options: str) -> Path:
        path = folder / ("-".join(["smollm2", *options.values()]) + ".pte")
        if not path.exists():
            export_language_model(smollm2_gguf, **options).save(path)
        return path

    return exported
