//! B2, B4: Tests of the billing store: usage records and notices may come in any order, repeatedly and concurrently.
//! Each call has one receipt, and a flag if its receipt is missing, has no price, or is contradicted.

use std::slice;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::{DatabaseSchema, SqliteDatabase};
use cogni_gateway::llm::budget::{Nanodollars, TokenUsage, Tokens};
use cogni_gateway::service::billing::store::IngestOutcome;
use cogni_gateway::service::billing::{
    self, BillFlag, BillState, BillingStore, CallUsage, ChargeNotice, ChargeSource, RunBill,
};
use cogni_gateway::telemetry::audit::records::CallOutcome;
use futures_util::future::join_all;
use insta::assert_json_snapshot;
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::{charge_notice, open_store, read_recording, time_at, usage_of_call};

/// LiteLLM's notice of a failed attempt.
fn failure_notice(call_id: &str) -> ChargeNotice {
    ChargeNotice {
        is_provisional: true,
        input: Tokens(0),
        output: Tokens(0),
        ..charge_notice(call_id, 0)
    }
}

const MINUTE: Duration = Duration::from_mins(1);

/// B4: A receipt has `run/attempt/call id`, the amount in nanodollars, its source and its time.
#[tokio::test]
async fn a_receipt_has_its_call_amount_source_and_time() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    assert_eq!(
        store.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap(),
        1
    );
    assert_eq!(
        store.ingest_notices(vec![charge_notice("call-1", 25_000)]).await.unwrap(),
        [IngestOutcome::New]
    );
    let mut receipts = store.receipts_of_run("run-1").await.unwrap();
    receipts[0].received = time_at("09:30:02");
    assert_json_snapshot!(receipts, @r#"
    [
      {
        "source_reference": "run-1/0/call-1",
        "call_id": "call-1",
        "run": "run-1",
        "attempt": "0",
        "account": "acct-42",
        "model": "gpt",
        "amount_usd": "0.000025",
        "source": "litellm_callback",
        "input": 11,
        "output": 7,
        "ended": "2026-11-22T09:30:01.000Z",
        "received": "2026-11-22T09:30:02.000Z"
      }
    ]
    "#);
    let bill = store.run_bill("run-1").await.unwrap();
    assert_json_snapshot!(bill, @r#"
    {
      "run": "run-1",
      "account": "acct-42",
      "calls": 1,
      "billable": 1,
      "estimated": 0,
      "receipts": 1,
      "amount_usd": "0.000025",
      "missing": 0,
      "overdue": 0,
      "unpriced": 0,
      "conflicting": 0,
      "state": "complete",
      "flags": []
    }
    "#);
    assert_eq!(
        store.calls_of_run("run-1").await.unwrap(),
        [usage_of_call("call-1", time_at("09:30:01"))]
    );
    assert_eq!(store.run_bill("run-2").await.unwrap().calls, 0);
}

/// B2: LiteLLM's notice may come before the service's own record.
#[tokio::test]
async fn a_notice_waits_for_its_call() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let ingested = store.ingest(read_recording("callback.json")).await.unwrap();
    assert_eq!((ingested.new, ingested.unknown), (0, 4));
    let id = "01a20298-18a2-760d-a1c9-56d8cd515a17";
    let first = CallUsage {
        run: "run-7".to_owned(),
        ..usage_of_call("01a20298-15f8-7428-a20a-7213618e37a2", time_at("09:30:52"))
    };
    store.record_calls(slice::from_ref(&first)).await.unwrap();
    let receipts = store.receipts_of_run("run-7").await.unwrap();
    assert_eq!((receipts.len(), receipts[0].amount), (1, Nanodollars(50_000)));
    assert_eq!(receipts[0].source_reference, format!("run-7/0/{}", first.call_id));
    let again = store.ingest(read_recording("callback.json")).await.unwrap();
    assert_eq!((again.new, again.known, again.unknown), (0, 4, 0));
    assert!(store.known_call_ids(vec![id.to_owned()]).await.unwrap().is_empty());
}

