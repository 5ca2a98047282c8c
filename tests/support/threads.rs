//! A client and a provider on plain threads, so that the runtime of a measured gateway runs nothing else.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;

/// A connection that makes one call after the other.
pub(crate) struct ThreadClient {
    path: PathBuf,
    socket: BufReader<UnixStream>,
    /// Tells the provider that a frame has been read.
    read: Sender<()>,
}

impl ThreadClient {
    pub(crate) fn connect(socket: &Path, read: Sender<()>) -> Self {
        let path = socket.to_path_buf();
        Self { path, socket: BufReader::new(UnixStream::connect(socket).unwrap()), read }
    }

    /// Opens one more connection to the same gateway.
    pub(crate) fn another(&self) -> Self {
        Self::connect(&self.path, self.read.clone())
    }

    /// Makes a call with a prompt of 2 KB, whose answer is a stream with this many frames, or a unary one for zero.
    pub(crate) fn call(&mut self, frames: u32) {
        if let Some(length) = self.begin(frames) {
            self.socket.read_exact(&mut vec![0; length]).unwrap();
            return;
        }
        for _ in 0..frames {
            read_chunk(&mut self.socket);
            self.read.send(()).unwrap();
        }
        while read_chunk(&mut self.socket) > 0 {}
    }

    /// Calls a tool without arguments, and reads its whole answer.
    pub(crate) fn call_tool(&mut self, tool: &str) {
        let body = format!(r#"{{"tool":"{tool}","arguments":{{}}}}"#);
        let request = format!(
            "POST /tool/exec HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.socket.get_mut().write_all(request.as_bytes()).unwrap();
        let mut answer = vec![0; read_head(&mut self.socket).unwrap()];
        self.socket.read_exact(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.contains(r#""status":"completed""#), "{answer}");
    }

    /// Begins a call with a streamed answer, and reads its first frame.
    pub(crate) fn open_stream(&mut self) {
        self.begin(2);
        read_chunk(&mut self.socket);
    }

    /// Sends a request and reads the head of its answer; returns the length of the body, if the head has it.
    fn begin(&mut self, frames: u32) -> Option<usize> {
        let (is_stream, prompt) = (frames > 0, TEXT.repeat(2048 / TEXT.len()));
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
        read_head(&mut self.socket).filter(|length| *length > 0)
    }
}

/// Starts a provider that answers as the seed of a request says. It sends each frame of a stream when its sender was
/// told that the frame before has been read.
pub(crate) fn start_provider() -> (SocketAddr, Sender<()>) {
    let (read, was_read) = mpsc::channel();
    let was_read = Arc::new(Mutex::new(was_read));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, was_read) = (BufReader::new(socket.unwrap()), Arc::clone(&was_read));
            socket.get_ref().set_nodelay(true).unwrap();
            thread::spawn(move || {
                while let Some(length) = read_head(&mut socket) {
                    let mut body = vec![0; length];
                    socket.read_exact(&mut body).unwrap();
                    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                    answer_calls(socket.get_mut(), body["seed"].as_u64().unwrap(), &was_read);
                }
            });
        }
    });
    (address, read)
}

fn answer_calls(socket: &mut impl Write, frames: u64, was_read: &Mutex<Receiver<()>>) {
    if frames == 0 {
        let body = format!(
            r#"{{"id":"c","object":"chat.completion","created":1763769600,"model":"gpt-5-mini","choices":[{{"index":0,"message":{{"role":"assistant","content":"{}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":500,"completion_tokens":250,"total_tokens":750}}}}"#,
            TEXT.repeat(14)
        );
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        let answer = format!("{head}{}\r\n\r\n{body}", body.len());
        socket.write_all(answer.as_bytes()).unwrap();
        return;
    }
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).unwrap();
    for frame in 0..frames {
        let event = format!(
            "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1763769600,\"model\":\"gpt-5-mini\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word {frame}\"}},\"finish_reason\":null}}]}}\n\n"
        );
        socket.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).unwrap();
        let Ok(()) = was_read.lock().unwrap().recv() else { return };
    }
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":2000}}\n\ndata: [DONE]\n\n";
    let end = format!("{:x}\r\n{usage}\r\n0\r\n\r\n", usage.len());
    socket.write_all(end.as_bytes()).unwrap();
}

/// Reads a head up to its empty line, and returns the body's length from it, or 0. Returns `None` if the peer has
/// disconnected.
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
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
    }
}

/// Reads a chunk; returns its length.
fn read_chunk(socket: &mut impl BufRead) -> usize {
    let mut line = String::new();
    socket.read_line(&mut line).unwrap();
    let length = usize::from_str_radix(line.trim_end(), 16).unwrap();
    socket.read_exact(&mut vec![0; length + 2]).unwrap();
    length
}

/// 72 bytes with an escape, as a line of text has.
const TEXT: &str = r"The quick brown fox jumps over the lazy dog, again and again, and on.\n ";
