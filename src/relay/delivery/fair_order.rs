//! Whose work is taken up first, where a few at a time are.

use std::collections::BTreeMap;

/// Orders rows so that the first of each owner comes before the second of any: however many one owner has, the others' do not
/// wait for all of them. What is of one owner stays in its order.
pub fn interleave_by_owner<T, K: Ord>(rows: Vec<T>, owner: impl Fn(&T) -> K) -> Vec<T> {
    let mut counts = BTreeMap::new();
    let turns = rows.into_iter().map(|row| {
        let count = counts.entry(owner(&row)).or_insert(0_usize);
        *count += 1;
        (*count, row)
    });
    let mut turns: Vec<_> = turns.collect();
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// L7: an owner of many rows comes before another's first with no more than one.
    #[test]
    fn nobodys_rows_are_all_before_anothers() {
        let rows = vec!["a1", "a2", "a3", "a4", "b1", "a5", "c1", "b2"];
        let turns = interleave_by_owner(rows, |row| row.as_bytes()[0]);
        assert_eq!(turns, ["a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"]);
    }
}
