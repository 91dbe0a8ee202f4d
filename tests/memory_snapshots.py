"""CUDA memory snapshots made by hand, after the structure that `torch.cuda.memory._snapshot` documents (torch 2.13)."""

MIB = 2**20
LOOP = {"filename": "/home/u/train.py", "line": 40, "name": "<module>"}
MODEL = {"filename": "/home/u/model.py", "line": 12, "name": "forward"}
LINEAR = {"filename": "/usr/lib/python3.12/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
ADAM = {"filename": "/usr/lib/python3.12/site-packages/torch/optim/adamw.py", "line": 200, "name": "step"}
ENGINE = {"filename": "??", "line": 0, "name": "torch::autograd::Engine::evaluate_function"}
FORWARD, BACKWARD, OPTIMIZER = [LINEAR, MODEL, LOOP], [ENGINE], [ADAM, LOOP]


def block(address, size, state="active_allocated", frames=(), requested=None):
    return {
        "address": address,
        "size": size,
        "requested_size": requested or size,
        "state": state,
        "frames": list(frames),
    }


def segment(address, blocks):
    size = sum(b["size"] for b in blocks)
    used = sum(b["size"] for b in blocks if b["state"].startswith("active"))
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
    }


def event(action, address, size, frames=(), **more):
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(frames), "time_us": 0, **more}


def snapshot():
    """Weights of 10 MiB from before the record, activations of 30 and 20, 5 of a gradient.

    The activations are freed, the optimizer makes 8, and then 64 are refused while 50 lie idle in a segment that is in
    use, and 40 are free.
    """
    history = [
        event("alloc", 1000, 30 * MIB, FORWARD),
        event("alloc", 2000, 20 * MIB, FORWARD),
        event("alloc", 3000, 5 * MIB, BACKWARD),
        event("free_requested", 1000, 30 * MIB),
        event("free_completed", 1000, 30 * MIB),
        event("free_requested", 2000, 20 * MIB),
        event("free_completed", 2000, 20 * MIB),
        event("alloc", 4000, 8 * MIB, OPTIMIZER),
        {"action": "oom", "size": 64 * MIB, "stream": 0, "frames": OPTIMIZER, "device_free": 40 * MIB, "time_us": 0},
    ]
    blocks = [
        block(500, 10 * MIB),
        block(3000, 5 * MIB, frames=BACKWARD),
        block(4000, 8 * MIB, frames=OPTIMIZER),
        block(9000, 50 * MIB, "inactive"),
    ]
    idle = segment(90_000, [block(90_000, 4 * MIB, "inactive")])
    return {"segments": [segment(500, blocks), idle], "device_traces": [history], "allocator_settings": {}}
