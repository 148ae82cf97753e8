"""A micro-batch in memory. Pure numpy, apart from `micro_batch`; may import `rollmill.models` and errors only.

safetensors_reader: the bytes of a record as arrays, without a copy. arrays: those widened, packed or padded, and
returns. trace_slicing: traces selected and joined. micro_batch: the same as torch tensors; torch is imported when the
first tensor is made.
"""

from rollmill.trainer.layouts.arrays import PackedArrays, PaddedArrays, Side, pack, pad

__all__ = ["PackedArrays", "PaddedArrays", "Side", "pack", "pad"]
