//! B1: Tests of usage records: one for each call, however it ended, from real traffic and from a log that is read in
//! pieces.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::ops::Add;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use cogni_gateway::gateway::pipeline::policy::OnClientGone;
use cogni_gateway::gateway::upstream::UpstreamKind;
use cogni_gateway::llm::budget::price::UnknownPricePolicy;
use cogni_gateway::llm::budget::{
    BudgetAmount, ModelPrice, Nanodollars, TokenUsage, Tokens, UsageSource,
};
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::service::billing::call_usage::CallUsageReader;
use cogni_gateway::service::billing::{BillFlag, BillState, CallUsage};
use cogni_gateway::telemetry::audit::records::{
    CallAdmittedRecord, CallOutcome, CallSettledRecord, RunFinishedRecord, RunStartedRecord,
};
use cogni_gateway::telemetry::audit::{self, AuditLog};
use insta::assert_snapshot;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{open_store, usage_of_call};
use crate::support::app::TestApp;

/// B1: A unary call, a streamed call, a call that the upstream refused, one that the provider cut, and one whose client
/// disconnected have a record each. A refusal of the gateway has none.
#[tokio::test]
async fn every_end_of_a_call_gives_a_usage_record() {
    let price: ModelPrice = toml::from_str("input = \"1\"\noutput = \"2\"").unwrap();
    let app = TestApp::with(|config| {
        config.prices.unknown = UnknownPricePolicy::Price(Arc::new(price));
        config.policy.on_client_gone = OnClientGone::Cancel;
    })
    .await;
    let (client, chat) = (app.client(), "/v1/chat/completions");
    client.post(chat, &chat_body("fake/input=11;output=7", false)).await;
    let (_, is_whole) =
        client.open(chat, &chat_body("fake/input=11;output=7;cached=3", true)).await.rest().await;
    assert!(is_whole);
    client.post(chat, &chat_body("fake/status=503", false)).await;
    let (_, is_whole) =
        client.open(chat, &chat_body("fake/fault=reset@2;input=11", true)).await.rest().await;
    assert!(!is_whole);
    let stream = client.open("/v1/messages", &chat_body("fake/gate=2;input=11", true)).await;
    app.upstream.gate.wait_for_waiting(1).await;
    drop(stream);
    app.recorded("request.settled", 5).await;
    client.post("/v1/nowhere", &chat_body("fake", false)).await;
    client.post("/v1/messages/count_tokens", &chat_body("fake", false)).await;

    let log = app.audit_log();
    let mut live = CallUsageReader::open(&log);
    let early = live.read_new().unwrap();
    let mut facts = early.clone();
    app.recorded("request.settled", 6).await;
    let (rest, end) = live.finish();
    end.unwrap();
    facts.extend(rest);
    app.stop().await;
    assert!(early.len() >= 5, "a follower sees them while the run goes on");
    // On a busy machine, the pause before the break counts as time in which the model wrote.
    let broken = &mut facts[3];
    assert!((4..=20).contains(&broken.usage.output.0), "{broken:?}");
    (broken.usage.output, broken.cost) = (Tokens(4), Nanodollars(124_000));
    assert_snapshot!(format_table(&facts), @r#"
    chat_completions fake/input=11;output=7: attempt 0, completed 200, 11 in, 7 out, provider, $0.000025
    chat_completions fake/input=11;output=7;cached=3: attempt 0, completed 200, 11 in, 7 out, provider, $0.000025
    chat_completions fake/status=503: attempt 0, completed 503, 35 in, 0 out, estimated, $0.000035
    chat_completions fake/fault=reset@2;input=11: attempt 0, upstream_failed 200, 116 in, 4 out, estimated, $0.000124
    messages fake/gate=2;input=11: attempt 0, client_gone 200, 11 in, 20 out, estimated, $0.000051
    count_tokens fake: attempt 0, completed 200, 0 in, 0 out, estimated, $0
    "#);
    for fact in &facts {
        assert_eq!(
            (fact.run.as_str(), fact.attempt.as_str(), fact.account.as_str()),
            ("run-1", "0", "acct-1")
        );
        assert!(fact.started <= fact.settled);
        assert_eq!(fact.is_billable(), fact.status == 200 && fact.route != "count_tokens");
        // A call of a kind without cost is not recorded.
        assert_eq!(fact.can_cost(), fact.route != "count_tokens");
    }
}

/// B1, B4: A call that the gateway ended with an error of its own, after it was sent, has a receipt; with LiteLLM, it is
/// flagged until it has one. A failure that the provider itself answered, without usage, is not billed.
#[tokio::test]
async fn a_sent_call_that_the_gateway_failed_is_billed_or_flagged() {
    let (chat, embeddings) = ("/v1/chat/completions", "/v1/embeddings");
    for kind in [UpstreamKind::Openai, UpstreamKind::Litellm] {
        let price: ModelPrice = toml::from_str("input = \"1\"\noutput = \"2\"").unwrap();
        let app = TestApp::with(|config| {
            config.upstream.kind = kind;
            config.upstream.first_byte_timeout = Duration::from_millis(50);
            config.prices.unknown = UnknownPricePolicy::Price(Arc::new(price));
        })
        .await;
        for (path, model, status) in [
            (chat, "fake/fault=stall@head", 504),
            (chat, "fake/fault=garbage@head", 502),
            (embeddings, "fake/fault=stall@head", 504),
            (chat, "fake/status=500", 500),
            (chat, "fake/status=408", 408),
        ] {
            let mut body = chat_body(model, false);
            body["input"] = json!("hello");
            assert_eq!(app.client().post(path, &body).await.status.as_u16(), status, "{model}");
        }
        app.recorded("request.settled", 5).await;
        let (facts, end) = CallUsageReader::open(&app.audit_log()).finish();
        end.unwrap();
        let billable: Vec<_> = facts.iter().map(CallUsage::is_billable).collect();
        assert_eq!(billable, [true, true, true, false, false], "{facts:?}");

        let dir = tempfile::tempdir().unwrap();
        let store = open_store(dir.path());
        store.record_calls(&facts).await.unwrap();
        let later = SystemTime::now() + Duration::from_hours(1);
        let bill = store.run_bill_at("run-1", later).await.unwrap();
        assert_eq!((bill.calls, bill.billable), (5, 3));
        if kind == UpstreamKind::Litellm {
            assert_eq!((bill.missing, bill.flags), (3, vec![BillFlag::Unreceipted]));
        } else {
            let charged = facts[..3].iter().map(|fact| fact.cost).fold(Nanodollars::ZERO, Add::add);
            assert_eq!((bill.receipts, bill.amount, bill.flags), (3, charged, vec![]));
        }
        app.stop().await;
    }
}

/// B1: A failure that the provider answered is billed if it reports usage, or has text that counts as output.
#[test]
fn a_failure_with_usage_is_billed() {
    let failed = |input, output, source| CallUsage {
        status: 500,
        usage: TokenUsage {
            input: Tokens(input),
            output: Tokens(output),
            source,
            ..TokenUsage::default()
        },
        ..usage_of_call("call-1", SystemTime::UNIX_EPOCH + Duration::from_hours(1))
    };
    assert!(failed(100, 900, UsageSource::Provider).is_billable());
    assert!(failed(100, 0, UsageSource::Provider).is_billable());
    assert!(failed(100, 70, UsageSource::Estimated).is_billable());
    assert!(!failed(100, 0, UsageSource::Estimated).is_billable());
    assert!(!failed(0, 0, UsageSource::Provider).is_billable());
}

/// B1, T5: A call to a tool with a price has a record and a receipt, and counts among the run's charges. A free call is not
/// recorded.
#[tokio::test]
async fn a_tool_with_a_price_gives_a_usage_record() {
    let tools = r#"
        granted = ["core__get_current_time"]
        [[rules]]
        name = "clock"
        tool = "core__get_current_time"
        price_usd = "0.002"
    "#;
    let app = TestApp::with(|config| {
        config.tools.table = Some(toml::from_str(tools).unwrap());
        config.tools.opener = Some(Arc::new(RunToolOpener::default()));
    })
    .await;
    let call = json!({"tool": "core__get_current_time", "arguments": {}});
    assert_eq!(app.client().post("/tool/exec", &call).await.status, 200);
    let log = app.audit_log();
    app.recorded("tool.settled", 1).await;
    let mut reader = CallUsageReader::open(&log);
    let facts = reader.read_new().unwrap();
    assert_snapshot!(format_table(&facts), @"tool core__get_current_time: attempt 0, completed 0, 0 in, 0 out, provider, $0.002");
    assert_eq!(reader.charged(), Some(Nanodollars(2_000_000)));
    assert!(facts[0].can_cost() && facts[0].is_billable());
    let free = CallUsage { cost: Nanodollars::ZERO, ..facts[0].clone() };
    assert!(!free.can_cost());

    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path());
    assert_eq!(store.record_calls(&[facts[0].clone(), free]).await.unwrap(), 1);
    let bill = store.run_bill("run-1").await.unwrap();
    assert_eq!((bill.calls, bill.receipts, bill.estimated, bill.missing), (1, 1, 0, 0));
    assert_eq!((bill.amount, bill.state), (Nanodollars(2_000_000), BillState::Complete));
    app.stop().await;
}

