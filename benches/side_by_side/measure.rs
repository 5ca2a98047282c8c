//! The measurements, one function each: one subject, one round, some values.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::clock;
use crate::closed::{self, ClosedLoad};
use crate::script::ProviderCall;
use crate::stream::{self, StreamCourse};
use crate::subject::{BenchSubject, ProviderProcess, ProxySettings, RunningSubject};
use crate::syscalls;
use crate::table::RoundValue;

/// The duration and the repetitions.
#[derive(Clone, Copy)]
pub(crate) struct MeasureScale {
    pub(crate) rounds: usize,
    pub(crate) starts: usize,
    pub(crate) warm_up: Duration,
    pub(crate) window: Duration,
    /// The concurrent streams of the paced measurements, and the time between their chunks.
    pub(crate) paces: &'static [(usize, Duration)],
    /// The number of streams that are open while memory is read.
    pub(crate) open: usize,
    /// The number of chunks of each unpaced stream.
    pub(crate) burst: u32,
}

impl MeasureScale {
    pub(crate) const FULL: Self = Self {
        rounds: 5,
        starts: 20,
        warm_up: Duration::from_millis(200),
        window: Duration::from_millis(1200),
        // The last pace is more than one processor can carry through nginx: it shows the queue.
        paces: &[
            (1, Duration::from_millis(20)),
            (100, Duration::from_millis(20)),
            (1000, Duration::from_millis(100)),
            (1000, Duration::from_millis(20)),
        ],
        open: 1000,
        burst: 40_000,
    };
    /// Measures everything briefly.
    pub(crate) const QUICK: Self = Self {
        rounds: 1,
        starts: 2,
        warm_up: Duration::from_millis(10),
        window: Duration::from_millis(50),
        paces: &[(1, Duration::from_millis(5)), (50, Duration::from_millis(5))],
        open: 50,
        burst: 2000,
    };
}

/// Measures a short request with 1 client: what the proxy adds to the time of an answer.
pub(crate) fn unary_alone(
    scale: MeasureScale,
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    let name = "unary 2 KB, 1 client";
    let seen = measure_calls(client_load(scale, 1, 2048), running)?;
    let mut values = usual_percentiles(&format!("{name}: latency"), &seen.took);
    values.extend(seen.cpu_per_answer(name));
    Ok(values)
}

/// Measures a short request with 16 clients: the cost of an answer.
pub(crate) fn unary_crowd(
    scale: MeasureScale,
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    let name = "unary 2 KB, 16 clients";
    let seen = measure_calls(client_load(scale, 16, 2048), running)?;
    let mut values = vec![seen.answers_per_second(name)];
    values.extend(seen.cpu_per_answer(name));
    Ok(values)
}

/// Measures a long prompt with 4 clients.
pub(crate) fn long_prompt(
    scale: MeasureScale,
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    let name = "unary 1 MB prompt, 4 clients";
    let seen = measure_calls(client_load(scale, 4, 1 << 20), running)?;
    let mut values = vec![seen.answers_per_second(name)];
    values.extend(seen.cpu_per_answer(name));
    Ok(values)
}

/// Measures short streams one after the other, on one connection.
pub(crate) fn first_byte(scale: MeasureScale, running: &RunningSubject) -> Result<Vec<RoundValue>> {
    let call = ProviderCall::Stream { chunks: 1, interval: Duration::from_micros(1) };
    let seen = measure_calls(ClosedLoad { call, ..client_load(scale, 1, 2048) }, running)?;
    let p50 = percentile_micros(&mut seen.took.clone(), 0.5);
    let value = p50.map(|p50| RoundValue::lower("1 stream: time to first byte p50 µs", p50));
    Ok(value.into_iter().collect())
}

/// Measures streams at the pace of a model.
pub(crate) fn measure_paced(
    scale: MeasureScale,
    (streams, interval): (usize, Duration),
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    let plural = if streams == 1 { "" } else { "s" };
    let name = format!("{streams} stream{plural} {interval:?} apart");
    let course = paced_course(scale, streams, interval);
    let Some(seen) = measure_flow(course, running)? else { return Ok(vec![]) };
    let mut values = usual_percentiles(&format!("{name}: chunk lag"), &seen.lags);
    values.extend(seen.cpu_per_chunk(&name));
    // Too few chunks per second mean that the pace was not kept; the lag then measures the queue.
    let asked = streams as f64 / interval.as_secs_f64();
    let kept = 100.0 * seen.chunks_per_second() / asked;
    values.push(RoundValue::higher(format!("{name}: pace kept %"), kept));
    if streams > 1 {
        let p50 = percentile_micros(&mut seen.first_bytes.clone(), 0.5).context("no stream")?;
        values.push(RoundValue::lower(format!("{name}: time to first byte p50 µs"), p50));
    }
    Ok(values)
}