/// B2: A notice that LiteLLM sends twice, or to two processes at once, is charged once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_call_is_charged_once_however_often_it_is_reported() {
    let dir = tempdir().unwrap();
    let (one, other) = (open_store(dir.path()), open_store(dir.path()));
    let calls: Vec<_> = (0..40).map(|number| format!("call-{number}")).collect();
    let facts: Vec<_> = calls.iter().map(|call| usage_of_call(call, SystemTime::now())).collect();
    let notices: Vec<_> = calls.iter().map(|call| charge_notice(call, 25_000)).collect();
    let work = (0..16).map(|number| {
        let store = if number % 2 == 0 { one.clone() } else { other.clone() };
        let (facts, notices) = (facts.clone(), notices.clone());
        tokio::spawn(async move {
            if number % 3 == 0 {
                store.record_calls(&facts).await.unwrap();
                vec![]
            } else {
                store.ingest_notices(notices).await.unwrap()
            }
        })
    });
    let outcomes: Vec<_> = join_all(work).await.into_iter().flat_map(Result::unwrap).collect();
    assert!(outcomes.iter().all(|fate| *fate != IngestOutcome::Conflicting));
    let bill = one.run_bill("run-1").await.unwrap();
    assert_eq!((bill.calls, bill.receipts, bill.amount), (40, 40, Nanodollars(1_000_000)));
    assert_eq!(bill.state, BillState::Complete);
}

/// B2: A second price for a call is stored and flagged, but not charged. A difference of one nanodollar is rounding.
#[tokio::test]
async fn another_price_is_a_conflict_and_no_charge() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_of_call("call-1", SystemTime::now())]).await.unwrap();
    let messages = vec![
        charge_notice("call-1", 25_000),
        charge_notice("call-1", 25_001),
        charge_notice("call-1", 26_000),
        charge_notice("call-1", 26_000),
    ];
    let outcomes = store.ingest_notices(messages).await.unwrap();
    assert_eq!(
        outcomes,
        [
            IngestOutcome::New,
            IngestOutcome::Known,
            IngestOutcome::Conflicting,
            IngestOutcome::Conflicting
        ]
    );
    let bill = store.run_bill("run-1").await.unwrap();
    assert_eq!((bill.amount, bill.receipts, bill.conflicting), (Nanodollars(25_000), 1, 1));
    assert_eq!(bill.flags, [BillFlag::Conflicting]);
}

/// B2: A notice that names another run for a known call changes nothing of it.
#[tokio::test]
async fn a_notice_that_names_another_run_is_a_conflict() {
    let stranger = ChargeNotice { run: Some("run-9".to_owned()), ..charge_notice("call-1", 1) };
    for stranger_first in [true, false] {
        let dir = tempdir().unwrap();
        let store = open_store(dir.path());
        if stranger_first {
            store.ingest_notices(vec![stranger.clone()]).await.unwrap();
        }
        store.record_calls(&[usage_of_call("call-1", SystemTime::now())]).await.unwrap();
        if !stranger_first {
            assert_eq!(
                store.ingest_notices(vec![stranger.clone()]).await.unwrap(),
                [IngestOutcome::Conflicting]
            );
        }
        assert_eq!(
            store.ingest_notices(vec![charge_notice("call-1", 25_000)]).await.unwrap(),
            [IngestOutcome::New]
        );
        let bill = store.run_bill("run-1").await.unwrap();
        assert_eq!((bill.amount, bill.flags), (Nanodollars(25_000), vec![BillFlag::Conflicting]));
    }
}

