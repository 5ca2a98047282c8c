//! Counts heap allocations. The counts are deterministic, so a promise about them is a test and not a benchmark.

/// Returns how often `f` allocates or grows an allocation, on this thread.
pub(crate) fn count_allocations(f: impl FnOnce()) -> u64 {
    allocation_counter::measure(f).count_total
}

/// Returns the peak of the bytes that `f` has allocated at one time, on this thread.
pub(crate) fn peak_bytes(f: impl FnOnce()) -> u64 {
    allocation_counter::measure(f).bytes_max
}