/// Measures eight streams at full speed.
pub(crate) fn measure_unpaced(
    scale: MeasureScale,
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    let name = "8 streams as fast as possible";
    let interval = Duration::ZERO;
    let course = StreamCourse { streams: 8, stagger: interval, chunks: scale.burst, interval };
    let Some(seen) = measure_flow(course, running)? else { return Ok(vec![]) };
    let mut values =
        vec![RoundValue::higher(format!("{name}: chunks/s"), seen.chunks_per_second())];
    values.extend(seen.cpu_per_chunk(name));
    Ok(values)
}

/// Measures the resident memory of a process that has served a few calls, and what each open stream adds.
pub(crate) fn measure_memory(
    scale: MeasureScale,
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    if running.tree().pids().is_empty() {
        return Ok(vec![]);
    }
    closed::run(&client_load(scale, 1, 2048), &running.socket, || Ok(()))?;
    let idle = running.tree().memory()?;
    let streams = scale.open;
    let mut busy = idle;
    let course = paced_course(scale, streams, Duration::from_millis(100));
    stream::run(course, std::slice::from_ref(&running.socket), || {
        busy = running.tree().memory()?;
        Ok(())
    })?;
    let per_stream = |busy: f64, idle: f64| (busy - idle) / streams as f64;
    Ok(vec![
        RoundValue::lower("memory: process RSS MiB", idle.resident / 1024.0),
        RoundValue::lower("memory: process PSS MiB", idle.proportional / 1024.0),
        RoundValue::lower(
            format!("memory: KiB per open stream (of {streams})"),
            per_stream(busy.proportional, idle.proportional),
        ),
    ])
}

/// Measures from the start of the process until `/health` answers.
pub(crate) fn measure_start(
    subject: BenchSubject,
    provider: &ProviderProcess,
    setup: ProxySettings,
) -> Result<Vec<RoundValue>> {
    let running = RunningSubject::start(subject, provider, setup)?;
    if running.tree().pids().is_empty() {
        return Ok(vec![]);
    }
    Ok(vec![RoundValue::lower("start to first /health, ms", running.start as f64 / 1e6)])
}

/// Measures the system calls per short request, per long request and per paced chunk.
pub(crate) fn system_calls(
    scale: MeasureScale,
    running: &RunningSubject,
) -> Result<Vec<RoundValue>> {
    let tree = running.tree();
    if tree.pids().is_empty() {
        return Ok(vec![]);
    }
    let mut values = vec![];
    for (name, bytes) in [("unary 2 KB", 2048), ("unary 1 MB", 1 << 20)] {
        let load = ClosedLoad { warm_up: Duration::ZERO, ..client_load(scale, 1, bytes) };
        let work = || closed::run(&load, &running.socket, || Ok(()));
        let (calls, answers) = syscalls::count_calls(tree, work)?;
        // The first answer arrives before the window.
        let per_answer = calls as f64 / (answers.len() + 1) as f64;
        values.push(RoundValue::lower(format!("system calls: {name}"), per_answer));
    }
    let chunks = |chunks| {
        let stagger = Duration::ZERO;
        let course =
            StreamCourse { streams: 1, stagger, chunks, interval: Duration::from_millis(4) };
        let sockets = std::slice::from_ref(&running.socket);
        syscalls::count_calls(tree, || stream::run(course, sockets, || Ok(())))
    };
    let (few, many) = (chunks(5)?.0, chunks(105)?.0);
    let per_chunk = many.saturating_sub(few) as f64 / 100.0;
    values.push(RoundValue::lower("system calls: paced chunk", per_chunk));
    Ok(values)
}

/// The results of one window.
struct WindowResults {
    /// Nanoseconds per answer or, for streams, until the first byte.
    took: Vec<u64>,
    /// Nanoseconds of the window, and of the subject's processors in it.
    window: u64,
    cpu: Option<u64>,
}

/// The results of one window of streams.
struct StreamResults {
    first_bytes: Vec<u64>,
    lags: Vec<u64>,
    window: u64,
    cpu: Option<u64>,
}

