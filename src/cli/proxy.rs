//! `cogni-gateway proxy`: serves one run, in place of the nginx container that did it before.

use std::convert::Infallible;
use std::future::pending;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use clap::{ArgMatches, Command};
use tracing::Instrument;

use super::flags;
use crate::admin::Admin;
use crate::app::{App, By, Runs, Stop, descriptors};
use crate::config::{Config, SETTINGS};

/// The command and its flags: one for each setting.
pub fn command() -> Command {
    Command::new("proxy")
        .about("Serve one run on a unix socket")
        .defer(|command| command.after_help(EXAMPLE).args(flags::of(SETTINGS.iter())))
}

/// Serves until SIGTERM, SIGINT or SIGQUIT, then lets open calls finish.
pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    flags::check_environment()?;
    let matches = matches.clone();
    serve(move || configure(&matches, |name| std::env::var(name).ok()))
}

/// Serves what is configured until a signal ends it; another signal configures it anew.
pub(super) fn serve(
    configure: impl Fn() -> anyhow::Result<Config> + Clone + Send + Sync + 'static,
) -> anyhow::Result<ExitCode> {
    let config = configure()?;
    config.check_budgets_last()?;
    config.warn_of_searching_models();
    descriptors::raise();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // A signal that comes before the process is ready must not end it half-way.
        let signals = crate::app::ServerSignals::register()?;
        // First of all else: who finds another process at its place must not touch the runs' records.
        let admin = Admin::bind(&config.admin)?;
        let app = App::build(config)?;
        let stop = Stop::default();
        let (reload, runs) = (Arc::new(app.reload()), app.runs().clone());
        let by = |by| {
            let (reload, configure) = (Arc::clone(&reload), configure.clone());
            move || reload(by, configure())
        };
        let signals = signals.obey(stop.clone(), app.access_log(), by(By::Signal));
        let span = app.log_span();
        let operators = operators(admin.as_ref(), runs, by(By::Admin));
        tokio::select! {
            biased;
            served = app.serve(stop.shutdown).instrument(span) => served?,
            never = signals => match never {},
            never = operators => match never {},
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Serves the operator's socket, where there is one, for as long as the runs are served: what is
/// draining may still have to be cut.
async fn operators(
    admin: Option<&Admin>,
    runs: Runs,
    reload: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static,
) -> Infallible {
    if let Some(admin) = admin
        && let Err(error) = admin.serve(runs, reload, pending()).await
    {
        tracing::error!(%error, "cannot serve the operator's socket");
    }
    pending().await
}

/// The configuration: the file, then the environment, then the flags.
pub fn configure(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Config> {
    let config = flags::read(SETTINGS.iter(), matches, variable)?;
    if config.shared.is_some() {
        bail!("`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
    }
    config.check()?;
    Ok(config)
}

const EXAMPLE: &str = "\
A flag wins over its variable, a variable over the file. Arguments are visible to every process, so
a secret is given as a variable or as the path of its file.

SIGHUP reads the file again: policy, budget and prices change at once, or not at all.

Example:
  RUN_ID=run-1 BILLING_ACCOUNT_ID=acct-1 LITELLM_MASTER_KEY_FILE=/run/secrets/litellm \\
  cogni-gateway proxy --litellm-host litellm:4000 --max-turns 50 \\
    --audit-log-path /var/log/run-1.jsonl";
