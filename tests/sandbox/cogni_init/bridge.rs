//! Tests of the bridge: it copies the bytes unchanged in both directions, as they arrive.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::InitFixture;
use crate::support::process::{ChildProcess, wait_until};

/// A bridge between the test as the agent and the test as the gateway.
struct TestBridge {
    sandbox: InitFixture,
    process: ChildProcess,
}

impl TestBridge {
    fn start() -> Self {
        let sandbox = InitFixture::new();
        let process = ChildProcess::start(&mut sandbox.command(&[], &["sleep", "1000"]), "");
        let bridge = Self { sandbox, process };
        // The connection that `cogni-init` made to check the socket.
        bridge.accept();
        wait_until(
            || TcpStream::connect(bridge.sandbox.address).is_ok(),
            || bridge.process.output(),
        );
        bridge.accept();
        bridge
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.sandbox.address).unwrap()
    }

    fn gateway(&self) -> &UnixListener {
        self.sandbox.gateway.as_ref().unwrap()
    }

    fn accept(&self) -> UnixStream {
        self.gateway().accept().unwrap().0
    }

    fn pair(&self) -> (TcpStream, UnixStream) {
        let client = self.connect();
        (client, self.accept())
    }

    /// Asserts that the bridge uses no processor time. On a busy machine it may still be copying earlier bytes.
    fn rests(&self) {
        let rests = || {
            let before = self.processor_time();
            thread::sleep(Duration::from_millis(300));
            self.processor_time() - before < 30_000_000
        };
        wait_until(rests, || format!("{} ns", self.processor_time()));
    }

    /// Returns the processor time of the process in nanoseconds.
    fn processor_time(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.process.id())).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    }

    /// Returns the process's private memory, without the pages of its program.
    fn resident_kib(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

/// R4: The bytes are unchanged, however they are split, in both directions at once.
#[test]
fn bytes_arrive_as_they_were_sent() {
    let bridge = TestBridge::start();
    let pieces = || prop::collection::vec((0u8.., 1usize..150_000), 0..8);
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let done = runner.run(&(pieces(), pieces()), |(up, down)| {
        let (client, gateway) = bridge.pair();
        let reverse = (client.try_clone().unwrap(), gateway.try_clone().unwrap());
        let upward =
            exchange_pieces(&up, client, gateway, |sink| sink.shutdown(Shutdown::Write).unwrap());
        let downward = exchange_pieces(&down, reverse.1, reverse.0, |sink| {
            sink.shutdown(Shutdown::Write).unwrap();
        });
        upward.join().unwrap();
        downward.join().unwrap();
        Ok(())
    });
    done.unwrap();
}

/// Writes the pieces to one end and reads them from the other; fails if they differ.
fn exchange_pieces<W: Write + Send + 'static>(
    pieces: &[(u8, usize)],
    mut to: W,
    mut from: impl Read + Send + 'static,
    end: impl FnOnce(&W) + Send + 'static,
) -> thread::JoinHandle<()> {
    let pieces: Vec<Vec<u8>> = pieces
        .iter()
        .map(|(seed, length)| {
            (0..*length).map(|i| seed.wrapping_add(u8::try_from(i % 251).unwrap())).collect()
        })
        .collect();
    let expected = pieces.concat();
    let writer = thread::spawn(move || {
        for piece in pieces {
            to.write_all(&piece).unwrap();
        }
        end(&to);
    });
    thread::spawn(move || {
        let mut seen = vec![];
        from.read_to_end(&mut seen).unwrap();
        writer.join().unwrap();
        assert!(seen == expected, "{} bytes for {}", seen.len(), expected.len());
    })
}

