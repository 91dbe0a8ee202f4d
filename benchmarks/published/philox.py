"""Normal random numbers as CUDA draws them: for rows whose routing follows from a seed.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), laid out over threads as in
ATen/native/cuda/DistributionTemplates.h, and Box-Muller as in cuRAND's curand_normal.h.
"""

import numpy as np

BLOCK, UNROLL, BLOCKS_PER_PROCESSOR = 256, 4, 8  # `calc_execution_policy`; 2048 threads on a multiprocessor
_LOW = np.uint64(0xFFFFFFFF)


def grid(numel: int, multiprocessors: int) -> int:
    return min(multiprocessors * BLOCKS_PER_PROCESSOR, -(-numel // BLOCK))


def offset_after(numel: int, multiprocessors: int, offset: int = 0) -> int:
    """The generator's offset once so many numbers were drawn."""
    return offset + ((numel - 1) // (BLOCK * grid(numel, multiprocessors) * UNROLL) + 1) * 4


def randn(numel: int, seed: int, offset: int, multiprocessors: int) -> np.ndarray:
    """What `torch.randn(numel, device="cuda")` returns."""
    threads = BLOCK * grid(numel, multiprocessors)
    calls = (numel - 1) // (threads * UNROLL) + 1
    out = np.empty((calls, UNROLL, threads), np.float32)
    thread = np.arange(threads, dtype=np.uint64)
    for call in range(calls):
        first, nought = np.full(threads, offset // 4 + call, np.uint64), np.zeros_like(thread)
        words = _philox([first, nought, thread, nought], seed)
        for pair in (0, 2):
            out[call, pair], out[call, pair + 1] = _box_muller(words[pair], words[pair + 1])
    return out.reshape(-1)[:numel]


def _philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    c0, c1, c2, c3 = counter
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (right >> np.uint64(32)) ^ c1 ^ key[0],
            right & _LOW,
            (left >> np.uint64(32)) ^ c3 ^ key[1],
            (left & _LOW),
        )
        key = [(key[0] + np.uint64(0x9E3779B9)) & _LOW, (key[1] + np.uint64(0xBB67AE85)) & _LOW]
    return [c0, c1, c2, c3]


def _box_muller(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    unit = np.float32(2.0**-32)
    u = x.astype(np.float32) * unit + unit / 2
    turn = np.float32(2.0**-32 * 2 * np.pi)
    v = y.astype(np.float32) * turn + turn / 2
    radius = np.sqrt(np.float32(-2) * np.log(u))
    return np.sin(v) * radius, np.cos(v) * radius
