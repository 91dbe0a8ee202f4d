"""Inductor's kernels: their right order, and their code without text where nobody builds them.

What is left without the text is what decides about memory: which buffers a kernel reads and writes, which it writes in
place, and which stay inside of it.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of a module or a class of PyTorch is another one."""
    before = getattr_static(owner, name)  # a static method as such
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def writes_are_waited_for() -> Iterator[None]:
    """A context in which inductor orders a kernel for a CPU after the operators that write in place into what it reads.

    Where loops are divided anew to be fused, PyTorch 2.13 forgets that a kernel reads a buffer as an operator has left
    it: dropout after a softmax was read before it was drawn (notes/recompute.md, "Draws that were read too early").
    """
    from torch._inductor.scheduler import SchedulerNode  # these take seconds to import
    from torch.compiler import config

    settings: Any = config  # the stub does not know that it can be patched
    divided = getattr(SchedulerNode, "recompute_size_and_body", None)
    if divided is None:
        yield
        return

    def divided_and_renamed(node: Any, *args: Any, **kwargs: Any) -> None:
        divided(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    # What was compiled without this and lies in a cache on disk may be wrong.
    tag = f"{settings.cache_key_tag} tightfit: writes are waited for"
    with replaced(SchedulerNode, "recompute_size_and_body", divided_and_renamed), settings.patch(cache_key_tag=tag):
        yield


@contextmanager
def kernels_without_text() -> Iterator[None]:
    """A context in which a kernel's source is its list of arguments. In a release that lacks a name, kernels are
    written out.
    """
    from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup  # these take seconds to import
    from torch._inductor.loop_body import LoopBody
    from torch._inductor.scheduler import SchedulerNode

    others = (
        (SchedulerNode, "codegen", _note_uses),
        (CppKernelProxy, "data_type_propagation", _nothing),
        (CppKernelProxy, "legalize_lowp_fp_dtype", _nothing),
        (KernelGroup, "finalize_kernel", _finalize),
        (KernelGroup, "codegen_group", _arguments),
    )
    is_known = all(hasattr(owner, name) for owner, name, _ in others)
    with ExitStack() as stack:
        if is_known and "memory_usage" in LoopBody.__annotations__:
            for owner, name, other in others:
                stack.enter_context(replaced(owner, name, other))
        yield


def _nothing(*_: Any) -> None:
    pass


def _note_uses(node: Any, index_vars: Sequence[Any]) -> None:
    """Enter the buffers that a node reads and writes into its kernel, as inductor's `CSEProxy` does for each operator
    (`SchedulerNode.codegen`).
    """
    from torch._inductor.loop_body import MemoryUsageType
    from torch._inductor.virtualized import V

    reads = (MemoryUsageType.LOAD, MemoryUsageType.LOAD_SEED, MemoryUsageType.BUCKETIZE)
    kernel: Any = V.kernel
    uses = node._body.memory_usage
    for kind in reads:
        for entry in uses[kind]:
            name = _inside(entry.buffer_name)
            if name in kernel.cse.invalidated_stores:
                kernel.must_keep_buffers.add(name)
            if name not in kernel.cse.store_cache:
                kernel.args.input(name)
    for kind in (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION):
        for entry in uses[kind]:
            name = _inside(entry.buffer_name)
            kernel.store_buffer_names.add(name)
            if entry.mode != "atomic_add":
                kernel.cse.store_cache |= dict.fromkeys((name, *_written_with(node, name)))
            if name not in V.graph.removed_buffers:
                kernel.args.output(name)
                kernel.num_store += 1


def _inside(name: str) -> str:
    """The name of a buffer, or of the one inside of the kernel that stands for it."""
    from torch._inductor.virtualized import V

    locals_ = getattr(V.local_buffer_context, "global_to_local", {})
    return locals_[name].get_name() if name in locals_ else name


def _written_with(node: Any, name: str) -> Sequence[str]:
    """The buffers whose content a node replaces when it writes one."""
    from torch._inductor.virtualized import V

    return node.get_output(name).get_mutations() if name in V.graph.name_to_buffer else ()


def _finalize(group: Any, kernel: Any, nodes: Sequence[Any]) -> None:
    group.scheduled_nodes += nodes


def _arguments(group: Any, name: str | None = None) -> str:
    """The source of a kernel: kernels with the same arguments are one function."""
    group.stack.close()
    if not group.scheduled_nodes:
        return ""
    declared, _, _ = group.args.cpp_argdefs()
    return f'extern "C" void kernel({", ".join(declared)})'


@functools.cache
def tune_kernels_apart() -> None:
    """From now on Triton's kernels give back what they allocate while they are tuned, when they first run.

    That is as large as the card's second cache. In the allocator's own, steps would find it again: blocks would be
    split otherwise than planned. Does nothing before a card is used.
    """
    if not torch.cuda.is_initialized():
        tune_kernels_apart.cache_clear()
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # takes seconds to import

    tune = CachingAutotuner.benchmark_all_configs

    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            return tune(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = apart
