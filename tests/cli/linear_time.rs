//! Tests that every reader of an agent's bytes takes time proportional to their length.
//!
//! Each reader has a line in the table with the worst known text. The test compares processor time at one length and at
//! eight times that length: a linear reader takes eight times as long, a quadratic one sixty-four times. A ceiling
//! catches a reader that is slow from the first byte on.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::io::Cursor;
use std::time::Duration;

use base64::prelude::*;
use bytes::Bytes;
use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::cli::run::output_renderer::{OpenLineFlag, OutputRenderer};
use cogni_gateway::guest::agent::sse::SseReader;
use cogni_gateway::guest::init::command_frames::FrameReader;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request;
use cogni_gateway::relay::git::cat_file;
use cogni_gateway::relay::github::pull_request::{managed_section, safe_text};
use cogni_gateway::relay::repo::ObjectId;
use cogni_gateway::relay::repo::bundle::BundleHeader;
use cogni_gateway::relay::repo::extract_commands::AnnouncedBranch;
use cogni_gateway::relay::repo::quarantine::commit::ParsedCommit;
use cogni_gateway::relay::repo::review::{
    FoundSecrets, PathPattern, RelayConfig, ScanWindow, SecretScanner, diff,
};
use cogni_gateway::runner::AgentEnvelope;
use cogni_gateway::sandbox::output::HeadTailBuffer;
use cogni_gateway::service::store::{
    AddRunOutcome, NewRunRow, RunEnd, RunEventKind, RunStore, SCHEMA, SpendingCaps,
};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use tokio::io::AsyncWriteExt;

/// A reader: its name, the length of the first text, a function that makes a text of about this length, and the
/// reader's function.
type TextReader = (&'static str, usize, fn(usize) -> Vec<u8>, fn(&[u8]));

const READERS: &[TextReader] = &[
    (
        "envelope: objects before blanks",
        MIB,
        |n| [of("{}\n", n / 6), of(" ", n / 2)].concat(),
        envelope,
    ),
    ("envelope: noise that begins like an object", MIB, |n| of("{\n", n / 2), envelope),
    ("envelope: texts without an end", MIB, |n| of("{\"\n", n / 3), envelope),
    ("envelope: objects on one line", MIB, |n| of("{}", n / 2), envelope),
    ("envelope: too deep", MIB, |n| of("{\"a\":\n", n / 6), envelope),
    ("output: a byte at a time", MIB, |n| of("a", n), output),
    ("what is shown: no line's end", MIB, |n| of("{", n), shown),
    ("what is shown: bytes of no text", MIB, |n| of("\u{20ac}", n / 3), shown),
    ("events of a stream: lines of data", MIB, |n| of("data:\n", n / 6), events),
    ("pull request: blanks", 8000, |n| of(" ", n), pull_request),
    (
        "pull request: words before blanks",
        8000,
        |n| [of("fix", n / 6), of(" ", n / 2)].concat(),
        pull_request,
    ),
    ("pull request: a title of blanks", MIB, |n| of(" \n", n / 2), pull_request),
    ("pull request: marks without an end", 65_000, |n| of("<!-- cogni:run ", n / 15), page),
    ("pull request: many parts", 65_000, |n| of("<!-- cogni:run <!-- /cogni -->", n / 30), page),
    (
        "announced: lines",
        MIB,
        |n| of(&format!("{0} {0} {0}\n", "7".repeat(40)), n / 123),
        announced,
    ),
    (
        "announced: parents",
        MIB,
        |n| {
            [of(&"7".repeat(40), 1), of(&format!(" {}", "7".repeat(40)), n / 41), of("\n", 1)]
                .concat()
        },
        announced,
    ),
    (
        "bundle: prerequisites",
        MIB,
        |n| [of("# v2 git bundle\n", 1), of(&format!("-{}\n", "7".repeat(40)), n / 42)].concat(),
        bundle,
    ),
    (
        "diff: changes",
        MIB,
        |n| of(&format!(":100644 100644 {0} {0} M\0a/b\0", "7".repeat(40)), n / 105),
        raw_diff,
    ),
    ("diff: parents", MIB, |n| of(":", n), raw_diff),
    (
        "objects: a byte at a time",
        MIB,
        |n| [of(&format!("{} blob {n}\n", "7".repeat(40)), 1), of("a", n)].concat(),
        objects,
    ),
    ("commands: empty ends", MIB, |n| of("E\0\0\0\u{2}\0\0", n / 7), frames),
    ("commands: a byte in each frame", MIB, |n| of("O\0\0\0\u{1}O", n / 6), frames),
    ("request: names of a document", MIB, |n| request("/Type/Page", n), body),
    ("request: escapes of a document", MIB, |n| request("/Count 1>>stream endstream", n), body),
    ("request: segments of an image", MIB, |n| image(n), body),
    ("request: documents", MIB, many_documents, body),
    ("commit: parents", MIB, many_parents, commit),
    ("path: segments", 16 << 10, |n| of("a/", n / 2), path),
    ("credentials: what begins like one", MIB, |n| of("AKIA", n / 4), credentials),
    ("credentials: blanks", MIB, |n| [of("password =", 1), of(" ", n)].concat(), credentials),
    ("journal: an answer that is nearly everywhere", MIB, |n| of("a", n), journal),
];

/// R5, A4, L3: A megabyte of the worst text costs milliseconds, not minutes.
#[test]
fn what_an_agent_writes_is_read_in_linear_time() {
    let mut slow = String::new();
    for (name, most, make, read) in READERS {
        let (few, many) = (time(&make(most / 8), *read), time(&make(*most), *read));
        // Below this time, clock and caches dominate.
        let is_steep = many > NOISE && many > few.max(NOISE / 64) * STEEP;
        let share = u32::try_from(MIB / most).unwrap();
        let ceiling = NOISE + CEILING / share;
        if is_steep || many > ceiling {
            let _ = writeln!(slow, "{name}: {few:?}, and of eight times as much {many:?}");
        }
    }
    assert!(slow.is_empty(), "{slow}");
}

/// Returns the processor time of the whole process, which runs only this test: the best of several attempts.
fn time(text: &[u8], read: fn(&[u8])) -> Duration {
    let spent = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    let once = || {
        let begun = spent();
        read(black_box(text));
        spent().saturating_sub(begun)
    };
    let first = once();
    if first > CEILING { first } else { first.min(once()).min(once()) }
}

fn of(piece: &str, times: usize) -> Vec<u8> {
    piece.repeat(times).into_bytes()
}

fn text_of(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn envelope(bytes: &[u8]) {
    let _ = black_box(AgentEnvelope::parse(text_of(bytes)));
}

fn output(bytes: &[u8]) {
    let mut capture = HeadTailBuffer::new(bytes.len() / 2);
    bytes.chunks(1).for_each(|chunk| capture.push(chunk));
    black_box(capture.finish());
}

fn shown(bytes: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut lines = OutputRenderer::for_events(tokio::io::sink(), OpenLineFlag::default());
        let mut text = OutputRenderer::for_text(tokio::io::sink(), OpenLineFlag::default());
        for chunk in bytes.chunks(4096) {
            lines.write_all(chunk).await.unwrap();
            text.write_all(chunk).await.unwrap();
        }
        lines.shutdown().await.unwrap();
        text.shutdown().await.unwrap();
    });
}

