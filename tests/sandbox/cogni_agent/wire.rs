//! A1: The agent reads HTTP and server-sent events the same wherever the bytes are split.

use std::io::{self, BufReader, Read};

use cogni_gateway::guest::agent::completion::{self, ModelCompletion};
use cogni_gateway::guest::agent::event::ProgressEvent;
use cogni_gateway::guest::agent::http::{self, LlmEndpoint};
use cogni_gateway::guest::agent::sse::SseReader;
use proptest::prelude::*;

/// Returns its bytes in two parts, or one by one.
struct CutBytes<'a> {
    parts: Vec<&'a [u8]>,
}

impl<'a> CutBytes<'a> {
    fn at(bytes: &'a [u8], at: usize) -> Self {
        Self { parts: vec![&bytes[..at], &bytes[at..]] }
    }

    fn singly(bytes: &'a [u8]) -> Self {
        Self { parts: bytes.chunks(1).collect() }
    }
}

impl Read for CutBytes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.parts.retain(|part| !part.is_empty());
        let Some(part) = self.parts.first_mut() else { return Ok(0) };
        let length = part.len().min(buffer.len());
        buffer[..length].copy_from_slice(&part[..length]);
        *part = &part[length..];
        Ok(length)
    }
}

/// Text, two tool calls in pieces, usage, a comment, an event without data, and an event of two lines.
const STREAM: &str = concat!(
    ": hello\r\n\r\n",
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n",
    "event: x\nid: 1\n\n",
    "data:{\"choices\":[{\"delta\":{\"content\":\"Gr\\u00fcü\"}}]}\n\n",
    "data: {\"choices\":[{\"delta\":\ndata: {\"content\":\" dich\",\"refusal\":null}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"function\":{\"name\":\"exec\",\"arguments\":\"\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"argv\\\"\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\":[]}\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"b\",\"function\":{\"name\":\"exec\",\"arguments\":\"{}\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"tool_calls\"}],\"usage\":null}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9}}\n\n",
    "data: [DONE]\n\n",
);

fn chunked_response(body: &[u8], size: usize) -> Vec<u8> {
    let mut framed =
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            .to_vec();
    for chunk in body.chunks(size) {
        framed.extend(format!("{:x};x=y\r\n", chunk.len()).bytes());
        framed.extend_from_slice(chunk);
        framed.extend_from_slice(b"\r\n");
    }
    framed.extend_from_slice(b"0\r\nx-trailer: 1\r\n\r\n");
    framed
}

fn sized_response(body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn read_answer(source: impl Read) -> (ModelCompletion, String) {
    // The smallest buffer exposes a reader that loses its position.
    let response = http::read_response(BufReader::with_capacity(3, source)).unwrap();
    let mut messages = String::new();
    let mut listener = |event: &ProgressEvent<'_>| {
        if let ProgressEvent::TextDelta { text } = event {
            messages.push_str(text);
        }
    };
    let round =
        completion::read_completion(BufReader::with_capacity(2, response.body), &mut listener)
            .unwrap();
    (round, messages)
}

#[test]
fn an_answer_is_the_same_wherever_it_is_cut() {
    let whole = read_answer(&*sized_response(STREAM.as_bytes()));
    insta::assert_debug_snapshot!(whole.0);
    assert_eq!(whole.1, whole.0.text);
    for bytes in [
        sized_response(STREAM.as_bytes()),
        chunked_response(STREAM.as_bytes(), 1),
        chunked_response(STREAM.as_bytes(), 50),
    ] {
        for at in 0..=bytes.len() {
            assert_eq!(read_answer(CutBytes::at(&bytes, at)), whole, "cut at {at}");
        }
        assert_eq!(read_answer(CutBytes::singly(&bytes)), whole);
    }
}

/// A body that ends too early is an error, and a body without a length ends with the connection.
#[test]
fn the_end_of_a_body_is_where_its_framing_says() {
    let read_all = |bytes: &[u8]| {
        let mut body = String::new();
        let response = http::read_response(bytes);
        response.and_then(|mut answer| answer.body.read_to_string(&mut body)).map(|_| body)
    };
    for whole in [sized_response(b"0123456789"), chunked_response(b"0123456789", 4)] {
        assert_eq!(read_all(&whole).unwrap(), "0123456789");
        assert_eq!(read_all(&[&whole[..], b"more"].concat()).unwrap(), "0123456789");
        for at in 0..whole.len() {
            assert!(read_all(&whole[..at]).is_err(), "{at}");
        }
    }
    assert_eq!(read_all(b"HTTP/1.0 200 OK\n\nuntil the end").unwrap(), "until the end");
    assert_eq!(read_all(b"HTTP/1.1 204 No Content\r\n\r\nno body").unwrap(), "");
    let messages = [
        &b"SSH-2.0-x\r\n"[..],
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
        &[&b"HTTP/1.1 200 OK\r\nx: "[..], &vec![b'x'; 1 << 17]].concat(),
    ]
    .map(|bytes| read_all(bytes).unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"), @r"
    the answer is not HTTP/1.1
    the answer is not HTTP/1.1
    a header has no colon
    the answer's `content-length` is not a number
    the answer has a transfer coding that is not `chunked`
    a chunk's size is not a number
    a chunk is longer than its size
    a line of the answer's framing is too long
    ");
}

#[test]
fn only_places_in_the_sandbox_are_read_as_places() {
    for (url, address, prefix) in [
        ("http://localhost:8080/v1", "127.0.0.1:8080", "/v1"),
        ("http://localhost", "127.0.0.1:80", ""),
        ("http://127.0.0.1:1/a/b/", "127.0.0.1:1", "/a/b"),
        ("http://[::1]:8080/", "[::1]:8080", ""),
    ] {
        let expected = LlmEndpoint { address: address.parse().unwrap(), prefix: prefix.to_owned() };
        assert_eq!(LlmEndpoint::parse(url), Ok(expected));
    }
    for url in [
        "",
        "localhost",
        "https://localhost",
        "http://",
        "http://localhost:99999",
        "http://litellm:4000/v1",
    ] {
        assert!(LlmEndpoint::parse(url).is_err(), "{url}");
    }
}

proptest! {
    /// Any data is read unchanged, wherever it is split.
    #[test]
    fn events_come_out_as_they_went_in(
        data in prop::collection::vec("[a-zü:]{0,6}(\n[a-zü :]{0,6}){0,2}", 0..5),
        end in prop::sample::select(vec!["\n", "\r\n"]),
        size in 1_usize..9,
    ) {
        let lines = |data: &String| {
            let lines = data.split('\n').map(|line| format!("data: {line}{end}"));
            format!("{}{end}", lines.collect::<String>())
        };
        let text: String = data.iter().map(lines).collect();
        let parts = text.as_bytes().chunks(size).collect();
        let mut events = SseReader::new(BufReader::with_capacity(4, CutBytes { parts }));
        let mut read = vec![];
        while let Some(event) = events.next_data().unwrap() {
            read.push(event);
        }
        prop_assert_eq!(read, data);
    }
}
