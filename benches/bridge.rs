//! Compares the bridge of a sandbox with socat and with a direct connection, in one session: the latency that it adds
//! to an event of a stream, and its throughput.
//!
//! `-- --test` only shows that the benchmark runs. One byte comes back for each event before the next event is sent, so
//! that nothing queues; the figure is the time of the event's way.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench is not production code"
)]

use std::env;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

fn main() {
    let once = env::args().any(|argument| argument == "--test");
    let (events, mebibytes) = if once { (10, 1) } else { (20_000, 2048) };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("llm.sock");
    let socket = path.to_str().unwrap();
    let listener = UnixListener::bind(socket).unwrap();

    println!("bridge   lag p50   lag p99   down MiB/s   up MiB/s");
    print_row("none", events, mebibytes, || {
        let client = UnixStream::connect(&path).unwrap();
        (client, listener.accept().unwrap().0)
    });
    let listen = "TCP-LISTEN:8071,bind=127.7.7.7,fork,reuseaddr,nodelay";
    let mut socat = Command::new("socat");
    socat.args([listen, &format!("UNIX-CONNECT:{socket}")]);
    let mut ours = Command::new(concat!(env!("OUT_DIR"), "/cogni-init"));
    ours.args(["--listen", "127.7.7.7:8072", "--socket", socket, "sleep", "100000"]);
    for (name, port, command) in [("socat", 8071, &mut socat), ("init", 8072, &mut ours)] {
        let bridge = BridgeProcess::start(command, &listener, port);
        print_row(name, events, mebibytes, || bridge.pair(&listener));
    }
}

/// Measures connections that `pair` makes: the agent's end and the gateway's end.
fn print_row<C: Read + Write + Send + 'static>(
    name: &str,
    events: usize,
    mebibytes: u32,
    pair: impl Fn() -> (C, UnixStream),
) {
    let (client, gateway) = pair();
    let (half, most) = measure_lag(client, gateway, events);
    let (client, gateway) = pair();
    let down = measure_rate(gateway, client, mebibytes);
    let (client, gateway) = pair();
    let up = measure_rate(client, gateway, mebibytes);
    println!("{name:6} {half:>9.1?} {most:>9.1?} {down:>12.0} {up:>10.0}");
}

struct BridgeProcess {
    process: Child,
    port: u16,
}

impl BridgeProcess {
    fn start(command: &mut Command, listener: &UnixListener, port: u16) -> Self {
        let process = command.spawn().expect("socat is installed; `tests/run bench` does it");
        while TcpStream::connect(("127.7.7.7", port)).is_err() {
            thread::sleep(Duration::from_millis(10));
        }
        // `cogni-init` has checked the socket; each bridge has forwarded the connection that was just made.
        let asked = usize::from(port == 8072);
        for _ in 0..=asked {
            listener.accept().unwrap();
        }
        Self { process, port }
    }

    fn pair(&self, listener: &UnixListener) -> (TcpStream, UnixStream) {
        let client = TcpStream::connect(("127.7.7.7", self.port)).unwrap();
        client.set_nodelay(true).unwrap();
        (client, listener.accept().unwrap().0)
    }
}

impl Drop for BridgeProcess {
    fn drop(&mut self) {
        // Both bridges are killed with everything that they have started: `cogni-init` ends its children, and socat's
        // children end with their connections.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the median and the 99th percentile of the events' latencies.
fn measure_lag(
    mut client: impl Read + Write + Send + 'static,
    mut gateway: UnixStream,
    events: usize,
) -> (Duration, Duration) {
    let reader = thread::spawn(move || {
        let mut event = [0; EVENT];
        let mut arrived = vec![];
        while client.read_exact(&mut event).is_ok() {
            arrived.push(Instant::now());
            client.write_all(b".").unwrap();
        }
        arrived
    });
    let mut sent = vec![];
    for _ in 0..events {
        sent.push(Instant::now());
        gateway.write_all(&[b'x'; EVENT]).unwrap();
        gateway.read_exact(&mut [0]).unwrap();
    }
    drop(gateway);
    let arrived = reader.join().unwrap();
    let mut lags: Vec<_> = arrived.iter().zip(sent).map(|(at, sent)| *at - sent).collect();
    lags.sort_unstable();
    (lags[lags.len() / 2], lags[lags.len() * 99 / 100])
}

/// Returns the throughput in MiB per second.
fn measure_rate(mut from: impl Write + Send + 'static, mut to: impl Read, mebibytes: u32) -> f64 {
    let begun = Instant::now();
    let writer = thread::spawn(move || {
        let chunk = vec![7; 1 << 18];
        for _ in 0..mebibytes * 4 {
            from.write_all(&chunk).unwrap();
        }
    });
    let mut buffer = vec![0; 1 << 18];
    while to.read(&mut buffer).unwrap() > 0 {}
    writer.join().unwrap();
    f64::from(mebibytes) / begun.elapsed().as_secs_f64()
}

/// The size of a typical event of a chat stream.
const EVENT: usize = 240;
