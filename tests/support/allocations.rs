//! Counting heap allocations: deterministic, so a promise about them is a test and not a bench.

/// How often `f` allocates or grows an allocation, on this thread.
pub(crate) fn count(f: impl FnOnce()) -> u64 {
    allocation_counter::measure(f).count_total
}

/// How many bytes of what `f` allocates are in use at once at most, on this thread.
pub(crate) fn peak(f: impl FnOnce()) -> u64 {
    allocation_counter::measure(f).bytes_max
}
