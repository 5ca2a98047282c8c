//! Tests of playback: how content is split, joined, timed and stamped.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::raw_client::{RawReply, post_json};
use crate::support::model_provider::start_default;

const CHAT: &str = "/v1/chat/completions";

async fn stream_script(script: &str) -> RawReply {
    let provider = start_default().await;
    let body = json!({ "model": format!("fake/{script}"), "stream": true });
    post_json(provider.addr, CHAT, &body).await
}

fn unix_millis() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap();
    u64::try_from(now.as_nanos()).unwrap()
}

fn read_stamps(reply: &RawReply) -> Vec<u64> {
    let text = reply.text();
    text.split("\"t=").skip(1).map(|rest| rest[..19].parse().unwrap()).collect()
}

#[tokio::test]
async fn every_event_is_a_chunk_of_its_own() {
    let reply = stream_script("chunks=7").await;
    assert_eq!(reply.chunks.len(), 1 + 7 + 2);
    assert!(reply.chunks.iter().all(|chunk| chunk.ends_with(b"\n\n")));
}

#[tokio::test]
async fn events_are_joined_as_the_script_says() {
    let reply = stream_script("chunks=7,coalesce=4").await;
    let events = |chunk: &Vec<u8>| chunk.windows(2).filter(|end| end == b"\n\n").count();
    assert_eq!(reply.chunks.iter().map(events).collect::<Vec<_>>(), [4, 4, 2]);
}

#[tokio::test]
async fn events_are_cut_as_the_script_says() {
    let reply = stream_script("chunks=2,split=10").await;
    let (last, others) = reply.chunks.split_last().unwrap();
    assert!(last.len() <= 10 && others.iter().all(|chunk| chunk.len() <= 10));
    assert_eq!(reply.events().len(), 1 + 2 + 1);
}

#[tokio::test]
async fn an_event_of_many_megabytes_holds_no_newline() {
    let reply = stream_script("chunks=1,size=8MiB").await;
    let text = reply.text();
    let longest = text.lines().map(str::len).max().unwrap();
    assert!(longest > 8 << 20);
    let content = reply.events()[1]["choices"][0]["delta"]["content"].as_str().unwrap().len();
    assert_eq!(content, 8 << 20);
    assert!(reply.chunks.iter().all(|chunk| chunk.len() <= 64 << 10));
}

#[tokio::test]
async fn chunks_keep_to_their_schedule() {
    let begun = unix_millis();
    let stamps = read_stamps(&stream_script("chunks=4,interval=10ms,stamps=yes").await);
    assert_eq!(stamps.len(), 4);
    for (i, stamp) in (0..).zip(stamps) {
        assert!(stamp >= begun + i * 10_000_000 && stamp <= unix_millis());
    }
}

#[tokio::test]
async fn the_first_byte_is_delayed_as_configured() {
    let begun = unix_millis();
    stream_script("first_byte=30ms").await;
    assert!(unix_millis() - begun >= 30_000_000);
}

#[tokio::test]
async fn a_stamped_chunk_is_as_long_as_the_script_says() {
    for (size, length) in [(100, 100), (22, 22), (1, 22)] {
        let reply = stream_script(&format!("chunks=1,size={size},stamps=yes")).await;
        let content = reply.events()[1]["choices"][0]["delta"]["content"].as_str().unwrap().len();
        assert_eq!(content, length);
    }
}

#[tokio::test]
async fn a_responses_stream_numbers_its_events() {
    let provider = start_default().await;
    let body = json!({ "model": "fake/chunks=20", "stream": true });
    let events = post_json(provider.addr, "/v1/responses", &body).await.events();
    let numbers: Vec<_> = events.iter().map(|event| &event["sequence_number"]).collect();
    assert_eq!(numbers, (0..28).collect::<Vec<_>>());
}

#[tokio::test]
async fn unary_and_streamed_answers_say_the_same() {
    let provider = start_default().await;
    let model = "fake/chunks=9,text=one two";
    let body = json!({ "model": model, "stream": true });
    let streamed: String = post_json(provider.addr, CHAT, &body)
        .await
        .events()
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    let unary = post_json(provider.addr, CHAT, &json!({ "model": model })).await.json();
    assert_eq!(unary["choices"][0]["message"]["content"], streamed);
}
