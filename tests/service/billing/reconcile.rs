//! B3: Tests of reconciliation against the stand-in for LiteLLM, with pages and without.

use std::time::Duration;

use cogni_gateway::cli::billing::BillingOutputFormat;
use cogni_gateway::llm::budget::{self, Nanodollars, TokenUsage, Tokens};
use cogni_gateway::service::billing::reconcile::{ReconcileError, ReconcileReport};
use cogni_gateway::service::billing::store::CallFilter;
use cogni_gateway::service::billing::{BillingStore, CallUsage, ChargeNotice, ChargeSource};
use insta::assert_snapshot;
use serde_json::Value;
use tempfile::tempdir;

use super::litellm::{LitellmScript, ScriptedLitellm, litellm_client, spend_row};
use super::{charge_notice, open_store, time_at, usage_of_call};
use crate::support::process::NO_LISTENER;

const UNARY: &str = "01a20298-15f8-7428-a20a-7213618e37a2";
const STREAM: &str = "01a20298-1c99-763c-9bd8-e4dcb2c7fdcb";
const MESSAGES: &str = "01a20298-2568-7128-9aae-ccbbfe4a339f";

/// B3: If both sides agree, nothing is missing, unknown or different, and every call gets its receipt.
#[tokio::test]
async fn calls_on_which_both_agree_get_receipts() {
    let litellm = ScriptedLitellm::start(LitellmScript::Pages);
    let dir = tempdir().unwrap();
    let store = with_calls(dir.path(), &[UNARY, STREAM, MESSAGES]).await;
    let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert!(report.is_clean());
    assert_snapshot!(format_report(&report), @r#"
    calls begun from 2026-11-22T09:00:00Z to 2026-11-22T10:00:00Z, by LiteLLM's /spend/logs/v2
    matched      3, charged $0.000213; 3 receipts written
    pending      0, ended less than 15m ago
    missing      0
    unknown      0
    conflicting  0
    delta        +0 in, +0 out, +$0
    "#);
    let receipts = store.receipts_of_run("run-7").await.unwrap();
    assert!(receipts.iter().all(|receipt| receipt.source == ChargeSource::LitellmSpendLogs));
    let again = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert_eq!((again.matched, again.receipts_written), (3, 0));
}

/// B3: From a LiteLLM without pages, the service reads whole days and filters the same rows itself; one more row is a
/// failed call.
#[tokio::test]
async fn without_pages_whole_days_are_read_and_filtered_here() {
    let litellm = ScriptedLitellm::start(LitellmScript::Days);
    let dir = tempdir().unwrap();
    let store = with_calls(dir.path(), &[UNARY, STREAM, MESSAGES]).await;
    let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert_snapshot!(format_report(&report), @r#"
    calls begun from 2026-11-22T09:00:00Z to 2026-11-22T10:00:00Z, by LiteLLM's /spend/logs
    matched      3, charged $0.000213; 3 receipts written
    pending      0, ended less than 15m ago
    missing      0
    unknown      1 of LiteLLM's, which name runs of ours
        run-7 01a20298-264d-7228-9477-9313fdbfa41f  unknown-model  0 in, 0 out  $0
    conflicting  0
    delta        +0 in, +0 out, +$0
    "#);
    let requests = litellm.asked();
    assert_snapshot!(requests.join("\n"), @r#"
    /spend/logs/v2?start_date=2026-11-22%2008:50:00&end_date=2026-11-22%2010:10:00&page=1&page_size=500&sort_by=startTime&sort_order=asc
    /spend/logs?start_date=2026-11-22&end_date=2026-11-23&summarize=false
    "#);
    let other_account = CallFilter { account: Some("acct-9".to_owned()), ..day_filter() };
    let report = run_reconcile(&store, &litellm, &other_account).await.unwrap();
    assert_eq!((report.matched, report.unknown.len(), report.is_clean()), (0, 0, true));
}

/// B3: Calls that were deleted from the billing store are not reported as unknown.
#[tokio::test]
async fn calls_that_are_deleted_are_not_compared() {
    let litellm = ScriptedLitellm::start(LitellmScript::Pages);
    let dir = tempdir().unwrap();
    let store = with_calls(dir.path(), &[UNARY, STREAM, MESSAGES]).await;
    let deleted = store.delete_run("run-7", time_at("23:00:00")).await.unwrap();
    assert_eq!(deleted.calls, 3);
    let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert!(report.is_clean());
    let later =
        CallFilter { until: time_at("00:30:00") + Duration::from_hours(24), ..day_filter() };
    assert_snapshot!(format_report(&run_reconcile(&store, &litellm, &later).await.unwrap()), @"
    calls begun from 2026-11-23T00:00:00Z to 2026-11-23T00:30:00Z, by LiteLLM's /spend/logs/v2
    deleted      calls begun before 2026-11-23T00:00:00Z, which are not compared
    matched      0, charged $0; 0 receipts written
    pending      0, ended less than 15m ago
    missing      0
    unknown      0
    conflicting  0
    delta        +0 in, +0 out, +$0
    ");
}

/// B3: The report lists calls that only the service has, that only LiteLLM has, and that differ.
#[tokio::test]
async fn differences_are_reported() {
    let litellm = ScriptedLitellm::start(LitellmScript::Pages);
    let dir = tempdir().unwrap();
    let store = with_calls(dir.path(), &[UNARY]).await;
    let other =
        CallUsage { run: "run-7".to_owned(), ..usage_of_call("no-such-call", time_at("09:31:00")) };
    let late = CallUsage {
        call_id: "late-call".to_owned(),
        settled: time_at("09:50:00"),
        ..other.clone()
    };
    let refused =
        CallUsage { call_id: "refused".to_owned(), usage: TokenUsage::default(), ..other.clone() };
    let direct =
        CallUsage { call_id: "direct".to_owned(), upstream: "openai".to_owned(), ..other.clone() };
    store.record_calls(&[other, late, refused, direct]).await.unwrap();
    let usage = TokenUsage {
        output: Tokens(9),
        source: budget::UsageSource::Estimated,
        ..own_usage(MESSAGES).usage
    };
    store.record_calls(&[CallUsage { usage, ..own_usage(MESSAGES) }]).await.unwrap();
    store
        .ingest_notices(vec![ChargeNotice {
            run: Some("run-7".to_owned()),
            ..charge_notice(UNARY, 60_000)
        }])
        .await
        .unwrap();
    let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert!(!report.is_clean());
    assert_snapshot!(format_report(&report), @r#"
    calls begun from 2026-11-22T09:00:00Z to 2026-11-22T10:00:00Z, by LiteLLM's /spend/logs/v2
    matched      2, charged $0.000188; 1 receipts written
    pending      1, ended less than 15m ago
    missing      1 of ours, which LiteLLM does not know
        run-7 no-such-call  gpt  11 in, 7 out  $0.000025
    unknown      1 of LiteLLM's, which name runs of ours
        run-7 01a20298-1c99-763c-9bd8-e4dcb2c7fdcb  gpt  11 in, 7 out  $0.000025
    conflicting  1 with another price than before
        run-7 01a20298-15f8-7428-a20a-7213618e37a2  mock  10 in, 20 out  $0.00005
    delta        +0 in, -2 out, +$0
        run-7 01a20298-2568-7128-9aae-ccbbfe4a339f  gpt  +0 in, -2 out, +$0 (ours is an estimate)
    "#);
}

/// B3: More rows than a page holds are requested by account; rows of other callers are not stored.
#[tokio::test]
async fn all_pages_are_read() {
    let rows: Vec<_> = (0..1203)
        .map(|number| {
            spend_row(&format!("call-{number}"), if number % 2 == 0 { "run-7" } else { "" })
        })
        .collect();
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(rows));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let facts: Vec<_> =
        (0..1203).step_by(2).map(|number| own_usage(&format!("call-{number}"))).collect();
    store.record_calls(&facts).await.unwrap();
    let filter = CallFilter { account: Some("acct 42/ü".to_owned()), ..day_filter() };
    let report = run_reconcile(&store, &litellm, &filter).await.unwrap();
    assert_eq!((report.matched, report.unknown.len()), (0, 0), "no row is of that account");
    let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert_eq!((report.matched, report.receipts_written, report.unknown.len()), (602, 602, 0));
    assert_eq!(store.totals(time_at("10:00:00")).await.unwrap().waiting_notices, 0);
    assert_snapshot!(litellm.asked()[2..].join("\n"), @r#"
    /spend/logs/v2?start_date=2026-11-22%2008:50:00&end_date=2026-11-22%2010:10:00&page=2&page_size=500&sort_by=startTime&sort_order=asc
    /spend/logs/v2?start_date=2026-11-22%2008:50:00&end_date=2026-11-22%2010:10:00&page=3&page_size=500&sort_by=startTime&sort_order=asc
    "#);
}

/// B3: One run's calls can be reconciled alone.
#[tokio::test]
async fn one_run_can_be_reconciled_alone() {
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(vec![
        spend_row("call-1", "run-7"),
        spend_row("call-2", "run-8"),
    ]));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[own_usage("call-1")]).await.unwrap();
    let filter = CallFilter { run: Some("run-7".to_owned()), ..day_filter() };
    let report = run_reconcile(&store, &litellm, &filter).await.unwrap();
    assert_eq!((report.matched, report.unknown.len()), (1, 0));
    store
        .record_calls(&[CallUsage {
            run: "run-8".to_owned(),
            ..usage_of_call("other", time_at("08:00:00"))
        }])
        .await
        .unwrap();
    let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
    assert_eq!((report.matched, report.unknown.len()), (1, 1));
}

/// B3: LiteLLM's row may exist before the service's own record.
#[tokio::test]
async fn a_call_that_has_just_ended_is_not_unknown_yet() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let mut row = spend_row("call-1", "run-7");
    row["metadata"]["spend_logs_metadata"]["cogni_deployment_id"] =
        store.deployment_id().await.unwrap().into();
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(vec![row]));
    let seen = async |now| {
        let report =
            store.reconcile(&litellm_client(litellm.address), &day_filter(), now).await.unwrap();
        (report.pending, report.unknown.len(), report.is_clean())
    };
    assert_eq!(seen(time_at("09:45:00")).await, (1, 0, true));
    assert_eq!(seen(time_at("09:46:00")).await, (0, 1, false));
}

/// B3: The error says why there is no report.
#[tokio::test]
async fn the_error_says_why_litellm_did_not_answer() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    for (kind, expected) in [
        (
            LitellmScript::Says(500, "{\"detail\":\"Database not connected\"}"),
            "LiteLLM refuses to show its spend logs (500 Internal Server Error): {\"detail\":\"Database not connected\"}",
        ),
        (
            LitellmScript::Says(401, "no"),
            "LiteLLM refuses to show its spend logs (401 Unauthorized): no",
        ),
        (
            LitellmScript::Says(200, "{}"),
            "LiteLLM's spend logs cannot be parsed: missing field `data` at line 1 column 2",
        ),
    ] {
        let litellm = ScriptedLitellm::start(kind);
        let error = run_reconcile(&store, &litellm, &day_filter()).await.unwrap_err();
        let message = error.to_string();
        assert_eq!(message, expected);
    }
    let error = store
        .reconcile(&litellm_client(NO_LISTENER), &day_filter(), time_at("10:00:00"))
        .await
        .unwrap_err();
    assert!(matches!(error, ReconcileError::Litellm(_)), "{error}");
}

