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
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::base::secret_redactor::SecretRedactor;
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
        |n| [repeat_piece("{}\n", n / 6), repeat_piece(" ", n / 2)].concat(),
        read_envelope,
    ),
    (
        "envelope: noise that begins like an object",
        MIB,
        |n| repeat_piece("{\n", n / 2),
        read_envelope,
    ),
    ("envelope: texts without an end", MIB, |n| repeat_piece("{\"\n", n / 3), read_envelope),
    ("envelope: objects on one line", MIB, |n| repeat_piece("{}", n / 2), read_envelope),
    ("envelope: too deep", MIB, |n| repeat_piece("{\"a\":\n", n / 6), read_envelope),
    ("output: a byte at a time", MIB, |n| repeat_piece("a", n), capture_output),
    ("what is shown: no line's end", MIB, |n| repeat_piece("{", n), render_output),
    ("what is shown: bytes of no text", MIB, |n| repeat_piece("\u{20ac}", n / 3), render_output),
    ("events of a stream: lines of data", MIB, |n| repeat_piece("data:\n", n / 6), read_events),
    ("pull request: blanks", 8000, |n| repeat_piece(" ", n), pull_request),
    (
        "pull request: words before blanks",
        8000,
        |n| [repeat_piece("fix", n / 6), repeat_piece(" ", n / 2)].concat(),
        pull_request,
    ),
    ("pull request: a title of blanks", MIB, |n| repeat_piece(" \n", n / 2), pull_request),
    (
        "pull request: marks without an end",
        65_000,
        |n| repeat_piece("<!-- cogni:run ", n / 15),
        read_page,
    ),
    (
        "pull request: many parts",
        65_000,
        |n| repeat_piece("<!-- cogni:run <!-- /cogni -->", n / 30),
        read_page,
    ),
    (
        "announced: lines",
        MIB,
        |n| repeat_piece(&format!("{0} {0} {0}\n", "7".repeat(40)), n / 123),
        read_announcement,
    ),
    (
        "announced: parents",
        MIB,
        |n| {
            [
                repeat_piece(&"7".repeat(40), 1),
                repeat_piece(&format!(" {}", "7".repeat(40)), n / 41),
                repeat_piece("\n", 1),
            ]
            .concat()
        },
        read_announcement,
    ),
    (
        "bundle: prerequisites",
        MIB,
        |n| {
            [
                repeat_piece("# v2 git bundle\n", 1),
                repeat_piece(&format!("-{}\n", "7".repeat(40)), n / 42),
            ]
            .concat()
        },
        read_bundle,
    ),
    (
        "diff: changes",
        MIB,
        |n| repeat_piece(&format!(":100644 100644 {0} {0} M\0a/b\0", "7".repeat(40)), n / 105),
        raw_diff,
    ),
    ("diff: parents", MIB, |n| repeat_piece(":", n), raw_diff),
    (
        "objects: a byte at a time",
        MIB,
        |n| {
            [repeat_piece(&format!("{} blob {n}\n", "7".repeat(40)), 1), repeat_piece("a", n)]
                .concat()
        },
        read_objects,
    ),
    ("commands: empty ends", MIB, |n| repeat_piece("E\0\0\0\u{2}\0\0", n / 7), read_frames),
    ("commands: a byte in each frame", MIB, |n| repeat_piece("O\0\0\0\u{1}O", n / 6), read_frames),
    ("request: names of a document", MIB, |n| request_of_pieces("/Type/Page", n), read_body),
    (
        "request: escapes of a document",
        MIB,
        |n| request_of_pieces("/Count 1>>stream endstream", n),
        read_body,
    ),
    ("request: segments of an image", MIB, |n| image_request(n), read_body),
    ("request: documents", MIB, many_documents, read_body),
    ("commit: parents", MIB, many_parents, read_commit),
    ("path: segments", 16 << 10, |n| repeat_piece("a/", n / 2), check_path),
    ("credentials: what begins like one", MIB, |n| repeat_piece("AKIA", n / 4), find_credentials),
    (
        "credentials: blanks",
        MIB,
        |n| [repeat_piece("password =", 1), repeat_piece(" ", n)].concat(),
        find_credentials,
    ),
    (
        "answer: nearly a secret, a byte in each frame",
        MIB,
        |n| {
            let bytes: Vec<_> = GUARDED_SECRET.chars().map(String::from).collect();
            let spelled = bytes[..bytes.len() - 1].join(&"\\".repeat(32));
            repeat_piece(&spelled, n / spelled.len())
        },
        guard_answer,
    ),
    ("answer: backslashes in one frame", MIB, |n| repeat_piece("\\", n), search_answer),
    ("journal: an answer that is nearly everywhere", MIB, |n| repeat_piece("a", n), read_journal),
];

