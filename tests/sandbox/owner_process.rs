//! R5: whose an object is, and whether they live; what is not certain is not called dead.

use std::process::Command;

use cogni_gateway::sandbox::OwnerProcess;
use cogni_gateway::sandbox::owner_process::OwnerState;
use proptest::prelude::*;

#[test]
fn this_process_is_alive_by_label_and_by_file_name() {
    let owner = OwnerProcess::this_process().unwrap();
    for text in [owner.to_string(), owner.to_file_name()] {
        assert_eq!(OwnerProcess::parse(&text).unwrap().state(), OwnerState::Alive);
    }
}

#[test]
fn a_process_that_has_ended_is_dead() {
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    // Not waited for, it is a zombie: its pid is taken, and nobody is there.
    let mut states = vec![];
    child.wait().unwrap();
    states.push(changed(1, &pid.to_string()).state());
    // The same pid, started at another time.
    states.push(changed(2, "1").state());
    // Before this boot.
    states.push(changed(0, "00000000000000ff").state());
    assert_eq!(states, [OwnerState::Dead; 3]);
}

/// A pid of another namespace says nothing here.
#[test]
fn a_process_that_cannot_be_seen_from_here_is_not_called_dead() {
    assert_eq!(changed(3, "1").state(), OwnerState::Unknown);
}

/// This process, but for one part.
fn changed(part: usize, value: &str) -> OwnerProcess {
    let this = OwnerProcess::this_process().unwrap().to_string();
    let mut parts: Vec<_> = this.split(':').collect();
    parts[part] = value;
    OwnerProcess::parse(&parts.join(":")).unwrap()
}

proptest! {
    /// Labels can be set by anybody.
    #[test]
    fn what_is_not_an_owner_is_not_read_as_one(text in "[0-9a-f:-]{0,60}") {
        if let Some(owner) = OwnerProcess::parse(&text) {
            prop_assert_eq!(OwnerProcess::parse(&owner.to_string()), Some(owner));
        }
    }
}