fn events(bytes: &[u8]) {
    let mut events = SseReader::new(Cursor::new(bytes));
    while let Ok(Some(data)) = events.next_data() {
        black_box(data);
    }
}

fn pull_request(bytes: &[u8]) {
    black_box(safe_text::format_quote(text_of(bytes)));
    black_box(safe_text::format_title(text_of(bytes), "changes"));
    black_box(safe_text::format_code(&text_of(bytes)[..bytes.len().min(8000)]));
}

fn page(bytes: &[u8]) {
    black_box(managed_section::upsert_section(Some(text_of(bytes)), "run-1", "words"));
    black_box(managed_section::has_notice_of_other_run(Some(text_of(bytes)), "run-1"));
}

fn announced(bytes: &[u8]) {
    let _ = black_box(AnnouncedBranch::parse(bytes, 0));
}

fn bundle(bytes: &[u8]) {
    let _ = black_box(BundleHeader::parse(bytes, "refs/heads/sandbox/a"));
}

fn raw_diff(bytes: &[u8]) {
    let _ = black_box(diff::parse_raw_diff(bytes));
}

fn objects(bytes: &[u8]) {
    let mut reader = cat_file::BatchReader::default();
    for piece in bytes.chunks(1) {
        reader
            .push(piece, |part| {
                black_box(part);
            })
            .unwrap();
    }
}

fn frames(bytes: &[u8]) {
    let mut reader = FrameReader::default();
    for piece in bytes.chunks(1) {
        reader
            .push(piece, |part| {
                black_box(part);
            })
            .unwrap();
    }
}

/// A request with a document that repeats itself.
fn request(piece: &str, n: usize) -> Vec<u8> {
    let document = format!("%PDF-1.4\n{}", piece.repeat(n / piece.len()));
    let mut text = String::new();
    BASE64_URL_SAFE_NO_PAD.encode_string(document.as_bytes(), &mut text);
    message(&[text])
}

