"""The settings of CUDA's allocator, by name. No torch here."""

import difflib

# Short names, and what each is in PyTorch's own words.
SETTINGS = {"expandable_segments": "expandable_segments:True"}

# What PyTorch reads (c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp, torch 2.11 to 2.13).
KEYS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)


def parse_allocator(text: str) -> str:
    """What a setting means in PyTorch's words: `expandable_segments`, or `key:value` with commas between.

    Raises `ValueError` with one clear line where a key is not one; what the values may be, PyTorch says.
    """
    if text in SETTINGS:
        return SETTINGS[text]
    for part in _parts(text):
        key, colon, value = (word.strip() for word in part.partition(":"))
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(KEYS)}"
            raise ValueError(f"allocator {text!r}: {key!r} is no setting of CUDA's allocator: {hint}")
        if not colon or not value:
            raise ValueError(f"allocator {text!r}: {key!r} has no value: write {key}:VALUE")
    return ",".join(part.strip() for part in _parts(text))


def _parts(text: str) -> list[str]:
    """The settings between the commas; those within brackets belong to one value."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