/// B2: LiteLLM may report that one deployment failed and that the next succeeded, or report the failure again.
#[tokio::test]
async fn a_success_replaces_a_failure() {
    let failure = failure_notice("call-1");
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_of_call("call-1", SystemTime::now())]).await.unwrap();
    let messages = vec![
        failure.clone(),
        failure.clone(),
        charge_notice("call-1", 25_000),
        failure,
        charge_notice("call-1", 25_000),
    ];
    let outcomes = store.ingest_notices(messages).await.unwrap();
    assert_eq!(
        outcomes,
        [
            IngestOutcome::Unpaid,
            IngestOutcome::Known,
            IngestOutcome::New,
            IngestOutcome::Known,
            IngestOutcome::Known
        ]
    );
    let bill = store.run_bill("run-1").await.unwrap();
    assert_eq!((bill.amount, bill.receipts, bill.flags), (Nanodollars(25_000), 1, vec![]));
}

/// B3, B4: LiteLLM reports a failed attempt, and its report of the successful one is lost. The call is not free: it is
/// requested, and flagged after some time.
#[tokio::test]
async fn a_failure_at_no_cost_is_no_receipt_of_a_call_that_used_tokens() {
    for failure_first in [true, false] {
        let dir = tempdir().unwrap();
        let store = open_store(dir.path());
        let (failure, call) =
            (failure_notice("call-1"), usage_of_call("call-1", time_at("09:30:01")));
        if failure_first {
            assert_eq!(
                store.ingest_notices(vec![failure.clone()]).await.unwrap(),
                [IngestOutcome::WaitsForCall]
            );
        }
        store.record_calls(&[call]).await.unwrap();
        if !failure_first {
            assert_eq!(store.ingest_notices(vec![failure]).await.unwrap(), [IngestOutcome::Unpaid]);
        }
        let unmatched =
            store.calls_without_receipt(time_at("09:00:00"), time_at("09:31:00")).await.unwrap();
        assert_eq!(unmatched.len(), 1, "it is asked for");
        let bill = store.run_bill_at("run-1", time_at("09:45:00")).await.unwrap();
        assert_eq!((bill.receipts, bill.state), (0, BillState::Pending));
        let bill = store.run_bill_at("run-1", time_at("09:47:00")).await.unwrap();
        assert_eq!((bill.state, bill.flags), (BillState::Overdue, vec![BillFlag::Unreceipted]));
        assert_eq!(store.flagged_runs(time_at("09:47:00")).await.unwrap().len(), 1);
        let totals = store.totals(time_at("09:47:00")).await.unwrap();
        assert_eq!((totals.unreceipted_calls, totals.waiting_notices), (1, 0));
        store.ingest_notices(vec![charge_notice("call-1", 25_000)]).await.unwrap();
        let bill = store.run_bill("run-1").await.unwrap();
        assert_eq!((bill.amount, bill.state), (Nanodollars(25_000), BillState::Complete));
    }
}

/// B2, B4: LiteLLM reports no price for a call that used tokens. Its cost is unknown: it is requested, and flagged
/// after some time, whichever record comes first.
#[tokio::test]
async fn a_notice_without_a_price_is_no_receipt_of_a_call_that_used_tokens() {
    let priced =
        serde_json::from_slice::<Vec<Value>>(&read_recording("callback.json")).unwrap().remove(0);
    let call_id = priced["litellm_call_id"].as_str().unwrap().to_owned();
    let mut no_price = priced.clone();
    no_price["response_cost"] = Value::Null;
    let mut no_member = priced.clone();
    no_member.as_object_mut().unwrap().remove("response_cost");
    let call =
        CallUsage { run: "run-7".to_owned(), ..usage_of_call(&call_id, time_at("09:30:52")) };
    for (unpriced, call_first) in [(&no_price, true), (&no_price, false), (&no_member, true)] {
        let dir = tempdir().unwrap();
        let store = open_store(dir.path());
        if call_first {
            store.record_calls(slice::from_ref(&call)).await.unwrap();
        }
        let ingested = store.ingest(unpriced.to_string()).await.unwrap();
        assert_eq!((ingested.new, ingested.unpaid), (0, u64::from(call_first)));
        store.record_calls(slice::from_ref(&call)).await.unwrap();
        let unmatched =
            store.calls_without_receipt(time_at("09:00:00"), time_at("09:31:00")).await.unwrap();
        assert_eq!(unmatched.len(), 1, "it is asked for");
        let bill = store.run_bill_at("run-7", time_at("09:50:00")).await.unwrap();
        assert_eq!((bill.receipts, bill.flags), (0, vec![BillFlag::Unreceipted]));
        assert_eq!(store.ingest(priced.to_string()).await.unwrap().new, 1);
        assert_eq!(store.ingest(unpriced.to_string()).await.unwrap().known, 1, "a price stays");
        let bill = store.run_bill("run-7").await.unwrap();
        assert_eq!((bill.amount, bill.state), (Nanodollars(50_000), BillState::Complete));
    }
}

