//! Tests of the allocations of a call with all features on. The counts are deterministic, so they are compared with
//! fixed figures.
//!
//! Client and provider are plain threads, so that the runtime's own thread only runs the gateway.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use allocation_counter::AllocationInfo;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::server::LaneMode;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::llm::budget::{Nanodollars, Tokens};
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::tools::definition::CURRENT_TIME_TOOL;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::support::app::run_config;
use crate::support::threads::{ThreadClient, start_provider};

/// The counts with the lane and with hyper. A commit that changes a count also changes the figure here.
const FIGURES: [AllocationFigures; 2] = [
    AllocationFigures {
        lane: LaneMode::On,
        per_call: 10,
        per_tool_call: 72,
        per_frame: 1,
        bytes_per_stream: 5_997,
    },
    AllocationFigures {
        lane: LaneMode::Off,
        per_call: 24,
        per_tool_call: 72,
        per_frame: 1,
        bytes_per_stream: 27_349,
    },
];

struct AllocationFigures {
    lane: LaneMode,
    /// Allocations of a unary call, including reallocations.
    per_call: u64,
    /// Allocations of a call of a built-in tool without arguments, the same way.
    per_tool_call: u64,
    /// Allocations per frame of a chat stream with an output limit.
    per_frame: u64,
    /// Bytes that an open stream holds, including its connections.
    bytes_per_stream: u64,
}

/// G14: A call allocates no more than its figure, plus 5 %.
#[test]
fn a_unary_call_allocates_no_more_than_its_figure() {
    check_figures("allocations a call", |figures| {
        let calls =
            count_allocations(figures.lane, |client| (0..CALLS).for_each(|_| client.call(0)));
        (calls.count_total / u64::from(CALLS), figures.per_call)
    });
}

/// G14, T5: A call of a tool allocates no more than its figure, plus 5 %.
#[test]
fn a_tool_call_allocates_no_more_than_its_figure() {
    check_figures("allocations a tool call", |figures| {
        let calls = count_allocations(figures.lane, |client| {
            (0..CALLS).for_each(|_| client.call_tool(CURRENT_TIME_TOOL));
        });
        (calls.count_total / u64::from(CALLS), figures.per_tool_call)
    });
}

/// G14: A frame of a stream allocates no more than its figure.
#[test]
fn a_frame_of_a_stream_allocates_no_more_than_its_figure() {
    check_figures("allocations a frame", |figures| {
        let [few, many] = [10, 1010].map(|frames| {
            count_allocations(figures.lane, move |client| client.call(frames)).count_total
        });
        (many.saturating_sub(few) / 1000, figures.per_frame)
    });
}

/// G14: An open stream holds no more memory than its figure, plus 5 %.
#[test]
fn an_open_stream_holds_no_more_than_its_figure() {
    check_figures("bytes a stream", |figures| {
        let open = Mutex::new(vec![]);
        let held = count_allocations(figures.lane, move |client| {
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

/// Compares the count of each server with its figure.
fn check_figures(label: &str, count: impl Fn(&AllocationFigures) -> (u64, u64)) {
    let mut grown = vec![];
    for figures in FIGURES {
        let (counted, figure) = count(&figures);
        if counted * 100 > figure * 105 {
            grown.push(format!("{:?}: {counted} {label}, {figure} before", figures.lane));
        }
    }
    assert!(grown.is_empty(), "{grown:?}");
}

/// Counts what the process allocates for a client's `work` when the work is done for the second time, so that buffers
/// have grown before.
fn count_allocations(
    lane: LaneMode,
    work: impl Fn(&mut ThreadClient) + Send + 'static,
) -> AllocationInfo {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let (provider, read) = start_provider();
    let app = {
        let _context = runtime.enter();
        GatewayProcess::build_process(limited_config(directory.path(), provider, lane)).unwrap()
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
    // The client disconnects and drops everything that it holds open.
    drop(rounds);
    stop.cancel();
    runtime.block_on(served).unwrap().unwrap();
    counted
}

/// Configures a run with every kind of budget.
fn limited_config(directory: &Path, upstream: SocketAddr, lane: LaneMode) -> GatewayConfig {
    let mut config = run_config(directory, upstream);
    config.server.lane = lane;
    config.budget.max_turns = Some(u64::MAX);
    config.budget.max_total_tokens = Some(Tokens(u64::MAX / 2));
    config.budget.max_cost_usd = Some(Nanodollars(u64::MAX / 2));
    let granted = format!("granted = ['{CURRENT_TIME_TOOL}']");
    config.tools = ToolSettings {
        table: Some(granted.parse().unwrap()),
        opener: Some(Arc::new(RunToolOpener::default())),
        ..ToolSettings::default()
    };
    config
}

const CALLS: u32 = 100;

/// The number of streams that are open at the same time.
const STREAMS: u64 = 32;
