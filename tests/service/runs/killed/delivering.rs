//! B4, L7, R5: Tests of a service that is killed while it delivers work and receives charge notices. No call is charged
//! twice, no work is delivered twice, and no pull request is made twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cogni_gateway::fakes::model_provider::RecordedRequest;
use cogni_gateway::relay::delivery::outbox::{DeliveryJob, DeliveryOutbox};
use cogni_gateway::telemetry::audit::verify;
use futures_util::future::join_all;
use serde_json::{Value, json};

use super::super::{ServiceSetup, conversation_body};
use crate::support::github_server;
use crate::support::process::pause_for;
use crate::support::repository::run_git;
use crate::support::service::{ServiceProcess, tool_call_script};

/// The service is killed at twenty moments, with two runs for a branch and one without a branch.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_killed_while_it_delivers_does_nothing_twice() {
    let work = DeliveredWork::new().await;
    let mut runs = BTreeMap::new();
    for round in 0..20_u64 {
        let mut service = work.place.start();
        for number in 0..3 {
            let run = service.run(&work.asked(round, number)).await;
            runs.insert(run, (number < 2).then(|| branch_name(round, number)));
        }
        work.tell_costs(&service).await;
        tokio::task::block_in_place(|| pause_for(Duration::from_millis(round * 149 % 1500)));
        service.process.signal("KILL");
        service.process.wait();
    }
    let mut service = work.place.start();
    // This process is not killed, however slow the machine is.
    runs.insert(service.run(&work.asked(20, 2)).await, None);
    let rows = join_all(runs.keys().map(|run| service.ended(run))).await;
    for row in &rows {
        let code = row["error_code"].as_str().unwrap_or("ok");
        let allowed = ["ok", "interrupted", "branch_unavailable", "sandbox_busy"];
        assert!(allowed.contains(&code), "{row}");
    }
    work.assert_delivered_once(&rows, &runs);
    work.assert_charged_once(&service, &runs).await;
    service.process.terminate();
    work.place.assert_nothing_is_left();
}

struct DeliveredWork {
    place: ServiceSetup,
    forge: github_server::RunningGithub,
}

impl DeliveredWork {
    /// The model of each run makes it commit a file with the run's name.
    async fn new() -> Self {
        let commit = "echo made > $RUN_ID && git add $RUN_ID && git commit --quiet --message=Make";
        let mut setup = ServiceSetup::new(&tool_call_script(commit)).await;
        let github = github_server::RunningGithub::start().await;
        setup.set("GITHUB_API_URL", github.hub.url());
        setup.set("GITHUB_TOKEN", github_server::TOKEN);
        Self { place: setup, forge: github }
    }

    fn asked(&self, round: u64, number: u64) -> Value {
        let mut body = conversation_body("work");
        if number < 2 {
            body["repo"] = json!(self.forge.clone_url());
            body["branch_key"] = json!(branch_name(round, number));
            body["pull_request"] = json!(true);
        }
        body
    }

    /// Returns all calls of runs to the provider. The service also asks it for spend logs, which it does not have.
    fn calls(&self) -> Vec<RecordedRequest> {
        let all = self.place.provider.seen.requests().into_iter();
        all.filter(|call| call.header("x-litellm-call-id").is_some()).collect()
    }

