"""Texts of out-of-memory errors as people post them: other versions, trainers and machines. Rebuilt, not copied."""

from typing import NamedTuple

import pytest

from tightfit.errors import InputError
from tightfit.recipes.doctor.diagnosing import diagnose
from tightfit.recipes.doctor.reading import read_text

SITE = "/usr/lib/python3.11/site-packages"
NEW = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {all} of which {free} is free. "
    "{process}Of the allocated memory {held} is allocated by PyTorch, and {idle} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "CUDA out of memory. Tried to allocate {asked} (GPU 0; {all} total capacity; {held} already allocated; {free} free;"
    " {idle} reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)
SIZES = {"asked": "1.00 GiB", "all": "23.65 GiB", "free": "40.00 MiB", "held": "22.00 GiB", "idle": "200.00 MiB"}
ENGINE = ("torch/autograd/graph.py", "_engine_run_backward", "return Variable._execution_engine.run_backward(")
MODULE = ("torch/nn/modules/module.py", "_call_impl", "return forward_call(*args, **kwargs)")


def new(process="", **sizes):
    return NEW.format(process=process, **{**SIZES, **sizes})


def trace(*calls, error="torch.OutOfMemoryError", text=None, speaker=""):
    """A traceback through these calls: (file, function, line of code)."""
    lines = ["Traceback (most recent call last):"]
    for number, (file, name, code) in enumerate(calls, 10):
        place = file if file.startswith("/") else f"{SITE}/{file}"
        lines += [f'  File "{place}", line {number}, in {name}', f"    {code}"]
    lines.append(f"{error}: {new() if text is None else text}")
    return "\n".join(f"{speaker}{line}" for line in lines)


def user(code, name="<module>"):
    return ("/home/u/train.py", name, code)


class Case(NamedTuple):
    log: str
    phase: str | None
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


TRAINER = ("transformers/trainer.py", "training_step", "self.accelerator.backward(loss, **kwargs)")
LLAMA = "transformers/models/llama/modeling_llama.py"
OWN = "Including non-PyTorch memory, this process has {} memory in use. "
RAY = "(RayTrainWorker pid=77, ip=10.0.0.2) "
CASES = {
    "backward, cut after the user's line": Case(trace(user("loss.backward()")), "backward", ("train.py:10",)),
    "backward, whole": Case(
        trace(user("loss.backward()"), ("torch/_tensor.py", "backward", "backward("), ENGINE), "backward"
    ),
    "a scaler's backward": Case(trace(user("scaler.scale(loss).backward()")), "backward"),
    "transformers' Trainer": Case(
        trace(user("trainer.train()"), TRAINER, ("accelerate/accelerator.py", "backward", "loss.backward()"), ENGINE),
        "backward",
    ),
    "recompute below backward": Case(
        trace(user("loss.backward()"), ENGINE, ("torch/utils/checkpoint.py", "unpack_hook", "_run_fn(*args)"), MODULE,
              (LLAMA, "forward", "up = self.up_proj(x)")),
        "backward",
    ),
    "forward of a module": Case(
        trace(user("out = model(**batch)"), MODULE, (LLAMA, "forward", "x = x + y")),
        "forward", ("At least 784.00 MiB were missing",),
    ),
    "an optimizer's first step": Case(
        trace(user("optimizer.step()"), ("torch/optim/adamw.py", "_init_group", "torch.zeros_like(")), "optimizer",
        ("states on the host",), ("recompute and offload",),
    ),
    "bitsandbytes' optimizer": Case(
        trace(user("opt.step()"), ("bitsandbytes/optim/optimizer.py", "step", "self.init_state(group, p)")),
        "optimizer",
    ),
    "DeepSpeed's states": Case(
        trace(user("engine = deepspeed.initialize(model)"),
              ("deepspeed/runtime/zero/stage_1_and_2.py", "initialize_optimizer_states", "self.optimizer.step()")),
        "optimizer",
    ),
    "a model moved to the card": Case(
        trace(user("model.to('cuda')"), ("torch/nn/modules/module.py", "to", "return self._apply(convert)"),
              ("torch/nn/modules/module.py", "_apply", "param_applied = fn(param)")),
        None, ("no step had begun", "weights in bf16"), ("in forward", "recompute and offload"),
    ),
    "weights that are loaded": Case(
        trace(user("m = AutoModelForCausalLM.from_pretrained(name)"),
              ("transformers/modeling_utils.py", "from_pretrained", "cls._load_pretrained_model(")),
        None, ("no step had begun",), ("in forward",),
    ),
    "torch 1.13, no traceback": Case(
        f"epoch 3\nRuntimeError: {OLD.format(**{**SIZES, 'idle': '22.30 GiB'})}", None,
        ("Of 23.65 GiB on the device", "were reserved by PyTorch and not in use"), ("in forward",),
    ),
    "torch 2.0's misprint": Case(
        trace(user("loss.backward()"), text=new().replace("capacity", "capacty")), "backward", ("Of 23.65 GiB",)
    ),
    "a container that names no process": Case(
        trace(user("loss.backward()"), text=new(OWN.format("0 bytes"))),
        "backward", (), ("Other processes",),
    ),
    "a container that wraps around": Case(
        trace(user("loss.backward()"), text=new(OWN.format("17179869184.00 GiB"))),
        "backward", (), ("Other processes",),
    ),
    "another process on the card": Case(
        trace(user("loss.backward()"), text=new(OWN.format("3.00 GiB"), held="2.80 GiB", idle="10.00 MiB")),
        "backward", ("Other processes held 20.61 GiB",),
    ),
    "cuBLAS": Case(
        trace(user("y = layer(x)"), MODULE, ("torch/nn/modules/linear.py", "forward", "return F.linear("),
              error="RuntimeError", text="CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "forward", ("The message has no figures", "budget: 90%"),
    ),
    "cuDNN": Case(
        trace(user("loss.backward()"), ENGINE, error="RuntimeError", text="cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        "backward", ("The message has no figures",),
    ),
    "the runtime's own words": Case(
        trace(user("x = x.cuda()"), error="RuntimeError", text="CUDA error: out of memory\nCUDA kernel errors"),
        None, ("The message has no figures",),
    ),
    "torchrun, two ranks, and a launcher's own traceback": Case(
        "\n".join([
            trace(user("optimizer.step()"), ("torch/optim/adam.py", "step", "adam("), speaker="[rank1]: "),
            trace(user("loss.backward()"), ENGINE, speaker="[rank0]: "),
            "Traceback (most recent call last):", f'  File "{SITE}/torch/distributed/run.py", line 3, in main',
            "    run(args)", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        ]),
        "backward", ("train.py:10",),
    ),
    "Ray": Case(trace(user("loss.backward()"), ENGINE, speaker=RAY), "backward"),
    "drawn by rich": Case(
        "\n".join([
            "╭───────────── Traceback (most recent call last) ─────────────╮",
            "│ /home/u/train.py:88 in fit                                   │",
            "│    87 │   loss = out.loss                                    │",
            "│ ❱  88 │   loss.backward()                                    │",
            "╰──────────────────────────────────────────────────────────────╯",
            f"OutOfMemoryError: {new()}",
        ]),
        "backward", ("train.py:88",),
    ),
    "Linux ended it": Case("step 7\nOut of memory: Killed process 77 (python)", None, ("The memory of the host",)),
    "behind a progress bar": Case("  1%|  | 12/1200 [00:33<55:10,  2.79s/it]Killed\n", None, ("dmesg", "of the host")),
    "a script's shell": Case("run.sh: line 3:  4711 Killed                  python train.py", None, ("dmesg",)),
    "zsh": Case("[1]    4711 killed     python train.py --bs 8", None, ("dmesg",)),
    "bash, a job": Case("[1]+  Killed                  python train.py", None, ("dmesg",)),
    "accelerate": Case(
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 137.",
        None, ("dmesg",),
    ),
    "DeepSpeed": Case(
        "[ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9", None, ("dmesg",)
    ),
    "a worker was ended": Case(
        "RuntimeError: DataLoader worker (pid(s) 77) is killed by signal: Killed. ", None, ("DataLoader workers",)
    ),
    "numpy": Case(
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 11.9 GiB for an array with shape (40000,)",
        None, ("cpu ran out of memory: 11.90 GiB",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_posted_log_is_read_for_what_it_says(name):
    case = CASES[name]
    found = diagnose(read_text(case.log, "log"))
    assert found.phase == case.phase
    text = " ".join(str(found).split())
    assert all(said in text for said in case.says), text
    assert not any(said in text for said in case.never), text
    assert found.remedies or "of the host" in text
    if case.phase is None:
        assert not any(f", in {phase}" in text for phase in ("forward", "backward", "optimizer"))


MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 15.62 GB, other allocations: 2.20 GB, max allowed: 18.13 "
    "GB). Tried to allocate 1.96 GB on private pool."
)
XPU = "torch.OutOfMemoryError: XPU out of memory. " + new().partition(". ")[2]
HOST = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes."


@pytest.mark.parametrize(("kind", "log"), [("mps", MPS), ("xpu", XPU)])
def test_a_device_on_which_nothing_is_planned_gets_no_plan(kind, log):
    text = " ".join(str(diagnose(read_text(log, "log"))).split())
    assert f'torch.autocast("{kind}' in text
    assert "tightfit.plan(" not in text
    assert '"cuda"' not in text


@pytest.mark.parametrize(("kind", "log"), [("cuda", new()), ("cpu", HOST)])
def test_autocast_is_that_of_the_device_which_ran_out(kind, log):
    found = diagnose(read_text(log, "log"))
    assert [each.python for each in found.remedies if f'autocast("{kind}"' in each.python]
    assert not [each.python for each in found.remedies if "autocast(" in each.python and f'"{kind}"' not in each.python]


def test_the_remedies_have_the_budget_that_the_log_shows():
    found = diagnose(read_text(CASES["forward of a module"].log, "log"))
    within = 22 * 1024 + 200 + 40
    assert found.remedies[0].yaml == f"memory: {{budget: {within}MiB, levers: [exact, offload]}}"
    assert f'"{within}MiB"' in found.remedies[0].python
    assert [remedy.exactness for remedy in found.remedies] == sorted(
        (remedy.exactness for remedy in found.remedies), key=("exact", "rounding", "inexact").index
    )


@pytest.mark.parametrize(
    "text", ["loss 0.3\nall is well", "ValueError: out of range", "triton OutOfResources: shared memory"]
)
def test_a_log_without_such_an_error_is_refused(text):
    with pytest.raises(InputError, match="no out-of-memory error"):
        read_text(text, "log")
