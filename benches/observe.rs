//! What it costs to be seen: metrics per frame and per call, a line of the access log, a scrape.
//!
//! `cargo bench --bench observe`. Allocations are counted first, and named beside the times.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cogni_gateway::audit::record::Outcome;
use cogni_gateway::budget::{Ledger, Limits, Nanodollars, Past, Source, Tokens, Usage};
use cogni_gateway::observe::access_log::{Destination, Identity, Line, Log};
use cogni_gateway::observe::metrics::{MAX_RUNS, Metrics, Model, Refused, Settled};
use cogni_gateway::protocol::Route;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

fn metrics(criterion: &mut Criterion) {
    let metrics = Metrics::new("litellm").expect("the table is sound");
    let run = metrics.run("run-7", &unlimited());
    let model = run.model("gpt-5-mini");
    let usage = usage();
    let settled = settled(&model, &usage);
    let refused = Refused { route: None, code: "not_found", status: 404 };
    let gap = Some(Duration::from_millis(22));
    let mut bench = |name: &str, work: &mut dyn FnMut()| measure(criterion, name, work);

    bench("frame", &mut || run.frame(black_box(Some(&model)), black_box(gap), black_box(180)));
    bench("settled", &mut || run.settled(black_box(&settled)));
    bench("refused", &mut || run.refused(black_box(&refused)));
    bench("in flight", &mut || drop(black_box(run.begin())));
    bench("model by name", &mut || drop(run.model(black_box("gpt-5-mini"))));
    bench("scrape of 1 run", &mut || drop(black_box(metrics.render())));

    let budget = unlimited();
    let _runs: Vec<_> = (1..MAX_RUNS).map(|n| metrics.run(&format!("run-{n}"), &budget)).collect();
    bench("scrape of 10,000 runs", &mut || drop(black_box(metrics.render())));
}

fn access_log(criterion: &mut Criterion) {
    let destination = Destination::from("/dev/null");
    let identity = Identity { run: "run-7", attempt: "0" };
    let log = Log::open(&destination, &identity).expect("/dev/null is there");
    let usage = usage();
    let line = Line {
        time: SystemTime::now(),
        method: "POST",
        route: Some(Route::ChatCompletions),
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
    let batch = || (0..LINES).for_each(|_| log.write(black_box(&line)));
    log.flush();
    let counted = allocation_counter::measure(batch);
    let name = format!("{LINES} access-log lines ({} allocations)", counted.count_total);
    // Flushed between the measurements, or the backlog would fill up and lines be dropped.
    criterion.bench_function(&name, |bencher| {
        bencher.iter_batched(|| log.flush(), |()| batch(), BatchSize::PerIteration);
    });
    assert_eq!(log.lost(), 0);
}

fn measure(criterion: &mut Criterion, name: &str, work: &mut dyn FnMut()) {
    work();
    let counted = allocation_counter::measure(&mut *work);
    let name = format!("{name} ({} allocations)", counted.count_total);
    criterion.bench_function(&name, |bencher| bencher.iter(&mut *work));
}

fn settled<'a>(model: &'a Model, usage: &'a Usage) -> Settled<'a> {
    Settled {
        route: Route::ChatCompletions,
        model,
        status: 200,
        outcome: Outcome::Completed,
        usage,
        cost: Some(Nanodollars(50_250)),
        request_bytes: 2048,
        response_bytes: 48_211,
        first_byte: Some(Duration::from_millis(451)),
        duration: Duration::from_millis(4030),
        is_stream: true,
    }
}

fn usage() -> Usage {
    let source = Source::Provider;
    Usage { input: Tokens(1200), output: Tokens(180), source, ..Usage::default() }
}

fn unlimited() -> Arc<Ledger> {
    Arc::new(Ledger::new(Limits::default(), Past::default()))
}

/// Fewer than fill a batch, so that no measurement wakes the writer.
const LINES: usize = 30;

criterion_group!(benches, metrics, access_log);
criterion_main!(benches);