/// R5, A4, L3: A megabyte of the worst text costs milliseconds, not minutes.
#[test]
fn what_an_agent_writes_is_read_in_linear_time() {
    let mut slow = String::new();
    for (name, most, make, read) in READERS {
        let (few, many) = (measure_time(&make(most / 8), *read), measure_time(&make(*most), *read));
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
fn measure_time(text: &[u8], read: fn(&[u8])) -> Duration {
    let spent = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    let once = || {
        let begun = spent();
        read(black_box(text));
        spent().saturating_sub(begun)
    };
    let first = once();
    if first > CEILING { first } else { first.min(once()).min(once()) }
}

fn repeat_piece(piece: &str, times: usize) -> Vec<u8> {
    piece.repeat(times).into_bytes()
}

fn text_of(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn read_envelope(bytes: &[u8]) {
    let _ = black_box(AgentEnvelope::parse(text_of(bytes)));
}

fn guard_answer(bytes: &[u8]) {
    let mut guard = SecretRedactor::new(&SecretString::new(GUARDED_SECRET));
    for frame in bytes.chunks(1) {
        assert!(guard.pass_frame(Bytes::copy_from_slice(frame)).is_some());
    }
    black_box(guard.take_rest());
}

fn search_answer(bytes: &[u8]) {
    let guard = SecretRedactor::new(&SecretString::new(GUARDED_SECRET));
    black_box(guard.contains_secret(bytes));
}

fn capture_output(bytes: &[u8]) {
    let mut capture = HeadTailBuffer::new(bytes.len() / 2);
    bytes.chunks(1).for_each(|chunk| capture.push(chunk));
    black_box(capture.finish());
}

fn render_output(bytes: &[u8]) {
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

fn read_events(bytes: &[u8]) {
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

fn read_page(bytes: &[u8]) {
    black_box(managed_section::upsert_section(Some(text_of(bytes)), "run-1", "words"));
    black_box(managed_section::has_notice_of_other_run(Some(text_of(bytes)), "run-1"));
}

fn read_announcement(bytes: &[u8]) {
    let _ = black_box(AnnouncedBranch::parse(bytes, 0));
}

fn read_bundle(bytes: &[u8]) {
    let _ = black_box(BundleHeader::parse(bytes, "refs/heads/sandbox/a"));
}

fn raw_diff(bytes: &[u8]) {
    let _ = black_box(diff::parse_raw_diff(bytes));
}

fn read_objects(bytes: &[u8]) {
    let mut reader = cat_file::BatchReader::default();
    for piece in bytes.chunks(1) {
        reader
            .push(piece, |part| {
                black_box(part);
            })
            .unwrap();
    }
}

fn read_frames(bytes: &[u8]) {
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
fn request_of_pieces(piece: &str, n: usize) -> Vec<u8> {
    let document = format!("%PDF-1.4\n{}", piece.repeat(n / piece.len()));
    let mut text = String::new();
    BASE64_URL_SAFE_NO_PAD.encode_string(document.as_bytes(), &mut text);
    message_event(&[text])
}

/// A request with an image whose content never begins.
fn image_request(n: usize) -> Vec<u8> {
    let segments = [&[0xff, 0xd8][..], &[0xff, 0xe0, 0, 2].repeat(n / 4)].concat();
    let mut text = String::new();
    BASE64_URL_SAFE_NO_PAD.encode_string(&segments, &mut text);
    message_event(&[text])
}

fn many_documents(n: usize) -> Vec<u8> {
    message_event(&vec!["JVBERi0xLjQK".to_owned(); n / 40])
}

fn message_event(data: &[String]) -> Vec<u8> {
    let parts: Vec<_> =
        data.iter().map(|data| format!(r#"{{"source":{{"data":"{data}"}}}}"#)).collect();
    let parts = parts.join(",").replace('-', "+").replace('_', "/");
    format!(r#"{{"model":"m","messages":[{{"content":[{parts}]}}]}}"#).into_bytes()
}

fn read_body(bytes: &[u8]) {
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

fn read_commit(bytes: &[u8]) {
    let name = ObjectId::hash_object("commit", bytes);
    if let Ok(commit) = ParsedCommit::parse(name, bytes) {
        black_box(commit.rewritten(
            &HashMap::new(),
            "Relay <relay@example.com>",
            "Sandbox-Run: 1\n",
        ));
    }
}

fn check_path(bytes: &[u8]) {
    for pattern in ["**/a/**/a/**/b", "**/b", "**/*a*/**/*b*"] {
        assert!(!PathPattern::new(pattern).matches(bytes));
    }
}

fn find_credentials(bytes: &[u8]) {
    let scanner = SecretScanner::new(&RelayConfig::default().policy.secrets, &[]).unwrap();
    let (mut text, mut found) = (ScanWindow::default(), FoundSecrets::new());
    for piece in bytes.chunks(16 << 10) {
        scanner.scan(&mut text, piece, &mut found);
    }
    // A message is one piece, whatever its length.
    scanner.scan(&mut ScanWindow::default(), bytes, &mut found);
}

/// Four pieces of an answer, and a text that almost matches at each position.
fn read_journal(bytes: &[u8]) {
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

/// A credential that answers are searched for.
const GUARDED_SECRET: &str = "ghs_Wx3/9+vQ~secret.77";

/// Between eight times, which is linear, and sixty-four times, which is quadratic.
const STEEP: u32 = 32;

const NOISE: Duration = Duration::from_millis(100);

/// The limit for a megabyte, without optimisation, on a busy machine. An optimised build takes less than 50 ms for each reader.
const CEILING: Duration = Duration::from_secs(10);