/// A request with an image whose content never begins.
fn image(n: usize) -> Vec<u8> {
    let segments = [&[0xff, 0xd8][..], &[0xff, 0xe0, 0, 2].repeat(n / 4)].concat();
    let mut text = String::new();
    BASE64_URL_SAFE_NO_PAD.encode_string(&segments, &mut text);
    message(&[text])
}

fn many_documents(n: usize) -> Vec<u8> {
    message(&vec!["JVBERi0xLjQK".to_owned(); n / 40])
}

fn message(data: &[String]) -> Vec<u8> {
    let parts: Vec<_> =
        data.iter().map(|data| format!(r#"{{"source":{{"data":"{data}"}}}}"#)).collect();
    let parts = parts.join(",").replace('-', "+").replace('_', "/");
    format!(r#"{{"model":"m","messages":[{{"content":[{parts}]}}]}}"#).into_bytes()
}

fn body(bytes: &[u8]) {
    let mut reader = request::BodyReader::new(GatewayRoute::Messages);
    for frame in bytes.chunks(1024) {
        reader.push(Bytes::copy_from_slice(frame)).unwrap();
    }
    let _ = black_box(reader.finish_body());
}

/// A commit with many different parents.
fn many_parents(n: usize) -> Vec<u8> {
    let mut commit = format!("tree {}\n", "7".repeat(40));
    for number in 0..n / 48 {
        let _ = writeln!(commit, "parent {number:040x}");
    }
    let author = "A <a@example.com> 1700000000 +0000";
    let _ = write!(commit, "author {author}\ncommitter {author}\n\nwords\n");
    commit.into_bytes()
}

fn commit(bytes: &[u8]) {
    let name = ObjectId::hash_object("commit", bytes);
    if let Ok(commit) = ParsedCommit::parse(name, bytes) {
        black_box(commit.rewritten(
            &HashMap::new(),
            "Relay <relay@example.com>",
            "Sandbox-Run: 1\n",
        ));
    }
}

fn path(bytes: &[u8]) {
    for pattern in ["**/a/**/a/**/b", "**/b", "**/*a*/**/*b*"] {
        assert!(!PathPattern::new(pattern).matches(bytes));
    }
}

fn credentials(bytes: &[u8]) {
    let scanner = SecretScanner::new(&RelayConfig::default().policy.secrets, &[]).unwrap();
    let (mut text, mut found) = (ScanWindow::default(), FoundSecrets::new());
    for piece in bytes.chunks(16 << 10) {
        scanner.scan(&mut text, piece, &mut found);
    }
    // A message is one piece, whatever its length.
    scanner.scan(&mut ScanWindow::default(), bytes, &mut found);
}

/// Four pieces of an answer, and a text that almost matches at each position.
fn journal(bytes: &[u8]) {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let directory = tempfile::tempdir().unwrap();
    runtime.worker_threads(1).enable_all().build().unwrap().block_on(async {
        let database =
            SqliteDatabase::open_database(&directory.path().join("state.db"), &[SCHEMA]).unwrap();
        let journal = RunStore::new(database);
        let new = NewRunRow {
            id: "run-1".to_owned(),
            grant: "grant".to_owned(),
            idempotency_key: None,
            caps: SpendingCaps::default(),
            max_cost_usd: None,
            digest: String::new(),
            agent: "agent".to_owned(),
            account: "account".to_owned(),
            model: "model".to_owned(),
            submission: "{}".to_owned(),
        };
        let AddRunOutcome::New(feed, _) = journal.add_run(new).await.unwrap() else {
            panic!("it is known")
        };
        for piece in bytes.chunks(bytes.len() / 4) {
            feed.publish(RunEventKind::TextDelta, &json!({"text": text_of(piece)}));
        }
        tokio::select! {
            () = journal.persist_events(&feed) => (),
            () = tokio::time::sleep(Duration::from_millis(200)) => (),
        }
        let answer = format!("{}b", text_of(&bytes[..bytes.len() / 8]));
        let result = Some(json!({"agent": {"payloads": [{"text": answer}]}}).to_string());
        journal
            .finish_run(&feed, RunEnd { result, stdout: answer, ..RunEnd::default() })
            .await
            .unwrap();
    });
}

const MIB: usize = 1 << 20;

/// Between eight times, which is linear, and sixty-four times, which is quadratic.
const STEEP: u32 = 32;

const NOISE: Duration = Duration::from_millis(100);

/// For a megabyte, without optimisation, on a busy machine. An optimised build takes less than 50 ms for each reader.
const CEILING: Duration = Duration::from_secs(10);
