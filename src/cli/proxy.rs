//! `cogni-gateway proxy`: serves one run on a unix socket. It replaces the nginx container of earlier installations.

use std::convert::Infallible;
use std::future::pending;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use clap::{ArgMatches, Command};
use tracing::Instrument;

use super::flags;
use crate::gateway::admin::AdminSocket;
use crate::gateway::config::{GatewayConfig, SETTINGS};
use crate::gateway::process::{ChangeSource, GatewayProcess, RunManager, StopRequest, descriptors};

/// Builds the command, with one flag for each setting.
pub fn command() -> Command {
    Command::new("proxy")
        .about("Serve one run on a unix socket")
        .defer(|command| command.after_help(AFTER_HELP).args(flags::flags_for(SETTINGS.iter())))
}

/// Serves until SIGTERM, SIGINT or SIGQUIT, then lets open calls finish.
pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    flags::check_environment()?;
    let matches = matches.clone();
    serve_runs(move || load_config(&matches, |name| std::env::var(name).ok()))
}

/// Serves the configured runs until a signal ends the process. SIGHUP reads the configuration again.
pub(super) fn serve_runs(
    configure: impl Fn() -> anyhow::Result<GatewayConfig> + Clone + Send + Sync + 'static,
) -> anyhow::Result<ExitCode> {
    // The first configuration must be valid; a failed reload later keeps the one in force.
    let config = configure()?;
    config.check_budgets_durable()?;
    config.warn_of_searching_models();
    // Every connection needs descriptors, and the soft limit is often far below the hard limit.
    descriptors::raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // A signal that arrives before the process is ready must not end a half-started process.
        let signals = crate::gateway::process::ServerSignals::register_handlers()?;
        // The operator's socket is bound before everything else: if another process has it, this process must not touch
        // the runs' records.
        let admin = AdminSocket::bind_socket(&config.admin)?;
        let app = GatewayProcess::build_process(config)?;
        let stop = StopRequest::default();
        let (reload, runs) = (Arc::new(app.config_reloader()), app.run_manager().clone());
        // A signal and the operator's socket reload in the same way; the change is recorded with its source.
        let by = |by| {
            let (reload, configure) = (Arc::clone(&reload), configure.clone());
            move || reload(by, configure())
        };
        let signals =
            signals.handle_signals(stop.clone(), app.access_log(), by(ChangeSource::Signal));
        let span = app.log_span();
        let operators = serve_admin(admin.as_ref(), runs, by(ChangeSource::Admin));
        // `biased`: a finished server ends the process before a further signal is handled.
        tokio::select! {
            biased;
            served = app.serve_until_cancelled(stop.shutdown).instrument(span) => served?,
            never = signals => match never {},
            never = operators => match never {},
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Serves the operator's socket, if one is configured, as long as the runs are served: an operator may have to abort
/// calls while the process drains.
async fn serve_admin(
    admin: Option<&AdminSocket>,
    runs: RunManager,
    reload: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static,
) -> Infallible {
    if let Some(admin) = admin
        && let Err(error) = admin.serve_requests(runs, reload, pending()).await
    {
        // The runs are served on without the socket; the error is only logged.
        tracing::error!(%error, "cannot serve the operator's socket");
    }
    pending().await
}

/// Loads the configuration: the file, then the environment, then the flags.
pub fn load_config(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<GatewayConfig> {
    let config = flags::read_config(SETTINGS.iter(), matches, variable)?;
    if config.shared.is_some() {
        bail!("`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
    }
    config.validate()?;
    Ok(config)
}

const AFTER_HELP: &str = "\
A flag wins over its variable, a variable over the file. Arguments are visible to every process, so
a secret is given as a variable or as the path of its file.

SIGHUP reads the file again: policy, budget and prices change at once, or not at all.

Example:
  RUN_ID=run-1 BILLING_ACCOUNT_ID=acct-1 LITELLM_MASTER_KEY_FILE=/run/secrets/litellm \\
  cogni-gateway proxy --litellm-host litellm:4000 --max-turns 50 \\
    --audit-log-path /var/log/run-1.jsonl";
