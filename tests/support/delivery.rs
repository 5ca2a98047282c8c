//! A relay as a process opens it, and rows of its outbox.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cogni_gateway::audit::SigningKey;
use cogni_gateway::base::secret::Secret;
use cogni_gateway::delivery::outbox::{Host, Order, Plan, Words};
use cogni_gateway::delivery::rules::Rules;
use cogni_gateway::delivery::statement::Facts;
use cogni_gateway::delivery::{Access, Relay, Settings};
use cogni_gateway::git::Network;
use cogni_gateway::relay::extract::Announced;
use cogni_gateway::relay::judge::Config;
use cogni_gateway::relay::{Branch, BranchKey, BranchState, Sha};

use super::forge::{Running, credential};

/// This machine's relay, as a process opens it.
pub(crate) fn relay(forge: &Running) -> Arc<Relay> {
    Arc::new(Relay::open(settings(forge)).unwrap())
}

pub(crate) fn settings(forge: &Running) -> Settings {
    Settings {
        state: forge.place.path().join("state"),
        judge: Config::parse(RULES).unwrap(),
        committer: "Relay <relay@example.com>".to_owned(),
        access: Some(Access { api: forge.api(), credential: credential() }),
        network: Network::default(),
        signing_key: Some(seed()),
        known: vec![],
    }
}

/// What a run of this name makes is for review.
const RULES: &str =
    "[[policy.paths]]\nwhy = 'it is ours'\nverdict = 'review'\nmatch = ['made-by-AGENTS.md']\n";

pub(crate) fn key() -> SigningKey {
    SigningKey::new(Some(&seed())).unwrap()
}

fn seed() -> Secret {
    Secret::new("7".repeat(64))
}

pub(crate) fn order(run: &str) -> Order {
    let state = BranchState {
        branch: Branch::of(BranchKey::parse("task-1").unwrap()),
        exists: false,
        start: sha("start"),
        base: "main".to_owned(),
        base_tip: sha("start"),
    };
    Order {
        repository: "https://github.com/acme/site".parse().unwrap(),
        state,
        announced: Announced {
            tip: sha("tip"),
            tree: sha("tree"),
            commits: 1,
            merges: 0,
            head: None,
        },
        facts: Facts { run: run.to_owned(), agent: "coder".to_owned(), ..Facts::default() },
        rules: None,
        host: None,
        artifacts: Path::new("/somewhere").join(run),
        pull_request: Some(Words { title: "A title".to_owned(), body: "Words".to_owned() }),
    }
}

/// Before there was anything of it.
pub(crate) fn plan(order: &Order) -> Plan {
    Plan {
        repository: order.repository.clone(),
        state: order.state.clone(),
        facts: order.facts.clone(),
        rules: Rules::new(&Config::default().policy, None),
        host: Host { committer: String::new(), salt: String::new(), known: vec![] },
        artifacts: order.artifacts.clone(),
        run_dir: "/run/cogni".into(),
        docker_socket: PathBuf::new(),
        grant: None,
    }
}

pub(crate) fn sha(what: &str) -> Sha {
    Sha::of("blob", what.as_bytes())
}