/// R4: A half-closed connection works: the end of one direction leaves the other open.
#[test]
fn one_direction_may_end_before_the_other() {
    let bridge = TestBridge::start();
    let (mut client, mut gateway) = bridge.pair();
    client.write_all(b"request").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_rest(&mut gateway), b"request");
    gateway.write_all(b"answer").unwrap();
    drop(gateway);
    assert_eq!(read_rest(&mut client), b"answer");

    let (mut client, mut gateway) = bridge.pair();
    gateway.write_all(b"answer").unwrap();
    gateway.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_rest(&mut client), b"answer");
    client.write_all(b"request").unwrap();
    drop(client);
    assert_eq!(read_rest(&mut gateway), b"request");
}

/// R4: A stream flows without delay: no event waits for the next one.
#[test]
fn a_stream_flows_event_by_event() {
    let bridge = TestBridge::start();
    let (mut client, mut gateway) = bridge.pair();
    for number in 0..1000 {
        let event = format!("data: {number}\n\n");
        gateway.write_all(event.as_bytes()).unwrap();
        let mut seen = vec![0; event.len()];
        client.read_exact(&mut seen).unwrap();
        assert_eq!(seen, event.as_bytes());
    }
}

#[test]
fn many_connections_are_served_at_one_time() {
    let bridge = TestBridge::start();
    let mut pairs: Vec<_> = (0..200).map(|_| bridge.pair()).collect();
    // The bytes of all connections are in transit before the first is read.
    for (number, (client, _)) in pairs.iter_mut().enumerate() {
        client.write_all(format!("{number:04}").as_bytes()).unwrap();
    }
    for (number, (client, gateway)) in pairs.iter_mut().enumerate().rev() {
        let mut seen = [0; 4];
        gateway.read_exact(&mut seen).unwrap();
        assert_eq!(seen, format!("{number:04}").as_bytes());
        gateway.write_all(b"done").unwrap();
        client.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"done");
    }
}

#[test]
fn a_connection_over_the_limit_waits_for_a_place() {
    let bridge = TestBridge::start();
    let mut pairs: Vec<_> = (0..256).map(|_| bridge.pair()).collect();
    let mut late = bridge.connect();
    late.write_all(b"late").unwrap();
    bridge.rests();
    // After this round trip, the bridge has noticed that a client waits.
    let (client, gateway) = &mut pairs[0];
    gateway.write_all(b"event").unwrap();
    client.read_exact(&mut [0; 5]).unwrap();
    bridge.gateway().set_nonblocking(true).unwrap();
    assert_eq!(bridge.gateway().accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    bridge.gateway().set_nonblocking(false).unwrap();
    drop(pairs.swap_remove(100));
    let mut seen = [0; 4];
    bridge.accept().read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"late");
}

/// R4: Memory per connection is bounded, and the gateway sees backpressure.
#[test]
fn a_slow_reader_costs_bounded_memory() {
    let bridge = TestBridge::start();
    let before = bridge.resident_kib();
    let (client, mut gateway) = bridge.pair();
    gateway.set_write_timeout(STALLED).unwrap();
    let written = fill_buffer(&mut gateway);
    assert!(bridge.resident_kib() < before + 1024, "{} KiB, was {before}", bridge.resident_kib());
    drop(gateway);
    let mut seen = 0;
    for chunk in ByChunk(client) {
        seen += chunk;
    }
    assert_eq!(seen, written);
}

/// R4: The bridge never loops busily, also if one side is gone and the other does not read.
#[test]
fn a_connection_in_which_nothing_moves_takes_no_processor() {
    let bridge = TestBridge::start();
    let (_slow, mut gateway) = bridge.pair();
    gateway.set_write_timeout(STALLED).unwrap();
    fill_buffer(&mut gateway);
    drop(gateway);
    let (mut full, _silent) = bridge.pair();
    full.set_write_timeout(STALLED).unwrap();
    fill_buffer(&mut full);
    let (half, _other) = bridge.pair();
    half.shutdown(Shutdown::Write).unwrap();
    // Both sides have closed one direction, and neither has closed the connection.
    let (ended, also) = bridge.pair();
    ended.shutdown(Shutdown::Write).unwrap();
    also.shutdown(Shutdown::Write).unwrap();
    // The gateway is gone, and the client keeps the connection without sending.
    let (mut silent, gone) = bridge.pair();
    silent.write_all(b"request").unwrap();
    gone.set_nonblocking(false).unwrap();
    drop(gone);
    bridge.rests();
}

