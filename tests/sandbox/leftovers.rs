//! R5: An object that a process could not remove stays registered until it is gone, and the list stays bounded.

use cogni_gateway::sandbox::leftovers::{claim, is_registered, register, unregister};

#[test]
fn leftovers_are_registered_until_removed_and_bounded() {
    register("one");
    drop(claim("one").unwrap());
    assert!(is_registered("one") && !is_registered("two"));
    let taken = claim("one").unwrap();
    assert!(!is_registered("one") && claim("one").is_none());
    taken.complete();
    assert!(!unregister("one"));
    (0..=1024).for_each(|number| register(number.to_string()));
    assert!(!is_registered("0") && unregister("1") && is_registered("1024"));
}
