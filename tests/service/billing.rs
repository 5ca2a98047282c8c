//! B1 to B4: Tests of billing: costs from the gateway's own records and from LiteLLM's, and one charge per call.

mod call_usage;
mod command;
mod ingest;
mod litellm;
mod reconcile;
mod reconcile_task;
mod retention;
mod shared_litellm;
mod store;

use std::path::Path;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::llm::budget::{self, Nanodollars, TokenUsage, Tokens};
use cogni_gateway::service::billing::{self, BillingStore, CallUsage, ChargeNotice, ChargeSource};
use cogni_gateway::telemetry::audit::records::CallOutcome;

/// Opens a billing store in a directory.
fn open_store(directory: &Path) -> BillingStore {
    BillingStore::new(
        SqliteDatabase::open_database(&directory.join("state.db"), &[billing::SCHEMA]).unwrap(),
    )
}

/// A call of run `run-1` that used 11 input and 7 output tokens and was settled at this time.
fn usage_of_call(call_id: &str, settled: SystemTime) -> CallUsage {
    CallUsage {
        call_id: call_id.to_owned(),
        run: "run-1".to_owned(),
        attempt: "0".to_owned(),
        account: "acct-42".to_owned(),
        upstream: "litellm".to_owned(),
        route: "chat_completions".to_owned(),
        model: Some("gpt".to_owned()),
        stream: false,
        outcome: CallOutcome::Completed,
        status: 200,
        usage: TokenUsage {
            input: Tokens(11),
            output: Tokens(7),
            source: budget::UsageSource::Provider,
            ..TokenUsage::default()
        },
        cost: Nanodollars(25_000),
        reported_cost: None,
        started: settled - Duration::from_secs(1),
        settled,
    }
}

/// LiteLLM's charge notice for such a call.
fn charge_notice(call_id: &str, amount: u64) -> ChargeNotice {
    ChargeNotice {
        call_id: call_id.to_owned(),
        source: ChargeSource::LitellmCallback,
        run: Some("run-1".to_owned()),
        deployment: None,
        account: Some("acct-42".to_owned()),
        model: Some("gpt".to_owned()),
        is_provisional: false,
        amount: Nanodollars(amount),
        input: Tokens(11),
        output: Tokens(7),
        started: time_at("09:30:00"),
        ended: time_at("09:30:01"),
    }
}

/// A time on the day when the fixtures were recorded.
fn time_at(time: &str) -> SystemTime {
    humantime::parse_rfc3339(&format!("2026-11-22T{time}Z")).unwrap()
}

/// Reads a file that a real LiteLLM has sent.
fn read_recording(name: &str) -> Vec<u8> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/litellm");
    std::fs::read(directory.join(name)).unwrap()
}
