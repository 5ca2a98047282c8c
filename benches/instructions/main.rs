//! Counts the instructions of reading, by case, and of whole calls. callgrind counts them, so each session gives the
//! same count, which is compared with a figure.
//!
//! `docker/cargo_dist bench --bench instructions` fails if a case takes 5 % more than its figure below, or if the linker's
//! order of functions ([`order`]) no longer covers those that run. A commit that changes a count also changes the figure
//! here. Without valgrind, or in a debug build, each case runs once and nothing is
//! counted.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a bench waits for its gateway, and ends where it cannot go on"
)]

mod calls;
mod order;
mod profile;
#[expect(dead_code, reason = "the tests use more of it")]
#[path = "../../tests/support/threads.rs"]
mod threads;

use std::env;
use std::hint::black_box;
use std::io::{self, Write};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::{BodyPolicy, BodyReader, ScannedBody, admit_body};
use cogni_gateway::llm::response::{
    CallAllowance, CutoffMode, ResponseFormat, ResponseObserver, UsageChunkMode,
};

use calls::{CallCase, SERVED, serve};

/// A case, its instructions per frame or body, and the function that runs it a number of times.
struct CountedCase {
    name: &'static str,
    figure: u64,
    run: fn(u32),
}

const CASES: &[CountedCase] = &[
    CountedCase {
        name: "chat frame",
        figure: 433,
        run: |n| read_frames(&CHAT, UsageChunkMode::Show, false, n),
    },
    CountedCase {
        name: "chat frame, filtered",
        figure: 495,
        run: |n| read_frames(&CHAT, UsageChunkMode::Hide, false, n),
    },
    CountedCase {
        name: "chat frame, limited",
        figure: 561,
        run: |n| read_frames(&CHAT, UsageChunkMode::Hide, true, n),
    },
    CountedCase {
        name: "messages frame",
        figure: 514,
        run: |n| read_frames(&MESSAGES, UsageChunkMode::Show, false, n),
    },
    CountedCase {
        name: "messages frame, limited",
        figure: 543,
        run: |n| read_frames(&MESSAGES, UsageChunkMode::Show, true, n),
    },
    CountedCase {
        name: "responses frame",
        figure: 753,
        run: |n| read_frames(&RESPONSES, UsageChunkMode::Show, false, n),
    },
    CountedCase {
        name: "responses frame, limited",
        figure: 1159,
        run: |n| read_frames(&RESPONSES, UsageChunkMode::Show, true, n),
    },
    CountedCase {
        name: "chat answer 1 KB",
        figure: 5445,
        run: |n| read_answers(GatewayRoute::ChatCompletions, CHAT_ANSWER, n),
    },
    CountedCase {
        name: "messages answer 1 KB",
        figure: 5529,
        run: |n| read_answers(GatewayRoute::Messages, MESSAGES_ANSWER, n),
    },
    CountedCase {
        name: "responses answer 1 KB",
        figure: 7134,
        run: |n| read_answers(GatewayRoute::Responses, RESPONSES_ANSWER, n),
    },
    CountedCase { name: "request 2 KB", figure: 9021, run: |n| read_requests(2048, usize::MAX, n) },
    CountedCase {
        name: "request 100 KB",
        figure: 80_581,
        run: |n| read_requests(100_000, usize::MAX, n),
    },
    CountedCase {
        name: "request 100 KB in frames of 16 KB",
        figure: 90_339,
        run: |n| read_requests(100_000, 16_384, n),
    },
];

const CALLS: &[CallCase] = &[
    CallCase { name: "call 2 KB, lane on", figure: 35_850, lane: "on", is_stream: false },
    CallCase { name: "call 2 KB, lane off", figure: 50_865, lane: "off", is_stream: false },
    CallCase { name: "streamed frame, lane on", figure: 3721, lane: "on", is_stream: true },
    CallCase { name: "streamed frame, lane off", figure: 4914, lane: "off", is_stream: true },
];