/// B1, T6: A request over a connection with a price has a record and a receipt, like a call to a tool.
#[tokio::test]
async fn a_connection_with_a_price_gives_a_usage_record() {
    // Nothing listens at the port; the request was admitted, so it has its price.
    let tools = r#"
        [connections.api]
        url = "https://localhost:1"
        allow_private_addresses = true
        allow = ["GET /**"]
        price_usd = "0.002"
    "#;
    let app = TestApp::with(|config| {
        config.tools.table = Some(toml::from_str(tools).unwrap());
        config.tools.opener = Some(Arc::new(RunToolOpener::default()));
    })
    .await;
    assert_eq!(app.client().get("/connect/api/a").await.status, 502);
    let log = app.audit_log();
    app.recorded("connect.settled", 1).await;
    let mut reader = CallUsageReader::open(&log);
    let facts = reader.read_new().unwrap();
    assert_snapshot!(format_table(&facts), @"connect api: attempt 0, upstream_failed 0, 0 in, 0 out, provider, $0.002");
    assert_eq!(facts[0].upstream, "connections");
    assert_eq!(reader.charged(), Some(Nanodollars(2_000_000)));
    assert!(facts[0].can_cost() && facts[0].is_billable());
    app.stop().await;
}

/// B1: The record names the upstream, which decides whose price counts.
#[tokio::test]
async fn a_usage_record_names_the_upstream_and_its_price() {
    for (kind, name, by_litellm) in [
        (UpstreamKind::Litellm, "litellm", true),
        (UpstreamKind::Openai, "openai", false),
        (UpstreamKind::Anthropic, "anthropic", false),
    ] {
        let app = TestApp::with(|config| config.upstream.kind = kind).await;
        app.client().post("/v1/messages", &chat_body("fake", false)).await;
        let log = app.audit_log();
        app.recorded("request.settled", 1).await;
        let fact = CallUsageReader::open(&log).read_new().unwrap().remove(0);
        assert_eq!((fact.upstream.as_str(), fact.is_billed_by_litellm()), (name, by_litellm));
        app.stop().await;
    }
}