/// B4: The report of a failure settles a call that used nothing, and the call is open again if it turns out that it
/// used something.
#[tokio::test]
async fn a_failure_closes_a_call_that_used_nothing() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let ended = usage_of_call("call-1", time_at("09:30:01"));
    let lost =
        CallUsage { outcome: CallOutcome::Crashed, usage: TokenUsage::default(), ..ended.clone() };
    store.record_calls(&[lost]).await.unwrap();
    assert_eq!(
        store.ingest_notices(vec![failure_notice("call-1")]).await.unwrap(),
        [IngestOutcome::New]
    );
    store.record_calls(&[ended]).await.unwrap();
    let bill = store.run_bill_at("run-1", time_at("09:31:00")).await.unwrap();
    assert_eq!((bill.receipts, bill.missing), (0, 1));
}

/// B4: Whether a call was free depends on the gateway's usage record, whatever usage LiteLLM reports.
#[tokio::test]
async fn a_call_that_is_charged_nothing_is_flagged_by_its_own_tokens() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap();
    let free = ChargeNotice { input: Tokens(0), output: Tokens(0), ..charge_notice("call-1", 0) };
    assert_eq!(store.ingest_notices(vec![free]).await.unwrap(), [IngestOutcome::New]);
    assert_eq!(store.run_bill("run-1").await.unwrap().flags, [BillFlag::Unpriced]);
    assert_eq!(store.totals(SystemTime::now()).await.unwrap().unpriced_calls, 1);
}

/// B4: Calls that an earlier version settled by a failed attempt are open again; everything else is unchanged.
#[tokio::test]
async fn receipts_of_failed_attempts_are_taken_back_from_an_earlier_version() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("state.db");
    let earlier =
        DatabaseSchema { migrations: &billing::SCHEMA.migrations[..3], ..billing::SCHEMA };
    drop(SqliteDatabase::open_database(&file, &[earlier]).unwrap());
    let connection = rusqlite::Connection::open(&file).unwrap();
    for (call, input, is_failure, amount) in
        [("failed", 11, 1, 0), ("unused", 0, 1, 0), ("free", 11, 0, 0), ("paid", 11, 0, 25_000)]
    {
        let metadata = format!(
            "INSERT INTO billing_fact VALUES ('{call}', 'run-1', '0', 'a', 'litellm', 'chat_completions', 'gpt', 0,
                 'completed', 200, {input}, 0, 0, 0, 0, 0, 'provider', 0, NULL, 1, 2, {input} > 0, 1, 5);
             INSERT INTO billing_notice VALUES ('{call}', 'litellm_callback', 'run-1', {is_failure}, {amount}, 0, 0, 2, 3, 1);
             INSERT INTO billing_receipt VALUES ('run-1/0/{call}', '{call}', 'run-1', 'litellm_callback', {amount}, 0, 0,
                 2, 3);"
        );
        connection.execute_batch(&metadata).unwrap();
    }
    drop(connection);
    let store = open_store(dir.path());
    let receipts = store.receipts_of_run("run-1").await.unwrap();
    let mut left: Vec<_> = receipts.iter().map(|receipt| &*receipt.call_id).collect();
    left.sort_unstable();
    assert_eq!(left, ["free", "paid", "unused"]);
    let bill = store.run_bill_at("run-1", SystemTime::UNIX_EPOCH).await.unwrap();
    assert_eq!((bill.missing, bill.unpriced), (1, 1));
}

