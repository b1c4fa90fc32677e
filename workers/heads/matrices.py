"""The matrices of a head in each type of weights: in the layout of the C++ kernels on a CPU; on a
device multiplied by our products if they are proven correct and fast, else by torch's."""

from functools import partial

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.blocks import WIDTH, BlockMatrix, Part
from dovetail.workers.models.backends.blob import ELEMENTS, Matrix, alone
from dovetail.workers.models.backends.device.choice import CONTESTS, ROUNDED, choice_on
from dovetail.workers.models.backends.device.own import own_matrix
from dovetail.workers.models.backends.device.own_blocks import CONTEST as BLOCKS
from dovetail.workers.models.backends.device.own_blocks import own_blocks
from dovetail.workers.models.backends.device.products import Product, product, rounded_product
from dovetail.workers.models.backends.packing import EXACT_KINDS, pack_rows
from dovetail.workers.models.checkpoints.gguf.kinds import Q8_0
from dovetail.workers.models.substitutes.coded import against_codes, linear_product, pack_codes
from dovetail.workers.models.substitutes.quantize import nearest_codes

KINDS = {"fp32": Kind.FP32, "fp16": Kind.FP16, "bf16": Kind.BF16, "int8": Kind.INT8}


def pack_matrix(weight: Tensor, bias: Tensor | None, weights: str) -> PackedMatrix:
    """Return weight [out, in] in the kernels' layout, as `weights`; `auto` is the stored type. int8
    has a scale for every 32 inputs, in weights and in rows, if the number of inputs is a multiple
    of 32: this gives a head a fifth more tokens per round than one scale per row."""
    if weights == "int4":
        return pack_codes([nearest_codes(weight)], [bias])
    if weights == "int8" and weight.shape[1] % WIDTH == 0:
        return _in_blocks(weight, bias)
    kind = EXACT_KINDS.get(weight.dtype, Kind.FP32) if weights == "auto" else KINDS[weights]
    return _by_rows(weight, bias, kind)


def _by_rows(weight: Tensor, bias: Tensor | None, kind: Kind) -> PackedMatrix:
    """Return a matrix of one of the kernels' plain kinds; int8 has one scale per row."""
    own = None if bias is None else bias.float().contiguous()
    matrix = PackedMatrix(kind, *weight.shape, bias=own)
    pack_rows(matrix, weight)
    return matrix


def _in_blocks(weight: Tensor, bias: Tensor | None) -> BlockMatrix:
    """Return a matrix as blocks of ggml's Q8_0."""
    (rows, inputs), (codes, scales) = weight.shape, codes_of(weight)
    grouped = codes.view(rows, inputs // WIDTH, WIDTH)
    blocks = torch.cat([scales[..., None].view(torch.uint8), grouped.view(torch.uint8)], dim=2)
    own = None if bias is None else bias.float().contiguous()
    matrix = BlockMatrix(Kind.BLOCKS, [Part(Q8_0, rows)], inputs, bias=own)
    matrix.pack_part(0, blocks.view(rows, -1))
    return matrix


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix: return int8 codes [out, in] and fp16 scales [out, in / 32]."""
    numbers = weight.float().contiguous().view(len(weight), -1, WIDTH)
    scales = (numbers.abs().amax(dim=2) / 127.0).half()
    turned = torch.where(scales > 0, 1.0 / scales.float(), torch.zeros(()))
    codes = (numbers * turned[..., None]).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten(1), scales


def device_product(
    weight: Tensor, bias: Tensor | None, weights: str, device: torch.device, *, exact: bool = False
) -> Product:
    """Return the product with weight [out, in] as `weights` on a device; rows are fp32 before and
    after. `exact`: products with 16-bit weights are in fp32; otherwise torch may round rows, and
    numbers beyond fp16 become infinite."""
    products, bias = choice_on(device), None if bias is None else bias.float()
    if weights == "int4":
        return linear_product(nearest_codes(weight, device), bias, device)
    in_blocks = weights == "int8" and weight.shape[1] % WIDTH == 0
    program = products.owner(BLOCKS) if in_blocks and products is not None else None
    if program is not None:
        lying, memory = alone(pack_matrix(weight.cpu(), bias, weights))
        return own_blocks(program, lying, memory.to(device))
    kind = KINDS[weights]
    contest = ({} if exact else ROUNDED).get(kind, CONTESTS.get(kind))
    program = None if products is None or contest is None else products.owner(contest)
    if program is None:
        matrix = _laid_out(weight, bias, kind, device)
        return partial(product, matrix) if exact else partial(_narrowed_product, matrix)
    lying, memory = alone(_by_rows(weight.cpu(), bias, kind))
    return own_matrix(program, lying, memory.to(device))


def _narrowed_product(matrix: Matrix, x: Tensor) -> Tensor:
    return rounded_product(matrix, x, Tensor.to)


def check_weights(weights: str, device: torch.device) -> None:
    """Raise `CheckpointError` if a device cannot multiply weights of a type."""
    why_not = ""
    if weights == "int4" and kernels.available():
        why_not = against_codes(device, weights)
    elif weights == "int4":
        why_not = kind_of(device).against_int4(device)
    elif weights == "int8":
        why_not = _against_int8(device)
    if why_not:
        raise CheckpointError(
            f"there are no {weights} weights of a head on {device}: {why_not}; use fp16"
        )


def _against_int8(device: torch.device) -> str:
    """Return why no int8 product runs on a device; empty if one does. torch's is tried if ours was
    not chosen."""
    products = choice_on(device)
    contests = (BLOCKS, CONTESTS[Kind.INT8])
    if products is not None and any(products.owner(one) is not None for one in contests):
        return ""
    try:
        device_product(torch.zeros(8, 8), None, "int8", device)(torch.zeros(1, 8, device=device))
    except RuntimeError as error:
        return f"torch has none ({str(error).partition(chr(10))[0]})"
    return ""


def _laid_out(weight: Tensor, bias: Tensor | None, kind: Kind, device: torch.device) -> Matrix:
    """Return a matrix in torch's layout, int8 with one scale for each row."""
    there, bias = weight.to(device), None if bias is None else bias.to(device)
    if kind is not Kind.INT8:
        return Matrix(kind, there.to(ELEMENTS[kind]).contiguous(), None, bias)
    there = there.float()
    scales = (there.abs().amax(dim=1) / 127.0).clamp(min=1e-12)
    codes = (there / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Matrix(kind, codes, scales, bias)
