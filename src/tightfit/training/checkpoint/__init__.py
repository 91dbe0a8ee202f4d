"""Checkpoints on disk: what a training needs to go on, in files that are whole or not there.

Use `Checkpoints` of `training.checkpoint.store` to save, find and prune, and `BackgroundSaver` of
`training.checkpoint.background` to save while the training goes on. The rest of a run's files go to disk through
`training.checkpoint.files` too.

The format, version 1. A checkpoint is a folder `step-00000050`:

- `tensors.safetensors`: all tensors in the safetensors format. Tied ones are stored once.
- further files, as `save` was given them.
- `manifest.json`, written last: `{"blake2b": HASH, "content": {...}}`. The hash (BLAKE2b, 256 bits) is of the bytes of
  the content, which has `format`, `version`, `step`; `files`: size and hash by name; `tensors`: the size of their file,
  size and hash of its first bytes (length and header), in `entries` each tensor's dtype, shape and hash, and in
  `same_as` the tied ones; `record`: the JSON that `save` was given, see `training.checkpoint.record`.

Beside it may stand `.part-*`, which a killed run was writing or removing, and `.old-step-00000050-XXXXXXXX`: a
checkpoint that was being replaced by another of its step. It is as good until that one has its name.
"""
