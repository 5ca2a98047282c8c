//! A1, L5, L7: Tests of an agent's own rules: they review its work, also after the service was killed and the rules
//! have changed.

use std::fs;
use std::time::{Duration, Instant};

use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::outbox::{
    DeliveryJob, DeliveryOutbox, DeliveryStep, VerdictKind,
};
use cogni_gateway::runner::agents;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::github_server;
use crate::support::process::pause_for;
use crate::support::repository::run_git;
use crate::support::service::{ServiceProcess, tool_call_script};

/// A1, L5: Work that the agent's rules forbid is held, although the host's rules would push it. Work of other agents is
/// not affected.
#[tokio::test(flavor = "multi_thread")]
async fn an_agents_own_rules_hold_its_work() {
    let work = RuledWork::new("hold").await;
    let mut service = work.place.start();
    let listed = service.get("/api/v1/ai/agents").await.json();
    let listed = listed["agents"].as_array().unwrap().iter();
    let rules: Vec<_> =
        listed.map(|agent| json!([agent["agentId"], agent["relayRules"]])).collect();
    assert_eq!(json!(rules), json!([["sandbox:agent", []], ["sandbox:strict", ["paths"]]]));
    let metadata_of = async |agent: &str| {
        let run = work.begin(&service, agent).await;
        let row = service.ended(&run).await;
        let relay = &row["result"]["relay"];
        assert!(relay.is_object(), "{row}");
        json!([relay["step"], relay["verdict"], relay["why"]])
    };
    let why = "`made`: people make it";
    assert_eq!(metadata_of("sandbox:strict").await, json!(["held", "hold", why]));
    assert_eq!(metadata_of("sandbox:agent").await, json!(["done", "push", Value::Null]));
    service.process.terminate();
    work.place.assert_nothing_is_left();
}

/// L7: The service is killed between the verdict and the push. The work is pushed by its recorded verdict, although the
/// rules forbid any push now.
#[tokio::test(flavor = "multi_thread")]
async fn reviewed_work_is_pushed_under_stricter_rules() {
    let work = RuledWork::new("review").await;
    let before = work.killed_at(GithubOperation::Push).await;
    assert_eq!((before.step, before.verdict), (DeliveryStep::Judged, Some(VerdictKind::Review)));
    work.write_entry("hold");
    work.write_host("[policy]\nhold_files = 0\n");
    let after = work.delivered();
    assert_eq!(
        (after.step, after.verdict),
        (DeliveryStep::Done, Some(VerdictKind::Review)),
        "{after:?}"
    );
    assert_eq!(after.request.rules, before.request.rules);
    let count =
        run_git(&work.forge.bare(), &["rev-list", "--count", "main..sandbox/sandbox-strict"]);
    let pulls = work.forge.hub.pulls(github_server::NAME);
    assert_eq!((count.as_str(), pulls.len(), pulls[0].is_draft), ("1", 1, true));
}

/// L7: The service is killed before the verdict. The work is held by the rules that its agent had then, although the
/// agent has no rules now.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_was_to_be_held_is_held_under_looser_rules() {
    let work = RuledWork::new("hold").await;
    let before = work.killed_at(GithubOperation::Branch).await;
    assert_eq!((before.step, before.verdict), (DeliveryStep::Extracted, None));
    work.write_entry("push");
    let after = work.delivered();
    assert_eq!(
        (after.step, after.verdict),
        (DeliveryStep::Held, Some(VerdictKind::Hold)),
        "{after:?}"
    );
    assert_eq!(after.error.as_deref(), Some("`made`: people make it"));
    assert!(work.forge.hub.pulls(github_server::NAME).is_empty());
}

struct RuledWork {
    place: ServiceSetup,
    forge: github_server::RunningGithub,
}

impl RuledWork {
    /// Adds an agent beside `cogni-agent` whose entry has a rule with this verdict.
    async fn new(verdict: &str) -> Self {
        let commit = "echo made > made && git add made && git commit --quiet --message=Make";
        let mut setup = ServiceSetup::new(&tool_call_script(commit)).await;
        let github = github_server::RunningGithub::start().await;
        setup.set("GITHUB_API_URL", github.hub.url());
        setup.set("GITHUB_TOKEN", github_server::TOKEN);
        let (agents, host) = (setup.path().join("agents"), setup.path().join("relay.toml"));
        setup.set("COGNI_RELAY_CONFIG", host.to_str().unwrap());
        setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
        fs::create_dir(&agents).unwrap();
        let own = agents::builtin_file("sandbox:agent").unwrap();
        fs::write(agents.join("sandbox-agent.toml"), own).unwrap();
        let work = Self { place: setup, forge: github };
        work.write_entry(verdict);
        work.write_host("");
        work
    }

    fn write_entry(&self, verdict: &str) {
        let entry = agents::builtin_file("sandbox:agent").unwrap();
        let entry = entry.replace("\"sandbox:agent\"", "\"sandbox:strict\"");
        let rule = format!(
            "[[relay.policy.paths]]\nwhy = 'people make it'\nverdict = '{verdict}'\nmatch = ['made']\n"
        );
        let file = self.place.path().join("agents/sandbox-strict.toml");
        fs::write(file, format!("{entry}\n{rule}")).unwrap();
    }

    fn write_host(&self, rules: &str) {
        fs::write(self.place.path().join("relay.toml"), rules).unwrap();
    }

    async fn begin(&self, service: &ServiceProcess, agent: &str) -> String {
        let mut body = conversation_body("work");
        body["agent"] = json!(agent);
        body["repo"] = json!(self.forge.clone_url());
        body["branch_key"] = json!(agent.replace(':', "-"));
        body["pull_request"] = json!(true);
        service.run(&body).await
    }

    /// Returns the row of a run whose service is killed during this call to GitHub.
    async fn killed_at(&self, operation: GithubOperation) -> DeliveryJob {
        let mut service = self.place.start();
        self.forge.hub.inject(operation, InjectedFailure::HoldBefore, 1);
        self.begin(&service, "sandbox:strict").await;
        self.forge.hub.response_gate().wait_for_waiting(1).await;
        service.process.signal("KILL");
        service.process.wait();
        self.forge.hub.response_gate().allow_answers(1);
        self.rows().remove(0)
    }

    /// Returns the row after another process has finished it.
    fn delivered(&self) -> DeliveryJob {
        let mut service = self.place.start();
        // The service looks for due rows twice a minute.
        let begun = Instant::now();
        while self.rows().iter().any(|row| !row.step.is_terminal()) {
            assert!(begun.elapsed() < Duration::from_mins(4), "{:?}", self.rows());
            tokio::task::block_in_place(|| pause_for(Duration::from_millis(100)));
        }
        service.process.terminate();
        self.place.assert_nothing_is_left();
        self.rows().remove(0)
    }

    fn rows(&self) -> Vec<DeliveryJob> {
        let outbox = DeliveryOutbox::open(&self.place.state_dir().join("outbox.sqlite"));
        outbox.unwrap().list_jobs(false).unwrap()
    }
}
