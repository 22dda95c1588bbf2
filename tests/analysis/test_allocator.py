"""The caching allocator's rules, one by one, and properties of any sequence of requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

import graphopt
from graphopt.analysis.allocator import LARGE_SEGMENT, MIB, SMALL_SEGMENT, CachingAllocator, cuda_memory, rounded
from tests import zoo


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, SMALL_SEGMENT), (MIB, SMALL_SEGMENT), (MIB + 1, LARGE_SEGMENT), (10 * MIB - 512, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (101 * MIB, 102 * MIB),
    ],
)  # fmt: skip
def test_a_first_request_takes_the_segment_of_its_class(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved
    assert rounded(size) <= allocator.allocated <= reserved


def test_small_requests_share_a_segment_and_freed_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512 * 1024) for _ in range(4)]
    assert allocator.reserved == SMALL_SEGMENT
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    allocator.allocate(MIB)
    assert allocator.reserved == SMALL_SEGMENT
    allocator.free(blocks[0])
    allocator.allocate(MIB)  # two halves are free, but not side by side
    assert allocator.reserved == 2 * SMALL_SEGMENT


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    whole = allocator.allocate(11 * MIB)
    assert whole.size == 12 * MIB
    allocator.free(whole)
    assert allocator.allocate(10 * MIB).size == 10 * MIB


def test_the_best_fit_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(19 * MIB + 512 * 1024) is blocks[1]


def test_fragmented_segments_stay_apart() -> None:
    allocator = CachingAllocator()
    for size in (30, 60, 90):
        allocator.free(allocator.allocate(size * MIB))
    assert allocator.reserved == 180 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), min_size=1, max_size=60))
@settings(max_examples=60)
def test_blocks_never_overlap_and_the_sums_are_right(requests: list[tuple[int, bool]]) -> None:
    allocator = CachingAllocator()
    held = []
    for size, release in requests:
        block = allocator.allocate(size)
        assert block.size >= rounded(size)
        held.append(block)
        if release:
            allocator.free(held.pop(len(held) // 2))
        spans = sorted((b.address, b.address + b.size) for b in held)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        assert allocator.allocated == sum(b.size for b in held) <= allocator.reserved
    for block in held:
        allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.peak_allocated <= allocator.reserved


def test_a_profile_reserves_at_least_what_it_allocates() -> None:
    model, inputs = zoo.make("llama", 8)
    profile = graphopt.analyze(model, inputs, backend="aot_eager").memory
    found = cuda_memory(profile, context_bytes=7)
    assert profile.peak_bytes == found.exact_bytes <= found.allocated_bytes <= found.reserved_bytes
    assert found.total_bytes == found.reserved_bytes + 7
