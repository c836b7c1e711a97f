"""Where the ``flydsl`` kernels keep what: MFMA fragments, LDS. Plain arithmetic, shared by kernel and tests."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 64
KEYS_OF_WAVE = 64  # keys of a tile that one wave scores: one a lane, once heads are summed
CHUNK = 16  # bytes that a lane reads or copies at a time


@dataclass(frozen=True, slots=True)
class Layout:
    """One kernel's plan."""

    arch: str
    heads: int
    head_dim: int
    rows: int
    waves: int
    stages: int
    clean: bool
    compressed: bool
    bf16: bool

    @property
    def name(self) -> str:
        """Of the kernel, as traces show it."""
        mfma = "mfma32x32x64" if self.arch == "gfx950" else "mfma16x16x32"
        form = "compressed" if self.compressed else "clean" if self.clean else "nocl"
        dtype = "_bf16" if self.bf16 else ""
        return (
            f"fp8_mqa_logits_H{self.heads}_D{self.head_dim}_{mfma}_bkv{self.tile}_r{self.rows}_w{self.waves}"
            f"_lds{self.stages}_swizzled_{form}{dtype}_flydsl"
        )

    @property
    def row_waves(self) -> int:
        return min(self.rows, self.waves)

    @property
    def key_waves(self) -> int:
        return self.waves // self.row_waves

    @property
    def rows_of_wave(self) -> int:
        return self.rows // self.row_waves

    @property
    def tile(self) -> int:
        return KEYS_OF_WAVE * self.key_waves

    @property
    def side(self) -> int:
        """Heads and keys of one MFMA."""
        return 32 if self.arch == "gfx950" else 16

    @property
    def results(self) -> int:
        """Scores of one MFMA that a lane holds."""
        return self.side * self.side // LANES

    @property
    def threads(self) -> int:
        return LANES * self.waves

    @property
    def direct(self) -> bool:
        """Keys go from memory into LDS, 16 bytes a lane; gfx942 would copy 4, so it takes registers."""
        return self.arch == "gfx950"

    @property
    def key_bytes(self) -> int:
        """Bytes of a tile of keys. Behind them lie the scales: each wave's own, one a lane."""
        return self.tile * self.head_dim

    @property
    def stage_bytes(self) -> int:
        return self.key_bytes + self.threads * 4

    @property
    def lds_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def chunks(self) -> int:
        """16-byte chunks of one key."""
        return self.head_dim // CHUNK

    @property
    def reads(self) -> int:
        """16-byte reads of one MFMA fragment's D channels."""
        return self.side * self.chunks // LANES

    @property
    def copies(self) -> int:
        """Chunks of a tile that one thread brings in."""
        return self.tile * self.chunks // (LANES * self.waves)

    def swizzled(self, key, chunk):
        """Where in its row of LDS a key's chunk lies: chunks rotate by XOR, once each full line of banks."""
        # gfx950 serves 16 lanes of 16 bytes at a time from 64 banks, gfx942 8 lanes from 32.
        line = 256 if self.arch == "gfx950" else 128
        return chunk ^ (key // (line // self.head_dim) % self.chunks)

    @property
    def subtiles(self) -> int:
        """Groups of ``side`` keys among a wave's."""
        return KEYS_OF_WAVE // self.side
