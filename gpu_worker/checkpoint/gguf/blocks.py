"""Unpacks the blocks of GGUF's quantized types.

A block holds the next 32 or 256 numbers of a row; ``d`` and ``m`` are scale and offset in float16. Blocks of 256 ("K")
have a scale, and some an offset, for each 32 or 16 numbers, stored as small integers to be multiplied by the block's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.quantized_weight import Float4Weight
from .config import PLAIN_NAMES

Unpacked = tuple[Tensor, Tensor, Tensor | None]
"""values [n, size] int8, scales and offsets [n, size / group] float32: a number is values * scales + offsets."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """Describes one type of block."""

    name: str
    size: int
    """Numbers in a block."""
    bytes: int
    bits: int
    """Of the numbers that :attr:`unpack` returns."""
    group: int
    """How many numbers share a scale."""
    has_offsets: bool
    unpack: Callable[[Tensor], Unpacked]
    """From n blocks, uint8 [n, bytes], on any device."""


def _half(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 at byte ``first`` of each block: [n, 1] float32."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """Return the low halves of each block's bytes, then the high ones: [n, m] to [n, 2 * m] uint8."""
    return torch.cat((octets & 15, octets >> 4), 1)


def _centred(codes: Tensor, bits: int) -> Tensor:
    return codes.view(torch.int8) - (1 << (bits - 1))


def _unpack_q4_0(blocks: Tensor) -> Unpacked:
    """Bytes: d, 16 of codes."""
    return _centred(_nibbles(blocks[:, 2:18]), 4), _half(blocks, 0), None


def _unpack_q4_1(blocks: Tensor) -> Unpacked:
    """Bytes: d, m, 16 of codes."""
    d, m = _half(blocks, 0), _half(blocks, 2)
    # The file counts codes from 0. The kernels take signed ones, so half of the range moves into the offset: exact in
    # d.
    return _centred(_nibbles(blocks[:, 4:20]), 4), d, m + 8 * d


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """Return the bits of the four bytes from ``first`` on, each worth 16: [n, 32] uint8."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, first : first + 4, None] >> bits & 1) << 4).flatten(1)


def _unpack_q5_0(blocks: Tensor) -> Unpacked:
    """Bytes: d, 4 of fifth bits, 16 of codes."""
    return _centred(_nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2), 5), _half(blocks, 0), None


def _unpack_q5_1(blocks: Tensor) -> Unpacked:
    """Bytes: d, m, 4 of fifth bits, 16 of codes."""
    d, m = _half(blocks, 0), _half(blocks, 2)
    return _centred(_nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4), 5), d, m + 16 * d


def _unpack_q8_0(blocks: Tensor) -> Unpacked:
    """Bytes: d, 32 of numbers."""
    return blocks[:, 2:34].contiguous().view(torch.int8), _half(blocks, 0), None


_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of the IQ4 types stand for: numbers that lie closer together near zero, as weights do."""
_FLOATS4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the float of 4 bits (e2m1) that each code of MXFP4 is."""


def _look_up(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return the level of each code, int8."""
    table = torch.tensor(levels, dtype=torch.int8, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _unpack_iq4_nl(blocks: Tensor) -> Unpacked:
    """Bytes: d, 16 of codes."""
    return _look_up(_nibbles(blocks[:, 2:18]), _CODEBOOK), _half(blocks, 0), None


def _unpack_mxfp4(blocks: Tensor) -> Unpacked:
    """Bytes: the exponent of a power of two, 16 of codes."""
    exponents = blocks[:, :1].int() - 128
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return _look_up(_nibbles(blocks[:, 1:17]), _FLOATS4), powers, None


def floats4(blocks: Tensor, outputs: int) -> Float4Weight:
    """Return blocks of MXFP4 [n, 17], those of ``outputs`` rows, as the kernels take them."""
    codes = _nibbles(blocks[:, 1:17])
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return Float4Weight(pairs.view(outputs, -1), blocks[:, 0].reshape(outputs, -1))


def _runs(octets: Tensor, bits: int) -> Tensor:
    """Return codes [n, m * 8 / bits] uint8: of each 32 bytes [n, m] the lowest ``bits`` of all, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)[:, None]
    return (octets.reshape(len(octets), -1, 1, 32) >> shifts & ((1 << bits) - 1)).flatten(1)


def _unpack_q2_k(blocks: Tensor) -> Unpacked:
    """Bytes: 16 of a scale and an offset in 4 bits each, 64 of codes, d, m."""
    scales = (blocks[:, :16] & 15).float() * _half(blocks, 80)
    offsets = (blocks[:, :16] >> 4).float() * _half(blocks, 82)
    return _centred(_runs(blocks[:, 16:80], 2), 2), scales, 2 * scales - offsets


def _unpack_q3_k(blocks: Tensor) -> Unpacked:
    """Bytes: 32 of third bits, 64 of two lower ones, 12 of scales of 6 bits, d.

    Eight bytes hold the low halves of the scales, of the first eight and then of the last; the four bytes behind them
    their two higher bits, of each fourth scale in a byte.
    """
    codes = _runs(blocks[:, 32:96], 2) | _runs(blocks[:, :32], 1) << 2
    low, high = _nibbles(blocks[:, 96:104]), blocks[:, 104:108]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    scales = _centred(low | (high[:, None] >> shifts & 3).flatten(1) << 4, 6)
    return _centred(codes, 3), scales.float() * _half(blocks, 108), None


def _unpack_iq4_xs(blocks: Tensor) -> Unpacked:
    """Bytes: d, 2 of the higher bits of eight scales of 6 bits, 4 of their low halves, 128 of codes."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    scales = _centred(low | high << 4, 6).float() * _half(blocks, 0)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).view(len(blocks), -1)
    return _look_up(codes, _CODEBOOK), scales, None


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight offsets of 6 bits, [n, 8] float32 each, from 12 bytes [n, 12].

    Bytes 0 to 3 and 4 to 7 hold the first four of each; their two highest bits belong to the last four, whose low
    halves are in bytes 8 to 11.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), 1)
    offsets = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 1)
    return scales.float(), offsets.float()