/// B4: Without LiteLLM, the price table gives the receipt; a call of a model without a price is flagged.
#[tokio::test]
async fn without_litellm_the_price_table_charges() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let now = SystemTime::now();
    let priced = CallUsage { upstream: "anthropic".to_owned(), ..usage_of_call("call-1", now) };
    let unpriced = CallUsage {
        cost: Nanodollars::ZERO,
        ..CallUsage { call_id: "call-2".to_owned(), ..priced.clone() }
    };
    let refused = CallUsage {
        usage: TokenUsage::default(),
        ..CallUsage { call_id: "call-3".to_owned(), ..unpriced.clone() }
    };
    store.record_calls(&[priced, unpriced, refused]).await.unwrap();
    let bill = store.run_bill("run-1").await.unwrap();
    assert_eq!((bill.calls, bill.billable, bill.receipts, bill.unpriced), (3, 2, 2, 1));
    assert_eq!(
        (bill.amount, bill.state, bill.flags),
        (Nanodollars(25_000), BillState::Complete, vec![BillFlag::Unpriced])
    );
    assert!(
        store
            .receipts_of_run("run-1")
            .await
            .unwrap()
            .iter()
            .all(|receipt| receipt.source == ChargeSource::PriceTable)
    );
}

/// B1, B4: If a call that was recorded as lost did end, its usage and charge are corrected; never in the other
/// direction.
#[tokio::test]
async fn a_call_recorded_as_lost_is_corrected() {
    for upstream in ["litellm", "openai"] {
        let dir = tempdir().unwrap();
        let store = open_store(dir.path());
        let ended = CallUsage {
            upstream: upstream.to_owned(),
            ..usage_of_call("call-1", time_at("09:30:01"))
        };
        let usage =
            TokenUsage { input: Tokens(600), output: Tokens(4096), ..TokenUsage::default() };
        let lost = CallUsage {
            outcome: CallOutcome::Crashed,
            usage,
            cost: Nanodollars(9_000_000),
            ..ended.clone()
        };
        assert_eq!(store.record_calls(slice::from_ref(&lost)).await.unwrap(), 1);
        assert_eq!(store.record_calls(&[ended.clone(), lost]).await.unwrap(), 0);
        assert_eq!(store.calls_of_run("run-1").await.unwrap(), [ended]);
        if upstream == "openai" {
            assert_eq!(store.run_bill("run-1").await.unwrap().amount, Nanodollars(25_000));
        }
    }
}

/// B1, B4: A live log was read as if its writer had ended, and then the upstream refused the call: the call is not
/// charged, unless LiteLLM reports a charge.
#[tokio::test]
async fn a_call_that_was_taken_for_lost_and_used_nothing_is_not_charged() {
    for is_said in [false, true] {
        let dir = tempdir().unwrap();
        let store = open_store(dir.path());
        let upstream = "openai".to_owned();
        let lost = CallUsage {
            outcome: CallOutcome::Crashed,
            upstream,
            ..usage_of_call("call-1", time_at("09:30:01"))
        };
        let refused = CallUsage {
            outcome: CallOutcome::Completed,
            status: 429,
            usage: TokenUsage::default(),
            ..lost.clone()
        };
        let refused = CallUsage { cost: Nanodollars::ZERO, ..refused };
        store.record_calls(&[lost]).await.unwrap();
        assert_eq!(store.run_bill("run-1").await.unwrap().receipts, 1);
        if is_said {
            store.ingest_notices(vec![charge_notice("call-1", 7)]).await.unwrap();
        }
        store.record_calls(&[refused]).await.unwrap();
        let amounts: Vec<_> = store
            .receipts_of_run("run-1")
            .await
            .unwrap()
            .iter()
            .map(|receipt| receipt.amount)
            .collect();
        let expected = if is_said { vec![Nanodollars(7)] } else { vec![] };
        assert_eq!(amounts, expected);
        let bill = store.run_bill("run-1").await.unwrap();
        assert_eq!((bill.calls, bill.billable, bill.state), (1, 0, BillState::Complete));
    }
}

