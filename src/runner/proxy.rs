//! A gateway in a container of its own: what it is given, and what its audit log tells while it serves.
//!
//! The upstream's key is in one file of the run's directory, which is mounted into that container and no other.

mod files;
mod records;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::directory::Directory;
use super::gateway::{Calls, Signals};
use crate::base::time::MAX_TIME;
use crate::budget::Tokens;
use crate::config::Config;
use crate::run::Identity;
use crate::sandbox::docker::Docker;
use crate::sandbox::docker::proxy::{self, Running};
use crate::sandbox::spec::{SOCKET_DIR, Stamp};
use crate::sandbox::{Error, spec};
use records::Records;

/// How a gateway's container is made.
#[derive(Clone, Debug)]
pub struct Settings {
    pub docker_socket: PathBuf,
    pub image: String,
    pub network: String,
    /// The settings that were given by flag or variable, but for secrets.
    pub given: Vec<(&'static str, String)>,
    /// The file with further settings.
    pub config_file: Option<PathBuf>,
}

/// Everything that the container needs is there; nothing is started.
pub(super) struct Proxy {
    docker_socket: PathBuf,
    spec: spec::docker::proxy::Proxy,
    stamp: Stamp,
    records: Records,
    deadline: Option<Instant>,
    drain: Duration,
}

impl Proxy {
    /// Writes the files that the container is given.
    pub(super) fn prepare(
        settings: Settings,
        config: &Config,
        directory: &Directory,
        stamp: &Stamp,
    ) -> anyhow::Result<Self> {
        if let Some(path) = &config.admin.socket_path {
            bail!("`ADMIN_SOCKET_PATH` is `{}`; a gateway in a container has none", path.display());
        }
        let given = files::write(&settings, config, directory)?;
        let mut env: std::collections::BTreeMap<_, _> =
            settings.given.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        env.extend(given.env);
        // A file of the run may have said more than flags and variables did.
        env.extend(told(config).map(|(name, value)| (name.to_owned(), value)));
        env.insert("SOCKET_PATH".to_owned(), format!("{SOCKET_DIR}/llm.sock"));
        env.insert("SOCKET_MODE".to_owned(), format!("{:04o}", config.listen.socket_mode));
        let required: Vec<_> = config.listen.require_uid.iter().map(u32::to_string).collect();
        if !required.is_empty() {
            env.insert("SOCKET_REQUIRE_UID".to_owned(), required.join(","));
        }
        let (uid, gid) = directory.proxy_user();
        let spec = spec::docker::proxy::Proxy {
            run: config.identity.run.clone(),
            image: settings.image,
            network: settings.network,
            uid,
            gid,
            env,
            socket_dir: directory.socket_dir(),
            mounts: given.mounts,
        };
        Ok(Self {
            docker_socket: settings.docker_socket,
            spec,
            stamp: stamp.clone(),
            records: Records::follow(given.audit)?,
            deadline: config.budget.deadline.map(|limit| Instant::now() + limit.min(MAX_TIME)),
            drain: config.drain_timeout,
        })
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Serves until `stop`, or until the container ends by itself; then nothing is left of it.
    pub(super) async fn serve(
        mut self,
        signals: &Signals,
        stop: CancellationToken,
    ) -> (anyhow::Result<()>, Calls) {
        let served = match Docker::connect(&self.docker_socket).await {
            Ok(docker) => {
                let served = Box::pin(self.live(&docker, signals, &stop)).await;
                let was_cut = matches!(served, Ok(false));
                proxy::tidy_up(&docker, &self.spec.run, &self.stamp, was_cut).await;
                served.map(|_| ())
            }
            Err(error) => Err(error.into()),
        };
        let read = self.records.read();
        (served.and(read), self.records.calls())
    }

    /// Whether it came to be started.
    async fn live(
        &mut self,
        docker: &Docker,
        signals: &Signals,
        stop: &CancellationToken,
    ) -> anyhow::Result<bool> {
        let start = Box::pin(proxy::start(docker, &self.spec, &self.stamp));
        let Some(running) = stop.run_until_cancelled(start).await.transpose()? else {
            return Ok(false);
        };
        tokio::select! {
            exit = running.wait() => Err(ended(&running, exit?).await.into()),
            failed = self.follow(signals) => failed,
            () = stop.cancelled() => {
                running.stop(self.drain + STOPPING).await?;
                Ok(true)
            }
        }
    }

    /// Tells what its log tells. Ends only with an error.
    async fn follow(&mut self, signals: &Signals) -> anyhow::Result<bool> {
        let ready = async {
            while !self.records.is_started() {
                sleep(PAUSE).await;
                self.records.read()?;
            }
            anyhow::Ok(())
        };
        timeout(START, ready)
            .await
            .context("the gateway's container does not begin to serve")??;
        signals.ready.cancel();
        loop {
            if self.records.is_exhausted() {
                signals.exhausted.cancel();
            }
            sleep(PAUSE).await;
            self.records.read()?;
        }
    }
}

/// Who the run is and what it may spend, in the gateway's own settings.
fn told(config: &Config) -> impl Iterator<Item = (&'static str, String)> {
    let Identity { run, attempt, account, trace, .. } = &config.identity;
    let budget = &config.budget;
    let count = |tokens: Option<Tokens>| tokens.map(|tokens| tokens.0.to_string());
    let seconds = budget.deadline.map(|limit| limit.as_secs().max(1));
    let told = [
        ("RUN_ID", Some(run.clone())),
        ("ATTEMPT", Some(attempt.clone())),
        ("BILLING_ACCOUNT_ID", Some(account.clone())),
        ("LITELLM_METADATA_JSON", serde_json::to_string(&config.identity.facts()).ok()),
        ("TRACEPARENT", trace.map(|trace| trace.to_string())),
        ("MAX_TURNS", budget.max_turns.map(|count| count.to_string())),
        ("MAX_TOTAL_TOKENS", count(budget.max_total_tokens)),
        ("MAX_INPUT_TOKENS", count(budget.max_input_tokens)),
        ("MAX_OUTPUT_TOKENS", count(budget.max_output_tokens)),
        ("MAX_COST_USD", budget.max_cost_usd.map(|most| most.to_string())),
        ("MAX_CONCURRENT", budget.max_concurrent.map(|count| count.to_string())),
        ("REQUESTS_PER_MINUTE", budget.requests_per_minute.map(|count| count.to_string())),
        ("TOKENS_PER_MINUTE", budget.tokens_per_minute.map(|count| count.to_string())),
        ("RUN_DEADLINE_SECONDS", seconds.map(|seconds| seconds.to_string())),
    ];
    told.into_iter().filter_map(|(name, value)| Some((name, value?)))
}

async fn ended(running: &Running, exit_code: i64) -> Error {
    let said = running.last_words().await;
    Error::Proxy(format!("exit code {exit_code}; it said: {said}"))
}

/// From its start to its first record; a busy machine takes some seconds to start a container.
const START: Duration = Duration::from_mins(1);

/// Between two looks at the log: of what a spent budget still costs, this is the longest part.
const PAUSE: Duration = Duration::from_millis(50);

/// From the end of its drain to its own.
const STOPPING: Duration = Duration::from_secs(5);
