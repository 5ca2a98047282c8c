//! G12: Tests of the metrics that operators scrape.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cogni_gateway::base;
use cogni_gateway::base::disk::DiskSpace;
use cogni_gateway::base::metrics::HttpPage;
use cogni_gateway::base::metrics::discovery::ScrapeTarget;
use cogni_gateway::llm::budget::{
    BudgetLedger, BudgetLimits, ConnectionSpending, Nanodollars, PriorUsage, ReserveRequest,
    TokenUsage, Tokens, UsageSource,
};
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::telemetry::audit::AuditLag;
use cogni_gateway::telemetry::audit::connect_records::ConnectOutcome;
use cogni_gateway::telemetry::audit::records::CallOutcome;
use cogni_gateway::telemetry::audit::tool_records::ToolOutcome;
use cogni_gateway::telemetry::metrics::deprecated::DEPRECATED_NAMES;
use cogni_gateway::telemetry::metrics::table::{MetricFamilySpec, MetricKind};
use cogni_gateway::telemetry::metrics::{
    BillingGauges, LiveRunGuard, MAX_AGENTS, MAX_MODELS, MAX_RUNS, MetricsRegistry, ModelMetrics,
    RefusedRequest, RunMetrics, RunQueueGauges, ServiceStateGauges, SettledCall, SettledConnect,
    SettledToolCall, WorkGauges,
};
use proptest::prelude::*;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::support::allocations;
use crate::support::app::TestApp;

/// G12: The exposition has every family, label and help text in the form that Prometheus reads.
#[test]
fn the_exposition_reads_as_documented() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let _busy = record_every_family(&metrics);
    insta::with_settings!({filters => FILTERS.to_vec()}, {
        insta::assert_snapshot!(render_metrics(&metrics));
    });
}

/// G12: `promtool check metrics` finds no fault, even with a hostile model name.
#[test]
fn promtool_finds_nothing_to_improve() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let busy = record_every_family(&metrics);
    busy.run
        .model_metrics("evil\"} 1\n# HELP x\n\\\u{7}")
        .record_first_byte(Duration::from_secs(1));
    assert_eq!(promtool_check(&render_metrics(&metrics)), "");
}

/// G12: The documented table and the exposition name the same families.
#[test]
fn the_table_and_the_exposition_agree() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let _busy = record_every_family(&metrics);
    let text = render_metrics(&metrics);
    let mut exposed: Vec<_> =
        read_headers(&text, "# TYPE ").filter(|(name, _)| !name.starts_with("process_")).collect();
    let current = MetricFamilySpec::all_families().map(|family| (family.name, family_kind(family)));
    let former = DEPRECATED_NAMES.iter().map(|&(old, family)| (old, family_kind(family)));
    let mut promised: Vec<_> = current.chain(former).collect();
    exposed.sort_unstable();
    promised.sort_unstable();
    assert_eq!(exposed, promised);
}

/// Each name begins with the product's prefix, except the names that a convention prescribes.
#[test]
fn each_metric_has_the_prefix() {
    let strays: Vec<_> = MetricFamilySpec::all_families()
        .filter(|family| family.otel.is_none() && !family.name.starts_with("cogni_gateway_"))
        .map(|family| family.name)
        .collect();
    assert!(strays.is_empty(), "{strays:?}");
}

/// Each help text is a sentence: a verb that says what kind of value it is, and a period.
#[test]
fn each_help_text_is_a_sentence() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let _busy = record_every_family(&metrics);
    let text = render_metrics(&metrics);
    let kinds: HashMap<_, _> = read_headers(&text, "# TYPE ").collect();
    let helps: Vec<_> = read_headers(&text, "# HELP ").collect();
    assert_eq!(helps.len(), kinds.len());
    for (name, help) in helps {
        let verbs: &[&str] = match kinds[name] {
            _ if help.starts_with("Deprecated: use cogni_gateway_") => &["Deprecated: "],
            "counter" => &["Counts "],
            "gauge" => &["Shows ", "Is "],
            _ => &["Measures "],
        };
        let is_sentence = verbs.iter().any(|verb| help.starts_with(verb)) && help.ends_with('.');
        assert!(is_sentence, "{name}: {help}");
    }
}