/// B4: A call may wait for its receipt for a limited time; after that its run is flagged until the receipt comes.
#[tokio::test]
async fn a_call_without_a_receipt_is_flagged_when_its_time_is_over() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let end = time_at("09:30:00");
    let free =
        CallUsage { usage: TokenUsage::default(), status: 400, ..usage_of_call("call-0", end) };
    store
        .record_calls(&[free, usage_of_call("call-1", end), usage_of_call("call-2", end + MINUTE)])
        .await
        .unwrap();
    let state = async |now| {
        let bill = store.run_bill_at("run-1", now).await.unwrap();
        let totals = store.totals(now).await.unwrap();
        let runs = store.flagged_runs(now).await.unwrap().len();
        assert_eq!(totals.unreceipted_calls, bill.overdue);
        assert_eq!(totals.unreceipted_runs, runs as u64);
        assert_eq!(totals.pending_calls, bill.missing - bill.overdue);
        (bill.state, bill.overdue, runs)
    };
    assert_eq!(state(end + 15 * MINUTE).await, (BillState::Pending, 0, 0));
    assert_eq!(state(end + 15 * MINUTE + Duration::from_secs(1)).await, (BillState::Overdue, 1, 1));
    assert_eq!(state(end + 17 * MINUTE).await, (BillState::Overdue, 2, 1));
    let open = store.calls_without_receipt(end, end).await.unwrap();
    assert_eq!(open.iter().map(|call| call.settled).collect::<Vec<_>>(), [end, end + MINUTE]);
    store
        .ingest_notices(vec![charge_notice("call-1", 25_000), charge_notice("call-2", 25_000)])
        .await
        .unwrap();
    assert_eq!(state(end + 17 * MINUTE).await, (BillState::Complete, 0, 0));
    assert_eq!(store.calls_without_receipt(end, end).await.unwrap(), []);
}

/// After a restart of the service, the store has the same content.
#[tokio::test]
async fn a_reopened_billing_store_is_the_same() {
    let dir = tempdir().unwrap();
    let report = |store: BillingStore| async move {
        let bill = store.run_bill("run-1").await.unwrap();
        (bill, store.receipts_of_run("run-1").await.unwrap())
    };
    let first = open_store(dir.path());
    first.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap();
    first.ingest_notices(vec![charge_notice("call-1", 25_000)]).await.unwrap();
    let before = report(first).await;
    assert_eq!(report(open_store(dir.path())).await, before);
}

/// B2: The endpoint's answer counts the outcomes.
#[tokio::test]
async fn an_ingest_is_counted() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let mut items: Vec<Value> = serde_json::from_slice(&read_recording("callback.json")).unwrap();
    items.push(json!({ "status": "success" }));
    items.push(json!({ "litellm_call_id": "theirs", "status": "success", "endTime": 1.0 }));
    let body = Value::from(items).to_string();
    let ingested = store.ingest(body).await.unwrap();
    assert_json_snapshot!(ingested, @r#"
    {
      "new": 0,
      "known": 0,
      "unknown": 4,
      "conflicting": 0,
      "unpaid": 0,
      "foreign": 1,
      "invalid": 1,
      "complaints": [
        {
          "item": 4,
          "message": "`litellm_call_id` is missing, so the call is unknown"
        }
      ]
    }
    "#);
    assert!(store.ingest("{").await.is_err());
}

