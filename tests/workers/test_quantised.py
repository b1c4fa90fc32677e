"""Checkpoints in AWQ, GPTQ, FP8 and compressed-tensors: their matrices are the numbers that codes
and scales stand for, and models of them compute what those of the same numbers in fp32 do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from support.architectures import VOCABULARY, write_tiny

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

SIZE = 16  # inputs that share a scale, and outputs of a block
Parts = dict[str, Tensor]
Random = torch.Generator


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] in words of 32 bits along their rows, the first in the lowest bits."""
    each = 32 // bits
    rows = [
        [
            sum(int(code) << bits * place for place, code in enumerate(row[first : first + each]))
            for first in range(0, len(row), each)
        ]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def whole(codes: Tensor, zeros: Tensor, scales: Tensor, group: list[int]) -> Tensor:
    """The numbers [out, in] of codes, with zero points and scales [out, groups]."""
    numbers = torch.empty(codes.shape)
    for place, of in enumerate(group):
        numbers[:, place] = (codes[:, place] - zeros[:, of]).float() * scales[:, of].float()
    return numbers


def random_parts(shape: tuple[int, int], bits: int, g: Random) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], zero points and scales [out, groups]."""
    out, groups = shape[0], shape[1] // SIZE
    codes = torch.randint(1 << bits, shape, generator=g)
    zeros = torch.randint(1, 1 << bits, (out, groups), generator=g)
    return codes, zeros, (0.2 + torch.rand(out, groups, generator=g)).half() / (16 << bits)


def even(inputs: int) -> list[int]:
    return [place // SIZE for place in range(inputs)]


def awq(name: str, shape: tuple[int, int], g: Random) -> tuple[Parts, Tensor]:
    codes, zeros, scales = random_parts(shape, 4, g)
    order = [8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8] for n in range(shape[0])]
    base = name.removesuffix("weight")
    return {
        f"{base}qweight": words_of(codes[order].t(), 4),
        f"{base}qzeros": words_of(zeros[order].t(), 4),
        f"{base}scales": scales.t().contiguous(),
    }, whole(codes, zeros, scales, even(shape[1]))


def gptq(bits: int, *, below: bool, shuffled: bool = False, even_zeros: bool = False) -> Any:
    def write(name: str, shape: tuple[int, int], g: Random) -> tuple[Parts, Tensor]:
        codes, zeros, scales = random_parts(shape, bits, g)
        if even_zeros:
            zeros[:] = 1 << (bits - 1)
        group = torch.tensor(even(shape[1]))
        if shuffled:
            group = group[torch.randperm(len(group), generator=g)]
        base = name.removesuffix("weight")
        return {
            f"{base}qweight": words_of(codes, bits).t().contiguous(),
            f"{base}qzeros": words_of(zeros.t() - int(below), bits),
            f"{base}scales": scales.t().contiguous(),
            f"{base}g_idx": group.int(),
        }, whole(codes, zeros, scales, group.tolist())

    return write


def fp8(name: str, shape: tuple[int, int], g: Random) -> tuple[Parts, Tensor]:
    codes = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
    grid = [-(-size // SIZE) for size in shape]
    scales = torch.rand(grid, generator=g) / 16
    wide = scales.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)[: shape[0], : shape[1]]
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * wide


def fp8_of_rows(name: str, shape: tuple[int, int], g: Random) -> tuple[Parts, Tensor]:
    codes = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0], 1, generator=g).bfloat16() / 16
    beside = {name.replace("weight", "input_scale"): torch.ones(1)}
    return {name: codes, f"{name}_scale": scales, **beside}, codes.float() * scales.float()


def int8(name: str, shape: tuple[int, int], g: Random) -> tuple[Parts, Tensor]:
    codes = torch.randint(-128, 128, shape, generator=g).to(torch.int8)
    scales = torch.rand(shape[0], 1, generator=g).bfloat16() / 1024
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def packed(*, zeros: bool, groups: bool = False) -> Any:
    def write(name: str, shape: tuple[int, int], g: Random) -> tuple[Parts, Tensor]:
        codes, middle, scales = random_parts(shape, 4, g)
        group = torch.tensor(even(shape[1]))
        if groups:
            group = group[torch.randperm(len(group), generator=g)]
        parts = {
            f"{name}_packed": words_of(codes, 4),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(shape),
            **({f"{name}_zero_point": words_of(middle.t(), 4).t().contiguous()} if zeros else {}),
            **({f"{name}_g_idx": group.int()} if groups else {}),
        }
        middle = middle if zeros else torch.full_like(middle, 8)
        return parts, whole(codes, middle, scales, group.tolist())

    return write


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    method = {"quant_method": "compressed-tensors", "format": form}
    return {**method, **groups(**weights), "ignore": ["lm_head"]}


def several(*forms: tuple[int, int]) -> dict[str, Any]:
    """Groups with codes of so many bits, of which so many share a scale."""
    own = [{"num_bits": bits, "group_size": size} for bits, size in forms]
    return {"config_groups": {str(n): {"weights": weights} for n, weights in enumerate(own)}}


def groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "sym": False}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
FP8 = {"quant_method": "fp8", "weight_block_size": [SIZE, SIZE], "activation_scheme": "dynamic"}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[..., tuple[Parts, Tensor]]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}, awq),
    "gptq": (GPTQ, gptq(4, below=True)),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, gptq(8, below=True)),
    "gptq, 2 bits, v2": ({**V2, "bits": 2}, gptq(2, below=False)),
    "gptq, inputs in another order": (
        {**V2, "desc_act": True},
        gptq(4, below=False, shuffled=True),
    ),
    "gptq, symmetric": ({**GPTQ, "sym": True}, gptq(4, below=True, even_zeros=True)),
    "gptq, symmetric, v2 by another name": (
        {**GPTQ, "sym": True},
        gptq(4, below=False, even_zeros=True),
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", **GPTQ}
        | {"quant_method": "auto-round"},
        gptq(4, below=True),
    ),
    "fp8, blocks": (FP8, fp8),
    "fp8, rows": (compressed("float-quantized", num_bits=8, strategy="channel"), fp8_of_rows),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    "int4": (compressed("pack-quantized", num_bits=4, group_size=SIZE), packed(zeros=False)),
    "int4, zero points": (
        compressed("pack-quantized", num_bits=4, group_size=SIZE),
        packed(zeros=True),
    ),
    "int4, inputs in another order": (
        compressed("pack-quantized", num_bits=4, group_size=SIZE, actorder="group"),
        packed(zeros=True, groups=True),
    ),
}


def quantised(kind: str, scheme: str, folder: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """A checkpoint whose layers' matrices are random codes, one of the numbers that they stand for,
    and these."""
    said, write = SCHEMES[scheme]
    plain, coded = folder / "plain", folder / "coded"
    written = folder.parent / f"plain-{kind}"  # for all tests of this process
    if not written.exists():
        write_tiny(kind, written)
    for one in (plain, coded):
        shutil.copytree(written, one)
    tensors, numbers = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    generator, parts = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for name in sorted(tensors):
        if tensors[name].ndim == 2 and ".layers." in name and "mlp.gate.w" not in name:
            rows, columns = tensors[name].shape
            found, numbers[name] = write(name, (rows, columns), generator)
            parts |= found
    kept = {name: tensor for name, tensor in tensors.items() if name not in numbers}
    save_file({**kept, **numbers}, plain / "model.safetensors")
    save_file({**kept, **parts}, coded / "model.safetensors")
    file = coded / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    return coded, plain, numbers


def logits(folder: Path, weights: str = "fp32", backend: str = "kernels") -> Tensor:
    model = load_language_model(str(folder), weights=weights, device="cpu", backend=backend)
    tokens = torch.randint(3, VOCABULARY, (20,), generator=Random().manual_seed(7))
    cache = model.new_cache(20)
    return model.forward(tokens, torch.arange(20), [Segment(cache, 0, 20)])


def edit(folder: Path, **fields: Any) -> None:
    """Change fields of the quantisation in config.json."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"].update(fields)
    file.write_text(json.dumps(content))