async fn with_calls(place: &std::path::Path, ids: &[&str]) -> BillingStore {
    let store = open_store(place);
    let facts: Vec<_> = ids.iter().map(|id| own_usage(id)).collect();
    store.record_calls(&facts).await.unwrap();
    store
}

/// The service's own record of a call in the recorded rows.
fn own_usage(id: &str) -> CallUsage {
    let call = CallUsage { run: "run-7".to_owned(), ..usage_of_call(id, time_at("09:30:54")) };
    match id {
        UNARY => CallUsage {
            cost: Nanodollars(50_000),
            usage: TokenUsage { input: Tokens(10), output: Tokens(20), ..call.usage },
            ..call
        },
        MESSAGES => {
            CallUsage { cost: Nanodollars::ZERO, reported_cost: Some(Nanodollars(138_000)), ..call }
        }
        _ => call,
    }
}

fn day_filter() -> CallFilter {
    CallFilter { since: time_at("09:00:00"), until: time_at("10:00:00"), account: None, run: None }
}

async fn run_reconcile(
    store: &BillingStore,
    litellm: &ScriptedLitellm,
    filter: &CallFilter,
) -> Result<ReconcileReport, ReconcileError> {
    store.reconcile(&litellm_client(litellm.address), filter, time_at("10:00:00")).await
}

