//! Measures the cost of telemetry: metrics per frame and per call, a line of the access log, and a scrape.
//!
//! `cargo bench --bench observe`. Allocations are counted first and printed beside the times.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cogni_gateway::llm::budget::{
    BudgetLedger, BudgetLimits, Nanodollars, PriorUsage, TokenUsage, Tokens, UsageSource,
};
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::telemetry::access_log::{
    AccessLog, AccessLogDestination, AccessLogEntry, AccessLogIdentity,
};
use cogni_gateway::telemetry::audit::records::CallOutcome;
use cogni_gateway::telemetry::metrics::{
    MAX_RUNS, MetricsRegistry, ModelMetrics, RefusedRequest, SettledCall,
};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

fn bench_metrics(criterion: &mut Criterion) {
    let metrics = MetricsRegistry::new("litellm").expect("the table is sound");
    let run = metrics.run_metrics("run-7", &unlimited_ledger());
    let model = run.model_metrics("gpt-5-mini");
    let usage = token_usage();
    let settled = settled_call(&model, &usage);
    let refused = RefusedRequest { route: None, code: "not_found", status: 404 };
    let gap = Some(Duration::from_millis(22));
    let mut bench = |name: &str, work: &mut dyn FnMut()| measure_work(criterion, name, work);

    bench("frame", &mut || {
        run.record_frame(black_box(Some(&model)), black_box(gap), black_box(180));
    });
    bench("settled", &mut || run.record_settled_call(black_box(&settled)));
    bench("refused", &mut || run.record_refusal(black_box(&refused)));
    bench("in flight", &mut || drop(black_box(run.track_request())));
    bench("model by name", &mut || drop(run.model_metrics(black_box("gpt-5-mini"))));
    bench("scrape of 1 run", &mut || drop(black_box(metrics.render_text())));

    let budget = unlimited_ledger();
    let _runs: Vec<_> =
        (1..MAX_RUNS).map(|n| metrics.run_metrics(&format!("run-{n}"), &budget)).collect();
    bench("scrape of 10,000 runs", &mut || drop(black_box(metrics.render_text())));
}

fn access_log(criterion: &mut Criterion) {
    let destination = AccessLogDestination::from("/dev/null");
    let identity = AccessLogIdentity { run: "run-7", attempt: "0" };
    let log = AccessLog::open_log(&destination, &identity).expect("/dev/null is there");
    let usage = token_usage();
    let line = AccessLogEntry {
        time: SystemTime::now(),
        method: "POST",
        uri: Some(GatewayRoute::ChatCompletions.path()),
        status: 200,
        bytes: 48_211,
        request_bytes: 2048,
        model: Some("openai/gpt-5-mini"),
        request_id: "0199c0de-0000-7000-8000-00000000002a",
        litellm_call_id: Some("0199c0de-0000-7000-8000-00000000002a"),
        litellm_response_cost: Some("5.025e-05"),
        upstream_time: Some(Duration::from_millis(4012)),
        first_byte_time: Some(Duration::from_millis(451)),
        request_time: Duration::from_millis(4030),
        usage: Some(&usage),
        outcome: "completed",
    };
    let batch = || (0..LINES).for_each(|_| log.write_entry(black_box(&line)));
    log.flush_log();
    let counted = allocation_counter::measure(batch);
    let name = format!("{LINES} access-log lines ({} allocations)", counted.count_total);
    // The log is flushed between the measurements; otherwise the backlog would fill up and lines would be dropped.
    criterion.bench_function(&name, |bencher| {
        bencher.iter_batched(|| log.flush_log(), |()| batch(), BatchSize::PerIteration);
    });
    assert_eq!(log.lost_lines(), 0);
}

fn measure_work(criterion: &mut Criterion, name: &str, work: &mut dyn FnMut()) {
    work();
    let counted = allocation_counter::measure(&mut *work);
    let name = format!("{name} ({} allocations)", counted.count_total);
    criterion.bench_function(&name, |bencher| bencher.iter(&mut *work));
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
        response_bytes: 48_211,
        first_byte: Some(Duration::from_millis(451)),
        duration: Duration::from_millis(4030),
        is_stream: true,
    }
}

fn token_usage() -> TokenUsage {
    let source = UsageSource::Provider;
    TokenUsage { input: Tokens(1200), output: Tokens(180), source, ..TokenUsage::default() }
}

fn unlimited_ledger() -> Arc<BudgetLedger> {
    Arc::new(BudgetLedger::new(BudgetLimits::default(), PriorUsage::default()))
}

/// Fewer lines than a batch, so that no measurement wakes the writer.
const LINES: usize = 30;

criterion_group!(benches, bench_metrics, access_log);
criterion_main!(benches);