def change(folder: Path, change_them: Callable[[Parts], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change_them(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_are_the_numbers_that_codes_stand_for(scheme: str, tmp_path: Path) -> None:
    coded, _, numbers = quantised("llama", scheme, tmp_path)
    checkpoint = open_checkpoint(str(coded))
    for name, expected in numbers.items():
        assert torch.equal(checkpoint.read(name), expected), name
        assert checkpoint.tensors[name].shape == expected.shape


@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize(("kind", "scheme"), [("llama", "awq"), ("qwen3_moe", "fp8, blocks")])
def test_a_model_computes_what_it_does_of_the_same_numbers_in_fp32(
    kind: str, scheme: str, weights: str, tmp_path: Path
) -> None:
    coded, plain, _ = quantised(kind, scheme, tmp_path)
    assert torch.equal(logits(coded, weights), logits(plain, weights))


def test_the_library_reads_the_same_numbers(tmp_path: Path) -> None:
    coded, plain, _ = quantised("qwen3_moe", "int4", tmp_path)
    assert torch.equal(logits(coded, backend="library"), logits(plain, backend="library"))


@pytest.mark.parametrize(
    ("scheme", "fields", "said"),
    [
        ("awq", {"version": "gemv"}, r"is quantised in an unsupported way \(awq, version gemv\)"),
        ("awq", {"bits": 8}, r"\(awq, 8 bits\)"),
        ("gptq", {"bits": 3}, r"\(gptq, 3 bits\)"),
        ("gptq", {"checkpoint_format": "marlin"}, r"\(gptq, format marlin\)"),
        ("gptq", {"bits": None}, r"\(gptq, None bits\)"),
        ("fp8, blocks", {"fmt": "e5m2"}, r"\(fp8, numbers of type e5m2\)"),
        ("fp8, blocks", {"weight_block_size": [8, 8]}, "weight does not fit the other parts"),
        *(
            (
                "fp8, blocks",
                {"weight_block_size": size},
                f"coded/config.json: weight_block_size {end}",
            )
            for size in (8, [16], ["a", "b"], [1e30, float("inf")], [-16, -16], [True, 16])
            for end in ("of quantization_config is .*, not two whole numbers from 1 on",)
        ),
        ("gptq", {"group_size": "x"}, "config.json: group_size of quantization_config is x, not a"),
        ("gptq", {"bits": 4.0}, r"\(gptq, 4.0 bits\)"),
        *(
            (
                "int4",
                groups(num_bits=bits),
                f"config.json: num_bits of quantization_config is {bits}",
            )
            for bits in (0, None, "four", 4.0)
        ),
        ("int4", groups(num_bits=3), r"\(compressed-tensors, 3 bits in pack-quantized\)"),
        ("int4", groups(num_bits=4, type="float"), "4 bits of type float in pack-quantized"),
        ("fp8, rows", groups(num_bits=8, block_structure=[1, 2, 3]), "block_structure of quant"),
        ("int4", {"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ("int4", {"transform_config": {"config_groups": {"a": {}}}}, "behind a transform"),
        ("int4", {"config_groups": {}}, "weight_packed does not fit the other parts"),
        (
            "int4",
            several((4, SIZE), (8, SIZE // 2)),
            "codes of 4 or 8 bits fit the shape of tensor",
        ),
        (
            "int8",
            {"quant_method": "bitnet"},
            r"also round .*; so are all its forms: use another",
        ),
        ("int8", {"quant_method": "fp8"}, "weight does not fit the other parts"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    scheme: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    coded, _, _ = quantised("llama", scheme, tmp_path)
    edit(coded, **fields)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(coded))


LAYER = "model.layers.1.mlp.down_proj"
REORDERED = "int4, inputs in another order"


def cast(name: str, to: Callable[[Tensor], Tensor]) -> Callable[[Parts], object]:
    return lambda parts: parts.update({name: to(parts[name])})


@pytest.mark.parametrize(
    ("scheme", "broken", "said"),
    [
        ("awq", lambda t: t.pop(f"{LAYER}.scales"), f"{LAYER}.scales is missing"),
        ("fp8, blocks", lambda t: t.pop(f"{LAYER}.weight_scale_inv"), "scale_inv is missing"),
        ("int4", lambda t: t[f"{LAYER}.weight_shape"].zero_(), f"{LAYER}.weight_shape does not"),
        ("gptq", lambda t: t[f"{LAYER}.g_idx"].fill_(-1), f"{LAYER}.g_idx names group -1"),
        *(
            (
                scheme,
                cast(f"{LAYER}.{part}", lambda t: t.fill_(6)),
                f"{part} names group 6, and .* 0 to",
            )
            for scheme, part in (("gptq", "g_idx"), (REORDERED, "weight_g_idx"))
        ),
        *(
            (scheme, cast(f"{LAYER}.{part}", to), f"{LAYER}.{part} has numbers of type {kind}")
            for scheme, part, to, kind in (
                ("awq", "qzeros", Tensor.float, "F32"),
                ("awq", "scales", Tensor.int, "I32"),
                ("gptq", "g_idx", Tensor.float, "F32"),
                (REORDERED, "weight_g_idx", Tensor.half, "F16"),
                ("int4", "weight_shape", Tensor.float, "F32"),
            )
        ),
        ("gptq", lambda t: t.update({f"{LAYER}.g_idx": torch.zeros(3).int()}), "does not fit"),
        ("awq", lambda t: t.update({f"{LAYER}.weight": torch.zeros(2, 2)}), "plain and quantised"),
        (
            "fp8, blocks",
            lambda t: t[f"{LAYER}.weight"].view(torch.uint8)[0].fill_(127),
            f"{LAYER}.weight holds NaN",
        ),
        ("awq", lambda t: t[f"{LAYER}.scales"][0].fill_(torch.inf), f"{LAYER}.scales holds NaN"),
    ],
)
def test_a_part_that_is_missing_or_broken_is_named(
    scheme: str, broken: Callable[[Parts], object], said: str, tmp_path: Path
) -> None:
    coded, _, _ = quantised("llama", scheme, tmp_path)
    change(coded, broken)
    with pytest.raises(CheckpointError, match=said):
        logits(coded)


def test_groups_of_compressed_tensors_that_are_not_set_follow_each_other(tmp_path: Path) -> None:
    coded, plain, _ = quantised("llama", "int4", tmp_path)
    unset = torch.full((load_file(plain / "model.safetensors")[f"{LAYER}.weight"].shape[1],), -1)
    change(coded, lambda t: t.update({f"{LAYER}.weight_g_idx": unset.int()}))
    assert torch.equal(logits(coded), logits(plain))


def test_a_config_that_promises_codes_where_none_are_is_refused(tmp_path: Path) -> None:
    coded, plain, _ = quantised("llama", "awq", tmp_path)
    (plain / "config.json").write_text((coded / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"are quantised \(awq\), but no tensor is"):
        open_checkpoint(str(plain))
