//! A relay as a process opens it, and rows of its outbox.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::delivery::outbox::{
    DeliveryPlan, DeliveryRequest, HostContext, PullRequestText,
};
use cogni_gateway::relay::delivery::rules::ReviewRules;
use cogni_gateway::relay::delivery::statement::RunFacts;
use cogni_gateway::relay::delivery::{DeliveryConfig, DeliveryService, ForgeAccess};
use cogni_gateway::relay::git::OutboundConfig;
use cogni_gateway::relay::repo::extract_commands::AnnouncedBranch;
use cogni_gateway::relay::repo::review::RelayConfig;
use cogni_gateway::relay::repo::{BranchKey, BranchState, ObjectId, SandboxBranch};
use cogni_gateway::telemetry::audit::AuditSigningKey;

use super::github_server::{RunningGithub, forge_credential};

/// Opens this machine's relay, as a process does.
pub(crate) fn open_relay(github: &RunningGithub) -> Arc<DeliveryService> {
    Arc::new(DeliveryService::open(delivery_config(github)).unwrap())
}

pub(crate) fn delivery_config(github: &RunningGithub) -> DeliveryConfig {
    DeliveryConfig {
        state: github.place.path().join("state"),
        review: RelayConfig::parse(RULES).unwrap(),
        committer: "Relay <relay@example.com>".to_owned(),
        access: Some(ForgeAccess { api: github.api(), credential: forge_credential() }),
        network: OutboundConfig::default(),
        signing_key: Some(key_seed()),
        known_secrets: vec![],
    }
}

/// Rules under which the work of a run with this name needs a review.
const RULES: &str =
    "[[policy.paths]]\nwhy = 'it is ours'\nverdict = 'review'\nmatch = ['made-by-AGENTS.md']\n";

pub(crate) fn signing_key() -> AuditSigningKey {
    AuditSigningKey::new(Some(&key_seed())).unwrap()
}

fn key_seed() -> SecretString {
    SecretString::new("7".repeat(64))
}

pub(crate) fn delivery_request(run: &str) -> DeliveryRequest {
    let state = BranchState {
        branch: SandboxBranch::from_key(BranchKey::parse("task-1").unwrap()),
        exists: false,
        start: parse_sha("start"),
        base: "main".to_owned(),
        base_tip: parse_sha("start"),
    };
    DeliveryRequest {
        repository: "https://github.com/acme/site".parse().unwrap(),
        state,
        announced: AnnouncedBranch {
            tip: parse_sha("tip"),
            tree: parse_sha("tree"),
            commits: 1,
            merges: 0,
            head: None,
        },
        facts: RunFacts { run: run.to_owned(), agent: "coder".to_owned(), ..RunFacts::default() },
        rules: None,
        host: None,
        artifacts: Path::new("/somewhere").join(run),
        pull_request: Some(PullRequestText {
            title: "A title".to_owned(),
            body: "Words".to_owned(),
            ..PullRequestText::default()
        }),
    }
}

/// The plan before any work of the run existed.
pub(crate) fn delivery_plan(request: &DeliveryRequest) -> DeliveryPlan {
    DeliveryPlan {
        repository: request.repository.clone(),
        state: request.state.clone(),
        facts: request.facts.clone(),
        rules: ReviewRules::new(&RelayConfig::default().policy, None),
        host: HostContext { committer: String::new(), salt: String::new(), known: vec![] },
        artifacts: request.artifacts.clone(),
        run_dir: "/run/cogni".into(),
        docker_socket: PathBuf::new(),
        grant: None,
    }
}

pub(crate) fn parse_sha(text: &str) -> ObjectId {
    ObjectId::hash_object("blob", text.as_bytes())
}