/// A metric that was renamed has the same series and values under its former name, and its help text names the new one.
#[test]
fn former_names_show_the_same_values() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let _busy = record_every_family(&metrics);
    let text = render_metrics(&metrics);
    for (old, family) in DEPRECATED_NAMES {
        let renamed: Vec<_> = family_samples(&text, family.name)
            .map(|line| line.replacen(family.name, old, 1))
            .collect();
        assert!(!renamed.is_empty(), "{old}");
        assert_eq!(family_samples(&text, old).collect::<Vec<_>>(), renamed);
        let help = format!("# HELP {old} Deprecated: use {}.", family.name);
        assert!(text.lines().any(|line| line == help), "{help}");
    }
    let version = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    assert_eq!(version, ("0", "1"), "the former names are promised for 0.1 only: remove them");
}

/// Metrics that OpenTelemetry's conventions define have the conventions' names, in Prometheus' spelling.
#[test]
fn opentelemetry_names_are_spelled_as_prometheus_does() {
    for (family, otel) in
        MetricFamilySpec::all_families().filter_map(|family| Some((family, family.otel?)))
    {
        let unit = if otel.ends_with("usage") { "" } else { "_seconds" };
        assert_eq!(family.name, format!("{}{unit}", otel.replace('.', "_")));
    }
    assert_eq!(MetricFamilySpec::all_families().filter(|family| family.otel.is_some()).count(), 4);
}

#[test]
fn the_buckets_of_every_histogram_ascend() {
    for family in MetricFamilySpec::all_families() {
        if let MetricKind::Histogram(buckets) = family.kind {
            assert!(buckets.is_sorted_by(|a, b| a < b), "{}", family.name);
        }
    }
}

