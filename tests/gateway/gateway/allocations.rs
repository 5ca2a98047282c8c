//! What a call costs in allocations, with everything on: deterministic, so it is held to figures.
//!
//! Client and provider are plain threads, so that the runtime's own thread does nothing but serve.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use cogni_gateway::app::App;
use cogni_gateway::budget::{Nanodollars, Tokens};
use cogni_gateway::config::Config;
use cogni_gateway::gateway::server::LaneMode;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::support::app::configuration;

/// Allocations of a unary call, and of a frame of a chat stream whose output is limited; what grows counts again. A
/// figure that is no longer true is changed here, in the commit that changes it.
const PER_CALL: u64 = 35;
const PER_FRAME: u64 = 1;

/// G14: a call allocates no more than it did, within 5 %.
#[test]
fn a_unary_call_allocates_no_more_than_it_did() {
    let each = counted(|client| (0..CALLS).for_each(|_| client.call(0))) / u64::from(CALLS);
    assert!(each * 100 <= PER_CALL * 105, "{each} allocations a call, {PER_CALL} before");
}

/// G14: so does a frame of a stream.
#[test]
fn a_frame_of_a_stream_allocates_no_more_than_it_did() {
    let [few, many] = [10, 1010].map(|frames| counted(move |client| client.call(frames)));
    let each = many.saturating_sub(few) / 1000;
    assert!(each * 100 <= PER_FRAME * 105, "{each} allocations a frame, {PER_FRAME} before");
}

/// Allocations of a process that serves a client doing its `work`, when it does that for the second time: by then
/// what grows in steps has grown.
fn counted(work: impl Fn(&mut Client) + Send + 'static) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let (read, was_read) = mpsc::channel();
    let app = {
        let _context = runtime.enter();
        App::build(limited(directory.path(), provider(was_read))).unwrap()
    };
    let socket = app.socket().unwrap().to_path_buf();
    let (rounds, asked) = mpsc::channel::<oneshot::Sender<()>>();
    thread::spawn(move || {
        let mut client =
            Client { socket: BufReader::new(UnixStream::connect(socket).unwrap()), read };
        while let Ok(done) = asked.recv() {
            work(&mut client);
            done.send(()).unwrap();
        }
    });
    let stop = CancellationToken::new();
    let served = runtime.spawn(app.serve(stop.clone()));
    let round = || {
        let (done, is_done) = oneshot::channel();
        rounds.send(done).unwrap();
        runtime.block_on(is_done).unwrap();
    };
    round();
    let counted = allocation_counter::measure(round).count_total;
    stop.cancel();
    runtime.block_on(served).unwrap().unwrap();
    counted
}

/// A run that every kind of budget limits.
fn limited(directory: &Path, upstream: SocketAddr) -> Config {
    let mut config = configuration(directory, upstream);
    // The figures are hyper's.
    config.server.lane = LaneMode::Off;
    config.budget.max_turns = Some(u64::MAX);
    config.budget.max_total_tokens = Some(Tokens(u64::MAX / 2));
    config.budget.max_cost_usd = Some(Nanodollars(u64::MAX / 2));
    config
}

struct Client {
    socket: BufReader<UnixStream>,
    /// Tells the provider that a frame has been read.
    read: Sender<()>,
}

impl Client {
    /// Makes a call whose answer is a stream of so many frames, or unary where there are none.
    fn call(&mut self, frames: u32) {
        let (is_stream, prompt) = (frames > 0, "a line of text\\n".repeat(130));
        let body = format!(
            r#"{{"model":"gpt-5-mini","seed":{frames},"stream":{is_stream},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
        );
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
            accept: application/json\r\nauthorization: Bearer placeholder\r\nuser-agent: OpenAI/Python 3.54.0\r\n\
            content-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.socket.get_mut().write_all(request.as_bytes()).unwrap();
        let length = read_head(&mut self.socket).unwrap();
        if length > 0 {
            self.socket.read_exact(&mut vec![0; length]).unwrap();
            return;
        }
        for _ in 0..frames {
            read_chunk(&mut self.socket);
            self.read.send(()).unwrap();
        }
        while read_chunk(&mut self.socket) > 0 {}
    }
}

/// Answers as the seed of a request says; each frame of a stream is sent when the one before has been read.
fn provider(was_read: Receiver<()>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let mut socket = BufReader::new(socket.unwrap());
            socket.get_ref().set_nodelay(true).unwrap();
            while let Some(length) = read_head(&mut socket) {
                let mut body = vec![0; length];
                socket.read_exact(&mut body).unwrap();
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                answer(socket.get_mut(), body["seed"].as_u64().unwrap(), &was_read);
            }
        }
    });
    address
}

fn answer(socket: &mut impl Write, frames: u64, was_read: &Receiver<()>) {
    if frames == 0 {
        let body = format!(
            r#"{{"id":"c","object":"chat.completion","created":1763769600,"model":"gpt-5-mini","choices":[{{"index":0,"message":{{"role":"assistant","content":"{}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":500,"completion_tokens":250,"total_tokens":750}}}}"#,
            "a line of text\\n".repeat(64)
        );
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        write!(socket, "{head}{}\r\n\r\n{body}", body.len()).unwrap();
        return;
    }
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).unwrap();
    for frame in 0..frames {
        let event = format!(
            "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1763769600,\"model\":\"gpt-5-mini\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word {frame}\"}},\"finish_reason\":null}}]}}\n\n"
        );
        write!(socket, "{:x}\r\n{event}\r\n", event.len()).unwrap();
        was_read.recv().unwrap();
    }
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":2000}}\n\ndata: [DONE]\n\n";
    write!(socket, "{:x}\r\n{usage}\r\n0\r\n\r\n", usage.len()).unwrap();
}

/// Reads a head up to its empty line, and returns the length that it gives to the body, 0 where it gives none. `None` where the peer
/// has left.
fn read_head(socket: &mut impl BufRead) -> Option<usize> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if socket.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            return Some(length);
        }
        if let Some(given) = line.strip_prefix("content-length: ") {
            length = given.parse().unwrap();
        }
    }
}

/// Reads a chunk; says how long it was.
fn read_chunk(socket: &mut impl BufRead) -> usize {
    let mut line = String::new();
    socket.read_line(&mut line).unwrap();
    let length = usize::from_str_radix(line.trim_end(), 16).unwrap();
    socket.read_exact(&mut vec![0; length + 2]).unwrap();
    length
}

const CALLS: u32 = 100;