/// B2: A sender of notices cannot fill the disk with contradictions, or with calls that do not exist.
#[tokio::test]
async fn contradictions_and_unknown_calls_are_bounded() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store
        .record_calls(&[
            usage_of_call("call-1", time_at("09:30:01")),
            usage_of_call("call-2", time_at("09:30:01")),
        ])
        .await
        .unwrap();
    let prices = |call: &'static str| (1..=100).map(move |price| charge_notice(call, price * 1000));
    let outcomes =
        store.ingest_notices(prices("call-1").chain(prices("call-2")).collect()).await.unwrap();
    let conflicting =
        outcomes.iter().filter(|outcome| **outcome == IngestOutcome::Conflicting).count();
    assert_eq!(conflicting, 198, "each is told");
    let file = rusqlite::Connection::open(dir.path().join("state.db")).unwrap();
    let count = |query: &str| file.query_row(query, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM billing_conflict WHERE call_id = 'call-1'"), 16);
    assert_eq!(count("SELECT count(*) FROM billing_conflict"), 32);

    file.execute(
        "INSERT INTO billing_notice WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 99999)
         SELECT 'x' || i, 'litellm_callback', 'run-1', 0, 7, 1, 1, 1, 1, 0 FROM n",
        [],
    )
    .unwrap();
    store.record_calls(&[usage_of_call("call-3", time_at("09:30:01"))]).await.unwrap();
    let notices = ["new-1", "new-2", "call-3"].map(|call| charge_notice(call, 7));
    let outcomes = store.ingest_notices(notices.to_vec()).await.unwrap();
    assert_eq!(
        outcomes,
        [IngestOutcome::WaitsForCall, IngestOutcome::TooManyWaiting, IngestOutcome::New]
    );
    assert_eq!(count("SELECT count(*) FROM billing_notice WHERE NOT is_taken"), 100_000);
}

/// An event in a billing store's life.
#[derive(Clone, Debug)]
enum StoreEvent {
    Recorded(usize),
    Said(usize),
    SaidByRows(usize),
    Failed(usize),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// B2, B4: The charges depend only on the reports, not on their order or repetition.
    #[test]
    fn the_order_changes_nothing(
        mut happenings in prop::collection::vec((0..4_usize, 0..4_u8), 0..20).prop_map(|list| {
            list.into_iter().map(|(call, what)| match what {
                0 => StoreEvent::Recorded(call),
                1 => StoreEvent::Said(call),
                2 => StoreEvent::SaidByRows(call),
                _ => StoreEvent::Failed(call),
            }).collect::<Vec<_>>()
        }),
        seed in any::<u64>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let straight = runtime.block_on(apply_events(&happenings));
        let length = happenings.len().max(1);
        happenings.rotate_left(usize::try_from(seed % length as u64).unwrap());
        happenings.reverse();
        prop_assert_eq!(straight, runtime.block_on(apply_events(&happenings)));
    }
}

async fn apply_events(happenings: &[StoreEvent]) -> (RunBill, Vec<(String, Nanodollars)>) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = open_store(dir.path());
    for happening in happenings {
        let call = |number: &usize| (format!("call-{number}"), 1000 * (*number as u64 + 1));
        match happening {
            StoreEvent::Recorded(number) => {
                store
                    .record_calls(&[usage_of_call(&call(number).0, time_at("09:30:01"))])
                    .await
                    .unwrap();
            }
            StoreEvent::Said(number) => {
                let (id, amount) = call(number);
                store.ingest_notices(vec![charge_notice(&id, amount)]).await.unwrap();
            }
            StoreEvent::SaidByRows(number) => {
                let (id, amount) = call(number);
                let notice = ChargeNotice {
                    source: ChargeSource::LitellmSpendLogs,
                    ..charge_notice(&id, amount)
                };
                store.ingest_notices(vec![notice]).await.unwrap();
            }
            StoreEvent::Failed(number) => {
                let failed =
                    ChargeNotice { is_provisional: true, ..charge_notice(&call(number).0, 0) };
                store.ingest_notices(vec![failed]).await.unwrap();
            }
        }
    }
    let receipts = store.receipts_of_run("run-1").await.unwrap();
    let charged = receipts.into_iter().map(|receipt| (receipt.call_id, receipt.amount)).collect();
    (store.run_bill_at("run-1", time_at("10:00:00")).await.unwrap(), charged)
}