def _k_groups(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [n, 8] of blocks that begin with d, m and 12 bytes of small ones."""
    scales, offsets = _k_scales(blocks[:, 4:16])
    scales = scales * _half(blocks, 0)
    # K blocks subtract their offset, the older types add it. The first term makes good for codes being centred.
    return scales, scales * (1 << (bits - 1)) - offsets * _half(blocks, 2)


def _k_nibbles(octets: Tensor) -> Tensor:
    """Return codes [n, 8, 32]: of each 32 bytes [n, 128] the low halves, then the high ones."""
    runs = octets.reshape(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1, 2)


def _unpack_q4_k(blocks: Tensor) -> Unpacked:
    """Bytes: d, m, 12 of small scales, 128 of codes."""
    return _centred(_k_nibbles(blocks[:, 16:]).flatten(1), 4), *_k_groups(blocks, 4)


def _unpack_q5_k(blocks: Tensor) -> Unpacked:
    """Bytes: d, m, 12 of small scales, 32 of fifth bits, 128 of codes. Bit i of a byte of fifth bits is of group i."""
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & 1) << 4
    return _centred((_k_nibbles(blocks[:, 48:]) | fifth).flatten(1), 5), *_k_groups(blocks, 5)


def _unpack_q6_k(blocks: Tensor) -> Unpacked:
    """Bytes: 128 of low halves, 64 of two more bits, 16 small scales as int8, d.

    Each half of a block has 64 and 32 of these bytes, for four runs of 32 numbers: the low halves of the first and
    second 32 bytes, then the high ones; the two bits of run i are bits 2 * i and 2 * i + 1 of a byte.
    """
    low = blocks[:, :128].reshape(-1, 2, 64)
    runs = torch.cat((low & 15, low >> 4), 2).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return _centred((runs | high << 4).flatten(1), 6), scales, None


PLAIN_TYPES: dict[int, torch.dtype] = {kind: getattr(torch, name) for kind, name in PLAIN_NAMES.items()}
"""Types of tensors that are not quantized, by their id in the file."""

MXFP4 = BlockType("MXFP4", 32, 17, 4, 32, False, _unpack_mxfp4)

BLOCK_TYPES: dict[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18, 4, 32, False, _unpack_q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, True, _unpack_q4_1),
    6: BlockType("Q5_0", 32, 22, 5, 32, False, _unpack_q5_0),
    7: BlockType("Q5_1", 32, 24, 5, 32, True, _unpack_q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, False, _unpack_q8_0),
    10: BlockType("Q2_K", 256, 84, 2, 16, True, _unpack_q2_k),
    11: BlockType("Q3_K", 256, 110, 3, 16, False, _unpack_q3_k),
    12: BlockType("Q4_K", 256, 144, 4, 32, True, _unpack_q4_k),
    13: BlockType("Q5_K", 256, 176, 5, 32, True, _unpack_q5_k),
    14: BlockType("Q6_K", 256, 210, 6, 16, False, _unpack_q6_k),
    20: BlockType("IQ4_NL", 32, 18, 8, 32, False, _unpack_iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, 8, 32, False, _unpack_iq4_xs),
    39: MXFP4,
}
"""Types of blocks by their id in the file: those of ``config.BLOCK_NAMES``."""
