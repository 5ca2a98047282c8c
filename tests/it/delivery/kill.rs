//! The relay's process, killed at each step of the way.

use std::path::Path;
use std::process::Command;

use cogni_gateway::delivery::outbox::{Outbox, Step};
use cogni_gateway::stand_in::{Operation, Trouble};

use super::way::{relay, work};
use crate::support::forge::{NAME, Running, TOKEN, git};
use crate::support::process::Process;

/// L7: a process that is killed while it waits, before or after anything that it asks of the forge, leaves a row; the
/// next one brings exactly one update of the branch and one pull request.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_relay_goes_on_in_the_next_process() {
    let forge = Running::start().await;
    let operations = [
        Operation::Branch,
        Operation::Advertise,
        Operation::Push,
        Operation::ListPulls,
        Operation::CreatePull,
    ];
    let ways = [Trouble::HoldBefore, Trouble::HoldAfter];
    let points = operations.into_iter().flat_map(|at| ways.clone().map(|way| (at, way)));
    for (number, (operation, way)) in points.enumerate() {
        let (key, what) = (format!("kill-{number}"), format!("{operation:?} {way:?}"));
        let id = begin(&forge, &key).await;
        forge.hub.inject(operation, way, 1);
        let mut first = start(&forge, &id);
        forge.hub.gate().reached(1).await;
        first.signal("KILL");
        first.wait();
        forge.hub.gate().open(1);

        let second = finish(&forge, &id).await;
        let outbox = Outbox::open(&state(&forge).join("outbox.sqlite")).unwrap();
        assert_eq!(outbox.get(&id).unwrap().step, Step::Done, "{what}: {second}");
        let count = git(&forge.bare(), &["rev-list", "--count", &format!("main..sandbox/{key}")]);
        let pulls = forge.hub.pulls(NAME);
        let own = pulls.iter().filter(|pull| pull.head == format!("sandbox/{key}")).count();
        assert_eq!((count.as_str(), own), ("1", 1), "{what}: {second}");
        assert!(!second.contains(TOKEN));
    }
}

/// A run's work, in the outbox, and no process that cares for it.
async fn begin(forge: &Running, key: &str) -> String {
    let relay = relay(forge);
    let (order, begun) = work(forge, &relay, key, key).await;
    drop(begun);
    relay.outbox().add(&order).unwrap().id
}

/// Asks until it is done: a git that outlives its killed parent may be at the branch for a moment.
async fn finish(forge: &Running, id: &str) -> String {
    let mut said = String::new();
    for _ in 0..20 {
        let mut process = start(forge, id);
        let ended = tokio::task::spawn_blocking(move || (process.wait(), process.said())).await;
        let (status, more) = ended.unwrap();
        said += &more;
        if status.success() {
            break;
        }
    }
    said
}

fn start(forge: &Running, id: &str) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command
        .args(["relay", "retry", id])
        .env("COGNI_STATE_DIR", state(forge))
        .env("GITHUB_API_URL", forge.hub.url())
        .env("GITHUB_TOKEN", TOKEN);
    Process::start(&mut command, "build it")
}

fn state(forge: &Running) -> std::path::PathBuf {
    Path::new(forge.place.path()).join("state")
}