impl WindowResults {
    fn answers_per_second(&self, name: &str) -> RoundValue {
        let rate = self.took.len() as f64 / (self.window as f64 / 1e9);
        RoundValue::higher(format!("{name}: requests/s"), rate)
    }

    fn cpu_per_answer(&self, name: &str) -> Option<RoundValue> {
        let micros = self.cpu? as f64 / 1e3 / self.took.len() as f64;
        Some(RoundValue::lower(format!("{name}: CPU µs/request"), micros))
    }
}

impl StreamResults {
    fn chunks_per_second(&self) -> f64 {
        self.lags.len() as f64 / (self.window as f64 / 1e9)
    }

    fn cpu_per_chunk(&self, name: &str) -> Option<RoundValue> {
        let micros = self.cpu? as f64 / 1e3 / self.lags.len() as f64;
        Some(RoundValue::lower(format!("{name}: CPU µs/chunk"), micros))
    }
}

fn measure_calls(load: ClosedLoad, running: &RunningSubject) -> Result<WindowResults> {
    let mut edges = WindowEdges::default();
    let took = closed::run(&load, &running.socket, || edges.mark(running))?;
    let (window, cpu) = edges.between();
    Ok(WindowResults { took, window, cpu })
}

/// Returns `None` if the machine was so busy that the streams did not all flow at the same time.
fn measure_flow(course: StreamCourse, running: &RunningSubject) -> Result<Option<StreamResults>> {
    let mut edges = WindowEdges::default();
    let sockets = std::slice::from_ref(&running.socket);
    // Like the calls of the other measurements, the streams find connections to the provider that earlier calls have opened.
    // Without this warm-up, a subject would connect anew or not by the time since its last round.
    let warm_up = StreamCourse { stagger: Duration::ZERO, chunks: 2, ..course };
    stream::run(warm_up, sockets, || Ok(()))?;
    let seen = stream::run(course, sockets, || edges.mark(running))?;
    let (_, cpu) = edges.between();
    let stream::CourseResults { first_bytes, lags, window } = seen;
    Ok((!lags.is_empty()).then_some(StreamResults { first_bytes, lags, window, cpu }))
}

/// The readings when the window opened and when it closed.
#[derive(Default)]
struct WindowEdges(Vec<(u64, u64)>);

impl WindowEdges {
    fn mark(&mut self, running: &RunningSubject) -> Result<()> {
        self.0.push((clock::monotonic_nanos(), running.tree().cpu()?));
        Ok(())
    }

    /// Returns the length of the window, and the subject's processor time if there is a subject.
    fn between(&self) -> (u64, Option<u64>) {
        match self.0[..] {
            [(opened, before), (closed, after)] => {
                (closed - opened, Some(after - before).filter(|cpu| *cpu > 0))
            }
            _ => (0, None),
        }
    }
}

fn client_load(scale: MeasureScale, clients: usize, bytes: usize) -> ClosedLoad {
    let MeasureScale { warm_up, window, .. } = scale;
    ClosedLoad { call: ProviderCall::Unary, bytes, clients, warm_up, window }
}

/// Returns a course with enough chunks for all streams to flow for twice the window after the last one has begun.
fn paced_course(scale: MeasureScale, streams: usize, interval: Duration) -> StreamCourse {
    let ramp = STAGGER * u32::try_from(streams).unwrap_or(u32::MAX);
    let whole = ramp + scale.window * 2;
    let chunks = whole.as_micros() / interval.as_micros() + 2;
    let chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
    StreamCourse { streams, stagger: STAGGER, chunks, interval }
}

/// The usual three percentiles in microseconds, as far as there are enough samples.
pub(crate) fn usual_percentiles(name: &str, nanos: &[u64]) -> Vec<RoundValue> {
    let mut nanos = nanos.to_vec();
    let named = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];
    let values = named.into_iter().filter_map(|(label, q)| {
        Some(RoundValue::lower(format!("{name} {label} µs"), percentile_micros(&mut nanos, q)?))
    });
    values.collect()
}

/// Returns the quantile in microseconds if at least one sample lies beyond it.
fn percentile_micros(nanos: &mut [u64], q: f64) -> Option<f64> {
    let at = (nanos.len() as f64 * q) as usize;
    (at + 1 < nanos.len()).then(|| *nanos.select_nth_unstable(at).1 as f64 / 1e3)
}

/// Not a divisor of the interval, so that the streams' chunks spread over the whole interval.
const STAGGER: Duration = Duration::from_micros(1020);
