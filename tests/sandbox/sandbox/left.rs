//! R5: what a process could not take away is known until it is gone, and does not become ever more.

use cogni_gateway::sandbox::left::{forget, is_noted, note, take};

#[test]
fn what_is_left_is_noted_until_it_is_gone_and_is_bounded() {
    note("one");
    drop(take("one").unwrap());
    assert!(is_noted("one") && !is_noted("two"));
    let taken = take("one").unwrap();
    assert!(!is_noted("one") && take("one").is_none());
    taken.forget();
    assert!(!forget("one"));
    (0..=1024).for_each(|number| note(number.to_string()));
    assert!(!is_noted("0") && forget("1") && is_noted("1024"));
}