/// B1: A call whose end was lost in a crash has the same record before and after the log is recovered.
#[test]
fn a_call_lost_in_a_crash_is_charged_its_reservation() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    write_crashed_log(&log, "0");
    let (lost, end) = CallUsageReader::open(&log).finish();
    end.unwrap();
    let opened = open_log(&log, "1");
    opened
        .finish_log(&RunFinishedRecord { spent: BudgetAmount::default(), admitted: 0, refused: 0 })
        .unwrap();
    drop(opened);
    let (recovered, end) = CallUsageReader::open(&log).finish();
    end.unwrap();
    let summary = |facts: &[CallUsage]| {
        facts
            .iter()
            .map(|fact| format!("{} {:?} {:?}", fact.source_reference(), fact.outcome, fact.usage))
            .collect::<Vec<_>>()
    };
    assert_eq!(summary(&lost), summary(&recovered));
    assert_snapshot!(format_table(&recovered), @r#"
    chat_completions gpt: attempt 0, completed 200, 11 in, 7 out, provider, $0.000025
    chat_completions gpt: attempt 0, crashed 0, 600 in, 4096 out, estimated, $0.008792
    chat_completions gpt: attempt 0, crashed 0, 600 in, 4096 out, estimated, $0.008792
    "#);
}

/// B1, G11: A record that was changed later gives no usage; the records before it do.
#[test]
fn a_changed_log_gives_the_records_before_the_change_and_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    let mut bytes = WHOLE.clone();
    let settled: Vec<_> = memchr::memmem::find_iter(&bytes, b"request.settled").collect();
    let output =
        settled[2] + memchr::memmem::find(&bytes[settled[2]..], b"\"output\":").unwrap() + 9;
    bytes[output] = if bytes[output] == b'1' { b'2' } else { b'1' };
    fs::write(&log, bytes).unwrap();
    let mut reader = CallUsageReader::open(&log);
    assert_eq!(reader.read_new().unwrap().len(), 2);
    assert!(reader.read_new().is_err());
    let (_facts, end) = reader.finish();
    let error = anyhow::Error::from(end.unwrap_err());
    let error = format!("{error:#}").replace(&log.display().to_string(), "LOG");
    assert_snapshot!(error, @"the audit log `LOG` cannot be read: record 7 (line 7, byte 2662): the content does not match its hash");
}

/// A reader may start before the log exists.
#[test]
fn a_missing_log_has_no_usage_records() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    let mut reader = CallUsageReader::open(&log);
    assert_eq!(reader.read_new().unwrap(), []);
    fs::write(&log, &*WHOLE).unwrap();
    assert_eq!(reader.read_new().unwrap(), whole_usage());
    assert_eq!(reader.read_new().unwrap(), []);
}

