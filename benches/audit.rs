//! Measures the audit log's cost per request: admission and settlement, and the text alone.
#![expect(clippy::unwrap_used, reason = "a bench panics on an error")]

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Write};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use cogni_gateway::llm::budget::{BudgetAmount, Nanodollars, TokenUsage, Tokens, UsageSource};
use cogni_gateway::telemetry::audit::chain::{ChainTip, RecordHeader};
use cogni_gateway::telemetry::audit::records::{
    CallAdmittedRecord, CallOutcome, CallSettledRecord, RunStartedRecord,
};
use cogni_gateway::telemetry::audit::{AuditConfig, AuditDurability, AuditLog};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

fn bench_call(c: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    for (name, durability) in [("os", AuditDurability::Os), ("group", AuditDurability::Group)] {
        let path = Some(folder.path().join(name));
        let config = AuditConfig { path, durability, ..AuditConfig::default() };
        let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
        c.bench_function(&format!("audit/call_{name}"), |b| {
            b.iter(|| {
                at_once(log.record_admission(&admitted_record())).unwrap();
                log.record_settlement(&settled_record());
            });
        });
    }
}

/// Measures a single admission that waits for the disk; no other admission shares its sync.
fn bench_fsync(c: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let path = Some(folder.path().join("fsync"));
    let config = AuditConfig { path, durability: AuditDurability::Fsync, ..AuditConfig::default() };
    let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut group = c.benchmark_group("audit");
    group.sample_size(20);
    group.bench_function("call_fsync", |b| {
        b.iter(|| {
            runtime.block_on(log.record_admission(&admitted_record())).unwrap();
            log.record_settlement(&settled_record());
        });
    });
}

/// Measures the parts: chaining the two records, and one `write` of the same size.
fn bench_parts(c: &mut Criterion) {
    let head = RecordHeader { time: b"2026-11-21T23:10:33.125Z", run: "\"0197a1b2-c3d4\"" };
    let mut chain = ChainTip::START;
    let mut lines = Vec::with_capacity(4096);
    c.bench_function("audit/chain_two_records", |b| {
        b.iter(|| {
            lines.clear();
            chain.append_record(&mut lines, head, black_box(&admitted_record()));
            chain.append_record(&mut lines, head, black_box(&settled_record()));
            black_box(lines.len())
        });
    });
    c.bench_function("audit/serialize_two_records", |b| {
        b.iter(|| {
            lines.clear();
            serde_json::to_writer(&mut lines, black_box(&admitted_record())).unwrap();
            serde_json::to_writer(&mut lines, black_box(&settled_record())).unwrap();
            black_box(lines.len())
        });
    });
    chain.append_record(&mut lines, head, &admitted_record());
    let mut file = tempfile::tempfile().unwrap();
    c.bench_function("audit/write_alone", |b| {
        b.iter(|| file.write_all(black_box(&lines)));
    });
    let null = File::options().write(true).open("/dev/null").unwrap();
    c.bench_function("audit/empty_system_call", |b| {
        b.iter(|| (&null).write(black_box(b"x")));
    });
}

/// Measures what inline writing avoids: passing a record to a writer thread and waiting for its reply.
fn hand_over(c: &mut Criterion) {
    let (records, inbox) = std::sync::mpsc::sync_channel::<(
        Vec<u8>,
        tokio::sync::oneshot::Sender<io::Result<()>>,
    )>(64);
    let mut file = tempfile::tempfile().unwrap();
    let writer = std::thread::spawn(move || {
        for (record, done) in inbox {
            let _ = done.send(file.write_all(&record));
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let record = vec![b'x'; 950];
    c.bench_function("audit/hand_over_to_a_thread", |b| {
        b.iter_batched(
            || record.clone(),
            |record| {
                let (done, written) = tokio::sync::oneshot::channel();
                records.send((record, done)).unwrap();
                runtime.block_on(written).unwrap().unwrap();
            },
            BatchSize::SmallInput,
        );
    });
    drop(records);
    writer.join().unwrap();
}

fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("only fsync waits"),
    }
}

fn started_record() -> RunStartedRecord {
    RunStartedRecord {
        run: "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b".into(),
        attempt: "1".into(),
        account: "acct-1".into(),
        version: "0.1.0".into(),
        policy: "9f86d081884c7d65".into(),
        prices: "8d969eef6ecad3c2".into(),
        upstream: "litellm",
        trace: None,
    }
}

fn admitted_record() -> CallAdmittedRecord<'static> {
    CallAdmittedRecord {
        request: REQUEST,
        route: "chat_completions",
        model: Some("claude-sonnet-4-5"),
        rules: &[],
        stream: true,
        request_bytes: 2048,
        pid: None,
        reserved: BudgetAmount {
            turns: 1,
            input: Tokens(612),
            output: Tokens(4096),
            cost: Nanodollars(98_304_000),
        },
    }
}

fn settled_record() -> CallSettledRecord<'static> {
    let usage = TokenUsage {
        input: Tokens(598),
        output: Tokens(244),
        source: UsageSource::Provider,
        ..TokenUsage::default()
    };
    CallSettledRecord {
        request: REQUEST,
        outcome: CallOutcome::Completed,
        status: 200,
        code: None,
        usage,
        charged: BudgetAmount {
            turns: 1,
            input: usage.input,
            output: usage.output,
            cost: Nanodollars(9_840_000),
        },
        response_bytes: 48_211,
        frames: 245,
        litellm_call_id: Some(REQUEST),
        litellm_response_cost: Some("0.0054540000000000005"),
        reported_cost_usd: None,
        first_byte_ms: Some(311.52),
        duration_ms: 4812.913,
    }
}

const REQUEST: &str = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5c";

criterion_group!(benches, bench_call, bench_fsync, bench_parts, hand_over);
criterion_main!(benches);
