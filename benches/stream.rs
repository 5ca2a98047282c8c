//! Measures the observation of a frame: per protocol, with and without the usage filter, and per body.
#![expect(clippy::unwrap_used, reason = "a bench is not production code")]

use std::hint::black_box;

use bytes::Bytes;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::response::{
    CallAllowance, CutoffMode, ResponseFormat, ResponseObserver, UsageChunkMode,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const CHAT: &str = r#"data: {"id":"chatcmpl-9c1f5f6e2b7a4d0e8a3b","created":1763769600,"model":"gpt-5-mini","object":"chat.completion.chunk","system_fingerprint":"fp_5f6e2b","choices":[{"index":0,"delta":{"content":" streams"}}]}

"#;

const CHAT_NULL_USAGE: &str = r#"data: {"id":"chatcmpl-9c1f5f6e2b7a4d0e8a3b","object":"chat.completion.chunk","created":1763769600,"model":"gpt-5-mini","choices":[{"index":0,"delta":{"content":" streams"},"finish_reason":null}],"usage":null}

"#;

const CHAT_USAGE: &str = r#"data: {"id":"chatcmpl-9c1f5f6e2b7a4d0e8a3b","created":1763769600,"model":"gpt-5-mini","object":"chat.completion.chunk","choices":[],"usage":{"completion_tokens":128,"prompt_tokens":2048,"total_tokens":2176,"completion_tokens_details":{"accepted_prediction_tokens":0,"audio_tokens":0,"reasoning_tokens":64,"rejected_prediction_tokens":0},"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":1024},"cost":0.00068}}

"#;

const MESSAGES: &str = r#"event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" and the record rides in the response body"}}

"#;

const RESPONSES: &str = r#"event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":17,"item_id":"msg_68f0c0ffee","output_index":0,"content_index":0,"delta":" streams","logprobs":[],"obfuscation":"x8Ub2Q"}

"#;

const RESPONSES_UNNAMED: &str = r#"data: {"type":"response.output_text.delta","sequence_number":17,"item_id":"msg_68f0c0ffee","output_index":0,"content_index":0,"delta":" streams","logprobs":[],"obfuscation":"x8Ub2Q"}

"#;

fn bench_events(c: &mut Criterion) {
    let mut group = c.benchmark_group("frame");
    let frames = [
        ("chat", GatewayRoute::ChatCompletions, UsageChunkMode::Show, CHAT),
        ("chat_hide", GatewayRoute::ChatCompletions, UsageChunkMode::Hide, CHAT),
        ("chat_null_usage", GatewayRoute::ChatCompletions, UsageChunkMode::Show, CHAT_NULL_USAGE),
        ("chat_usage_chunk", GatewayRoute::ChatCompletions, UsageChunkMode::Show, CHAT_USAGE),
        ("chat_usage_chunk_hide", GatewayRoute::ChatCompletions, UsageChunkMode::Hide, CHAT_USAGE),
        ("messages", GatewayRoute::Messages, UsageChunkMode::Show, MESSAGES),
        ("responses", GatewayRoute::Responses, UsageChunkMode::Show, RESPONSES),
        ("responses_unnamed", GatewayRoute::Responses, UsageChunkMode::Show, RESPONSES_UNNAMED),
    ];
    for (name, route, usage_chunk, text) in frames {
        let frame = Bytes::from_static(text.as_bytes());
        let mut observer = ResponseObserver::new(route, ResponseFormat::Sse, usage_chunk);
        group.throughput(Throughput::Bytes(frame.len() as u64));
        group.bench_function(name, |b| {
            b.iter(|| observer.read_frame(black_box(frame.clone())).unwrap());
        });
        // The run's output is limited here, so the text is counted, too.
        let mut observer = ResponseObserver::new(route, ResponseFormat::Sse, usage_chunk)
            .with_allowance(UNREACHED);
        group.bench_function(format!("{name}_limited"), |b| {
            b.iter(|| observer.read_frame(black_box(frame.clone())).unwrap());
        });
    }
    group.finish();
}

/// Measures reads of 16 KiB from a fast upstream: events joined, and split at the edges.
fn bench_reads(c: &mut Criterion) {
    let mut group = c.benchmark_group("read_16k");
    for (name, usage_chunk) in [("chat", UsageChunkMode::Show), ("chat_hide", UsageChunkMode::Hide)]
    {
        let stream = Bytes::from(CHAT.repeat(16 * 1024));
        let mut reads =
            (0..stream.len() / READ).cycle().map(|i| stream.slice(i * READ..(i + 1) * READ));
        let mut observer =
            ResponseObserver::new(GatewayRoute::ChatCompletions, ResponseFormat::Sse, usage_chunk);
        group.throughput(Throughput::Bytes(READ as u64));
        group.bench_function(name, |b| {
            b.iter(|| observer.read_frame(black_box(reads.next().unwrap())).unwrap());
        });
    }
    group.finish();
}

fn bench_bodies(c: &mut Criterion) {
    let mut group = c.benchmark_group("body");
    let numbers = "-0.017358398,0.0042610168,".repeat(40_000);
    let bodies = [
        (
            "embeddings_1mb",
            GatewayRoute::Embeddings,
            format!(
                r#"{{"object":"list","data":[{{"object":"embedding","index":0,"embedding":[{numbers}0]}}],"model":"e","usage":{{"prompt_tokens":8,"total_tokens":8}}}}"#
            ),
        ),
        (
            "embeddings_base64_1mb",
            GatewayRoute::Embeddings,
            format!(
                r#"{{"object":"list","data":[{{"object":"embedding","index":0,"embedding":"{}"}}],"model":"e","usage":{{"prompt_tokens":8,"total_tokens":8}}}}"#,
                "AbCdEf09+/".repeat(100_000)
            ),
        ),
        (
            "chat_2kb",
            GatewayRoute::ChatCompletions,
            format!(
                r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"{}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":8,"completion_tokens":400,"total_tokens":408}}}}"#,
                "A line of text, as it is.\\n".repeat(70)
            ),
        ),
    ];
    for (name, route, body) in bodies {
        let body = Bytes::from(body);
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut observer =
                    ResponseObserver::new(route, ResponseFormat::Json, UsageChunkMode::Show);
                for start in (0..body.len()).step_by(READ) {
                    observer.read_frame(body.slice(start..body.len().min(start + READ))).unwrap();
                }
                observer.reported_usage().unwrap()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench_events, bench_reads, bench_bodies);
criterion_main!(benches);

const READ: usize = 16 * 1024;

const UNREACHED: CallAllowance =
    CallAllowance { input: Tokens(0), output: Tokens(u64::MAX), cutoff: CutoffMode::Graceful };
