"""The CPU allocator's record of a step."""

import torch

from exactness import allocator_record


def test_memory_from_before_the_record_does_not_count_when_it_is_freed():
    kept = []
    first = allocator_record(lambda: kept.append(torch.empty(8192)))
    assert first == (32768, 32768)
    # The allocator knows this address from the first record, and reports that it is free.
    assert allocator_record(kept.clear) == (0, 0)


def test_memory_of_the_record_is_freed_by_its_address():
    def step():
        one, other = torch.empty(1024), torch.empty(2048)
        del one
        return other.resize_(8192)

    assert allocator_record(step) == (2048 * 4 + 8192 * 4, 0)