/// G12: A forgotten run has no series, and a late call does not bring them back.
#[test]
fn a_forgotten_run_leaves_no_series() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let busy = record_every_family(&metrics);
    assert!(render_metrics(&metrics).contains(r#"run="run-7""#));

    metrics.remove_run("run-7");
    busy.run.record_refusal(&RefusedRequest { route: None, code: "route_not_served", status: 404 });
    busy.run.record_settled_call(&settled_call(&busy.model, &token_usage(1, 1)));
    let text = render_metrics(&metrics);
    assert!(!text.contains(r#"run="run-7""#), "{text}");
    assert_eq!(read_sample(&text, r#"cogni_gateway_refusals_total{code="route_not_served"}"#), 2);
    assert_eq!(read_sample(&text, "cogni_gateway_runs"), 0);
}

/// G12: A run's series are removed some minutes after the run ends, not earlier.
#[test]
fn a_retired_run_stays_until_its_time() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let now = Instant::now();
    let due = now + cogni_gateway::telemetry::metrics::SERIES_RETENTION;
    metrics.run_metrics("ended", &unlimited_ledger());
    metrics.run_metrics("live", &unlimited_ledger());
    metrics.schedule_removal("ended", due);

    metrics.remove_due_runs(now);
    assert_eq!(runs_shown(&metrics), ["ended", "live"]);
    metrics.remove_due_runs(due);
    assert_eq!(runs_shown(&metrics), ["live"]);
}

#[test]
fn a_run_that_is_served_again_keeps_its_series() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let due = Instant::now();
    metrics.run_metrics("again", &unlimited_ledger()).record_refusal(&RefusedRequest {
        route: None,
        code: "gone",
        status: 404,
    });
    metrics.schedule_removal("again", due);
    let limits = BudgetLimits { max_turns: Some(3), ..BudgetLimits::default() };
    metrics.run_metrics("again", &Arc::new(BudgetLedger::new(limits, PriorUsage::default())));
    metrics.remove_due_runs(due);
    let text = render_metrics(&metrics);
    assert_eq!(
        read_sample(&text, r#"cogni_gateway_run_refusals_total{run="again",code="gone"}"#),
        1
    );
    assert_eq!(read_sample(&text, r#"cogni_gateway_run_turns_left{run="again"}"#), 3);
}

/// G12: The number of runs with their own series is bounded; a run beyond the bound still counts in the totals.
#[test]
fn the_number_of_runs_with_series_is_bounded() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let budget = unlimited_ledger();
    for run in 0..MAX_RUNS {
        metrics.run_metrics(&format!("run-{run}"), &budget);
    }
    let beyond = metrics.run_metrics("beyond", &budget);
    beyond.record_refusal(&RefusedRequest { route: None, code: "gone", status: 404 });
    let text = render_metrics(&metrics);
    assert!(!text.contains(r#"run="beyond""#));
    assert_eq!(read_sample(&text, "cogni_gateway_runs"), 10_000);
    assert_eq!(read_sample(&text, "cogni_gateway_run_series_dropped_total"), 1);
    assert_eq!(read_sample(&text, r#"cogni_gateway_refusals_total{code="gone"}"#), 1);
}

/// G12: Two thousand runs of a service, a hundred at a time, leave no series behind, and each run has a few series
/// while it is served.
#[test]
fn two_thousand_runs_leave_no_series() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    metrics.register_agents(["sandbox:agent"]);
    let (begun, budget) = (Instant::now(), unlimited_ledger());
    let one_run = |name: &str| {
        let (live, run) =
            (metrics.record_run_started("sandbox:agent"), metrics.run_metrics(name, &budget));
        run.record_settled_call(&settled_call(&run.model_metrics("m"), &token_usage(10, 2)));
        run.record_refusal(&RefusedRequest {
            route: None,
            code: "turn_budget_exhausted",
            status: 429,
        });
        metrics.record_run_ended("sandbox:agent", "ok", Duration::from_secs(1));
        metrics.schedule_removal(name, begun);
        drop(live);
    };
    one_run("first");
    metrics.remove_due_runs(begun);
    let before = render_metrics(&metrics).lines().count();
    for hundred in 0..20 {
        for run in 0..100 {
            one_run(&format!("run-{hundred}-{run}"));
        }
        let during = render_metrics(&metrics).lines().count();
        assert!(during - before < 100 * 20, "{} lines of a hundred runs", during - before);
        metrics.remove_due_runs(begun);
    }
    let text = render_metrics(&metrics);
    assert_eq!(text.lines().count(), before, "{text}");
    let ended = r#"cogni_gateway_sandbox_runs_total{agent="sandbox:agent",outcome="ok"}"#;
    assert_eq!(read_sample(&text, ended), 2001);
    assert_eq!(read_sample(&text, r#"cogni_gateway_sandbox_runs_live{agent="sandbox:agent"}"#), 0);
}

/// G12: The series of agents have the catalog's names, not names that a caller sends.
#[test]
fn the_number_of_agents_with_series_is_bounded() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    drop(metrics.record_run_started("asked-for"));
    let catalog: Vec<_> = (0..=MAX_AGENTS).map(|agent| format!("agent-{agent:02}")).collect();
    metrics.register_agents(catalog.iter().map(String::as_str));
    metrics.record_run_ended("asked-for", "ok", Duration::from_secs(1));
    metrics.record_run_ended("agent-64", "ok", Duration::from_secs(1));
    let text = render_metrics(&metrics);
    let agents =
        text.lines().filter(|line| line.starts_with("cogni_gateway_sandbox_runs_live{")).count();
    assert_eq!(agents, MAX_AGENTS + 1);
    assert_eq!(
        read_sample(&text, r#"cogni_gateway_sandbox_runs_total{agent="other",outcome="ok"}"#),
        2
    );
    assert!(!text.contains("asked-for") && !text.contains("agent-64"));
}

/// G12: The number of models with series is bounded, and a name that only a client states gets no series.
#[test]
fn the_number_of_models_with_series_is_bounded() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let run = metrics.run_metrics("run-7", &unlimited_ledger());
    for model in 0..MAX_MODELS {
        run.model_metrics(&format!("model-{model}"));
    }
    run.record_settled_call(&settled_call(
        &run.existing_model_metrics("made-up-by-a-client"),
        &token_usage(1, 1),
    ));
    run.record_settled_call(&settled_call(&run.model_metrics("one-too-many"), &token_usage(1, 1)));
    run.record_settled_call(&settled_call(
        &run.existing_model_metrics("model-0"),
        &token_usage(1, 1),
    ));
    let text = render_metrics(&metrics);
    let completed =
        |model| format!(r#"cogni_gateway_calls_total{{model="{model}",outcome="completed"}}"#);
    assert_eq!(read_sample(&text, &completed("other")), 2);
    assert_eq!(read_sample(&text, &completed("model-0")), 1);
    assert_eq!(read_sample(&text, "cogni_gateway_model_series_dropped_total"), 1);
    assert!(!text.contains("made-up") && !text.contains("one-too-many"));
}

/// G12: `other` takes no model's place, also if a call of an unknown model comes first.
#[test]
fn the_series_of_other_models_takes_no_place() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let run = metrics.run_metrics("run-7", &unlimited_ledger());
    run.existing_model_metrics("made-up-by-a-client");
    for model in 0..MAX_MODELS {
        run.record_settled_call(&settled_call(
            &run.model_metrics(&format!("model-{model}")),
            &token_usage(1, 1),
        ));
    }
    run.model_metrics("one-too-many");
    let text = render_metrics(&metrics);
    let last = MAX_MODELS - 1;
    let last = format!(r#"cogni_gateway_calls_total{{model="model-{last}",outcome="completed"}}"#);
    assert_eq!(read_sample(&text, &last), 1);
    assert_eq!(read_sample(&text, "cogni_gateway_model_series_dropped_total"), 1);
}

#[test]
fn a_request_is_in_flight_until_its_guard_is_dropped() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let run = metrics.run_metrics("run-7", &unlimited_ledger());
    let (first, second) = (run.track_request(), run.track_request());
    assert_eq!(
        read_sample(
            &render_metrics(&metrics),
            r#"cogni_gateway_run_requests_in_flight{run="run-7"}"#
        ),
        2
    );
    drop((first, second));
    assert_eq!(
        read_sample(
            &render_metrics(&metrics),
            r#"cogni_gateway_run_requests_in_flight{run="run-7"}"#
        ),
        0
    );
    assert_eq!(read_sample(&render_metrics(&metrics), "cogni_gateway_requests_in_flight"), 0);
}

/// A run that ends while its disk fails must not leave the alarm on forever.
#[test]
fn the_audit_lag_of_a_run_ends_with_it() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let (one, two) = (
        metrics.run_metrics("one", &unlimited_ledger()),
        metrics.run_metrics("two", &unlimited_ledger()),
    );
    one.set_audit_lag(&AuditLag { records: 3, bytes: 900, failing: true });
    two.set_audit_lag(&AuditLag { records: 4, bytes: 100, failing: true });
    two.set_audit_lag(&AuditLag { records: 1, bytes: 50, failing: false });
    let of = |metrics: &MetricsRegistry| {
        let text = render_metrics(metrics);
        ["lag_records", "lag_bytes", "failing_runs"]
            .map(|name| read_sample(&text, &format!("cogni_gateway_audit_{name}")))
    };
    assert_eq!(of(&metrics), [4, 950, 1]);
    metrics.remove_run("one");
    drop(one);
    assert_eq!(of(&metrics), [1, 50, 0]);
}

/// The conventions: missing token counts are not reported as zero, and the latency of a failed call is not observed.
#[test]
fn gen_ai_histograms_hold_only_what_the_conventions_allow() {
    let metrics = MetricsRegistry::new("openai").unwrap();
    let run = metrics.run_metrics("run-7", &unlimited_ledger());
    let model = run.model_metrics("m");
    let estimated = TokenUsage { source: UsageSource::Estimated, ..token_usage(100, 10) };
    run.record_settled_call(&SettledCall {
        outcome: CallOutcome::ClientGone,
        ..settled_call(&model, &estimated)
    });
    run.record_settled_call(&SettledCall {
        is_stream: false,
        ..settled_call(&model, &token_usage(100, 10))
    });
    run.record_settled_call(&SettledCall {
        route: GatewayRoute::CountTokens,
        ..settled_call(&model, &estimated)
    });
    let text = render_metrics(&metrics);
    let labels =
        r#"gen_ai_operation_name="chat",gen_ai_provider_name="openai",gen_ai_request_model="m""#;
    let count =
        |name: &str, last: &str| read_sample(&text, &format!("{name}_count{{{labels}{last}}}"));
    assert_eq!(count("gen_ai_client_token_usage", r#",gen_ai_token_type="input""#), 1);
    assert_eq!(count("gen_ai_client_operation_duration_seconds", r#",error_type="""#), 1);
    assert_eq!(count("gen_ai_client_operation_duration_seconds", r#",error_type="_OTHER""#), 1);
    assert_eq!(count("gen_ai_server_time_to_first_token_seconds", ""), 0);
}

/// Counting allocates nothing per frame and per settled call.
#[test]
fn counting_allocates_nothing() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let busy = record_every_family(&metrics);
    let (run, usage) = (&busy.run, token_usage(10, 20));
    let settled = settled_call(&busy.model, &usage);
    let refused = RefusedRequest { route: None, code: "route_not_served", status: 404 };
    let counted = allocations::count_allocations(|| {
        let _in_flight = run.track_request();
        let model = run.model_metrics("gpt-5-mini");
        model.record_first_byte(Duration::from_millis(300));
        run.record_frame(Some(&model), Some(Duration::from_millis(20)), 180);
        run.record_settled_call(&settled);
        run.record_refusal(&refused);
    });
    assert_eq!(counted, 0);
}

proptest! {
    /// Whatever a client calls its model, Prometheus can parse the text, and one name gives one series.
    #[test]
    fn a_model_name_cannot_break_the_text(names in prop::collection::vec("\\PC*|(?s).{0,200}", 1..5)) {
        let metrics = MetricsRegistry::new("litellm").unwrap();
        let run = metrics.run_metrics("run-7", &unlimited_ledger());
        for name in &names {
            run.record_settled_call(&settled_call(&run.model_metrics(name), &token_usage(1, 1)));
        }
        let text = render_metrics(&metrics);
        let mut series: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).map(|line| line.rsplit_once(' ').unwrap()).collect();
        prop_assert!(series.iter().all(|(_, value)| value.parse::<f64>().is_ok()));
        series.sort_unstable();
        prop_assert!(series.windows(2).all(|pair| pair[0].0 != pair[1].0));
    }
}

/// G12: Free calls are answered for any model name, and such a name takes no series from a model that needs one.
#[tokio::test]
async fn model_names_of_free_calls_take_no_series() {
    let app = TestApp::with(|config| config.metrics.address = Some(ANY_PORT)).await;
    let call = |model: &str| json!({"model": model, "messages": []});
    for name in 0..MAX_MODELS + 6 {
        let junk = call(&format!("junk-{name}"));
        let counted = app.client().post("/v1/messages/count_tokens", &junk).await;
        assert_eq!(counted.status, 200, "{}", counted.text());
    }
    app.client().post("/v1/messages", &call("real")).await;
    app.recorded("request.settled", MAX_MODELS + 7).await;
    let text =
        scrape_listener(app.metrics.unwrap(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let completed = r#"cogni_gateway_calls_total{model="real",outcome="completed"}"#;
    assert_eq!(read_sample(&text, completed), 1);
    assert_eq!(read_sample(&text, "cogni_gateway_model_series_dropped_total"), 0);
    assert!(!text.contains("junk"), "{text}");
    app.stop().await;
}

/// G12: a provider that fails in the middle of a stream reports that behind a status of 200. The failure is counted and
/// recorded; the client receives the event as it came.
#[tokio::test]
async fn an_error_event_of_a_stream_is_counted() {
    let app = TestApp::with(|config| config.metrics.address = Some(ANY_PORT)).await;
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages"] {
        let model = "fake/chunks=3;fault=error@1";
        let body = json!({"model": model, "stream": true, "max_tokens": 9, "messages": []});
        let answer = app.client().post(path, &body).await;
        assert_eq!(answer.status, 200, "{path}");
    }
    for record in app.recorded("request.settled", 3).await {
        assert_eq!(record["outcome"], "completed");
        assert_eq!(record["code"], "upstream_stream_error");
    }
    let text =
        scrape_listener(app.metrics.unwrap(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let errors = r#"cogni_gateway_upstream_errors_total{kind="upstream_stream_error"}"#;
    assert_eq!(read_sample(&text, errors), 3);
    app.stop().await;
}

/// G12: The upstream is shown as up or down by the last call, and not at all before the first.
#[tokio::test]
async fn the_last_call_shows_whether_the_upstream_is_up() {
    let app = TestApp::with(|config| config.metrics.address = Some(ANY_PORT)).await;
    let metrics = app.metrics.unwrap();
    let ask = async || scrape_listener(metrics, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(!ask().await.contains("cogni_gateway_upstream_up"));
    // A failure in the middle of a body comes after the upstream has answered. A key that is refused is useless.
    let calls = [
        ("fake", 1),
        ("fake/fault=reset@head", 0),
        ("fake/status=400", 1),
        ("fake/status=401", 0),
        ("fake/chunks=3;fault=error@1", 1),
    ];
    for (model, expected) in calls {
        let body = json!({"model": model, "stream": true, "max_tokens": 9, "messages": []});
        app.client().post("/v1/chat/completions", &body).await;
        let text = ask().await;
        let host = app.upstream.addr;
        let series = format!(r#"cogni_gateway_upstream_up{{host="{host}"}}"#);
        assert_eq!(read_sample(&text, &series), expected, "{model}");
    }
    app.stop().await;
}

/// G12, G2: The metrics and the access log show each way in which a request can end.
#[tokio::test]
async fn each_end_of_a_request_is_in_metrics_and_log() {
    let app = TestApp::with(|config| config.metrics.address = Some(ANY_PORT)).await;
    let client = app.client();
    let call = |stream| json!({"model": "gpt-5-mini", "stream": stream, "messages": []});
    client.post("/v1/chat/completions", &call(false)).await;
    client.post("/v1/chat/completions", &call(true)).await;
    client.get("/v1/secrets").await;
    client.get("/health").await;
    app.recorded("request.settled", 2).await;

    let text =
        scrape_listener(app.metrics.unwrap(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!(promtool_check(text.split_once("\n\n").unwrap().1), "");
    let requests =
        |labels: &str| read_sample(&text, &format!("cogni_gateway_requests_total{{{labels}}}"));
    assert_eq!(requests(r#"route="chat_completions",status="200""#), 2);
    assert_eq!(requests(r#"route="-",status="404""#), 1);
    assert_eq!(requests(r#"route="health",status="200""#), 1);
    assert_eq!(read_sample(&text, r#"cogni_gateway_refusals_total{code="not_found"}"#), 1);
    assert_eq!(
        read_sample(&text, r#"cogni_gateway_calls_total{model="gpt-5-mini",outcome="completed"}"#),
        2
    );
    assert_eq!(
        read_sample(
            &text,
            r#"cogni_gateway_usage_reports_total{model="gpt-5-mini",source="provider"}"#
        ),
        2
    );
    assert_eq!(
        read_sample(&text, r#"cogni_gateway_time_to_first_byte_seconds_count{model="gpt-5-mini"}"#),
        2
    );
    assert_eq!(read_sample(&text, "cogni_gateway_requests_in_flight"), 0);

    let path = app.access_log();
    let log = tempfile::tempdir().unwrap();
    fs::hard_link(&path, log.path().join("kept")).unwrap();
    app.stop().await;
    let lines = fs::read_to_string(log.path().join("kept")).unwrap();
    let help_lines: Vec<_> = lines
        .lines()
        .map(|line| log_values(line, &["uri", "status", "model", "usage_source", "outcome"]))
        .collect();
    insta::assert_snapshot!(help_lines.join("\n"), @r"
    uri=/v1/chat/completions status=200 model=gpt-5-mini usage_source=provider outcome=completed
    uri=/v1/chat/completions status=200 model=gpt-5-mini usage_source=provider outcome=completed
    uri=- status=404 model=- usage_source=- outcome=not_found
    uri=/health status=200 model=- usage_source=- outcome=completed
    ");
}

/// G12: The listener answers only scrapes and health checks.
#[tokio::test]
async fn the_listener_serves_metrics_and_health_and_nothing_else() {
    let scrapes = ScrapeListener::start(|| b"up 1\n".to_vec()).await;
    insta::assert_snapshot!(scrapes.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await, @r"
    HTTP/1.1 200 OK
    content-type: text/plain; version=0.0.4; charset=utf-8
    connection: close
    content-length: 5

    up 1
    ");
    insta::assert_snapshot!(scrapes.ask("GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await, @r#"
    HTTP/1.1 200 OK
    content-type: application/json
    connection: close
    content-length: 15

    {"status":"ok"}
    "#);
    insta::assert_snapshot!(scrapes.ask("HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await, @r"
    HTTP/1.1 200 OK
    content-type: application/json
    connection: close
    content-length: 15
    ");
    insta::assert_snapshot!(scrapes.ask("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await, @r#"
    HTTP/1.1 404 Not Found
    content-type: application/json
    connection: close
    content-length: 21

    {"error":"not_found"}
    "#);
    insta::assert_snapshot!(scrapes.ask("POST /metrics HTTP/1.1\r\nHost: x\r\ncontent-length: 0\r\n\r\n").await, @r#"
    HTTP/1.1 405 Method Not Allowed
    content-type: application/json
    allow: GET, HEAD
    connection: close
    content-length: 30

    {"error":"method_not_allowed"}
    "#);
    scrapes.stop().await;
}

/// G12: A client that may scrape can also list the scrape targets, in Prometheus' `http_sd` format.
#[tokio::test]
async fn a_process_lists_its_scrape_targets() {
    let scrapes = ScrapeListener::start(Vec::new).await;
    let answer = scrapes.ask("GET /sd HTTP/1.1\r\nHost: elsewhere.example:1\r\n\r\n").await;
    let answer = answer.replace(&scrapes.address.port().to_string(), "PORT");
    insta::assert_snapshot!(answer, @r#"
    HTTP/1.1 200 OK
    content-type: application/json
    connection: close
    content-length: 99

    [{"targets":["127.0.0.1:PORT"],"labels":{"instance":"127.0.0.1:PORT","service":"cogni-gateway"}}]
    "#);
    scrapes.stop().await;
}

/// G14: Idle connections can occupy every connection slot for only a few seconds; then the next scrape is answered.
#[tokio::test]
async fn idle_connections_cannot_keep_a_scraper_out() {
    let scrapes = ScrapeListener::start(|| b"up 1\n".to_vec()).await;
    let mut idle = vec![];
    for _ in 0..40 {
        idle.push(TcpStream::connect(scrapes.address).await.unwrap());
    }
    let answer = scrapes.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    scrapes.stop().await;
}

#[tokio::test]
async fn a_panic_while_rendering_is_an_answer() {
    let scrapes = ScrapeListener::start(|| panic!("on purpose")).await;
    let answer = scrapes.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
    let answer = scrapes.ask("GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    scrapes.stop().await;
}

pub(crate) struct BusyRun {
    run: Arc<RunMetrics>,
    model: Arc<ModelMetrics>,
    _live: LiveRunGuard,
}

/// Records at least one sample in every family.
pub(crate) fn record_every_family(metrics: &MetricsRegistry) -> BusyRun {
    let limits = BudgetLimits {
        max_turns: Some(40),
        max_total_tokens: Some(Tokens(100_000)),
        max_output_tokens: Some(Tokens(20_000)),
        deadline: Some(Duration::from_hours(1)),
        max_cost_usd: Some(Nanodollars(2_500_000_000)),
        ..BudgetLimits::default()
    };
    let budget = Arc::new(BudgetLedger::new(limits, PriorUsage::default()));
    let run = metrics.run_metrics("run-7", &budget);
    let model = run.model_metrics("gpt-5-mini");
    let usage =
        TokenUsage { cache_read: Tokens(1000), reasoning: Tokens(64), ..token_usage(1200, 180) };

    let ask = ReserveRequest {
        is_turn: true,
        input: Tokens(1000),
        output: Some(Tokens(500)),
        choices: 1,
        ..ReserveRequest::default()
    };
    let _charge = budget.reserve_call(&ask).unwrap().settle_usage(&usage);
    run.set_audit_lag(&AuditLag { records: 2, bytes: 640, failing: false });
    model.record_first_byte(Duration::from_millis(450));
    run.record_frame(Some(&model), None, 300);
    run.record_frame(Some(&model), Some(Duration::from_millis(22)), 180);
    run.record_settled_call(&settled_call(&model, &usage));
    let gone = SettledCall {
        outcome: CallOutcome::ClientGone,
        status: 0,
        cost: None,
        ..settled_call(&model, &usage)
    };
    run.record_settled_call(&gone);
    run.record_refusal(&RefusedRequest { route: None, code: "route_not_served", status: 404 });
    run.record_dropped_field(GatewayRoute::ChatCompletions, "attribution");
    run.record_local_answer(Some(GatewayRoute::Health), 200);
    run.record_upstream_error("upstream_unreachable");
    run.record_client_gone();
    metrics.record_tool_call(&SettledToolCall {
        tool: "core__get_current_time",
        outcome: ToolOutcome::Completed,
        cost: Nanodollars(2_000_000),
        duration: Duration::from_millis(5),
    });
    metrics.record_tool_refusal("policy_denied");
    metrics.record_connect(&SettledConnect {
        connection: "github-api",
        outcome: ConnectOutcome::Completed,
        spent: ConnectionSpending {
            requests: 1,
            bytes_out: 10,
            bytes_in: 2000,
            cost: Nanodollars(1_000_000),
        },
        duration: Duration::from_millis(50),
    });
    metrics.record_connect_refusal("policy_denied");
    metrics.record_approval_request("call").record_result("approved", Duration::from_secs(40));
    metrics.record_approval_proposal();
    metrics.record_standing_use("run");
    metrics.set_lost_access_log_lines(3);
    metrics.set_lost_access_log_lines(5);
    BusyRun { run, model, _live: a_service(metrics) }
}

/// Records what a service counts beside its calls.
fn a_service(metrics: &MetricsRegistry) -> LiveRunGuard {
    metrics.register_agents(["sandbox:agent", "sandbox:openclaw"]);
    metrics.record_sandbox_start_time("docker", Duration::from_millis(420));
    metrics.record_run_ended("sandbox:agent", "ok", Duration::from_secs(42));
    metrics.record_run_ended("sandbox:agent", "timeout", Duration::from_mins(10));
    metrics.record_run_ended("of-no-catalog", "ok", Duration::from_secs(3));
    metrics.record_delivery_verdict("accept");
    metrics.record_refused_submission("queue_full");
    metrics.set_run_queue_source(|| RunQueueGauges {
        queued: 36,
        capacity: 1024,
        oldest_wait: Duration::from_millis(4250),
        places_taken: 64,
        places: 64,
    });
    let space = DiskSpace { free_bytes: 40 << 30, size_bytes: 100 << 30 };
    metrics.set_service_state_source(move || ServiceStateGauges {
        work: Some(WorkGauges {
            undelivered: 2,
            oldest_undelivered: Duration::from_mins(5),
            kept: 7,
            kept_bytes: 3 << 20,
            max_kept: 5000,
            max_kept_bytes: 128 << 30,
        }),
        disks: vec![("run", space), ("state", space)],
    });
    metrics.set_upstream_host("litellm:4000");
    metrics.record_upstream_contact(true);
    metrics.record_api_request("/api/v1/runs/{id}", 404);
    metrics.set_billing_gauges(&BillingGauges {
        unreceipted_calls: 3,
        unreceipted_runs: 2,
        pending: 4,
        unpriced: 1,
        conflicting: 5,
    });
    metrics.record_reconciliation(false);
    metrics.record_dropped_events(1);
    let mut writes = metrics.state_write_recorder();
    writes(Duration::from_millis(3), true);
    writes(Duration::from_millis(80), false);
    metrics.record_run_started("sandbox:agent")
}

fn settled_call<'a>(model: &'a ModelMetrics, usage: &'a TokenUsage) -> SettledCall<'a> {
    SettledCall {
        route: GatewayRoute::ChatCompletions,
        model,
        status: 200,
        outcome: CallOutcome::Completed,
        usage,
        cost: Some(Nanodollars(50_250)),
        request_bytes: 2048,
        response_bytes: 480,
        first_byte: Some(Duration::from_millis(450)),
        duration: Duration::from_millis(4030),
        is_stream: true,
    }
}

fn token_usage(input: u64, output: u64) -> TokenUsage {
    TokenUsage {
        input: Tokens(input),
        output: Tokens(output),
        source: UsageSource::Provider,
        ..TokenUsage::default()
    }
}

fn unlimited_ledger() -> Arc<BudgetLedger> {
    Arc::new(BudgetLedger::new(BudgetLimits::default(), PriorUsage::default()))
}

fn render_metrics(metrics: &MetricsRegistry) -> String {
    String::from_utf8(metrics.render_text()).unwrap()
}

/// Returns the value of the series with this printed name.
fn read_sample(text: &str, series: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.ok_or_else(|| format!("no {series} in\n{text}")).unwrap().parse().unwrap()
}

fn runs_shown(metrics: &MetricsRegistry) -> Vec<String> {
    let text = render_metrics(metrics);
    let shown = text
        .lines()
        .filter_map(|line| line.strip_prefix(r#"cogni_gateway_run_cost_dollars_total{run=""#));
    shown.map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
}

/// Returns the lines of the samples of one family.
fn family_samples<'a>(text: &'a str, family: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter(move |line| {
        let series = line.split(['{', ' ']).next().unwrap();
        let part = series.strip_prefix(family);
        part.is_some_and(|part| ["", "_bucket", "_sum", "_count"].contains(&part))
    })
}

fn read_headers<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    text.lines().filter_map(move |line| line.strip_prefix(prefix)?.split_once(' '))
}

fn family_kind(family: &MetricFamilySpec) -> &'static str {
    match family.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram(_) => "histogram",
    }
}

/// Returns the complaints of promtool about a scrape; empty if there are none.
fn promtool_check(text: &str) -> String {
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut promtool = promtool.expect("this test needs promtool: apt-get install prometheus");
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success() || !printed.is_empty());
    String::from_utf8(printed).unwrap()
}

/// A scrape listener on its own port.
struct ScrapeListener {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<()>,
}

impl ScrapeListener {
    async fn start(render: fn() -> Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async { drop(stopped.await) };
        let target = ScrapeTarget { address: None, service: "cogni-gateway".to_owned() };
        let pages = vec![HttpPage::metrics_page(render), HttpPage::discovery_page(target)];
        let served = Handle::current().spawn(base::metrics::serve_pages(listener, pages, shutdown));
        Self { address, stop, served }
    }

    async fn ask(&self, request: &str) -> String {
        scrape_listener(self.address, request).await
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.served.await.unwrap();
    }
}

/// Returns a listener's response without its date.
pub(crate) async fn scrape_listener(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let lines = answer.lines().filter(|line| !line.starts_with("date: "));
    lines.fold(String::new(), |all, line| all + line + "\n")
}

/// Returns the values of these keys in a line of the access log.
fn log_values(line: &str, keys: &[&str]) -> String {
    let pairs = line.split(' ').filter(|pair| keys.contains(&pair.split_once('=').unwrap().0));
    pairs.collect::<Vec<_>>().join(" ")
}

const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Replaces values that differ between machines.
const FILTERS: [(&str, &str); 3] = [
    (r#"version="[^"]+""#, r#"version="X""#),
    (r"(?m)^(process_\w+) .+$", "$1 N"),
    (r"(?m)^(cogni_gateway_run_time_left_seconds\{.*\}) .+$", "$1 N"),
];
