//! Measures a service under load: the runs that it accepts and ends per second, the delay of an agent's text to a
//! watcher, the cost of a thousand waiting runs, and the API's response time while two hundred runs are open.
//!
//! `cargo bench --bench service -- [--quick | --test] [--run-dir DIR]`. It needs root.
//!
//! How the measurement is kept fair:
//! - The program itself runs with its database on a disk, and a client on the same two processors connects over TCP.
//! - Runs are in sandboxes of the embedded driver, each with its own gateway, audit log and limits.
//! - An agent prints the machine's clock with its text, and the client reads the same clock.
#![expect(
    clippy::cast_precision_loss,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench is not production code"
)]

mod client;
mod served;

use std::env;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};

use served::ServedRuns;

struct ServiceScale {
    admissions: usize,
    words: usize,
    idle: usize,
    live: usize,
    requests: usize,
}

fn main() {
    let arguments: Vec<_> = env::args().collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let at = arguments.iter().position(|argument| argument == "--run-dir");
    let run_dir = at.and_then(|at| arguments.get(at + 1)).map_or("/dev/shm", String::as_str);
    let scale = match (has("--test"), has("--quick")) {
        (true, _) => ServiceScale { admissions: 4, words: 5, idle: 4, live: 2, requests: 20 },
        (_, true) => {
            ServiceScale { admissions: 64, words: 100, idle: 100, live: 50, requests: 1000 }
        }
        _ => ServiceScale { admissions: 256, words: 500, idle: 1000, live: 200, requests: 5000 },
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let served = ServedRuns::start(run_dir, scale.idle + scale.admissions);
        served.wait().await;
        measure_admissions(&served, &scale).await;
        measure_latency(&served, &scale).await;
        measure_idle(&served, &scale).await;
        measure_api(&served, &scale).await;
    });
}

/// Measures from the first request to the last answer, and to the end of the last run.
async fn measure_admissions(served: &ServedRuns, scale: &ServiceScale) {
    let begun = Instant::now();
    let asked = stream::iter(0..scale.admissions).map(|_| served.run("bench:true"));
    let runs: Vec<_> = asked.buffer_unordered(16).collect().await;
    let accepted = begun.elapsed();
    join_all(runs.iter().map(|run| served.ended(run))).await;
    let (count, ended) = (scale.admissions as f64, begun.elapsed());
    println!(
        "{} runs, 16 asked for at a time: {:.0} accepted/s, {:.1} from request to end/s",
        scale.admissions,
        count / accepted.as_secs_f64(),
        count / ended.as_secs_f64(),
    );
}

/// Measures from an agent's print to a client's read.
async fn measure_latency(served: &ServedRuns, scale: &ServiceScale) {
    let run = served.run_with("bench:talk", &scale.words.to_string()).await;
    let mut late = vec![];
    served
        .watch(&run, |event| {
            if let Some(stamp) = event["text"].as_str().and_then(|text| text.parse::<f64>().ok()) {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
                late.push(Duration::from_secs_f64((now - stamp).max(0.0)));
            }
        })
        .await;
    println!("a word, from the agent's print to the client: {}", format_percentiles(&mut late));
}

/// Measures runs that do nothing.
async fn measure_idle(served: &ServedRuns, scale: &ServiceScale) {
    let before = served.memory();
    let asked = stream::iter(0..scale.idle).map(|_| served.run("bench:wait"));
    let runs: Vec<_> = asked.buffer_unordered(16).collect().await;
    join_all(runs.iter().map(|run| served.begun(run))).await;
    let (after, cpu) = (served.memory(), served.processor_time());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let busy = served.processor_time().saturating_sub(cpu).as_secs_f64() / 2.0;
    println!(
        "{} runs that wait: {:.0} KiB of the service for each, {:.1} % of a processor for all",
        scale.idle,
        (after.saturating_sub(before)) as f64 / 1024.0 / scale.idle as f64,
        busy * 100.0,
    );
    served.cancel(&runs).await;
}

/// Measures the API while other runs are open.
async fn measure_api(served: &ServedRuns, scale: &ServiceScale) {
    let asked = stream::iter(0..scale.live).map(|_| served.run("bench:wait"));
    let runs: Vec<_> = asked.buffer_unordered(16).collect().await;
    join_all(runs.iter().map(|run| served.begun(run))).await;
    for (what, path) in [
        ("one run", format!("/api/v1/runs/{}", runs[0])),
        ("a page of runs", "/api/v1/runs".to_owned()),
        ("the agents", "/api/v1/ai/agents".to_owned()),
    ] {
        let mut took = vec![];
        for _ in 0..scale.requests / 8 {
            let asked = join_all((0..8).map(|_| async {
                let begun = Instant::now();
                let (status, _) = served.get(&path).await;
                assert_eq!(status, 200);
                begun.elapsed()
            }));
            took.extend(asked.await);
        }
        println!(
            "{what}, 8 at a time, beside {} live runs: {}",
            scale.live,
            format_percentiles(&mut took)
        );
    }
    served.cancel(&runs).await;
}

fn format_percentiles(took: &mut [Duration]) -> String {
    took.sort();
    let at = |percent: usize| took.get((took.len().saturating_sub(1) * percent).div_ceil(100));
    let shown = |percent| at(percent).map_or(f64::NAN, |took| took.as_secs_f64() * 1e3);
    format!("p50 {:.2} ms, p99 {:.2} ms", shown(50), shown(99))
}

fn conversation_body(agent: &str, text: &str) -> Value {
    json!({"agent": agent, "model": "none", "messages": [{"role": "user", "content": text}]})
}
