//! The fair order of work of several owners, if a few rows at a time are processed.

use std::collections::BTreeMap;

/// Orders rows so that the first row of each owner comes before the second row of any owner. An owner with many rows
/// cannot delay the others' first rows. Rows of one owner keep their order.
pub fn interleave_by_owner<T, K: Ord>(rows: Vec<T>, owner: impl Fn(&T) -> K) -> Vec<T> {
    let mut counts = BTreeMap::new();
    let turns = rows.into_iter().map(|row| {
        let count = counts.entry(owner(&row)).or_insert(0_usize);
        *count += 1;
        (*count, row)
    });
    // The sort is stable, so owners keep the order of their first rows.
    let mut turns: Vec<_> = turns.collect();
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An owner of many rows comes before another owner's first row with one row at most (requirement L7).
    #[test]
    fn no_owner_has_all_rows_before_another_owner() {
        let rows = vec!["a1", "a2", "a3", "a4", "b1", "a5", "c1", "b2"];
        let turns = interleave_by_owner(rows, |row| row.as_bytes()[0]);
        assert_eq!(turns, ["a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"]);
    }
}
