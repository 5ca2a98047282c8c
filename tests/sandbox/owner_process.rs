//! R5: Tests of an object's owner process and whether it is alive; an uncertain state never counts as dead.

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
    // Without a wait, the process is a zombie: its pid is taken, and the process has ended.
    let mut states = vec![];
    child.wait().unwrap();
    states.push(changed_owner(1, &pid.to_string()).state());
    // The same pid with another start time.
    states.push(changed_owner(2, "1").state());
    // From before this boot.
    states.push(changed_owner(0, "00000000000000ff").state());
    assert_eq!(states, [OwnerState::Dead; 3]);
}

/// A pid of another namespace says nothing in this one.
#[test]
fn a_process_that_cannot_be_seen_from_here_is_not_called_dead() {
    assert_eq!(changed_owner(3, "1").state(), OwnerState::Unknown);
}

/// This process with one part changed.
fn changed_owner(part: usize, value: &str) -> OwnerProcess {
    let own_process = OwnerProcess::this_process().unwrap().to_string();
    let mut parts: Vec<_> = own_process.split(':').collect();
    parts[part] = value;
    OwnerProcess::parse(&parts.join(":")).unwrap()
}

proptest! {
    /// Any user can set labels.
    #[test]
    fn an_invalid_owner_is_not_parsed(text in "[0-9a-f:-]{0,60}") {
        if let Some(owner) = OwnerProcess::parse(&text) {
            prop_assert_eq!(OwnerProcess::parse(&owner.to_string()), Some(owner));
        }
    }
}