proptest! {
    /// B1: A log that grows in any pieces gives the same records in the same order.
    #[test]
    fn a_log_split_anywhere_gives_the_same_usage_records(mut cuts in prop::collection::vec(0..WHOLE.len(), 0..12)) {
        cuts.sort_unstable();
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let log = folder.path().join("audit.jsonl");
        File::create(&log).unwrap();
        let mut file = OpenOptions::new().append(true).open(&log).unwrap();
        let (mut reader, mut facts, mut from) = (CallUsageReader::open(&log), vec![], 0);
        for cut in cuts {
            file.write_all(&WHOLE[from..cut]).unwrap();
            facts.extend(reader.read_new().unwrap());
            from = cut;
        }
        file.write_all(&WHOLE[from..]).unwrap();
        let (rest, end) = reader.finish();
        end.unwrap();
        facts.extend(rest);
        prop_assert_eq!(facts, whole_usage());
    }
}

/// Two processes of one run; the first crashed in the middle of three calls.
static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.jsonl");
    write_crashed_log(&log, "0");
    let opened = open_log(&log, "1");
    for number in 0..3 {
        write_call(&opened, &format!("second-{number}"), true);
    }
    opened
        .finish_log(&RunFinishedRecord { spent: BudgetAmount::default(), admitted: 3, refused: 0 })
        .unwrap();
    drop(opened);
    fs::read(log).unwrap()
});

fn whole_usage() -> Vec<CallUsage> {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    fs::write(&log, &*WHOLE).unwrap();
    let (facts, end) = CallUsageReader::open(&log).finish();
    end.unwrap();
    assert_eq!(facts.len(), 6);
    facts
}

fn write_crashed_log(log: &Path, attempt: &str) {
    let opened = open_log(log, attempt);
    write_call(&opened, "first-0", true);
    write_call(&opened, "first-1", false);
    write_call(&opened, "first-2", false);
}

fn write_call(log: &AuditLog, request: &str, ends: bool) {
    let amount = |input, output, cost| BudgetAmount {
        turns: 1,
        input: Tokens(input),
        output: Tokens(output),
        cost: Nanodollars(cost),
    };
    let admitted = CallAdmittedRecord {
        request,
        route: "chat_completions",
        model: Some("gpt"),
        rules: &[],
        stream: true,
        request_bytes: 100,
        pid: None,
        reserved: amount(600, 4096, 8_792_000),
    };
    futures_util::FutureExt::now_or_never(log.record_admission(&admitted)).unwrap().unwrap();
    if !ends {
        return;
    }
    let usage = TokenUsage {
        input: Tokens(11),
        output: Tokens(7),
        source: UsageSource::Provider,
        ..TokenUsage::default()
    };
    log.record_settlement(&CallSettledRecord {
        request,
        outcome: CallOutcome::Completed,
        status: 200,
        code: None,
        usage,
        charged: amount(11, 7, 25_000),
        response_bytes: 900,
        frames: 4,
        litellm_call_id: Some(request),
        litellm_response_cost: None,
        reported_cost_usd: Some(Nanodollars(25_000)),
        first_byte_ms: Some(3.0),
        duration_ms: 8.0,
    });
}

fn open_log(log: &Path, attempt: &str) -> AuditLog {
    let config = audit::AuditConfig { path: Some(log.to_owned()), ..audit::AuditConfig::default() };
    let started = RunStartedRecord {
        run: "run-1".into(),
        attempt: attempt.into(),
        account: "acct-42".into(),
        version: "0.1.0".into(),
        policy: "9f86d081".into(),
        prices: "8d969eef".into(),
        upstream: "litellm",
        trace: None,
    };
    AuditLog::open_log(&config, &started).unwrap().0
}

fn chat_body(model: &str, stream: bool) -> Value {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    json!({ "model": model, "stream": stream, "max_tokens": 20, "messages": messages })
}

fn format_table(facts: &[CallUsage]) -> String {
    let row = |fact: &CallUsage| {
        let CallUsage { route, outcome, status, usage, cost, .. } = fact;
        let model = fact.model.as_deref().unwrap_or("-");
        let (outcome, source) = (outcome.as_str(), usage.source.as_str());
        let (attempt, input, output) = (&fact.attempt, usage.input.0, usage.output.0);
        format!(
            "{route} {model}: attempt {attempt}, {outcome} {status}, {input} in, {output} out, {source}, ${cost}"
        )
    };
    facts.iter().map(row).collect::<Vec<_>>().join("\n")
}