    /// Sends LiteLLM's notice for each call, again and again.
    async fn tell_costs(&self, service: &ServiceProcess) {
        let calls = self.calls();
        let items: Vec<_> = calls.iter().map(receipt_of).collect();
        let answer = service.post("/api/internal/billing/ingest", &json!(items)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let status = answer.json();
        assert_eq!(
            (&status["conflicting"], &status["invalid"]),
            (&json!(0), &json!(0)),
            "{status}"
        );
    }

    fn assert_delivered_once(&self, rows: &[Value], runs: &BTreeMap<String, Option<String>>) {
        let jobs = self.delivered();
        for job in &jobs {
            assert_eq!(job.step.as_str(), "done", "{job:?}");
            let log = self.relay_log(&job.id);
            if log.exists() {
                verify::verify_file(&log, None).unwrap();
            }
        }
        let brought: BTreeSet<_> = jobs.iter().map(|job| job.request.facts.run.as_str()).collect();
        assert_eq!(brought.len(), jobs.len(), "a run has two deliveries");
        let branches: BTreeSet<_> =
            jobs.iter().map(|job| job.request.branch().to_string()).collect();
        let mut pulled: Vec<_> =
            self.forge.hub.pulls(github_server::NAME).into_iter().map(|pull| pull.head).collect();
        pulled.sort();
        // Commits of a killed run are delivered to its branch, without a pull request.
        let delivered = jobs.iter().filter(|job| job.request.pull_request.is_some());
        let delivered: BTreeSet<_> =
            delivered.map(|job| job.request.branch().to_string()).collect();
        assert_eq!(pulled, delivered.into_iter().collect::<Vec<_>>());
        let mut made: Vec<_> = branches.iter().flat_map(|branch| self.made(branch)).collect();
        made.sort();
        assert_eq!(made, brought.iter().copied().collect::<Vec<_>>(), "each file was added once");
        for row in rows.iter().filter(|row| row["error_code"].is_null()) {
            let run = row["id"].as_str().unwrap();
            assert_eq!(brought.contains(run), runs[run].is_some(), "{row}");
        }
        let codes: BTreeSet<_> = rows.iter().map(|row| row["error_code"].as_str()).collect();
        assert!(codes.contains(&None) && codes.contains(&Some("interrupted")), "{codes:?}");
    }

    /// Returns the outbox when all deliveries have ended.
    fn delivered(&self) -> Vec<DeliveryJob> {
        let outbox = DeliveryOutbox::open(&self.place.state_dir().join("outbox.sqlite")).unwrap();
        let open = || outbox.list_jobs(true).unwrap();
        // The service looks for due rows twice a minute.
        let begun = Instant::now();
        while !open().is_empty() {
            assert!(begun.elapsed() < Duration::from_mins(4), "{:?}", open());
            tokio::task::block_in_place(|| pause_for(Duration::from_millis(200)));
        }
        outbox.list_jobs(false).unwrap()
    }

    fn relay_log(&self, id: &str) -> PathBuf {
        self.place.state_dir().join("audit").join(format!("{id}.jsonl"))
    }

    /// Returns the files that a branch's commits have added, repeated as often as they were added.
    fn made(&self, branch: &str) -> Vec<String> {
        let range = format!("main..{branch}");
        let log = ["log", "--format=", "--name-only", "--diff-filter=A", &range];
        run_git(&self.forge.bare(), &log).lines().map(str::to_owned).collect()
    }

    /// Asserts that each call of the provider is in the billing store, with exactly one receipt.
    async fn assert_charged_once(
        &self,
        service: &ServiceProcess,
        runs: &BTreeMap<String, Option<String>>,
    ) {
        self.tell_costs(service).await;
        let store = self.place.books();
        let seen = self.calls();
        let seen: Vec<_> = seen.iter().map(call_id).collect();
        let distinct: BTreeSet<_> = seen.iter().map(|&(call, _)| call).collect();
        assert_eq!(distinct.len(), seen.len(), "two calls have one id");
        let (mut booked, mut charged) = (BTreeSet::new(), BTreeSet::new());
        for run in runs.keys() {
            let log = self.place.audit_log(run);
            let report = log.exists().then(|| verify::verify_file(&log, None).unwrap());
            let admitted = report.map_or(0, |report| report.admitted);
            let facts = store.calls_of_run(run).await.unwrap();
            assert_eq!(facts.len() as u64, admitted, "{run}");
            let usage_reports = service.events(run).await;
            let usage_reports = usage_reports.iter().filter(|event| event.kind == "usage_report");
            let usage_reports: Vec<_> =
                usage_reports.map(|event| event.data["call_id"].clone()).collect();
            let once: BTreeSet<_> = usage_reports.iter().map(Value::to_string).collect();
            assert_eq!(once.len(), usage_reports.len(), "{run}: {usage_reports:?}");
            booked.extend(facts.into_iter().map(|fact| (fact.call_id, fact.run)));
            let bill = service.get(&format!("/api/v1/runs/{run}/receipts")).await.json();
            for receipt in bill["receipts"].as_array().unwrap() {
                let reference = receipt["source_reference"].as_str().unwrap();
                let call = receipt["call_id"].as_str().unwrap().to_owned();
                assert!(reference.starts_with(run.as_str()) && reference.ends_with(&call));
                assert!(charged.insert(call), "charged twice: {receipt}");
            }
        }
        for (call, run) in seen {
            let is_booked = booked.contains(&(call.to_owned(), run));
            assert!(is_booked && charged.contains(call), "{call} {is_booked}");
        }
        assert_eq!(charged.len(), distinct.len(), "a call without a record was charged");
    }
}

fn branch_name(round: u64, number: u64) -> String {
    format!("kill-{}", (round * 2 + number) % 7)
}

/// Returns a call's id and its run, as the provider received them.
fn call_id(call: &RecordedRequest) -> (&str, String) {
    let metadata = call.header("x-litellm-spend-logs-metadata").unwrap();
    let metadata: Value = serde_json::from_str(metadata).unwrap();
    let run = metadata["run_id"].as_str().unwrap().to_owned();
    (call.header("x-litellm-call-id").unwrap(), run)
}

/// Returns the notice that LiteLLM's callback would send for a call.
fn receipt_of(call: &RecordedRequest) -> Value {
    let (id, run) = call_id(call);
    json!({
        "litellm_call_id": id,
        "status": "success",
        "response_cost": 0.000_05,
        "end_user": "acct-1",
        "model_group": "fake",
        "prompt_tokens": 11,
        "completion_tokens": 5,
        "startTime": 1_795_339_851.781,
        "endTime": 1_795_339_851.847,
        "metadata": {"spend_logs_metadata": {"run_id": run}},
    })
}
