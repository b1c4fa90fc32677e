"""What torch would compute by other code on each CPU: constants of a model, and capped logits."""

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from dovetail.workers import kernels
from dovetail.workers.kernels.exact import exp, log
from dovetail.workers.models.families.registry import FAMILIES
from dovetail.workers.models.loading import load_language_model
from support.architectures import VARIED, write_varied
from support.kernels import needs_kernels
from support.models import tiny_gemma2, tiny_llama

OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
"""The environment in which torch and MKL compute as on a CPU without AVX."""
CODE = """
import json, sys, torch
from pathlib import Path
from dovetail.workers import kernels
from dovetail.workers.models.backends.fused import VERSION
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.remembered import basis, digest_of_logits
from dovetail.workers.models.segment import Segment
kernels.use_isa(kernels.Isa[sys.argv[1]])
found = {"": (VERSION, basis())}
for folder in sorted(map(Path, sys.argv[2:])):
    model = load_language_model(str(folder), weights="fp32", device="cpu", proof="off")
    tokens = torch.arange(60) % 40 + 3
    segment = Segment(model.new_cache(60), 0, 60)
    logits = model.forward(tokens, torch.arange(60), [segment])
    found[folder.name] = model.backend, digest_of_logits(logits)
print(json.dumps(found))
"""
"""Prints what models on the kernels of an instruction set compute."""


def compare(*folders: Path) -> None:
    """Assert that models compute the same bytes with torch's code for each CPU, and with kernels
    for an old one."""
    old = kernels.isas()[min(1, len(kernels.isas()) - 1)].name
    best = kernels.isas()[-1].name
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, isa, *map(str, folders)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for isa, environment in ((old, OLD), (best, {}))
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert {backend for backend, _ in list(found[0].values())[1:]} == {"kernels"}
    for name, value in found[0].items():
        assert [other[name] for other in found] == [value] * len(found), name


@needs_kernels
def test_models_compute_the_same_bytes_whatever_code_torch_has_for_a_cpu(tmp_path: Path) -> None:
    compare(
        tiny_gemma2(tmp_path / "capped", head_dim=100, rope_theta=1e6),
        write_varied("bamba", tmp_path / "decaying"),
    )


@pytest.mark.slow
@needs_kernels
def test_so_does_every_described_family(tmp_path: Path) -> None:
    kinds = dict.fromkeys([*VARIED, *FAMILIES])
    compare(*(write_varied(kind, tmp_path / kind.replace(" ", "-")) for kind in kinds))


@needs_kernels
def test_rotary_frequencies_are_the_roundings_of_real_powers(tmp_path: Path) -> None:
    base, width = 1e6, 128  # of Mistral and Qwen; torch rounds one of them otherwise with AVX2
    folder = tiny_llama(tmp_path, head_dim=width, rope_theta=base)
    model = load_language_model(str(folder), weights="fp32", device="cpu", backend="kernels")
    exponents = (torch.arange(0, width, 2) / width).tolist()
    powers = [float(Decimal(base) ** Decimal(one)) for one in exponents]
    expected = 1 / torch.tensor(powers, dtype=torch.float64).float()
    assert model.back_end.angles[""][0] == expected.tolist()  # type: ignore[attr-defined]


def test_exponentials_and_logarithms_are_rounded_once() -> None:
    x = torch.cat((torch.randn(500).abs() * 9, torch.tensor([1.0, 1e-30, 85.0])))
    for function, expected in ((exp, Decimal.exp), (log, Decimal.ln)):
        exact = [float(expected(Decimal(one))) for one in x.tolist()]
        assert torch.equal(function(x), torch.tensor(exact, dtype=torch.float64).float())
    assert log(torch.tensor([0.0, -1.0])).isfinite().sum() == 0