fn main() -> Result<ExitCode> {
    let words: Vec<_> = env::args().skip(1).collect();
    if let [word, name, count] = &words[..]
        && word == COUNTED
    {
        let case = CASES.iter().find(|case| case.name == name).context("an unknown case")?;
        (case.run)(count.parse()?);
        return Ok(ExitCode::SUCCESS);
    }
    if let [word, lane, provider, directory] = &words[..]
        && word == SERVED
    {
        serve(lane, provider, directory.as_ref())?;
        return Ok(ExitCode::SUCCESS);
    }
    let has_valgrind = Command::new("valgrind").arg("--version").output().is_ok();
    if words.iter().any(|word| word == "--write-order") {
        order::write_order()?;
        return Ok(ExitCode::SUCCESS);
    }
    let is_smoke = words.iter().any(|word| word == "--test");
    if is_smoke || cfg!(debug_assertions) || !has_valgrind {
        for case in CASES {
            (case.run)(20);
        }
        writeln!(
            io::stdout(),
            "every case runs; instructions are counted in a release build, by valgrind"
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut has_grown = false;
    for case in CASES {
        let taken = (count_instructions(case, 3 * TIMES)? - count_instructions(case, TIMES)?)
            / u64::from(2 * TIMES);
        has_grown |= print_count(case.name, taken, case.figure)?;
    }
    for case in CALLS {
        has_grown |= print_count(case.name, case.count()?, case.figure)?;
    }
    has_grown |= order::check_order()?;
    Ok(if has_grown { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Prints the count; returns whether it exceeds its figure.
fn print_count(name: &str, taken: u64, figure: u64) -> Result<bool> {
    let is_more = taken * 100 > figure * 105;
    let note = if is_more { "more than its figure" } else { "" };
    writeln!(io::stdout(), "{name:34} {taken:7} instructions, figure {figure:7} {note}")?;
    Ok(is_more)
}

/// Returns the instructions of a process that runs the case this many times.
fn count_instructions(case: &CountedCase, times: u32) -> Result<u64> {
    let program = env::current_exe()?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args([COUNTED, case.name, &times.to_string()])
        .output()
        .context("running valgrind")?;
    let told = String::from_utf8(output.stderr)?;
    let counted = told.lines().find_map(|line| line.split_once("Collected : "));
    let (_, counted) = counted.with_context(|| format!("valgrind counted nothing: {told}"))?;
    Ok(counted.trim().parse()?)
}

/// Reads frames of one event each, with varying texts or numbers.
fn read_frames(stream: &CountedStream, usage_chunk: UsageChunkMode, is_limited: bool, times: u32) {
    let mut observer = ResponseObserver::new(stream.route, ResponseFormat::Sse, usage_chunk);
    if is_limited {
        let output = Tokens(u64::MAX);
        observer = observer.with_allowance(CallAllowance {
            input: Tokens(100),
            output,
            cutoff: CutoffMode::Graceful,
        });
    }
    let frames: Vec<_> = WORDS
        .iter()
        .enumerate()
        .map(|(number, word)| {
            let number = (100 + number).to_string();
            Bytes::from(stream.event.replace("TEXT", word).replace("NUMBER", &number))
        })
        .collect();
    for frame in frames.iter().cycle().take(times as usize) {
        black_box(observer.read_frame(black_box(frame.clone()))).expect("an event that fits");
    }
}

/// Reads whole answers, each with a new observer.
fn read_answers(route: GatewayRoute, answer: &str, times: u32) {
    let answer = Bytes::from(answer.replace("TEXT", &TEXT.repeat(14)));
    for _ in 0..times {
        let mut observer = ResponseObserver::new(route, ResponseFormat::Json, UsageChunkMode::Show);
        observer.read_frame(black_box(answer.clone())).expect("a body that fits");
        assert!(black_box(observer.reported_usage()).is_some());
    }
}

/// Reads, checks, limits and writes requests.
fn read_requests(size: usize, frame: usize, times: u32) {
    let policy = BodyPolicy::default();
    let prompt = TEXT.repeat(size / TEXT.len());
    let body = Bytes::from(format!(
        r#"{{"model":"gpt-5-mini","stream":false,"messages":[{{"role":"system","content":"Be brief."}},{{"role":"user","content":"{prompt}"}}],"temperature":0.2}}"#
    ));
    for _ in 0..times {
        let body = black_box(body.clone());
        let body = if body.len() <= frame {
            ScannedBody::scan_frame(GatewayRoute::ChatCompletions, body)
        } else {
            let mut reader = BodyReader::new(GatewayRoute::ChatCompletions);
            for at in (0..body.len()).step_by(frame) {
                reader.push(body.slice(at..body.len().min(at + frame))).expect("acceptable JSON");
            }
            reader.finish_body()
        };
        let mut call =
            admit_body(&policy, body.expect("acceptable JSON")).expect("an allowed call");
        call.limit_output(Tokens(4096));
        black_box(call.into_body());
    }
}

struct CountedStream {
    route: GatewayRoute,
    event: &'static str,
}

const CHAT: CountedStream = CountedStream {
    route: GatewayRoute::ChatCompletions,
    event: "data: {\"id\":\"chatcmpl-9c1f5f6e2b7a4d0e8a3b\",\"object\":\"chat.completion.chunk\",\"created\":1763769600,\"model\":\"gpt-5-mini\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"TEXT\"},\"finish_reason\":null}],\"usage\":null}\n\n",
};

const MESSAGES: CountedStream = CountedStream {
    route: GatewayRoute::Messages,
    event: "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"TEXT\"}}\n\n",
};

const RESPONSES: CountedStream = CountedStream {
    route: GatewayRoute::Responses,
    event: "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":NUMBER,\"item_id\":\"msg_68f0c0ffee\",\"output_index\":0,\"content_index\":0,\"delta\":\"TEXT\",\"logprobs\":[],\"obfuscation\":\"x8Ub2QTEXT\"}\n\n",
};

const CHAT_ANSWER: &str = r#"{"id":"chatcmpl-9c1f5f6e2b7a4d0e8a3b","created":1763769600,"model":"gpt-5-mini","object":"chat.completion","system_fingerprint":"fp_5f6e2b","choices":[{"finish_reason":"stop","index":0,"message":{"content":"TEXT","role":"assistant","tool_calls":null,"function_call":null}}],"usage":{"completion_tokens":250,"prompt_tokens":500,"total_tokens":750,"completion_tokens_details":null,"prompt_tokens_details":null}}"#;

const MESSAGES_ANSWER: &str = r#"{"id":"msg_01XFDUDYJgAACzvnptvVoYEL","type":"message","role":"assistant","model":"claude-sonnet-4-5","content":[{"type":"text","text":"TEXT"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":500,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"output_tokens":250,"service_tier":"standard"}}"#;

const RESPONSES_ANSWER: &str = r#"{"id":"resp_68f0c0ffee","object":"response","created_at":1763769600,"status":"completed","error":null,"incomplete_details":null,"model":"gpt-5-mini","output":[{"id":"msg_68f0c0ffee","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"TEXT","annotations":[]}]}],"parallel_tool_calls":true,"tools":[],"usage":{"input_tokens":500,"input_tokens_details":{"cached_tokens":0},"output_tokens":250,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":750},"metadata":{}}"#;

/// 72 bytes with an escape, as a line of an answer has.
const TEXT: &str = r"The quick brown fox jumps over the lazy dog, again and again, and on.\n ";

const WORDS: &[&str] = &[" streams", " a", ",", " record", " rides\\n", " in", " the", " response"];

/// The argument before a case and a number, in a process whose instructions are counted.
const COUNTED: &str = "counted";

/// The number of times a case runs. Another process runs it three times as often, so that the cost of starting a
/// process can be subtracted.
const TIMES: u32 = 200;