/// R4: The kernel counts epoll watches per user, and the agent has the same user, so the bridge needs none.
#[test]
fn the_bridge_needs_no_watch_of_epoll() {
    let bridge = TestBridge::start();
    let (mut client, mut gateway) = bridge.pair();
    client.write_all(b"up").unwrap();
    gateway.read_exact(&mut [0; 2]).unwrap();
    let open = fs::read_dir(format!("/proc/{}/fd", bridge.process.id())).unwrap();
    let open: Vec<_> = open.map(|entry| fs::read_link(entry.unwrap().path()).unwrap()).collect();
    assert!(open.iter().all(|path| path.to_str() != Some("anon_inode:[eventpoll]")), "{open:?}");
}

/// The gateway notices a client that disconnects, so it can stop paying for the answer.
#[test]
fn a_client_that_leaves_is_seen_by_the_gateway() {
    let bridge = TestBridge::start();
    let (client, mut gateway) = bridge.pair();
    drop(client);
    assert_eq!(read_rest(&mut gateway), b"");

    // The client half-closes first and then resets: unread data turns its close into a reset.
    let (client, mut gateway) = bridge.pair();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_rest(&mut gateway), b"");
    gateway.write_all(b"event").unwrap();
    client.peek(&mut [0; 5]).unwrap();
    drop(client);
    let gone = || gateway.write_all(b"event").is_err();
    wait_until(gone, || "the gateway goes on writing after its client has left".to_owned());
}

/// The gateway may refuse a body before it has read it.
#[test]
fn an_answer_that_comes_before_the_request_has_ended_is_delivered() {
    let bridge = TestBridge::start();
    let (mut client, mut gateway) = bridge.pair();
    client.set_write_timeout(STALLED).unwrap();
    fill_buffer(&mut client);
    gateway.write_all(b"too large").unwrap();
    gateway.shutdown(Shutdown::Both).unwrap();
    let mut seen = [0; 9];
    client.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"too large");
}

/// The bridge closes connections and prints one error if the gateway's socket is dead; they work again when the
/// gateway is back.
#[test]
fn a_gateway_that_is_gone_closes_connections_until_it_is_back() {
    let mut bridge = TestBridge::start();
    let (mut open, gateway) = bridge.pair();
    drop((gateway, bridge.sandbox.gateway.take()));
    assert_eq!(read_rest(&mut open), b"");
    for _ in 0..3 {
        let closed = bridge.connect().read(&mut [0]);
        assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    }
    assert_eq!(bridge.process.output().lines().count(), 1, "{}", bridge.process.output());
    let socket = bridge.sandbox.socket();
    fs::remove_file(&socket).unwrap();
    bridge.sandbox.gateway = Some(UnixListener::bind(socket).unwrap());
    let (mut client, mut gateway) = bridge.pair();
    gateway.write_all(b"back").unwrap();
    client.read_exact(&mut [0; 4]).unwrap();
}

/// Writes until the other side takes no more, and returns the number of bytes.
fn fill_buffer(sink: &mut impl Write) -> usize {
    let chunk = vec![7; 1 << 16];
    let mut written = 0;
    while let Ok(length) = sink.write(&chunk) {
        written += length;
        assert!(written < 64 << 20, "nothing holds the sender back");
    }
    written
}

fn read_rest(source: &mut impl Read) -> Vec<u8> {
    let mut seen = vec![];
    source.read_to_end(&mut seen).unwrap();
    seen
}

/// Records the length of each read until the end.
struct ByChunk(TcpStream);

impl Iterator for ByChunk {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let length = self.0.read(&mut vec![0; 1 << 16]).unwrap();
        (length > 0).then_some(length)
    }
}

/// A write that cannot make progress for this long counts as stalled.
const STALLED: Option<Duration> = Some(Duration::from_millis(500));
