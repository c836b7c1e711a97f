"""How keys lie in a paged cache, and the reference that packs and unpacks them.

A block holds ``page`` keys: their values, and behind them 4 bytes of scale each. fp8 keys are D bytes and have one
scale; fp4 keys are D / 2 bytes, the low nibble the even channel, and have a UE8M0 byte for each 32 channels.

    flat         [page, D] values, key by key; at page 1 a block is a row: D values, 4 bytes of scale
    preshuffled  [page/16, D/16, 16 keys, 16 channels] values, what AMD's matrix units load without a transpose
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from lightning_indexer.fp4 import BLOCK, FP4, dequantize_fp4
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.problems.checks import as_int, check_tensor, shape_of

Order = Literal["flat", "preshuffled"]
Scales = Literal["float32", "power of two", "ue8m0"]
SCALE_BYTES = 4
# Keys and channels of one tile of the preshuffled order.
TILE = 16


class CacheLayout(NamedTuple):
    """Where a key's bytes lie. Hashable; holds no tensor.

    Attributes:
        page: keys of a block.
        head_dim: D, channels of a key.
        order: of the values of a block.
        scales: ``"float32"``; ``"power of two"``: float32 of which writers keep the exponent alone; ``"ue8m0"``: four
            equal bytes b, each 2^(b - 127). Of fp4 keys: ``"ue8m0"``, a byte for each 32 channels.
        dtype: of the values: ``torch.float8_e4m3fn``, ``torch.float8_e4m3fnuz``, or ``torch.float4_e2m1fn_x2``.
    """

    page: int = 64
    head_dim: int = 128
    order: Order = "flat"
    scales: Scales = "float32"
    dtype: torch.dtype = torch.float8_e4m3fn

    @staticmethod
    def fp4(page: int = 64, head_dim: int = 128) -> CacheLayout:
        """The layout of MXFP4 keys."""
        return CacheLayout(page, head_dim, "flat", "ue8m0", FP4)

    @staticmethod
    def implied(
        kv_cache: torch.Tensor, head_dim: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
    ) -> CacheLayout:
        """Where a caller gives none: flat with float32 scales, the page of the cache's shape, and its D.

        Raises:
            TypeError, ValueError: no cache.
        """
        check_tensor("kv_cache", kv_cache, (torch.uint8,), ": pass kv_cache.view(torch.uint8)")
        if kv_cache.dim() not in (3, 4) or kv_cache.shape[1] < 1 or kv_cache.shape[-1] <= SCALE_BYTES:
            raise ValueError(f"kv_cache: got shape {shape_of(kv_cache)}, expected [blocks, page, 1, D + 4]")
        return CacheLayout(
            kv_cache.shape[1], kv_cache.shape[-1] - SCALE_BYTES if head_dim is None else head_dim, dtype=dtype
        )

    @property
    def is_fp4(self) -> bool:
        """Values are e2m1, two a byte."""
        return self.dtype is FP4

    @property
    def row_bytes(self) -> int:
        """Bytes of a key's values."""
        return self.head_dim // 2 if self.is_fp4 else self.head_dim

    @property
    def value_bytes(self) -> int:
        """Bytes of a block's values, which the first scale lies behind."""
        return self.page * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that mean something; blocks may lie further apart."""
        return self.page * (self.row_bytes + SCALE_BYTES)

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """As a cache's last three dimensions."""
        return self.page, 1, self.row_bytes + SCALE_BYTES

    def __str__(self) -> str:
        if self.is_fp4:
            return f"page {self.page} D={self.head_dim} fp4"
        dialect = "" if self.dtype is torch.float8_e4m3fn else " fnuz"
        return f"page {self.page} D={self.head_dim} {self.order}, {self.scales} scales{dialect}"

    def validate(self) -> CacheLayout:
        """The layout itself.

        Raises:
            TypeError, ValueError: a field that no cache has; the message names it.
        """
        for name, value in (("page", self.page), ("head_dim", self.head_dim)):
            if as_int(f"layout.{name}", value) < 1:
                raise ValueError(f"layout.{name}: got {value}, expected at least 1")
        for name, given, kinds in (("order", self.order, Order), ("scales", self.scales, Scales)):
            if given not in get_args(kinds):
                raise ValueError(f"layout.{name}: got {given!r}, expected one of {', '.join(get_args(kinds))}")
        if self.dtype not in (*FP8_DTYPES, FP4):
            raise TypeError(f"layout.dtype: got {self.dtype}, expected {' or '.join(map(str, (*FP8_DTYPES, FP4)))}")
        if self.is_fp4 and (self.order, self.scales, self.head_dim) != ("flat", "ue8m0", BLOCK * SCALE_BYTES):
            raise ValueError(
                f"layout: got {self.order} values with {self.scales} scales and D={self.head_dim}, expected flat, "
                f"ue8m0 and D={BLOCK * SCALE_BYTES} of fp4 keys: four scale bytes a key"
            )
        if self.value_bytes % SCALE_BYTES:
            raise ValueError(
                f"layout: got {self.value_bytes} value bytes a block, expected a multiple of 4: scales lie behind them"
            )
        if self.order == "preshuffled" and (self.page % TILE or self.head_dim % TILE):
            raise ValueError(
                f"layout: got page {self.page} and D={self.head_dim}, preshuffled, expected multiples of {TILE}"
            )
        return self

    def check(self, kv_cache: torch.Tensor, name: str = "kv_cache") -> None:
        """Refuses a cache that does not have this layout, as far as its shape and strides tell.

        Args:
            kv_cache: uint8 [blocks, page, 1, D + 4], D / 2 + 4 of fp4 keys, or without the 1; blocks lie any multiple
                of 4 bytes apart.

        Raises:
            TypeError, ValueError: see above; the message names the argument, what came and what was expected.
        """
        check_tensor(name, kv_cache, (torch.uint8,), f": pass {name}.view(torch.uint8)")
        page, one, width = self.block_shape
        inner = (page, width) if kv_cache.dim() == 3 else self.block_shape
        if kv_cache.dim() not in (3, 4) or tuple(kv_cache.shape[1:]) != inner:
            raise ValueError(
                f"{name}: got shape {shape_of(kv_cache)}, expected [blocks, {page}, {one}, {width}]: {self}"
            )
        if kv_cache.shape[0] == 0:
            return  # strides of an empty tensor say nothing
        strides = kv_cache.stride()
        if strides[-1] != 1 or (page > 1 and strides[1] != width):
            raise ValueError(f"{name}: got strides {tuple(strides)}, expected blocks that are contiguous each")
        if kv_cache.shape[0] > 1 and (strides[0] % SCALE_BYTES or strides[0] < self.block_bytes):
            raise ValueError(
                f"{name}: got strides {tuple(strides)}, expected blocks a multiple of {SCALE_BYTES} bytes apart, at "
                f"least {self.block_bytes}"
            )

    def bytes_apart(self, kv_cache: torch.Tensor) -> int:
        """Between two blocks of a cache; the stride of a single one says nothing."""
        return kv_cache.stride(0) if kv_cache.shape[0] > 1 else self.block_bytes

    def pack(self, k: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
        """The reference writer.

        Args:
            k: [blocks, page, D] of the layout's dtype; of fp4 keys uint8 [blocks, page, D / 2].
            kv_scale: [blocks, page] float32; of fp4 keys uint8 [blocks, page, 4].

        Returns:
            uint8 [blocks, page, 1, D + 4], of fp4 keys D / 2 + 4.

        Raises:
            TypeError, ValueError: another dtype or shape, or a scale that is not a power of two where the layout says
                so. The scales are read on the host for it.
        """
        self.validate()
        if self.is_fp4:
            return self._pack_fp4(k, kv_scale)
        check_tensor("k", k, (self.dtype,))
        check_tensor("kv_scale", kv_scale, (torch.float32,))
        if k.dim() != 3 or tuple(k.shape[1:]) != (self.page, self.head_dim):
            raise ValueError(f"k: got shape {shape_of(k)}, expected [blocks, {self.page}, {self.head_dim}]")
        blocks = k.shape[0]
        if tuple(kv_scale.shape) != (blocks, self.page):
            raise ValueError(f"kv_scale: got shape {shape_of(kv_scale)}, expected [{blocks}, {self.page}]")
        values = k.contiguous().view(torch.uint8)
        if self.order == "preshuffled":
            tiles = values.view(blocks, self.page // TILE, TILE, self.head_dim // TILE, TILE)
            values = tiles.transpose(2, 3).contiguous()
        bits = kv_scale.contiguous().view(torch.int32)
        if self.scales != "float32" and bool(((bits & 0x7FFFFF) != 0).any() | (bits < 0).any()):
            raise ValueError("kv_scale: got scales that are no powers of two, expected those alone in this layout")
        if self.scales == "ue8m0":
            scales = (bits >> 23).to(torch.uint8)[..., None].expand(-1, -1, SCALE_BYTES).contiguous()
        else:
            scales = bits.view(torch.uint8)
        flat = torch.cat((values.view(blocks, self.value_bytes), scales.view(blocks, SCALE_BYTES * self.page)), dim=1)
        return flat.view(blocks, *self.block_shape)

    def _pack_fp4(self, k: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
        for name, tensor, width in (("k", k, self.row_bytes), ("kv_scale", kv_scale, SCALE_BYTES)):
            check_tensor(name, tensor, (torch.uint8,))
            if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (self.page, width) or len(tensor) != len(k):
                raise ValueError(f"{name}: got shape {shape_of(tensor)}, expected [{len(k)}, {self.page}, {width}]")
        flat = torch.cat((k.flatten(1), kv_scale.flatten(1)), dim=1)
        return flat.view(len(k), *self.block_shape)

    def unpack(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference reader: copies of what :meth:`pack` was given; of UE8M0 scales of fp8 keys, as float32.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.validate().check(kv_cache)
        flat = kv_cache.reshape(kv_cache.shape[0], self.block_bytes)
        return self.unpack_blocks(flat)

    def unpack_blocks(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`unpack` of uint8 [blocks, block_bytes], any block stride, unchecked."""
        blocks = flat.shape[0]
        values = flat[:, : self.value_bytes]
        if self.is_fp4:
            scales = flat[:, self.value_bytes : self.block_bytes]
            return (
                values.reshape(blocks, self.page, self.row_bytes).contiguous(),
                scales.reshape(blocks, self.page, SCALE_BYTES).contiguous(),
            )
        if self.order == "preshuffled":
            tiles = values.reshape(blocks, self.page // TILE, self.head_dim // TILE, TILE, TILE)
            values = tiles.transpose(2, 3)
        k = values.reshape(blocks, self.page, self.head_dim).contiguous().view(self.dtype)
        scales = flat[:, self.value_bytes :].contiguous()
        if self.scales != "ue8m0":
            return k, scales.view(torch.float32)
        # The first of the four bytes; 0 is the subnormal 2^-127, 255 is NaN.
        exponent = scales.view(blocks, self.page, SCALE_BYTES)[..., 0].to(torch.int32)
        bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
        return k, torch.where(exponent == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)

    def dequantize_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """float32 [blocks, page, D] of uint8 [blocks, block_bytes], unchecked: the keys that the bytes stand for."""
        k, kv_scale = self.unpack_blocks(flat)
        return dequantize_fp4(k, kv_scale) if self.is_fp4 else k.float() * kv_scale[..., None]
