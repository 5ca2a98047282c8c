//! What a call costs in allocations, with everything on: deterministic, so it is held to figures.
//!
//! Client and provider are plain threads, so that the runtime's own thread does nothing but serve.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, mpsc};
use std::thread;

use allocation_counter::AllocationInfo;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::server::LaneMode;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::llm::budget::{Nanodollars, Tokens};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::support::app::configuration;
use crate::support::threads::{ThreadClient, start_provider};

/// What was counted in the lane, and by hyper. A figure that is no longer true is changed here, in the commit that changes it.
const FIGURES: [AllocationFigures; 2] = [
    AllocationFigures { lane: LaneMode::On, per_call: 17, per_frame: 1, bytes_per_stream: 5_439 },
    AllocationFigures { lane: LaneMode::Off, per_call: 24, per_frame: 1, bytes_per_stream: 26_751 },
];

struct AllocationFigures {
    lane: LaneMode,
    /// Allocations of a unary call; what grows counts again.
    per_call: u64,
    /// Allocations of a frame of a chat stream whose output is limited.
    per_frame: u64,
    /// Bytes that an open stream holds, its connections included.
    bytes_per_stream: u64,
}

/// G14: a call allocates no more than it did, within 5 %.
#[test]
fn a_unary_call_allocates_no_more_than_it_did() {
    check("allocations a call", |figures| {
        let calls = counted(figures.lane, |client| (0..CALLS).for_each(|_| client.call(0)));
        (calls.count_total / u64::from(CALLS), figures.per_call)
    });
}

/// G14: so does a frame of a stream.
#[test]
fn a_frame_of_a_stream_allocates_no_more_than_it_did() {
    check("allocations a frame", |figures| {
        let [few, many] = [10, 1010]
            .map(|frames| counted(figures.lane, move |client| client.call(frames)).count_total);
        (many.saturating_sub(few) / 1000, figures.per_frame)
    });
}

/// G14: an open stream holds no more memory than it did, within 5 %.
#[test]
fn an_open_stream_holds_no_more_than_it_did() {
    check("bytes a stream", |figures| {
        let open = Mutex::new(vec![]);
        let held = counted(figures.lane, move |client| {
            for _ in 0..STREAMS {
                let mut stream = client.another();
                stream.open_stream();
                open.lock().unwrap().push(stream);
            }
        });
        let each = u64::try_from(held.bytes_current).unwrap() / STREAMS;
        (each, figures.bytes_per_stream)
    });
}

/// Compares what is counted in each way with its figure.
fn check(what: &str, count: impl Fn(&AllocationFigures) -> (u64, u64)) {
    let mut grown = vec![];
    for figures in FIGURES {
        let (counted, figure) = count(&figures);
        if counted * 100 > figure * 105 {
            grown.push(format!("{:?}: {counted} {what}, {figure} before", figures.lane));
        }
    }
    assert!(grown.is_empty(), "{grown:?}");
}

/// What a process allocates that serves a client doing its `work`, when it does that for the second time: by then
/// what grows in steps has grown.
fn counted(lane: LaneMode, work: impl Fn(&mut ThreadClient) + Send + 'static) -> AllocationInfo {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let (provider, read) = start_provider();
    let app = {
        let _context = runtime.enter();
        GatewayProcess::build_process(limited(directory.path(), provider, lane)).unwrap()
    };
    let socket = app.socket_path().unwrap().to_path_buf();
    let (rounds, asked) = mpsc::channel::<oneshot::Sender<()>>();
    thread::spawn(move || {
        let mut client = ThreadClient::connect(&socket, read);
        while let Ok(done) = asked.recv() {
            work(&mut client);
            done.send(()).unwrap();
        }
    });
    let stop = CancellationToken::new();
    let served = runtime.spawn(app.serve_until_cancelled(stop.clone()));
    let round = || {
        let (done, is_done) = oneshot::channel();
        rounds.send(done).unwrap();
        runtime.block_on(is_done).unwrap();
    };
    round();
    let counted = allocation_counter::measure(round);
    // The client leaves, with all that it holds open.
    drop(rounds);
    stop.cancel();
    runtime.block_on(served).unwrap().unwrap();
    counted
}

/// A run that every kind of budget limits.
fn limited(directory: &Path, upstream: SocketAddr, lane: LaneMode) -> GatewayConfig {
    let mut config = configuration(directory, upstream);
    config.server.lane = lane;
    config.budget.max_turns = Some(u64::MAX);
    config.budget.max_total_tokens = Some(Tokens(u64::MAX / 2));
    config.budget.max_cost_usd = Some(Nanodollars(u64::MAX / 2));
    config
}

const CALLS: u32 = 100;

/// Streams that are open at the same time.
const STREAMS: u64 = 32;
