"""Where a ``flydsl`` kernel keeps what: the parts of a block, MFMA fragments, LDS.

Plain arithmetic, which the kernel does on FlyDSL's values and the tests on ints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LANES = 64
KEYS_OF_WAVE = 64  # keys of a tile that one wave scores: one a lane, once heads are summed
PIECE = 16  # bytes that a lane reads or copies at a time


@dataclass(frozen=True, slots=True)
class Layout:
    """All that a kernel's code depends on.

    Attributes:
        deep: CDNA4: products 64 channels deep, copies of 16 bytes into LDS, 64 banks. Not CDNA3.
        heads, head_dim: H; D.
        rows, waves, stages: as in ``FlyConfig``.
        clean, compressed, bf16: the form and the type of the result.
        swizzle: pieces of keys rotate in LDS, so that reads meet no bank conflict. Off only to show what it is for.
    """

    deep: bool
    heads: int
    head_dim: int
    rows: int
    waves: int
    stages: int
    clean: bool
    compressed: bool = False
    bf16: bool = False
    swizzle: bool = True

    @property
    def name(self) -> str:
        """Of the kernel, as traces show it."""
        mfma = "mfma32x32x64" if self.deep else "mfma16x16x32"
        lds = f"lds{self.stages}" + ("_swizzled" if self.swizzle else "")
        form = "compressed" if self.compressed else "clean" if self.clean else "noclean"
        shape = f"H{self.heads}_D{self.head_dim}_{mfma}_bkv{self.tile}_r{self.rows}_w{self.waves}"
        return f"fp8_mqa_logits_{shape}_{lds}_{form}{'_bf16' if self.bf16 else ''}_flydsl"

    # The block

    @property
    def threads(self) -> int:
        return LANES * self.waves

    @property
    def row_waves(self) -> int:
        """Waves that own different rows. Waves beyond the rows share these, and own different keys of a tile."""
        return min(self.rows, self.waves)

    @property
    def key_waves(self) -> int:
        return self.waves // self.row_waves

    @property
    def rows_of_wave(self) -> int:
        return self.rows // self.row_waves

    @property
    def tile(self) -> int:
        """Keys of a tile in LDS."""
        return KEYS_OF_WAVE * self.key_waves

    # The matrix unit

    @property
    def side(self) -> int:
        """Heads, and keys, of one MFMA."""
        return 32 if self.deep else 16

    @property
    def lane_groups(self) -> int:
        """Groups of ``side`` lanes. Each holds other channels of an operand, and other heads of the result."""
        return LANES // self.side

    @property
    def results(self) -> int:
        """Scores of a product that a lane holds. Register r: head 4 * (lane group + lane_groups * (r // 4)) + r % 4."""
        return self.side * self.side // LANES

    @property
    def subtiles(self) -> int:
        """Products of ``side`` keys that make up a wave's keys."""
        return KEYS_OF_WAVE // self.side

    @property
    def pieces(self) -> int:
        """16-byte pieces of one head or key."""
        return self.head_dim // PIECE

    @property
    def reads(self) -> int:
        """Pieces of one head or key that a lane holds for a product."""
        return self.pieces // self.lane_groups

    def piece(self, lane_group: Any, read: int) -> Any:
        """Which piece that is. The same for q and k, so the dot product is whole whatever channels a lane gets."""
        return lane_group + read * self.lane_groups

    # LDS: per stage a tile of keys, then each wave's own scales, one a lane

    @property
    def direct(self) -> bool:
        """Tiles go from memory into LDS, 16 bytes a lane. CDNA3 would copy 4, so there they pass through registers."""
        return self.deep

    @property
    def copies(self) -> int:
        """Pieces of a tile that one thread brings in."""
        return self.tile * self.pieces // self.threads

    @property
    def key_bytes(self) -> int:
        return self.tile * self.head_dim

    @property
    def stage_bytes(self) -> int:
        return self.key_bytes + self.threads * 4

    @property
    def lds_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def swizzled(self, key: Any, piece: Any) -> Any:
        """Which piece of its row of LDS holds a key's piece; its own inverse.

        Lanes that are served together read the same piece of keys that begin at the same bank, so pieces rotate by XOR
        with the number of the line of banks. CDNA4 serves 16 lanes of 16 bytes at a time from 64 banks, CDNA3 8
        lanes from 32.
        """
        if not self.swizzle:
            return piece
        line = 256 if self.deep else 128
        return piece ^ (key // (line // self.head_dim) % self.pieces)
