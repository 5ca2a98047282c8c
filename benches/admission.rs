//! Measures the admission of a body: scanning it as it arrives, storing its frames, reading its fields, and editing it.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench is not production code")]

use std::hint::black_box;

use bytes::Bytes;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::{BodyPolicy, BodyReader, LlmCall, admit_body};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Contents for the messages of a request, from easy to hard to scan.
const CONTENTS: [(&str, &str); 5] = [
    ("plain", "the quick brown fox jumps over the lazy dog, and then again and again. "),
    (
        "escaped",
        r#"a line of about forty characters of text\n and so \"quoted\" for some more of it. "#,
    ),
    ("accented", "Straße, Übermut und naïve Cafés: Text, in dem nur wenige Zeichen breit sind. "),
    ("chinese", "你好世界这是一个测试"),
    ("chinese_escaped", r"\u4f60\u597d\u4e16\u754c"),
];

/// The number of bytes that a socket reader passes on at once.
const FRAME: usize = 64 * 1024;

fn bench_admission(c: &mut Criterion) {
    let mut group = c.benchmark_group("admission");
    for (size_name, size) in
        [("2KB", 2_000), ("100KB", 100_000), ("1MB", 1_000_000), ("10MB", 10_000_000)]
    {
        let texts = CONTENTS.map(|(name, text)| (name, one_message(text, size)));
        for (name, body) in texts.into_iter().chain([("messages", many_messages(size))]) {
            let frames = split_frames(&body);
            let counted = allocation_counter::measure(|| drop(admitted_call(&frames)));
            println!(
                "{name}/{size_name}: {} allocations, {} bytes",
                counted.count_total, counted.bytes_total
            );
            group.throughput(Throughput::Bytes(body.len() as u64));
            group.bench_function(format!("{name}/{size_name}"), |b| {
                b.iter(|| admitted_call(black_box(&frames)));
            });
        }
    }
    group.finish();
}

fn admitted_call(frames: &[Bytes]) -> LlmCall {
    let mut reader = BodyReader::new(GatewayRoute::ChatCompletions);
    for frame in frames {
        reader.push(frame.clone()).unwrap();
    }
    admit_body(&BodyPolicy::default(), reader.finish_body().unwrap()).unwrap()
}

/// A request with one long prompt.
fn one_message(text: &str, size: usize) -> String {
    let text = text.repeat(size / text.len());
    format!(
        r#"{{"model":"gpt-5","stream":true,"messages":[{{"role":"user","content":"{text}"}}]}}"#
    )
}

/// A conversation of an agent: short messages, tool calls and their results.
fn many_messages(size: usize) -> String {
    let turn = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"call_0123456789abcdef","type":"function","function":{"name":"exec","arguments":"{\"command\":\"ls -la /workspace\"}"}}]},{"role":"tool","tool_call_id":"call_0123456789abcdef","content":"total 12\ndrwxr-xr-x 2 root root 4096 Nov 21 23:05 .\n"}"#;
    let turns = vec![turn; size.div_ceil(turn.len())].join(",");
    format!(r#"{{"model":"gpt-5","stream":true,"messages":[{turns}]}}"#)
}

fn split_frames(body: &str) -> Vec<Bytes> {
    let body = Bytes::copy_from_slice(body.as_bytes());
    (0..body.len()).step_by(FRAME).map(|at| body.slice(at..body.len().min(at + FRAME))).collect()
}

criterion_group!(benches, bench_admission);
criterion_main!(benches);
