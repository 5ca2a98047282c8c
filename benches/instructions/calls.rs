//! Counts the instructions of a whole call: a gateway with all features runs in its own process, and its client and
//! provider run here. SHA-256 and signatures are left out, because valgrind has no SHA instructions and shows ten times
//! their cost.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::llm::budget::{Nanodollars, Tokens};
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;

use crate::profile::{FunctionCosts, read_costs};
use crate::threads::{ThreadClient, start_provider};

/// A kind of call, and the instructions of one call or of one frame of its stream.
pub(crate) struct CallCase {
    pub(crate) name: &'static str,
    pub(crate) figure: u64,
    pub(crate) lane: &'static str,
    pub(crate) is_stream: bool,
}

/// The argument before the settings of a gateway that is served in its own process.
pub(crate) const SERVED: &str = "served";

impl CallCase {
    /// Returns the gateway's instructions for one call or one frame.
    pub(crate) fn count(&self) -> Result<u64> {
        let (few, many) = if self.is_stream { (50, 1050) } else { (200, 1000) };
        Ok((self.run(many)? - self.run(few)?) / u64::from(many - few))
    }

    /// Returns the instructions of a gateway that serves this many calls, or one call with this many frames.
    fn run(&self, times: u32) -> Result<u64> {
        let directory = tempfile::tempdir()?;
        let counted = directory.path().join("callgrind.out");
        let (provider, read) = start_provider();
        let mut gateway = Command::new("valgrind")
            .arg("--tool=callgrind")
            .arg(format!("--callgrind-out-file={}", counted.display()))
            .arg(std::env::current_exe()?)
            .args([SERVED, self.lane, &provider.to_string()])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("running valgrind")?;
        let socket = directory.path().join("llm.sock");
        while UnixStream::connect(&socket).is_err() {
            ensure!(gateway.try_wait()?.is_none(), "the gateway has ended");
            thread::sleep(Duration::from_millis(20));
        }
        if self.is_stream {
            ThreadClient::connect(&socket, read).call(times);
        } else {
            thread::scope(|scope| {
                for _ in 0..CLIENTS {
                    let mut client = ThreadClient::connect(&socket, read.clone());
                    scope.spawn(move || (0..times / CLIENTS).for_each(|_| client.call(0)));
                }
            });
        }
        drop(gateway.stdin.take());
        ensure!(gateway.wait()?.success(), "the gateway has failed");
        Ok(sum_costs(&read_costs(&counted)?))
    }
}

/// Serves a run until the standard input ends.
pub(crate) fn serve(lane: &str, provider: &str, directory: &Path) -> Result<()> {
    let mut config = GatewayConfig::default();
    "run-1".clone_into(&mut config.identity.run);
    "acct-1".clone_into(&mut config.identity.account);
    config.listen.socket_path = directory.join("llm.sock");
    config.upstream.url = provider.parse()?;
    config.upstream.api_key = SecretString::new("sk-real");
    config.audit.path = Some(directory.join("audit.jsonl"));
    config.access_log = AccessLogDestination::File(directory.join("access.log"));
    config.server.lane = serde_json::from_value(lane.into())?;
    config.budget.max_turns = Some(u64::MAX);
    config.budget.max_total_tokens = Some(Tokens(u64::MAX / 2));
    config.budget.max_cost_usd = Some(Nanodollars(u64::MAX / 2));
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let stop = CancellationToken::new();
    let ended = stop.clone();
    thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut vec![]);
        ended.cancel();
    });
    let _context = runtime.enter();
    runtime.block_on(GatewayProcess::build_process(config)?.serve_until_cancelled(stop))
}

/// Returns the instructions of all functions but those of digests and signatures.
fn sum_costs(costs: &FunctionCosts) -> u64 {
    let counted = costs.iter().filter(|((_, name), _)| !name.starts_with("ring_core_"));
    counted.map(|(_, cost)| cost).sum()
}

/// The number of concurrent clients, each with its own connection.
const CLIENTS: u32 = 8;