fn format_report(report: &ReconcileReport) -> String {
    let mut text = vec![];
    BillingOutputFormat { json: false }
        .write_report(report, Duration::from_mins(15), &mut text)
        .unwrap();
    String::from_utf8(text).unwrap()
}

/// B3: LiteLLM has a row for each attempt of a call, in any order. The attempt that was charged counts, with pages and
/// without; until its row exists, the call is missing.
#[tokio::test]
async fn the_successful_attempt_counts() {
    let failed = || {
        let mut row = spend_row("call-1", "run-7");
        row["request_id"] = "failed-attempt".into();
        row["status"] = "failure".into();
        (row["spend"], row["prompt_tokens"], row["completion_tokens"]) =
            (0.into(), 0.into(), 0.into());
        row
    };
    let unpriced = || {
        let mut row = spend_row("call-1", "run-7");
        (row["request_id"], row["spend"]) = ("no-price".into(), Value::Null);
        row
    };
    let paid = || spend_row("call-1", "run-7");
    let rows = [
        (vec![unpriced()], false),
        (vec![unpriced(), paid()], true),
        (vec![failed(), paid()], true),
        (vec![paid(), failed()], true),
        // A row at midnight belongs to both days.
        (vec![paid(), paid(), failed(), failed()], true),
        (vec![failed()], false),
    ];
    for (rows, is_paid) in rows {
        for kind in [LitellmScript::Rows(rows.clone()), LitellmScript::DaysOf(rows)] {
            let litellm = ScriptedLitellm::start(kind);
            let dir = tempdir().unwrap();
            let store = open_store(dir.path());
            store.record_calls(&[own_usage("call-1")]).await.unwrap();
            let report = run_reconcile(&store, &litellm, &day_filter()).await.unwrap();
            assert_eq!(report.is_clean(), is_paid, "{}", format_report(&report));
            assert_eq!((report.receipts_written, report.different.len()), (u64::from(is_paid), 0));
            let amount = store.run_bill("run-7").await.unwrap().amount;
            assert_eq!(amount, Nanodollars(if is_paid { 25_000 } else { 0 }));
        }
    }
}
